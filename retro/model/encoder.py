"""The encoder of neighbors (Borgeaud et al. 2022, sections 2.3 and 2.5). Letters of the shape comments as in `retro.py`."""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from indexing.store.errors import InputError
from retro.model.attention import Attention
from retro.model.feed_forward import FEED_FORWARD
from retro.model.masks import some_key
from retro.model.positions import positions_of
from retro.model.residual_block import Residual, rms_norm
from retro.model.settings import ModelSettings


class Encoder(nn.Module):
    """Bidirectional transformer over each neighbor, conditioned on the chunk that retrieved it (algorithm 1)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, dropout = settings.encoder_d_model, settings.dropout
        self.scheme = (settings.beside, width, settings.encoder_head_dim)
        self.chunk_length = settings.chunk_length
        self.shared = settings.shared_embeddings

        def attention(source_width: int) -> Residual:
            heads, head_dim = settings.encoder_num_heads, settings.encoder_head_dim
            scale = 1 / head_dim if settings.init == "mup" else None
            block = Attention(
                width, source_width, heads, head_dim, settings.beside, qk_norm=settings.qk_norm, scale=scale
            )
            return Residual(rms_norm(width), block, dropout)

        if settings.shared_embeddings:
            self.project = nn.Linear(settings.d_model, width, bias=False)
        else:
            self.embedding = nn.Embedding(settings.vocab_size, width)
        if settings.beside == "learned":
            self.position_embedding = nn.Embedding(2 * settings.chunk_length, width)  # a chunk and its continuation
        layers, feed_forward = range(settings.encoder_num_layers), FEED_FORWARD[settings.activation]
        self.attention = nn.ModuleList(attention(width) for _ in layers)
        self.cross = nn.ModuleDict({str(layer): attention(settings.d_model) for layer in settings.encoder_cca_layers})
        self.feed_forward = nn.ModuleList(
            Residual(rms_norm(width), feed_forward(width, settings.encoder_d_ffw), dropout) for _ in layers
        )
        if settings.encoder_cca_layers:
            self.query_norm = rms_norm(settings.d_model)
        self.norm = rms_norm(width)

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
        inner = positions_of(*self.scheme, range(r), range(r), tokens.device)
        if self.cross:
            m = self.chunk_length
            outer = positions_of(*self.scheme, range(r), range(m), tokens.device, (k, 1))
            chunks = rearrange(self.query_norm(h[:, : num_chunks * m]), "b (u m) d -> (b u) m d", m=m)
        for layer, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True), start=1):
            e = attention(e, inner, mask=mask)
            if str(layer) in self.cross:
                e = rearrange(e, "(b u k) r e -> (b u) (k r) e", u=num_chunks, k=k)
                e = self.cross[str(layer)](e, outer, source=chunks)
                e = rearrange(e, "(b u) (k r) e -> (b u k) r e", u=num_chunks, k=k)
            e = feed_forward(e)
        return self.norm(rearrange(e, "(b u k) r e -> b u k r e", u=num_chunks, k=k))
