"""The encoder of neighbors (Borgeaud et al. 2022, sections 2.3 and 2.5). Letters of the shape comments as in
`retro.py`."""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from indexing.store.errors import InputError
from retro.batch.masks import some_key
from retro.model.attention import Attention
from retro.model.feed_forward import FEED_FORWARD
from retro.model.positions import positions_of
from retro.model.reads import Reads
from retro.model.residual_block import Residual, rms_norm
from retro.model_settings import ModelSettings


class Encoder(nn.Module):
    """Bidirectional transformer over each neighbor, conditioned on the querying chunk (algorithm 1)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, dropout = settings.encoder.d_model, settings.dropout
        self.scheme = (settings.retrieval_positions, width, settings.encoder.head_dim)
        self.chunk_length = settings.chunk_length
        self.shared = settings.shared_embeddings

        def attention(source_width: int) -> Residual:
            heads, head_dim = settings.encoder.num_heads, settings.encoder.head_dim
            block = Attention(
                width,
                source_width,
                heads,
                head_dim,
                settings.retrieval_positions,
                qk_norm=settings.attention.qk_norm,
                scale=settings.attention_scale(head_dim),
            )
            return Residual(rms_norm(width), block, dropout)

        if settings.shared_embeddings:
            self.project = nn.Linear(settings.d_model, width, bias=False)
        else:
            self.embedding = nn.Embedding(settings.vocab_size, width)
        if settings.retrieval_positions == "learned":
            self.position_embedding = nn.Embedding(2 * settings.chunk_length, width)  # a chunk and its continuation
        layers, feed_forward = range(settings.encoder.num_layers), FEED_FORWARD[settings.activation]
        self.attention = nn.ModuleList(attention(width) for _ in layers)
        self.cross = nn.ModuleDict({str(layer): attention(settings.d_model) for layer in settings.encoder.cca_layers})
        self.feed_forward = nn.ModuleList(
            Residual(rms_norm(width), feed_forward(width, settings.encoder.d_ffw), dropout) for _ in layers
        )
        if settings.encoder.cca_layers:
            self.query_norm = rms_norm(settings.d_model)
        self.norm = rms_norm(width)

    @property
    def blocks(self) -> list[Residual]:
        """All residual blocks."""
        return [*self.attention, *self.cross.values(), *self.feed_forward]

    def forward(self, tokens: Tensor, mask: Tensor | None, h: Tensor, table: nn.Embedding) -> Tensor:
        """Encode every neighbor of every chunk at once.

        Args:
            tokens: of the neighbors, int64 [B', U, K, R].
            mask: True for real tokens, bool [B', U, K, R]; None = all are real.
            h: decoder activations [B, T, D]; those of the first B' rows and U·M tokens are the querying chunks'.
            table: the decoder's embeddings, for `shared_embeddings`.

        Returns:
            [B', U, K, R, E]; values where the mask is False are undefined.

        Raises:
            InputError: neighbors are longer than the table of learned positions.
        """
        num_rows, num_chunks, k, r = tokens.shape
        tokens = rearrange(tokens, "b u k r -> (b u k) r")  # self-attention stays within a neighbor: each is a row
        if self.shared:
            # Normalized, so the scale of the table does not matter. The stream keeps its dtype under autocast.
            e = self.project(F.rms_norm(table(tokens), table.weight.shape[1:])).to(table.weight.dtype)
        else:
            e = self.embedding(tokens)
        if hasattr(self, "position_embedding"):
            if r > (longest := 2 * self.chunk_length):
                raise InputError(
                    f"neighbors have {r} tokens: with model.attention.positions = 'learned' they can have {longest}, twice "
                    f"model.chunk_length = {self.chunk_length}."
                )
            e = e + self.position_embedding.weight[:r]
        if mask is not None:
            mask = rearrange(some_key(mask), "b u k r -> (b u k) 1 1 r")
        # All neighbors of a chunk have the same positions: the K neighbors of `outer` repeat those of one.
        inner = positions_of(*self.scheme, range(r), range(r), tokens.device)
        if self.cross:
            m = self.chunk_length
            outer = positions_of(*self.scheme, range(r), range(m), tokens.device, (k, 1))
            # The stream is not normalized between blocks, and this is a source of keys, not the input of a block.
            chunks = rearrange(self.query_norm(h[:num_rows, : num_chunks * m]), "b (u m) d -> (b u) m d", m=m)
        for layer, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True), start=1):
            e = attention(e, Reads(inner, mask=mask))
            if str(layer) in self.cross:
                # The K neighbors of a chunk read the same chunk, so together they are the queries of one attention.
                e = rearrange(e, "(b u k) r e -> (b u) (k r) e", u=num_chunks, k=k)
                e = self.cross[str(layer)](e, Reads(outer, source=chunks))
                e = rearrange(e, "(b u) (k r) e -> (b u k) r e", u=num_chunks, k=k)
            e = feed_forward(e)
        return self.norm(rearrange(e, "(b u k) r e -> b u k r e", u=num_chunks, k=k))
