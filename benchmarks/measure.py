"""What every benchmark needs: the time of a call, and results that name the machine and the commit."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# `indexing.py` beside this file has the name of a package. Every benchmark imports this module before any of the project's,
# and from here on the package is found first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def write(file: Path, results: dict[str, Any]) -> None:
    """Results as JSON, with what they were measured on."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    facts = {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    file.write_text(json.dumps({**facts, "commit": git.stdout.strip(), **results}, indent=1))


def machine() -> str:
    """The GPU's name, or else the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
