"""Where predictions come from: neighbors that the model read, and tokens that the copy head copied from them."""

from typing import NamedTuple

import numpy as np


class Neighbors(NamedTuple):
    """Neighbors of n chunks; of one chunk without the dimension n.

    Attributes:
        tokens: int64 [n, K, R].
        lengths: int64 [n, K], number of tokens that are not padding; 0 = no neighbor.
        ids: int64 [n, K] of the retrieval set, -1 = none; None if the neighbors are not from a datastore.
        distances: float32 [n, K], squared L2 distances of the unit vectors; None as `ids`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray | None = None
    distances: np.ndarray | None = None

    def of_chunks(self) -> "list[Neighbors]":
        """Return the neighbors of each of the n chunks."""
        return [Neighbors(*rows) for rows in zip(*(table for table in self if table is not None), strict=True)]


class ChunkWithNeighbors(NamedTuple):
    """A complete chunk, whose neighbors the model reads for the tokens after it.

    Attributes:
        number: from 0, counted from the beginning of the text.
        tokens: int64 [m].
        neighbors: its neighbors.
    """

    number: int
    tokens: np.ndarray
    neighbors: Neighbors


class CopiedFrom(NamedTuple):
    """The token of a neighbor that a token was copied from: that with the longest match among those that vote for it.

    Attributes:
        share: share of the token's probability that is copied from the neighbors, 0 to 1.
        chunk: number of the chunk whose neighbors were read.
        neighbor: number of the neighbor.
        position: number of the token in the neighbor and its continuation.
    """

    share: float
    chunk: int
    neighbor: int
    position: int
