"""Training resumes bit for bit, rejects incompatible settings, and learns."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from indexing.progress import FinishedBefore
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import write_checked
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.batch.loss import _compiled_logit_gradients
from retro.checkpoints import checkpoint as checkpoints
from retro.model_settings import from_json, updated
from retro.training.meter import Meter
from retro.training.run_folder import score_of
from retro.training.task import DocumentTask
from retro.training.trainer import Outcome, train
from tests.conftest import build_local, tiny_config, write_corpus
from tests.retro.training.runs import interrupt_after, losses, run, weights, with_train

TOKENS = 2 * 64  # of a step


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    return replace(config, model=replace(config.model, dropout=0.1))


def test_a_resumed_run_equals_an_uninterrupted_one(config: Config, tmp_path: Path) -> None:
    straight = run(config)

    stopped = replace(config, run=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, advance=interrupt_after(5 * TOKENS))
    assert [path.name for path in checkpoints.finished(stopped.run)] == ["00000004"]
    resumed = run(stopped)
    assert weights(resumed) == weights(straight)
    assert losses(resumed) == losses(straight)
    assert [line["step"] for line in resumed.metrics if "loss" in line] == list(range(1, 9))


def test_the_logged_loss_is_the_mean_since_the_last_line_even_across_a_resume(config: Config, tmp_path: Path) -> None:
    config = with_train(config, steps=10, checkpoint_every=4)
    each = [loss for _, loss in losses(run(replace(config, run=tmp_path / "each")))]
    means = [(3, sum(each[0:3]) / 3), (6, sum(each[3:6]) / 3), (9, sum(each[6:9]) / 3), (10, each[9])]
    config = with_train(config, log_every=3)
    with pytest.raises(KeyboardInterrupt):
        run(config, advance=interrupt_after(6 * TOKENS))  # resumes from step 4, one step after a logged line
    assert losses(run(config)) == means


def test_tokens_per_second_include_data_and_checkpoints_but_not_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    advances: list[Any] = []
    clock = iter([1.0, 11.0, 15.0, 15.0])  # start and end of the evaluation, then the reading of the meter
    monkeypatch.setattr("retro.training.meter.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter = Meter(started=0.0)
    meter.add(1.0, 100)
    with meter.paused(advances.append):
        pass
    assert [(units, units.seconds) for units in advances] == [(0, 10.0)]
    assert meter.read()["tokens_per_second"] == 100 / 5


def test_a_damaged_checkpoint_is_moved_aside_and_the_previous_one_is_resumed(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = run(replace(config, run=tmp_path / "straight"))
    file = run(config).checkpoint / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    resumed = run(config)
    assert str(file) in caplog.text
    assert "resuming from step 4" in caplog.text
    assert weights(resumed) == weights(straight)
    assert losses(resumed) == losses(straight)
    assert (config.run / "checkpoints" / "damaged-00000008").exists()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_restart(config: Config) -> None:
    run(config)
    for folder in checkpoints.finished(config.run):
        (folder / "state.json").write_text("{}")
    with pytest.raises(InputError, match="all checkpoints are damaged") as caught:
        run(config)
    assert all(str(folder) in str(caught.value) for folder in checkpoints.finished(config.run))


def test_a_finished_run_is_not_trained_again(config: Config) -> None:
    first = run(config)
    steps: list[int] = []
    again = run(config, advance=steps.append)
    assert weights(again) == weights(first)
    assert steps == [8 * 2 * 64]  # reports the completed run at once
    assert isinstance(steps[0], FinishedBefore)


def test_changed_settings_are_rejected_with_their_key_unless_they_do_not_affect_weights(config: Config) -> None:
    run(config)
    for section, change, named in (
        ("train", {"lr": 5e-4}, r"train\.lr was 0\.001, now 0\.0005"),
        ("data", {"k": 1}, r"data\.k was 2, now 1"),
        ("model", {"d_ffw": 32}, r"model\.d_ffw was 64, now 32"),
    ):
        with pytest.raises(InputError, match=named):
            run(replace(config, **{section: replace(getattr(config, section), **change)}))
    run(with_train(config, log_every=3, keep_checkpoints=1))


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_run_can_be_extended_if_completed_steps_keep_their_learning_rates(
    config: Config, tmp_path: Path, schedule: str
) -> None:
    longer = with_train(config, lr_schedule=schedule, steps=12, decay_ratio=0.5)
    straight = run(replace(longer, run=tmp_path / "straight"))
    with pytest.raises(KeyboardInterrupt):
        run(with_train(longer, steps=8), advance=interrupt_after(4 * TOKENS))
    assert weights(run(longer)) == weights(straight)


def test_a_constant_run_can_end_as_wsd(config: Config, tmp_path: Path) -> None:
    decayed = with_train(config, lr_schedule="wsd", steps=12, decay_ratio=0.5)
    straight = run(replace(decayed, run=tmp_path / "straight"))
    run(with_train(config, lr_schedule="constant", steps=6))
    assert weights(run(decayed)) == weights(straight)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_an_extension_that_changes_past_learning_rates_is_rejected(config: Config, schedule) -> None:
    run(with_train(config, lr_schedule=schedule))
    with pytest.raises(
        InputError, match=rf"train\.steps was 8, now 9 \(under train\.lr_schedule = '{schedule}'.*'constant'"
    ):
        run(with_train(config, lr_schedule=schedule, steps=9))


def test_a_run_from_before_a_setting_existed_resumes_without_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_train(config, lr_schedule="constant")
    run(with_train(config, steps=4))
    read = checkpoints.read

    def read_old(folder: Path) -> checkpoints.Checkpoint:
        found = read(folder)
        stored = found.settings["model"]
        del stored["copy_head"]
        del stored["attention"]["prefix_tokens"]
        return replace(found, model=from_json(stored))

    monkeypatch.setattr(checkpoints, "read", read_old)
    assert run(config).metrics[-1]["step"] == 8


def test_a_run_shorter_than_its_warmup_trains_and_says_how_it_warms_up(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(with_train(config, steps=20, warmup_steps=100, eval_every=0))
    assert [line["lr"] for line in outcome.metrics if "lr" in line][1] == pytest.approx(config.train.peak_lr)
    assert "train.warmup_steps = 100 is more than train.steps: the warm-up ends at step 2" in caplog.text


def test_a_changed_datastore_is_rejected(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(config.datastore, folder)
    config = replace(config, datastore=folder)
    run(config)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["fingerprints"]["neighbors"] = "0" * 16
    write_checked(folder / "manifest.json", manifest)
    with pytest.raises(InputError, match="datastore has changed"):
        run(config)


def test_the_loss_falls_for_retro_and_baseline(config: Config, tmp_path: Path) -> None:
    config = with_train(config, steps=60, lr=5e-3, eval_every=0)
    for name, layers in (("retro", (2, 3)), ("baseline", ())):
        outcome = run(
            replace(
                config, run=tmp_path / name, model=updated(config.model, {"retrieval.cca_layers": layers, "dropout": 0})
            )
        )
        values = [loss for _, loss in losses(outcome)]
        assert sum(values[-10:]) / 10 < values[0] - 1
        assert ("valid_bits_per_byte_on" in outcome.metrics[-1]) == (name == "retro")


def test_only_the_newest_checkpoints_are_kept_including_the_last_step(config: Config) -> None:
    outcome = run(with_train(config, checkpoint_every=3, keep_checkpoints=2))
    assert [path.name for path in checkpoints.finished(config.run)] == ["00000006", "00000008"]
    assert outcome.metrics[-1]["step"] == 8


def test_the_next_checkpoint_removes_leftovers_of_killed_runs_and_nothing_else(config: Config) -> None:
    folder = config.run / "checkpoints"
    for name in (".00000003.tmp", "00000002", "notes", "1st"):  # half written, half removed, and two of the user's
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    run(config)
    assert {path.name for path in folder.iterdir()} == {"00000004", "00000008", "best.json", "notes", "1st"}


def test_the_best_checkpoint_is_saved_at_its_evaluation_and_kept(config: Config) -> None:
    """The learning rate grows far too high, so the first evaluations are the best."""
    config = with_train(
        config, steps=12, warmup_steps=12, lr=10.0, eval_every=2, checkpoint_every=7, keep_checkpoints=1
    )
    outcome = run(config)
    values = {
        line["step"]: line["valid_bits_per_byte_on"] for line in outcome.metrics if "valid_bits_per_byte_on" in line
    }
    step = min(values, key=lambda step: values[step])
    assert step % 7 > 0  # saved because of its evaluation
    assert step < 12
    assert [int(path.name) for path in checkpoints.finished(config.run)] == [step, 12]
    named = json.loads((config.run / "checkpoints" / "best.json").read_text())
    assert named == {"step": step, "metric": "valid_bits_per_byte_on", "value": values[step]}
    assert checkpoints.open_checkpoint(Path(f"{config.run}@best")).step == step
    assert checkpoints.open_checkpoint(config.run).step == 12


def test_a_resumed_run_finds_the_same_best_checkpoint(config: Config, tmp_path: Path) -> None:
    config = with_train(config, eval_every=2, checkpoint_every=3)
    run(replace(config, run=tmp_path / "straight"))
    with pytest.raises(KeyboardInterrupt):
        run(config, advance=interrupt_after(6 * TOKENS))
    (config.run / "checkpoints" / "best.json").unlink()  # as if killed before writing it
    run(config)
    both = [
        json.loads((folder / "checkpoints" / "best.json").read_text()) for folder in (config.run, tmp_path / "straight")
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("step", [4, 8])
def test_the_checkpoint_of_a_step_is_written_before_its_evaluation_which_the_resumed_run_repeats(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    straight = run(replace(config, run=tmp_path / "straight"))
    evaluations: list[int] = []

    def evaluate(task: DocumentTask, *arguments) -> dict[str, float]:
        evaluations.append(step)
        if len(evaluations) == step // 4:
            raise KeyboardInterrupt  # as a kill, but the writing thread may finish
        return evaluated(task, *arguments)

    evaluated = DocumentTask.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(DocumentTask, "evaluate", evaluate)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert checkpoints.open_checkpoint(config.run).step == step
    resumed = run(config)
    assert weights(resumed) == weights(straight)
    assert evaluations_of(resumed) == evaluations_of(straight)
    best = [folder / "checkpoints" / "best.json" for folder in (config.run, tmp_path / "straight")]
    assert best[0].read_bytes() == best[1].read_bytes()


def test_a_recorded_evaluation_is_not_repeated_and_still_names_the_best_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the kill came between the line of metrics and `best.json`."""
    first = run(with_train(config, steps=4, lr_schedule="constant"))
    named = (config.run / "checkpoints" / "best.json").read_bytes()
    (config.run / "checkpoints" / "best.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(DocumentTask, "evaluate", None)  # an error if it were called
        again = run(with_train(config, steps=4, lr_schedule="constant"))
    assert again.metrics == first.metrics
    assert (config.run / "checkpoints" / "best.json").read_bytes() == named
    longer = run(with_train(config, steps=8, lr_schedule="constant"))
    assert [step for step, _ in evaluations_of(longer)] == [4, 8]


def evaluations_of(outcome: Outcome) -> list[tuple[int, float]]:
    return [
        (line["step"], line["valid_bits_per_byte_on"]) for line in outcome.metrics if "valid_bits_per_byte_on" in line
    ]


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ({"valid_bits_per_byte_off": 2.0, "valid_bits_per_byte_on": 1.9}, ("valid_bits_per_byte_on", 1.9)),
        ({"valid_bits_per_byte_off": 2.0}, ("valid_bits_per_byte_off", 2.0)),
        ({"valid_bits_per_byte_off": 2.0, "valid_bits_per_byte_on": float("nan")}, None),
        ({}, None),
    ],
)
def test_checkpoints_are_ranked_with_retrieval_on_if_available(line, score) -> None:
    assert score_of(line) == score


