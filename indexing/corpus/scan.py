"""Turn paths into shards: list the files, scan each once, cut the corpus into slices, and read the slices.

paths ──list_corpus──► CorpusFile ──scan_file──► FileScan ──plan_shards──► FileSlice ──read_slice──► Document
"""

import contextlib
import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from indexing.corpus.documents import (
    BINARY_FILE,
    CorpusFile,
    CorpusProblem,
    CorpusSettings,
    Document,
    ReadRequest,
    opened,
    printable,
)
from indexing.corpus.megatron import is_megatron, pair_of
from indexing.corpus.readers import ACCEPTED, read, read_documents
from indexing.corpus.saved_datasets import foreign_files
from indexing.corpus.skipped import Skipped, SkippedReason, counted, name_filter, path_filter, skipped_line, suffix_of
from indexing.corpus.streams import HashingReader, listed_filesystem
from indexing.corpus.tables import PARQUET_SUFFIX
from indexing.corpus.text_bytes import text_digest
from indexing.corpus.walk import walk
from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.store.remote import named_errors

LEAST_SHARD, MOST_SHARD, _SHARDS = 4 * 2**20, 64 * 2**20, 64
"""Bytes of text of a shard, and their number, where `corpus.shard_bytes` = 0."""
# Names of the modification time in file systems: local, S3, GCS and Azure, in-memory; the Hugging Face hub has a hash
# instead.
_TIMES = ("mtime", "LastModified", "updated", "last_modified", "modified", "created", "blob_id")
KEPT_EXAMPLES = 100  # problems per file that are kept in full; more are only counted


@dataclass(frozen=True)
class FileSlice:
    """Consecutive documents of one file: those among the records [start, stop).

    Attributes:
        file: the file.
        start, stop: records.
        offset: byte at which record `start` begins in an uncompressed JSON Lines or CSV file, else 0.
        text_bytes: sum of their `Document.size`.
        left_out: records of deleted documents, which are skipped.
    """

    file: CorpusFile
    start: int
    stop: int
    offset: int = 0
    text_bytes: int = 0
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class FileScan:
    """Result of one pass over a file.

    Attributes:
        documents: number of documents.
        text_bytes: UTF-8 bytes of their text, estimated for tokens.
        problems: number of problems of each kind.
        examples: the first 100 problems.
        slices: about `shard_bytes` of text each, or `LEAST_SHARD`, in order; each document is in one of them.
        checksum: BLAKE2b-128 of the stored bytes, hexadecimal; of a Megatron pair the index first. Empty if the file
            cannot be read.
        id_hashes: [documents] uint64, BLAKE2b-64 of the ids.
        id_lines: [documents] int64, 1-based line of each.
        left_out: number of deleted documents, which are counted nowhere else.
    """

    documents: int
    text_bytes: int
    problems: dict[str, int]
    examples: list[CorpusProblem]
    slices: list[FileSlice]
    checksum: str
    id_hashes: np.ndarray = field(repr=False)
    id_lines: np.ndarray = field(repr=False)
    left_out: int = 0


def strict_problem(problem: CorpusProblem) -> None:
    """An `on_problem` that rejects every problem. A binary file among those of `corpus.suffixes` is skipped, and no
    problem.

    Raises:
        InputError: the message has the form `file:line: kind: detail`.
    """
    if problem.kind == BINARY_FILE:
        return
    raise InputError(
        f"{problem.file}:{problem.line}: {problem.kind}: {problem.detail}. "
        "Repair the file, or set corpus.strict = false to report such problems and continue."
    )


@dataclass(frozen=True)
class CorpusListing:
    """The files of a corpus, and the numbers of those that its paths lead to and that are not read.

    Attributes:
        files: each once, sorted by name, then path.
        skipped: number by reason (`SkippedReason`), then by suffix, or name if there is none.
    """

    files: list[CorpusFile]
    skipped: Skipped


def list_files(settings: CorpusSettings, key: str = "corpus.paths") -> list[CorpusFile]:
    """The files of `list_corpus`."""
    return list_corpus(settings, key).files


