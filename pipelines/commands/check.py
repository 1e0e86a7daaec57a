"""`retro check gpu`: run every part on a GPU, and write what was found as JSON and as a Markdown page.

parts (pipelines/gpu_checks/table.py) ─► a process each ─► OUTPUT/gpu.json, OUTPUT/gpu.md ─► exit status
"""

import importlib.metadata
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import write_json
from pipelines.gpu_checks.table import PARTS, Outcome, run_apart
from pipelines.results import Table
from pipelines.terminal import echo
from pipelines.version import commit_of_checkout


@dataclass(frozen=True)
class CheckGpuOptions:
    """Check on an NVIDIA GPU what tests on a CPU cannot: kernels, compiled training, memory and speed. Takes under ten minutes.

    Without a GPU it prints what it would run. A part runs in a process of its own with a time limit, so an error in one does not
    stop the others. The exit status is 1 if a check fails.
    """

    parts: tuple[str, ...] = ()
    """Names of the parts to run; empty: all."""
    output: str = "gpu-check"
    """Folder for `gpu.json` and `gpu.md`."""
    device: str = "cuda"
    """`cuda`, or `cpu` with `tiny`, which tests the parts themselves."""
    tiny: bool = False
    """Run each part at a size for tests. Its speeds mean nothing."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.parts if name not in PARTS]:
            raise InputError(f"parts has {unknown[0]!r}: accepted are {', '.join(PARTS)}.")
        if self.device not in ("cuda", "cpu"):
            raise InputError(f"device = {self.device!r}: accepted are cuda and cpu.")
        if self.device == "cpu" and not self.tiny:
            raise InputError("device = 'cpu' needs tiny: the parts at their full size are made for a GPU.")

    @property
    def chosen(self) -> list[str]:
        """The parts to run, in the order of the table."""
        return [name for name in PARTS if name in self.parts or not self.parts]


def check_gpu(options: CheckGpuOptions) -> int:
    """`retro check gpu`: 0 if no check failed, or there is no GPU to check; 1 otherwise."""
    import torch

    rows = [[name, f"{PARTS[name].seconds} s", PARTS[name].summary] for name in options.chosen]
    echo(Table(["part", "limit", "checks"], rows).text)
    if options.device == "cuda" and not torch.cuda.is_available():
        echo("\nNothing was run: torch finds no CUDA device (`retro doctor` shows what it finds).")
        return 0
    outcomes = []
    for name in options.chosen:
        outcomes.append(outcome := run_apart(name, options.device, options.tiny))
        echo(f"\n{outcome.part}: {outcome.status} in {outcome.seconds:.0f} s {outcome.message}".rstrip())
        for each in outcome.findings:
            echo(f"  {_SIGNS[each['passed']]} {each['name']}: {each['value']}")
    folder, environment = Path(options.output), machine()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "gpu.json", {**environment, "tiny": options.tiny, "parts": [asdict(each) for each in outcomes]})
    (folder / "gpu.md").write_text(page(environment, outcomes, tiny=options.tiny), encoding="utf-8")
    failed = [each.part for each in outcomes if each.status == "failed"]
    echo(
        f"\n{folder / 'gpu.json'}, {folder / 'gpu.md'}; "
        + (f"FAILED: {', '.join(failed)}" if failed else "no check failed")
    )
    return int(bool(failed))


_SIGNS = {True: "✓", False: "✗", None: " "}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    name = "CPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit_of_checkout() or f"version {importlib.metadata.version('retro')}",
        "command": " ".join(["retro", *sys.argv[1:]]),
    }


def page(environment: dict[str, Any], outcomes: list[Outcome], *, tiny: bool = False) -> str:
    """The Markdown page: what it was measured on, and a table of each part."""
    lines = [
        "# Results: one GPU",
        "",
        "Written by `retro check gpu`. " + "; ".join(f"{k} {v}" for k, v in environment.items()) + ".",
    ]
    if tiny:
        lines += ["", "These are tiny sizes that test the command. The speeds mean nothing."]
    lines += ["", "| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {each.part} | {each.status} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        lines += ["", f"## {each.part}", "", f"{PARTS[each.part].summary}."]
        lines += ["", f"{each.status.capitalize()}: {_cell(each.message)}"] if each.message else []
        if each.findings:
            lines += ["", "| check | result | |", "|---|---|---|"]
            lines += [
                f"| {_cell(f['name'])} | {_cell(f['value'])} | {_SIGNS[f['passed']].strip()} |" for f in each.findings
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