@pytest.fixture
def compiled(config: Config) -> Iterator[Config]:
    """A short run of a compiled model with one layer of every kind, since compiling each takes long."""
    model = updated(config.model, {"dropout": 0.0, "num_layers": 1, "retrieval.cca_layers": (1,)})
    _compiled_logit_gradients.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield with_train(replace(config, model=model), steps=2, warmup_steps=1, eval_every=0, compile="yes")
    _compiled_logit_gradients.cache_clear()
    torch._dynamo.reset()


def assert_learns_as_uncompiled(config: Config, run_folder: Path) -> None:
    plain = run(with_train(replace(config, run=run_folder), compile="no"))
    for (_, ours), (_, theirs) in zip(losses(run(config)), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_a_compiled_and_checkpointed_model_learns_the_same(compiled: Config, tmp_path: Path) -> None:
    config = replace(compiled, parallel=replace(compiled.parallel, activation_checkpointing="selective"))
    assert_learns_as_uncompiled(config, tmp_path / "plain")


@pytest.mark.slow
def test_a_model_compiles_into_few_graphs_without_graph_breaks(compiled: Config, tmp_path: Path, monkeypatch) -> None:
    """A graph break would raise. Graphs are counted as traced, without generating code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert_learns_as_uncompiled(with_train(compiled, steps=10), tmp_path / "plain")
    # With and without document boundaries; and the loss.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 + 1


def test_a_run_mixes_two_datastores(config: Config, tmp_path: Path) -> None:
    other = build_local(
        tiny_config(
            tmp_path / "other",
            write_corpus(tmp_path / "other.jsonl", 60, seed=3),
            tokenizer=replace(
                config.tokenizer, kind="sentencepiece", path=str(config.datastore / "tokenizer" / "sentencepiece.model")
            ),
        )
    )
    settings = replace(config.data, datastores=(config.datastore, other.folder), weights=(0.5, 0.5))
    outcome = train(config.run, replace(config, data=settings).run_settings)
    assert len(checkpoints.open_checkpoint(config.run).datastores) == 2
    assert len(losses(outcome)) == 8


def test_tensorboard_receives_metrics_and_unknown_loggers_are_rejected(config: Config) -> None:
    pytest.importorskip("tensorboard")
    run(with_train(config, report_to=("tensorboard",)))
    assert list((config.run / "tensorboard").glob("events*"))
    with pytest.raises(InputError, match="report_to"):
        with_train(config, report_to=("paper",))


@pytest.mark.slow
def test_training_does_not_import_the_packages_of_indexing(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(replace(config, run=tmp_path / "bare")))
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"faiss", "autofaiss", "ray", "pyarrow", "sentencepiece", "fsspec", "zstandard", "numba"}}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from pipelines.cli.main import main
sys.exit(main(["train", {str(file)!r}]))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "checkpoint:" in process.stdout
