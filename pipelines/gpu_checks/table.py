"""The parts of `retro check gpu` in order, and running each in a process of its own with a time limit.

a part's row ─► process: run_part ─► findings as JSON ┐
time limit ─► the process and its children are killed ┴─► Outcome
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class PartRow:
    """A part. It holds names instead of functions, so that listing the parts imports nothing heavy.

    Attributes:
        summary: what it checks.
        run: module of this folder and function.
        seconds: time limit.
        arguments: of the function, in addition to the job.
    """

    summary: str
    run: str
    seconds: int
    arguments: dict[str, Any] = field(default_factory=dict)


PARTS: dict[str, PartRow] = {
    "attention": PartRow("Kernel of each attention; outputs and gradients against the math kernel", "attention.run", 30),
    "packed": PartRow("Packed documents by mask and by bounds: time, memory, equality", "packed_documents.run", 30),
    "compile": PartRow("Loss and gradient norm of half the layers of 172m, compiled and eager", "training.eager_equals_compiled", 50),
    "train-172m": PartRow(
        "Compiled training at 172m: tokens/s, MFU, graphs, peak memory",
        "training.compiled", 85, {"preset": "172m", "batch_size": 8},
    ),
    "train-1.5b": PartRow(
        "Compiled training at 1.5b: tokens/s, MFU, graphs, peak memory",
        "training.compiled", 150, {"preset": "1.5b", "batch_size": 4},
    ),
    "retro-pytorch": PartRow("The step of retro-pytorch with the sizes of 172m", "training.retro_pytorch", 30),
    "offload": PartRow("ZeRO-3 with offload on one device, against training without it", "training.offload", 30),
    "checkpoint": PartRow("Stall of a checkpoint that a thread writes", "training.checkpoint_stall", 25),
    "generation": PartRow("Decoding with a cache: tokens/s, equality with a full pass", "generation.run", 25),
    "faiss": PartRow("Faiss on the GPU: k-means, add and search", "search.faiss_index", 30),
    "products": PartRow("Search by matrix products: exact and list by list", "search.products", 35),
    "embedding": PartRow("Embedding with MiniLM", "search.embedding", 25),
    "tests": PartRow("Tests marked gpu", "gpu_tests.run", 40),
}  # fmt: skip
"""The parts. Their limits add up to less than ten minutes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        part: its name.
        status: `failed` if a finding failed, or the part raised an error or exceeded its limit.
        seconds: wall time.
        findings: lines of the report, each with `name`, `value` and `passed`.
        message: why it was skipped or failed.
    """

    part: str
    status: Status
    seconds: float
    findings: list[dict[str, Any]]
    message: str = ""


def run_part(name: str, device: str, tiny: bool) -> dict[str, Any]:
    """Run a part in this process: status, findings and message."""
    from pipelines.gpu_checks.part import Job, Skipped

    row = PARTS[name]
    module, _, function = row.run.partition(".")
    try:
        run = partial(getattr(importlib.import_module(f"pipelines.gpu_checks.{module}"), function), **row.arguments)
        findings = [asdict(each) for each in run(Job(device, tiny))]
    except Skipped as skipped:
        return {"status": "skipped", "findings": [], "message": str(skipped)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "findings": [], "message": f"{type(error).__name__}: {error}"}
    failed = any(each["passed"] is False for each in findings)
    return {"status": "failed" if failed else "passed", "findings": findings, "message": ""}


def run_apart(name: str, device: str, tiny: bool, limit: float = 0.0) -> Outcome:
    """Run a part in another process, which is killed with its children after `limit` seconds (0 = the part's own limit)."""
    limit, started = limit or PARTS[name].seconds, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "pipelines.gpu_checks.table", name, device, str(int(tiny)), str(file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(limit)
            message = f"the process ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            message = f"stopped after its limit of {limit:g} s"
        finally:
            _kill(process)
        seconds = time.perf_counter() - started
        if file.exists():
            return Outcome(name, seconds=seconds, **json.loads(file.read_text()))
    return Outcome(name, "failed", seconds, [], message)


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and all that it started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    process.kill()
    process.wait()


def main(arguments: list[str]) -> None:
    """Run a part and write what became of it: NAME DEVICE TINY FILE."""
    name, device, tiny, file = arguments
    result = json.dumps(run_part(name, device, tiny == "1"))
    whole = Path(f"{file}.part")
    whole.write_text(result)
    whole.rename(file)


if __name__ == "__main__":
    main(sys.argv[1:])