def list_corpus(settings: CorpusSettings, key: str = "corpus.paths") -> CorpusListing:
    """List the files of `settings.paths`, each once. Error messages use the name `key`.

    Folders and globs give the files with a known suffix, or one of `settings.suffixes`. Other files, hidden files and
    hidden folders, and files of `settings.exclude` are skipped and counted.

    Raises:
        InputError: a path does not exist, has an unknown suffix or protocol, or gives no file.
    """
    if not settings.paths:
        raise InputError(f"{key} is empty. Name files, folders or globs: --{key} data/ notes/*.md")
    files, skipped = dict[str, CorpusFile](), dict[str, tuple[SkippedReason, str]]()
    for pattern in settings.paths:
        for real, found in _files_at(pattern, settings, key).items():
            if isinstance(found, CorpusFile):
                files.setdefault(real, found)
            else:
                skipped.setdefault(real, found)
    counts = Counter(reason for real, reason in skipped.items() if real not in files)
    return CorpusListing(sorted(files.values(), key=file_order), counted(counts))


def file_order(file: CorpusFile) -> tuple[str, str]:
    """The key by which the files of a corpus are sorted."""
    return file.name, file.path


_Found = dict[str, CorpusFile | tuple[SkippedReason, str]]
"""By the path without links: a file, or why it is skipped, and its suffix."""


def _files_at(pattern: str, settings: CorpusSettings, key: str) -> _Found:
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = listed_filesystem(pattern)
    except (ImportError, ValueError) as error:  # the package for this protocol is missing, or the protocol is unknown
        raise InputError(f"{key}: {pattern!r} cannot be opened: {error}") from error
    is_local = isinstance(filesystem, LocalFileSystem)
    with contextlib.nullcontext() if is_local else named_errors(f"{key}: {pattern}"):
        return _listed(filesystem, root, pattern, settings, key, is_local)


def _listed(filesystem: Any, root: str, pattern: str, settings: CorpusSettings, key: str, is_local: bool) -> _Found:
    is_wanted, found = name_filter(settings.suffixes), _Found()
    if filesystem.isfile(root):
        if not is_wanted(root):
            raise InputError(f"{key}: {pattern!r} is not of a known kind. {ACCEPTED}")
        for part in pair_of(root) if is_megatron(root) else ():
            if not filesystem.isfile(part):
                raise InputError(
                    f"{key}: {pattern!r}: {part} is missing. A Megatron corpus needs the .bin and its .idx."
                )
        base, infos = root.rpartition("/")[0], {root: filesystem.info(root)}
    elif filesystem.isdir(root):
        base, infos = root, _local_files(root, found) if is_local else filesystem.find(root, detail=True)
    elif glob.has_magic(root):
        base = re.split(r"[*?\[]", root)[0].rpartition("/")[0]
        if is_local and base and not os.path.isdir(base):
            above = [folder for folder in (base, *map(str, Path(base).parents)) if not os.path.exists(folder)]
            problem = f"{above[-1]} does not exist" if above else f"{base} is not a folder"
            raise InputError(f"{key}: {pattern!r}: {problem}. Name a folder that exists before the `*`.")
        infos = _local_files(base, found, root[len(base) + 1 :]) if is_local else filesystem.glob(root, detail=True)
    else:
        problem = "is a pipe or a device" if filesystem.exists(root) else "does not exist"
        raise InputError(f"{key}: {pattern!r} {problem}. Name a file, a folder or a glob such as 'data/**/*.md'.")

    foreign = frozenset() if root in infos else foreign_files(filesystem, infos)
    hidden_wanted, is_excluded = root in infos or "/." in root[len(base) :], path_filter(settings.exclude)
    for path, info in infos.items():
        name = path[len(base) :].lstrip("/")
        hidden = None if hidden_wanted else next((part for part in name.split("/") if part.startswith(".")), None)
        real = info.get("real") or (os.path.realpath(path) if is_local else path)
        if info["type"] not in (
            "file",
            "other",
        ):  # "other" is a pipe or a device, counted as a problem when it is opened
            continue
        if hidden is not None:
            found[real] = "hidden", hidden
        elif is_excluded(name, path):
            found[real] = "excluded", suffix_of(name)
        elif path in foreign:
            found[real] = "not part of its saved dataset", suffix_of(name)
        elif is_wanted(name):
            file = _corpus_file(filesystem, pattern, path, name, infos)
            found.setdefault(os.path.realpath(file.path) if is_local and is_megatron(name) else real, file)
        else:
            found[real] = "unknown suffix", suffix_of(name)
    if not any(isinstance(one, CorpusFile) for one in found.values()):
        others = counted(Counter(one for one in found.values() if not isinstance(one, CorpusFile)))
        listed = f" ({skipped_line(others)})" if others else ""
        raise InputError(f"{key}: {pattern!r} holds no file of a known kind{listed}. {ACCEPTED}")
    return found


