"""What every stage needs: its shards, their fingerprints, and running the tasks of those that are unfinished."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from indexing.store.artefact import read_manifest
from indexing.store.datastore import shard_name
from pipelines.corpus_stage import read_plan
from pipelines.executors import Executor, StageName, Task
from pipelines.progress import progress


def shards(folder: Path, stage: str) -> list[Path]:
    """The artefact of every shard of a stage (`chunks`, `embeddings`, …), finished or not."""
    plan = read_plan(folder / "corpus")
    return [folder / stage / shard_name(shard) for shard in range(len(plan))]


def shard_counts(folder: Path) -> list[dict[str, Any]]:
    """What stands in each shard of chunks: split to documents, chunks, tokens and bytes."""
    return [read_manifest(path)["counts"] for path in shards(folder, "chunks")]


def fingerprint_of(folder: Path) -> str:
    """The fingerprint of a finished artefact."""
    return read_manifest(folder)["fingerprint"]


def prefixed(section: str, settings: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings as `section.key`, the names that a message or a command line uses."""
    values = settings if isinstance(settings, dict) else asdict(settings)
    return {f"{section}.{key}": value for key, value in values.items() if key not in without}


def shard_task(out: Path, *arguments: Any, size: int) -> Task:
    """The task that makes the artefact `out`, which is its first argument."""
    return Task(f"{out.parent.name}/{out.name}", (out, *arguments), size)


def run_tasks(
    stage: StageName, unit: str, function: Callable[..., Any], todo: list[Task], executor: Executor, name: str = ""
) -> list[Any]:
    """Run the tasks of what is unfinished as one step of the stage, and return their results."""
    if not todo:
        return []
    with progress(name or stage, total=sum(task.size for task in todo), unit=unit) as advance:
        return list(executor.map(stage, function, todo, advance))
