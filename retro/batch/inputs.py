"""The input of the model and of its loss: one record from the batch to the loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F


class Inputs(NamedTuple):
    """B sequences of T tokens. Every m tokens are a chunk, and U = T // m chunks are complete.

    Values are tensors in the model, and NumPy arrays while a batch is read (`data/batches.py`).

    Attributes:
        tokens: int64 [B, T], for any T.
        documents: int64 [B, ceil(T / m)], the document of each chunk, the incomplete one included. Tokens do not see other
            documents or their neighbors. Padding follows the last token of a document, where causality hides it. None = each
            row is one document (faster).
        neighbors: int64 [B', U, K, R], K neighbors of R tokens of each complete chunk; every id must be less than V. They
            belong to the first B' rows; the others have none, and encoder and cross-attention do not compute them. None =
            retrieval OFF. A model with empty `cca_layers` ignores them.
        neighbor_lengths: int64 [B', U, K], tokens of each neighbor without padding; 0 = no neighbor. None = all R.
        lengths: int64 [B, ceil(T / m)], tokens of each chunk without padding, which is sent to no expert. Nothing else
            depends on them. None = all.
        votes: int64 [B, T, 32], what the datastore says about the text up to each token: `as_columns` of
            `indexing/suffixes/votes.py`. Only the copy head reads them. None = none, as with retrieval OFF.
        labels: int64 [B, T], the next token at each position, or `loss.IGNORED_LABEL`. Only the loss reads them.
    """

    tokens: Any
    documents: Any = None
    neighbors: Any = None
    neighbor_lengths: Any = None
    lengths: Any = None
    votes: Any = None
    labels: Any = None

    def map(self, convert: Callable[[Any], Any]) -> "Inputs":
        """Convert all values that are not None."""
        return Inputs(*(None if value is None else convert(value) for value in self))

    def rows(self, rows: Any) -> "Inputs":
        """Some of the rows; all must have neighbors, or none."""
        return self.map(lambda value: value[rows])

    def off(self) -> "Inputs":
        """The same with retrieval OFF."""
        return self._replace(neighbors=None, neighbor_lengths=None, votes=None)

    def following(self) -> Any:
        """The token that follows each one, int64 [B, T]: its label, if it has one that is not ignored; 0 after the last one."""
        following = F.pad(self.tokens[:, 1:], (0, 1))
        return following if self.labels is None else self.labels.where(self.labels >= 0, following)

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
