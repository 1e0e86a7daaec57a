"""No content of a file makes a compiled loop read or write outside of its arrays, which would end the process."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.suffixes import order
from tests.conftest import PATIENCE, build_local, forkserver, tiny_config, write_corpus
from tests.indexing.damaged_reads import DONE, read_damaged


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """Two generations with two orders, the first one in parts, and votes and n-grams of both."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(order, "PART_TOKENS", 5000)
        for append, documents in ((False, 40), (True, 8)):
            write_corpus(folder / f"{append}.jsonl", documents, seed=int(append))
            config = tiny_config(folder, folder / "*.jsonl", skip_stages=())
            config = replace(config, neighbors=replace(config.neighbors, search="ngrams", rerank="tokens"))
            build_local(config, append=append)
        return Datastore.open(folder / "datastore")


@pytest.mark.parametrize("files", ["suffixes/*/*.npy", "chunks/*/train/*.npy", "votes/*/train.*", "ngrams/*/*.npy"])
def test_no_content_of_a_file_ends_the_process_that_reads_it(datastore: Datastore, tmp_path: Path, files: str) -> None:
    found = [
        path.relative_to(datastore.folder) for path in sorted(datastore.folder.glob(files)) if path.suffix != ".json"
    ]
    names = sorted(path.as_posix() for path in found if path.parent in (found[0].parent, found[-1].parent))
    process = forkserver().Process(
        target=read_damaged, args=(datastore.folder, tmp_path / "damaged", names, tmp_path / "log")
    )
    process.start()
    process.join(PATIENCE)
    process.kill()
    assert (process.exitcode, (tmp_path / "log").read_text()) == (0, DONE)
