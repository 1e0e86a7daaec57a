"""What executors say when a task fails or a cluster is not there. No test here starts a cluster."""

import logging
import socket
from typing import Any

import pytest

from indexing.store.errors import InputError
from pipelines import executors, ray_address
from pipelines.executors import ExecutorSettings, LocalExecutor, Task

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own


def fails(error: Exception, *, advance: object) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("c.jsonl:3: broken\n  JSON"), "scan/c.jsonl failed: c.jsonl:3: broken JSON"),
        (KeyError("train"), "scan/c.jsonl failed: KeyError: 'train'"),
    ],
)
def test_a_failed_task_says_why_in_the_same_line(caplog: pytest.LogCaptureFixture, error: Exception, line: str) -> None:
    tasks = [Task("scan/c.jsonl", (error,), 1)]
    with caplog.at_level(logging.ERROR, "retro"), pytest.raises(type(error)):
        list(LocalExecutor(ExecutorSettings()).map("chunk", fails, tasks, lambda units: None))
    assert [record.message for record in caplog.records] == [line]


@pytest.fixture
def ray_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray as in a process that is in no cluster; joining one fails the test."""
    import ray

    def init(**settings: Any) -> None:
        raise AssertionError(settings)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("listens", [False, True])
def test_an_address_where_no_cluster_answers_is_refused_before_ray_tries(
    ray_outside: None, monkeypatch: pytest.MonkeyPatch, scheme: str, listens: bool
) -> None:
    monkeypatch.setattr(ray_address, "_ANSWER_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("", 0))
        if listens:  # and accepts, but never answers
            server.listen()
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        words = "did not answer in 0.2 s" if listens else "refused"
        with pytest.raises(InputError, match=rf"executor\.ray_address: no Ray cluster at {address}: .*{words}"):
            executors.connect(address, "executor.ray_address")
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=f"no Ray cluster at {address}"):
            executors.connect("", "executor.ray_address")


def test_an_address_that_ray_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=r"executor\.ray_address: no Ray cluster at nonsense: Invalid address"):
        executors.connect("nonsense", "executor.ray_address")
