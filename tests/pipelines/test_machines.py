"""Three machines that share only an S3 server: build through losses, train with a small cache, serve with a part lost."""

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors.settings import ExecutorSettings, Resources
from retro.training.trainer import train
from tests.conftest import PATIENCE, build_local, contents, new_bucket, tiny_config, wait_until, write_corpus
from tests.machines import HERE, Machine, machines, terminate, why_not
from tests.pipelines.launch.test_ray_serve import QUERY, ask_until, found

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of Ray itself
]
RAY = str(Path(sysconfig.get_path("scripts")) / "ray")
# A machine that does not answer for 3 seconds is taken for lost.
_NOTICED_SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}


class Ray:
    """A Ray cluster over three machines. The first one is its head, which is never lost."""

    def __init__(self, made: list[Machine], log: Path) -> None:
        self.machines, self.log = made, log
        self.head = made[0]
        for machine in made:
            self.join(machine)
        wait_until(lambda: self.alive() == len(made), every=0.5)

    def join(self, machine: Machine) -> None:
        """Start a machine, with Ray as its only service."""
        own = ["--num-cpus=1", f"--node-ip-address={machine.address}", "--object-store-memory=100000000", "--block"]
        if machine is self.head:
            own += ["--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--system-config={json.dumps(_NOTICED_SOON)}"]
        else:
            own.append(f"--address={self.head.address}:6379")
        machine.start([RAY, "start", "--disable-usage-stats", *own], self.log)
        if machine is self.head:
            wait_until(lambda: self.alive() == 1, every=0.5)

    def replace(self, machine: Machine) -> None:
        """Lose a machine with all that is on it, and start an empty one in its place."""
        machine.kill()
        self.join(machine)

    def alive(self) -> int:
        """Number of machines that the cluster counts on."""
        code = "import ray; ray.init('auto', log_to_driver=False); print('alive', sum(n['Alive'] for n in ray.nodes()))"
        told = self.head.run([sys.executable, "-c", code]).stdout
        return int(told.rpartition("alive ")[2].split()[0]) if "alive " in told else 0  # lines of Ray may follow


def in_bucket(url: str) -> dict[str, bytes]:
    """Every file of a datastore except the reports."""
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    found = filesystem.cat([path for path in filesystem.find(root) if "/report." not in path])
    return {path[len(root) + 1 :]: data for path, data in found.items()}


def finished(url: str, artifacts: str) -> int:
    """Number of finished artifacts of a kind."""
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return len(filesystem.glob(f"{root}/{artifacts}/*/manifest.json"))


@pytest.fixture(scope="module")
def network() -> Iterator[list[Machine]]:
    """Three machines that have not been started."""
    if reason := why_not():
        pytest.skip(reason)
    with machines(3) as made:
        yield made


@pytest.fixture(scope="module")
def bucket(network: list[Machine], s3_server: str) -> Iterator[str]:
    """The URL of an empty bucket on the only thing that the machines share."""
    with pytest.MonkeyPatch.context() as patch:
        yield new_bucket(s3_server.replace("127.0.0.1", HERE), patch)


