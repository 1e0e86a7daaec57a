"""Metrics in Prometheus' text format."""

from retro.server.metrics import Metrics


def test_the_cache_of_encoded_neighbors_has_its_hits_misses_and_bytes() -> None:
    metrics, numbers = Metrics(), {"hit": 0, "miss": 0, "bytes": 0}
    assert b"retro_neighbors_read" not in metrics.text()
    metrics.watch_neighbors({"hit": lambda: numbers["hit"], "miss": lambda: numbers["miss"]}, lambda: numbers["bytes"])
    numbers |= {"hit": 5, "miss": 2, "bytes": 4096}
    text = metrics.text().decode()
    assert 'retro_neighbors_read{cache="hit"} 5.0' in text
    assert 'retro_neighbors_read{cache="miss"} 2.0' in text
    assert "retro_neighbor_cache_bytes 4096.0" in text
