"""`retro extend-vocabulary` turns a run into a tokenizer and a model for a new datastore and a new run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.artifact import verify
from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main
from retro.checkpoints.checkpoint import open_checkpoint
from retro.inference.language_model import LanguageModel
from retro.model_settings import ModelSettings
from retro.training.trainer import train
from tests.conftest import build_local, tiny_config
from tests.indexing.tokenization.test_extension import CHINESE


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chinese") / "laws.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "text": text * 3}) + "\n" for n, text in enumerate(CHINESE)))
    return path


@pytest.fixture
def arguments(chinese: Path) -> list[str]:
    return ["--corpus.paths", str(chinese), "--corpus.split", "3", "1", "0", "--pieces", "50"]


def test_new_run_trains_with_an_extended_vocabulary(
    tmp_path: Path, tiny_run: Path, tiny_datastore: Datastore, chinese: Path, arguments: list[str], capsys
) -> None:
    out = tmp_path / "extended"
    assert main(["extend-vocabulary", str(tiny_run), *arguments, "--output", str(out)]) == 0
    said = capsys.readouterr().out
    path = out / "tokenizer" / "sentencepiece.model"
    assert f'tokenizer.kind = "sentencepiece", tokenizer.path = "{path}"' in said
    assert not verify(out)
    assert sorted(file.name for file in out.iterdir()) == [
        "figures.json", "manifest.json", "model.safetensors", "tokenizer",
    ]  # fmt: skip
    figures = json.loads((out / "figures.json").read_text())["corpus"]
    assert figures["new_tokens"] < 0.7 * figures["old_tokens"]
    old_size = int(tiny_datastore.manifest["vocab_size"])
    model = open_checkpoint(out / "model.safetensors")
    assert model.num_ids == model.model.vocab_size == old_size + 50

    config = tiny_config(tmp_path, chinese, tokenizer=TokenizerSettings(kind="sentencepiece", path=str(path)))
    build_local(config)
    tokenizer = Tokenizer.open(config.datastore / "tokenizer")
    assert tokenizer.vocab_size == old_size + 50
    text = np.append(tokenizer.bos_id, tokenizer.encode(CHINESE[0]))
    before = LanguageModel.open(out / "model.safetensors", config.datastore, retrieval=False).score([text])
    start = replace(config.train, steps=2, init_from=str(out / "model.safetensors"), warmup_steps=0)
    base = ModelSettings(preset="base", chunk_length=16)
    outcome = train(config.run, replace(config, model=base, train=start).run_settings)
    after = LanguageModel.open(outcome.checkpoint, retrieval=False).score([text])
    assert after[0].sum() > before[0].sum()


def test_extending_only_a_tokenizer_keeps_the_ids_of_other_texts(
    tmp_path: Path, tiny_datastore: Datastore, tiny_corpus: Path, arguments: list[str], capsys
) -> None:
    out = tmp_path / "extended"
    keep = ["--ascii", "--keep", str(tiny_corpus)]
    assert main(["extend-vocabulary", str(tiny_datastore.folder), *arguments, *keep, "--output", str(out)]) == 0
    assert not (out / "model.safetensors").exists()
    kept = json.loads((out / "figures.json").read_text())["keep"]
    assert kept["unchanged"] == kept["texts"] > 10
    assert kept["new_tokens"] == kept["old_tokens"]
    assert "keep: samples with unchanged ids" in capsys.readouterr().out


def test_invalid_arguments_are_refused_and_leave_no_files(
    tmp_path: Path, tiny_run: Path, tiny_datastore: Datastore, arguments: list[str], capsys
) -> None:
    other = tmp_path / "other" / "tokenizer"
    assert main(["extend-vocabulary", str(tiny_datastore.folder), *arguments, "--output", str(other.parent)]) == 0
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    known = tmp_path / "known.txt"
    known.write_text("Plain words in ASCII. " * 50)
    (tmp_path / "there").mkdir()
    files = sorted(tmp_path.rglob("*"))
    out = ["--output", str(tmp_path / "out")]
    same = ["--corpus.paths", str(known), "--corpus.split", "1", "0", "0"]
    for given, message in [
        ([str(tiny_run), *arguments, "--output", str(tmp_path / "there")], "exists already"),
        ([str(tiny_run), *arguments, "--tokenizer", str(other), *out], "Name the tokenizer of this model"),
        ([str(tiny_datastore.folder), *arguments, "--tokenizer", str(other), *out], "applies only to checkpoints"),
        ([str(tiny_run), *same, *out], "nothing new"),
        ([str(tiny_run), "--corpus.paths", str(empty), *out], "no training document with text"),
        ([str(tiny_run), *arguments, "--keep", str(empty), *out], "keep = "),
        ([str(tiny_run), *arguments, "--pieces", "0", *out], "pieces = 0"),
        ([str(tmp_path / "nowhere"), *arguments, *out], "nowhere does not exist"),
        ([str(empty.parent), *arguments, *out], "is not a tokenizer"),
    ]:
        assert main(["extend-vocabulary", *given]) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == files
