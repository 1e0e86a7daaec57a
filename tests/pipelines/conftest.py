"""One Ray cluster of three nodes on this machine for every test that needs one: to start one takes a quarter of a minute."""

from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE = 240  # seconds for anything that a cluster does


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Head without CPUs, with a job server; two nodes of one CPU. Token authentication is on, as in Ray from 2.61.

    Whoever takes a node away adds one before it ends.
    """
    from ray.cluster_utils import Cluster

    noticed_soon = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0, "_system_config": noticed_soon}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(wait=False, num_cpus=1)
        started.wait_for_nodes(PATIENCE)
        yield started
    finally:
        started.shutdown()
