"""One Ray cluster of three nodes on this machine, shared by all tests that need one: starting it takes 15 seconds."""

import contextlib
import io
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import PATIENCE

_USUAL_AGENT_PORT = 52365


class Terminal(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head node without CPUs, with a job server, and two nodes of one CPU. Token authentication is on (Ray ≥ 2.61).

    A test that removes a node adds one before it ends.
    """
    from ray.cluster_utils import Cluster

    noticed_soon = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}
    # Port 0 is any free port. The head's job agent has a fixed port; if another cluster uses it, submitting jobs fails.
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0, "dashboard_agent_listen_port": 0}
    with _occupied(_USUAL_AGENT_PORT):
        started = Cluster(initialize_head=True, head_node_args=head | {"_system_config": noticed_soon})
        try:
            for _ in range(2):
                started.add_node(wait=False, num_cpus=1)
            started.wait_for_nodes(PATIENCE)
            yield started
        finally:
            started.shutdown()


@contextlib.contextmanager
def _occupied(port: int) -> Iterator[None]:
    """Listen on a port, as another cluster on this machine would, unless the port is in use already."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            other.bind(("0.0.0.0", port))
            other.listen()
        yield
