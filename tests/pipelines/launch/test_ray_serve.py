"""Serving on a real Ray cluster of three nodes: answers equal those of one process; they are partial without a node."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from indexing.retrieval.candidates import PartsMissing
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from pipelines.launch import ray_serve
from pipelines.launch.ray_serve import RemoteIndex, parts_of
from tests.conftest import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own warnings
QUERY = {"texts": ["retrieve the neighbor shard", "检索 模型"], "k": 4}


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_parts_contain_every_shard_once_in_order(tiny_datastore: Datastore, count: int) -> None:
    split = tiny_datastore.train
    num_shards = len(split.chunk_rows)
    parts = parts_of([split, split], count)
    assert len(parts) == 2 * min(count, num_shards)
    for number in range(2):
        own = [part for part in parts if part.datastore == number]
        assert [shard for part in own for shard in part.shards] == list(range(num_shards))
    assert len({part.deployment for part in parts}) == len(parts)
    assert all(part.bytes > 0 for part in parts)


class Handle:
    """A fake handle of a part of the index that answers or times out."""

    def __init__(self, ids: list[int], distances: list[float]) -> None:
        self.answer = np.array([ids]), np.array([distances], dtype=np.float32)
        self.up, self.asked, self.search = True, 0, self

    def remote(self, queries: np.ndarray, k: int) -> "Handle":
        self.asked += 1
        return self

    def result(self, timeout_s: float) -> Any:
        if not self.up:
            raise TimeoutError
        return self.answer

    def cancel(self) -> None:
        pass


def test_part_that_times_out_is_named_and_skipped_until_the_retry_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(ray_serve, "time", clock)
    near, far = Handle([3, 1], [0.1, 0.5]), Handle([9, 7], [0.2, 0.3])
    index = RemoteIndex({"near": near, "far": far}, 20, part_seconds=1, retry_seconds=5)
    query = np.zeros((1, 4), dtype=np.float32)
    assert index.search(query, 3).tolist() == [[3, 9, 7]]
    near.up = False
    for asked in (2, 2):  # the second search skips it
        with pytest.raises(PartsMissing) as missing:
            index.search(query, 3)
        assert (missing.value.names, near.asked) == (("near",), asked)
        assert missing.value.ids.tolist() == [[9, 7, -1]]
    near.up = True
    clock.now += 5
    assert index.search(query, 3).tolist() == [[3, 9, 7]]


def free_port() -> int:
    """A free port below those that the system gives to connections, so no other process gets it in the meantime."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@pytest.fixture
def url(cluster: Any, tiny_datastore: Datastore) -> Iterator[str]:
    """The URL of a `retro serve --executor.kind ray` process."""
    options = [
        "--executor.kind",
        "ray",
        "--port",
        str(free_port()),
        "--cluster.parts",
        "2",
        "--cluster.part-seconds",
        "20",
    ]
    options += [
        "--cluster.part-cpus",
        "0.6",
        "--cluster.replica-cpus",
        "0.3",
    ]  # one part per node, next to a front end
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(tiny_datastore.folder), *options]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            told = next((line for line in process.stdout if line.startswith("ready: ")), "")
            assert told, "it did not start"
            yield told.removeprefix("ready: ").strip()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def ask(url: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/search", json.dumps(QUERY).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def ask_until(url: str, partial: bool) -> dict[str, Any]:
    """The first answer that is partial, or complete. Ignores errors while a front end moves to another node."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            answer = ask(url)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            answer = {}
        if answer.get("partial") is partial:
            return answer
        time.sleep(0.3)
    raise AssertionError(f"no answer with partial = {partial} in {PATIENCE} s")


def found(answer: dict[str, Any]) -> list[list[int]]:
    return [[hit["chunk_id"] for hit in hits] for hits in answer["results"]]


@pytest.mark.cluster
@pytest.mark.slow
def test_ray_serve_answers_as_one_process_and_partially_while_a_node_is_down(
    cluster: Any, url: str, tiny_datastore: Datastore
) -> None:
    here = Retriever.open(tiny_datastore.folder).search(QUERY["texts"], QUERY["k"]).hits
    expected = [[hit.chunk_id for hit in hits] for hits in here]
    whole = ask_until(url, partial=False)
    assert whole["missing"] == []
    assert found(whole) == expected

    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    answer = ask_until(url, partial=True)
    first, last = (int(name[-5:]) for name in answer["missing"][0].split(" to "))
    starts = tiny_datastore.train.tokens.starts
    gone = range(starts[first], starts[last + 1])
    assert len(answer["missing"]) == 1
    assert all(len(ids) == QUERY["k"] and not set(ids) & set(gone) for ids in found(answer))

    cluster.add_node(num_cpus=1)
    assert found(ask_until(url, partial=False)) == expected
