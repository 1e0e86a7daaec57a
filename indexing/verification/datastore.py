"""Verify that everything in a datastore is as it was written, and fits together.

    manifests ─► sizes and checksums of every file ─► recipes name the existing artifacts
              ─► the datastore's manifest agrees with the shards ─► arrays agree with the counts

Every problem names its file and its repair. Only intact artifacts are checked further, so that one cause gives one line. Arrays
are read in blocks and indexes shard by shard, so memory does not grow with the datastore.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexing.progress import Advance
from indexing.store.artifact import MANIFEST, fingerprint, parse_manifest, remove, wrong_checksum, wrong_sizes
from indexing.store.datastore import Datastore, read_datastore_manifest, shard_name
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.store.remote import url_of
from indexing.store.retrieval_set import RetrievalSet
from indexing.verification.contents import Check, check_chunks, check_deleted, check_of
from indexing.verification.recipes import (
    Manifests,
    dedup_names,
    generations_of,
    joint_fingerprint,
    num_shards_of,
    shard_of,
    stage_of,
    strange,
)

# Artifacts in the order in which they are made. Each is made from some of those before it.
_ORDER = ("corpus", "appended", "tokenizer", "dedup/evaluation", "dedup/signatures", "dedup/candidates", "dedup/grams", "dedup/removed", "chunks", "embedder", "embeddings", "index/trained", "index/*", "index/tuned", "sparse", "ngrams", "neighbors", "materialized", "index/merged")  # fmt: skip
_OF_STAGE = {
    "chunk": ("corpus", "tokenizer", "chunks/*"),
    "embed": ("embedder", "embeddings/*"),
    "train-index": ("index/trained",),
    "add": ("index/*", "index/tuned"),
    "sparse": ("sparse/*",),
    "ngrams": ("ngrams/*",),
    "neighbors": ("neighbors/*",),
    "materialize": ("materialized/*",),
    "merge": ("index/merged",),
}

Progress = Callable[..., contextlib.AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class DatastoreProblem:
    """A damaged part of a datastore.

    Attributes:
        artifact: artifact to make again (`embeddings/00003`); `manifest.json` for the datastore's own manifest; empty for a
            problem outside this datastore.
        found: the file, and the problem.
        file: the file with wrong bytes, if that is the problem.
        gone: True if there is nothing left to remove.
    """

    artifact: str
    found: str
    file: Path | None = None
    gone: bool = False

    def __str__(self) -> str:
        if self.artifact == MANIFEST:
            return f"{self.found}: `retro index CONFIG` writes it again."
        command = "retro index CONFIG" + (" --append" if stage_of(self.artifact) == "appended" else "")
        if self.gone:
            return f"{self.found}: `{command}` makes it again."
        if self.artifact:
            return f"{self.found}: remove {self.artifact} (--repair does), and `{command}` makes it again."
        return self.found


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        artifacts: number of artifacts.
        files: number of their files.
        bytes: size of these files.
        stages: finished stages.
        problems: all problems, in the order in which the artifacts are made.
    """

    artifacts: int
    files: int
    bytes: int
    stages: tuple[str, ...]
    problems: tuple[DatastoreProblem, ...]


def verify_datastore(folder: Path, progress: Progress) -> Verified:
    """Check every byte of a datastore without changing it.

    Args:
        folder: the datastore's folder.
        progress: `progress(name, total=…, unit=…)`: a context manager that gives a function to call with progress.

    Raises:
        InputError: there is no datastore, its format has another version, or it is at a URL.
    """
    if url := url_of(folder):
        raise InputError(
            f"{url}: `retro verify` reads every byte of a datastore in a local folder. Copy the datastore and verify the copy. "
            "Files fetched from a URL are always compared with their checksums."
        )
    problems: list[DatastoreProblem] = []
    top = _read_top(folder, problems)
    manifests = _read_manifests(folder, top, problems)
    sizes = {name: sum(file["bytes"] for file in manifest["files"].values()) for name, manifest in manifests.items()}
    with progress("checksums", total=sum(sizes.values()), unit="bytes") as advance:
        problems += _check_files(folder, manifests, advance)
    strangers = list(_check_recipes(folder, manifests, _broken(problems), _listed(top)))
    problems += strangers
    known = {name: manifest for name, manifest in manifests.items() if name not in _broken(strangers)}
    problems += _check_top(folder, top, known, _broken(problems))
    if top and MANIFEST not in _broken(problems):
        datastore = Datastore.open(folder)
        checks = list(_contents(datastore, manifests, problems))
        with progress("contents", total=sum(sizes[name] for name, _ in checks), unit="bytes") as advance:
            problems += _check_contents(datastore, checks, sizes, advance)
        problems += _check_deleted(datastore, problems)
    problems += _made_from_broken(folder, manifests, problems)
    return Verified(
        artifacts=len(manifests),
        files=sum(len(manifest["files"]) for manifest in manifests.values()),
        bytes=sum(sizes.values()),
        stages=tuple(stage for stage in _OF_STAGE if stage in (top or {}).get("fingerprints", ())),
        problems=tuple(sorted(problems, key=lambda problem: (_rank(problem.artifact), problem.artifact))),
    )