def _local_files(base: str, found: _Found, pattern: str = "**") -> dict[str, dict[str, Any]]:
    """List the files below a local folder, or those that match a glob: path → fsspec's info, and the path without links
    as `real`.

    Folders that cannot be read are added to `found`. fsspec itself does not follow links.
    """
    from fsspec.implementations.local import LocalFileSystem

    filesystem, walked, infos = LocalFileSystem(), walk(base, pattern), {}
    for folder in walked.unreadable:
        found[folder] = "folder that cannot be read", folder[len(base) :].lstrip("/") or folder
    for file in walked.files:
        try:
            info = filesystem.info(file.path) if os.path.exists(file.path) else None
        except OSError:  # it vanished meanwhile
            info = None
        # A dangling link is reported as a problem, like a file that vanished.
        infos[file.path] = (info or {"type": "file", "size": 0}) | {"real": file.real}
    return infos


def _corpus_file(filesystem: Any, pattern: str, path: str, name: str, infos: dict[str, dict[str, Any]]) -> CorpusFile:
    """Describe the file at `path`. For a Megatron pair this is the `.bin`, with the sizes and times of both files."""
    from fsspec.implementations.local import LocalFileSystem

    paths: tuple[str, ...] = (path,)
    if is_megatron(name):
        paths, name = pair_of(path), pair_of(name)[0]
    details = [infos.get(part) or filesystem.info(part) for part in paths if part in infos or filesystem.isfile(part)]
    url = paths[0]
    if not isinstance(filesystem, LocalFileSystem):  # also files in an archive: zip://name::archive
        url = "::".join([filesystem.unstrip_protocol(url), *pattern.split("::")[1:]])
    size = sum(info.get("size") or 0 for info in details)
    times = [next((info[key] for key in _TIMES if info.get(key) is not None), "") for info in details]
    return CorpusFile(url, printable(name), size, " ".join(map(str, times)))


def scan_file(
    file: CorpusFile,
    settings: CorpusSettings,
    on_document: Callable[[Document], None] | None = None,
    deleted: Collection[str] = (),
) -> FileScan:
    """Read one file once as a stream: count, check, and cut it into slices.

    Args:
        file: the file.
        settings: how it is read.
        on_document: receives every document.
        deleted: ids of documents to leave out.

    Raises:
        InputError: at the first problem, if `settings.strict`.
    """
    problems: dict[str, int] = {}
    examples: list[CorpusProblem] = []

    def on_problem(problem: CorpusProblem) -> None:
        if settings.strict:
            strict_problem(problem)
        problems[problem.kind] = problems.get(problem.kind, 0) + 1
        if len(examples) < KEPT_EXAMPLES:
            examples.append(problem)

    hashes, lines = bytearray(), bytearray()  # 8 bytes per document instead of a Python object
    slices: list[FileSlice] = []
    deleted, omitted, left_out = frozenset(deleted), list[int](), 0  # omitted: records since the piece began
    text_bytes = documents = piece_start = piece_offset = piece_stop = piece_bytes = 0
    checksum = ""
    with opened(file, on_problem) as stored:
        if stored is not None:
            raw = HashingReader(stored)
            if file.name.lower().endswith(PARQUET_SUFFIX):  # not read in order, so hashed before
                checksum = raw.finish()
                stored.seek(0)
            for document in read(stored if checksum else raw, ReadRequest(file, settings, on_problem)):
                if document.id in deleted:
                    omitted.append(document.record)
                    left_out += 1
                    continue
                if not piece_bytes:
                    piece_start, piece_offset, omitted = document.record, document.offset, []
                piece_stop = document.record + 1
                piece_bytes += document.size
                text_bytes += document.size
                documents += 1
                hashes += hashlib.blake2b(document.id.encode(), digest_size=8).digest()
                lines += piece_stop.to_bytes(8, "little")
                if piece_bytes >= (settings.shard_bytes or LEAST_SHARD):
                    slices.append(FileSlice(file, piece_start, piece_stop, piece_offset, piece_bytes, tuple(omitted)))
                    piece_bytes = 0
                if on_document is not None:
                    on_document(document)
            checksum = checksum or raw.finish()
    if piece_bytes:
        slices.append(FileSlice(file, piece_start, piece_stop, piece_offset, piece_bytes, tuple(omitted)))
    return FileScan(
        documents, text_bytes, problems, examples, slices, checksum,
        np.frombuffer(bytes(hashes), dtype="<u8"), np.frombuffer(bytes(lines), dtype="<i8"), left_out,
    )  # fmt: skip


