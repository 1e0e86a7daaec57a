"""Reading a datastore: where everything lies, and arrays that span its shards.

    datastore/
      manifest.json                 format version, settings, totals, rows of every shard, fingerprints
      corpus/                       what was read: files, shards, problems by file and line
      tokenizer/   embedder/        what text must go through to become tokens and vectors
      chunks/00000/{train,valid,test}/   tokens.npy lengths.npy documents.npy documents.parquet
      embeddings/00000/             train.npy valid.npy test.npy
      index/trained/  index/00000/  index/tuned/
      neighbors/00000/{train,valid,test}/  ids.npy distances.npy
      appended/00001/               corpus/ of each generation that was appended
      deleted.npy                   chunk ids of deleted documents, once there are any

A chunk's id is its row in the concatenation of its split's shards: 64-bit, in order of document. The ids stored as
neighbors are ids of the `train` split, which is the only one in the index, or of other datastores (`retrieval.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.deleted import deleted_ranges, without_deleted
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json

FORMAT_VERSION = 1
SPLITS = ("train", "valid", "test")


def shard_name(shard: int) -> str:
    """The folder name of a shard: five digits or more, so that names sort as numbers do."""
    return f"{shard:05d}"


def open_array(path: Path) -> np.ndarray:
    """A memory-mapped `.npy` file.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}. Run `retro index` again.") from error
    return array


class ShardedArray:
    """Rows of several `.npy` files read as one array, memory-mapped file by file on first use.

    Args:
        paths: the files, in order.
        rows: rows in each file.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int]) -> None:
        self.paths = list(paths)
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        self._open: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard(self, shard: int) -> np.ndarray:
        """The memory-mapped array of one shard.

        Raises:
            InputError: the file is missing or does not have the rows that the manifest says.
        """
        if shard not in self._open:
            rows = int(self.starts[shard + 1] - self.starts[shard])
            array = open_array(self.paths[shard])
            if len(array) < rows:
                raise InputError(f"{self.paths[shard]} has {len(array)} rows, the datastore's manifest says {rows}.")
            self._open[shard] = array
        return self._open[shard]

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Rows by id, in the order asked for: ids [n] int64 → [n, …]."""
        shards = np.searchsorted(self.starts, ids, side="right") - 1
        present = np.unique(shards)
        if len(present) == 1:
            return self.shard(int(present[0]))[ids - self.starts[present[0]]]
        first = self.shard(int(present[0]) if len(present) else 0)
        out = np.empty((len(ids), *first.shape[1:]), dtype=first.dtype)
        for shard in present:
            rows = np.flatnonzero(shards == shard)
            out[rows] = self.shard(int(shard))[ids[rows] - self.starts[shard]]
        return out

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): a view where they lie in one shard, else a copy."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        if shard < len(self.paths) and stop <= self.starts[shard + 1]:
            return self.shard(shard)[start - self.starts[shard] : stop - self.starts[shard]]
        return self.gather(np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True)
