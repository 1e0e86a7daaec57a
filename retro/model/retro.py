"""RETRO, in the order of section 2 of Borgeaud et al. (2022), arXiv 2112.04426.

    tokens ─ embed ─ [ self-attention ─ (chunked cross-attention at layers P) ─ feed-forward ] × L ─ norm ─ logits
                             │ min(P): activations of chunk u          ▲
                             ▼                                         │ read from the last token of chunk u on
    neighbors of chunk u ─ bidirectional encoder ──────────────────────┘ encoded once

Notable:
    - Retrieval OFF uses the same weights with `neighbors=None`.
    - RMSNorm before each block, no biases, rotary positions by default; the paper has Transformer-XL positions.
    - A decoder of another family can have LayerNorm, biases and more. Its encoder and cross-attention keep the
      defaults.
    - One class implements every attention (`attention.py`). There is no loop over chunks.
    - No buffers: a model created on the meta device needs only `to_empty` and `initialize`.
    - RETROfit trains `encoder.*` and `cross.*` and freezes the rest.
    - Meshes, shards, optimizers and caches are applied from outside (`parallel/`, `inference/decoder.py`).

Letters of the shape comments:
    B batch    B' first rows of a batch, those with neighbors    T tokens    D decoder width    V vocabulary
    U complete chunks (T // m)    M = m, tokens of a chunk
    K neighbors of a chunk    R tokens of a neighbor (r)         E encoder width
    N batch of an attention      Q queries    S keys    H heads    C features of a head    X distances
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.batch.loss import TokenLosses, token_losses
from retro.batch.masks import document_positions, some_key
from retro.copying.head import CopyHead
from retro.copying.model import CopyingModel
from retro.copying.sources import sources_of
from retro.model.attention import Attention, PerHead
from retro.model.encoder import Encoder
from retro.model.feed_forward import FEED_FORWARD, affine, linear
from retro.model.layer_pass import CrossReads, LayerPass
from retro.model.mixture_of_experts import ExpertLinear, Experts, Queues
from retro.model.positions import Positions
from retro.model.reader import ReadingAttention, StoredKeysValues, neighbor_positions, neighbor_window
from retro.model.reads import EncodedNeighbors, PackedNeighbors, WindowNeighbors
from retro.model.residual_block import NORMS, PreNorm, Residual, RoutedResidual, rms_norm
from retro.model_settings import ModelSettings

# ------------------------------------------------------------------------- chunked cross-attention (sections 2.3-2.4)


class ChunkedCrossAttention(nn.Module):
    """Attention of the last token of chunk u and the first m - 1 tokens of chunk u + 1 to the neighbors of chunk u.

        tokens      0 . . . m-1  m . . . . 2m-1  2m . . .
        chunks      └─── 0 ───┘  └──── 1 ────┘  └── 2 …        All tokens of chunk u were used to retrieve its neighbors,
        windows               └─── 0 ────┘└─── 1 ────┘         so only its last token and later ones may read them.

    Windows are the sequence shifted by m - 1 tokens and split every m tokens: no copies, no loop. Token i of a window
    and token i' of a neighbor have distance i - i' + m - 1. One softmax covers all tokens of all K neighbors.
    """

    def __init__(self, attention: Attention, chunk_length: int) -> None:
        super().__init__()
        self.attention = attention
        self.chunk_length = chunk_length

    def forward(self, x: Tensor, neighbors: EncodedNeighbors | WindowNeighbors | None) -> Tensor:
        """Attend from x [B, T, D] to neighbors: [B, T, D], exactly 0 for tokens without neighbors.

        Args:
            x: decoder activations, [B, T, D].
            neighbors: of whole sequences, or of the one window that the tokens of each row belong to; None = there are
                none.
        """
        if neighbors is None:
            return torch.zeros_like(x)
        if isinstance(neighbors, WindowNeighbors):
            return self.attend(self.attention.project_queries(x), neighbors)
        return self.attend_in_windows(x, neighbors)

    def attend_in_windows(self, x: Tensor, neighbors: EncodedNeighbors) -> Tensor:
        """Attend from whole sequences x [B, T, D] to the neighbors of all their chunks: [B, T, D]."""
        positions, encoded, mask = neighbors
        m, (num_rows, num_chunks) = self.chunk_length, encoded.shape[:2]
        # From the first reader on, the tokens that read the neighbors of a chunk follow each other: m tokens are a
        # window.
        q = self.attention.project_queries(x[:num_rows, m - 1 :])  # [B', T - m + 1, H, C]
        num_readers = q.shape[1]  # the end of the sequence cuts the last window short
        q = F.pad(q, (0, 0, 0, 0, 0, num_chunks * m - num_readers))
        # A window is a row of the attention, with the neighbors of its chunk, which were encoded for this.
        windows = rearrange(q, "b (u m) h c -> (b u) m h c", m=m)
        k, v = self.keys_values(encoded.flatten(0, 1), positions)
        read = self.attend(windows, WindowNeighbors(positions, k, v, None if mask is None else mask.flatten(0, 1)))
        read = rearrange(read, "(b u) m d -> b (u m) d", u=num_chunks)
        # The first m - 1 tokens read nothing, and neither do the rows without neighbors.
        return F.pad(read[:, :num_readers], (0, 0, m - 1, 0, 0, len(x) - num_rows))

    def keys_values(self, encoded: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Encoded neighbors of some chunks [N, K, R, E] to keys and values [N, K·R, H, C]."""
        # One softmax for all neighbors of a chunk, so their tokens are one row of keys.
        k, v = self.attention.project_keys_values(encoded.flatten(1, 2))
        return positions.finish_keys(k), v

    def attend(self, q: Tensor, neighbors: WindowNeighbors) -> Tensor:
        """Queries of windows [N, Q, H, C] read keys and values of their chunks' neighbors: [N, Q, D]."""
        positions, k, v, mask, distance_keys = neighbors
        if mask is None:
            return self.attention.attend(q, positions, k, v, distance_keys=distance_keys)
        mask = mask.flatten(1)[:, None, None]  # [N, 1, 1, K·R]
        # A softmax over no key is NaN, in the gradient too. Chunks without a neighbor read any tokens, then nothing.
        read = self.attention.attend(q, positions, k, v, some_key(mask), distance_keys=distance_keys)
        return read.masked_fill(~mask.any(-1), 0.0)


