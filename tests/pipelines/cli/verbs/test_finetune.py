"""`retro finetune` from a user's point of view: from a trained model and a file of examples to an answer."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.checkpoints.checkpoint import open_checkpoint
from retro.finetuning.settings import FinetuneSettings
from retro.model_settings import ModelSettings
from tests.conftest import tiny_config
from tests.retro.finetuning.examples import INSTRUCTIONS, write_lines


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, tiny_run: Path) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    config = replace(config, model=ModelSettings(preset="base", chunk_length=16))
    train = replace(config.train, init_from=str(tiny_run), steps=4, eval_every=2)
    examples = write_lines(tmp_path / "examples.jsonl", INSTRUCTIONS)
    data = replace(config.data, sequence_length=128)
    return replace(config, train=train, data=data, finetune=FinetuneSettings((examples,), held_out=0.3))


def saved(config: Config, tmp_path: Path) -> str:
    (tmp_path / "config.toml").write_text(to_toml(config))
    return str(tmp_path / "config.toml")


def test_finetuned_model_is_evaluated_and_answers_chat_prompts(
    config: Config, tmp_path: Path, tiny_run: Path, capsys
) -> None:
    assert main(["finetune", saved(config, tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "held_out_loss_on" in printed
    assert open_checkpoint(config.run).started_from == open_checkpoint(tiny_run).fingerprint
    svg = (config.run / "curves.svg").read_text()
    assert "Held out: held_out" in svg
    assert "nats per token of answers" in svg
    asked = ["--prompt", "which index?", "--max-tokens", "4", "--k", "1"]
    assert main(["generate", str(config.run), "--chat", *asked]) == 0
    assert capsys.readouterr().out.startswith("which index?\n")
    assert main(["generate", str(tiny_run), "--chat", *asked]) == 2
    assert "neither fine-tuned on instructions" in capsys.readouterr().err


def test_finetuning_on_questions_accepts_rows_that_end_inside_a_chunk(config: Config, tmp_path: Path, capsys) -> None:
    rows = [{"question": f"which of {n}?", "answers": [f"the {n}"], "positive_ids": [f"doc-{n}"]} for n in range(8)]
    path = write_lines(tmp_path / "questions.jsonl", rows)
    finetuning = FinetuneSettings((path,), format="questions", positives_first=True, held_out=0.3)
    config = replace(config, data=replace(config.data, sequence_length=40, k=3), finetune=finetuning)
    assert main(["finetune", saved(config, tmp_path)]) == 0
    assert "held_out_loss_on" in capsys.readouterr().out
    asked = ["--prompt", "which?", "--max-tokens", "40", "--k", "1"]
    assert main(["generate", str(config.run), *asked]) == 0  # the context of the model is a whole number of chunks


def test_invalid_example_is_refused_with_file_and_line_and_leaves_no_files(
    config: Config, tmp_path: Path, capsys
) -> None:
    (path,) = config.finetune.examples
    path.write_text(path.read_text() + '{"instruction": "a"}\n')
    assert main(["finetune", saved(config, tmp_path)]) == 2
    assert f'error: {path}:14: "output" is None: it must be a text.' in capsys.readouterr().err
    assert not list(config.run.rglob("*.npy"))
