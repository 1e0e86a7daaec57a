"""An artefact is a finished folder: it has a manifest, and the manifest has a fingerprint.

    with create(folder, recipe) as (work, counts):   # work = a temporary folder beside `folder`
        np.save(work / "tokens.npy", tokens)
        counts["chunks"] = len(tokens)
    # here every file has been flushed and checksummed, the manifest written, and the folder renamed into place

One rename makes it visible, so a killed stage leaves a temporary folder at most, never half an artefact. A stage asks
`is_finished(folder, recipe)` first: the same recipe means the work is done; another one is refused by name.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexing.store import remote
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST, checksum, read_json, sync_folder, write_json


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits that stand for a JSON-able value: equal values, equal fingerprints, on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Recipe:
    """What an artefact is made of. Two artefacts with equal recipes hold equal bytes.

    Attributes:
        stage: the stage that makes it, as on the command line (`chunk`, `embed`, …).
        version: of the stage's code; raised whenever the same settings would give other bytes.
        settings: the settings that the bytes depend on, `section.key` to value.
        inputs: name to fingerprint of every artefact it is made from.
    """

    stage: str
    version: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The recipe as it stands in the manifest: lists for tuples, plain dictionaries."""
        parts = {"stage": self.stage, "version": self.version, "settings": self.settings, "inputs": self.inputs}
        return json.loads(json.dumps(parts, default=dict))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all of the above."""
        return fingerprint(self.as_json())


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether `folder` holds the finished artefact of this recipe.

    Raises:
        InputError: it holds the artefact of another recipe; the message names what differs and what rebuilds it.
    """
    if not (folder / MANIFEST).exists():
        return False
    found = read_manifest(folder)
    if found["fingerprint"] == recipe.fingerprint:
        return True
    raise InputError(
        f"{folder} was built by stage '{found['recipe']['stage']}' from something else:\n"
        + "".join(f"  {line}\n" for line in differences(found["recipe"], recipe.as_json()))
        + f"Set it back, choose another datastore folder, or rebuild this stage and what follows from it: "
        f"add `--stage {recipe.stage} --rebuild`."
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each way in which two recipes differ, the settings by name."""
    lines = []
    for key in sorted({*old["settings"], *new["settings"]}):
        before, after = old["settings"].get(key, "not set"), new["settings"].get(key, "not set")
        if before != after:
            lines.append(f"{key} was {before!r}, now {after!r}")
    for key in sorted({*old["inputs"], *new["inputs"]}):
        if old["inputs"].get(key) != new["inputs"].get(key):
            lines.append(f"its input '{key}' has changed")
    if old["version"] != new["version"]:
        lines.append(f"its format was version {old['version']}, this program writes version {new['version']}")
    return lines or ["its manifest was edited"]


@contextlib.contextmanager
def create(folder: Path, recipe: Recipe) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the artefact `folder`: yields a temporary folder to fill and a dictionary of counts for the manifest.

    On a normal exit the folder is renamed into place with its manifest; on an error the temporary folder is removed and
    nothing else changes. A temporary folder left by a killed process is removed first. Where the folder mirrors a URL,
    everything is uploaded before the rename.
    """
    work = folder.with_name(f".{folder.name}.tmp")
    for leftover in (work, folder):  # `folder` itself only where a kill interrupted its removal
        if leftover.exists() and not (leftover / MANIFEST).exists():
            shutil.rmtree(leftover)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    counts: dict[str, Any] = {}
    try:
        yield work, counts
        write_manifest(work, recipe, counts)
        sync_folder(work)
        remote.publish(work, folder)
        os.rename(work, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_manifest(folder: Path, recipe: Recipe, counts: Mapping[str, Any]) -> None:
    """Write `folder/manifest.json`: the recipe, its fingerprint, the counts, and size and checksum of every file."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
    write_json(
        folder / MANIFEST,
        {"fingerprint": recipe.fingerprint, "recipe": recipe.as_json(), "counts": dict(counts), "files": files},
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished artefact, after a look at the size of each of its files.

    Of one that mirrors a URL the manifest is fetched, and the files need not be here.

    Raises:
        InputError: there is none, or a file is missing or has another size than when it was written.
    """
    path = folder / MANIFEST
    if not remote.fetch_manifest(folder):
        raise InputError(f"{folder} is not finished: {path} is missing. Run the stage that makes it again.")
    manifest = read_json(path)
    problem = next(_wrong_sizes(folder, manifest), None)
    if problem:
        raise InputError(f"{problem}. Remove the folder {folder} and run the command that made it again.")
    return manifest


def verify(folder: Path) -> list[str]:
    """Compare every file of an artefact with its manifest; one line for each that is missing or differs."""
    if not (folder / MANIFEST).exists():
        return [f"{folder / MANIFEST} is missing"]
    try:
        manifest = read_json(folder / MANIFEST)
        if fingerprint(manifest["recipe"]) != manifest["fingerprint"]:
            return [f"{folder / MANIFEST} has changed since it was written (fingerprint)"]
        problems = list(_wrong_sizes(folder, manifest))
        return problems or [
            f"{folder / name} has changed since it was written (checksum)"
            for name, expected in manifest["files"].items()
            if checksum(folder / name) != expected["checksum"]
        ]
    except (ValueError, KeyError) as error:
        return [f"{folder / MANIFEST} has changed since it was written ({error})"]


def _wrong_sizes(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in manifest["files"].items():
        file = folder / name
        size = file.stat().st_size if file.exists() else None
        if size != expected["bytes"] and not (size is None and remote.url_of(folder)):
            found = "is missing" if size is None else f"has {size:,} bytes instead of {expected['bytes']:,}"
            yield f"{file} {found}"


def remove(folder: Path) -> None:
    """Delete an artefact: first its manifest, so that a kill halfway leaves something unfinished, not something false."""
    remote.remove(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
