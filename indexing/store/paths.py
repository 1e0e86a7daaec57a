"""Paths of artifacts in a datastore, as manifests hold them, and their fingerprint.

"tokenizer"                             an artifact: its fingerprint
"chunks/00000..00003"                   consecutive shards: one fingerprint over theirs, in order
["index/tuned", "index/00002..00003"]   several artifacts: the same
{"chunks": …, "index": …}               parts with names: one fingerprint over theirs
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from indexing.store.artifact import fingerprint
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError

_SHARDS = re.compile(r"(.+/)(\d{5,9})\.\.(\d{5,9})")
_MOST_SHARDS = 1 << 20


def path_of(folder: str, shard: int) -> str:
    """The path of a shard in a folder."""
    return f"{folder}/{shard_name(shard)}"


def path_of_shards(folder: str, shards: range) -> str | list[str]:
    """The path of consecutive shards in a folder."""
    return f"{folder}/{shard_name(shards[0])}..{shard_name(shards[-1])}" if shards else []


def joined(names: Sequence[str]) -> str | list[str]:
    """The path of several artifacts: of consecutive shards if they are some."""
    if names:
        shards = f"{names[0]}..{names[-1].rpartition('/')[2]}"
        if shards_at(shards) == tuple(names):
            return shards
    return list(names)


def parts_of(paths: Any) -> Iterator[str]:
    """The paths of single artifacts and of consecutive shards in `paths`.

    Raises:
        InputError: there is something else in them.
    """
    if isinstance(paths, str):
        yield paths
    elif isinstance(paths, dict | list):
        for part in paths.values() if isinstance(paths, dict) else paths:
            yield from parts_of(part)
    else:
        raise InputError(f"{paths!r:.50} is not the path of an artifact, such as 'chunks/00000'.")


@lru_cache(maxsize=256)
def shards_at(part: str) -> tuple[str, ...]:
    """The artifacts at one of these: a single one, or consecutive shards.

    Raises:
        InputError: there are more than a million.
    """
    shards = _SHARDS.fullmatch(part)
    if not shards:
        return (part,)
    first, last = int(shards[2]), int(shards[3])
    if last - first >= _MOST_SHARDS:
        raise InputError(f"{part!r} names more than {_MOST_SHARDS:,} shards.")
    return tuple(f"{shards[1]}{shard_name(shard)}" for shard in range(first, last + 1))


def artifacts_at(paths: Any) -> Iterator[str]:
    """Every single artifact at `paths`, in order."""
    for part in parts_of(paths):
        yield from shards_at(part)


def fingerprint_at(paths: Any, fingerprint_of: Callable[[str], str | None]) -> str | None:
    """The fingerprint of the artifacts at `paths`; None if that of one artifact is None."""
    if isinstance(paths, dict):
        prints: Any = {name: fingerprint_at(part, fingerprint_of) for name, part in paths.items()}
        return None if None in prints.values() else fingerprint(prints)
    if isinstance(paths, str) and not _SHARDS.fullmatch(paths):
        return fingerprint_of(paths)
    prints = [fingerprint_of(name) for name in artifacts_at(paths)]
    return None if None in prints else fingerprint(prints)
