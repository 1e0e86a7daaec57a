"""Indexing on a real Ray cluster of three nodes gives the same bytes as in one process, also after kills.

The head has no CPU and each of the two other nodes has one, so the driver never shares a node with the killed worker.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.store.errors import InputError
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors import ray_pool
from pipelines.executors import tasks as executing
from pipelines.executors.factory import make_executor
from pipelines.executors.ray_pool import RayExecutor
from pipelines.executors.settings import ExecutorSettings, Resources
from pipelines.executors.tasks import Task
from pipelines.stages.table import build
from tests.conftest import PATIENCE, build_local, contents, once_logged, tiny_config, wait_until, write_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of Ray itself


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards that take a second or more each."""
    return write_corpus(tmp_path_factory.mktemp("large") / "corpus.jsonl", 12_000)


def chunk_config(folder: Path, corpus: Path, **changes) -> Config:
    config = tiny_config(folder, corpus, **changes)
    shard_bytes = corpus.stat().st_size // 4
    tokenizer = replace(config.tokenizer, sample_bytes=200_000)
    return replace(config, corpus=replace(config.corpus, shard_bytes=shard_bytes), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, bytes]:
    """Files that the chunk stage makes of `corpus` in one process."""
    return contents(build_local(chunk_config(tmp_path_factory.mktemp("calm"), corpus), only="chunk").folder)


