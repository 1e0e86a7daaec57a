"""Check that the arrays and indexes of one shard agree with its counts.

Each check yields a line for every problem in the artifact of one shard, starting with the file. The files have passed their
checksums. So a problem means that they were written wrong, or that the manifest was changed to match.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from indexing.index.faiss_files import ivf_of, read_index
from indexing.sparse.index import FOLDER as SPARSE_FOLDER
from indexing.sparse.index import SparseIndex
from indexing.sparse.ngram_index import FOLDER as NGRAMS_FOLDER
from indexing.sparse.ngram_index import MOST_CHUNKS
from indexing.store.artifact import parse_manifest
from indexing.store.datastore import SPLITS, Datastore, Split, deleted_chunks, shard_name
from indexing.store.deletions import FILE, read_deletions
from indexing.store.files import read_json
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet
from indexing.store.sharded_array import open_array

_BLOCK_ROWS = 65_536
_CHECKED_PASSAGES = 32  # of a shard of the sparse index

Check = Callable[[Datastore, int], Iterator[str]]


def check_of(name: str) -> Check | None:
    """The check for an artifact (`chunks/00003`, `index/trained`), or None if its checksums are the only check."""
    if name == "index/trained":
        return check_trained
    stage, _, shard = name.partition("/")
    checks: dict[str, Check] = {
        "chunks": check_chunks,
        "embeddings": check_embeddings,
        "index": check_index,
        "sparse": check_sparse,
        "ngrams": check_ngrams,
        "neighbors": check_neighbors,
        "materialized": check_materialized,
    }
    return checks.get(stage) if shard.isdigit() else None


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK_ROWS, rows)) for start in range(0, rows, _BLOCK_ROWS))


def _wrong_form(path: Path, array: np.ndarray, shape: tuple[int, ...], *dtypes: Any) -> Iterator[str]:
    if array.shape != shape:
        yield f"{path} has shape {array.shape} instead of {shape}"
    if array.dtype not in [np.dtype(each) for each in dtypes]:
        yield f"{path} has dtype {array.dtype} instead of {' or '.join(np.dtype(each).name for each in dtypes)}"


def check_chunks(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check shapes, tokens of the vocabulary, lengths of 1 to m, and document offsets that rise from 0 to the last chunk."""
    import pyarrow.parquet

    for split in map(datastore.split, SPLITS):
        folder = datastore.folder / "chunks" / shard_name(shard) / split.name
        rows, documents = split.chunk_rows[shard], split.document_rows[shard]
        tokens, lengths, offsets = (open_array(folder / f"{name}.npy") for name in ("tokens", "lengths", "documents"))
        wrong = [
            *_wrong_form(folder / "tokens.npy", tokens, (rows, split.chunk_length), np.uint16, np.uint32),
            *_wrong_form(folder / "lengths.npy", lengths, (rows,), np.uint16),
            *_wrong_form(folder / "documents.npy", offsets, (documents + 1,), np.int64),
        ]
        yield from wrong
        if wrong:
            continue
        for block in _blocks(rows):
            if tokens[block].max() >= datastore.manifest["vocab_size"]:
                yield f"{folder / 'tokens.npy'} holds token {tokens[block].max()}, which is not in the vocabulary"
                break
            if lengths[block].min() < 1 or lengths[block].max() > split.chunk_length:
                yield f"{folder / 'lengths.npy'} holds lengths that are not between 1 and {split.chunk_length}"
                break
        if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 1).any():
            yield f"{folder / 'documents.npy'} does not rise from 0 to {rows}"
        found = pyarrow.parquet.read_metadata(folder / "documents.parquet").num_rows
        if found != documents:
            yield f"{folder / 'documents.parquet'} has {found} rows instead of {documents}"


def check_deleted(datastore: Datastore) -> Iterator[str]:
    """Check that the recorded chunks are those of all documents with a deleted id."""
    documents = read_deletions(datastore.folder).documents
    for name, ranges in deleted_chunks(datastore, documents).items() if documents else ():
        if not np.array_equal(ranges, datastore.split(name).deleted):
            path = datastore.folder / FILE
            yield f"{path} lists other chunks of {name} than those of the deleted documents: `retro index CONFIG` finds them again."


