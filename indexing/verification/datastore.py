"""Verify that everything in a datastore is as it was written, and fits together.

    manifests ─► sizes and checksums of every file ─► the artifacts that manifests name are the existing ones
              ─► the datastore's manifest agrees with the shards

Every problem names its file and its repair. Only intact artifacts are checked further, so that one cause gives one
line. The values in the files are not looked at: checksums find every change after a file was written, and recipes every
exchanged file.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexing.machine import map_largest_first
from indexing.progress import Advance
from indexing.store.artifact import MANIFEST, leftovers, parse_manifest, remove, wrong_checksum, wrong_sizes
from indexing.store.datastore import Datastore, read_datastore_manifest, shard_name
from indexing.store.deletions import read_deletions
from indexing.store.errors import InputError
from indexing.store.paths import parts_of
from indexing.store.remote import url_of
from indexing.store.retrieval_set import RetrievalSet
from indexing.verification.recipes import Manifests, fingerprint_of, foreign, needed, rank_in

_TEMPORARY = (
    "ngrams/runs",
    "suffixes/runs",
    "votes/held-out",
    "votes/ranges",
    "votes/blocks",
)  # folders that exist while a stage runs

Progress = Callable[..., contextlib.AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class DatastoreProblem:
    """A damaged part of a datastore.

    Attributes:
        artifact: artifact to make again (`embeddings/00003`); `manifest.json` for the datastore's own manifest; empty
            for a problem outside this datastore.
        message: the file, and the problem.
        file: the file with wrong bytes, if that is the problem.
        gone: True if there is nothing left to remove.
        temporary: True for what a build that was killed has left.
    """

    artifact: str
    message: str
    file: Path | None = None
    gone: bool = False
    temporary: bool = False

    def __str__(self) -> str:
        if self.artifact == MANIFEST:
            return f"{self.message}: `retro index CONFIG` writes it again."
        command = "retro index CONFIG" + (" --append" if self.artifact.startswith("appended/") else "")
        if self.temporary:
            return (
                f"{self.message}: the next `retro index CONFIG` that runs this stage removes it (--repair does, too)."
            )
        if self.gone:
            return f"{self.message}: `{command}` makes it again."
        if self.artifact:
            return f"{self.message}: remove {self.artifact} (--repair does), and `{command}` makes it again."
        return self.message


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


def verify_datastore(folder: Path, progress: Progress, *, locked: bool = False) -> Verified:
    """Check every byte of a datastore without changing it.

    Args:
        folder: the datastore's folder.
        progress: `progress(name, total=…, unit=…)`: a context manager that gives a function to call with progress.
        locked: True if the caller keeps builds from running. Otherwise temporary folders of a running build are no
            problem.

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
    foreign_artifacts = list(_check_recipes(folder, manifests, _broken(problems)))
    problems += foreign_artifacts
    known = {name: manifest for name, manifest in manifests.items() if name not in _broken(foreign_artifacts)}
    problems += _check_top(folder, top, known)
    problems += _check_others(folder, top)
    problems += _made_from_broken(folder, manifests, problems)
    if locked or not _is_building(folder):
        problems += _left_by_killed_builds(folder)
    rank = rank_in(manifests)
    return Verified(
        artifacts=len(manifests),
        files=sum(len(manifest["files"]) for manifest in manifests.values()),
        bytes=sum(sizes.values()),
        stages=tuple((top or {}).get("fingerprints", ())),
        problems=tuple(
            sorted(
                problems,
                key=lambda problem: (problem.artifact in (MANIFEST, ""), rank(problem.artifact), problem.artifact),
            )
        ),
    )


def repair(folder: Path, verified: Verified) -> list[str]:
    """Remove every damaged artifact, the last one made first, so that `retro index CONFIG` makes it again; returns
    their names."""
    names = [
        name for name in dict.fromkeys(problem.artifact for problem in verified.problems) if name not in (MANIFEST, "")
    ]
    for name in reversed(names):
        remove(folder / name)
    return names


