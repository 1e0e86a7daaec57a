"""Compare the artifacts of a datastore with those that its manifests name.

A manifest names the artifacts that its own one is made from, by path and fingerprint. The datastore's manifest names those of each
finished stage in the same way. Manifests of earlier versions hold no paths.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import MANIFEST, member
from indexing.store.paths import artifacts_at, fingerprint_at, parts_of, shards_at

Manifests = Mapping[str, dict[str, Any]]


def check_paths(folder: Path, paths: Any) -> None:
    """Raise InputError if the manifest of a folder names something that cannot be an artifact of the datastore."""
    try:
        for part in parts_of(paths):
            member(folder, part)
            shards_at(part)
    except InputError as error:
        raise InputError(f"{folder / MANIFEST} names something that cannot be an artifact ({error})") from error


def needed(paths: Any, manifests: Manifests) -> set[str]:
    """The artifacts at `paths`, and all that these are made from, existing ones or not."""
    names, todo, seen = set[str](), [*parts_of(paths)], set[str]()
    while todo:
        if (part := todo.pop()) not in seen:
            seen.add(part)
            names.update(shards_at(part))
            todo += [more for name in shards_at(part) for more in parts_of(_inputs(name, manifests))]
    return names


def _inputs(name: str, manifests: Manifests) -> dict[str, Any]:
    """The paths of the inputs of an artifact by name; none if they are unknown."""
    paths: dict[str, Any] = manifests.get(name, {}).get("paths", {})
    return paths


def made_from(name: str, manifests: Manifests) -> set[str]:
    """All artifacts that an artifact is made from, also through others."""
    return needed(_inputs(name, manifests), manifests)


def order_of_making(manifests: Manifests) -> Callable[[str], tuple[float, str]]:
    """A key to sort names of artifacts: each comes after those that it is made from, a missing one with its siblings."""
    sizes = {name: len(made_from(name, manifests)) for name in manifests}
    largest: dict[str, int] = {}
    for name, size in sizes.items():
        parent = name.rpartition("/")[0]
        largest[parent] = max(size, largest.get(parent, 0))

    def key(name: str) -> tuple[float, str]:
        if name in ("", MANIFEST):
            return math.inf, name
        return sizes.get(name, largest.get(name.rpartition("/")[0], math.inf)), name

    return key


def fingerprint_of(paths: Any, manifests: Manifests) -> str | None:
    """The fingerprint of the artifacts at `paths`; None if one is unknown."""
    return fingerprint_at(paths, lambda name: manifests[name]["fingerprint"] if name in manifests else None)


def foreign(name: str, known: Manifests, named: Collection[str]) -> Iterator[str]:
    """Yield the reasons why an artifact does not belong to the others.

    Args:
        name: name of the artifact, one of `known`.
        known: the manifests of all artifacts that belong together.
        named: the names of all artifacts that exist, or are known to be missing.
    """
    written, folder = known[name].get("name"), name.rpartition("/")[2]
    if written not in (None, folder.partition(".")[0]):
        yield f"does not belong here: it was written as {written!r}"
    for key, paths in _inputs(name, known).items():
        recorded = known[name]["recipe"]["inputs"].get(key)
        if recorded is not None and fingerprint_of(paths, known) not in (None, recorded):
            yield f"was made from another '{key}' than the existing one"
        if lost := next((path for path in artifacts_at(paths) if path not in named), None):
            yield f"does not belong here: it was made from {lost}, which does not exist"
