"""A fourth source of copying: phrases of a file. This file, and `(*SOURCES, phrases(file))`, are all that it needs."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.copying.matches import LONGEST, Matches, match_lengths
from retro.copying.source import CopySource, StepTexts
from retro.copying.votes import RowMatches, SourceMatches


def phrases(file: Path) -> CopySource:
    """Copy from phrases: lines of token ids."""
    lines = [[*map(int, line.split()), -1] for line in file.read_text().splitlines()]  # -1: a phrase ends
    source = torch.tensor([token for line in lines for token in line])

    def matches(read: Tensor, first: int) -> Matches:
        """Matches of the tokens from `first` on of rows [B, T]: N = B, S = tokens of the phrases."""
        padded = F.pad(read, (LONGEST - 1, 0), value=-2)[:, first:]
        lengths = match_lengths(padded, source.to(read.device).expand(len(read), -1))
        following = F.pad(source[1:], (0, 1), value=-1).to(read.device)
        lengths = lengths.masked_fill((following < 0) | (source.to(read.device) < 0), -1)
        return Matches(lengths, following.clamp(min=0).expand(len(read), -1))

    def of_batch(inputs: Inputs, chunk_length: int) -> SourceMatches:
        """Phrases match in one document only: tokens of other documents have other keys."""
        if inputs.documents is None:
            return SourceMatches(matches(inputs.tokens, 0))
        document = inputs.documents.repeat_interleave(chunk_length, 1)[:, : inputs.tokens.shape[1]]
        parts = [
            matches(inputs.tokens.where(document == each, -2), 0).lengths.where((document == each)[..., None], 0)
            for each in document.unique()
        ]
        total = torch.stack([part.int() for part in parts]).sum(0).to(torch.int8)
        return SourceMatches(matches(inputs.tokens, 0)._replace(lengths=total))

    def of_step(texts: StepTexts) -> RowMatches:
        last = texts.last_tokens(LONGEST)
        return RowMatches(matches(last.where(last >= 0, -2), last.shape[1] - 1))

    return CopySource(
        "phrases",
        4,
        of_retrieval=True,
        switched=True,
        is_present=lambda inputs: True,
        of_batch=of_batch,
        of_step=of_step,
    )