def _broken(problems: Sequence[DatastoreProblem]) -> set[str]:
    return {problem.artifact for problem in problems}


# --- manifests and files ---------------------------------------------------------------------------------------------


def _read_top(folder: Path, problems: list[DatastoreProblem]) -> dict[str, Any] | None:
    """The datastore's own manifest, or None if it is damaged."""
    path = folder / MANIFEST
    if not path.exists() and (folder / "corpus" / MANIFEST).exists():
        problems.append(DatastoreProblem(MANIFEST, f"{path} is missing"))
        return None
    if path.exists():
        try:
            _check_paths(folder, read_datastore_manifest(folder).get("artifacts", {}))
        except InputError as error:
            problems.append(DatastoreProblem(MANIFEST, str(error)))
            return None
        except ValueError as error:
            problems.append(DatastoreProblem(MANIFEST, f"{path} cannot be read ({error})"))
            return None
    return Datastore.open(folder).manifest


def _read_manifests(folder: Path, top: Mapping[str, Any] | None, problems: list[DatastoreProblem]) -> Manifests:
    """The manifest of every artifact by name. Damaged manifests, and those missing in a finished stage, are
    problems."""
    existing = [path.parent for depth in ("*", "*/*", "dedup/*/*") for path in folder.glob(f"{depth}/{MANIFEST}")]
    names = {path.relative_to(folder).as_posix() for path in existing if not path.name.startswith(".")}
    manifests: dict[str, dict[str, Any]] = {}

    def read(name: str) -> None:
        try:
            manifest = parse_manifest(folder / name)
            _check_paths(folder / name, manifest.get("paths", {}))
            manifests[name] = manifest
        except InputError as error:
            problems.append(DatastoreProblem(name, str(error), gone=not (folder / name).exists()))

    for name in sorted(names):
        read(name)
    for name in sorted(needed((top or {}).get("artifacts", {}), manifests) - names):
        read(name)
    return manifests


def _check_paths(folder: Path, paths: object) -> None:
    """Raise InputError if the manifest of a folder names something that cannot be an artifact of the datastore."""
    try:
        list(parts_of(paths))
    except InputError as error:
        raise InputError(f"{folder / MANIFEST} names something that cannot be an artifact ({error})") from error


def _check_files(folder: Path, manifests: Manifests, advance: Advance) -> list[DatastoreProblem]:
    """Check size and checksum of every file, on all cores."""

    def check(of_artifact: tuple[str, str], count: Advance) -> DatastoreProblem | None:
        name, file = of_artifact
        path, expected = folder / name / file, manifests[name]["files"][file]
        for problem in wrong_sizes(folder / name, {"files": {file: expected}}):
            count(expected["bytes"])
            return DatastoreProblem(name, problem)  # no stage reads such a file, so later artifacts are not affected
        try:
            changed = wrong_checksum(folder / name, manifests[name], file, count)
        except OSError as error:
            changed = f"{path} cannot be read ({error.strerror})"
        return DatastoreProblem(name, changed, path) if changed else None

    files = [(name, file) for name, manifest in manifests.items() for file in manifest["files"]]
    sizes = [manifests[name]["files"][file]["bytes"] for name, file in files]
    return [problem for problem in map_largest_first(check, files, sizes, advance) if problem]


def _is_building(folder: Path) -> bool:
    """Whether a process holds the lock of builds."""
    if not (folder / ".lock").exists():
        return False
    with open(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _left_by_killed_builds(folder: Path) -> Iterator[DatastoreProblem]:
    """Find temporary folders."""
    parents = [folder, *(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))]
    for path in [*(folder / name for name in _TEMPORARY), *(left for parent in parents for left in leftovers(parent))]:
        if path.exists():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield DatastoreProblem(
                path.relative_to(folder).as_posix(),
                f"{path} was left by a build that was killed ({size:,} bytes)",
                temporary=True,
            )


