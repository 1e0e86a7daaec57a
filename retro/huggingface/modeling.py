"""RETRO as a model of transformers, with this project's model, decoding and retrieval.

    input_ids ─ rows without padding ─ Retro.hidden (neighbors given, retrieved, or none) ─ logits, loss
    generate() ─ RetroCache ─ Decoder, which finds neighbors of every completed chunk ─ logits of the next token

Retrieval is OFF until `model.retrieve_from(…)`, `from_pretrained(…, datastore=…)` or `datastore` in config.json turns
it ON. ON and OFF use the same weights.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import check_version
from retro.copying.network_file import LATER
from retro.copying.rows import Row
from retro.device import Placement
from retro.huggingface.retrieval import RetrieveNeighbors, open_retrieval
from retro.inference.decoder import Decoder
from retro.model.mixture_of_experts import routing_loss
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, from_json

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""How this version of transformers names a cache: `cache` from 5.24 on."""


class RetroConfig(PretrainedConfig):
    """Settings of the model, metadata of the checkpoint, and the default source of neighbors.

    Attributes:
        model_settings: `ModelSettings`, with its sections.
        num_ids: number of the tokenizer's ids; further rows of the embeddings are unused.
        context: context length in generation, a multiple of the chunk length.
        checkpoint: step, tokens, settings and fingerprints of the training run, and a checksum of its
            weights (`weights`).
        datastore: source for `retrieve_from`; None = retrieval OFF.
        k: number of neighbors of each chunk.
    """

    model_type = "retro"

    def __init__(
        self,
        model_settings: dict[str, Any] | None = None,
        num_ids: int = 0,
        context: int = 2048,
        checkpoint: dict[str, Any] | None = None,
        datastore: str | None = None,
        k: int = 2,
        **kwargs: Any,
    ) -> None:
        if checkpoint:  # transformers also makes configurations without
            check_version(Path(kwargs.get("name_or_path") or "config.json"), checkpoint.get("format_version"))
        self.model_settings = asdict(from_json(model_settings or {}))
        self.num_ids = num_ids or self.model_settings["vocab_size"]
        self.context = context
        self.checkpoint = checkpoint or {}
        self.datastore = datastore
        self.k = k
        kwargs["tie_word_embeddings"] = self.model_settings["tied_embeddings"]
        super().__init__(**kwargs)

    @property
    def settings(self) -> ModelSettings:
        """`model_settings` as `ModelSettings`."""
        return from_json(self.model_settings)

    # Standard names that transformers and related libraries use.
    vocab_size = property(lambda self: self.model_settings["vocab_size"])
    hidden_size = property(lambda self: self.model_settings["d_model"])
    intermediate_size = property(lambda self: self.model_settings["d_ffw"])
    num_hidden_layers = property(lambda self: self.model_settings["num_layers"])
    num_attention_heads = property(lambda self: self.settings.attention.num_heads)
    num_key_value_heads = property(lambda self: self.settings.attention.kv_heads)
    head_dim = property(lambda self: self.settings.attention.head_dim)
    max_position_embeddings = property(lambda self: self.context)  # lm-eval truncates longer requests


