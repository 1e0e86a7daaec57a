"""Read a datastore: its files, and arrays that span its shards.

    datastore/
      manifest.json                 format version, settings, totals, rows of every shard, fingerprints
      corpus/                       files, shards, problems by file and line
      tokenizer/   embedder/        from text to tokens, from tokens to vectors
      chunks/00000/{train,valid,test}/   tokens.npy lengths.npy documents.npy documents.parquet
      embeddings/00000/             train.npy valid.npy test.npy
      index/trained/  index/00000/  index/tuned/
      sparse/00000/                 segments.json passages.npy chunks-0.idx passages-0.idx …
      suffixes/00000-00000-00000/   positions.npy heads.npy rows.npy
      ngrams/00000/                 hashes.npy offsets.npy chunks.npy
      votes/00000/                  train.zst train.npy valid.zst valid.npy …
      neighbors/00000/{train,valid,test}/  ids.npy
      materialized/00000/{train,valid,test}/  tokens.npy lengths.npy
      appended/00001/               corpus/ of each appended generation
      deleted.json                  ids and chunks of deleted documents, if there are any

A chunk's id is its row in the concatenation of its split's shards: 64-bit, in order of document. Ids of stored
neighbors are ids of the `train` split, the only one in the index, or of other datastores (`retrieval_set.py`).
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from indexing.store import remote
from indexing.store.artifact import fingerprint, parse_manifest, reading, recorded, require_finished, stored_json
from indexing.store.compressed_array import CompressedArray, rows_of_block
from indexing.store.deletions import Deletions, deleted_ranges, locked, read_deletions, without_deleted, write_deletions
from indexing.store.documents import DocumentTable
from indexing.store.errors import DatastoreChanged, DoesNotFit, InputError
from indexing.store.files import read_checked, write_checked
from indexing.store.ranged_reads import Reading
from indexing.store.schemas import DatastoreManifest, FinishedManifest, parsed
from indexing.store.settings import Fraction
from indexing.store.sharded_array import ShardedArray
from indexing.store.stages import before

log = logging.getLogger("retro")

FORMAT_VERSION = 3
SPLITS = ("train", "valid", "test")
_CONTENT = ("chunk", "embed", "train-index", "add", "neighbors")
"""Stages that decide what a reader of the datastore gets."""
_READ = {"chunk": "chunks", "embed": "embeddings"}
"""Stages whose arrays are opened when they are first read, shard by shard, and their folders."""


class _Tokenizer(TypedDict):
    """`tokenizer/meta.json`, as far as the manifest says the same."""

    vocab_size: int
    pad_id: int


_Neighbors = TypedDict("_Neighbors", {"neighbors.max_overlap": NotRequired[Fraction]})


def shard_name(shard: int) -> str:
    """The folder name of a shard: at least five digits, so that names sort like numbers."""
    return f"{shard:05d}"


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
        reading: how its arrays are read; see `indexing/store/ranged_reads.py`.
        made: stage and fingerprint of chunks and embeddings when the datastore was opened.
    """

    folder: Path
    name: str
    chunk_rows: tuple[int, ...]
    document_rows: tuple[int, ...]
    chunk_length: int
    pad_id: int
    reading: Reading = "mmap"
    made: tuple[tuple[str, str], ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks in all shards."""
        return sum(self.chunk_rows)

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(self.document_rows)

    def first_shards(self, count: int) -> "Split":
        """The split with only its first shards."""
        return replace(self, chunk_rows=self.chunk_rows[:count], document_rows=self.document_rows[:count])

    def require_shards(self, *folders: str) -> None:
        """Check manifests and file sizes of every shard in these folders (`chunks`, `index` …), unless the datastore is
        at a URL.

        Raises:
            InputError: one is missing or has another size.
        """
        for folder in folders if remote.url_of(self.folder) is None else ():
            for shard in range(len(self.chunk_rows)):
                require_finished(self.folder / folder / shard_name(shard))

    def _array(self, stage: str, name: str) -> ShardedArray:
        paths = [self.folder / stage / shard_name(s) / f"{name}.npy" for s in range(len(self.chunk_rows))]
        return ShardedArray(paths, self.chunk_rows, self.reading)

    @cached_property
    def vocab_size(self) -> int:
        """Token ids are below this number."""
        return int(read_datastore_manifest(self.folder)["vocab_size"])

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
        """[chunks, stored k] int64, best first by `neighbors.rerank` (nearest only with `embeddings`); -1 where there
        is none."""
        return self._array("neighbors", f"{self.name}/ids")

    @cached_property
    def materialized_tokens(self) -> ShardedArray:
        """[chunks, s, 2m] uint16 or uint32: the first s stored neighbors with their continuations."""
        return self._array("materialized", f"{self.name}/tokens")

    @cached_property
    def materialized_lengths(self) -> ShardedArray:
        """[chunks, s] uint16 or uint32, real tokens of each."""
        return self._array("materialized", f"{self.name}/lengths")

    @cached_property
    def votes(self) -> CompressedArray:
        """The tokens after matches of the text up to each token, see `suffixes.votes.read_votes`."""
        paths = [self.folder / "votes" / shard_name(s) / self.name for s in range(len(self.chunk_rows))]
        return CompressedArray(paths, self.chunk_rows, rows_of_block(self.chunk_length), self.reading)

    @cached_property
    def neighbor_limit(self) -> float:
        """`neighbors.max_overlap` of the stored neighbors: near copies above it were left out. 1 = none were, or there
        are no neighbors."""
        if "neighbors" not in read_datastore_manifest(self.folder)["fingerprints"]:
            return 1.0
        stored = recorded(self.folder / "neighbors" / shard_name(0), "settings", _Neighbors)
        return float(stored.get("neighbors.max_overlap", 1))

    @cached_property
    def document_offsets(self) -> ShardedArray:
        """[documents + 1] int64 in each shard: the first chunk of every document, counted from the shard's first
        one."""
        # Small, and searched, so always memory-mapped.
        paths = [
            self.folder / "chunks" / shard_name(s) / self.name / "documents.npy" for s in range(len(self.chunk_rows))
        ]
        return ShardedArray(paths, [rows + 1 for rows in self.document_rows])

    def documents_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The document of each chunk: ids [n] → (document number, its first chunk, its last chunk + 1), each [n]
        int64."""
        starts = self.tokens.starts
        first_documents = np.concatenate([[0], np.cumsum(self.document_rows, dtype=np.int64)])
        shards = np.searchsorted(starts, ids, side="right") - 1
        document, first, stop = np.empty((3, len(ids)), dtype=np.int64)
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            offsets = self.document_offsets.shard(int(shard))
            chunks = ids[rows] - starts[shard]
            local = np.searchsorted(offsets, chunks, side="right") - 1
            with reading(self.document_offsets.paths[shard]):
                begin, end = offsets[local], offsets[local + 1]
                if ((begin > chunks) | (end <= chunks) | (begin < 0) | (end > self.chunk_rows[shard])).any():
                    raise DoesNotFit("chunks are in none of the documents")
            document[rows] = local + first_documents[shard]
            first[rows] = begin + starts[shard]
            stop[rows] = end + starts[shard]
        return document, first, stop

    def chunk_range(self, document: int) -> tuple[int, int]:
        """The chunks [first, stop) of a document number."""
        first, stop = self.chunk_ranges(np.array([document]))[0].tolist()
        return first, stop

    def chunk_ranges(self, documents: np.ndarray) -> np.ndarray:
        """The first chunk and the last one + 1 of document numbers: [n] int64 → [n, 2] int64."""
        first_documents = np.concatenate([[0], np.cumsum(self.document_rows, dtype=np.int64)])
        shards = np.searchsorted(first_documents, documents, side="right") - 1
        out = np.empty((len(documents), 2), dtype=np.int64)
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            local = documents[rows] - first_documents[shard]
            offsets = self.document_offsets.shard(int(shard))
            out[rows] = np.stack([offsets[local], offsets[local + 1]], axis=1) + self.tokens.starts[shard]
        return out

    def with_continuation(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Retrieved chunks N with their continuations F (paper, section 2.3).

        The continuation is the next chunk of the same document. If there is none, and for an id of -1, the row is
        padded. So the real tokens are always a prefix.

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
            _, _, stop = self.documents_of(ids[present])
            continued = present[ids[present] + 1 < stop]
            # A chunk and its continuation are adjacent on disk, so both are read at once.
            both = np.concatenate([ids[present], ids[continued] + 1])
            read_tokens, read_lengths = self.tokens.gather(both), self.lengths.gather(both)
            tokens[present, :m], tokens[continued, m:] = np.split(read_tokens, [len(present)])
            lengths[present] = read_lengths[: len(present)]
            lengths[continued] += read_lengths[len(present) :]
        return tokens, lengths

    @property
    def deleted(self) -> np.ndarray:
        """The chunk ranges [n, 2] int64 of deleted documents now; see `deletions.py`.

        `deleted.json` is written before the manifest that lists appended shards, so it can name chunks that this split
        lacks.

        Raises:
            DatastoreChanged: see `require_unchanged`.
        """
        ranges = deleted_ranges(self.folder, self.name)
        self.require_unchanged()  # afterwards: a rebuild takes the chunks out of the manifest before it changes the ranges
        return ranges[: np.searchsorted(ranges[:, 1], self.num_chunks, side="right")]

    def require_unchanged(self) -> None:
        """Raise DatastoreChanged if the datastore is not the opened one any more: chunk ids would name other text.

        Further stages and appended shards change nothing.
        """
        try:
            stat = os.stat(f"{self.folder}/manifest.json")
            stamp: tuple[int, ...] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except FileNotFoundError:
            stamp = ()
        if not _has_made(self.folder, stamp, self.made, len(self.chunk_rows)):
            raise DatastoreChanged(
                f"{remote.datastore_name(self.folder)} was built again, or is being built again, since this process "
                "opened it. Restart the process when the build is finished."
            )

    def without_deleted(self, ids: np.ndarray) -> np.ndarray:
        """Replace chunk ids [...] int64 of deleted documents by -1."""
        return without_deleted(ids, self.deleted)

    @property
    def deleted_documents(self) -> np.ndarray:
        """The numbers [n] int64 of deleted documents, in order."""
        return self.documents_of(self.deleted[:, 0])[0]

    @cached_property
    def documents(self) -> DocumentTable:
        """Metadata of the documents: the rows of `documents.parquet`."""
        folders = [self.folder / "chunks" / shard_name(s) / self.name for s in range(len(self.document_rows))]
        return DocumentTable([folder / "documents.parquet" for folder in folders], self.document_rows)

    def find_documents(self, ids: Collection[str]) -> dict[int, str]:
        """The numbers of all documents with these ids, in order, and the id of each; several documents may share an
        id."""
        wanted = set(ids)
        return {
            first + row: name
            for first, table in self.documents.scan(["id"])
            for row, name in enumerate(table["id"].to_pylist())
            if name in wanted
        }

    def metadata(self, documents: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of `documents.parquet` for these document numbers, as dictionaries."""
        return self.documents.take(documents)


@dataclass(frozen=True)
class Datastore:
    """A datastore opened for reading. `Datastore.open(folder)`, then `.train`, `.valid`, `.test`, `.manifest`."""

    folder: Path
    manifest: dict[str, Any]
    reading: Reading = "mmap"

    @classmethod
    def open(cls, location: Path | str, reading: Reading = "mmap") -> "Datastore":
        """Open the datastore in a folder or at a URL. For a URL, `folder` is the local mirror (`remote.py`).

        Args:
            location: the folder, or any fsspec URL.
            reading: how arrays are read: `mmap` or `pread`. From a URL, `mmap` fetches whole files on first use,
                `pread` requests ranges of bytes.

        Raises:
            InputError: there is no datastore, its chunks are not finished, its manifest is damaged, or its format has
                another version.
        """
        folder = remote.local_folder(location)
        remote.refresh(folder)
        path = folder / "manifest.json"
        if not path.exists():
            at = remote.url_of(folder) or folder
            if (folder / "checkpoints").is_dir():
                raise InputError(
                    f"{at} is not a datastore but the folder of a run: {at}/settings.json names its datastores (data.datastores)."
                )
            raise InputError(
                f"{at} is not a datastore ({at}/manifest.json is missing). Build one: `retro index CONFIG`."
            )
        try:
            manifest = read_datastore_manifest(folder)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"{path} cannot be read: {error}. Run `retro index CONFIG` to write it again.") from error
        check_version(folder, manifest)
        finished = parsed(FinishedManifest, manifest, path)
        _check_tokenizer(folder, finished)
        return cls(folder, dict(finished), reading)

    @property
    def chunk_length(self) -> int:
        """m, tokens in a chunk."""
        return int(self.manifest["chunk_length"])

    def split(self, name: str) -> Split:
        """The split called `train`, `valid` or `test`."""
        rows = self.manifest["splits"][name]
        return Split(
            folder=self.folder,
            name=name,
            chunk_rows=tuple(rows["chunks"]),
            document_rows=tuple(rows["documents"]),
            chunk_length=self.chunk_length,
            pad_id=int(self.manifest["pad_id"]),
            reading=self.reading,
            made=tuple((stage, self.manifest["fingerprints"][stage]) for stage in _READ if self.has(stage)),
        )

    @cached_property
    def train(self) -> Split:
        """The chunks that are in the index."""
        return self.split("train")

    @cached_property
    def valid(self) -> Split:
        """The chunks of the documents held out for evaluation during development."""
        return self.split("valid")

    @cached_property
    def test(self) -> Split:
        """The chunks of the documents held out for the final evaluation."""
        return self.split("test")

    def has(self, stage: str) -> bool:
        """Whether a stage (`chunk`, `embed`, `add`, `neighbors` …) is finished for every shard."""
        return stage in self.manifest["fingerprints"]

    def require(self, stage: str) -> None:
        """Raise InputError unless the stage is finished; the message has the commands that finish it."""
        if not self.has(stage):
            missing = [name for name in before(stage) if not self.has(name)]
            commands = ", then ".join(f"`--stage {name}`" for name in [*missing, stage])
            raise InputError(
                f"{self.folder} has no finished '{stage}' stage. Run `retro index CONFIG` (or {commands}) first."
            )

    @property
    def fingerprint(self) -> str:
        """One fingerprint over every finished stage and the deletions."""
        deleted = {split.name: split.deleted.tolist() for split in map(self.split, SPLITS) if len(split.deleted)}
        return fingerprint([self.built, deleted]) if deleted else self.built

    @property
    def built(self) -> str:
        """The fingerprint without deletions: equal for a run before and after one. Stages that only rearrange the data
        of others do not count."""
        return fingerprint({name: self.manifest["fingerprints"][name] for name in _CONTENT if self.has(name)})


@lru_cache(maxsize=64)
def _has_made(folder: Path, stamp: tuple[int, ...], made: tuple[tuple[str, str], ...], shards: int) -> bool:
    """Whether a datastore, whose manifest has this stamp, has these stages with these fingerprints, at least in its
    first shards."""
    if not made:
        return True
    try:
        manifest = read_datastore_manifest(folder)
        if "chunk" not in manifest["fingerprints"]:
            return False
        grown = len(manifest["splits"]["train"]["chunks"]) > shards
        for stage, opened in made:
            now = manifest["fingerprints"].get(stage, opened)  # without embeddings it is being appended to
            if now != opened and not (grown and opened == _joint(folder / _READ[stage], shards)):
                return False
    except (FileNotFoundError, ValueError):
        return False
    return True


def _joint(folder: Path, shards: int) -> str:
    """The fingerprint of the first shards of a stage."""
    return fingerprint([parse_manifest(folder / shard_name(shard))["fingerprint"] for shard in range(shards)])


def delete_documents(folder: Path, ids: Collection[str]) -> tuple[int, int]:
    """Delete all documents with these ids, in every split; returns the numbers of newly deleted documents and of their
    chunks.

    Raises:
        InputError: no document has one of the ids; then none is deleted.
    """
    with locked(folder):
        datastore, old = Datastore.open(folder), read_deletions(folder)
        existing = [name for split in map(datastore.split, SPLITS) for name in split.find_documents(ids).values()]
        if unknown := set(ids) - set(existing) - old.documents.keys():
            more = f" ({len(unknown):,} of the ids are unknown)" if len(unknown) > 1 else ""
            raise InputError(f"{folder} has no document {min(unknown)!r}{more}. Nothing was deleted.")
        known = dict.fromkeys(existing, len(datastore.train.chunk_rows)) | dict(old.documents)
        new = record_deletions(datastore, known)
    before, after = (
        np.concatenate([np.empty((0, 2), np.int64), *deletions.chunks.values()]) for deletions in (old, new)
    )
    return len(after) - len(before), int(np.diff(after).sum() - np.diff(before).sum())


def record_deletions(datastore: Datastore, documents: Mapping[str, int]) -> Deletions:
    """Write and return these deleted documents with their chunks in the datastore; the caller holds the lock."""
    deletions = Deletions(documents, deleted_chunks(datastore, documents))
    write_deletions(datastore.folder, deletions)
    return deletions


def deleted_chunks(datastore: Datastore, ids: Collection[str]) -> dict[str, np.ndarray]:
    """The chunk ranges [n, 2] int64 of the documents with these ids, by split."""
    return {
        split.name: split.chunk_ranges(np.array([*split.find_documents(ids)], dtype=np.int64))
        for split in map(datastore.split, SPLITS)
    }


def read_report(folder: Path) -> dict[str, Any] | None:
    """The measurements in `report.json`; None without a report, or with a warning if it is damaged."""
    path = remote.local_folder(folder) / "report.json"
    try:
        return read_checked(path) if path.exists() else None
    except ValueError as error:
        log.warning("%s has changed since it was written (%s): `retro index CONFIG` writes it again.", path, error)
        return None


def read_datastore_manifest(folder: Path) -> dict[str, Any]:
    """Read the datastore's manifest.

    Raises:
        ValueError: it has changed since it was written, or a field has another type or is out of range (InputError).
    """
    path = folder / "manifest.json"
    return dict(parsed(DatastoreManifest, read_checked(path), path))


def check_version(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise InputError if the manifest of a datastore has another format version."""
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise InputError(
            f"{folder / 'manifest.json'} has format version {version}, this program reads {FORMAT_VERSION} (docs/reference/versions.md). "
            "Build the datastore again: `retro index CONFIG --rebuild`."
        )


def _check_tokenizer(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise InputError if a manifest has other numbers than the tokenizer that made the chunks."""
    path = folder / "tokenizer" / "meta.json"
    try:
        tokenizer = stored_json(path, _Tokenizer)
    except InputError:
        return  # it is missing or damaged: whoever reads the tokenizer says so
    for key, value in (("vocab_size", tokenizer["vocab_size"]), ("pad_id", tokenizer["pad_id"])):
        if manifest[key] != value:
            raise InputError(
                f"{folder / 'manifest.json'}: {key} = {manifest[key]:,}, but {path} has {value:,}. "
                "`retro index CONFIG` writes the manifest again."
            )


def write_datastore_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the datastore's manifest atomically. No other file of a datastore is ever replaced."""
    write_checked(folder / "manifest.json", {"format_version": FORMAT_VERSION, **manifest})
    remote.publish_file(folder / "manifest.json")