def check_embeddings(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check shape, dtype and that all values are finite."""
    folder = datastore.folder / "embeddings" / shard_name(shard)
    dimension = open_array(folder / "train.npy").shape[-1]
    for split in map(datastore.split, SPLITS):
        path = folder / f"{split.name}.npy"
        rows, vectors = split.chunk_rows[shard], open_array(path)
        yield from _wrong_form(path, vectors, (rows, dimension), np.float16)
        if any(not np.isfinite(vectors[block]).all() for block in _blocks(len(vectors))):
            yield f"{path} holds values that are not finite"


def check_trained(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check that the index is trained, empty and of its stated dimension."""
    folder = datastore.folder / "index" / "trained"
    index, dimension = read_index(folder / "trained.faiss"), read_json(folder / "index.json")["dimension"]
    if not index.is_trained or index.ntotal or index.d != dimension:
        yield f"{folder / 'trained.faiss'} is not an empty trained index of dimension {dimension}"


def check_index(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check that the index holds the id of each training chunk of the shard once."""
    path = datastore.folder / "index" / shard_name(shard) / "vectors.faiss"
    rows, first = datastore.train.chunk_rows[shard], int(datastore.train.tokens.starts[shard])
    index = read_index(path)
    if index.ntotal != rows:
        yield f"{path} holds {index.ntotal} vectors instead of {rows}"
    elif not np.array_equal(np.sort(ids_of(index)), np.arange(first, first + rows)):
        yield f"{path} does not hold the ids from {first} to {first + rows - 1} once each"


def ids_of(index: Any) -> np.ndarray:
    """The ids [n] int64 in a Faiss index, in the index's order."""
    import faiss

    ivf = ivf_of(index)
    if ivf is None:
        return faiss.vector_to_array(index.id_map)
    lists = ivf.invlists
    sizes = [lists.list_size(number) for number in range(lists.nlist)]
    found = [faiss.rev_swig_ptr(lists.get_ids(number), size).copy() for number, size in enumerate(sizes) if size]
    return np.concatenate([np.empty(0, np.int64), *found])


def check_sparse(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check that the segments can be opened, and hold each training chunk of the shard and its passage once, in order."""
    folder = datastore.folder / SPARSE_FOLDER / shard_name(shard)
    rows, first = datastore.train.chunk_rows[shard], int(datastore.train.tokens.starts[shard])
    sizes, borders = read_json(folder / "segments.json"), open_array(folder / "passages.npy")
    passages = sum(sizes["passages"])
    wrong = list(_wrong_form(folder / "passages.npy", borders, (passages + 1,), np.int64))
    yield from wrong
    if wrong:
        return
    if sum(sizes["chunks"]) != rows:
        yield f"{folder / 'segments.json'} does not list {rows} chunks"
    elif borders[0] != first or borders[-1] != first + rows or (np.diff(borders) <= 0).any():
        yield f"{folder / 'passages.npy'} does not divide the chunks from {first} to {first + rows - 1}"
    elif rows:
        index = SparseIndex.open([datastore.train], shards=[shard])
        places = np.unique(np.linspace(0, passages - 1, num=min(passages, _CHECKED_PASSAGES), dtype=np.int64))
        if not all(index.holds(int(place)) for place in places):
            yield f"{folder} does not hold the chunks from {first} to {first + rows - 1} in order"


def check_ngrams(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check that hashes rise, that each has a list of at most 256 chunks, and that the generation has these chunks."""
    folder = datastore.folder / NGRAMS_FOLDER / shard_name(shard)
    paths = [folder / f"{name}.npy" for name in ("hashes", "offsets", "chunks")]
    hashes, offsets, chunks = map(open_array, paths)
    counts = parse_manifest(folder)["counts"]
    wrong = [
        *_wrong_form(paths[0], hashes, (counts["ngrams"],), np.uint32),
        *_wrong_form(paths[1], offsets, (counts["ngrams"] + 1,), np.uint32),
        *_wrong_form(paths[2], chunks, (counts["entries"],), np.uint32),
    ]
    yield from wrong
    if wrong:
        return
    if any((hashes[block][1:] <= hashes[block][:-1]).any() for block in _blocks(len(hashes))):
        yield f"{paths[0]} is not in order"
    sizes = [np.diff(offsets[block.start : block.stop + 1].astype(np.int64)) for block in _blocks(len(hashes))]
    if offsets[0] != 0 or offsets[-1] != len(chunks) or any(((s < 0) | (s > MOST_CHUNKS)).any() for s in sizes):
        yield f"{paths[1]} does not divide the entries into lists of at most {MOST_CHUNKS}"
    if any((chunks[block] >= datastore.train.num_chunks).any() for block in _blocks(len(chunks))):
        yield f"{paths[2]} names chunks that do not exist"


def check_neighbors(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check that ids are in the retrieval set and not in the chunk's own document, with a distance for each id, else infinity."""
    folder = datastore.folder / "neighbors" / shard_name(shard)
    k = parse_manifest(folder)["recipe"]["settings"]["neighbors.stored"]
    num_chunks = np.array([split.num_chunks for split in RetrievalSet.of(datastore).splits], dtype=np.int64)
    for split in map(datastore.split, SPLITS):
        rows, first = split.chunk_rows[shard], int(split.tokens.starts[shard])
        ids, distances = (open_array(folder / split.name / f"{name}.npy") for name in ("ids", "distances"))
        wrong = [
            *_wrong_form(folder / split.name / "ids.npy", ids, (rows, k), np.int64),
            *_wrong_form(folder / split.name / "distances.npy", distances, (rows, k), np.float32),
        ]
        yield from wrong
        for block in _blocks(0 if wrong else rows):
            found = wrong_neighbors(
                np.asarray(ids[block]), np.asarray(distances[block]), split, first + block.start, num_chunks
            )
            if found is not None:
                row, what = found
                yield f"{folder / split.name / 'ids.npy'} row {block.start + row}: {what}"
                break


def check_materialized(datastore: Datastore, shard: int) -> Iterator[str]:
    """Check shapes, tokens of the vocabulary, lengths of at most two chunks, and the number of neighbors."""
    folder = datastore.folder / "materialized" / shard_name(shard)
    manifest = parse_manifest(folder)
    wanted = manifest["recipe"]["settings"]["neighbors.materialized"]
    for split in map(datastore.split, SPLITS):
        rows, width = split.chunk_rows[shard], 2 * split.chunk_length
        paths = [folder / split.name / f"{name}.npy" for name in ("tokens", "lengths")]
        tokens, lengths = map(open_array, paths)
        wrong = [
            *_wrong_form(paths[0], tokens, (rows, wanted, width), np.uint16, np.uint32),
            *_wrong_form(paths[1], lengths, (rows, wanted), np.uint32),
        ]
        yield from wrong
        if wrong:
            continue
        found = 0
        for block in _blocks(rows):
            if tokens[block].max() >= datastore.manifest["vocab_size"]:
                yield f"{paths[0]} holds token {tokens[block].max()}, which is not in the vocabulary"
                break
            if lengths[block].max() > width:
                yield f"{paths[1]} holds length {lengths[block].max()}, more than {width}"
                break
            found += int((lengths[block] > 0).sum())
        else:
            if found != manifest["counts"][split.name]["neighbors"]:
                yield f"{paths[1]} names {found} neighbors instead of {manifest['counts'][split.name]['neighbors']}"


def wrong_neighbors(
    ids: np.ndarray, distances: np.ndarray, split: Split, first: int, num_chunks: np.ndarray
) -> tuple[int, str] | None:
    """Find the first invalid row of a block of neighbors, and the reason; None if all are valid.

    Args:
        ids: [n, k] int64.
        distances: [n, k] float32.
        split: split of the querying chunks.
        first: id of the first querying chunk.
        num_chunks: [datastores] int64, training chunks of each datastore of the retrieval set.
    """
    present = ids >= 0
    numbers, chunk_ids = ids >> CHUNK_ID_BITS, ids & ((1 << CHUNK_ID_BITS) - 1)
    limits = num_chunks[np.clip(numbers, 0, len(num_chunks) - 1)]
    outside = (ids < -1) | (present & ((numbers >= len(num_chunks)) | (chunk_ids >= limits)))
    unequal = np.isinf(distances) == present
    findings = [(outside, "id {} is not in the retrieval set"), (unequal, "id {} and its distance do not agree")]
    if split.name == "train":
        _, start, stop = split.documents_of(np.arange(first, first + len(ids), dtype=np.int64))
        own = present & (ids >= start[:, None]) & (ids < stop[:, None])
        findings.append((own, "id {} is of the chunk's own document"))
    for wrong, words in findings:
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            return int(row), words.format(ids[row, column])
    return None
