"""The code on the page *Python API* runs, in the order of the page."""

from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from tests.test_docs import DOCS, code_blocks

BLOCKS = code_blocks(DOCS / "reference" / "python-api.md", "python")
NUMBERS = [
    pytest.param(number, marks=pytest.mark.slow) if "transformers" in block else number  # its import takes seconds
    for number, block in enumerate(BLOCKS)
]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("number", NUMBERS)
def test_the_code_of_the_page_runs(
    number: int, voting_datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "transformers" in BLOCKS[number]:
        pytest.importorskip("transformers")
    (tmp_path / "datastores").mkdir()
    (tmp_path / "datastores" / "peps").symlink_to(voting_datastore.folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], "python-api.md", "exec"), {})


def test_each_name_has_about_twelve_lines() -> None:
    for name in ("retro.Datastore(", "retro.Dataset(", "retro.NGrams("):
        assert any(name in block and len(block.splitlines()) <= 14 for block in BLOCKS)
