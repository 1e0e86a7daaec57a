"""Check that the values in a datastore's files are possible ones: what `retro verify` leaves to tests of the stages."""

from itertools import pairwise
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
from tantivy import Query

from indexing.index.faiss_files import ivf_of, read_index
from indexing.ngrams.index import MOST_CHUNKS
from indexing.sparse.index import SparseIndex
from indexing.sparse.segments import PASSAGE
from indexing.store.artifact import read_manifest
from indexing.store.datastore import SPLITS, Datastore, deleted_chunks, shard_name
from indexing.store.deletions import read_deletions
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet


def check_contents(datastore: Datastore) -> None:
    """Assert shapes, types and ranges of every array, the ids of every index, and the chunks of deleted documents."""
    for shard in range(len(datastore.train.chunk_rows)):
        name = shard_name(shard)
        _check_chunks(datastore, shard, name)
        for split in map(datastore.split, SPLITS):
            vectors = split.embeddings.shard(shard)
            assert vectors.dtype == np.float16
            assert vectors.shape == (split.chunk_rows[shard], datastore.train.embeddings.row_shape[0])
            assert np.isfinite(vectors).all()
        first, stop = datastore.train.tokens.starts[shard : shard + 2].tolist()
        index = read_index(datastore.folder / "index" / name / "vectors.faiss")
        assert np.array_equal(np.sort(ids_of(index)), np.arange(first, stop))
        _check_sparse(datastore, shard, first, stop)
        _check_neighbors(datastore, shard, name)
        if datastore.has("ngrams"):
            _check_ngrams(datastore, name)
        if datastore.has("materialize"):
            _check_materialized(datastore, shard, name)
    trained = read_index(datastore.folder / "index" / "trained" / "trained.faiss")
    assert trained.is_trained
    assert (trained.ntotal, trained.d) == (0, datastore.train.embeddings.row_shape[0])
    for split, ranges in deleted_chunks(datastore, read_deletions(datastore.folder).documents).items():
        assert np.array_equal(ranges, datastore.split(split).deleted)


def _check_chunks(datastore: Datastore, shard: int, name: str) -> None:
    for split in map(datastore.split, SPLITS):
        rows, documents = split.chunk_rows[shard], split.document_rows[shard]
        tokens, lengths = split.tokens.shard(shard), split.lengths.shard(shard)
        offsets = split.document_offsets.shard(shard)
        assert (tokens.shape, lengths.shape, offsets.shape) == ((rows, split.chunk_length), (rows,), (documents + 1,))
        assert (tokens < datastore.manifest["vocab_size"]).all()
        assert ((lengths >= 1) & (lengths <= split.chunk_length)).all()
        assert (offsets[0], offsets[-1]) == (0, rows)
        assert (np.diff(offsets) >= 1).all()
        table = datastore.folder / "chunks" / name / split.name / "documents.parquet"
        assert pq.read_metadata(table).num_rows == documents


def ids_of(index: Any) -> np.ndarray:
    """The ids [n] int64 in a Faiss index, in the index's order."""
    ivf = ivf_of(index)
    if ivf is None:
        return faiss.vector_to_array(index.id_map)
    lists, sizes = ivf.invlists, [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    ids = [faiss.rev_swig_ptr(lists.get_ids(number), size).copy() for number, size in enumerate(sizes) if size]
    return np.concatenate([np.empty(0, np.int64), *ids])


def _check_sparse(datastore: Datastore, shard: int, first: int, stop: int) -> None:
    borders = np.load(datastore.folder / "sparse" / shard_name(shard) / "passages.npy")
    assert (borders[0], borders[-1]) == (first, stop)
    assert (np.diff(borders) > 0).all()
    if stop > first:
        index = SparseIndex.open([datastore.train], shards=[shard])
        for passage, (begin, end) in enumerate(pairwise(borders.tolist())):
            assert _members(index.passages, begin) == [passage]
            assert _members(index.chunks, begin) == list(range(begin - first, end - first))


def _check_ngrams(datastore: Datastore, name: str) -> None:
    folder = datastore.folder / "ngrams" / name
    hashes, offsets, chunks = (np.load(folder / f"{array}.npy") for array in ("hashes", "offsets", "chunks"))
    assert {array.dtype for array in (hashes, offsets, chunks)} == {np.dtype(np.uint32)}
    assert (np.diff(hashes.astype(np.int64)) > 0).all()
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(chunks), len(hashes) + 1)
    assert (np.diff(offsets.astype(np.int64)) <= MOST_CHUNKS).all()
    assert (chunks < datastore.train.num_chunks).all()


def _members(texts: Any, first_chunk: int) -> list[int]:
    """Positions of the texts of the passage with this first chunk."""
    wanted = Query.term_query(texts.schema, PASSAGE, first_chunk)
    return sorted(texts._run(wanted, texts.size)[0].tolist())


def _check_neighbors(datastore: Datastore, shard: int, name: str) -> None:
    stored = read_manifest(datastore.folder / "neighbors" / name)["recipe"]["settings"]["neighbors.stored"]
    num_chunks = np.array([split.num_chunks for split in RetrievalSet.of(datastore).splits])
    for split in map(datastore.split, SPLITS):
        ids = split.neighbor_ids.shard(shard)
        assert ids.shape == (split.chunk_rows[shard], stored)
        present = ids >= 0
        assert (ids[~present] == -1).all()
        assert (ids[present] & ((1 << CHUNK_ID_BITS) - 1) < num_chunks[ids[present] >> CHUNK_ID_BITS]).all()
        if split.name == "train":
            first = int(split.tokens.starts[shard])
            _, start, stop = split.documents_of(np.arange(first, first + len(ids)))
            assert not (present & (ids >= start[:, None]) & (ids < stop[:, None])).any()


def _check_materialized(datastore: Datastore, shard: int, name: str) -> None:
    manifest = read_manifest(datastore.folder / "materialized" / name)
    shape = (manifest["recipe"]["settings"]["neighbors.materialized"], 2 * datastore.chunk_length)
    for split in map(datastore.split, SPLITS):
        tokens, lengths = split.materialized_tokens.shard(shard), split.materialized_lengths.shard(shard)
        assert (tokens.shape, lengths.shape) == ((split.chunk_rows[shard], *shape), tokens.shape[:2])
        assert (tokens < datastore.manifest["vocab_size"]).all()
        assert (lengths <= shape[1]).all()
        assert (lengths > 0).sum() == manifest["counts"][split.name]["neighbors"]