@pytest.fixture(scope="module")
def cluster(network: list[Machine], bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Ray:
    """A Ray cluster over the machines, which know the address of the bucket."""
    return Ray(network, tmp_path_factory.mktemp("machines") / "ray.log")


@pytest.fixture(scope="module")
def corpus(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a corpus of six shards that take a second or more in every stage."""
    file = write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 6_000)
    filesystem, root = fsspec.core.url_to_fs(f"{bucket}/corpus.jsonl")
    filesystem.put_file(str(file), root)
    return f"{bucket}/corpus.jsonl"


def config_of(datastore: str | Path, corpus: str, **changes: Any) -> Config:
    """Settings of the build."""
    config = tiny_config(Path("/tmp/work"), Path(corpus), **changes)
    return replace(
        config, datastore=Path(datastore), corpus=replace(config.corpus, paths=(corpus,), shard_bytes=400_000)
    )


@pytest.fixture(scope="module")
def alone(corpus: str, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """The datastore that one process builds."""
    return build_local(config_of(tmp_path_factory.mktemp("alone") / "datastore", corpus))


@pytest.fixture(scope="module")
def url(bucket: str, corpus: str, cluster: Ray, alone: Datastore) -> str:
    """The URL of a datastore built by `ray job submit` while machines are lost and cut off."""
    url = f"{bucket}/wiki"
    stages: Any = dict.fromkeys(("chunk", "embed", "add", "neighbors"), Resources(workers=2))
    executor = ExecutorSettings(kind="ray", num_threads=1, resources=stages)
    cluster.head.write("config.toml", to_toml(config_of(url, corpus, executor=executor)))
    submit = [RAY, "job", "submit", f"--address=http://{cluster.head.address}:8265", "--"]
    command = [*submit, sys.executable, "-m", "pipelines.index", "/tmp/work/config.toml"]
    log = cluster.log.with_name("job.log")
    first, second = cluster.machines[1:]
    with open(log, "w") as file, cluster.head.popen(command, stdout=file, stderr=file) as job:

        def until(artifacts: str) -> None:
            """Wait until the first artifact of a kind is in the bucket."""
            wait_until(lambda: finished(url, artifacts) or job.poll() is not None, every=0.05)
            assert job.poll() is None, log.read_text()

        until("chunks")
        for here, there in ((cluster.head, first), (first, cluster.head)):
            here.cut(there)
        time.sleep(8)  # longer than a machine may be silent
        for here, there in ((cluster.head, first), (first, cluster.head)):
            here.restore(there)
        until("embeddings")
        cluster.replace(second)
        until("neighbors")
        cluster.replace(first)
        assert job.wait(PATIENCE) == 0, log.read_text()
    return url


def test_a_build_through_losses_and_a_cut_network_has_the_bytes_of_one_process(url: str, alone: Datastore) -> None:
    local = {name: data for name, data in contents(alone.folder).items() if name != ".lock"}
    assert in_bucket(url) == local


def losses(metrics: str) -> dict[int, float]:
    """Step → loss of the lines of `metrics.jsonl`."""
    rows = [json.loads(line) for line in metrics.splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_training_with_a_small_cache_reads_what_a_local_datastore_holds(
    url: str, corpus: str, cluster: Ray, alone: Datastore, tmp_path: Path
) -> None:
    machine = cluster.machines[2]
    config = config_of(url, corpus)
    config = replace(config, data=replace(config.data, reading="pread"), run=Path("run"))
    machine.write("train.toml", to_toml(config))
    cache = "mkdir /tmp/cache && mount -t tmpfs -o size=2m none /tmp/cache && export RETRO_CACHE=/tmp/cache"
    done = machine.run(["sh", "-c", f"{cache} && {sys.executable} -m pipelines.train train.toml"])
    assert done.returncode == 0, done.stdout
    assert sum(map(len, in_bucket(url).values())) > 10 * 2**20
    train(tmp_path / "run", replace(config, datastore=alone.folder, run=tmp_path / "run").run_settings)
    here = losses((tmp_path / "run" / "metrics.jsonl").read_text())
    assert len(here) == config.train.steps
    assert losses(machine.run(["cat", "run/metrics.jsonl"]).stdout) == here


@pytest.fixture
def server(url: str, cluster: Ray) -> Iterator[str]:
    """The URL of a `retro serve` on Ray with a part of the index on each machine."""
    parts = ["--cluster.parts", "3", "--cluster.part-seconds", "20"]
    cpus = ["--cluster.part-cpus", "0.6", "--cluster.replica-cpus", "0.3"]  # a part and a front end fit on a machine
    command = [sys.executable, "-m", "pipelines.cli", "serve", url, "--executor.kind", "ray", *parts, *cpus]
    address = ["--executor.ray-address", f"{cluster.head.address}:6379", "--host", "0.0.0.0", "--port", "8000"]
    with cluster.head.popen([*command, *address], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = any(line.startswith("ready: ") for line in process.stdout)
        assert ready, "it did not start"
        yield f"http://{cluster.head.address}:8000"
        terminate(process)
        assert process.wait(PATIENCE) == 0


def test_answers_are_partial_while_a_machine_with_a_part_is_lost(server: str, cluster: Ray, alone: Datastore) -> None:
    whole = found(ask_until(server, partial=False))
    cluster.machines[1].kill()
    answer = ask_until(server, partial=True)
    (missing,) = answer["missing"]
    first, last = (int(name[-5:]) for name in missing.split(" to "))
    starts = alone.train.tokens.starts
    gone = range(starts[first], starts[last + 1])
    assert all(len(ids) == QUERY["k"] and not set(ids) & set(gone) for ids in found(answer))
    cluster.join(cluster.machines[1])
    assert found(ask_until(server, partial=False)) == whole
