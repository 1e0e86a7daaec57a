"""Artifacts: finished folders with a manifest that holds a fingerprint.

    with create(folder, recipe) as (work, counts):   # work = a temporary folder next to `folder`
        np.save(work / "tokens.npy", tokens)
        counts["chunks"] = len(tokens)
    # here every file has been flushed and checksummed, the manifest written, and the folder renamed into place

One rename makes an artifact visible. So a killed stage leaves at most a temporary folder, never half an artifact. A
stage first asks `is_finished(folder, recipe)`: with the same recipe the work is done, with another one an error names
the difference, and a damaged artifact is made again.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from indexing.machine import map_largest_first
from indexing.store import remote
from indexing.store.checked_files import remember
from indexing.store.errors import DamagedFile, DoesNotFit, InputError
from indexing.store.files import (
    MANIFEST,
    checksum,
    files_of,
    member,
    read_checked,
    read_json,
    sync_folder,
    write_checked,
)
from indexing.store.schemas import ArtifactManifest, parsed

log = logging.getLogger("retro")

Record = TypeVar("Record")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fingerprint(value: object) -> str:
    """A hash of a JSON-able value in 16 hexadecimal digits: equal values give equal fingerprints on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Artifacts:
    """Finished artifacts of a datastore: inputs of another one, or what a stage has made.

    Attributes:
        fingerprint: one for all of them; None in a recipe that holds their inputs instead.
        paths: their folders in the datastore, see `paths.py`.
    """

    fingerprint: str | None
    paths: Any = field(hash=False)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the bytes of an artifact. Artifacts with equal recipes hold equal bytes.

    Attributes:
        stage: the stage that makes it, as on the command line (`chunk`, `embed`, …).
        version: version of the stage's code, raised whenever the same settings would give other bytes.
        settings: the settings that the bytes depend on, `section.key` → value.
        inputs: name → everything that it is made from: artifacts of the datastore, or the fingerprint of something
            else.
    """

    stage: str
    version: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Artifacts | str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The recipe as in a manifest: lists instead of tuples, plain dictionaries, fingerprints of the inputs without
        paths."""
        prints = {name: made.fingerprint if isinstance(made, Artifacts) else made for name, made in self.inputs.items()}
        inputs = {name: value for name, value in prints.items() if value is not None}
        parts = {"stage": self.stage, "version": self.version, "settings": self.settings, "inputs": inputs}
        return json.loads(json.dumps(parts, default=dict))

    @property
    def paths(self) -> dict[str, Any]:
        """The paths of the inputs that are artifacts of the datastore."""
        return {name: made.paths for name, made in self.inputs.items() if isinstance(made, Artifacts)}

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all attributes."""
        return fingerprint(self.as_json())


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """True if `folder` holds the undamaged artifact of this recipe. For a damaged one, log a warning and return False.

    Raises:
        InputError: it holds the artifact of another recipe; the message names the differences and the command to
            rebuild it.
    """
    if not (folder / MANIFEST).exists():
        return False
    manifest, problem = _inspected(folder)
    if manifest is None or manifest["fingerprint"] == recipe.fingerprint:
        if problem:
            log.warning("%s; %s is made again", problem, folder)
        return problem is None
    raise InputError(
        f"{folder} was built by stage '{manifest['recipe']['stage']}' with other settings or inputs:\n"
        + "".join(f"  {line}\n" for line in differences(manifest["recipe"], recipe.as_json()))
        + f"Restore the settings, choose another datastore folder, or rebuild this stage and all later ones: "
        f"add `--stage {recipe.stage} --rebuild`."
    )


def made_by(folder: Path, recipes: Sequence[Recipe]) -> int:
    """The number, from 1 on, of the recipe by which an artifact was made; 0 if it is damaged or was made by another
    one."""
    prints = [recipe.fingerprint for recipe in recipes]
    manifest, problem = _inspected(folder)
    made = manifest["fingerprint"] if manifest and not problem else None
    return prints.index(made) + 1 if made in prints else 0


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each difference between two recipes; settings by name."""
    lines = []
    for key in sorted({*old["settings"], *new["settings"]}):
        before, after = old["settings"].get(key, "not set"), new["settings"].get(key, "not set")
        if before != after:
            lines.append(f"{key} was {before!r}, now {after!r}")
    for key in sorted({*old["inputs"], *new["inputs"]}):
        if old["inputs"].get(key) != new["inputs"].get(key):
            change = "is new" if key not in old["inputs"] else "has changed" if key in new["inputs"] else "is not given"
            lines.append(f"its input '{key}' {change}")
    if old["version"] != new["version"]:
        lines.append(f"its format was version {old['version']}, this program writes version {new['version']}")
    return lines or ["its manifest was edited"]


