"""Stages on several processes: equal results and bytes, one message for an error, and nothing left after a death."""

import contextlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.dedup.near_duplicates import DedupSettings
from indexing.store.errors import InputError
from pipelines.cli.settings.toml_file import to_toml
from pipelines.executors import process_pool
from pipelines.executors.process_pool import PoolExecutor, fitting
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import Task
from pipelines.stages.table import build
from tests.conftest import PATIENCE, build_local, contents, tiny_config
from tests.pipelines.executors import work


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start after the first task, however short."""
    monkeypatch.setattr(process_pool, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(process_pool, "_TASK_SECONDS", 0.0)


def tasks(count: int, *arguments: object, size: int = 1) -> list[Task]:
    return [Task(f"shard/{number}", (*arguments, number), size) for number in range(count)]


def run(function: Callable[..., Any], todo: list[Task], workers: int = 3) -> tuple[list[Any], list[int]]:
    """The results of tasks, and the units that progressed."""
    units = list[int]()
    executor = PoolExecutor(ExecutorSettings(workers=workers))
    return list(executor.map("chunk", function, todo, units.append)), units


def started_worker(executor: PoolExecutor) -> None:
    """Start a worker: no task runs in this process any more."""
    executor.pool.idle.append(executor.pool.take())


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_are_in_order_and_come_from_other_processes() -> None:
    results, units = run(work.square, tasks(12))
    assert [value for value, _ in results] == [number**2 for number in range(12)]
    pids = [pid for _, pid in results]
    assert pids[0] == os.getpid()  # the first one shows what the others take
    assert len({*pids[1:]} - {os.getpid()}) == 3
    assert sum(units) == 12


def test_workers_stay_for_later_stages_and_end_with_the_executor() -> None:
    executor = PoolExecutor(ExecutorSettings(workers=2))
    first = {pid for _, pid in executor.map("chunk", work.square, tasks(4), lambda _: None)} - {os.getpid()}
    later = {pid for _, pid in executor.map("embed", work.square, tasks(4), lambda _: None)}
    assert first == later
    del executor
    assert not any(Path(f"/proc/{pid}").exists() for pid in first)


def test_workers_that_are_expected_start_before_there_is_a_task() -> None:
    executor = PoolExecutor(ExecutorSettings(workers=2))
    executor.expect(2**20)
    assert not executor.pool.workers
    executor.expect(2**30)
    executor.expect(2**30)
    pids = {worker.process.pid for worker in executor.pool.workers}
    assert len(pids) == 2
    assert {pid for _, pid in executor.map("chunk", work.square, tasks(6), lambda _: None)} == pids
    alone = PoolExecutor(ExecutorSettings(workers=1))
    alone.expect(2**30)
    assert not alone.pool.workers


@pytest.mark.parametrize(("count", "workers"), [(1, 3), (6, 1)])
def test_one_task_or_one_worker_stays_in_this_process(count: int, workers: int) -> None:
    assert {pid for _, pid in run(work.square, tasks(count), workers)[0]} == {os.getpid()}


def test_work_of_a_few_seconds_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_WORTH_SECONDS", 3.0)
    assert {pid for _, pid in run(work.square, tasks(8))[0]} == {os.getpid()}


def test_many_short_tasks_start_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_TASK_SECONDS", 1.0)
    assert {pid for _, pid in run(work.square, tasks(8))[0]} == {os.getpid()}


def test_a_gpu_is_not_shared_by_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_pool, "_GPU", tmp_path)
    executor = PoolExecutor(ExecutorSettings(workers=2))
    assert {pid for _, pid in executor.map("embed", work.square, tasks(3), lambda _: None)} == {os.getpid()}


def test_messages_of_workers_are_logged_here_each_once(caplog: pytest.LogCaptureFixture) -> None:
    executor = PoolExecutor(ExecutorSettings(workers=2))
    started_worker(executor)
    with caplog.at_level(logging.INFO, "retro"):
        list(executor.map("chunk", work.speak, tasks(4), lambda _: None))
    messages = sorted(record.message for record in caplog.records)
    assert messages == ["compiling", *(f"task {number} of a" for number in range(4))]


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_datastore_has_the_same_bytes_with_any_number_of_workers(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore, workers: int
) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    build(config, PoolExecutor(replace(config.executor, workers=workers)))
    assert contents(config.datastore) == contents(tiny_datastore.folder)


def test_the_same_near_copies_are_removed_with_any_number_of_workers(tmp_path: Path, tiny_corpus: Path) -> None:
    copies = tmp_path / "copies.jsonl"
    copies.write_text(tiny_corpus.read_text().replace('"doc-', '"copy-'))
    reading = CorpusSettings(paths=(str(tiny_corpus), str(copies)), shard_bytes=30_000, split=(900, 100, 0))
    dedup = DedupSettings(within=True, held_out=True)
    one, two = (
        replace(
            tiny_config(tmp_path / name, tiny_corpus),
            corpus=reading,
            dedup=dedup,
            executor=ExecutorSettings(workers=count),
        )
        for name, count in (("one", 1), ("two", 2))
    )
    for config in (one, two):
        build_local(config, only="chunk")
    assert contents(one.datastore) == contents(two.datastore)
    removed = one.datastore / "dedup/removed"
    assert len([*one.datastore.glob("dedup/signatures/*")]) > 2
    assert len((removed / "removed.jsonl").read_text().splitlines()) > 20


# --- memory ----------------------------------------------------------------------------------------------------------


def test_as_many_workers_start_as_fit_into_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_pool, "usable_memory", lambda: 5 * 2**30)
    monkeypatch.setattr(process_pool, "usable_cores", lambda: 64)
    assert [fitting(0), fitting(1), fitting(2)] == [2, 1, 2]
    assert not caplog.records
    assert fitting(16) == 2
    assert "executor.workers = 16: 2 fit into the memory" in caplog.text
    monkeypatch.setattr(process_pool, "usable_memory", lambda: 2**20)
    assert fitting(0) == 1


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "lines"),
    [
        (0, KeyError, ["shard/0 failed: KeyError: 'train\\n valid'"]),
        (1, InputError, []),
        (2, OSError, []),
        (3, RuntimeError, None),
    ],
)
def test_an_error_is_told_once_and_ends_the_other_tasks(
    caplog: pytest.LogCaptureFixture, kind: int, error: type[Exception], lines: list[str] | None
) -> None:
    executor, started = PoolExecutor(ExecutorSettings(workers=3)), time.monotonic()
    started_worker(executor)
    with caplog.at_level(logging.ERROR, "retro"), pytest.raises(error) as raised:
        list(executor.map("chunk", work.fail_as, tasks(3, kind), lambda _: None))
    assert time.monotonic() - started < PATIENCE
    assert executor.pool.workers == executor.pool.idle
    if lines is not None:
        assert [record.message for record in caplog.records] == lines
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    assert "work.py" in told  # the line in the other process


def test_a_function_that_a_worker_cannot_import_is_an_error() -> None:
    executor = PoolExecutor(ExecutorSettings(workers=2))
    started_worker(executor)
    with pytest.raises(Exception, match=r"lambda|local"):
        list(executor.map("chunk", lambda number, advance: number, tasks(3), lambda _: None))


# --- deaths ----------------------------------------------------------------------------------------------------------


def dying(folder: Path, deaths: int) -> list[Task]:
    return [Task(f"shard/{number}", (folder, number, deaths), 10) for number in range(4)]


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results, units = run(work.die_once, dying(tmp_path, 1))
    assert results == [0, 1, 2, 3]
    assert sum(units) == 40
    assert all(each > 0 for each in units)
    assert [r.message for r in caplog.records] == [
        "shard/1: its worker was killed by SIGKILL; the task is started again"
    ]


def test_a_task_that_kills_its_workers_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"shard/1: its worker was killed by SIGKILL 3 times.*executor\.workers, now 3"
    ):
        run(work.die_once, dying(tmp_path, 9))


SCRIPT = """
from pathlib import Path
from pipelines.executors import process_pool
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import Task
from tests.pipelines.executors.work import write_slowly
executor = process_pool.PoolExecutor(ExecutorSettings(workers=2))
executor.pool.idle.append(executor.pool.take())
list(executor.map("chunk", write_slowly, [Task(str(n), (Path(FOLDER), n), 1) for n in range(3)], lambda _: None))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C also removes what is half written; after SIGKILL the next build does."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("FOLDER", repr(str(tmp_path)))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: len([*tmp_path.glob("pid-*")]) == 2)
    parent.send_signal(number)
    assert parent.wait(PATIENCE) != 0
    pids = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    if number == signal.SIGINT:
        assert not [*tmp_path.glob("half-*")]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


