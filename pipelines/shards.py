"""What every stage needs: its shards, their fingerprints, and running the tasks of those that are unfinished."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from indexing.store.artefact import read_manifest
from indexing.store.datastore import shard_name
from pipelines.corpus_stage import read_plan
from pipelines.executors import Executor, Task
from pipelines.progress import progress

log = logging.getLogger("retro")


def shard_counts(folder: Path) -> list[dict[str, Any]]:
    return [read_manifest(path)["counts"] for path in shards(folder, "chunks")]


def shards(folder: Path, stage: str) -> list[Path]:
    plan = read_plan(folder / "corpus")
    return [folder / stage / shard_name(shard) for shard in range(len(plan))]


def fingerprint_of(folder: Path) -> str:
    return read_manifest(folder)["fingerprint"]


def prefixed(section: str, settings: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings as `section.key`, the names that a message or a command line uses."""
    values = settings if isinstance(settings, dict) else asdict(settings)
    return {f"{section}.{key}": value for key, value in values.items() if key not in without}


def run_tasks(
    name: str, unit: str, function: Callable[..., Any], todo: list[tuple[Path, Task]], executor: Executor
) -> None:
    """Run the tasks of the unfinished artefacts under one progress bar."""
    if not todo:
        log.info("%s: finished already", name)
        return
    with progress(name, total=sum(task.size for _, task in todo), unit=unit) as advance:
        for _ in executor.map(function, [task for _, task in todo], advance):
            pass
