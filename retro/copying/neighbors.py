"""The source `neighbors`: the neighbors of the preceding chunk."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.masks import neighbor_mask
from retro.copying.matches import LONGEST, Matches, Windows, match_lengths
from retro.copying.provenance import Neighbors
from retro.copying.rows import Row
from retro.copying.source import CopySource, StepTexts
from retro.copying.votes import RowMatches, SourceMatches


def neighbor_matches(inputs: Inputs, chunk_length: int) -> Matches:
    """Matches in the neighbors of complete chunks: N = B'·U, Q = m, S = K·R.

    Queries are those of chunked cross-attention: the last token of chunk u and the first m - 1 of the next one. Earlier
    tokens of a match are in chunk u too, since a match has at most m tokens here.
    """
    m, neighbors = chunk_length, inputs.neighbors
    num_chunks, tokens = neighbors.shape[1], inputs.tokens[: len(neighbors)]
    longest = _longest_in_chunk(m)
    padded = F.pad(tokens, (0, (num_chunks + 1) * m - 1 - tokens.shape[1]), value=-1)
    windows = padded[:, m - longest :].unfold(1, m + longest - 1, m)  # [B', U, m + longest - 1]
    lengths = match_lengths(windows[:, :, None], neighbors, longest)  # [B', U, K, m, R]
    real = neighbor_mask(neighbors, inputs.neighbor_lengths, inputs.documents)
    lengths = lengths.masked_fill(~F.pad(real[..., 1:], (0, 1))[:, :, :, None], -1)  # the last token votes for none
    return Matches(
        lengths.transpose(2, 3).flatten(0, 1).flatten(2), F.pad(neighbors[..., 1:], (0, 1)).flatten(0, 1).flatten(1)
    )


def neighbor_matches_of_last(tokens: Tensor, neighbors: Tensor, neighbor_lengths: Tensor, chunk_length: int) -> Matches:
    """As `neighbor_matches` for the last token of each row only: Q = 1, S = K·R.

    Args:
        tokens: int64 [B, T], rows that end in the last column; -1 = no token.
        neighbors: int64 [B, K, R], of the last complete chunk of each row.
        neighbor_lengths: int64 [B, K].
        chunk_length: m.
    """
    longest = _longest_in_chunk(chunk_length)
    lengths = match_lengths(F.pad(tokens, (longest - 1, 0), value=-1)[:, None, -longest:], neighbors, longest)
    votes = torch.arange(1, neighbors.shape[2] + 1, device=tokens.device) < neighbor_lengths[..., None]
    lengths = lengths.masked_fill(~votes[:, :, None], -1)  # [B, K, 1, R]
    return Matches(lengths.transpose(1, 2).flatten(2), F.pad(neighbors[..., 1:], (0, 1)).flatten(1))


def _longest_in_chunk(chunk_length: int) -> int:
    """A match in neighbors has at most m tokens: the ones before may be of another document."""
    return min(LONGEST, 1 << (chunk_length.bit_length() - 1))


def _of_batch(inputs: Inputs, chunk_length: int) -> SourceMatches:
    windows = Windows(chunk_length, len(inputs.neighbors), inputs.neighbors.shape[1], len(inputs.tokens))
    return SourceMatches(neighbor_matches(inputs, chunk_length), windows)


def _of_step(texts: StepTexts) -> RowMatches | None:
    if not any(row.neighbors for row in texts.rows):
        return None
    neighbors, lengths = map(texts.put, _last_neighbors(texts.rows))
    return RowMatches(neighbor_matches_of_last(texts.last_tokens(LONGEST), neighbors, lengths, texts.chunk_length))


def _last_neighbors(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Neighbors [N, K, R] of the last complete chunks and their lengths [N, K]; rows with fewer neighbors have lengths
    of 0."""
    last: list[Neighbors | None] = [row.neighbors[-1] if row.neighbors else None for row in rows]
    k = max(row.num_neighbors for row in rows)
    r = next(neighbors.tokens.shape[1] for neighbors in last if neighbors is not None)
    tokens, lengths = np.zeros((len(rows), k, r), np.int64), np.zeros((len(rows), k), np.int64)
    for row, neighbors in enumerate(last):
        if neighbors is not None:
            tokens[row, : len(neighbors.tokens)] = neighbors.tokens
            lengths[row, : len(neighbors.lengths)] = neighbors.lengths
    return tokens, lengths


NEIGHBORS = CopySource(
    "neighbors",
    reads=3,
    of_retrieval=True,
    switched=True,
    is_present=lambda inputs: inputs.retrieves,
    of_batch=_of_batch,
    of_step=_of_step,
)
