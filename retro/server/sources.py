"""Sources of answers as JSON: the neighbors that the model read, the runs that it copied from them, and verbatim runs.

GeneratedToken.read, Scores.read ─► ids ─► chunks of the datastore with their documents ─► ReadChunk
GeneratedToken.copied, Scores.copied ─► characters of the neighbor's text ─► Copy ─► joined to runs
GeneratedToken.token ─► `GeneratedRuns` ─► runs that occur verbatim in the datastores
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from indexing.retrieval.retriever import Retriever
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import Scores
from retro.inference.sources import CopiedFrom, Neighbors, ReadChunk
from retro.server import schemas
from retro.server.chunk_texts import ChunkTexts
from retro.server.search_api import hit_fields
from retro.server.service import Service
from retro.server.spans import characters
from retro.server.verbatim_runs import GeneratedRuns

_LEAST_SHARE = 0.5  # of a token's probability, from which on it counts as copied

Sourced = tuple[GeneratedToken, schemas.Sources | None]
"""A token, and what is new in the sources of its continuation."""


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

    def add_generated(self, token: GeneratedToken) -> schemas.Sources:
        """Return what a generated token adds."""
        sources = self.add(token.text, token.read, token.copied)
        sources.runs = None if self.runs is None else self.runs.add(token)
        return sources

    def add(self, text: str, read: Iterable[ReadChunk], copied: CopiedFrom | None) -> schemas.Sources:
        """Return what the next token adds; `text` is its text."""
        start, self.length = self.length, self.length + len(text)
        # A model that copies from the whole datastore alone reads no neighbors.
        chunks = [self._chunk(chunk) for chunk in read if len(chunk.neighbors.lengths)]
        copies = []
        if copied is not None and copied.share >= _LEAST_SHARE:
            copies = [self._copy((start, self.length), copied)]
        return schemas.Sources(chunks=chunks, copies=copies)

    def _chunk(self, read: ReadChunk) -> schemas.ReadChunk:
        neighbors = self._read[read.number] = read.neighbors
        assert neighbors.ids is not None
        assert neighbors.distances is not None
        hits = self.retriever.lookup.hits(neighbors.ids, neighbors.distances)
        return schemas.ReadChunk(
            chunk=read.number,
            text=self.retriever.tokenizer.decode(read.tokens),
            neighbors=[schemas.Hit(**hit_fields(hit)) for hit in hits],
        )

    def _copy(self, text: tuple[int, int], copied: CopiedFrom) -> schemas.Copy:
        neighbors = self._read[copied.chunk]
        assert neighbors.ids is not None
        row = neighbors.tokens[copied.neighbor][: neighbors.lengths[copied.neighbor]]
        ends = self.texts.ends(int(neighbors.ids[copied.neighbor]), row)
        return schemas.Copy(
            text=text,
            chunk=copied.chunk,
            neighbor=copied.neighbor,
            neighbor_text=characters(ends, copied.position, copied.position + 1),
            tokens=1,
            share=copied.share,
        )


async def with_sources(
    steps: AsyncIterator[list[GeneratedToken]],
    service: Service | None,
    prompts: Sequence[np.ndarray],
    starts: Sequence[int],
) -> AsyncIterator[list[Sourced]]:
    """Add to each token what is new in the sources of its continuation.

    Args:
        steps: steps of a generation.
        service: its retriever is the model's; None = no sources are wanted.
        prompts: of each continuation, [t].
        starts: for each continuation, the characters of the answer before it.
    """
    finders = [] if service is None else await asyncio.to_thread(_finders, service, prompts, starts)

    def of_step(step: list[GeneratedToken]) -> list[Sourced]:
        return [(token, finders[token.row].add_generated(token)) for token in step]

    async for step in steps:
        yield await asyncio.to_thread(of_step, step) if finders else [(token, None) for token in step]


def _finders(service: Service, prompts: Sequence[np.ndarray], starts: Sequence[int]) -> list[SourceFinder]:
    retriever, texts = service.retriever, ChunkTexts(service.retriever)
    traced = service.traced() if service.traces else []
    return [
        SourceFinder(retriever, texts, start, GeneratedRuns(traced, texts, prompt, start) if traced else None)
        for prompt, start in zip(prompts, starts, strict=True)
    ]


def sources_of_scores(retriever: Retriever, texts: Sequence[str], scores: Scores) -> schemas.Sources:
    """Return the sources of a scored text.

    Args:
        retriever: of the model.
        texts: text of each scored token.
        scores: of the text, with `read` and `copied`.
    """
    finder, read, parts = SourceFinder(retriever, ChunkTexts(retriever)), scores.read, list[schemas.Sources]()
    for text, copied in zip(texts, scores.copied, strict=True):
        parts.append(finder.add(text, read, copied))
        read = []
    return joined(parts) or schemas.Sources(chunks=[], copies=[])


def joined(parts: Iterable[schemas.Sources | None]) -> schemas.Sources | None:
    """Join the sources of a text in order; copies that continue each other become one run. None if no part has sources."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    runs: list[schemas.Copy] = []
    for copy in (copy for part in present for copy in part.copies):
        if runs and _continues(runs[-1], copy):
            runs[-1] = _run_of(runs[-1], copy)
        else:
            runs.append(copy)
    traced = [part.runs for part in present if part.runs is not None]
    return schemas.Sources(
        chunks=[chunk for part in present for chunk in part.chunks],
        copies=runs,
        runs=list(chain(*traced)) if traced else None,
    )


def _continues(run: schemas.Copy, copy: schemas.Copy) -> bool:
    """Whether a copy is the next text of a run, in the answer and in the same neighbor.

    Tokens that are parts of one character all have the character.
    """
    first, last = run.neighbor_text
    return (run.chunk, run.neighbor, run.text[1]) == (
        copy.chunk,
        copy.neighbor,
        copy.text[0],
    ) and first <= copy.neighbor_text[0] <= last <= copy.neighbor_text[1]


def _run_of(run: schemas.Copy, copy: schemas.Copy) -> schemas.Copy:
    tokens = run.tokens + copy.tokens
    return schemas.Copy(
        text=(run.text[0], copy.text[1]),
        chunk=run.chunk,
        neighbor=run.neighbor,
        neighbor_text=(run.neighbor_text[0], copy.neighbor_text[1]),
        tokens=tokens,
        share=(run.share * run.tokens + copy.share * copy.tokens) / tokens,
    )
