"""Training by workers of a real Ray cluster gives the weights of torchrun, also after a worker is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexing.progress import Aside, FinishedBefore
from indexing.store.datastore import Datastore
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors.settings import ExecutorSettings, Resources
from pipelines.launch.ray_train import _passed_on, _Relay, resolve_workers
from retro.training.run_folder import read_metrics
from tests.conftest import PATIENCE, tiny_config, wait_until
from tests.pipelines.launch.test_torchrun import Processes, last_checkpoint, losses, steps_done

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own warnings

STEPS = 200


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    changes: dict[str, Any] = {"batch_size": 4, "precision": "float32", "eval_every": 0}
    settings = replace(config.train, steps=STEPS, checkpoint_every=10, **changes)
    executor = ExecutorSettings(kind="ray", resources={"train": Resources(workers=2)})
    return replace(config, model=replace(config.model, dropout=0.1), train=settings, executor=executor)


class Driver:
    """A `python -m pipelines.train` process on the cluster, in the folder of the configuration."""

    def __init__(self, cluster: Any, config: Config) -> None:
        self.run, self.log = config.run, config.run.with_suffix(".log")
        config.run.with_suffix(".toml").write_text(to_toml(replace(config, run=Path(config.run.name))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.train", config.run.with_suffix(".toml").name],
            env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=open(self.log, "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            cwd=config.run.parent,
        )

    def until(self, seen: Callable[[], Any]) -> Any:
        """Call `seen` until its answer is true, while the driver runs; returns that answer."""
        deadline = time.monotonic() + PATIENCE
        while not (answer := seen()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return answer


def workers() -> Iterator[int]:
    """Process ids of the training workers. Ray names processes after their actors."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes()
        except OSError:  # it has ended in the meantime
            continue
        if name.startswith(b"ray::RayTrainWorker"):
            yield int(path.parent.name)


@pytest.mark.parametrize(
    ("given", "gpus", "device", "expected"),
    [
        (Resources(), 0, "auto", Resources(workers=1)),
        (Resources(), 8, "auto", Resources(workers=8, gpus=1)),
        (Resources(), 8, "cpu", Resources(workers=1)),
        (Resources(gpus=2), 8, "auto", Resources(workers=4, gpus=2)),
        (Resources(workers=3), 8, "auto", Resources(workers=3)),
    ],
)
def test_default_is_one_training_worker_per_gpu(given: Resources, gpus: int, device: str, expected: Resources) -> None:
    assert resolve_workers(given, {"CPU": 64.0} | ({"GPU": float(gpus)} if gpus else {}), device) == expected


def test_the_driver_counts_tokens_once_and_leaves_evaluations_out_of_their_rate() -> None:
    relay = _Relay()
    advances: list[Any] = []
    remote = SimpleNamespace(news=SimpleNamespace(remote=relay.news))
    with _passed_on(SimpleNamespace(get=lambda value: value), remote, advances.append):
        relay.trained(100, 40)
        relay.set_aside(2.5)
    assert [int(units) for units in advances if units] == [40, 60]
    assert isinstance(advances[0], FinishedBefore)
    assert sum(units.seconds for units in advances if isinstance(units, Aside)) == 2.5
    assert relay.news()[3] == 0.0


@pytest.mark.cluster
@pytest.mark.slow
def test_run_with_a_killed_worker_ends_with_the_same_weights(cluster: Any, config: Config) -> None:
    driver = Driver(cluster, config)
    driver.until(lambda: steps_done(driver.run) > 25)
    os.kill(max(workers()), signal.SIGKILL)
    calm = replace(config, run=config.run.with_name("calm"), executor=ExecutorSettings())
    processes = Processes(calm)
    assert processes.end() == [0, 0], processes.said.read_text()
    assert driver.process.wait(PATIENCE) == 0, driver.log.read_text()
    said = driver.log.read_text()
    assert said.count("resuming from step") == 1
    for beginning in ("data: ", "train: 51,200 tokens in ", "checkpoint: ", "curves: "):
        assert any(line.startswith(beginning) for line in said.splitlines()), said
    assert losses(driver.run) == losses(calm.run)
    weights = [name for name in last_checkpoint(calm.run) if name.endswith(".safetensors")]
    assert len(weights) == 4
    for name in weights:
        assert last_checkpoint(driver.run)[name] == last_checkpoint(calm.run)[name], name
    assert {path.name for path in driver.run.iterdir()} == {path.name for path in calm.run.iterdir()}


@pytest.mark.cluster
@pytest.mark.slow
def test_user_mistake_is_printed_once_and_a_stopped_driver_stops_its_workers(cluster: Any, config: Config) -> None:
    driver = Driver(cluster, replace(config, train=replace(config.train, batch_size=3)))
    assert driver.process.wait(PATIENCE) == 2, driver.log.read_text()
    assert driver.log.read_text().count("train.batch_size = 3: must be a multiple of the 2") == 1
    endless = replace(config, run=config.run.with_name("endless"), train=replace(config.train, steps=1_000_000))
    driver = Driver(cluster, endless)
    driver.until(lambda: steps_done(driver.run) > 25)
    driver.process.terminate()
    driver.process.wait(PATIENCE)
    wait_until(lambda: not list(workers()), every=0.1)
    assert read_metrics(driver.run)[-1]["step"] > 25
    assert last_checkpoint(driver.run)