BUILD = """
import sys
from pipelines.executors import process_pool
process_pool._WORTH_SECONDS = process_pool._TASK_SECONDS = 0.0
from pipelines.cli.main import main
sys.exit(main(["index", sys.argv[1], "--executor.workers", "2"]))
"""


EACH = int(os.environ.get("RETRO_KILLS", "0"))  # RETRO_KILLS=30 pytest -m slow -k killed_has: so many in each stage
STAGES = ("chunk", "embed", "add", "sparse", "neighbors", "suffixes", "votes")  # that have workers


def are_enough(kills: Counter[str]) -> bool:
    return all(kills[stage] >= EACH for stage in STAGES) if EACH else kills.total() >= 12


def processes_of(mark: str) -> list[int]:
    """The processes with a value in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_build_whose_processes_are_killed_has_the_same_bytes_and_leaves_none(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    """Workers, and each third time the process that started them, are killed at random times, in all stages."""
    config = tiny_config(tmp_path / "killed", tiny_corpus, skip_stages=())
    whole = build_local(tiny_config(tmp_path / "whole", tiny_corpus, skip_stages=()))
    file, mark, draw, kills = tmp_path / "config.toml", f"MARK={tmp_path}", random.Random(0), Counter[str]()
    file.write_text(to_toml(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARK": str(tmp_path)}
    finished, log = False, tmp_path / "log"
    while not (finished and are_enough(kills)):
        if finished:
            shutil.rmtree(config.datastore)
        with open(log, "w") as errors:
            parent = subprocess.Popen([sys.executable, "-c", BUILD, file], env=environment, stderr=errors)
        while parent.poll() is None:
            workers = [pid for pid in processes_of(mark) if pid != parent.pid]
            stage = (re.findall(r"stage \d+ of \d+, ([\w-]+)", log.read_text()) or ["start"])[-1]
            if workers and not are_enough(kills) and not (EACH and kills[stage] >= EACH):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(parent.pid if kills.total() % 3 == 2 else draw.choice(workers), signal.SIGKILL)
                kills[stage] += 1
            time.sleep(draw.uniform(0.2, 1.0))
        finished = parent.returncode == 0
        wait_for(lambda: not processes_of(mark))
    assert contents(config.datastore) == contents(whole.folder)
    assert not [path for path in config.datastore.rglob("*") if path.name.endswith(".tmp")]