# --------------------------------------------------------------------------------------- decoder (section 2.4, alg. 1)


class Layer(NamedTuple):
    """The blocks of a layer, in the order in which they run, with the name of its attention and feed-forward: 0, 1 …"""

    name: str
    attention: Residual[Attention]
    cross: Residual[ChunkedCrossAttention] | None
    feed_forward: Residual[nn.Module] | RoutedResidual[Experts]


def _self_attention(settings: ModelSettings) -> Residual[Attention]:
    heads = settings.attention
    block = (ReadingAttention if settings.decoder_reads else Attention)(
        settings.d_model,
        settings.d_model,
        heads.num_heads,
        heads.head_dim,
        heads.positions,
        num_kv_heads=heads.kv_heads,
        smeared_tokens=heads.smeared_tokens,
        prefix_tokens=heads.prefix_tokens,
        qk_norm=heads.qk_norm,
        scale=settings.attention_scale(heads.head_dim),
        bias=heads.bias,
        norm_eps=settings.norm_eps,
    )
    return Residual(_norm(settings), block, settings.dropout)


def _cross_attention(settings: ModelSettings) -> Residual[ChunkedCrossAttention]:
    heads = settings.attention
    attention = Attention(
        settings.d_model,
        settings.encoder.d_model,
        heads.num_heads,
        heads.head_dim,
        settings.retrieval_positions,
        num_kv_heads=heads.kv_heads,
        qk_norm=heads.qk_norm,
        scale=settings.attention_scale(heads.head_dim),
    )
    block = ChunkedCrossAttention(attention, settings.chunk_length)
    return Residual(rms_norm(settings.d_model), block, settings.dropout)


def _feed_forward(settings: ModelSettings, layer: int) -> Residual[nn.Module] | RoutedResidual[Experts]:
    """Experts or a dense block, by the number of the layer from 1."""
    if layer in settings.expert_layers:
        return RoutedResidual(_norm(settings), Experts(settings), settings.dropout)
    matrix = affine if settings.feed_forward_bias else linear
    block = FEED_FORWARD[settings.activation](settings.d_model, settings.d_ffw, matrix)
    return Residual(_norm(settings), block, settings.dropout)


def _norm(settings: ModelSettings) -> nn.Module:
    return NORMS[settings.norm](settings.d_model, eps=settings.norm_eps)