class RetroCache:
    """State of a generation: the `Decoder` with its rows, and the number of columns of `input_ids` that it has read."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)  # by layer

    def __init__(self, decoder: Decoder, retrieve: RetrieveNeighbors | None) -> None:
        self.decoder, self.retrieve, self.num_read = decoder, retrieve, 0
        self.rows: list[Row] = []  # in the order of `input_ids`

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns read, padding included."""
        return self.num_read

    def read(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Read the columns of input_ids [B, n] and return the logits of the next token, [B, V] float32."""
        tokens = input_ids.cpu().numpy()
        if self.num_read == 0:
            starts = np.zeros(len(tokens), dtype=np.int64)
            if attention_mask is not None:
                first, lengths = extents(attention_mask)
                if bool((first + lengths < attention_mask.shape[1]).any()):
                    raise ValueError(
                        "generation continues at the last column, so pad on the left (tokenizer.padding_side = 'left')."
                    )
                starts = first.cpu().numpy()
            prompts = [row[start:] for row, start in zip(tokens, starts, strict=True)]
            self.rows = [self.decoder.add(prompt, self.retrieve) for prompt in prompts]
        else:
            for column in tokens.T[:-1]:  # the decoder appends one token at a time
                self._append(column)
                self.decoder.read(self.rows)
            self._append(tokens[:, -1])
        self.num_read += input_ids.shape[1]
        return self.decoder.read(self.rows).clone()  # callers may modify it; it was created in inference mode

    def _append(self, column: np.ndarray) -> None:
        for row, token in zip(self.rows, column.tolist(), strict=True):
            self.decoder.append(row, token)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with these rows; a row may occur several times (beam search)."""
        rows = list[Row]()
        for index in beam_idx.tolist():
            row = self.rows[index]
            rows.append(self.decoder.copy(row) if row in rows else row)
        for row in self.rows:
            if row not in rows:
                self.decoder.remove(row)
        self.rows = rows


class RetroForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. `forward` and `generate` retrieve if `retrieve_from` has set a source."""

    config_class = RetroConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules: ClassVar = ["Retro"]
    _supports_sdpa = True
    _is_stateful = True  # retrieved neighbors cannot be undone, so there is no assisted generation
    # As in training, autocast reduces only matrix products, and the residual stream stays in float32.
    _keep_in_fp32_modules_strict: tuple[str, ...] = (
        "embedding", "position_embedding", "chunk_embedding", "norm", "query_norm", "q_norm", "k_norm", "router",
        "content_bias", "distance_bias", "copy_head",
    )  # fmt: skip

    def __init__(self, config: RetroConfig) -> None:
        super().__init__(config)
        self.model = Retro(config.settings)
        self._retrieve: RetrieveNeighbors | None = None
        parts = {part for name, _ in self.named_parameters() for part in name.split(".")}
        # transformers 4 refuses names of parts that this model does not have.
        self._keep_in_fp32_modules_strict = tuple(part for part in self._keep_in_fp32_modules_strict if part in parts)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Like `PreTrainedModel.from_pretrained`; `datastore` and `k` are passed to `retrieve_from`.

        Raises:
            ValueError: the folder's weights do not fit config.json, or see `retrieve_from`.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for name in [name for name in info["missing_keys"] if name.endswith(LATER)]:  # written by an earlier version
            model.get_parameter(name).data.zero_()
            info["missing_keys"].remove(name)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                raise ValueError(f"the weights do not fit config.json: {kind} {sorted(map(str, info[kind]))[:5]}.")
        if model.config.datastore is not None:
            model.retrieve_from(model.config.datastore, model.config.k)
        return (model, info) if wants_info else model

    def retrieve_from(self, source: str | None, k: int | None = None) -> "RetroForCausalLM":
        """Turn retrieval ON, or OFF with None; returns the model.

        Args:
            source: URL of a `retro serve` (http://…), or folder or URL of a datastore.
            k: number of neighbors of each chunk; None = `config.k`.

        Raises:
            ValueError: the model reads no neighbors, or the datastore is missing or has another tokenizer or chunk
                length.
        """
        settings = self.model.settings
        if source is not None and not settings.retrieves:
            raise ValueError("this model is a plain decoder without layers that read neighbors.")
        self._retrieve = (
            None
            if source is None
            else open_retrieval(
                str(source),
                self.config.k if k is None else k,
                settings,
                self.config.num_ids,
                self.config.checkpoint.get("tokenizer", ""),
            )
        )
        return self

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        neighbors: Tensor | None = None,
        neighbor_lengths: Tensor | None = None,
        cache: RetroCache | None = None,
        past_key_values: RetroCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute the logits of the next tokens.

        Args:
            input_ids: int64 [B, T]; a row is one document, beginning with the beginning-of-document token. Chunks are
                counted from the first token after the padding.
            attention_mask: [B, T], 0 for padding, which can be on the left or on the right.
            labels: int64 [B, T], usually `input_ids`: the loss is over `labels[:, 1:]`. It ignores -100, and positions
                on or right after padding.
            neighbors: int64 [B, T // m, K, R], neighbors of the rows' chunks; the first chunk begins after the padding
                on the left. None = found by search if retrieval is ON.
            neighbor_lengths: int64 [B, T // m, K], number of the R tokens that are not padding; None = all.
            cache: from a call with `use_cache` and `logits_to_keep = 1`, as in `generate`.
            past_key_values: its name before transformers 5.24.
            use_cache: also return a cache; requires `logits_to_keep = 1`.
            logits_to_keep: number of last tokens to compute logits of; 0 = all.
            return_dict: False = return a tuple.
            kwargs: `num_items_in_batch`, the divisor of the loss.

        Raises:
            ValueError: a row has padding between its tokens, or an argument is not supported.
        """
        if input_ids is None:
            raise ValueError("input_ids are missing. Chunks consist of tokens, so inputs_embeds are not supported.")
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            given = kwargs.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name} is not supported by this model.")
        cache = past_key_values if cache is None else cache
        if cache is not None or (use_cache and isinstance(logits_to_keep, int) and logits_to_keep == 1):
            if labels is not None or neighbors is not None:
                raise ValueError(f"labels and neighbors are for whole sequences: leave use_cache and {_CACHE} out.")
            if cache is None:
                cache = RetroCache(self._decoder(), self._retrieve)
            logits, loss = cache.read(input_ids, attention_mask)[:, None], None
        else:
            logits, loss = self._whole(
                input_ids, attention_mask, labels, neighbors, neighbor_lengths, logits_to_keep, kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})
        return output.to_tuple() if return_dict is False else output

    def _whole(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        neighbors: Tensor | None,
        neighbor_lengths: Tensor | None,
        logits_to_keep: int | Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and loss of whole sequences; the arguments are those of `forward`."""
        num_rows, num_tokens = input_ids.shape
        tokens, shift, lengths = input_ids, None, torch.full((num_rows,), num_tokens, device=input_ids.device)
        if attention_mask is not None and not bool(attention_mask.all()):
            starts, lengths = extents(attention_mask)
            columns = torch.arange(num_tokens, device=tokens.device)
            shifted = (columns + starts[:, None]).clamp(max=num_tokens - 1)
            tokens = tokens.gather(1, shifted)  # tokens after the end of a row are padding
            shift = (columns - starts[:, None]).clamp(min=0)
        if neighbors is None and self._retrieve is not None:
            neighbors, neighbor_lengths = self._retrieved(tokens, lengths)
        with self._placement().autocast():
            m = self.model.settings.chunk_length
            of_chunks = (lengths[:, None] - torch.arange(0, num_tokens, m, device=tokens.device)).clamp(0, m)
            inputs = Inputs(tokens, None, neighbors, neighbor_lengths, of_chunks)
            hidden, routing = self.model.hidden(inputs)
            copies = self.model.copy_head is not None
            if copies:  # needs the activations of all tokens
                hidden = self.model.mix(self.model.logits(hidden), inputs)
            if shift is not None:
                hidden = hidden.gather(1, shift[..., None].expand_as(hidden))
            last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = hidden if labels is not None else hidden[:, last]
            if not copies:
                logits = self.model.logits(logits)
        if labels is None:
            return logits, None
        if shift is not None:
            assert attention_mask is not None
            real = attention_mask.bool()
            labels = labels.masked_fill(~(real & nn.functional.pad(real[:, :-1], (1, 0))), -100)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if routing is not None and self.training:
            loss = loss + routing_loss(routing, self.model.settings)
        return logits, loss

    def _retrieved(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return neighbors [B, U, K, R] and lengths [B, U, K] of the complete chunks of rows [B, T]; incomplete chunks
        have none."""
        m = self.model.settings.chunk_length
        num_chunks = tokens.shape[1] // m
        chunks = tokens[:, : num_chunks * m].unflatten(1, (num_chunks, m))
        complete = torch.arange(num_chunks, device=tokens.device) < (lengths // m)[:, None]  # [B, U]
        if not bool(complete.any()):
            return None, None
        assert self._retrieve is not None
        read = self._retrieve(chunks[complete].cpu().numpy())
        neighbors, neighbor_lengths = (tokens.new_zeros(*complete.shape, *part.shape[1:]) for part in read)
        for whole, part in zip((neighbors, neighbor_lengths), read, strict=True):
            whole[complete] = torch.from_numpy(part).to(tokens)
        return neighbors, neighbor_lengths

    def _placement(self) -> Placement:
        """Return the device, and the dtype of the matrix products."""
        weight = next(module.weight for module in self.model.modules() if isinstance(module, nn.Linear))
        return Placement(weight.device, weight.dtype)

    # ---------------------------------------------------------------------------------------------------- generation

    def _decoder(self) -> Decoder:
        if self.model.embedding.weight.dtype != torch.float32:
            raise ValueError(
                "generation requires embeddings and norms in float32: load the model with from_pretrained(…, dtype=torch.bfloat16) "
                "instead of converting all its weights."
            )
        return Decoder(self.model, self._placement(), self.config.context)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward`: the columns that have not been read yet."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        for name in ("use_cache", "logits_to_keep", "neighbors", "neighbor_lengths"):
            if kwargs.get(name) is not None:
                inputs[name] = kwargs[name]
        if (cache := kwargs.get(_CACHE)) is not None:
            num_read = cache.get_seq_length()
            if input_ids.shape[1] <= num_read:
                raise ValueError(f"{_CACHE} has read {num_read} tokens; input_ids must have these and the new tokens.")
            inputs |= {"input_ids": input_ids[:, num_read:], "cache": cache}
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: `forward` creates its own cache."""
        return False

    @staticmethod
    def _reorder_cache(cache: RetroCache, beam_idx: Tensor) -> RetroCache:
        cache.reorder_cache(beam_idx)
        return cache

    # ------------------------------------------------------------------------------------------------------- weights

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `Retro` initializes its weights, and `from_pretrained` raises an error if weights are missing."""

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the decoder's embedding, which is also the output layer with `tied_embeddings`."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding with one of the same size."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the output layer; None with `tied_embeddings`."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Raise ValueError: the encoder's embedding and the datastore would have to change too."""
        raise ValueError(
            "the model shares its vocabulary with the datastore; extend both with `retro extend-vocabulary`."
        )


def extents(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column and the number of each row's tokens in a mask [B, T], int64 [B] each.

    Raises:
        ValueError: a row has no tokens, or padding between tokens.
    """
    mask = attention_mask.bool()
    starts, lengths = mask.int().argmax(1), mask.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    whole = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    if mask.ndim != 2 or not torch.equal(whole, mask) or not bool(lengths.all()):
        raise ValueError("attention_mask: every row must have tokens, and padding only before or after them.")
    return starts, lengths
