"""The memory of the machine, and the limits of control groups."""

import os
from pathlib import Path

import pytest

from indexing.memory import usable_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "400"}, 400),
        ("0::/\n", {"memory.max": "300"}, 300),  # seen from inside a container
        ("4:cpu,memory:/a\n2:pids:/a\n", {"memory/a/memory.limit_in_bytes": "200", "memory.max": "100"}, 200),
        ("0::/a\n", {"a/memory.max": "max"}, MACHINE),
        ("0::/a\n", {}, MACHINE),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(1 << 62)}, MACHINE),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, membership: str, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_memory(tmp_path / "membership", tmp_path) == expected


def test_a_machine_without_control_groups_has_its_memory(tmp_path: Path) -> None:
    assert usable_memory(tmp_path / "none", tmp_path) == MACHINE
