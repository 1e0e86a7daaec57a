"""List the local files below a folder, or those that match a glob, and follow links.

The parts of a glob are a small automaton: a state holds the parts that the next name of a path may match. A folder is
read once for each state, whatever links lead to it: paths without a link come first, then others in alphabetical order.
So cycles of links end, and links to links do not multiply.
"""

import heapq
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

State = frozenset[int]
_ANY_DEPTH = "**"


@dataclass(frozen=True)
class LocalFile:
    """A file: its path, its path without links, and whether a link leads to it."""

    path: str
    real: str
    is_linked: bool


@dataclass(frozen=True)
class Walked:
    """The files that a walk found, paths without links first, and the folders that this user cannot read."""

    files: list[LocalFile] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def walk(base: str, pattern: str = _ANY_DEPTH) -> Walked:
    """List files. A link that leads back to a folder that contains the current one is not followed.

    Args:
        base: a folder; empty is the root.
        pattern: glob of the path below it; the default matches all files.
    """
    begin, step, is_match = _automaton(pattern)
    base, found, seen = base or "/", Walked(), set[tuple[str, State]]()
    # Whether a link leads to a folder, the folder, the same without links, the state, and the folders above it without
    # links.
    waiting: list[tuple[bool, str, str, State, tuple[str, ...]]] = [(False, base, os.path.realpath(base), begin, ())]
    while waiting:
        is_linked, folder, real, state, above = heapq.heappop(waiting)
        if (real, state) in seen:
            continue
        seen.add((real, state))
        above = (*above, real)
        try:
            entries = list(os.scandir(folder))
        except OSError:
            found.unreadable.append(folder)
            continue
        for entry in entries:
            if not (following := step(state, entry.name)):
                continue
            is_link = entry.is_symlink()
            target = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name)
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself, reported as a problem when it is opened
                is_folder = False
            if is_folder:
                if not (is_link and any(_contains(target, parent) for parent in above)):
                    heapq.heappush(waiting, (is_linked or is_link, entry.path, target, following, above))
            elif is_match(following):
                found.files.append(LocalFile(entry.path, target, is_linked or is_link))
    found.files.sort(key=lambda file: (file.is_linked, file.path))
    return found


def _contains(folder: str, other: str) -> bool:
    return os.path.join(other, "").startswith(os.path.join(folder, ""))


def _automaton(pattern: str) -> tuple[State, Callable[[State, str], State], Callable[[State], bool]]:
    """The first state of a glob, the state after a name, and whether a path that led to a state matches."""
    from fsspec.utils import glob_translate

    parts = pattern.split("/")
    matches = [None if part == _ANY_DEPTH else re.compile(glob_translate(part)).match for part in parts]

    def closed(positions: set[int]) -> State:
        for position in sorted(positions):
            while position < len(parts) - 1 and matches[position] is None:  # `**` may also match no folder
                position += 1
                positions.add(position)
        return frozenset(positions)

    def step(state: State, name: str) -> State:
        following = set[int]()
        for position in state:
            if position < len(parts):
                match = matches[position]
                if match is None:
                    following |= {position} | ({len(parts)} if position == len(parts) - 1 else set())
                elif match(name):
                    following.add(position + 1)
        return closed(following)

    return closed({0}), step, lambda state: len(parts) in state
