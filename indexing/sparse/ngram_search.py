"""Find chunks that share rare n-grams of tokens: candidates for neighbors, in time that grows with the number of chunks.

    block of queries → bigrams and 4-grams → document frequencies → the rarest of each query
                     → sparse product with the lists of these n-grams → chunks with the greatest sum of idf

An n-gram counts if at most 256 chunks hold it. A query reads the lists of its 32 rarest n-grams, the rarest first, until they have 512
entries. So what it reads does not grow with the datastore. This is the inverted-index join of Elsayed et al. (2008), "Pairwise document
similarity in large collections with MapReduce".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from indexing.machine import for_each
from indexing.sparse.candidates import Kept
from indexing.sparse.ngram_index import MOST_CHUNKS, NgramLists, changes, ngrams, within
from indexing.store.retrieval_set import RetrievalSet

_RAREST = 32  # n-grams of a query
_MOST_ENTRIES = 512  # of the lists of a query before its last one
_FULL_DEPTH = _MOST_ENTRIES + MOST_CHUNKS  # chunks that can share an n-gram with a query
_ROW_BITS = 16
_BLOCK_ROWS = 1 << _ROW_BITS  # queries at a time
_WORKERS = 4
_ENTRIES = 2**25  # entries of lists read at a time
_RESULTS = 2**23  # candidates at a time
_FEW_ROWS = 1024  # queries at a time that request all chunks
_FEW_QUERIES = 64  # for which starting threads takes longer than the product
_FEW_ENTRIES = 2**13  # of lists, as many as one query can have
_UNIT = 256.0  # idf is rounded to this fraction, so that sums are exact
_WHOLE = 2**44  # weight of a shared n-gram: 32 n-grams of idf up to 40 fit into 63 bits
NARROW = 2**27
"""Chunks below which the product has a column for each."""


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
        self, tokens: np.ndarray, lengths: np.ndarray, wanted: int, enough: int, kept: Kept, *, own: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the chunks with the greatest sum of idf over the rarest n-grams that they share with a query.

        One and a half times the wanted chunks are requested, since `kept` may exclude some. If it leaves fewer than `enough`, all
        chunks that share a rare n-gram are requested.

        Memory: the n-grams of 65,536 queries (at most 2m each, 76 bytes), 2^25 entries of lists (40 bytes each), and 8 bytes for
        each chunk and thread, of 2^27 chunks at most. Files are memory-mapped and read in the order of the hashes.

        Args:
            tokens: [n, m].
            lengths: [n] real tokens in each.
            wanted: candidates for each query.
            enough: candidates with which a query is not searched again.
            kept: a condition; see `Kept`.
            own: whether the queries are chunks of the index, so that an n-gram of one chunk is only the query's own.

        Returns:
            ids [n, wanted] int64 of the retrieval set, best first, of equal sums the first in the retrieval set (-1 = none), and sums
            [n, wanted] float32 (0).
        """
        ids = np.full((len(tokens), wanted), -1, dtype=np.int64)
        sums = np.zeros((len(tokens), wanted), dtype=np.float32)

        def fill(rows: np.ndarray, queries: "_Queries", depth: int) -> np.ndarray:
            """Fill `rows`; returns those of `queries` that have fewer than enough candidates although there may be more."""
            hits, best = self._best(queries, depth)
            is_full = hits[:, -1] >= 0
            hits = kept(rows, hits)
            order = np.argsort(hits < 0, axis=1, kind="stable")[:, :wanted]
            ids[rows] = np.take_along_axis(hits, order, 1)
            sums[rows] = np.where(ids[rows] >= 0, np.take_along_axis(best, order, 1), 0)
            return np.flatnonzero(is_full & (ids[rows, enough - 1] < 0))

        workers = _workers(len(tokens))
        step = -(-min(len(tokens), _BLOCK_ROWS) // workers)

        def search(start: int) -> None:
            block = slice(start, start + step)
            queries = self._queries(np.asarray(tokens[block]), np.asarray(lengths[block]), least=2 if own else 1)
            for rows in queries.parts(max(1, _RESULTS // (2 * wanted))):
                part = queries.take(rows)
                starved = fill(start + rows, part, wanted + wanted // 2)
                for first in range(0, len(starved), _FEW_ROWS):
                    some = starved[first : first + _FEW_ROWS]
                    fill(start + rows[some], part.take(some), max(wanted, _FULL_DEPTH))

        for_each(search, range(0, len(tokens), max(1, step)), workers)
        return ids, sums

    def _queries(self, tokens: np.ndarray, lengths: np.ndarray, least: int) -> "_Queries":
        """The rarest n-grams of some chunks, each in at least `least` chunks of the index."""
        rows, hashes = ngrams(tokens, lengths)
        keys = (hashes << np.uint64(_ROW_BITS)) | rows
        keys.sort()
        keys = keys[changes(keys)]
        hashes, rows = keys >> np.uint64(_ROW_BITS), keys & np.uint64(_BLOCK_ROWS - 1)
        is_first = changes(hashes)
        distinct, columns = hashes[is_first], np.cumsum(is_first) - 1
        found = np.array([lists.find(distinct) for lists in self.lists])  # [lists, 2, n-grams]
        frequencies = found[:, 1].sum(axis=0)
        here = ((frequencies >= least) & (frequencies <= MOST_CHUNKS))[columns]
        rows, columns = rows[here], columns[here]
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
        return _Queries(distinct, frequencies, found, offsets, columns[rarest])

    def _best(self, queries: "_Queries", depth: int) -> tuple[np.ndarray, np.ndarray]:
        """The best chunks of queries: ids [n, depth] int64 of the retrieval set, -1 = none, and sums [n, depth] float32, 0."""
        hashes, found, columns = queries.used()
        idf = np.log((self.num_chunks + 1) / queries.frequencies[queries.columns])
        rarity = np.rint(idf * _UNIT).astype(np.int64)
        offsets, chunks = self._read(hashes, found)
        operands = _Operands(queries.offsets, columns, rarity, offsets, chunks, self.retrieval.num_chunks)
        counts, chunks, products = _largest(operands, depth)
        ids = np.full((len(queries), depth), -1, dtype=np.int64)
        sums = np.zeros((len(queries), depth), dtype=np.float32)
        rows, ranks = np.repeat(np.arange(len(queries)), counts), within(counts)
        ids[rows, ranks] = self.retrieval.ids_at(chunks)
        sums[rows, ranks] = np.rint(products / (_WHOLE - chunks)) / _UNIT
        return ids, sums

    def _read(self, hashes: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the lists of n-grams, hashes [n] uint64 in order, `found` [lists, 2, n] as in `_Queries`: offsets [n + 1] int64, and
        the chunks of one n-gram after another [entries] int64, positions in the retrieval set."""
        read = [lists.read(hashes, *each) for lists, each in zip(self.lists, found, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(found[:, 1].sum(axis=0))])
        if len(read) == 1:
            return offsets, read[0]
        chunks, filled = np.empty(offsets[-1], dtype=np.int64), offsets[:-1].copy()
        for some, (_, sizes) in zip(read, found, strict=True):
            chunks[np.repeat(filled, sizes) + within(sizes)] = some
            filled += sizes
        return offsets, chunks


def _workers(queries: int) -> int:
    """Blocks of queries at a time; together they are as large as one block, and so is their memory."""
    import torch

    return 1 if queries < _BLOCK_ROWS else min(_WORKERS, torch.get_num_threads())


class _Operands(NamedTuple):
    """A sparse product of queries and lists.

    Attributes:
        queries: [n + 1] int64, the first of `columns` and of `rarity` of each query.
        columns: int64, the n-grams of one query after another.
        rarity: int64, their idf.
        lists: [n-grams + 1] int64, the first of `chunks` of each n-gram.
        chunks: int64, the chunks of one n-gram after another.
        total: chunks of the retrieval set.
    """

    queries: np.ndarray
    columns: np.ndarray
    rarity: np.ndarray
    lists: np.ndarray
    chunks: np.ndarray
    total: int


def _largest(x: _Operands, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `depth` largest entries of each row of the product.

    Integers, and a little less for each next chunk: so the result does not depend on the order in which equal sums are met.

    Returns:
        how many each query has [n], their chunks, and the sums of idf times 2^44 - chunk, of one query after another.
    """
    few = len(x.chunks) <= _FEW_ENTRIES and len(x.queries) - 1 <= _FEW_QUERIES
    return _by_sorting(x, depth) if few else _by_product(x, depth)


def _by_product(x: _Operands, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import torch
    from scipy.sparse import csr_matrix
    from sparse_dot_topn import sp_matmul_topn

    if x.total // 16 < len(x.chunks) and x.total < NARROW:
        places, held = x.chunks, np.arange(x.total)
    else:
        # The product takes time and memory for each column, so few queries get columns only for the chunks in their lists.
        held, places = np.unique(x.chunks, return_inverse=True)
    rarities = csr_matrix((x.rarity, x.columns, x.queries), shape=(len(x.queries) - 1, len(x.lists) - 1))
    listed = csr_matrix((_WHOLE - x.chunks, places, x.lists), shape=(len(x.lists) - 1, len(held)))
    threads = 1 if len(x.queries) <= _FEW_QUERIES else torch.get_num_threads()
    best = sp_matmul_topn(rarities, listed, top_n=depth, sort=True, n_threads=threads)
    counts = np.diff(best.indptr)
    return counts, held[best.indices[: counts.sum()]], best.data[: counts.sum()]


def _by_sorting(x: _Operands, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For lists so short that making sparse matrices takes longer than sorting."""
    sizes = np.diff(x.lists)[x.columns]
    entries = x.chunks[np.repeat(x.lists[x.columns], sizes) + within(sizes)]
    rows = np.repeat(np.repeat(np.arange(len(x.queries) - 1), np.diff(x.queries)), sizes)
    order = np.lexsort((entries, rows))
    entries, rows = entries[order], rows[order]
    first = np.flatnonzero(changes(entries) | changes(rows))
    entries, rows = entries[first], rows[first]
    products = np.add.reduceat(np.repeat(x.rarity, sizes)[order], first) * (_WHOLE - entries)
    order = np.lexsort((-products, rows))
    counts = np.bincount(rows, minlength=len(x.queries) - 1)
    order = order[within(counts) < depth]
    return np.minimum(counts, depth), entries[order], products[order]


@dataclass(frozen=True)
class _Queries:
    """The rarest n-grams of some queries.

    Attributes:
        hashes: [n-grams] uint64 in order, of these queries and maybe of others.
        frequencies: [n-grams] int64, chunks of the index that hold them.
        found: [lists, 2, n-grams] int64, places and frequencies in each list; see `NgramLists.find`.
        offsets: [queries + 1] int64, the first of `columns` of each query.
        columns: int64, n-grams of the queries one after another, those of a query by frequency and hash.
    """

    hashes: np.ndarray
    frequencies: np.ndarray
    found: np.ndarray
    offsets: np.ndarray
    columns: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> "_Queries":
        if len(rows) == len(self):
            return self
        sizes = np.diff(self.offsets)[rows]
        columns = self.columns[np.repeat(self.offsets[rows], sizes) + within(sizes)]
        return _Queries(self.hashes, self.frequencies, self.found, np.concatenate([[0], np.cumsum(sizes)]), columns)

    def used(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The n-grams of these queries, `found` of them, and `columns` as numbers of them."""
        is_used = np.zeros(len(self.hashes), dtype=bool)
        is_used[self.columns] = True
        return self.hashes[is_used], self.found[..., is_used], (np.cumsum(is_used) - 1)[self.columns]

    def parts(self, most: int) -> Iterator[np.ndarray]:
        """Yield the rows of consecutive parts of at most `most` queries whose lists have at most about 2^25 entries."""
        entries = np.concatenate([[0], np.cumsum(self.frequencies[self.columns])])[self.offsets]
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(entries, entries[start] + _ENTRIES, side="right")) - 1
            stop = max(start + 1, min(stop, start + most, len(self)))
            yield np.arange(start, stop)
            start = stop
