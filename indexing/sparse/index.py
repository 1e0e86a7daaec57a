"""Search the sparse index: BM25 of all chunks of one or several datastores, by inverted lists.

    terms of a query ─► best passages ─► their chunks ─► BM25 of the chunk + weight · BM25 of its passage ─► best chunks

The segments of every shard and datastore are linked into one tantivy index of chunks and one of passages, so the weight
of a term and the mean length are those of all chunks: a term in a small appended shard weighs as much as in a large
one. The constants are the usual ones, k1 = 1.2 and b = 0.75. Files are memory-mapped.
"""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from indexing.sparse.segments import PASSAGE, STORED, SUFFIXES, TERMS, Kind, temporary_folder, with_tokenizer
from indexing.store.artifact import intact, reading, stored_json
from indexing.store.datastore import Split, shard_name
from indexing.store.errors import DoesNotFit, InputError
from indexing.store.mapped import registered
from indexing.store.remote import fetch_manifest, present
from indexing.store.retrieval_set import CHUNK_ID_BITS, neighbor_ids
from indexing.store.schemas import MOST_SHARDS
from indexing.store.sharded_array import open_array
from indexing.tokenization.texts import as_texts

FOLDER = "sparse"  # of a datastore
_K1 = 1.2  # tantivy's saturation: how soon more occurrences of a term stop counting
_PASSAGE_WEIGHT = 2.0
_FEW_TERMS = 8  # a query with more terms says by itself which chunk it means
_PASSAGES = 64  # of a query, at least, so that the first chunks do not depend on k
_LOCAL = (1 << CHUNK_ID_BITS) - 1


