"""The source `context`: the preceding tokens of the same document."""

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.copying.matches import LONGEST, Matches, match_lengths
from retro.copying.source import CopySource, StepTexts
from retro.copying.votes import RowMatches, SourceMatches


def context_matches(tokens: Tensor, documents: Tensor | None, chunk_length: int) -> Matches:
    """Matches in the preceding tokens of the same document: N = B, Q = S = T.

    Args:
        tokens: int64 [B, T].
        documents: as in `Inputs`.
        chunk_length: m.
    """
    at, keys = torch.arange(tokens.shape[1], device=tokens.device), tokens
    readable = at[:, None] > at  # the last token read has no following token yet
    if documents is not None:
        document = documents.repeat_interleave(chunk_length, dim=1)[:, : tokens.shape[1]]
        readable = readable & (document[:, :, None] == document[:, None])
        keys = tokens + (document << 32)  # matches end where a document begins
    lengths = match_lengths(F.pad(keys, (LONGEST - 1, 0), value=-1), keys)
    return Matches(lengths.masked_fill(~readable, -1), F.pad(tokens[:, 1:], (0, 1)))


def context_matches_of_last(tokens: Tensor) -> Matches:
    """As `context_matches` for the last token of each row only: Q = 1, S = T.

    Args:
        tokens: int64 [B, T], rows that end in the last column; -1 = no token.
    """
    lengths = match_lengths(F.pad(tokens, (LONGEST - 1, 0), value=-1)[:, -LONGEST:], tokens)  # [B, 1, T]
    readable = (tokens >= 0) & (torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] - 1)
    return Matches(lengths.masked_fill(~readable[:, None], -1), F.pad(tokens[:, 1:], (0, 1)).clamp(min=0))


def _of_batch(inputs: Inputs, chunk_length: int) -> SourceMatches:
    return SourceMatches(context_matches(inputs.tokens, inputs.documents, chunk_length))


def _of_step(texts: StepTexts) -> RowMatches:
    return RowMatches(context_matches_of_last(texts.last_tokens()))


CONTEXT = CopySource(
    "context",
    reads=1,  # of itself only: with retrieval OFF it is the same
    of_retrieval=False,
    switched=False,
    is_present=lambda inputs: True,
    of_batch=_of_batch,
    of_step=_of_step,
)