def repair(folder: Path, verified: Verified) -> list[str]:
    """Remove every damaged artifact, so that `retro index CONFIG` makes it again; returns their names."""
    names = sorted(_broken(verified.problems) - {MANIFEST, ""}, key=lambda name: (_rank(name), name))
    for name in reversed(names):
        remove(folder / name)
    return names


def _broken(problems: Sequence[DatastoreProblem]) -> set[str]:
    return {problem.artifact for problem in problems}


def _rank(name: str) -> int:
    """The position of an artifact in the order of making; names that are not artifacts come last."""
    kinds = {"index/*"} if shard_of(name, "index") is not None else {name, name.rpartition("/")[0]}
    return next((place for place, one in enumerate(_ORDER) if one in kinds), len(_ORDER))


# --- manifests and files ---------------------------------------------------------------------------------------------


def _read_top(folder: Path, problems: list[DatastoreProblem]) -> dict[str, Any] | None:
    """The datastore's own manifest, or None if it is damaged."""
    path = folder / MANIFEST
    if not path.exists() and (folder / "corpus" / MANIFEST).exists():
        problems.append(DatastoreProblem(MANIFEST, f"{path} is missing"))
        return None
    if path.exists():
        try:
            read_datastore_manifest(folder)
        except ValueError as error:
            problems.append(DatastoreProblem(MANIFEST, f"{path} cannot be read ({error})"))
            return None
    return Datastore.open(folder).manifest


def _listed(top: Mapping[str, Any] | None) -> int:
    """Number of shards that the datastore's manifest lists; 0 if it cannot be read."""
    return len(top["splits"]["train"]["chunks"]) if top else 0


def _read_manifests(folder: Path, top: Mapping[str, Any] | None, problems: list[DatastoreProblem]) -> Manifests:
    """The manifest of every artifact by name, in order. Damaged manifests and those missing in a finished stage are problems."""
    depths = ("*", "*/*", "dedup/*/*")
    there = [path.parent.relative_to(folder) for depth in depths for path in folder.glob(f"{depth}/{MANIFEST}")]
    names = {path.as_posix() for path in there if not path.name.startswith(".")}
    if top:
        shards = [shard_name(shard) for shard in range(_listed(top))]
        patterns = [pattern for stage in top["fingerprints"] for pattern in _OF_STAGE.get(stage, ())]
        names |= {pattern.replace("*", shard) for pattern in patterns for shard in shards}
    manifests: dict[str, dict[str, Any]] = {}

    def read(names: Iterable[str]) -> None:
        for name in names:
            try:
                manifests[name] = parse_manifest(folder / name)
            except InputError as error:
                problems.append(DatastoreProblem(name, str(error), gone=not (folder / name).exists()))

    read(names)
    more = dedup_names(manifests)
    generations = len(generations_of(manifests))
    if generations and _listed(top) > num_shards_of(manifests):
        more.add(f"appended/{shard_name(generations)}")
    read(more - names)
    return {name: manifests[name] for name in sorted(manifests, key=lambda name: (_rank(name), name))}


def _check_files(folder: Path, manifests: Manifests, advance: Advance) -> Iterator[DatastoreProblem]:
    """Check sizes, then checksums of every file, on all cores."""

    def check(name: str, file: str) -> str | None:
        try:
            return wrong_checksum(folder / name, manifests[name], file)
        except OSError as error:
            return f"{folder / name / file} cannot be read ({error.strerror})"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        answers = []
        for name, manifest in manifests.items():
            wrong = list(wrong_sizes(folder / name, manifest))
            yield from (
                DatastoreProblem(name, found) for found in wrong
            )  # a file of another size cannot have been read, so later artifacts are not affected
            answers += [
                (name, file, expected["bytes"], None if wrong else threads.submit(check, name, file))
                for file, expected in manifest["files"].items()
            ]
        for name, file, size, answer in answers:
            if answer and (found := answer.result()):
                yield DatastoreProblem(name, found, folder / name / file)
            advance(size)


def _made_from_broken(
    folder: Path, manifests: Manifests, problems: Sequence[DatastoreProblem]
) -> Iterator[DatastoreProblem]:
    """Find artifacts that were made after an input was changed. They are made from wrong bytes, even if they look intact.

    A manifest is written last. So a file that is younger than its manifest was changed afterwards.
    """

    def finished(name: str) -> int:
        return (folder / name / MANIFEST).stat().st_mtime_ns

    changed = [(_rank(each.artifact), each.file, each.file.stat().st_mtime_ns, each) for each in problems if each.file]
    changed = [entry for entry in changed if entry[2] > finished(entry[3].artifact)]
    for name in manifests.keys() - _broken(problems):
        source = next((file for rank, file, at, _ in changed if rank < _rank(name) and at < finished(name)), None)
        if source:
            yield DatastoreProblem(name, f"{folder / name} was made after {source} had changed")


