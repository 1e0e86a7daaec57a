"""Cases in processes of their own, each with a time limit. Figures are printed and written as they come, so a cut run
keeps them."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import Budget, measured_on, say
from indexing.store.errors import InputError

Figures = dict[str, Any]
_LEAST = 5.0
"""Seconds with which a case is still started."""


class Case(NamedTuple):
    """Work that yields its figures as they are known.

    Attributes:
        work: picklable; yields figures by name.
        seconds: after which it is ended.
    """

    work: Callable[[], Iterator[Figures]]
    seconds: float


def selected(cases: Mapping[str, Case], parts: Sequence[str]) -> dict[str, Case]:
    """The cases whose name contains one of these parts; all if there are none."""
    return {name: case for name, case in cases.items() if not parts or any(part in name for part in parts)}


def run_cases(cases: Mapping[str, Case], file: Path, limit: Budget, about: Figures) -> int:
    """Run cases in order until the time is up; return 1 if one failed.

    A case that lacks its package, memory or input is skipped with the reason. One that takes too long is ended, and
    keeps the figures that it has.

    Args:
        cases: by name, the most important first.
        file: JSON with machine, commit, `about` and the figures of all cases, written after every figure.
        limit: time of all cases together.
        about: written next to the figures.
    """
    results: dict[str, Figures] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    header = {**measured_on(), **about}

    def store() -> None:
        partial = file.with_suffix(".new")
        partial.write_text(json.dumps({**header, "cases": results}, indent=1))
        os.replace(partial, file)

    for name, case in cases.items():
        figures: Figures = {}
        results[name] = figures
        seconds = min(case.seconds, limit.left)
        say(f"{name}  ({limit.left:.0f} s left, at most {seconds:.0f} s)")
        if seconds < _LEAST:
            figures["skipped"] = "the time is up"
        began = time.monotonic()
        for found in _figures(case.work, seconds) if not figures else ():
            figures.update(found)
            for key, value in found.items():
                say(f"  {key:34}{value}")
            store()
        figures["seconds"] = round(time.monotonic() - began, 1)
        store()
    say(f"{file}: " + ", ".join(f"{key} {value}" for key, value in header.items()))
    return int(any("failed" in figures for figures in results.values()))


def _forks() -> ForkServerContext:
    """Processes as forks of one that has already imported the modules of this one: importing torch takes seconds for
    every case."""
    context = multiprocessing.get_context("forkserver")
    ours = [name for name in sys.modules if name.startswith(("benchmarks.", "indexing.", "pipelines.", "retro."))]
    context.set_forkserver_preload(["torch._dynamo", *ours])
    return context


def _figures(work: Callable[[], Iterator[Figures]], seconds: float) -> Iterator[Figures]:
    """The figures of work in another process, which is ended with its children after some seconds."""
    context = _forks()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, theirs))
    process.start()
    pid = process.pid
    assert pid is not None
    theirs.close()
    end = time.monotonic() + seconds
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            yield ours.recv()
        yield {"stopped": f"after {seconds:.0f} s"}
    except EOFError:
        process.join(_LEAST)
        if process.exitcode:  # killed, for example for its memory
            yield {"failed": f"the process ended with status {process.exitcode}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()  # if it had not yet begun a group
        process.join()


def _work(work: Callable[[], Iterator[Figures]], results: Connection) -> None:
    os.setsid()  # so that the processes that it starts end with it
    try:
        for figures in work():
            results.send(figures)
    except (ImportError, InputError, torch.OutOfMemoryError) as error:
        results.send({"skipped": f"{type(error).__name__}: {error}"})
    except Exception as error:
        traceback.print_exc()
        results.send({"failed": f"{type(error).__name__}: {error}"})
