"""Passages for a question: chunks that a search finds, widened to consecutive chunks within a budget of tokens.

queries ─► those that a chunk matches ─► ranked chunks, of each query in turn ─► up to k anchors, each with its continuation
        ─► chunks after and before each anchor, the best one first, until the budget is used
        ─► runs of consecutive chunks = passages: anchors that grow together are one
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import numpy as np

from indexing.retrieval.filters import Filters
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import Passage, document_fields
from indexing.retrieval.search import ChunkSearch
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, neighbor_ids
from indexing.tokenization.language import Language, language_of
from indexing.tokenization.texts import as_texts

_CANDIDATES = 8  # ranked chunks for each passage: several may be of one passage
_HALF = "\ufffd \n"  # a chunk can begin or end inside a character

LEAST_MATCH: dict[Language, float] = {"en": 0.25, "zh": 0.13}
"""Default: how much of a question a passage must say. Chosen on SQuAD and CMRC 2018, where 94% and all of the questions keep
their passages, and 18% and 1% of foreign ones (docs/results/question-answering.md). Every Chinese character is a term, and
many are in all texts."""


def find_passages(
    search: ChunkSearch,
    queries: str | Sequence[str],
    k: int,
    tokens: int,
    *,
    retrieval: Retrieval | None = None,
    filters: Filters | None = None,
    least_match: float | None = None,
    documents_first: Sequence[int] = (),
) -> list[Passage]:
    """Find passages, best first. For the errors see `Retriever.passages`.

    Args:
        search: of the datastores.
        queries: texts whose results take turns; a string is one.
        k: largest number of passages.
        tokens: largest number of tokens of all passages.
        retrieval: how chunks are found; None = the best way that the datastores have.
        filters: column of the documents' metadata → the required value, or a list of accepted values.
        least_match: how much of a query the best chunk must say (`ChunkSearch.match`), 0 to 1. A query with a smaller match
            finds nothing. None = `LEAST_MATCH`.
        documents_first: numbers of documents (`RetrievalSet.documents_of`) that come first, from their beginning as far
            as they fit, whether found or not.
    """
    for name, value in (("k", k), ("tokens", tokens)):
        if value < 1:
            raise InputError(f"{name} = {value}: must be at least 1.")
    if least_match is not None and not 0 <= least_match <= 1:
        raise InputError(f"least_match = {least_match}: accepted are 0 to 1; 0 = passages for every question.")
    texts = as_texts(queries)
    ranked = search.rank(texts, k * _CANDIDATES, filters=filters, retrieval=retrieval or search.best)
    rows = [list(zip(*row, strict=True)) for row in zip(ranked.ids.tolist(), ranked.scores.tolist(), strict=True)]
    least = LEAST_MATCH[language_of(texts)] if least_match is None else least_match
    if least > 0:
        rows = [
            [] if match < least else row for row, match in zip(rows, search.match(texts, filters=filters), strict=True)
        ]
    in_turn = [hit for hit in chain.from_iterable(zip_longest(*rows)) if hit is not None and hit[0] >= 0]
    chosen = _ChosenChunks(search.retrieval, tokens)
    for document in documents_first[:k]:
        chosen.add_document(document)
    for chunk, score in in_turn:
        chosen.add_hit(chunk, score, k)
    chosen.grow()
    return [_passage(search, *run) for run in chosen.runs()]


@dataclass
class _ChosenChunks:
    """Chunks that passages consist of. Ids are those of the retrieval set.

    Attributes:
        retrieval: the datastores.
        tokens: that may still be added.
        chunks: chosen ids.
        anchors: id → score, best first.
        ranges: anchor → ids [first, last) of its document.
    """

    retrieval: RetrievalSet
    tokens: int
    chunks: set[int] = field(default_factory=set)
    anchors: dict[int, float] = field(default_factory=dict)
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add_document(self, document: int) -> None:
        """Choose the chunks of a document from its beginning."""
        number, local = document >> CHUNK_ID_BITS, document & ((1 << CHUNK_ID_BITS) - 1)
        start, stop = neighbor_ids(number, np.array(self.retrieval.splits[number].chunk_range(local))).tolist()
        if self._take(start, (start, stop)):
            self.anchors[start], self.ranges[start] = 0.0, (start, stop)
            all(self._take(chunk, (start, stop)) for chunk in range(start + 1, stop))

    def add_hit(self, chunk: int, score: float, k: int) -> None:
        """Choose a chunk and its continuation: as a new anchor, unless there are k, or next to chosen chunks."""
        document = self._document(chunk)
        near = [other for other in (chunk - 1, chunk, chunk + 1) if document[0] <= other < document[1]]
        joins = not self.chunks.isdisjoint(near)
        if not joins and len(self.anchors) == k:
            return
        if self._take(chunk, document) and not joins:
            self.anchors[chunk], self.ranges[chunk] = score, document
        if chunk in self.chunks:
            self._take(chunk + 1, document)

    def grow(self) -> None:
        """Choose chunks after and before the anchors in turn, as far as they fit."""
        growing = list(self.anchors)
        while growing:
            growing = [anchor for anchor in growing if self._take_next(anchor, 1) + self._take_next(anchor, -1)]

    def runs(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield the passages: ids [start, stop) of the chunks, the first id of the document, the score."""
        read = set[int]()
        for anchor, score in self.anchors.items():
            if anchor not in read:
                start, stop = self._end(anchor, -1) + 1, self._end(anchor, 1)
                read |= set(range(start, stop))
                yield start, stop, self.ranges[anchor][0], score

    def _take_next(self, anchor: int, step: int) -> bool:
        return self._take(self._end(anchor, step), self.ranges[anchor])

    def _end(self, anchor: int, step: int) -> int:
        """The first id after (`step` = 1) or before (-1) an anchor that is not chosen, or not of its document."""
        first, last = self.ranges[anchor]
        while first <= anchor < last and anchor in self.chunks:
            anchor += step
        return anchor

    def _take(self, chunk: int, document: tuple[int, int]) -> bool:
        """Choose a chunk of a document [first, last); False if it is of another one, chosen, or does not fit."""
        if not document[0] <= chunk < document[1] or chunk in self.chunks:
            return False
        split, local = self.retrieval.splits[chunk >> CHUNK_ID_BITS], chunk & ((1 << CHUNK_ID_BITS) - 1)
        length = int(split.lengths.read(local, local + 1)[0])
        if length > self.tokens:
            return False
        self.chunks.add(chunk)
        self.tokens -= length
        return True

    def _document(self, chunk: int) -> tuple[int, int]:
        number, local = chunk >> CHUNK_ID_BITS, chunk & ((1 << CHUNK_ID_BITS) - 1)
        _, first, last = self.retrieval.splits[number].documents_of(np.array([local]))
        first_id, last_id = neighbor_ids(number, np.array([first[0], last[0]])).tolist()
        return first_id, last_id


def _passage(search: ChunkSearch, start: int, stop: int, first: int, score: float) -> Passage:
    ids = np.arange(start, stop, dtype=np.int64)
    split, local = search.retrieval.splits[start >> CHUNK_ID_BITS], start & ((1 << CHUNK_ID_BITS) - 1)
    lengths = split.lengths.read(local, local + len(ids)).astype(np.int64)
    rows = split.tokens.read(local, local + len(ids))
    tokens = rows[np.arange(rows.shape[1]) < lengths[:, None]].astype(np.int64)
    fields = document_fields(search.retrieval.metadata(ids[:1])[0])
    return Passage(
        text=search.tokenizer.decode(tokens).strip(_HALF),
        **{name: fields[name] for name in ("document_id", "title", "source")},
        score=score,
        chunk_id=start,
        num_chunks=len(ids),
        first_chunk=start - first,
        tokens=len(tokens),
    )