class Split:
    """One split of a datastore (`train`, `valid` or `test`): its chunks, documents, embeddings and neighbors.

    Attributes:
        folder: the datastore's folder.
        name: `train`, `valid` or `test`.
        chunk_rows: chunks in each shard.
        document_rows: documents in each shard.
        chunk_length: m, tokens in a chunk.
        pad_id: the token that fills the last chunk of a document.
    """

    folder: Path
    name: str
    chunk_rows: tuple[int, ...]
    document_rows: tuple[int, ...]
    chunk_length: int
    pad_id: int

    @property
    def num_chunks(self) -> int:
        """Chunks in all shards."""
        return sum(self.chunk_rows)

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(self.document_rows)

    def first_shards(self, count: int) -> "Split":
        """The split as it was when it had this many shards."""
        return replace(self, chunk_rows=self.chunk_rows[:count], document_rows=self.document_rows[:count])

    def _array(self, stage: str, name: str, rows: Sequence[int] | None = None) -> ShardedArray:
        paths = [self.folder / stage / shard_name(s) / f"{name}.npy" for s in range(len(self.chunk_rows))]
        return ShardedArray(paths, self.chunk_rows if rows is None else rows)

    @cached_property
    def tokens(self) -> ShardedArray:
        """[chunks, m] uint16 or uint32."""
        return self._array("chunks", f"{self.name}/tokens")

    @cached_property
    def lengths(self) -> ShardedArray:
        """[chunks] uint16, real tokens in the chunk."""
        return self._array("chunks", f"{self.name}/lengths")

    @cached_property
    def embeddings(self) -> ShardedArray:
        """[chunks, d] float16, of unit length."""
        return self._array("embeddings", self.name)

    @cached_property
    def neighbor_ids(self) -> ShardedArray:
        """[chunks, stored k] int64, nearest first, -1 where there is none."""
        return self._array("neighbors", f"{self.name}/ids")

    @cached_property
    def neighbor_distances(self) -> ShardedArray:
        """[chunks, stored k] float32 squared L2 distances, +inf where there is no neighbor."""
        return self._array("neighbors", f"{self.name}/distances")

    @cached_property
    def _offsets(self) -> ShardedArray:
        return self._array("chunks", f"{self.name}/documents", [rows + 1 for rows in self.document_rows])

    def documents_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The document of each chunk: ids [n] → (document number, its first chunk, its last chunk + 1), each [n] int64."""
        starts = self.tokens.starts
        first_documents = np.concatenate([[0], np.cumsum(self.document_rows, dtype=np.int64)])
        shards = np.searchsorted(starts, ids, side="right") - 1
        number, first, stop = np.empty((3, len(ids)), dtype=np.int64)
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            offsets = self._offsets.shard(int(shard))
            local = np.searchsorted(offsets, ids[rows] - starts[shard], side="right") - 1
            number[rows] = local + first_documents[shard]
            first[rows] = offsets[local] + starts[shard]
            stop[rows] = offsets[local + 1] + starts[shard]
        return number, first, stop

    def chunk_range(self, document: int) -> tuple[int, int]:
        """The chunks [first, stop) of a document number."""
        first_documents = np.concatenate([[0], np.cumsum(self.document_rows, dtype=np.int64)])
        shard = int(np.searchsorted(first_documents, document, side="right")) - 1
        offsets = self._offsets.shard(shard)
        local, start = document - int(first_documents[shard]), int(self.tokens.starts[shard])
        return int(offsets[local]) + start, int(offsets[local + 1]) + start

    def with_continuation(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Retrieved chunks N with their continuations F (paper, section 2.3).

        The continuation is the next chunk of the same document. Padding stands where there is none, and for an id of -1,
        so the real tokens are always a prefix.

        Args:
            ids: [n] int64 chunk ids of this split; -1 = no neighbor.

        Returns:
            tokens [n, 2m] int64, and the number of real tokens [n] int64 (0 for a missing neighbor).
        """
        m = self.chunk_length
        tokens = np.full((len(ids), 2 * m), self.pad_id, dtype=np.int64)
        lengths = np.zeros(len(ids), dtype=np.int64)
        present = np.flatnonzero(ids >= 0)
        if len(present):
            found = ids[present]
            tokens[present, :m] = self.tokens.gather(found)
            lengths[present] = self.lengths.gather(found)
            _, _, stop = self.documents_of(found)
            continued = present[found + 1 < stop]
            if len(continued):
                tokens[continued, m:] = self.tokens.gather(ids[continued] + 1)
                lengths[continued] += self.lengths.gather(ids[continued] + 1)
        return tokens, lengths

    def without_deleted(self, ids: np.ndarray) -> np.ndarray:
        """Chunk ids [...] int64 with -1 for those of deleted documents; only documents of `train` are ever found."""
        return without_deleted(ids, deleted_ranges(self.folder)) if self.name == "train" else ids

    def find_documents(self, ids: Sequence[str]) -> list[int]:
        """The numbers of the documents with these ids, all of them where several share one.

        Raises:
            InputError: there is none with an id.
        """
        import pyarrow.parquet

        wanted, found, number = set(ids), list[int](), 0
        missing = set(wanted)
        for shard, rows in enumerate(self.document_rows):
            path = self.folder / "chunks" / shard_name(shard) / self.name / "documents.parquet"
            names = pyarrow.parquet.read_table(path, columns=["id"])["id"].to_pylist()
            found += [number + row for row, name in enumerate(names) if name in wanted]
            missing.difference_update(names)
            number += rows
        if missing:
            raise InputError(
                f"{self.folder} has no document {sorted(missing)[0]!r} among its {number:,} of {self.name}"
                + (f" ({len(missing):,} of the ids are unknown)." if len(missing) > 1 else ".")
            )
        return found

    def metadata(self, documents: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of `documents.parquet` for these document numbers, as dictionaries."""
        import pyarrow.parquet

        first_documents = np.concatenate([[0], np.cumsum(self.document_rows, dtype=np.int64)])
        shards = np.searchsorted(first_documents, documents, side="right") - 1
        out: list[dict[str, Any]] = [{} for _ in documents]
        for shard in np.unique(shards):
            path = self.folder / "chunks" / shard_name(int(shard)) / self.name / "documents.parquet"
            table = pyarrow.parquet.read_table(path)
            rows = np.flatnonzero(shards == shard)
            picked = table.take([documents[row] - int(first_documents[shard]) for row in rows]).to_pylist()
            for row, values in zip(rows, picked, strict=True):
                out[row] = values
        return out


@dataclass(frozen=True)
class Datastore:
    """A datastore opened for reading. `Datastore.open(folder)`, then `.train`, `.valid`, `.test`, `.manifest`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> "Datastore":
        """Open the datastore at `folder`.

        Raises:
            InputError: there is none, its chunks are not finished, its manifest is damaged or its format is of another version.
        """
        folder = Path(folder)
        path = folder / "manifest.json"
        if not path.exists():
            raise InputError(f"{folder} is not a datastore ({path} is missing). Build one: `retro index CONFIG`.")
        try:
            manifest = read_json(path)
        except ValueError as error:
            raise InputError(
                f"{path} cannot be read: {error}. Run `retro index CONFIG`, which writes it again."
            ) from error
        if manifest.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{path} has format version {manifest.get('format_version')}, this program reads {FORMAT_VERSION}. "
                "Build the datastore again with `retro index CONFIG --rebuild`."
            )
        return cls(folder, manifest)

    @property
    def chunk_length(self) -> int:
        """m, tokens in a chunk."""
        return int(self.manifest["chunk_length"])

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits that it was made with: those from before `test` have the first two."""
        return tuple(name for name in SPLITS if name in self.manifest["splits"])

    def split(self, name: str) -> Split:
        """The split called `train`, `valid` or `test`; one that the datastore was made without is empty."""
        rows = self.manifest["splits"].get(name, {"chunks": (), "documents": ()})
        return Split(
            folder=self.folder,
            name=name,
            chunk_rows=tuple(rows["chunks"]),
            document_rows=tuple(rows["documents"]),
            chunk_length=self.chunk_length,
            pad_id=int(self.manifest["pad_id"]),
        )

    @cached_property
    def train(self) -> Split:
        """The chunks that are in the index."""
        return self.split("train")

    @cached_property
    def valid(self) -> Split:
        """The chunks of the documents held out for evaluation while a model is made."""
        return self.split("valid")

    @cached_property
    def test(self) -> Split:
        """The chunks of the documents held out for the final evaluation."""
        return self.split("test")

    def has(self, stage: str) -> bool:
        """Whether a stage (`chunk`, `embed`, `add`, `neighbors` …) is finished for every shard."""
        return stage in self.manifest["fingerprints"]

    def require(self, stage: str) -> None:
        """Raise InputError unless the stage is finished."""
        if not self.has(stage):
            raise InputError(
                f"{self.folder} has no finished '{stage}' stage. Run `retro index CONFIG` (or `--stage {stage}`) first."
            )

    @property
    def fingerprint(self) -> str:
        """One fingerprint over every finished stage, and what has been deleted."""
        from indexing.store.artefact import fingerprint

        deleted = deleted_ranges(self.folder).tolist()
        return fingerprint(self.manifest["fingerprints"] | ({"deleted": deleted} if deleted else {}))


def write_datastore_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the top manifest atomically; it is the only thing in a datastore that is ever replaced."""
    write_json(folder / "manifest.json", {"format_version": FORMAT_VERSION, **manifest})
