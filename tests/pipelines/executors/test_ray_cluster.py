"""Error messages when no Ray cluster answers. No test here starts a cluster."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from indexing.store.errors import InputError
from pipelines.executors import ray_cluster
from pipelines.executors.ray_cluster import connect

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own


@pytest.fixture
def ray_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray in a process that has joined no cluster. Joining one fails the test."""
    import ray

    def init(**settings: Any) -> None:
        raise AssertionError(settings)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(("command", "refused"), [("./uv", True), ("bin/uv", True), ("uv", False), ("/bin/uv", False)])
def test_a_relative_path_of_uv_is_refused_instead_of_workers_that_never_start(
    tmp_path: Path, command: str, refused: bool
) -> None:
    program = "from pipelines.executors.ray_cluster import connect; connect('127.0.0.1:1')"
    (tmp_path / "run").write_text(f'"{sys.executable}" -c "{program}"\nexit $?\n')
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([command, "run"], executable="/bin/sh", cwd=tmp_path, env=environment, **streams)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1 if refused else -2]
    assert (f"`{command} run`" in said, "no Ray cluster at 127.0.0.1:1" in said) == (refused, not refused)


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("listens", [False, True])
def test_address_without_an_answering_cluster_is_refused_before_ray_connects(
    ray_outside: None, monkeypatch: pytest.MonkeyPatch, scheme: str, listens: bool
) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWER_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("", 0))
        if listens:  # it accepts connections, but never answers
            server.listen()
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        words = "did not answer in 0.2 s" if listens else "refused"
        with pytest.raises(InputError, match=rf"executor\.ray_address: no Ray cluster at {address}: .*{words}"):
            connect(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=f"no Ray cluster at {address}"):
            connect("")


def test_address_that_ray_cannot_parse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=r"executor\.ray_address.*nonsense"):
        connect("nonsense")


def test_ray_that_does_not_start_in_time_is_reported(ray_outside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**_: Any) -> None:  # as `ray._private.node` does
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match=r"no Ray cluster at this machine: The current node timed out during startup"):
        connect("")


def test_workers_of_a_cluster_that_starts_here_run_at_the_priority_of_the_command(
    ray_outside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, is_own in (("auto", False), ("", True)):
        monkeypatch.delenv("RAY_worker_niceness", raising=False)
        with pytest.raises(InputError):
            connect(address)
        assert ("RAY_worker_niceness" in os.environ) == is_own
