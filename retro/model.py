"""RETRO, in the order of section 2 of Borgeaud et al. (2022), arXiv 2112.04426.

    tokens ─ embed ─ [ self-attention ─ (chunked cross-attention at layers P) ─ feed-forward ] × L ─ norm ─ logits
                             │ min(P): activations of chunk u          ▲
                             ▼                                         │ read from the last token of chunk u on
    neighbors of chunk u ─ bidirectional encoder ──────────────────────┘ encoded once

Notable: retrieval OFF is the same weights with `neighbors=None`; RMSNorm before each block; no biases; rotary positions
(ours), Transformer-XL's (the paper's) or others; one class is every attention (`attention.py`); no loop over chunks; no
buffers, so a model made on the meta device needs only `to_empty` and `initialize`. RETROfit trains `encoder.*` and `cross.*` and
freezes the rest. The model knows nothing of meshes, shards, optimizers or caches (`decoding.py`).

Letters of the shape comments:
    B batch    T tokens       D decoder width    V vocabulary    U complete chunks (T // m)    M = m, tokens of a chunk
    K neighbors of a chunk    R tokens of a neighbor (r)         E encoder width
    N attentions side by side    Q queries    S keys    H heads    C features of a head    X distances
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from indexing.store.errors import InputError
from retro.attention import Attention, Places, place
from retro.experts import ExpertLinear, Experts
from retro.feed_forward import FEED_FORWARD
from retro.masks import document_mask, document_positions, document_starts, neighbor_mask, some_key
from retro.model_settings import ModelSettings

# ------------------------------------------------------------------------------------------------------------ blocks


class Residual(nn.Module):
    """x + dropout(block(RMSNorm(x))), around every block of decoder and encoder."""

    def __init__(self, width: int, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.block = block
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[..., D] to [..., D]; what else the block takes follows x, and what else it returns follows the sum."""
        y = self.block(self.norm(x), *args, **kwargs)
        return (x + self.dropout(y[0]), *y[1:]) if isinstance(y, tuple) else x + self.dropout(y)


# ------------------------------------------------------------------------- chunked cross-attention (sections 2.3-2.4)


class ChunkedCrossAttention(nn.Module):
    """The last token of chunk u and the first m - 1 tokens of chunk u + 1 read the neighbors of chunk u.

        tokens      0 . . . m-1  m . . . . 2m-1  2m . . .
        chunks      └─── 0 ───┘  └──── 1 ────┘  └── 2 …        neighbors of chunk u were found with all its tokens, so
        windows               └─── 0 ────┘└─── 1 ────┘         no token before its last one may know them

    A window is the sequence shifted by m - 1 tokens and cut every m: no copies, no loop. Token i of a window is
    i - i' + m - 1 from token i' of a neighbor. One softmax runs over all tokens of all K neighbors.
    """

    def __init__(self, attention: Attention, chunk_length: int) -> None:
        super().__init__()
        self.attention = attention
        self.chunk_length = chunk_length

    def forward(self, x: Tensor, places: Places, encoded: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D], and exactly 0 for tokens with nothing to read.

        Args:
            x: decoder activations, [B, T, D].
            places: of the window's m tokens from m - 1 on, and K times those of a neighbor from 0 on.
            encoded: encoded neighbors of the complete chunks, [B, U, K, R, E].
            mask: bool, which of their tokens are real, [B, U, K, R].
        """
        m, num_chunks = self.chunk_length, encoded.shape[1]
        shifted = x[:, m - 1 :]
        num_readers = shifted.shape[1]  # the last window is cut short by the end of the sequence
        shifted = F.pad(shifted, (0, 0, 0, num_chunks * m - num_readers))
        windows = rearrange(shifted, "b (u m) d -> (b u) m d", m=m)
        read = self.read(windows, places, *self.keys_values(encoded.flatten(0, 1), places), mask.flatten(0, 1))
        read = rearrange(read, "(b u) m d -> b (u m) d", u=num_chunks)
        return F.pad(read[:, :num_readers], (0, 0, m - 1, 0))

    def keys_values(self, encoded: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Encoded neighbors of some chunks [N, K, R, E] to keys and values [N, K·R, H, C]."""
        starts = torch.arange(encoded.shape[1] * encoded.shape[2], device=encoded.device) % encoded.shape[2] == 0
        k, v = self.attention.project(encoded.flatten(1, 2))
        return self.attention.placed(k, places, starts[None]), v

    def read(
        self, x: Tensor, places: Places, k: Tensor, v: Tensor, mask: Tensor, distance_keys: Tensor | None = None
    ) -> Tensor:
        """Windows [N, Q, D] read keys and values of their chunks' neighbors; mask [N, K, R], the rest as in `Attention`."""
        mask = mask.flatten(1)[:, None, None]  # [N, 1, 1, K·R]
        read = self.attention.read(x, places, k, v, some_key(mask), distance_keys=distance_keys)
        return read.masked_fill(~mask.any(-1), 0.0)


