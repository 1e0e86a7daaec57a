"""The memory that this process may use."""

import functools
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


@functools.cache
def usable_memory(membership: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS) -> int:
    """The machine's memory in bytes, or the lowest limit of the process's control groups (Linux), as in a container.

    Args:
        membership: names the groups of the process.
        groups: where the groups of the machine are mounted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":  # version 2
            limits += _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and all groups that it is in."""
    group = root / path.lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    texts = [file.read_text().strip() for file in files if file.exists()]
    return [int(text) for text in texts if text.isdigit()]  # version 2 writes `max` for no limit