@contextlib.contextmanager
def create(folder: Path, recipe: Recipe) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the artifact `folder`: yields a temporary folder to fill and a dictionary of counts for the manifest.

    On a normal exit the folder is renamed into place with its manifest. On an error the temporary folder is removed and
    nothing else changes. Leftovers of a killed process, and a damaged artifact in its place, are removed first. If the
    folder mirrors a URL, everything is uploaded before the rename.

    Every call has its own temporary folder. So a process that was believed dead and still writes (its driver was
    killed, its node was cut off) cannot touch the files of its successor. The first to finish wins.

    Raises:
        OSError: the disk is full; it names the file.
    """
    for leftover in _leftovers(folder):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists() and damage(folder):
        remove(folder)
    work = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    work.mkdir(parents=True)
    counts: dict[str, Any] = {}
    try:
        yield work, counts
        _write_manifest(work, folder.name, recipe, counts)
        sync_folder(work)
        _publish(work, folder, recipe)
        remember({folder / name: entry["checksum"] for name, entry in _parsed(folder)["files"].items()})
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in _NO_SPACE
        newest = _newest_file(work) if full else work
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and full:
            advice = f"{os.strerror(error.errno or 0)}; free some space and run the same command again, finished work is kept"
            raise OSError(error.errno, advice, str(folder / newest.relative_to(work))) from error
        raise


def _leftovers(folder: Path) -> Iterator[Path]:
    """The temporary folders of an artifact."""
    return leftovers(folder.parent, re.escape(folder.name))


def leftovers(parent: Path, name: str = ".+") -> Iterator[Path]:
    """The temporary folders in a folder of artifacts, which `create` fills, or which killed processes have left."""
    for path in parent.iterdir() if parent.exists() else ():
        if re.fullmatch(rf"\.{name}(\.[0-9a-f]{{8}})?\.tmp", path.name) and path.is_dir():
            yield path


def _newest_file(work: Path) -> Path:
    """The file that was written last."""
    files = [path for path in work.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=work)


def _publish(work: Path, folder: Path, recipe: Recipe) -> None:
    remote.publish(work, folder)
    try:
        os.rename(work, folder)
    except OSError:
        if not is_finished(folder, recipe):
            raise
        shutil.rmtree(work)  # another process finished first, with equal bytes
    sync_folder(folder.parent)


def _write_manifest(folder: Path, name: str, recipe: Recipe, counts: Mapping[str, Any]) -> None:
    """Write `folder/manifest.json`: the artifact's name, its recipe with fingerprint and paths, the counts, size and
    checksum of every file, and a checksum of the manifest."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
    made = {"name": name, "fingerprint": recipe.fingerprint, "recipe": recipe.as_json(), "paths": recipe.paths}
    write_checked(folder / MANIFEST, {**made, "counts": dict(counts), "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a finished artifact and check the size of each file.

    If the folder mirrors a URL, the manifest is fetched, and the files need not be local.

    Raises:
        InputError: there is no manifest, or a file is missing or has another size than when it was written.
    """
    manifest, problem = _inspected(folder)
    if manifest is None or problem:
        raise InputError(f"{problem}. Run the command that made {folder} again: it replaces damaged artifacts.")
    return manifest


def parse_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an artifact without checking its files.

    Raises:
        InputError: there is none, it cannot be read, or it has changed since it was written.
    """
    remote.fetch_manifest(folder)
    return _parsed(folder)


def _parsed(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = read_checked(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder} is not finished: {path} is missing") from None
    except ValueError as error:
        raise InputError(f"{path} has changed since it was written ({error})") from error
    manifest: dict[str, Any] = dict(parsed(ArtifactManifest, content, path))
    if fingerprint(manifest["recipe"]) != manifest["fingerprint"]:
        raise InputError(f"{path} has changed since it was written (fingerprint)")
    files_of(manifest, folder)
    return manifest


def recorded(folder: Path, part: Literal["settings", "counts"], kind: type[Record]) -> Record:
    """The settings in the recipe of an artifact, or its counts.

    Args:
        folder: the artifact; its files are not looked at.
        part: which of the two.
        kind: a `TypedDict` of the fields that the caller reads.

    Raises:
        InputError: the artifact is not finished, or a field is missing, has another type, or is out of range.
    """
    manifest = parse_manifest(folder)
    value = manifest["counts"] if part == "counts" else manifest["recipe"]["settings"]
    return parsed(kind, value, folder / MANIFEST, "counts" if part == "counts" else "recipe.settings")


def damage(folder: Path) -> str | None:
    """Damage of an artifact that its manifest and file sizes show, or None; `verify` checks every byte."""
    return _inspected(folder)[1]


def _inspected(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest of an artifact, None if it cannot be read, and the `damage`."""
    remote.fetch_manifest(folder)  # an unreachable URL raises, and does not count as damage
    try:
        manifest = _parsed(folder)
    except InputError as error:
        return None, str(error)
    return manifest, next(wrong_sizes(folder, manifest), None)


def verify(folder: Path) -> list[str]:
    """Compare every file of an artifact with its manifest; one line for each file that is missing or differs."""
    try:
        manifest = parse_manifest(folder)
    except InputError as error:
        return [str(error)]
    files = manifest["files"]
    return list(wrong_sizes(folder, manifest)) or [
        problem
        for problem in map_largest_first(
            lambda name, count: wrong_checksum(folder, manifest, name, count),
            [*files],
            [file["bytes"] for file in files.values()],
        )
        if problem
    ]


def wrong_sizes(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """One line for each file of an artifact that is missing or has another size than in its manifest."""
    for name, expected in manifest["files"].items():
        file = member(folder, name)
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"] and not (size is None and remote.url_of(folder)):
            problem = "is missing" if size is None else f"has {size:,} bytes instead of {expected['bytes']:,}"
            yield f"{file} {problem}"


def wrong_checksum(
    folder: Path, manifest: Mapping[str, Any], name: str, advance: Callable[[int], object] = lambda _: None
) -> str | None:
    """A message if the bytes of one file of an artifact differ from its manifest, else None. `advance` receives numbers
    of bytes."""
    if checksum(member(folder, name), advance) == manifest["files"][name]["checksum"]:
        return None
    return f"{folder / name} has changed since it was written (checksum)"


@contextlib.contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Open or read files of artifacts: an exception because of damage becomes a DamagedFile that names it.

    After an exception the files are compared with their manifests. If they are intact, the exception is raised
    unchanged: it is a bug, or a lack of memory.

    Args:
        paths: files, or folders of artifacts for all of their files.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # tantivy's
            raise
        for path in paths:
            if problem := _damage_at(path, error):
                raise damaged(path, problem) from error
        if isinstance(error, DoesNotFit):  # the files are as they were written, and were written wrong
            raise damaged(paths[0], f"{paths[0]}: {error}") from error
        raise


def require_finished(folder: Path) -> None:
    """Raise DamagedFile if an artifact of a datastore is unfinished or has `damage`."""
    if problem := damage(folder):
        raise damaged(folder, problem)


def intact(path: Path) -> Path:
    """Make a file local and compare it with the manifest next to it, if there is one; returns its local path.

    For small files, in which a changed byte could have any effect. Large files are compared only by `retro verify`.

    Raises:
        DamagedFile: the file is missing or differs.
    """
    path = remote.present(path)
    if problem := _damage_at(path):
        raise damaged(path, problem)
    return path


def stored_json(path: Path, kind: type[Record]) -> Record:
    """Read an `intact` JSON file of an artifact.

    Args:
        path: the file.
        kind: what it holds: a `TypedDict` or another type, see `schemas.parsed`.

    Raises:
        InputError: the file is missing or differs, or a field is missing, has another type, or is out of range.
    """
    return parsed(kind, read_json(intact(path)), path)


def stored_record(path: Path, kind: Callable[..., Record]) -> Record:
    """The dataclass whose fields an `intact` JSON file of an artifact holds.

    Args:
        path: the file.
        kind: the dataclass, whose fields may be annotated as those of settings are, or a function that makes one of
            settings.

    Raises:
        DamagedFile: the file is missing or differs, or does not hold these fields.
    """
    stored = read_json(intact(path))
    try:
        values = parsed(dict[str, Any], stored, path)
        if isinstance(kind, type):
            known = {field.name for field in dataclasses.fields(kind)}
            if unknown := values.keys() - known:
                raise InputError(f"unknown field {min(unknown)!r}")
            return parsed(kind, values, path)
        return kind(**values)
    except (TypeError, InputError) as error:
        raise damaged(path, f"{path} does not fit this version of retro ({error})") from error


def _damage_at(path: Path, error: BaseException | None = None) -> str | None:
    """The first difference of a file, or of all files of an artifact, from the manifest, or None.

    A file that belongs to no artifact counts as damaged if it is missing, or if there was an `error`.
    """
    for folder in (path, *path.parents[:2]):
        if (folder / MANIFEST).exists() and "files" in read_json(
            folder / MANIFEST
        ):  # a datastore's manifest lists no files
            manifest = parse_manifest(folder)
            files = {name: file for name, file in manifest["files"].items() if (folder / name).is_relative_to(path)}
            local = (name for name in files if (folder / name).exists())
            changed = (wrong_checksum(folder, manifest, name) for name in local)
            return next(wrong_sizes(folder, {"files": files}), None) or next(filter(None, changed), None)
    if not path.exists():
        return f"{path} is missing"
    return f"{path} cannot be read ({error})" if error else None


def recorded_file(path: Path) -> dict[str, Any] | None:
    """Size and checksum of a file of an artifact, as its manifest has them; None if it belongs to none, or the manifest
    is damaged."""
    for folder in path.parents[:2]:
        try:
            found = os.stat(folder / MANIFEST)
        except OSError:
            continue
        files = _files_in(folder, (found.st_ino, found.st_mtime_ns, found.st_size))
        return files.get(path.relative_to(folder).as_posix())
    return None


@functools.lru_cache(maxsize=1024)
def _files_in(folder: Path, stamp: tuple[int, ...]) -> dict[str, Any]:
    """`files` of a manifest with this stamp, which a new one changes; none if it is damaged. Each array of an artifact
    asks for them."""
    with contextlib.suppress(InputError):
        return cast(dict[str, Any], _parsed(folder)["files"])
    return {}


def damaged(path: Path, problem: str) -> DamagedFile:
    """The error of a damaged file of a datastore.

    Args:
        path: the file, or its folder.
        problem: a sentence that begins with the file.
    """
    above = [folder for folder in path.parents[:5] if (folder / MANIFEST).exists()]
    root = above[-1] if above else path.parent  # the datastore
    repair = "`retro verify DATASTORE --repair` removes damaged parts, and `retro index CONFIG` makes them again."
    return DamagedFile(f"{problem}. {repair}", file=path, problem=problem, shown=problem.replace(f"{root}{os.sep}", ""))


def remove(folder: Path) -> None:
    """Delete an artifact, first its manifest, so that an interruption leaves it unfinished, not inconsistent."""
    remote.remove(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