@dataclass(frozen=True)
class _Lists:
    """The inverted lists of chunks or of passages.

    Attributes:
        kind: which.
        starts: [segments] int64, how many chunks or passages are in the segments before each.
        size: number of all chunks or passages.
        folders: of the shards.
        schema, searcher: tantivy's.
    """

    kind: Kind
    starts: np.ndarray
    size: int
    folders: Sequence[Path]
    schema: Any
    searcher: Any

    def largest(self, query: Counter[str]) -> float:
        """The BM25 of a text that repeats all terms of the query endlessly."""
        with reading(*self.folders):
            frequencies = np.array([self.searcher.doc_freq(TERMS, term) for term in query], dtype=np.float64)
        weights = np.log1p((self.size - frequencies + 0.5) / (frequencies + 0.5))
        return float((_K1 + 1) * weights @ np.array(list(query.values()), dtype=np.float64))

    def best(
        self, query: Counter[str], count: int, passages: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions [r] int64 of the texts with the highest BM25, and their scores [r] float32.

        Args:
            query: terms and how often they count.
            count: maximum of results.
            passages: first chunks of the passages to search; None searches all.
        """
        from tantivy import Occur, Query

        scored = Query.boolean_query(
            [
                (
                    Occur.Should,
                    Query.boost_query(Query.term_query(self.schema, TERMS, term, STORED[self.kind]), float(weight)),
                )
                for term, weight in query.items()
            ]
        )
        if passages is not None:
            allowed = Query.boost_query(Query.term_set_query(self.schema, PASSAGE, list(passages)), 0.0)
            scored = Query.boolean_query([(Occur.Must, scored), (Occur.Must, allowed)])
        return self._run(scored, count)

    def _run(self, query: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
        with reading(*self.folders):
            try:
                hits = self.searcher.search(query, max(1, min(count, self.size)), count=False).hits
            except ValueError as error:
                raise DoesNotFit(f"tantivy cannot search its lists of {self.kind} ({error!s:.300})") from error
            places = np.array([(place.segment_ord, place.doc) for _, place in hits], dtype=np.int64).reshape(-1, 2)
            positions = self.starts[places[:, 0]] + places[:, 1]
            if positions.max(initial=-1) >= self.size:
                raise DoesNotFit("the lists hold texts that do not exist")
        return positions, np.array([score for score, _ in hits], dtype=np.float32)


@dataclass(frozen=True)
class SparseIndex:
    """The inverted lists of several splits, opened for search. Several threads can search at once.

    Attributes:
        num_chunks: chunks in the index.
        chunks, passages: their inverted lists.
        chunk_starts, passage_starts: [shards + 1] int64, how many chunks and passages are in the shards before each.
        first_ids: [shards] int64, id in the retrieval set of the first chunk of each shard.
        borders: of each shard, the first chunk of each passage and the stop of the last one [passages + 1] int64, ids
            of the split.
    """

    num_chunks: int
    chunks: _Lists
    passages: _Lists
    chunk_starts: np.ndarray
    passage_starts: np.ndarray
    first_ids: np.ndarray
    borders: tuple[np.ndarray, ...]

    @classmethod
    def open(cls, splits: Sequence[Split], shards: Sequence[int] | None = None) -> "SparseIndex":
        """Open the index over the chunks of several splits, numbered as in a retrieval set.

        Args:
            splits: training splits of the datastores.
            shards: open only these shards of each; None opens all.

        Raises:
            InputError: a shard is missing or damaged.
        """
        folders, first_ids = [], []
        for datastore, split in enumerate(splits):
            for shard in range(len(split.chunk_rows)) if shards is None else shards:
                folders.append(split.folder / FOLDER / shard_name(shard))
                first_ids.append(int(neighbor_ids(datastore, split.tokens.starts[[shard]])[0]))
        sizes = [_sizes(folder) for folder in folders]
        chunks, passages = (_lists(folders, [shard[kind] for shard in sizes], kind) for kind in ("chunks", "passages"))
        return cls(
            num_chunks=chunks.size,
            chunks=chunks,
            passages=passages,
            chunk_starts=np.cumsum([0, *(sum(shard["chunks"]) for shard in sizes)]),
            passage_starts=np.cumsum([0, *(sum(shard["passages"]) for shard in sizes)]),
            first_ids=np.array(first_ids, dtype=np.int64),
            borders=tuple(open_array(intact(folder / "passages.npy")) for folder in folders),
        )

    def search(
        self, queries: Sequence[Sequence[str]], k: int, among: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the chunks with the highest score: the BM25 of the chunk plus twice that of its passage.

        The passage counts less in queries of more than eight different terms, in proportion. Chunks come from the
        `max(k, 64)` passages with the highest BM25. Of equal scores the smallest id is first.

        Args:
            queries: the terms of n queries; a string is one term, and a repeated term counts as often.
            k: chunks for each query.
            among: chunk ids to search, in every split; None searches all chunks.

        Returns:
            ids [n, k] int64 of the retrieval set, best first, and scores [n, k] float32; -1 and 0 if fewer chunks
            contain a term.
        """
        ids, scores = np.full((len(queries), k), -1, dtype=np.int64), np.zeros((len(queries), k), dtype=np.float32)
        allowed = None if among is None else np.unique(np.asarray(among, dtype=np.int64))
        for row, query in enumerate(queries):
            hits, best = self._search(Counter(as_texts(query)), max(k, _PASSAGES), allowed)
            order = np.lexsort((hits, -best))[:k]
            ids[row, : len(order)], scores[row, : len(order)] = hits[order], best[order]
        return ids, scores

    def largest(self, query: Sequence[str]) -> float:
        """The score that a chunk would have if it and its passage repeated all terms of the query endlessly; 0 without
        terms."""
        counts = Counter(as_texts(query))
        return self.chunks.largest(counts) + _passage_weight(counts) * self.passages.largest(counts)

    def _search(self, query: Counter[str], count: int, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Ids [r] int64 of chunks of the best passages, and their scores [r] float32."""
        among = None if allowed is None else self._passages_of(allowed)
        positions, of_passage = self.passages.best(query, count, among)
        first, stop = self._ranges(positions)
        order = np.argsort(first)
        first, stop, of_passage = first[order], stop[order], of_passage[order]
        local = first & _LOCAL
        most = int((stop - first).sum()) * max(1, len(np.unique(self.first_ids >> CHUNK_ID_BITS)))
        positions, scores = self.chunks.best(query, most, local.tolist()) if len(first) else (positions, of_passage)
        ids = self._ids(positions)
        of = np.searchsorted(first, ids, side="right") - 1
        inside = (of >= 0) & (ids < stop[of]) if len(first) else np.zeros(0, dtype=bool)  # not of another datastore
        ids, scores, of = ids[inside], scores[inside], of[inside]
        # A passage may have the term only where a border cuts it. Its first chunk stands for it.
        cut = np.setdiff1d(np.arange(len(first)), of)
        ids, of = np.append(ids, first[cut]), np.append(of, cut)
        scores = np.append(scores, np.zeros(len(cut), np.float32))
        if allowed is not None:
            is_allowed = np.isin(ids & _LOCAL, allowed)
            ids, scores, of = ids[is_allowed], scores[is_allowed], of[is_allowed]
        return ids, scores + np.float32(_passage_weight(query)) * of_passage[of]

    def _ids(self, positions: np.ndarray) -> np.ndarray:
        """Positions of chunks → ids in the retrieval set."""
        shards = np.searchsorted(self.chunk_starts, positions, side="right") - 1
        return self.first_ids[shards] + positions - self.chunk_starts[shards]

    def _ranges(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of passages → the first id and the stop of their chunks in the retrieval set."""
        out = np.empty((2, len(positions)), dtype=np.int64)
        shards = np.searchsorted(self.passage_starts, positions, side="right") - 1
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            local, borders = positions[rows] - self.passage_starts[shard], self.borders[shard]
            out[:, rows] = np.stack([borders[local], borders[local + 1]]) + self.first_ids[shard] - borders[0]
        return out[0], out[1]

    def _passages_of(self, allowed: np.ndarray) -> list[int]:
        """First chunks of the passages that some chunks of a split [n] int64, sorted, are part of, in every split."""
        passages = []
        for borders in self.borders:
            inside = allowed[(allowed >= borders[0]) & (allowed < borders[-1])]
            passages.append(np.unique(borders[np.searchsorted(borders, inside, side="right") - 1]))
        return np.unique(np.concatenate(passages)).tolist() if passages else []


def _passage_weight(query: Counter[str]) -> float:
    return _PASSAGE_WEIGHT * min(1.0, _FEW_TERMS / max(1, len(query)))


_Texts = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Segments(TypedDict):
    """`segments.json`: texts of each segment."""

    chunks: Annotated[list[_Texts], Field(max_length=MOST_SHARDS)]
    passages: Annotated[list[_Texts], Field(max_length=MOST_SHARDS)]


class _Field(TypedDict):
    name: str


def _with_fields(schema: list[_Field]) -> list[_Field]:
    if missing := {TERMS, PASSAGE} - {field["name"] for field in schema}:
        raise ValueError(f"should have the field {min(missing)!r}")
    return schema


class _Schema(TypedDict):
    """`chunks.json` and `passages.json`, as tantivy reads them."""

    index_settings: dict[str, Any]
    schema: Annotated[list[_Field], AfterValidator(_with_fields)]


def _sizes(folder: Path) -> dict[Kind, list[int]]:
    """The chunks and passages of each segment of a shard."""
    if not fetch_manifest(folder) and not folder.exists():
        raise InputError(
            f"{folder} is missing: sparse and hybrid retrieval need it. Run `retro index CONFIG --stage sparse`."
        )
    sizes = stored_json(folder / "segments.json", _Segments)
    return {"chunks": sizes["chunks"], "passages": sizes["passages"]}


def _lists(folders: Sequence[Path], sizes: Sequence[Sequence[int]], kind: Kind) -> _Lists:
    """Link the segments of all shards into the folder of one index, and open it."""
    import tantivy

    with temporary_folder() as folder:  # tantivy maps all files when it opens them
        meta: dict[str, Any] = {"segments": [], "opstamp": 0}
        for shard, of_segments in zip(folders, sizes, strict=True):
            if of_segments:
                meta |= stored_json(shard / f"{kind}.json", _Schema)
            for segment, size in enumerate(of_segments):
                name = uuid.UUID(int=len(meta["segments"]))
                for suffix in SUFFIXES:
                    file = registered(present(shard / f"{kind}-{segment}.{suffix}")).resolve()
                    (folder / f"{name.hex}.{suffix}").symlink_to(file)
                meta["segments"].append({"segment_id": str(name), "max_doc": size, "deletes": None})
        (folder / "meta.json").write_text(json.dumps(meta))
        with reading(*folders):
            try:
                index = with_tokenizer(tantivy.Index.open(str(folder)))
                index.config_reader(reload_policy="manual")
                searcher = index.searcher()
            except ValueError as error:
                raise DoesNotFit(f"tantivy cannot open its lists of {kind} ({error!s:.300})") from error
    starts = np.cumsum([0, *(segment["max_doc"] for segment in meta["segments"])])
    return _Lists(kind, starts[:-1], int(starts[-1]), folders, index.schema, searcher)
