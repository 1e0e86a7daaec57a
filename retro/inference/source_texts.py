"""Sources of a text as texts: the neighbors that the model read, the runs that it copied from them, and verbatim runs.

GeneratedToken.read, Scores.read ─► ids ─► chunks of the datastore with their documents ─► ReadChunk
GeneratedToken.copied, Scores.copied ─► characters of the neighbor's text ─► Copy ─► joined to runs
GeneratedToken.token ─► `GeneratedRuns` ─► runs that occur verbatim in the datastores
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from indexing.retrieval.results import Hit
from indexing.retrieval.retriever import Retriever
from retro.copying.provenance import ChunkWithNeighbors, CopiedFrom, Neighbors
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import Scores
from retro.inference.spans import ChunkTexts, characters
from retro.inference.trust import Trust
from retro.inference.verbatim_runs import GeneratedRun, GeneratedRuns, grouped_runs

_LEAST_SHARE = 0.5  # of a token's probability, from which on it counts as copied


@dataclass(frozen=True)
class ReadChunk:
    """A complete chunk and its neighbors, best first. The model reads them for the tokens of the next chunk."""

    chunk: Annotated[int, Field(description="Its number in what the model reads (prompt and continuation), from 0.")]
    text: str
    neighbors: list[Hit]


@dataclass(frozen=True)
class Copy:
    """A run of tokens that the copy head copied from a neighbor: at least half of the probability of each."""

    text: Annotated[tuple[int, int], Field(description="Characters [start, stop) of the answer's text.")]
    chunk: Annotated[int, Field(description="Number of the chunk whose neighbors were read.")]
    neighbor: Annotated[int, Field(description="Number of the neighbor, from 0.")]
    neighbor_text: Annotated[
        tuple[int, int], Field(description="Characters [start, stop) of its `text + continuation`.")
    ]
    tokens: int
    share: Annotated[float, Field(description="Mean share of a token's probability that is copied, 0.5 to 1.")]


def _may_be_absent(description: str) -> Any:
    """A field that an answer leaves out if it is None."""
    return Field(exclude_if=lambda value: value is None, description=description)


@dataclass(frozen=True)
class Sources:
    """What the model read and copied, and what occurs verbatim; in an event of a stream, only what is new."""

    chunks: list[ReadChunk]
    copies: list[Copy]
    runs: Annotated[
        list[GeneratedRun] | None,
        _may_be_absent(
            "In the order of the text, those without a word last; in an event of a stream those that ended, one by one. "
            "Absent if no datastore has the stage `suffixes`, and in `/score`."
        ),
    ] = None
    trust: Annotated[
        Trust | None,
        _may_be_absent(
            "In retrieval, after the prompt; in the first event of a stream. Absent if the model copies nothing from "
            "neighbors or datastore, with retrieval OFF, and in `/score`."
        ),
    ] = None
    copied_tokens: Annotated[
        float | None,
        _may_be_absent(
            "How many tokens of the answer were copied from neighbors and datastore: the sum of the copied shares of "
            "their probabilities. Absent in `/score`."
        ),
    ] = None


@dataclass
class SourceFinder:
    """Finds the sources of one text, from its first token to its last.

    Attributes:
        retriever: of the model.
        texts: shared by the texts of a request.
        length: characters of the text so far.
        runs: finds verbatim runs; None = they are not returned.
    """

    retriever: Retriever
    texts: ChunkTexts
    length: int = 0
    runs: GeneratedRuns | None = None
    _read: dict[int, Neighbors] = field(default_factory=dict)

    def add_generated(self, token: GeneratedToken) -> Sources:
        """Return what a generated token adds."""
        runs = None if self.runs is None else self.runs.add(token)
        read = self.add(token.text, token.read, token.copied)
        return replace(read, runs=runs, trust=token.trust, copied_tokens=token.copied_share)

    def add(self, text: str, read: Iterable[ChunkWithNeighbors], copied: CopiedFrom | None) -> Sources:
        """Return what the next token adds; `text` is its text."""
        start, self.length = self.length, self.length + len(text)
        # A model that copies from the whole datastore alone reads no neighbors.
        chunks = [self._chunk(chunk) for chunk in read if len(chunk.neighbors.lengths)]
        copies = []
        if copied is not None and copied.share >= _LEAST_SHARE:
            copies = [self._copy((start, self.length), copied)]
        return Sources(chunks=chunks, copies=copies)

    def _chunk(self, read: ChunkWithNeighbors) -> ReadChunk:
        neighbors = self._read[read.number] = read.neighbors
        assert neighbors.ids is not None
        assert neighbors.distances is not None
        hits = self.retriever.lookup.hits(neighbors.ids, neighbors.distances)
        return ReadChunk(read.number, self.retriever.tokenizer.decode(read.tokens), hits)

    def _copy(self, text: tuple[int, int], copied: CopiedFrom) -> Copy:
        neighbors = self._read[copied.chunk]
        assert neighbors.ids is not None
        row = neighbors.tokens[copied.neighbor][: neighbors.lengths[copied.neighbor]]
        ends = self.texts.ends(int(neighbors.ids[copied.neighbor]), row)
        return Copy(
            text=text,
            chunk=copied.chunk,
            neighbor=copied.neighbor,
            neighbor_text=characters(ends, copied.position, copied.position + 1),
            tokens=1,
            share=copied.share,
        )


def sources_of_scores(retriever: Retriever, texts: Sequence[str], scores: Scores) -> Sources:
    """Return the sources of a scored text.

    Args:
        retriever: of the model.
        texts: text of each scored token.
        scores: of the text, with `read` and `copied`.
    """
    finder, read, parts = SourceFinder(retriever, ChunkTexts(retriever)), scores.read, list[Sources]()
    for text, copied in zip(texts, scores.copied, strict=True):
        parts.append(finder.add(text, read, copied))
        read = []
    return joined(parts) or Sources(chunks=[], copies=[])


def joined(parts: Iterable[Sources | None]) -> Sources | None:
    """Join the sources of a text in order; copies that continue each other become one run, and verbatim runs are
    grouped.

    None if no part has sources.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    copies: list[Copy] = []
    for copy in chain.from_iterable(part.copies for part in present):
        if copies and _continues(copies[-1], copy):
            copies[-1] = _with_next(copies[-1], copy)
        else:
            copies.append(copy)
    traced = [part.runs for part in present if part.runs is not None]
    shares = [part.copied_tokens for part in present if part.copied_tokens is not None]
    return Sources(
        chunks=list(chain.from_iterable(part.chunks for part in present)),
        copies=copies,
        runs=grouped_runs(list(chain(*traced))) if traced else None,
        trust=next((part.trust for part in present if part.trust is not None), None),
        copied_tokens=sum(shares) if shares else None,
    )


def _continues(before: Copy, copy: Copy) -> bool:
    """Whether a copy follows another one, in the answer and in the same neighbor.

    Tokens that are parts of one character all have the character.
    """
    first, last = before.neighbor_text
    follows = (before.chunk, before.neighbor, before.text[1]) == (copy.chunk, copy.neighbor, copy.text[0])
    return follows and first <= copy.neighbor_text[0] <= last <= copy.neighbor_text[1]


def _with_next(before: Copy, copy: Copy) -> Copy:
    tokens = before.tokens + copy.tokens
    return replace(
        before,
        text=(before.text[0], copy.text[1]),
        neighbor_text=(before.neighbor_text[0], copy.neighbor_text[1]),
        tokens=tokens,
        share=(before.share * before.tokens + copy.share * copy.tokens) / tokens,
    )