# ------------------------------------------------------------------------------------ encoder (sections 2.3 and 2.5)


class Encoder(nn.Module):
    """Bidirectional transformer over each neighbor, conditioned on the chunk that retrieved it (algorithm 1)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, dropout = settings.encoder_d_model, settings.dropout
        self.scheme = (settings.positions, width, settings.encoder_head_dim)
        self.chunk_length = settings.chunk_length
        self.shared = settings.shared_embeddings

        def attention(source_width: int) -> Residual:
            heads, head_dim = settings.encoder_num_heads, settings.encoder_head_dim
            scale = 1 / head_dim if settings.init == "mup" else None
            block = Attention(
                width, source_width, heads, head_dim, settings.positions, normed=settings.qk_norm, scale=scale
            )
            return Residual(width, block, dropout)

        if settings.shared_embeddings:
            self.project = nn.Linear(settings.d_model, width, bias=False)
        else:
            self.embedding = nn.Embedding(settings.vocab_size, width)
        if settings.positions == "learned":
            self.position_embedding = nn.Embedding(2 * settings.chunk_length, width)  # a chunk and its continuation
        layers, feed_forward = range(settings.encoder_num_layers), FEED_FORWARD[settings.activation]
        self.attention = nn.ModuleList(attention(width) for _ in layers)
        self.cross = nn.ModuleDict({str(layer): attention(settings.d_model) for layer in settings.encoder_cca_layers})
        self.feed_forward = nn.ModuleList(
            Residual(width, feed_forward(width, settings.encoder_d_ffw), dropout) for _ in layers
        )
        if settings.encoder_cca_layers:
            self.query_norm = nn.RMSNorm(settings.d_model, eps=1e-6)
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, tokens: Tensor, mask: Tensor, h: Tensor, table: nn.Embedding) -> Tensor:
        """Encode every neighbor of every chunk at once.

        Args:
            tokens: of the neighbors, int64 [B, U, K, R].
            mask: which of them are real, bool [B, U, K, R].
            h: decoder activations; the first U·M are those of the querying chunks, [B, T, D].
            table: the decoder's, read where embeddings are shared.

        Returns:
            [B, U, K, R, E]. Where the mask is False it means nothing.
        """
        _, num_chunks, k, r = tokens.shape
        tokens = rearrange(tokens, "b u k r -> (b u k) r")
        if self.shared:  # rows of one size, whatever the table's; the stream keeps the table's type under autocast
            e = self.project(F.rms_norm(table(tokens), table.weight.shape[1:])).to(table.weight.dtype)
        else:
            e = self.embedding(tokens)
        if hasattr(self, "position_embedding"):
            if r > (longest := 2 * self.chunk_length):
                raise InputError(
                    f"neighbors of {r} tokens: with model.positions = 'learned' they may have {longest}, twice "
                    f"model.chunk_length = {self.chunk_length}."
                )
            e = e + self.position_embedding.weight[:r]
        mask = rearrange(some_key(mask), "b u k r -> (b u k) 1 1 r")
        inner = place(*self.scheme, range(r), range(r), tokens.device)
        if self.cross:
            m = self.chunk_length
            outer = place(*self.scheme, range(r), range(m), tokens.device, (k, 1))
            chunks = rearrange(self.query_norm(h[:, : num_chunks * m]), "b (u m) d -> (b u) m d", m=m)
        for layer, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True), start=1):
            e = attention(e, inner, mask=mask)
            if str(layer) in self.cross:
                e = rearrange(e, "(b u k) r e -> (b u) (k r) e", u=num_chunks, k=k)
                e = self.cross[str(layer)](e, outer, source=chunks)
                e = rearrange(e, "(b u) (k r) e -> (b u k) r e", u=num_chunks, k=k)
            e = feed_forward(e)
        return self.norm(rearrange(e, "(b u k) r e -> b u k r e", u=num_chunks, k=k))


# --------------------------------------------------------------------------------------- decoder (section 2.4, alg. 1)


class Retro(nn.Module):
    """The language model. Without `cca_layers` it is a plain decoder, the paper's baseline."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        if settings.vocab_size < 1:
            raise InputError(
                "model.vocab_size is 0, which stands for the datastore's tokenizer: "
                "fill it in with dataclasses.replace(settings, vocab_size=...) before building the model."
            )
        self.settings = settings
        width, heads, head_dim, dropout = settings.d_model, settings.num_heads, settings.head_dim, settings.dropout
        self.scheme = (settings.positions, width, head_dim)
        self.base_width = settings.mup_base_width if settings.init == "mup" else width

        def attention(source_width: int) -> Attention:
            return Attention(
                width,
                source_width,
                heads,
                head_dim,
                settings.positions,
                num_kv_heads=settings.kv_heads,
                smeared=settings.smeared_keys,
                normed=settings.qk_norm,
                scale=1 / head_dim if settings.init == "mup" else None,
            )

        def cross() -> ChunkedCrossAttention:
            return ChunkedCrossAttention(attention(settings.encoder_d_model), settings.chunk_length)

        def feed_forward(layer: int) -> nn.Module:
            dense = FEED_FORWARD[settings.activation]
            return Experts(settings) if layer in settings.expert_layers else dense(width, settings.d_ffw)

        layers = range(settings.num_layers)
        self.embedding = nn.Embedding(settings.vocab_size, width)
        if settings.positions == "learned":
            self.position_embedding = nn.Embedding(settings.max_positions, width)
            self.chunk_embedding = nn.Embedding(settings.chunk_length, width)
        # By number, as a device may hold some of the layers only.
        self.attention = nn.ModuleDict({str(n): Residual(width, attention(width), dropout) for n in layers})
        self.feed_forward = nn.ModuleDict({str(n): Residual(width, feed_forward(n + 1), dropout) for n in layers})
        self.cross = nn.ModuleDict({str(layer): Residual(width, cross(), dropout) for layer in settings.cca_layers})
        if settings.cca_layers:
            self.encoder = Encoder(settings)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = None if settings.tied_embeddings else nn.Linear(width, settings.vocab_size, bias=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw all weights anew; what a model built on the meta device needs after `to_empty`.

        Matrices keep the variance of what they multiply (std 1/sqrt(fan-in)), at any width. What is added to the
        residual stream is scaled down by the number of additions, so its variance at the top does not grow with depth.
        Tokens enter both streams about as loud as the blocks speak: with 0.02 as it stands (GPT-2's choice) they are
        drowned by the first block, and learning to copy from neighbors took more than twice the steps.

        What `init` = mup changes stands in `mup.py`: here, only the output layer's size.
        """
        num_blocks = 2 * self.settings.num_layers + len(self.settings.cca_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                # The decoder's rows are small, as they are the output layer too; `embed` multiplies them.
                nn.init.normal_(module.weight, std=1.0 if name.startswith("encoder.") else 0.02)
            elif isinstance(module, nn.Linear | ExpertLinear):
                into_stream = name.endswith(".out")
                fan_in = self.base_width if module is self.head else module.in_features
                nn.init.normal_(module.weight, std=(fan_in * (num_blocks if into_stream else 1)) ** -0.5)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Attention):
                for bias in ("content_bias", "distance_bias"):
                    if hasattr(module, bias):
                        nn.init.zeros_(getattr(module, bias).weight)
                if hasattr(module, "smear"):  # from heads that look for what followed to heads that look for the token
                    smear = module.smear.weight
                    smear.copy_(torch.linspace(2, -2, len(smear))[:, None])
        for name, module in self.named_modules():
            if self.settings.copying_init and isinstance(module, Attention) and not name.startswith("encoder."):
                module.begin_copying(self.encoder.project.weight if name.startswith("cross.") else None)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        neighbors: Tensor | None = None,
        neighbor_lengths: Tensor | None = None,
    ) -> Tensor:
        """The logits of every next token, [B, T, V]. The arguments are those of `hidden`."""
        return self.logits(self.hidden(tokens, documents, neighbors, neighbor_lengths))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] from `hidden` to [..., V]: apart, since logits are large and few of them may be wanted at a time."""
        return F.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The output layer's [V, D]; with tied embeddings the decoder's own table."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        neighbors: Tensor | None = None,
        neighbor_lengths: Tensor | None = None,
    ) -> Tensor:
        """The activations under the output layer, [B, T, D].

        Args:
            tokens: int64 [B, T], for any T; a chunk is every m tokens from the first on, U = T // m are complete.
            documents: int64 [B, ceil(T / m)], the document that each chunk belongs to, the incomplete one included.
                Tokens see nothing of other documents or their neighbors. Padding stands at the end of a document,
                where causality hides it from everything else. None says that each row is one document: that is faster.
            neighbors: int64 [B, U, K, R], the neighbors of the complete chunks, any K and R; every id must lie in
                the vocabulary. None turns retrieval off. A model without `cca_layers` ignores them.
            neighbor_lengths: int64 [B, U, K], how many of the R tokens are real, from the first on; 0 = no neighbor,
                K zeros = retrieval off for this chunk. None means all R.
        """
        return self.hidden_and_routing(tokens, documents, neighbors, neighbor_lengths)[0]

    def hidden_and_routing(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        neighbors: Tensor | None = None,
        neighbor_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `hidden`, and what training needs of the experts: see `run_layers`."""
        (_, num_tokens), m = tokens.shape, self.settings.chunk_length
        if documents is not None and documents.shape[1] != -(-num_tokens // m):
            raise ValueError(f"documents has {documents.shape[1]} columns; {num_tokens} tokens begin one every {m}")
        if neighbors is not None and neighbors.shape[1] != num_tokens // m:
            raise ValueError(
                f"neighbors of {neighbors.shape[1]} chunks; {num_tokens} tokens complete {num_tokens // m}"
            )
        h, _, routing = self.run_layers(self.embed(tokens, documents), None, documents, neighbors, neighbor_lengths)
        return self.finish(h), routing

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Where the residual stream begins: [B, T] to [B, T, D]; the documents as in `hidden`.

        Raises:
            InputError: learned positions are too few.
        """
        num_tokens, positions = tokens.shape[1], None
        if self.settings.positions == "learned":
            self.settings.check_length(num_tokens)
            positions = torch.arange(num_tokens, device=tokens.device)
            if documents is not None:
                positions = document_positions(documents, self.settings.chunk_length, num_tokens)
        return self.embed_at(tokens, positions)

    def embed_at(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """The same of tokens that stand at some positions of their documents, [T] or [B, T]: learned ones alone look.

        A second table says where a token stands in its chunk. So the stream itself tells chunked cross-attention, and the
        encoder that reads the chunk, how far from a neighbor's token it is: those have a table of their own.
        """
        h = self.embedding(tokens)
        if self.settings.positions == "learned":
            assert positions is not None
            h = h + self.position_embedding(positions) + self.chunk_embedding(positions % self.settings.chunk_length)
        return h * self.base_width**0.5

    def finish(self, h: Tensor) -> Tensor:
        """The end of the residual stream as the output layer reads it: [..., D] to [..., D]."""
        h = self.norm(h)
        return h if self.base_width == self.settings.d_model else h * (self.base_width / self.settings.d_model)

    def run_layers(
        self,
        h: Tensor,
        encoded: Tensor | None,
        documents: Tensor | None,
        neighbors: Tensor | None,
        neighbor_lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The layers that this device holds: the residual stream h [B, T, D], and the encoded neighbors [B, U, K, R, E].

        The encoder, which stands in the first layer with CCA, makes the latter of the neighbors; the rest as in `hidden`.
        The third is `experts.ROUTING` of each sequence, float32 [B, 4], summed over the layers with experts, if there are any.
        """
        num_tokens, m = h.shape[1], self.settings.chunk_length
        here = place(*self.scheme, range(num_tokens), range(num_tokens), h.device)
        mask = starts = None
        if documents is not None:
            mask, starts = document_mask(documents, m, num_tokens), document_starts(documents, m, num_tokens)
        cca_layers: tuple[int, ...] = ()
        if neighbors is not None and neighbors.numel() > 0:
            cca_layers, (k, r) = self.settings.cca_layers, neighbors.shape[2:]
            there = place(*self.scheme, range(m - 1, 2 * m - 1), range(r), h.device, (1, k))
            real = neighbor_mask(neighbors, neighbor_lengths, documents)
        expert_layers, routing = self.settings.expert_layers, None
        for name, attention in self.attention.items():
            layer = int(name) + 1
            h = attention(h, here, mask=mask, causal=True, starts=starts)
            if layer == min(cca_layers, default=0):
                encoded = self.encoder(neighbors, real, h, self.embedding)
            if layer in cca_layers:
                h = self.cross[str(layer)](h, there, encoded, real)
            h = self.feed_forward[name](h)
            if layer in expert_layers:
                h, routed = h
                routing = routed if routing is None else routing + routed
        return h, encoded, routing
