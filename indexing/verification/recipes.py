"""Compare the artifacts of a datastore with those that its manifests name.

A manifest names the artifacts that its own one is made from, by path and fingerprint. The datastore's manifest names
those of each finished stage in the same way.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from indexing.store.paths import fingerprint_at, names_at, parts_of

Manifests = Mapping[str, dict[str, Any]]


def needed(paths: object, manifests: Manifests) -> set[str]:
    """The artifacts at `paths`, and all that these are made from, existing ones or not."""
    names, todo, seen = set[str](), [*parts_of(paths)], set[str]()
    while todo:
        if (part := todo.pop()) not in seen:
            seen.add(part)
            names.update(names_at(part))
            todo += [more for name in names_at(part) for more in parts_of(manifests.get(name, {}).get("paths", {}))]
    return names


def rank_in(manifests: Manifests) -> Callable[[str], int]:
    """The rank of an artifact in the order of making, by its name: above the ranks of all that it is made from."""
    inputs = defaultdict[str, set[str]](set)
    for name, manifest in manifests.items():
        inputs[_kind(name)].update(map(_kind, parts_of(manifest.get("paths", {}))))
    ranks = dict.fromkeys(inputs, 0)
    for _ in inputs:
        ranks = {kind: 1 + max((ranks.get(other, 0) for other in inputs[kind]), default=0) for kind in inputs}
    return lambda name: ranks.get(_kind(name), len(ranks) + 1)


def _kind(path: str) -> str:
    """The folder of shards, or the only artifact of its kind."""
    folder, _, name = path.rpartition("/")
    return folder if name[:1].isdigit() else path


def fingerprint_of(paths: object, manifests: Manifests) -> str | None:
    """The fingerprint of the artifacts at `paths`; None if one is unknown."""
    return fingerprint_at(paths, lambda name: manifests[name]["fingerprint"] if name in manifests else None)


def foreign(name: str, known: Manifests, named: Collection[str]) -> Iterator[str]:
    """Yield the reasons why an artifact does not belong to the others.

    Args:
        name: name of the artifact, one of `known`.
        known: the manifests of all artifacts that belong together.
        named: the names of all artifacts that exist, or are known to be missing.
    """
    manifest, folder = known[name], name.rpartition("/")[2]
    if manifest.get("name", folder) != folder.partition(".")[0]:
        yield f"does not belong here: it was written as {manifest['name']!r}"
    for key, paths in manifest.get("paths", {}).items():
        recorded = manifest["recipe"]["inputs"].get(key)
        if recorded is not None and fingerprint_of(paths, known) not in (None, recorded):
            yield f"was made from another '{key}' than the existing one"
        if lost := next((path for part in parts_of(paths) for path in names_at(part) if path not in named), None):
            yield f"does not belong here: it was made from {lost}, which does not exist"