class Retro(CopyingModel):
    """The language model. With empty `cca_layers` it is a plain decoder, the paper's baseline."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        for key in ("vocab_size", "chunk_length"):
            if not getattr(settings, key):
                raise InputError(f"model.{key} is 0: set it, or take the datastore's with `datastore_fit.fit_to`.")
        self.settings = settings
        assert not (settings.decoder_reads and settings.retrieval.cca_layers), "resolved settings have one reader"
        width = settings.d_model
        self.base_width = settings.mup_base_width if settings.init == "mup" else width
        layers = range(settings.num_layers)
        self.embedding = nn.Embedding(settings.vocab_size, width)
        if settings.attention.positions == "learned":
            self.position_embedding = nn.Embedding(settings.attention.max_positions, width)
        if settings.retrieval_positions == "learned":
            self.chunk_embedding = nn.Embedding(settings.chunk_length, width)
        # By number, since with pipeline parallelism a device holds only some of the layers; and by kind, since the
        # names of parameters are those in files, of adapters and of metrics, and their order decides which random
        # numbers they get.
        self.attention = nn.ModuleDict({str(n): _self_attention(settings) for n in layers})
        self.feed_forward = nn.ModuleDict({str(n): _feed_forward(settings, n + 1) for n in layers})
        self.cross = nn.ModuleDict({str(layer): _cross_attention(settings) for layer in settings.retrieval.cca_layers})
        if settings.retrieval.cca_layers:
            self.encoder = Encoder(settings)
        self.norm = _norm(settings)
        self.head = None if settings.tied_embeddings else nn.Linear(width, settings.vocab_size, bias=False)
        copies = settings.copy_head
        self.copy_head = CopyHead(copies.names, settings.chunk_length, sources_of(copies)) if copies.names else None
        # A faster product with `output_weight`, from `inference/packed_weights.py`.
        self.packed_output: Callable[[Tensor], Tensor] | None = None
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw all weights. A model created on the meta device needs this after `to_empty`.

        Matrices preserve variance (std 1/sqrt(fan-in)) at any width. Outputs of blocks are scaled down by the number of
        blocks, so the variance of the residual stream does not grow with depth. Embeddings enter both streams about as
        large as the outputs of blocks: with a std of 0.02 (GPT-2's choice) they would be far smaller than the output of
        the first block, and copying from neighbors took more than twice as many steps to learn.

        `init` = mup changes only the std of the output layer here; see `training/optimizer.py`.
        """
        num_blocks = 2 * self.settings.num_layers + len(self.settings.retrieval.cca_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                # The decoder's rows are small because they are the output layer too; `embed` multiplies them.
                nn.init.normal_(module.weight, std=1.0 if name.startswith("encoder.") else 0.02)
            elif isinstance(module, nn.Linear | ExpertLinear):
                into_stream = name.endswith((".o_proj", ".down_proj"))
                fan_in = self.base_width if module is self.head else module.in_features
                nn.init.normal_(module.weight, std=(fan_in * (num_blocks if into_stream else 1)) ** -0.5)
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, CopyHead):
                module.initialize()
            elif isinstance(module, PerHead):
                nn.init.zeros_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        for layer in self.layers:  # after all other weights are drawn
            if self.settings.attention.smeared_tokens:
                layer.attention.block.initialize_copying()
            if (prefix := layer.attention.block.prefix) is not None:
                prefix.initialize()

    def hidden(self, inputs: Inputs, cached: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the input of the output layer, [B, T, D], and the routing of experts, see `run_layers`."""
        inputs.check(self.settings.chunk_length)
        h, _, routing = self.run_layers(self.embed(inputs.tokens, inputs.documents), None, inputs, cached)
        return self.finish(h), routing

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the vocabulary's logits [..., V] from hidden [..., D]. They are large, so callers can pass a few rows
        at a time."""
        return F.linear(hidden, self.output_weight) if self.packed_output is None else self.packed_output(hidden)

    @property
    def steps(self) -> list[nn.Module]:
        """As `CopyingModel.steps`."""
        return list(self.feed_forward.values())

    def vocabulary_losses(self, hidden: Tensor, labels: Tensor, best: Tensor | None = None) -> TokenLosses:
        """As `CopyingModel.vocabulary_losses`."""
        return token_losses(hidden, self.output_weight, labels, best, self.packed_output)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer [V, D]; with tied embeddings, the decoder's table."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def layers(self) -> list[Layer]:
        """The layers that this device holds."""
        layers, crosses = [], dict(self.cross.items())
        for name, attention in self.attention.items():  # torch.compile cannot trace a comprehension here
            layers.append(Layer(name, attention, crosses.get(str(int(name) + 1)), self.feed_forward[name]))  # type: ignore[arg-type]
        return layers

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Embed tokens [B, T] as the residual stream [B, T, D].

        Raises:
            InputError: a row is longer than the table of learned positions.
        """
        num_tokens, positions = tokens.shape[1], None
        if self.settings.attention.positions == "learned":
            self.settings.check_length(num_tokens)
            positions = torch.arange(num_tokens, device=tokens.device)
            if documents is not None:
                positions = document_positions(documents, self.settings.chunk_length, num_tokens)
        return self.embed_at(tokens, positions)

    def embed_at(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Embed tokens at given positions in their documents, [T] or [B, T], which only learned positions need.

        If encoder and cross-attention have learned positions too, a second table embeds the position in the chunk. So
        cross-attention and the encoder can infer distances between the tokens of a chunk and of a neighbor.
        """
        h = self.embedding(tokens)
        if self.settings.attention.positions == "learned":
            assert positions is not None
            h = h + self.position_embedding(positions)
            if self.settings.retrieval_positions == "learned":
                h = h + self.chunk_embedding(positions % self.settings.chunk_length)
        return self.scaled(h)

    def scaled(self, rows: Tensor) -> Tensor:
        """Scale embeddings [..., D] as they enter the residual stream."""
        return rows * self.base_width**0.5 if self.settings.scaled_embeddings else rows

    def finish(self, h: Tensor) -> Tensor:
        """Normalize the last activations for the output layer: [..., D] to [..., D]."""
        h = self.norm(h)
        return h if self.base_width == self.settings.d_model else h * (self.base_width / self.settings.d_model)

    @property
    def blocks(self) -> dict[str, PreNorm[nn.Module]]:
        """All blocks of these layers, by name."""
        kinds = {"attention": self.attention, "cross": self.cross, "feed_forward": self.feed_forward}
        blocks = {f"{kind}.{name}": block for kind, blocks in kinds.items() for name, block in blocks.items()}
        return cast(dict[str, PreNorm[nn.Module]], blocks)

    def run_layers(
        self, h: Tensor, encoded: Tensor | None, inputs: Inputs, cached: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the layers that this device holds.

        Args:
            h: residual stream [B, T, D].
            encoded: encoded neighbors [B', U, K, R, E]; None in or before the first layer with CCA, which runs the
                encoder.
            inputs: of the model.
            cached: keys and values of the neighbors from `encode_neighbors`, [B'·U, L, G, K·R, C] each, if the decoder
                reads them; None = it encodes them.

        Returns:
            The residual stream, the encoded neighbors, and `mixture_of_experts.ROUTING` of each sequence, float32
            [B, 3], summed over the layers with experts (None without experts).
        """
        reads = LayerPass.of(h, inputs, self.settings, cached)
        if not isinstance(reads.neighbors, PackedNeighbors):
            return self.run(h, reads, encoded)
        # Every block but attention is the same for text and neighbors, so both are one stream.
        packed = reads.neighbors.pack(h, self.embed_at(inputs.neighbors.flatten(0, 2), None))  # [S, D]
        h, encoded, routing = self.run(packed, reads)
        return reads.neighbors.unpack(h)[0], encoded, routing

    def run(
        self, h: Tensor, reads: LayerPass, encoded: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the layers on a stream [B, T, D], or [S, D] with packed neighbors. See `run_layers`."""
        routing = None
        for index, layer in enumerate(self.layers):
            before = h if self.settings.parallel_residual else None
            h = layer.attention(h, reads.of_attention(index))
            h, encoded = self._read_neighbors(layer, h, reads.cross, encoded)
            h, routing = self._feed_forward(layer, h, before, reads.queues, routing)
        return h, encoded, routing

    def _read_neighbors(
        self, layer: Layer, h: Tensor, cross: CrossReads | None, encoded: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-attention of a layer that has one. The first one runs the encoder, which needs the stream before it."""
        if layer.cross is None or cross is None:
            return h, encoded
        if int(layer.name) + 1 == self.settings.retrieval.cca_layers[0]:  # names count from 0, settings from 1
            encoded = cross.encode(self.encoder, self.embedding, h)
        return layer.cross(h, cross.of_layer(layer.name, encoded)), encoded

    def _feed_forward(
        self, layer: Layer, h: Tensor, before: Tensor | None, queues: Queues | None, routing: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The feed-forward block or the experts of a layer, and the routing summed so far. `before`: see `Residual`."""
        if not isinstance(layer.feed_forward, RoutedResidual):
            return layer.feed_forward(h, before=before), routing
        h, routed = layer.feed_forward(h, queues, before=before)
        return h, routed if routing is None else routing + routed

    def encode_neighbors(self, neighbors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every layer with which the decoder reads neighbors: [N, K, R] tokens to [N, L, G, K·R, C]
        each.

        For caches: `run_layers` encodes the neighbors of a batch together with its text.
        """
        (_, k, r), device = neighbors.shape, neighbors.device
        caches = [StoredKeysValues() for _ in self.layers]
        mask = neighbor_window(self.settings, r, device)
        self.run(
            self.embed_at(neighbors.flatten(0, 1), None),
            LayerPass(neighbor_positions(self.settings, r, device), mask, caches=caches),
        )
        keys, values = (
            torch.stack([rearrange(part, "(n k) r g c -> n g (k r) c", k=k) for part in parts], dim=1)
            for parts in zip(*(layer.keys_values for layer in caches), strict=True)
        )
        return keys, values
