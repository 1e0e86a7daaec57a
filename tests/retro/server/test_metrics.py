"""Metrics in Prometheus' text format."""

from retro.server.metrics import Metrics


def test_gauges_are_read_when_the_metrics_are_requested() -> None:
    metrics, cache = Metrics(), {"hit": 0, "miss": 0, "bytes": 0}
    metrics.gauge("neighbors_read", "", {"hit": lambda: cache["hit"], "miss": lambda: cache["miss"]}, "cache")
    metrics.gauge("cache_bytes", "", lambda: cache["bytes"])
    cache |= {"hit": 5, "miss": 2, "bytes": 4096}
    text = metrics.text().decode()
    assert 'neighbors_read{cache="hit"} 5.0' in text
    assert 'neighbors_read{cache="miss"} 2.0' in text
    assert "cache_bytes 4096.0" in text
