"""Find chunks that share rare n-grams of tokens: candidates for neighbors, in time that grows with the number of
chunks.

    block of queries → bigrams and 4-grams → document frequencies → the rarest of each query
                     → the lists of these n-grams → sums of idf by chunk → chunks with the greatest sums

An n-gram counts if at most 256 chunks hold it. A query reads the lists of its 32 rarest n-grams, the rarest first,
until they have 512 entries. So what it reads does not grow with the datastore. This is the inverted-index join of
Elsayed et al. (2008), "Pairwise document similarity in large collections with MapReduce".
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indexing.machine import compiled, for_each
from indexing.ngrams.index import MOST_CHUNKS, NgramLists, changes, ngrams, within
from indexing.similarity.candidates import Condition, present_first
from indexing.store.retrieval_set import RetrievalSet

_RAREST = 32  # n-grams of a query
_MOST_ENTRIES = 512  # of the lists of a query before its last one
_FULL_DEPTH = _MOST_ENTRIES + MOST_CHUNKS  # chunks that can share an n-gram with a query
_ROW_BITS = 16
_BLOCK_ROWS = 1 << _ROW_BITS  # queries at a time
_WORKERS = 4  # threads, each with a part of these queries
_ENTRIES = 2**25  # entries of lists read at a time
_RESULTS = 2**23  # candidates at a time
_FEW_ROWS = 1024  # queries at a time that request all chunks
_UNIT = 256.0  # idf is counted in this fraction
_TABLE = 2048  # slots for the sums of a query, more than twice `_FULL_DEPTH`
_FACTOR = 0x1E3779B97F4A7C15  # of the hash of a chunk
_CHUNK_BITS = 44  # of a chunk in a key
_HIGHEST = (1 << (62 - _CHUNK_BITS)) - 1  # no sum of `_RAREST` idf is larger
_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class NgramIndex:
    """The n-grams of all chunks of a retrieval set. Several threads can search at once.

    Attributes:
        retrieval: the chunks.
        lists: of every generation of every datastore.
        num_chunks: chunks in the lists; all, or a part.
    """

    retrieval: RetrievalSet
    lists: tuple[NgramLists, ...]
    num_chunks: int

    @classmethod
    def open(cls, retrieval: RetrievalSet) -> "NgramIndex":
        """Open the n-grams of a retrieval set; see `NgramLists.of`."""
        return cls(retrieval, NgramLists.of(retrieval), retrieval.num_chunks)

    def search(
        self, tokens: np.ndarray, lengths: np.ndarray, k: int, enough: int, condition: Condition, *, own: bool
    ) -> np.ndarray:
        """Find the chunks with the greatest sum of idf over the rarest n-grams that they share with a query.

        One and a half times k chunks are requested, since the condition may exclude some. If it leaves fewer than
        `enough`, all chunks that share a rare n-gram are requested.

        Memory: `search_bytes` of the queries, of 65,536 at most. Files are memory-mapped and read in the order of the
        hashes.

        Args:
            tokens: [n, m].
            lengths: [n] real tokens in each.
            k: candidates for each query.
            enough: candidates with which a query is not searched again.
            condition: which candidates count.
            own: whether the queries are chunks of the index, so that an n-gram of one chunk is only the query's own.

        Returns:
            ids [n, k] int64 of the retrieval set, best first, of equal sums the first in the retrieval set; -1 = none.
        """
        ids = np.full((len(tokens), k), -1, dtype=np.int64)

        def fill(rows: np.ndarray, queries: "_Queries", depth: int) -> np.ndarray:
            """Fill `rows`; returns those of `queries` that have fewer than enough candidates although there may be
            more."""
            hits = self._best(queries, depth)
            allowed = condition(rows, hits)
            ids[rows] = np.take_along_axis(allowed, present_first(allowed, k), 1)
            return np.flatnonzero((hits[:, -1] >= 0) & (ids[rows, enough - 1] < 0))

        workers = _workers(len(tokens))
        step = -(-min(len(tokens), _BLOCK_ROWS) // workers)

        def search_block(start: int) -> None:
            block = slice(start, start + step)
            queries = self._queries(np.asarray(tokens[block]), np.asarray(lengths[block]), least=2 if own else 1)
            for rows in queries.parts(max(1, _RESULTS // (2 * k * workers)), _ENTRIES // workers):
                part = queries.take(rows)
                starved = fill(start + rows, part, k + k // 2)
                for first in range(0, len(starved), _FEW_ROWS):
                    some = starved[first : first + _FEW_ROWS]
                    fill(start + rows[some], part.take(some), max(k, _FULL_DEPTH))

        for_each(search_block, range(0, len(tokens), max(1, step)), workers)
        return ids

    def _queries(self, tokens: np.ndarray, lengths: np.ndarray, least: int) -> "_Queries":
        """The rarest n-grams of some chunks, each in at least `least` chunks of the index."""
        rows, hashes = ngrams(tokens, lengths)
        keys = (hashes << np.uint64(_ROW_BITS)) | rows
        keys.sort()
        keys = keys[changes(keys)]
        hashes, rows = keys >> np.uint64(_ROW_BITS), keys & np.uint64(_BLOCK_ROWS - 1)
        is_first = changes(hashes)
        distinct, columns = hashes[is_first], np.cumsum(is_first) - 1
        postings = np.array([lists.find(distinct) for lists in self.lists])  # [lists, 2, n-grams]
        frequencies = postings[:, 1].sum(axis=0)
        is_listed = ((frequencies >= least) & (frequencies <= MOST_CHUNKS))[columns]
        rows, columns = rows[is_listed], columns[is_listed]
        # By query, then by frequency, then by hash.
        keys = (rows << np.uint64(40)) | (frequencies[columns] << 31 | columns).astype(np.uint64)
        keys.sort()
        rows, columns = (keys >> np.uint64(40)).astype(np.int64), (keys & np.uint64(2**31 - 1)).astype(np.int64)
        sizes = np.bincount(rows, minlength=len(tokens))
        # Entries of the rarer n-grams of the same query.
        entries = np.concatenate([[0], np.cumsum(frequencies[columns])])
        before = entries[:-1] - np.repeat(entries[np.cumsum(sizes) - sizes], sizes)
        rarest = (within(sizes) < _RAREST) & (before < _MOST_ENTRIES)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[rarest], minlength=len(tokens)))])
        return _Queries(distinct, frequencies, postings, offsets, columns[rarest])

    def _best(self, queries: "_Queries", depth: int) -> np.ndarray:
        """The best chunks of queries: ids [n, depth] int64 of the retrieval set, -1 = none."""
        hashes, postings, columns = queries.used()
        idf = np.log((self.num_chunks + 1) / queries.frequencies[queries.columns])
        lists, chunks = self._read(hashes, postings)
        keys = np.full((len(queries), depth), _NONE, dtype=np.int64)
        compiled(_largest)(queries.offsets, columns, np.rint(idf * _UNIT).astype(np.int64), lists, chunks, keys)
        keys.sort(axis=1)
        return np.where(keys == _NONE, -1, self.retrieval.ids_at(keys & ((1 << _CHUNK_BITS) - 1)))

    def _read(self, hashes: np.ndarray, postings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the lists of n-grams, hashes [n] uint64 in order, `postings` [lists, 2, n] as in `_Queries`: offsets
        [n + 1] int64, and the chunks of one n-gram after another [entries] int64, positions in the retrieval set."""
        read = [lists.read(hashes, *of_lists) for lists, of_lists in zip(self.lists, postings, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(postings[:, 1].sum(axis=0))])
        if len(read) == 1:
            return offsets, read[0]
        chunks, filled = np.empty(offsets[-1], dtype=np.int64), offsets[:-1].copy()
        for some, (_, sizes) in zip(read, postings, strict=True):
            chunks[np.repeat(filled, sizes) + within(sizes)] = some
            filled += sizes
        return offsets, chunks