def _made_from_broken(
    folder: Path, manifests: Manifests, problems: Sequence[DatastoreProblem]
) -> Iterator[DatastoreProblem]:
    """Find artifacts that were made after an input was changed. They are made from wrong bytes, even if they look
    intact.

    A manifest is written last. So a file that is younger than its manifest was changed afterwards.
    """

    finished = {name: (folder / name / MANIFEST).stat().st_mtime_ns for name in manifests}
    changes = [(problem, problem.file.stat().st_mtime_ns) for problem in problems if problem.file]
    rank = rank_in(manifests)
    for name in manifests.keys() - _broken(problems):
        for problem, time in changes:
            if rank(problem.artifact) < rank(name) and finished[problem.artifact] < time < finished[name]:
                yield DatastoreProblem(name, f"{folder / name} was made after {problem.file} had changed")
                break


# --- recipes and the datastore's manifest ----------------------------------------------------------------------------


def _check_recipes(folder: Path, manifests: Manifests, broken: set[str]) -> Iterator[DatastoreProblem]:
    """Find artifacts that were not made from the existing ones."""
    known, named = dict(manifests), manifests.keys() | broken
    for name in sorted((name for name in manifests if name not in broken), key=rank_in(manifests)):
        reasons = list(foreign(name, known, named))
        yield from (DatastoreProblem(name, f"{folder / name} {reason}") for reason in reasons)
        if reasons:
            del known[name]


def _check_top(folder: Path, top: Mapping[str, Any] | None, manifests: Manifests) -> Iterator[DatastoreProblem]:
    """Compare the datastore's manifest with the shards, except for values that depend on damaged artifacts."""
    if top is None:
        return
    path, artifacts = folder / MANIFEST, top.get("artifacts", {})
    for stage, recorded in top["fingerprints"].items():
        expected = fingerprint_of(artifacts[stage], manifests) if stage in artifacts else None
        if expected not in (None, recorded):
            problem = f"{path} gives stage '{stage}' the fingerprint {recorded}, its artifacts {expected}"
            yield DatastoreProblem(MANIFEST, problem)
    names = [f"chunks/{shard_name(shard)}" for shard in range(len(top["splits"]["train"]["chunks"]))]
    if any(name not in manifests for name in names):
        return
    for split, columns in top["splits"].items():
        for key, rows in columns.items():
            counts = [manifests[name]["counts"].get(split, {}).get(key) for name in names]
            if rows != counts:
                problem = f"{path} says its shards have {rows} {key} of {split}, they have {counts}"
                yield DatastoreProblem(MANIFEST, problem)


def _check_deletions(folder: Path, top: Mapping[str, Any] | None) -> None:
    """Raise InputError if `deleted.json` is damaged, or names chunks that the datastore does not have."""
    chunks = read_deletions(folder).chunks
    for split, columns in top["splits"].items() if top else ():
        last, rows = chunks[split].max(initial=0) if split in chunks else 0, sum(columns["chunks"])
        if last > rows:
            raise InputError(
                f"{folder / 'deleted.json'} deletes chunks of {split} up to {last - 1:,}, the datastore has {rows:,}. Run "
                "`retro index CONFIG`, which writes it again, or restore the file that belongs to this datastore."
            )


def _check_others(folder: Path, top: Mapping[str, Any] | None) -> Iterator[DatastoreProblem]:
    """Check what no stage of this datastore makes: `deleted.json`, and the datastores that neighbors come from."""
    checks: list[Callable[[], object]] = [lambda: _check_deletions(folder, top)]
    if top and "neighbors" in top["fingerprints"]:
        checks.append(lambda: RetrievalSet.of(Datastore.open(folder)))
    for check in checks:
        try:
            check()
        except InputError as error:
            yield DatastoreProblem("", str(error))
