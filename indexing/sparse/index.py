"""Search the sparse index: BM25 of all chunks of one or several datastores, by inverted lists.

    segments of every shard and datastore ── linked into one tantivy index ──► terms of a query ──► best chunks with scores

All segments are searched as one index, so the weight of a term and the mean length are those of all chunks: a term in a small
appended shard weighs as much as in a large one. The constants are the usual ones, k1 = 1.2 and b = 0.75. Files are memory-mapped.
"""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.sparse.segments import CHUNK, SUFFIXES, TERMS, temporary_folder, with_tokenizer
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Split, shard_name
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.store.remote import present
from indexing.store.retrieval_set import neighbor_ids

FOLDER = "sparse"  # of a datastore
_K1 = 1.2  # tantivy's saturation: how soon more occurrences of a term stop counting


@dataclass(frozen=True)
class SparseIndex:
    """The inverted lists of several splits, opened for search. Several threads can search at once.

    Attributes:
        num_chunks: chunks in the index.
        first_ids: [segments] int64, the id in the retrieval set of the first chunk of each segment.
        schema, searcher: tantivy's.
    """

    num_chunks: int
    first_ids: np.ndarray
    schema: Any
    searcher: Any

    @classmethod
    def open(cls, splits: Sequence[Split], shards: Sequence[int] | None = None) -> "SparseIndex":
        """Open the index over the chunks of several splits, numbered as in a retrieval set.

        Args:
            splits: training splits of the datastores.
            shards: open only these shards of each; None opens all.

        Raises:
            InputError: a shard is missing or damaged.
        """
        import tantivy

        with temporary_folder() as folder:  # tantivy maps all files when it opens them
            meta: dict[str, Any] = {"segments": [], "opstamp": 0}
            first_ids: list[int] = []
            opened: list[Path] = []
            for number, split in enumerate(splits):
                for shard in range(len(split.chunk_rows)) if shards is None else shards:
                    first = int(neighbor_ids(number, split.tokens.starts[[shard]])[0])
                    opened.append(split.folder / FOLDER / shard_name(shard))
                    first_ids += _link(folder, meta, opened[-1], first)
            (folder / "meta.json").write_text(json.dumps(meta))
            try:
                index = with_tokenizer(tantivy.Index.open(str(folder)))
                index.config_reader(reload_policy="manual")
                searcher = index.searcher()
            except ValueError as error:
                for each in opened:
                    read_manifest(each)  # raises InputError with the name of a truncated file
                raise InputError(
                    f"{opened[0].parent} cannot be read: {error}. `retro verify` names the file."
                ) from error
        return cls(searcher.num_docs, np.array(first_ids, dtype=np.int64), index.schema, searcher)

    def search(
        self, queries: Sequence[Sequence[str]], k: int, among: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the chunks with the highest BM25; of equal scores the smallest id.

        Args:
            queries: the terms of n queries; a repeated term counts as often.
            k: chunks for each query.
            among: chunk ids to search, in every split; None searches all chunks.

        Returns:
            ids [n, k] int64 of the retrieval set, best first, and scores [n, k] float32; -1 and 0 if fewer chunks contain a term.
        """
        ids, scores = np.full((len(queries), k), -1, dtype=np.int64), np.zeros((len(queries), k), dtype=np.float32)
        for row, query in enumerate(queries):
            found, best = self._search(self._query(query, among), k)
            ids[row, : len(found)], scores[row, : len(found)] = found, best
        return ids, scores

    def largest(self, query: Sequence[str]) -> float:
        """The BM25 that a chunk would have if it repeated all terms of the query endlessly; 0 without terms."""
        counts = Counter(query)
        found = np.array([self.searcher.doc_freq(TERMS, term) for term in counts], dtype=np.float64)
        weights = np.log1p((self.num_chunks - found + 0.5) / (found + 0.5))
        return float((_K1 + 1) * weights @ np.array(list(counts.values()), dtype=np.float64))

    def chunks_of(self, chunk_id: int) -> list[int]:
        """The ids in the retrieval set of the chunks that are stored under an id of their split."""
        from tantivy import Query

        return self._search(Query.term_query(self.schema, CHUNK, chunk_id), len(self.first_ids))[0].tolist()

    def _search(self, query: Any, k: int) -> tuple[np.ndarray, list[float]]:
        hits = self.searcher.search(query, max(1, min(k, self.num_chunks)), count=False).hits
        places = np.array([(place.segment_ord, place.doc) for _, place in hits], dtype=np.int64).reshape(-1, 2)
        return self.first_ids[places[:, 0]] + places[:, 1], [score for score, _ in hits]

    def _query(self, query: Sequence[str], among: Sequence[int] | None) -> Any:
        from tantivy import Occur, Query

        wanted = [
            Query.boost_query(Query.term_query(self.schema, TERMS, term, "freq"), float(count))
            for term, count in Counter(query).items()
        ]
        matching = Query.boolean_query([(Occur.Should, each) for each in wanted])
        if among is None:
            return matching
        allowed = Query.boost_query(Query.term_set_query(self.schema, CHUNK, list(among)), 0.0)
        return Query.boolean_query([(Occur.Must, matching), (Occur.Must, allowed)])


def _link(folder: Path, meta: dict[str, Any], made: Path, first: int) -> list[int]:
    """Link the segments of a shard into the folder of an index, add them to its description, and return their first ids."""
    try:
        described = read_json(present(made / "segments.json"))
    except FileNotFoundError as error:
        raise InputError(
            f"{made} is missing: sparse and hybrid retrieval need it. Run `retro index CONFIG --stage sparse`."
        ) from error
    meta |= {key: described[key] for key in ("index_settings", "schema") if key in described}
    first_ids = []
    for number, size in enumerate(described["chunks"]):
        name = uuid.UUID(int=len(meta["segments"]))
        for suffix in SUFFIXES:
            (folder / f"{name.hex}.{suffix}").symlink_to(present(made / f"{number}.{suffix}").resolve())
        meta["segments"].append({"segment_id": str(name), "max_doc": size, "deletes": None})
        first_ids.append(first)
        first += size
    return first_ids
