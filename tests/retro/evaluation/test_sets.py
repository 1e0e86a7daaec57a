"""Evaluation sets: scored documents, names and rejected settings."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from retro.device import choose_placement
from retro.evaluation.sets import EvaluationSet, open_sets, parse_set, short_names
from retro.evaluation.settings import EvaluationSettings
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.training.task import DocumentTask
from retro.training.trainer import Outcome, train
from tests.conftest import change_tokenizer, tiny_config


@pytest.fixture
def settings(tiny_datastore: Datastore, tmp_path: Path) -> ModelSettings:
    return fit_to(tiny_config(tmp_path, tmp_path).model, tiny_datastore.manifest, tiny_datastore.folder)


@pytest.fixture
def copied(tiny_datastore: Datastore, tmp_path: Path) -> Path:
    """A copy of the datastore that tests may change."""
    return Path(shutil.copytree(tiny_datastore.folder, tmp_path / "other" / "datastore"))


def describe(sets: list[EvaluationSet]) -> list[tuple[str, Path, str]]:
    return [(each.name, each.datastore.folder, each.split_name) for each in sets]


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("valid", ("valid", "", "valid")),
        ("web=runs/web", ("web", "runs/web", "valid")),
        ("web=runs/web:valid", ("web", "runs/web", "valid")),
        ("web=s3://runs/web", ("web", "s3://runs/web", "valid")),
        ("a.b-c=x=y:valid", ("a.b-c", "x=y", "valid")),
    ],
)
def test_an_entry_has_a_name_a_datastore_and_a_split(entry: str, parsed: tuple[str, str, str]) -> None:
    assert parse_set(entry) == parsed


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("train",), ["'train'", "valid"]),
        (("a=runs/a:train",), ["'a=runs/a:train'", "valid"]),
        (("a=",), ["'a='", "NAME=DATASTORE:SPLIT"]),
        (("=runs/a",), ["'=runs/a'", "NAME=DATASTORE"]),
        (("a/b=runs/a",), ["'a/b=runs/a'"]),
        (("",), ["''", "NAME=DATASTORE"]),
        (("a=x", "a=y"), ["'a'"]),
    ],
)
def test_invalid_sets_are_rejected_with_their_key(sets: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        EvaluationSettings(sets=sets)
    assert str(caught.value).startswith("evaluation.sets has ")
    assert all(word in str(caught.value) for word in words), caught.value


def test_without_entries_every_training_datastore_is_a_set(
    tiny_datastore: Datastore, copied: Path, settings: ModelSettings
) -> None:
    first = tiny_datastore.folder
    assert describe(open_sets((), [first], settings, 2)) == [("valid", first, "valid")]
    two = open_sets((), [first, copied, first], settings, 2)
    assert describe(two) == [(first.parent.name, first, "valid"), ("other", copied, "valid")]


def test_a_datastore_without_held_out_documents_is_skipped_unless_named(copied: Path, settings: ModelSettings) -> None:
    manifest = read_json(copied / "manifest.json")
    manifest["splits"]["valid"] = {key: [0] * len(rows) for key, rows in manifest["splits"]["valid"].items()}
    write_checked(copied / "manifest.json", manifest)
    assert open_sets((), [copied], settings, 2) == []
    with pytest.raises(InputError, match=r"'valid'.*corpus.split"):
        open_sets(("valid",), [copied], settings, 2)


def test_entries_select_splits_of_the_first_datastore_or_other_datastores(
    tiny_datastore: Datastore, copied: Path, settings: ModelSettings
) -> None:
    sets = open_sets(("valid", f"copy={copied}:valid"), [tiny_datastore.folder], settings, 2)
    assert describe(sets) == [("valid", tiny_datastore.folder, "valid"), ("copy", copied, "valid")]


def test_each_set_is_measured_on_and_off_under_its_name(
    tiny_datastore: Datastore, copied: Path, tmp_path: Path
) -> None:
    config = replace(tiny_config(tmp_path, tmp_path), datastore=tiny_datastore.folder)

    def metrics_of(k: int, *sets: str) -> dict[str, float]:
        model = config.model if k else updated(config.model, {"retrieval.cca_layers": ()})
        changed = replace(config, model=model, evaluation=EvaluationSettings(sets=sets))
        task = DocumentTask(changed.run_settings)
        retro = Retro(task.settings.model)
        return task.evaluate(retro, choose_placement("cpu", "float32"), torch.inference_mode()(retro.token_losses))

    metrics = metrics_of(2, "valid", f"copy={copied}")
    assert sorted(metrics) == [f"{name}_bits_per_byte_{mode}" for name in ("copy", "valid") for mode in ("off", "on")]
    assert metrics["copy_bits_per_byte_on"] == metrics["valid_bits_per_byte_on"]
    assert list(metrics_of(0, "valid")) == ["valid_bits_per_byte_off"]


def test_a_set_that_does_not_fit_the_model_is_rejected_by_name(
    tiny_datastore: Datastore, copied: Path, settings: ModelSettings, tmp_path: Path
) -> None:
    def expect_error(entry: str, words: str, k: int = 2, model: ModelSettings = settings) -> None:
        with pytest.raises(InputError, match=words):
            open_sets((entry,), [tiny_datastore.folder], model, k)

    expect_error(f"web={tmp_path}", r"evaluation\.sets.*'web=")
    expect_error(f"web={copied}", r"k = 7 .*'web'.* 6", k=7)
    expect_error(f"web={copied}", "'web'.*vocab_size", model=replace(settings, vocab_size=99))
    expect_error(f"web={copied}", "'web'.*chunk_length", model=replace(settings, chunk_length=32))
    change_tokenizer(copied)
    expect_error(f"web={copied}", r"evaluation\.sets.*'web=.*tokenizer")


def test_training_logs_every_set_and_rejects_an_invalid_one_before_it_starts(
    tiny_datastore: Datastore, copied: Path, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, tmp_path)

    def run(*sets: str) -> Outcome:
        evaluation = EvaluationSettings(sets=sets)
        return train(config.run, replace(config, datastore=tiny_datastore.folder, evaluation=evaluation).run_settings)

    with pytest.raises(InputError, match="nowhere"):
        run("web=nowhere")
    assert not config.run.exists()
    assert {"valid_bits_per_byte_on", "copy_bits_per_byte_off"} <= set(run("valid", f"copy={copied}").metrics[-1])


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["english/datastore", "chinese/datastore"], ["english", "chinese"]),
        (["a/x", "a/y", "b/x"], ["a-x", "a-y", "b-x"]),
        (["/x", "/a/x"], ["x", "a"]),
    ],
)
def test_short_names_are_unique(folders: list[str], names: list[str]) -> None:
    assert short_names([Path(folder) for folder in folders]) == names