def recipe_inputs(files: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The files of a corpus as recipe inputs, from name and checksum of each: `{name: checksum}`, or one fingerprint of
    all if there are more than 1,000 files or two share a name."""
    checksums = dict(files)
    return checksums if len(checksums) == len(files) <= 1000 else {"files": fingerprint([list(file) for file in files])}


def shard_size(settings: CorpusSettings, text_bytes: int) -> int:
    """About how many bytes of text a shard has, in a corpus of `text_bytes`."""
    return settings.shard_bytes or min(MOST_SHARD, max(LEAST_SHARD, text_bytes // _SHARDS))


def plan_shards(scans: Sequence[FileScan], shard_bytes: int) -> list[list[FileSlice]]:
    """Group the slices of all files, in order, into non-empty shards of about `shard_bytes` of text.

    A shard takes the next slice unless that misses the budget by more than stopping does. So a shard has between 0.5
    and 1.5 times the budget. Exceptions are the last shard, and slices that are large because one document is.
    """
    shards: list[list[FileSlice]] = []
    filled = shard_bytes  # bytes in the last shard of the list
    for part in (part for scan in scans for part in scan.slices):
        if not shards or filled >= shard_bytes or filled + part.text_bytes - shard_bytes > shard_bytes - filled:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += part.text_bytes
    return shards


def find_duplicates(files: Sequence[CorpusFile], scans: Sequence[FileScan]) -> list[CorpusProblem]:
    """Find ids that occur more than once in the corpus: one problem for each later occurrence, in order.

    The documents stay in the corpus, because two texts under one id are two texts. Ids are compared by 64-bit hashes in
    a sort, which takes 16 bytes per document. Among 10^8 documents the probability of a false alarm is 0.03%.
    """
    if not scans:
        return []
    hashes = np.concatenate([scan.id_hashes for scan in scans])
    lines = np.concatenate([scan.id_lines for scan in scans])
    ends = np.cumsum([len(scan.id_hashes) for scan in scans])
    order = np.argsort(hashes, kind="stable")
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = hashes[order][1:] != hashes[order][:-1]
    # The sort is stable, so the first of a run of equal hashes is the first in the corpus.
    first_of = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    problems = []
    for row in np.flatnonzero(~is_first)[np.argsort(order[~is_first])]:
        later, first = int(order[row]), int(first_of[row])
        file, first_file = (files[int(np.searchsorted(ends, item, side="right"))] for item in (later, first))
        detail = f"the same id occurs at {printable(first_file.path)}:{lines[first]}"
        problems.append(CorpusProblem("duplicate id", printable(file.path), int(lines[later]), detail))
    return problems


def split_of(text: str, weights: tuple[int, int, int]) -> str:
    """Assign a document to `train`, `valid` or `test`, with probabilities proportional to the weights.

    The split depends on a BLAKE2b hash of the text alone. So equal documents get the same split, and a document keeps
    its split as the corpus grows. The hash is a point of the unit interval: `valid` has its lower end, `test` its upper
    end, and `train` the middle. So a larger share of `valid` or `test` only moves documents out of `train`.
    """
    digest = text_digest()
    digest.update(text.encode(errors="surrogatepass"))
    return _split_of_digest(digest.digest(), weights)


def split_of_document(document: Document, weights: tuple[int, int, int]) -> str:
    """`split_of` the document's text."""
    return (
        split_of(document.text, weights) if document.large is None else _split_of_digest(document.large.digest, weights)
    )


def _split_of_digest(digest: bytes, weights: tuple[int, int, int]) -> str:
    thousands, thousandth = divmod(int.from_bytes(digest, "little"), 1000)
    # In exact integers: the point is position / whole, and its first three decimal places are the hash modulo 1000.
    fraction = 2**64 // 1000 + 1
    position, whole = thousandth * fraction + thousands, 1000 * fraction
    _, valid, test = weights
    if position * sum(weights) < valid * whole:
        return "valid"
    return "test" if (whole - position) * sum(weights) <= test * whole else "train"


def read_slice(
    file_slice: FileSlice, settings: CorpusSettings, on_problem: Callable[[CorpusProblem], None]
) -> Iterator[Document]:
    """Read the documents of one slice of a file, in order."""
    window = {"start": file_slice.start, "stop": file_slice.stop, "offset": file_slice.offset}
    documents = read_documents(file_slice.file, settings, **window, on_problem=on_problem)
    left_out = frozenset(file_slice.left_out)
    return (document for document in documents if document.record not in left_out)
