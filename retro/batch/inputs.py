"""The input of the model and of its loss: one record from the batch to the loss."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeAlias

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar

Values = TypeVar("Values", bound=Tensor | np.ndarray, default=Tensor)
Converted = TypeVar("Converted", bound=Tensor | np.ndarray)
Present: TypeAlias = Values | Any
"""A value, or None. Its readers know from the settings or `Inputs.retrieves` that it is there, so the type requires no
check for None."""


class Inputs(NamedTuple, Generic[Values]):
    """B sequences of T tokens. Every m tokens are a chunk, and U = T // m chunks are complete.

    Values are tensors in the model (`Inputs`), and NumPy arrays while a batch is read (`Inputs[np.ndarray]`).

    Attributes:
        tokens: int64 [B, T], for any T.
        documents: int64 [B, ceil(T / m)], the document of each chunk, the incomplete one included. Tokens do not see
            other documents or their neighbors. Padding follows the last token of a document, where causality hides it.
            None = each row is one document (faster).
        neighbors: int64 [B', U, K, R], K neighbors of R tokens of each complete chunk; every id must be less than V.
            They belong to the first B' rows; the others have none, and encoder and cross-attention do not compute them.
            None = retrieval OFF. A model with empty `cca_layers` ignores them.
        neighbor_lengths: int64 [B', U, K], tokens of each neighbor without padding; 0 = no neighbor. None = all R.
        lengths: int64 [B, ceil(T / m)], tokens of each chunk without padding, which is sent to no expert. Nothing else
            depends on them. None = all.
        votes: int64 [B, T, 32], what the datastore says about the text up to each token: `as_columns` of
            `indexing/suffixes/votes.py`. Only the copy head reads them. None = none, as with retrieval OFF.
        labels: int64 [B, T], the next token at each position, or `loss.IGNORED_LABEL`. Only the loss reads them.
    """

    tokens: Values
    documents: Present[Values] = None
    neighbors: Present[Values] = None
    neighbor_lengths: Present[Values] = None
    lengths: Present[Values] = None
    votes: Present[Values] = None
    labels: Present[Values] = None

    def map(self, convert: Callable[[Values], Converted]) -> "Inputs[Converted]":
        """Convert all values that are not None."""
        values: Iterator[Any] = (None if value is None else convert(value) for value in self)
        return Inputs(*values)

    def rows(self, rows: slice | Values) -> "Inputs[Values]":
        """Some of the rows; all must have neighbors, or none."""
        chosen: Iterator[Any] = (None if value is None else value[rows] for value in self)
        return Inputs(*chosen)

    def off(self) -> "Inputs[Values]":
        """The same with retrieval OFF."""
        return self._replace(neighbors=None, neighbor_lengths=None, votes=None)

    def following(self) -> Tensor:
        """The token that follows each one, int64 [B, T]: its label, if it has one that is not ignored; 0 after the last
        one."""
        tokens: Any = self.tokens  # tensors, as all values of a batch in the model
        labels: Any = self.labels
        following: Tensor = F.pad(tokens[:, 1:], (0, 1))
        return following if labels is None else labels.where(labels >= 0, following)

    @property
    def retrieves(self) -> bool:
        """True if some chunk may have a neighbor."""
        return self.neighbors is not None and self.neighbors.shape[2] > 0 and self.neighbors.shape[1] > 0

    def check(self, chunk_length: int) -> None:
        """Raise ValueError if the values of chunks do not fit the tokens."""
        num_tokens = self.tokens.shape[1]
        complete, begun = num_tokens // chunk_length, -(-num_tokens // chunk_length)
        for name, expected in (("documents", begun), ("neighbors", complete), ("lengths", begun)):
            value = getattr(self, name)
            if value is not None and value.shape[1] != expected:
                raise ValueError(
                    f"{name} has {value.shape[1]} columns, but {num_tokens} tokens in chunks of {chunk_length} need {expected}"
                )
