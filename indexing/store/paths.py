"""Paths of artifacts in a datastore, as manifests hold them, and their fingerprint.

"tokenizer"                             an artifact: its fingerprint
"chunks/00000..00003"                   consecutive shards: one fingerprint over theirs, in order
["index/tuned", "index/00002..00003"]   several artifacts: the same
{"chunks": …, "index": …}               parts with names: one fingerprint over theirs
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from indexing.store.artifact import fingerprint
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.files import member

_SHARDS = re.compile(r"(.+/)(\d{5,9})\.\.(\d{5,9})")
_MOST_SHARDS = 1 << 20


def path_of(folder: str, shards: int | range) -> str:
    """The path of a shard in a folder, or of consecutive ones."""
    if isinstance(shards, range):
        return f"{folder}/{shard_name(shards[0])}..{shard_name(shards[-1])}"
    return f"{folder}/{shard_name(shards)}"


def joined(names: Sequence[str]) -> str | list[str]:
    """The path of several artifacts, shorter if they are consecutive shards."""
    shards = f"{names[0]}..{names[-1].rpartition('/')[2]}"
    return shards if names_at(shards) == tuple(names) else list(names)


def parts_of(paths: object) -> Iterator[str]:
    """The paths of single artifacts and of consecutive shards.

    Raises:
        InputError: `paths` holds something else.
    """
    if isinstance(paths, dict | list):
        for part in paths.values() if isinstance(paths, dict) else paths:
            yield from parts_of(part)
    elif isinstance(paths, str) and names_at(paths):
        yield paths
    else:
        raise InputError(f"{paths!r:.50} is not the path of an artifact, such as 'chunks/00000'.")


@lru_cache(maxsize=256)
def names_at(part: str) -> tuple[str, ...]:
    """The artifacts at the path of one, or of consecutive shards.

    Raises:
        InputError: it can lead out of the datastore, or names more than a million shards.
    """
    member(Path(), part)
    if not (shards := _SHARDS.fullmatch(part)):
        return (part,)
    first, last = int(shards[2]), int(shards[3])
    if last - first >= _MOST_SHARDS:
        raise InputError(f"{part!r} names more than {_MOST_SHARDS:,} shards.")
    return tuple(f"{shards[1]}{shard_name(shard)}" for shard in range(first, last + 1))


def fingerprint_at(paths: object, fingerprint_of: Callable[[str], str | None]) -> str | None:
    """The fingerprint of the artifacts at `paths`; None if that of one artifact is None."""
    if isinstance(paths, dict):
        prints: Any = {name: fingerprint_at(part, fingerprint_of) for name, part in paths.items()}
        return None if None in prints.values() else fingerprint(prints)
    if isinstance(paths, str) and not _SHARDS.fullmatch(paths):
        return fingerprint_of(paths)
    prints = [fingerprint_of(name) for part in parts_of(paths) for name in names_at(part)]
    return None if None in prints else fingerprint(prints)