class Driver:
    """A `python -m pipelines.index` process on the cluster."""

    def __init__(self, cluster: Any, config: Config) -> None:
        self.datastore = config.datastore
        file = config.datastore.with_name("config.toml")
        file.write_text(to_toml(replace(config, executor=ExecutorSettings(kind="ray"))))
        self.log = config.datastore.with_name("log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.index", str(file), "--stage", "chunk"],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            stdout=subprocess.DEVNULL,
            stderr=open(self.log, "w"),  # noqa: SIM115
        )

    def finish(self) -> str:
        """Wait for success and return the log."""
        status = self.process.wait(PATIENCE)
        assert status == 0, self.log.read_text()
        return self.log.read_text()

    def until(self, found: Callable[[], Any]) -> Any:
        """Call `found` until its answer is true, while the driver runs; returns that answer."""
        deadline = time.monotonic() + PATIENCE
        while not (answer := found()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return answer

    def worker_at_work(self) -> int:
        """Process id of a worker that is stopped within a shard of chunks. Ray names processes after their tasks."""
        return self.until(self._stopped)

    def _stopped(self) -> int | None:
        for worker in self._workers():
            os.kill(worker, signal.SIGSTOP)
            if worker in self._workers():
                return worker
            os.kill(worker, signal.SIGCONT)  # it finished before it was stopped
        return None

    def _workers(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                name = path.read_bytes()
            except OSError:  # it has ended in the meantime
                continue
            shard = name.removeprefix(b"ray::chunks/")[:5].decode(errors="replace")
            if name.startswith(b"ray::chunks/") and list(
                self.datastore.glob(f"chunks/.{shard}.*.tmp/train/tokens.npy")
            ):
                yield int(path.parent.name)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_ray_job_submit_builds_the_bytes_of_one_process(cluster, tmp_path, tiny_corpus, tiny_datastore) -> None:
    """The job server requires the token. The relative path of the datastore refers to the job's working folder."""
    config = tiny_config(tmp_path, tiny_corpus, executor=ExecutorSettings(kind="ray", num_threads=1))
    relative = Path(os.path.relpath(config.datastore))
    file = tmp_path / "config.toml"
    file.write_text(to_toml(replace(config, datastore=relative)))
    submit = [Path(sysconfig.get_path("scripts")) / "ray", "job", "submit", "--address", f"http://{cluster.webui_url}"]
    command = [*submit, "--", sys.executable, "-m", "pipelines.index", str(file)]

    def submitted() -> subprocess.CompletedProcess[str] | None:
        """None until the head's agent has started, which happens after its nodes."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        return None if "No available agent" in done.stdout + done.stderr else done

    done = wait_until(submitted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neighbors: " in done.stdout
    assert contents(config.datastore) == contents(tiny_datastore.folder)
    without = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    wrong = {**without, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    refused = subprocess.run(command, env=wrong, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode != 0


def test_build_with_a_killed_worker_gives_the_same_bytes(cluster, tmp_path, corpus, expected) -> None:
    driver = Driver(cluster, chunk_config(tmp_path, corpus))
    os.kill(driver.worker_at_work(), signal.SIGKILL)
    said = driver.finish()
    assert said.count("its worker died; the task is started again") == 1
    assert contents(driver.datastore) == expected


def test_build_with_a_lost_node_gives_the_same_bytes(cluster, tmp_path, corpus, expected) -> None:
    driver = Driver(cluster, chunk_config(tmp_path, corpus))
    worker = driver.worker_at_work()
    raylet = parent_of(worker)
    node = next(each for each in cluster.worker_nodes if each.all_processes["raylet"][0].process.pid == raylet)
    cluster.remove_node(node, allow_graceful=False)
    os.kill(worker, signal.SIGCONT)
    try:
        said = driver.finish()
    finally:
        cluster.add_node(num_cpus=1)
    assert "its worker died; the task is started again" in said
    assert contents(driver.datastore) == expected


def test_restart_after_a_killed_driver_gives_the_same_bytes(cluster, tmp_path, corpus, expected) -> None:
    """Its workers can survive for a moment and write shards that the next driver assigns again."""
    config = chunk_config(tmp_path, corpus)
    driver = Driver(cluster, config)
    shards = config.datastore / "chunks"
    driver.until(lambda: list(shards.glob("[0-9]*/manifest.json")))
    worker = driver.worker_at_work()
    driver.process.kill()
    driver.process.wait()
    os.kill(worker, signal.SIGCONT)
    finished = {path: path.stat().st_mtime_ns for path in shards.glob("[0-9]*/manifest.json")}
    assert 0 < len(finished) < 4
    again = Driver(cluster, config)
    again.finish()
    assert contents(config.datastore) == expected
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.fixture
def executor(cluster) -> Iterator[RayExecutor]:
    """An executor in this process."""
    import ray

    yield RayExecutor(ExecutorSettings(kind="ray", ray_address=cluster.address))
    ray.shutdown()


def test_neighbors_by_ngrams_on_ray_have_the_bytes_of_one_process(
    executor, tmp_path, tiny_corpus, tiny_datastore
) -> None:
    folders = []
    for name in ("ray", "here"):
        config = tiny_config(tmp_path / name, tiny_corpus)
        config = replace(config, neighbors=replace(config.neighbors, search="ngrams", rerank="tokens"))
        shutil.copytree(tiny_datastore.folder, config.datastore)
        for stage in ("ngrams", "neighbors"):
            build(config, executor if name == "ray" else make_executor(config.executor), only=stage, rebuild=True)
        folders.append(config.datastore)
    assert contents(folders[0]) == contents(folders[1])


def test_shard_that_kills_its_workers_fails_by_name_and_other_shards_finish(executor, tmp_path, caplog) -> None:
    def work(number: int, *, advance: Callable[[int], None]) -> None:
        if number == 1:
            end = time.monotonic() + 60
            while not (tmp_path / "2").exists() and time.monotonic() < end:  # the other worker is not lost meanwhile
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / str(number)).touch()
        advance(1)

    tasks = [Task(f"chunks/{number}", (number,), 1) for number in range(3)]
    with pytest.raises(InputError, match=r"chunks/1.* 4 .*executor\.resources\.chunk\.memory"):
        list(executor.map("chunk", work, tasks, lambda _: None))
    assert caplog.text.count("chunks/1: its worker died; the task is started again") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_stages_that_reserve_the_same_share_workers_but_not_what_a_stage_has_loaded(executor, cluster) -> None:
    settings = executor.settings

    def work(*, advance: Callable[[int], None]) -> tuple[int, str]:
        if not hasattr(executing, "loaded"):
            executing.loaded = executing.kept_for_stage(lambda: uuid.uuid4().hex)  # type: ignore[attr-defined]
        return os.getpid(), executing.loaded()

    few = Resources(workers=1)
    executor.settings = replace(settings, resources={"chunk": few, "embed": few, "add": replace(few, cpus=0.5)})
    tasks = [Task(f"{number}", (), 1) for number in range(2)]
    stages: tuple[Any, ...] = ("chunk", "embed", "add")
    first, second, other = (list(executor.map(stage, work, tasks, lambda _: None)) for stage in stages)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert second[0][0] == first[0][0]
    assert second[0][1] != first[0][1]
    assert other[0][0] != first[0][0]
    wait_until(lambda: not is_running(first[0][0]))


def test_workers_end_with_their_executor(executor) -> None:
    other = RayExecutor(executor.settings)
    (process,) = other.map("chunk", lambda *, advance: os.getpid(), [Task("chunks/0", (), 1)], lambda _: None)
    assert is_running(process)
    del other
    wait_until(lambda: not is_running(process))


def test_worker_that_dies_between_stages_is_replaced_and_no_task_is_blamed(executor, caplog) -> None:
    def work(*, advance: Callable[[int], None]) -> int:
        return os.getpid()

    task = [Task("chunks/0", (), 1)]
    (process,) = executor.map("chunk", work, task, lambda _: None)
    os.kill(process, signal.SIGKILL)
    (other,) = executor.map("chunk", work, task, lambda _: None)
    assert other != process
    assert "its worker died" not in caplog.text


def test_idle_workers_free_what_they_reserve(executor, monkeypatch) -> None:
    monkeypatch.setattr(ray_pool, "_IDLE_SECONDS", 0.5)

    def work(free: int, *, advance: Callable[[int], None]) -> int:
        import ray

        end = time.monotonic() + PATIENCE
        while (now := ray.available_resources().get("CPU", 0)) != free and time.monotonic() < end:
            time.sleep(0.05)
        return now

    for free in ([0, 0], [1]):  # as long as two tasks run, no CPU is free
        tasks = [Task(f"chunks/{number}", (each,), 1) for number, each in enumerate(free)]
        assert list(executor.map("chunk", work, tasks, lambda _: None)) == free


def test_progress_is_counted_once_and_stragglers_and_failures_are_named(
    executor, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(ray_pool, "_POLL_SECONDS", 0.1)  # stragglers are named after ten times this
    named = tmp_path / "named"
    once_logged(caplog, "chunks/4: running for ", named.touch)

    def work(number: int, *, advance: Callable[[int], None]) -> int:
        advance(5)
        while number == 4 and not named.exists():
            time.sleep(0.01)
        advance(5)
        if number == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 9:
            raise OSError(28, "No space left on device", "chunks/9/tokens.npy")
        return number * number

    done: list[int] = []
    tasks = [Task(f"chunks/{number}", (number,), 10) for number in range(5)]
    assert list(executor.map("chunk", work, tasks, done.append)) == [0, 1, 4, 9, 16]
    assert sum(done) == 50
    assert caplog.text.count("chunks/4: running for ") == 1
    with pytest.raises(OSError, match=r"No space left on device: 'chunks/9/tokens\.npy'"):
        list(executor.map("chunk", work, [Task("chunks/9", (9,), 10)], done.append))


def test_stage_without_free_resources_logs_a_warning(executor, caplog, monkeypatch) -> None:
    monkeypatch.setattr(ray_pool, "_WAITING_SECONDS", 1)
    settings = replace(executor.settings, resources={"chunk": Resources(cpus=1, gpus=1)})
    waiting = RayExecutor(settings)
    once_logged(caplog, "no worker has started", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(waiting.map("chunk", lambda *, advance: None, [Task("chunks/0", (), 1)], lambda _: None))
    assert "chunk: no worker has started for 1 s: each needs Resources(cpus=1.0, gpus=1.0" in caplog.text
