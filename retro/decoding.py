"""Next-token logits of several rows that grow, with retrieval at every chunk boundary."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from retro.device import Placement
from retro.model import Retro

Retrieve = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Chunks [n, m] → neighbors [n, K, R] int64 and their lengths [n, K] int64."""


class Decoder:
    """`read` the prompts, then a token for every row at a time; `keep` drops rows that are finished.

    Args:
        model: in evaluation mode.
        placement: device and precision.
        context: tokens that the model sees at most, a multiple of the chunk length; older chunks are dropped whole.
        retrieve: finds and reads the neighbors of full chunks; None = retrieval OFF.
    """

    def __init__(self, model: Retro, placement: Placement, context: int, retrieve: Retrieve | None = None) -> None:
        self.model, self.placement, self.context, self.retrieve = model, placement, context, retrieve
        self.rows: list[np.ndarray] = []
        self.found: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def read(self, tokens: Sequence[np.ndarray]) -> Tensor:
        """Tokens that each row goes on with, at least one → logits of the next one, [rows, V] float32."""
        if not self.rows:
            self.rows, self.found = [np.empty(0, np.int64)] * len(tokens), [[] for _ in tokens]
        self.rows = [np.concatenate((row, new)) for row, new in zip(self.rows, tokens, strict=True)]
        return torch.stack([self._logits(number) for number in range(len(self.rows))])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all but these rows."""
        self.rows, self.found = [self.rows[row] for row in rows], [self.found[row] for row in rows]

    def _logits(self, number: int) -> Tensor:
        tokens, found, m = self.rows[number], self.found[number], self.model.settings.chunk_length
        if len(tokens) > self.context:
            dropped = -(-(len(tokens) - self.context) // m)
            tokens, found = tokens[dropped * m :], found[dropped:]
        full = len(tokens) // m
        if self.retrieve is not None and full > len(found):
            found.extend(zip(*self.retrieve(tokens[len(found) * m : full * m].reshape(-1, m)), strict=True))
        self.rows[number], self.found[number] = tokens, found
        inputs = {"tokens": torch.from_numpy(tokens[None])}  # [1, T]
        if found:
            for name, part in (("neighbors", 0), ("neighbor_lengths", 1)):
                inputs[name] = torch.from_numpy(np.stack([each[part] for each in found])[None])
        with self.placement.autocast():
            hidden = self.model.hidden(**self.placement.put(inputs))
            return self.model.logits(hidden[0, -1]).float()
