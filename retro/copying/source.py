"""What the project knows about a source of copying.

    SOURCES (`sources.py`) ─┬─ of_batch ─ evidence, candidates ─► `CopyHead`: training, scoring
                            └─ of_step ── evidence, candidates ─► `StepVotes`: generation, processors

To add a source, write a file with a `CopySource`, and add it to `SOURCES`: nothing else has a list of sources. Letters
of the shape comments as in `head.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.copying.rows import Row, WholeDatastore


class Votes(Protocol):
    """What a source says about the next tokens of a batch, for each of `MATCH_LENGTHS`."""

    def evidence(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`LengthVotes` about labels [B, T], stacked: float32 [B, T, L, 4]; and the best candidate, int64 [B, T]: a
        token that follows the longest match, any token where nothing votes."""

    def candidates(self, shares: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """What can follow each token, int64 [B, T, S], and its probability, float32 [B, T, S].

        Args:
            shares: of the lengths, float32 [B, T, L].
            sizes: from the evidence, float32 [B, T, L].
        """


class VotesOfRows(Protocol):
    """What a source says about the next token of each of N rows: as `Votes`, on the host."""

    def evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """`LengthVotes`, stacked: float32 [N, L, 4], in which `right` has no meaning, since there are no labels; and the
        best candidates, int64 [N]."""

    def candidates(self, shares: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Votes.candidates`: int64 [N, S] and float32 [N, S], from float64 [N, L] and float32 [N, L]."""

    def of_rows(self, indices: list[int]) -> Votes:
        """The votes of some rows, as a batch of texts with one token: T = 1."""


@dataclass(frozen=True)
class StepTexts:
    """Texts whose next tokens are predicted.

    Attributes:
        rows: N rows; one that has a draft occurs once for each token.
        histories: the tokens of each text, int64 [t].
        datastore: finds what follows a text in the whole datastore; None = it is not searched.
        chunk_length: m.
        device: of the model.
    """

    rows: Sequence[Row]
    histories: Sequence[np.ndarray]
    datastore: WholeDatastore | None
    chunk_length: int
    device: torch.device

    def put(self, array: np.ndarray) -> Tensor:
        """An array on the device, as int64 or float32."""
        return put(array, self.device)

    def last_tokens(self, most: int | None = None) -> Tensor:
        """The tokens of each text, or the last ones, as rows that end in the last column: int64 [N, T]; -1 = no
        token."""
        texts = [history if most is None else history[-most:] for history in self.histories]
        width = max(map(len, texts))
        padded = np.full((len(texts), width), -1, np.int64)
        for row, text in zip(padded, texts, strict=True):
            row[width - len(text) :] = text
        return self.put(padded)


@dataclass(frozen=True)
class CopySource:
    """A source of copying.

    Attributes:
        name: of its setting (`model.copy_head.NAME`) and of its weights (`copy_head.NAME.outer`).
        reads: its network reads the features of the first `reads` sources in the list. A new source is the last one in
            the list, so earlier networks and their files stay as they are.
        of_retrieval: retrieval OFF removes it, and `copy_strength` scales its odds.
        switched: a text must earn trust in it (`switch.py`). That of the context depends on the model (`sources.py`).
        is_present: whether a batch has something to copy from.
        of_batch: its votes in a batch, for training and scoring. The second argument is the chunk length.
        of_step: its votes for the next tokens of texts, for generation; None = it has none for these texts.
    """

    name: str
    reads: int
    of_retrieval: bool
    switched: bool
    is_present: Callable[[Inputs], bool]
    of_batch: Callable[[Inputs, int], Votes]
    of_step: Callable[[StepTexts], VotesOfRows | None]


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, as int64 or float32."""
    dtype = np.float32 if array.dtype.kind == "f" else np.int64
    return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)