# --- recipes and the datastore's manifest ----------------------------------------------------------------------------


def _check_recipes(folder: Path, manifests: Manifests, broken: set[str], listed: int) -> Iterator[DatastoreProblem]:
    """Find artifacts that were not made from the existing ones. Artifacts made from such a foreign artifact are foreign too.

    `listed` is the number of shards in the datastore's manifest.
    """
    known = dict(manifests)
    for name in [name for name in manifests if name not in broken]:
        found = [f"{folder / name} {what}" for what in strange(folder, name, known, listed)]
        yield from (DatastoreProblem(name, what) for what in found)
        if found:
            del known[name]


def _check_top(
    folder: Path, top: dict[str, Any] | None, manifests: Manifests, broken: set[str]
) -> Iterator[DatastoreProblem]:
    """Compare the datastore's manifest with the shards, except for values that depend on damaged artifacts."""
    if top is None:
        return
    path = folder / MANIFEST
    generations = generations_of(manifests)
    if 0 < num_shards_of(manifests) < _listed(top):  # a part of the corpus is missing
        return
    single = {"train-index": "index/trained", "add": "index/tuned", "merge": "index/merged"}
    joint = {
        "chunk": "chunks",
        "embed": "embeddings",
        "sparse": "sparse",
        "ngrams": "ngrams",
        "neighbors": "neighbors",
        "materialize": "materialized",
    }
    for stage, found in top["fingerprints"].items():
        name = single.get(stage, "")
        expected = (
            manifests[name]["fingerprint"] if name in manifests else joint_fingerprint(manifests, joint.get(stage, ""))
        )
        appended = range(len(generations[0]), num_shards_of(manifests)) if generations else range(0)
        if stage == "add" and expected and appended:
            shards = [f"index/{shard_name(shard)}" for shard in appended]
            known = all(shard in manifests for shard in shards)
            expected = fingerprint([expected, *(manifests[s]["fingerprint"] for s in shards)]) if known else None
        if expected is not None and found != expected:
            yield DatastoreProblem(
                MANIFEST, f"{path} gives stage '{stage}' the fingerprint {found}, its artifacts {expected}"
            )
    chunks = [manifest for name, manifest in manifests.items() if shard_of(name, "chunks") is not None]
    if not generations or len(chunks) != num_shards_of(manifests):
        return
    for split, columns in top["splits"].items():
        for key, rows in columns.items():
            expected = [manifest["counts"].get(split, {}).get(key) for manifest in chunks]
            if rows != expected:
                yield DatastoreProblem(
                    MANIFEST, f"{path} says its shards have {rows} {key} of {split}, they have {expected}"
                )
    if "tokenizer" not in broken:
        meta = read_json(folder / "tokenizer" / "meta.json")
        stored = {key: meta[key] for key in ("pad_id", "vocab_size")}
        stored["chunk_length"] = chunks[0]["recipe"]["settings"]["chunks.chunk_length"]
        for key, value in stored.items():
            if top[key] != value:
                yield DatastoreProblem(MANIFEST, f"{path} says {key} is {top[key]}, it is {value}")


# --- arrays ----------------------------------------------------------------------------------------------------------


def _contents(
    datastore: Datastore, manifests: Manifests, problems: list[DatastoreProblem]
) -> Iterator[tuple[str, Check]]:
    """The artifacts whose arrays can be checked, in order."""
    readable = True
    if datastore.has("neighbors"):
        try:
            RetrievalSet.of(datastore)
        except InputError as error:
            problems.append(DatastoreProblem("", str(error)))
            readable = False
    for name in manifests:
        check = None if name in _broken(problems) else check_of(name)
        if check and (readable or shard_of(name, "neighbors") is None):
            yield name, check


def _check_contents(
    datastore: Datastore, checks: Sequence[tuple[str, Check]], sizes: Mapping[str, int], advance: Advance
) -> Iterator[DatastoreProblem]:
    whole = all(
        (f"chunks/{shard_name(shard)}", check_chunks) in checks for shard in range(len(datastore.train.chunk_rows))
    )
    for name, check in checks:
        shard, found = name.partition("/")[2], []
        try:
            if whole or shard_of(name, "neighbors") is None:  # neighbors can be checked only with all chunks
                found = list(check(datastore, int(shard) if shard.isdigit() else 0))
        except (InputError, ValueError, OSError) as error:
            found = [f"{datastore.folder / name} cannot be read ({error})"]
        yield from (DatastoreProblem(name, each) for each in found)
        whole = whole and not (found and check is check_chunks)
        advance(sizes[name])


def _check_deleted(datastore: Datastore, problems: Sequence[DatastoreProblem]) -> Iterator[DatastoreProblem]:
    """Check the deleted documents if the chunks are intact. Their ids belong to no artifact, so `retro index` cannot restore them."""
    if any(stage_of(problem.artifact) == "chunks" for problem in problems):
        return
    try:
        yield from (DatastoreProblem("", found) for found in check_deleted(datastore))
    except InputError as error:
        yield DatastoreProblem("", str(error))
