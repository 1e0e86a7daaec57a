"""What an image compiles when it is built is what a server needs."""

from pathlib import Path

import pytest

from pipelines.compile_ahead import compile_ahead


@pytest.mark.slow
def test_a_server_with_all_sources_gets_ready(tmp_path: Path) -> None:
    assert compile_ahead(tmp_path) == 0
    assert {"suffixes", "votes", "neighbors"} <= {path.name for path in (tmp_path / "datastore").iterdir()}
    assert list((tmp_path / "run" / "checkpoints").iterdir())
