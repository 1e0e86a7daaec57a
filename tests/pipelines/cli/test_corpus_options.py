"""`retro index CORPUS --tokenizer MODEL` builds a datastore without a file of settings."""

from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.corpus_options import options_of_corpus
from pipelines.cli.main import main
from tests.conftest import write_byte_tokenizer, write_corpus


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("docs", "docs"),
        ("docs/", "docs"),
        ("/data/peps.jsonl.zst", "peps"),
        ("text/**/*.md", "text"),
        ("s3://bucket/wiki/2026.parquet", "2026"),
        (".cache", "cache"),
    ],
)
def test_the_datastore_is_named_after_the_corpus(corpus: str, name: str) -> None:
    options = options_of_corpus(corpus, ["--strict"])
    assert options == ["--corpus.paths", corpus, "--datastore", f"datastores/{name}", "--strict"]


def test_several_files_are_named_after_their_folder() -> None:
    options = options_of_corpus("/data/laws/a.zst", ["/data/laws/b.zst", "--strict"])
    assert options == [
        "--corpus.paths",
        "/data/laws/a.zst",
        "/data/laws/b.zst",
        "--datastore",
        "datastores/laws",
        "--strict",
    ]


def test_the_place_that_is_given_is_kept() -> None:
    assert options_of_corpus("a", ["--datastore=b"]) == ["--corpus.paths", "a", "--datastore=b"]


@pytest.mark.parametrize("given", [["--tokenizer", "{}"], ["--tokenizer={}"]])
def test_a_tokenizer_leaves_out_what_its_model_does_not_read(tmp_path: Path, given: list[str]) -> None:
    tokenizer = ["--tokenizer.kind", "huggingface", "--tokenizer.path", str(tmp_path)]
    given = [word.format(tmp_path) for word in given]
    made = options_of_corpus("a", ["--strict", *given, "--datastore", "d"])
    assert made == ["--corpus.paths", "a", *tokenizer, "--skip-stages", "neighbors", "--strict", "--datastore", "d"]
    assert options_of_corpus("a", [*given, "--skip_stages", "votes"])[-2:] == ["--skip_stages", "votes"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tokenizer"], "a value is missing"),
        (["--tokenizer", "--strict"], "a value is missing"),
        (["--tokenizer", "no/such/folder/here"], "--tokenizer no/such/folder/here is not a local folder, "),
        (["--corpus.paths", "b"], "both name text"),
    ],
)
def test_mistakes_are_named(options: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        options_of_corpus("a", options)


def test_one_line_builds_what_the_processor_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("texts", "model"):
        (tmp_path / folder).mkdir()
    write_corpus(tmp_path / "texts" / "a.jsonl", 30)
    write_byte_tokenizer(tmp_path / "model", ["<eos>"], eos_token="<eos>")
    assert main(["index", "texts", "--tokenizer", "model"]) == 0
    out = capsys.readouterr().out
    assert "datastore: datastores/texts" in out
    assert "finished stages: chunk, sparse, suffixes, votes" in out
    html = Path("datastores/texts/report.html").read_text()
    assert "suffixes on disk" in html
    assert "recall" not in html
    assert main(["inspect", "datastores/texts"]) == 0
    assert "chunk, sparse, suffixes, votes" in capsys.readouterr().out
    datastore = Datastore.open("datastores/texts")
    assert datastore.has("suffixes")
    assert datastore.has("votes")
    assert not datastore.has("neighbors")
    assert not datastore.has("embed")
