"""`retro trace` names the documents of a text that was put together from them."""

import io
import json
import shutil
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli import main
from tests.conftest import build_local, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_datastore: Datastore, tiny_corpus: Path) -> Path:
    root = tmp_path_factory.mktemp("trace")
    shutil.copytree(tiny_datastore.folder, root / "datastore")
    return build_local(tiny_config(root, tiny_corpus), only="suffixes").folder


def test_runs_are_named_with_their_documents(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Datastore.open(folder).train
    first, stop = train.chunk_range(3)
    tokens = [int(token) for row in train.tokens.read(first, stop) for token in row][1:]
    words = Tokenizer.open(folder / "tokenizer").decode(tokens[:12])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"zzz {words} zzz"))
    assert main(["trace", str(folder), "-", "--format", "json", "--documents", "1000"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokens_in_runs"] >= 8
    longest = max(printed["runs"], key=lambda run: run["tokens"])
    assert longest["text"] in f"zzz {words} zzz"
    assert str(train.metadata([3])[0]["id"]) in longest["documents"]
    assert longest["occurrences"] >= len(longest["documents"])


def test_text_lists_no_run_of_a_text_that_occurs_nowhere(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["trace", str(folder), "zq jx vk", "--least", "6"]) == 0
    assert capsys.readouterr().out.startswith("0 of ")


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--least", "0"], "least"), (["--documents", "0"], "documents"), ([], "--stage suffixes")]
)
def test_a_mistake_is_one_message(
    tiny_datastore: Datastore, folder: Path, capsys: pytest.CaptureFixture, arguments: list[str], named: str
) -> None:
    datastore = folder if arguments else tiny_datastore.folder
    assert main(["trace", str(datastore), "text", *arguments]) == 2
    assert named in capsys.readouterr().err
