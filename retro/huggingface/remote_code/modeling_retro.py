"""RETRO as a model of transformers: the project's own model, decoding and retrieval behind its interface.

    input_ids ─ rows without padding ─ Retro.hidden (neighbors given, or retrieved, or none) ─ logits, loss
    generate() ─ RetroCache ─ Decoder: at every chunk boundary the chunk just finished asks for neighbors ─ logits of the next token

Retrieval is OFF until `model.retrieve_from(…)`, `from_pretrained(…, datastore=…)` or `datastore` in config.json turns it ON. The
same weights serve both.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from retro.device import Placement
from retro.huggingface.remote_code.configuration_retro import RetroConfig
from retro.huggingface.remote_code.retrieval_retro import Retrieve, open_retrieval
from retro.inference.decoder import Decoder
from retro.model.mixture_of_experts import routing_loss
from retro.model.retro import Retro


class RetroCache:
    """What generation remembers: the `Decoder` with its rows, and how many columns of `input_ids` it has read."""

    is_compileable = False
    is_croppable = False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.num_read = decoder, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were read, padding included."""
        return self.num_read

    def read(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Go on by the columns of input_ids [B, n]; the logits of the next token, [B, V] float32."""
        rows = input_ids.cpu().numpy()
        if self.num_read == 0:
            starts = np.zeros(len(rows), dtype=np.int64)
            if attention_mask is not None:
                first, lengths = extents(attention_mask)
                if bool((first + lengths < attention_mask.shape[1]).any()):
                    raise ValueError(
                        "generation goes on at the last column: pad on the left (tokenizer.padding_side = 'left')."
                    )
                starts = first.cpu().numpy()
            logits = self.decoder.read([row[start:] for row, start in zip(rows, starts, strict=True)])
        else:
            for column in rows.T:  # the decoder goes on by a token at a time
                logits = self.decoder.read(list(column[:, None]))
        self.num_read += input_ids.shape[1]
        return logits.clone()  # one that may be changed: the decoder's was made in inference mode

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on from these rows, of which one may stand there several times (beam search)."""
        self.decoder.keep(beam_idx.tolist())
        self.decoder.rows = [replace(row, found=list(row.found)) for row in self.decoder.rows]


class RetroForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. `forward` and `generate` retrieve where `retrieve_from` has named a source."""

    config_class = RetroConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules: ClassVar = ["Retro"]
    _supports_sdpa = True
    _is_stateful = True  # what a chunk has retrieved cannot be taken back: no assisted generation
    # In a narrower type the products are taken, under autocast, and the residual stream stays as it is: as in training.
    _keep_in_fp32_modules_strict: ClassVar = [
        "embedding", "position_embedding", "chunk_embedding", "norm", "query_norm", "q_norm", "k_norm", "smear",
        "router", "content_bias", "distance_bias",
    ]  # fmt: skip

    def __init__(self, config: RetroConfig) -> None:
        super().__init__(config)
        self.model = Retro(config.settings)
        self._retrieve: Retrieve | None = None
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`; `datastore` and `k` are what `retrieve_from` takes.

        Raises:
            ValueError: the folder's weights are not those of this model, or as `retrieve_from`.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                raise ValueError(f"the weights do not fit config.json: {kind} {sorted(map(str, info[kind]))[:5]}.")
        if model.config.datastore is not None:
            model.retrieve_from(model.config.datastore, model.config.k)
        return (model, info) if wants_info else model

    def retrieve_from(self, source: str | None, k: int | None = None) -> "RetroForCausalLM":
        """Turn retrieval ON, or OFF with None; returns the model.

        Args:
            source: URL of a `retro serve` (http://…), or folder or URL of a datastore, for which `retro` must be installed.
            k: neighbors of each chunk; None = `config.k`.

        Raises:
            ValueError: the model reads no neighbors, the datastore has another tokenizer or chunk length, or there is none.
            ImportError: `retro` is not installed.
        """
        settings = self.model.settings
        if source is not None and not settings.retrieval.cca_layers:
            raise ValueError("this model is a plain decoder: it has no layers that read neighbors.")
        self._retrieve = (
            None
            if source is None
            else open_retrieval(
                str(source),
                self.config.k if k is None else k,
                settings,
                self.config.num_ids,
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
        past_key_values: RetroCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of every next token.

        Args:
            input_ids: int64 [B, T]; a row is one document, which begins with the token that begins documents. A chunk is every m
                tokens from its first one on, padding apart.
            attention_mask: [B, T], 0 where there is padding, to the left or to the right.
            labels: int64 [B, T], usually `input_ids` themselves: the loss is that of `labels[:, 1:]`. -100 is left out, and so is
                what stands on or right after padding.
            neighbors: int64 [B, T // m, K, R], of the rows' chunks, whose first m tokens stand where padding on the left ends;
                None = what retrieval finds, where it is ON.
            neighbor_lengths: int64 [B, T // m, K], how many of the R tokens are real; None = all.
            past_key_values: from a call with `use_cache` and `logits_to_keep = 1`, as `generate` makes them.
            use_cache: return one too; with `logits_to_keep = 1`, for the last token's logits.
            logits_to_keep: of so many last tokens only; 0 = all.
            return_dict: False = a tuple.
            kwargs: `num_items_in_batch`, what the loss is divided by.

        Raises:
            ValueError: padding in the midst of a row, or something asked for that there is not.
        """
        if input_ids is None:
            raise ValueError(
                "input_ids are missing: chunks are made of tokens, so inputs_embeds cannot take their place."
            )
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            given = kwargs.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name}: this model has nothing of the kind.")
        cached = past_key_values is not None or (use_cache and isinstance(logits_to_keep, int) and logits_to_keep == 1)
        if cached:
            if labels is not None or neighbors is not None:
                raise ValueError(
                    "labels and neighbors are for whole sequences: leave use_cache and past_key_values out."
                )
            cache = past_key_values if past_key_values is not None else RetroCache(self._decoder())
            logits, loss = cache.read(input_ids, attention_mask)[:, None], None
        else:
            cache = None
            logits, loss = self._whole(
                input_ids, attention_mask, labels, neighbors, neighbor_lengths, logits_to_keep, kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
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
            places = torch.arange(num_tokens, device=tokens.device)
            tokens = tokens.gather(
                1, (places + starts[:, None]).clamp(max=num_tokens - 1)
            )  # what follows a row means nothing
            shift = (places - starts[:, None]).clamp(min=0)
        if neighbors is None and self._retrieve is not None:
            neighbors, neighbor_lengths = self._retrieved(tokens, lengths)
        with self._placement().autocast():
            m = self.model.settings.chunk_length
            of_chunks = (lengths[:, None] - torch.arange(0, num_tokens, m, device=tokens.device)).clamp(0, m)
            hidden, routing = self.model.hidden_and_routing(tokens, None, neighbors, neighbor_lengths, of_chunks)
            if shift is not None:
                hidden = hidden.gather(1, shift[..., None].expand_as(hidden))
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.logits(hidden if labels is not None else hidden[:, kept])
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
        """Neighbors [B, U, K, R] and lengths [B, U, K] of the complete chunks of rows [B, T]; what is not complete has none."""
        m = self.model.settings.chunk_length
        num_chunks = tokens.shape[1] // m
        chunks = tokens[:, : num_chunks * m].unflatten(1, (num_chunks, m))
        complete = torch.arange(num_chunks, device=tokens.device) < (lengths // m)[:, None]  # [B, U]
        if not bool(complete.any()):
            return None, None
        assert self._retrieve is not None
        found = self._retrieve(chunks[complete].cpu().numpy())
        neighbors, neighbor_lengths = (tokens.new_zeros(*complete.shape, *each.shape[1:]) for each in found)
        for whole, each in zip((neighbors, neighbor_lengths), found, strict=True):
            whole[complete] = torch.from_numpy(each).to(tokens)
        return neighbors, neighbor_lengths

    def _placement(self) -> Placement:
        """Device, and the type of the matrices: what they are multiplied in."""
        weight = next(module.weight for module in self.model.modules() if isinstance(module, nn.Linear))
        return Placement(weight.device, weight.dtype)

    # ---------------------------------------------------------------------------------------------------- generation

    def _decoder(self) -> Decoder:
        if self.model.embedding.weight.dtype != torch.float32:
            raise ValueError(
                "generation keeps embeddings and norms in float32: load the model with from_pretrained(…, dtype=torch.bfloat16) "
                "instead of converting all of it."
            )
        return Decoder(self.model, self._placement(), self.config.context, self._retrieve)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: RetroCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `forward` is given: the columns that were not read yet."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        for name in ("use_cache", "logits_to_keep", "neighbors", "neighbor_lengths"):
            if kwargs.get(name) is not None:
                inputs[name] = kwargs[name]
        if past_key_values is not None:
            num_read = past_key_values.get_seq_length()
            if input_ids.shape[1] <= num_read:
                raise ValueError(
                    f"past_key_values has read {num_read} tokens: give the whole sequence, they and what is new."
                )
            inputs |= {"input_ids": input_ids[:, num_read:], "past_key_values": past_key_values}
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`forward` makes its own."""
        return False

    @staticmethod
    def _reorder_cache(past_key_values: RetroCache, beam_idx: Tensor) -> RetroCache:
        past_key_values.reorder_cache(beam_idx)
        return past_key_values

    # ----------------------------------------------------------------------------------------------- what it is made of

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `Retro` draws its own weights, and `from_pretrained` refuses what lacks some."""

    def get_input_embeddings(self) -> nn.Embedding:
        """The decoder's table, which is the output layer too where `tied_embeddings` says so."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another table of the same size."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer; None where it is the table."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refused: the encoder has a table too, and the datastore its tokens."""
        raise ValueError("the vocabulary is the datastore's: extend both with `retro extend-vocabulary`.")


def extents(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First column and length of each row's tokens in a mask [B, T], int64 [B] each.

    Raises:
        ValueError: a row has none, or padding between them.
    """
    mask = attention_mask.bool()
    starts, lengths = mask.int().argmax(1), mask.sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    whole = (places >= starts[:, None]) & (places < (starts + lengths)[:, None])
    if mask.ndim != 2 or not torch.equal(whole, mask) or not bool(lengths.all()):
        raise ValueError("attention_mask: every row must have tokens, and padding only before or after them.")
    return starts, lengths