def search_bytes(queries: float, chunk_length: int) -> float:
    """Memory of a search of the first 65,536 queries: their n-grams (at most 2m each, 76 bytes) and entries (about 512,
    32 bytes)."""
    return min(queries, _BLOCK_ROWS) * (152 * chunk_length + 32 * _MOST_ENTRIES)


def _workers(queries: int) -> int:
    """Threads that search together. Their blocks are as large as one, and take as much memory as one."""
    import torch

    return 1 if queries < _BLOCK_ROWS else min(_WORKERS, torch.get_num_threads())


def _largest(
    queries: np.ndarray,
    columns: np.ndarray,
    rarity: np.ndarray,
    lists: np.ndarray,
    chunks: np.ndarray,
    best: np.ndarray,
) -> None:
    """Add up the idf of the n-grams that chunks share with each query, in a table of hashes, and keep the largest sums
    in a heap.

    Args:
        queries: [n + 1] int64, the first of `columns` and of `rarity` of each query.
        columns: int64, the n-grams of one query after another.
        rarity: int64, their idf.
        lists: [n-grams + 1] int64, the first of `chunks` of each n-gram.
        chunks: int64, the chunks of one n-gram after another.
        best: [n, depth] int64 of `_NONE`, receives keys of the best chunks: the larger the sum the smaller, then by the
            chunk.
    """
    table, sums = np.full(_TABLE, -1, dtype=np.int64), np.zeros(_TABLE, dtype=np.int64)
    slots, depth = np.empty(_TABLE, dtype=np.int64), best.shape[1]
    for query in range(len(best)):
        used = 0
        for place in range(queries[query], queries[query + 1]):
            for entry in range(lists[columns[place]], lists[columns[place] + 1]):
                chunk = chunks[entry]
                slot = (chunk * _FACTOR >> 32) & (_TABLE - 1)
                while table[slot] != chunk and table[slot] >= 0:
                    slot = (slot + 1) & (_TABLE - 1)
                if table[slot] < 0:
                    table[slot], sums[slot] = chunk, 0
                    slots[used] = slot
                    used += 1
                sums[slot] += rarity[place]
        heap = best[query]  # the largest key is first
        for number in range(used):
            slot = slots[number]
            key = (_HIGHEST - sums[slot]) << _CHUNK_BITS | table[slot]
            table[slot] = -1
            if key >= heap[0]:
                continue
            hole, child = 0, 1
            while child < depth:
                if child + 1 < depth and heap[child + 1] > heap[child]:
                    child += 1
                if heap[child] <= key:
                    break
                heap[hole] = heap[child]
                hole, child = child, 2 * child + 1
            heap[hole] = key


