"""The generations of a datastore: the files and shards of its corpus, and of what was appended to it.

A datastore grows by generations. `corpus/` is the first, and every `--append` adds one to `appended/`, with new shards
after the existing ones. Tokenizer, embedder, trained index and `nprobe` of the first generation stay. Documents that
were deleted before a generation is made are left out of it.

corpus/  appended/00001/     files.json (names, sizes, checksums)   plan.json (slices of every shard)   problems.json
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from indexing.corpus.documents import CorpusFile
from indexing.corpus.scan import FileSlice, file_order
from indexing.store.artifact import damage, read_manifest, stored_json
from indexing.store.datastore import read_datastore_manifest, shard_name
from indexing.store.deletions import left_out
from indexing.store.schemas import Bytes, Fingerprint, Rows


def corpus_folders(datastore: Path) -> list[Path]:
    """The corpus of every generation of a datastore, in order."""
    return [datastore / "corpus", *sorted((datastore / "appended").glob("[0-9]*"))]


def intact_folders(datastore: Path) -> list[Path]:
    """Those of them that are finished and undamaged."""
    return [folder for folder in corpus_folders(datastore) if not damage(folder)]


class _File(TypedDict):
    path: str
    name: str
    size: Bytes
    modified: NotRequired[str]


class RecordedFile(_File):
    """An entry of `files.json`."""

    checksum: Fingerprint


class _Problem(TypedDict):
    kind: str
    file: str
    line: int
    detail: str


class Problems(TypedDict):
    """`problems.json`."""

    counts: dict[str, Rows]
    examples: list[_Problem]
    skipped: NotRequired[dict[str, dict[str, Rows]]]  # older datastores have no skipped files


class _Slice(TypedDict):
    """An entry of `plan.json`, see `FileSlice`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    file: _File
    start: Rows
    stop: Rows
    offset: NotRequired[Bytes]
    text_bytes: NotRequired[Bytes]
    left_out: NotRequired[list[Rows]]


def plan_of(folder: Path) -> list[list[FileSlice]]:
    """The slices of every shard of one generation, from its `plan.json`."""
    read_manifest(folder)

    def slice_of(stored: _Slice) -> FileSlice:
        values: dict[str, Any] = {**stored, "left_out": tuple(stored.get("left_out", ()))}
        return FileSlice(**values | {"file": _corpus_file(stored["file"])})

    return [[slice_of(stored) for stored in shard] for shard in stored_json(folder / "plan.json", list[list[_Slice]])]


def read_plan(datastore: Path) -> list[list[FileSlice]]:
    """The slices of every shard of a datastore, all generations."""
    return [shard for folder in corpus_folders(datastore) for shard in plan_of(folder)]


def generations(datastore: Path) -> list[range]:
    """The shard numbers of every generation of a datastore."""
    starts = [0]
    for folder in corpus_folders(datastore):
        starts.append(starts[-1] + len(plan_of(folder)))
    return [range(first, stop) for first, stop in itertools.pairwise(starts)]


def all_shards(datastore: Path) -> range:
    """The shard numbers of a datastore."""
    return range(generations(datastore)[-1].stop)


def first_shard(folder: Path) -> int:
    """The first shard of a generation, which need not be made yet."""
    if folder.name == "corpus":
        return 0
    earlier = [other for other in corpus_folders(folder.parent.parent) if other.name == "corpus" or other < folder]
    return sum(len(plan_of(other)) for other in earlier if not damage(other))


def left_out_of(folder: Path) -> list[str]:
    """The ids of deleted documents that a generation is made without."""
    datastore = folder.parent if folder.name == "corpus" else folder.parent.parent
    return left_out(datastore, first_shard(folder))


def next_generation(datastore: Path) -> Path:
    """The folder of the first generation that is not there, or that is damaged."""
    folders = (datastore / "appended" / shard_name(number) for number in itertools.count(1))
    return next(folder for folder in folders if damage(folder))


def missing_generation(datastore: Path) -> Path | None:
    """The first generation that is not there, or that is damaged, if there is a later one or the manifest counts its
    shards."""
    first, folders = next_generation(datastore), intact_folders(datastore)
    try:
        listed = len(read_datastore_manifest(datastore)["splits"]["train"]["chunks"])
    except (FileNotFoundError, ValueError):
        listed = 0
    is_later = any(folder.parent == first.parent and folder > first for folder in folders)
    return first if is_later or listed > sum(len(plan_of(folder)) for folder in folders) else None


def stored_files(folder: Path) -> list[RecordedFile]:
    """The files of a generation as recorded, with their checksums."""
    return stored_json(folder / "files.json", list[RecordedFile])


def counts_of(folder: Path) -> dict[str, Any]:
    """The numbers of problems by kind, and of skipped files by reason and suffix, that a generation recorded."""
    stored = stored_json(folder / "problems.json", Problems)
    return {"problems": stored["counts"], "skipped": stored.get("skipped", {})}


def recorded_files(folder: Path) -> list[CorpusFile]:
    """The files of a generation as recorded."""
    return [_corpus_file(file) for file in stored_files(folder)]


def _corpus_file(stored: _File) -> CorpusFile:
    return CorpusFile(stored["path"], stored["name"], stored["size"], stored.get("modified", ""))


def by_generation(
    datastore: Path, files: list[CorpusFile]
) -> tuple[list[tuple[Path, list[CorpusFile]]], list[CorpusFile]]:
    """Assign files to the finished generations; returns each generation with its files, and the files that are in none.

    A file is identified by its path, and keeps its recorded name. If the corpus has moved, a file with a new path is
    identified with a file of the same name and size whose path is no longer given.
    """
    folders = intact_folders(datastore)
    stored = [(folder, file) for folder in folders for file in stored_files(folder)]
    folder_of = {file["path"]: folder for folder, file in stored}
    given = {file.path for file in files}
    gone: dict[tuple[str, int], list[Path]] = {}
    for folder, file in reversed(stored):
        if file["path"] not in given:
            gone.setdefault((file["name"], file["size"]), []).append(folder)
    for corpus_file in files:
        if corpus_file.path not in folder_of and gone.get((corpus_file.name, corpus_file.size)):
            folder_of[corpus_file.path] = gone[corpus_file.name, corpus_file.size].pop()
    names = {file["path"]: file["name"] for _, file in stored}
    named = sorted((replace(file, name=names.get(file.path, file.name)) for file in files), key=file_order)
    groups = [(folder, [file for file in named if folder_of.get(file.path) == folder]) for folder in folders]
    return groups, [file for file in files if file.path not in folder_of]
