"""`retro trace` names the documents of a text that was put together from them."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.store.files import read_json, write_checked
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main
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
    assert all(run["text"] == f"zzz {words} zzz"[slice(*run["characters"])] for run in printed["runs"])


def test_text_lists_no_run_of_a_text_that_occurs_nowhere(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["trace", str(folder), "zq jx vk", "--least", "6"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0 of ")
    assert "shorter" not in printed
    assert "smaller --least, for example --least 3." in printed
    assert main(["trace", str(folder), "zq", "--least", "60"]) == 0
    assert "The text is shorter than that" in capsys.readouterr().out
    assert main(["trace", str(folder), "e", "--least", "1"]) == 0
    assert "characters 0 to 1 (1 token), " in capsys.readouterr().out


def test_the_datastores_that_neighbors_come_from_are_traced_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = "seventeen violet walruses whistle on a wednesday in the warm water"
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": f"walrus-{n}", "text": f"{words} {n}"}) + "\n" for n in range(9))
    )
    config = tiny_config(tmp_path / "other", tmp_path / "corpus.jsonl")
    model = str(folder / "tokenizer" / "sentencepiece.model")
    config = replace(config, tokenizer=replace(config.tokenizer, kind="sentencepiece", path=model))
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    other = build_local(config, only="chunk")
    shutil.copytree(folder, both := tmp_path / "both")
    manifest = read_json(both / "manifest.json")
    manifest["extra_datastores"] = [{"folder": str(other.folder), "chunks": other.manifest["fingerprints"]["chunk"]}]
    write_checked(both / "manifest.json", manifest)
    train = Datastore.open(folder).train
    first, _ = train.chunk_range(3)
    known = Tokenizer.open(folder / "tokenizer").decode(train.tokens.read(first, first + 1)[0, 1:14].astype(int))
    command = ["trace", str(both), f"{known} {words}"]
    assert main([*command, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert "other/datastore is not searched" in err
    alone = json.loads(out)
    assert [Path(name).name for name in alone["datastores"]] == ["both"]
    assert alone["runs"]
    build_local(config, only="suffixes")
    assert main([*command, "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["datastores"] == [*alone["datastores"], "other/datastore"]
    theirs = [run for run in printed["runs"] if run["datastore"] == "other/datastore"]
    assert max(theirs, key=lambda run: run["tokens"])["documents"][0].startswith("walrus-")
    assert [run for run in printed["runs"] if run not in theirs] == alone["runs"]
    assert main(command) == 0
    assert re.search(r"for example in walrus-\d.* of other/datastore\n", capsys.readouterr().out)


def test_a_run_of_bytes_is_shown_in_whole_characters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The tiny tokenizer has no tokens for these characters: each is three bytes."""
    known = "猫狗鸟鱼牛羊马猪"
    rows = [{"id": "甲.md", "text": f"the index of a chunk {known} " * 4}]
    rows += [{"id": f"{number}.md", "text": "the index of a chunk " * 4} for number in range(9)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(tmp_path, corpus)
    model = str(folder / "tokenizer" / "sentencepiece.model")
    config = replace(config, tokenizer=replace(config.tokenizer, kind="sentencepiece", path=model))
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    build_local(config, only="chunk")
    datastore = build_local(config, only="suffixes").folder
    text = f"zq {known[2:7]}独"
    assert main(["trace", str(datastore), text, "--least", "3", "--format", "json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert known[2:7] in run["text"]
    assert "\ufffd" not in run["text"]
    assert run["text"] == text[slice(*run["characters"])]
    assert run["documents"] == ["甲.md"]
    assert main(["trace", str(datastore), text, "--least", "3"]) == 0
    assert "for example in 甲.md" in capsys.readouterr().out


def test_the_name_of_a_file_an_empty_text_and_bytes_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the index of a chunk")
    assert main(["trace", str(folder), str(path)]) == 2
    assert f"- < {path}" in capsys.readouterr().err
    assert main(["trace", str(folder), " "]) == 2
    assert "empty" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the \xff\xfe"), encoding="utf-8"))
    assert main(["trace", str(folder), "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--least", "0"], "least"), (["--documents", "0"], "documents"), ([], "--stage suffixes")]
)
def test_a_mistake_is_one_message(
    tiny_datastore: Datastore, folder: Path, capsys: pytest.CaptureFixture, arguments: list[str], named: str
) -> None:
    datastore = folder if arguments else tiny_datastore.folder
    assert main(["trace", str(datastore), "text", *arguments]) == 2
    assert named in capsys.readouterr().err
