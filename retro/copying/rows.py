"""A text in a decoder's batch, on the host: its tokens, how many of them were read, and the neighbors of its chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from indexing.suffixes.search import Match
from retro.copying.provenance import ChunkWithNeighbors, Neighbors

RetrieveNeighbors = Callable[[np.ndarray], tuple[np.ndarray, ...]]
"""Chunks [n, m] → the fields of `Neighbors` in order; ids and distances are optional."""


class WholeDatastore(Protocol):
    """Finds the tokens that follow a text in the whole datastore: `indexing.suffixes.search.SuffixIndex`."""

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        """The votes for the tokens of a text [t] from `first` on, [t - first, 32] int64 as in `Inputs.votes`."""

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """The votes for the token after each of N texts, [N, 32] int64."""

    def longest_match(self, text: np.ndarray) -> Match:
        """The longest end of a text that occurs."""


@dataclass(eq=False)
class Row:
    """A text in the batch.

    Attributes:
        tokens: int64 [t], the tokens in the context.
        retrieve: finds the neighbors of its complete chunks, R tokens each; None = retrieval OFF.
        slot: row of the cache.
        neighbors: of its complete chunks in the context, as far as they are needed.
        dropped: number of chunks before the context.
        num_read: number of tokens in the cache.
        draft: int64, tokens that may follow. A step reads them too.
        trust: in each expert of the head's switch, earned by the prompt; None = as before the first token. Generated
            tokens earn none: what was copied would be copied again.
        copy_strength: see `GenerationSettings`.
        inserted: [start, stop) of the prompt's tokens that are passages of the datastore or copied from it. They earn no
            trust: they occur in it whatever the text is about.
        num_generated: number of tokens after the prompt.
        is_known: whether the last tokens of the prompt occur in the datastore (`switch.KNOWN`); None = not searched yet.
        prompt: activations [n, D] of the prompt as far as it was read; None once trust is known.
    """

    tokens: np.ndarray
    retrieve: RetrieveNeighbors | None
    slot: int
    neighbors: list[Neighbors] = field(default_factory=list)
    dropped: int = 0
    num_read: int = 0
    draft: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    trust: tuple[float, ...] | None = None
    copy_strength: float = 1.0
    inserted: tuple[int, int] = (0, 0)
    num_generated: int = 0
    is_known: bool | None = None
    prompt: Tensor | None = field(default_factory=lambda: torch.empty(0))

    @property
    def unread(self) -> np.ndarray:
        """Tokens of the text and then of its draft that are not in the cache."""
        return np.append(self.tokens[self.num_read :], self.draft)

    @property
    def num_unread(self) -> int:
        return len(self.tokens) + len(self.draft) - self.num_read

    def neighbor_texts(self) -> list[np.ndarray]:
        """Return the tokens of the neighbors of the last complete chunk, without padding."""
        last = self.neighbors[-1] if self.neighbors else None
        return [] if last is None else [row[:length] for row, length in zip(last.tokens, last.lengths, strict=True)]

    def neighbor_inputs(self) -> dict[str, np.ndarray]:
        """Neighbors [1, U, K, R] of the complete chunks and their lengths [1, U, K], as in `Inputs`; empty if there are
        none."""
        if not self.neighbors:
            return {}
        tables = (np.stack([getattr(of_chunk, name) for of_chunk in self.neighbors]) for name in ("tokens", "lengths"))
        return dict(zip(("neighbors", "neighbor_lengths"), (table[None] for table in tables), strict=True))

    def histories(self) -> list[np.ndarray]:
        """Return the text up to its last token, and up to each token of the draft: [t], [t + 1] …"""
        if not len(self.draft):
            return [self.tokens]
        whole = np.append(self.tokens, self.draft)
        return [whole[:stop] for stop in range(len(self.tokens), len(whole) + 1)]

    @property
    def num_neighbors(self) -> int:
        """Number K of neighbors of a chunk; 0 as long as no chunk is complete, or with retrieval OFF."""
        return len(self.neighbors[0].tokens) if self.neighbors else 0

    def copy(self, slot: int) -> "Row":
        return replace(self, slot=slot, neighbors=[*self.neighbors])

    def drop(self, num_chunks: int, chunk_length: int) -> None:
        """Drop the oldest chunks of the context; the other tokens must be read again."""
        self.tokens, self.neighbors = self.tokens[num_chunks * chunk_length :], self.neighbors[num_chunks:]
        self.dropped, self.num_read = self.dropped + num_chunks, 0

    def missing_chunks(self, chunk_length: int) -> np.ndarray:
        """Return the complete chunks [n, m] whose neighbors have not been found."""
        complete = len(self.tokens) // chunk_length * chunk_length
        return self.tokens[:complete].reshape(-1, chunk_length)[len(self.neighbors) :]

    def chunks_read(self, since: int, chunk_length: int) -> tuple[ChunkWithNeighbors, ...]:
        """Return the chunks whose neighbors were read, from the chunk with the number `since` on."""
        chunks = self.tokens[: len(self.neighbors) * chunk_length].reshape(-1, chunk_length)
        first = max(0, since - self.dropped)
        pairs = enumerate(zip(chunks[first:], self.neighbors[first:], strict=True), start=self.dropped + first)
        return tuple(ChunkWithNeighbors(chunk, tokens, neighbors) for chunk, (tokens, neighbors) in pairs)


def find_neighbors(rows: Sequence[Row], chunk_length: int) -> None:
    """Find the neighbors of all complete chunks of rows. Rows with equal `retrieve` share a search."""
    missing = [(row, chunks) for row in rows if row.retrieve and len(chunks := row.missing_chunks(chunk_length))]
    searches = list[RetrieveNeighbors]()
    for row, _ in missing:
        if row.retrieve is not None and row.retrieve not in searches:
            searches.append(row.retrieve)
    for retrieve in searches:
        searching = [(row, chunks) for row, chunks in missing if row.retrieve == retrieve]
        neighbors = iter(Neighbors(*retrieve(np.concatenate([chunks for _, chunks in searching]))).of_chunks())
        for row, chunks in searching:
            row.neighbors += islice(neighbors, len(chunks))