@dataclass(frozen=True)
class _Queries:
    """The rarest n-grams of some queries.

    Attributes:
        hashes: [n-grams] uint64 in order, of these queries and maybe of others.
        frequencies: [n-grams] int64, chunks of the index that hold them.
        postings: [lists, 2, n-grams] int64, places and frequencies in each list; see `NgramLists.find`.
        offsets: [queries + 1] int64, the first of `columns` of each query.
        columns: int64, n-grams of the queries one after another, those of a query by frequency and hash.
    """

    hashes: np.ndarray
    frequencies: np.ndarray
    postings: np.ndarray
    offsets: np.ndarray
    columns: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> "_Queries":
        if len(rows) == len(self):
            return self
        sizes = np.diff(self.offsets)[rows]
        columns = self.columns[np.repeat(self.offsets[rows], sizes) + within(sizes)]
        return _Queries(self.hashes, self.frequencies, self.postings, np.concatenate([[0], np.cumsum(sizes)]), columns)

    def used(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The n-grams of these queries, `postings` of them, and `columns` as numbers of them."""
        is_used = np.zeros(len(self.hashes), dtype=bool)
        is_used[self.columns] = True
        return self.hashes[is_used], self.postings[..., is_used], (np.cumsum(is_used) - 1)[self.columns]

    def parts(self, most: int, most_entries: int) -> Iterator[np.ndarray]:
        """Yield the rows of consecutive parts: at most `most` queries, whose lists have at most about `most_entries`
        entries."""
        entries = np.concatenate([[0], np.cumsum(self.frequencies[self.columns])])[self.offsets]
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(entries, entries[start] + most_entries, side="right")) - 1
            stop = max(start + 1, min(stop, start + most, len(self)))
            yield np.arange(start, stop)
            start = stop
