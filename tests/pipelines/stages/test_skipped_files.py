"""Skipped files are in the log, the reports and `retro inspect`; settings that choose files change a datastore only by its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from tests.conftest import build_local, tiny_config, write_corpus


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path / "files"
    (folder / ".git").mkdir(parents=True)
    write_corpus(folder / "d.jsonl", 60)
    for name in ("a.dts", "b.dts", "Makefile", ".git/config"):
        (folder / name).write_text(f"text of {name} in words")
    (folder / "c.dts").write_bytes(b"binary \0 " * 20)
    return tiny_config(tmp_path, folder)


SKIPPED = {"unknown suffix": {".dts": 3, "Makefile": 1}, "hidden": {".git": 1}}


def chosen(config: Config, **settings: tuple[str, ...]) -> Config:
    return replace(config, corpus=replace(config.corpus, **settings))


def test_skipped_files_are_in_the_log_the_reports_and_inspect(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["index", str(tmp_path / "config.toml")]) == 0
    assert (
        "corpus: scan: 5 files skipped: unknown suffix 4 (.dts 3, Makefile 1); hidden 1 (.git 1); corpus.suffixes adds"
        in capsys.readouterr().err
    )
    assert json.loads((config.datastore / "report.json").read_text())["corpus"]["corpus"]["skipped"] == SKIPPED
    html = (config.datastore / "report.html").read_text()
    assert "skipped, unknown suffix: .dts" in html
    assert main(["inspect", str(config.datastore)]) == 0
    assert "unknown suffix 4 (.dts 3, Makefile 1)" in capsys.readouterr().out
    (tmp_path / "files/e.txt").write_text("more words")
    (tmp_path / "files/f.dtsi").write_text("more words")
    assert main(["index", str(tmp_path / "config.toml"), "--append"]) == 0
    report = json.loads((config.datastore / "report.json").read_text())["corpus"]
    assert report["00001"]["skipped"]["unknown suffix"] == {".dts": 3, ".dtsi": 1, "Makefile": 1}
    assert report["corpus"]["skipped"] == SKIPPED


def test_added_files_are_documents_and_binary_ones_are_counted_by_suffix(config: Config) -> None:
    datastore = build_local(chosen(config, suffixes=(".dts",), exclude=("b.*",)), only="chunk")
    stored = json.loads((datastore.folder / "corpus/problems.json").read_text())
    assert stored["skipped"] == {
        "binary": {".dts": 1},
        "excluded": {".dts": 1},
        "hidden": {".git": 1},
        "unknown suffix": {"Makefile": 1},
    }
    assert "binary file" not in stored["counts"]
    assert stored["examples"] == []
    assert sum(datastore.split(name).num_documents for name in ("train", "valid")) == 61


def test_a_datastore_depends_on_the_chosen_files_and_not_on_how_they_are_chosen(config: Config) -> None:
    default = build_local(config, only="chunk").manifest["fingerprints"]
    for same in ({"suffixes": (".none",)}, {"exclude": ("*.dts", "nothing")}):
        assert build_local(chosen(config, **same), only="chunk").manifest["fingerprints"] == default
    with pytest.raises(InputError, match=r"built without 3 files that corpus\.paths names now.*a\.dts"):
        build_local(chosen(config, suffixes=(".dts",)), only="chunk")


def test_evaluation_files_are_not_excluded(config: Config, tmp_path: Path) -> None:
    evaluation = write_corpus(tmp_path / "test.jsonl", 10)
    config = replace(config, dedup=replace(config.dedup, paths=(str(evaluation),)))
    assert build_local(chosen(config, exclude=("test.jsonl",)), only="chunk").folder.exists()
    assert CorpusSettings().exclude == ()
