"""Checkpoints are complete or rejected, and contain no pickle."""

import errno
import json
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints.single_file import export
from retro.checkpoints.tensor_files import save_tensors
from retro.training.trainer import train
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    config = replace(tiny_config(tmp_path_factory.mktemp("checkpoint"), tiny_corpus), datastore=tiny_datastore.folder)
    train(config.run, config.run_settings)
    return config.run


def test_a_run_opens_its_newest_checkpoint_without_pickles(run: Path) -> None:
    opened = checkpoints.open_checkpoint(run)
    assert (opened.step, opened.tokens) == (8, 8 * 2 * 64)
    assert {path.suffix for path in opened.path.iterdir()} == {".safetensors", ".json"}
    assert checkpoints.open_checkpoint(opened.path) == opened


def test_a_model_loads_equally_twice_in_evaluation_mode(run: Path, tmp_path: Path) -> None:
    opened = checkpoints.open_checkpoint(run)
    model = checkpoints.load_model(opened, torch.device("cpu"))
    tokens = torch.arange(32)[None]
    again = checkpoints.load_model(opened, torch.device("cpu"))
    assert torch.equal(model(Inputs(tokens)), again(Inputs(tokens)))
    assert not model.training


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that tests may damage."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_rejected_by_name(copy: Path, name: str) -> None:
    file = copy / "checkpoints" / "00000008" / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        checkpoints.open_checkpoint(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_rejected(copy: Path, name: str) -> None:
    """Anywhere except in whitespace and in the manifest's counts, which are not read."""
    file, draw = copy / "checkpoints" / "00000008" / name, random.Random(name)
    whole = file.read_bytes()
    counts = range(whole.find(b'"counts"'), whole.find(b'"files"'))
    places = [place for place, byte in enumerate(whole) if place not in counts and not chr(byte).isspace()]
    for _ in range(30):
        changed = bytearray(whole)
        changed[draw.choice(places)] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(InputError, match=r"(?s)00000008.*Remove"):
            checkpoints.open_checkpoint(copy)


def test_unfinished_checkpoints_are_ignored_and_the_newest_finished_one_is_opened(copy: Path) -> None:
    (copy / "checkpoints" / ".00000009.tmp").mkdir()
    assert checkpoints.open_checkpoint(copy).step == 8
    shutil.rmtree(copy / "checkpoints" / "00000008")
    assert checkpoints.open_checkpoint(copy).step == 4


def test_a_folder_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="retro train"):
        checkpoints.open_checkpoint(tmp_path)


# --- exported file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    export(checkpoints.open_checkpoint(run), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_an_exported_file_has_the_metadata_and_weights_of_its_checkpoint(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    there, here = checkpoints.open_checkpoint(run), checkpoints.open_checkpoint(exported)
    for key in ("fingerprint", "step", "tokens", "model", "settings", "datastores"):
        assert getattr(here, key) == getattr(there, key), key
    weights, same = (checkpoints.load_model(opened, torch.device("cpu")).state_dict() for opened in (there, here))
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    export(here, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == exported.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "again.safetensors"}


def test_metadata_is_readable_with_safetensors_alone(run: Path, exported: Path) -> None:
    with safe_open(exported, "pt") as file:
        facts = json.loads(file.metadata()["retro"])
    opened = checkpoints.open_checkpoint(run)
    assert (facts["format_version"], facts["step"], facts["fingerprint"]) == (3, 8, opened.fingerprint)
    assert facts["settings"]["model"]["d_model"] == opened.model.d_model


def test_a_damaged_exported_file_is_rejected(exported: Path) -> None:
    whole, draw = exported.read_bytes(), random.Random(0)
    for cut in (1, 5000, len(whole) - 3, len(whole)):
        exported.write_bytes(whole[:-cut])
        with pytest.raises(InputError, match=r"model\.safetensors"):
            checkpoints.open_checkpoint(exported)
    header = whole.index(b'"retro"'), whole.index(b'"dtype"')
    for first, stop in (header, (len(whole) - 5000, len(whole))):
        for _ in range(30):
            changed = bytearray(whole)
            changed[draw.randrange(first, stop)] ^= 1 << draw.randrange(8)
            exported.write_bytes(changed)
            with pytest.raises(InputError, match=r"model\.safetensors"):
                checkpoints.open_checkpoint(exported)


def test_foreign_files_other_suffixes_and_other_versions_are_rejected(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    with pytest.raises(InputError, match="retro export"):
        checkpoints.open_checkpoint(tmp_path / "foreign.safetensors")
    opened = checkpoints.open_checkpoint(exported)
    with pytest.raises(InputError, match=r"\.safetensors"):
        export(opened, tmp_path / "model.pt")
    monkeypatch.setattr(checkpoints, "FORMAT_VERSION", 4)
    for path in (exported, run):
        with pytest.raises(InputError, match=r"version 3.*version 4.*`retro train CONFIG`"):
            checkpoints.open_checkpoint(path)


def test_a_setting_that_does_not_exist_is_named_with_the_checkpoint(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints.open_checkpoint(run).path, tmp_path / "00000008")
    file = folder / "state.json"
    file.write_text(file.read_text().replace("capacity_factor", "capacity_shared"))  # as many bytes
    with pytest.raises(InputError, match=r"00000008.*model\.experts\.capacity_shared"):
        checkpoints.read(folder)


def test_files_have_default_permissions(run: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    written = [exported, *checkpoints.open_checkpoint(run).path.iterdir()]
    assert {file.stat().st_mode for file in written} == {(tmp_path / "any").stat().st_mode}


def test_a_full_disk_is_named_with_advice_and_nothing_remains(run: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.open_checkpoint(run)
    tensors = {"model.safetensors": {"a": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"00000008/model\.safetensors'") as raised:
            checkpoints.write(tmp_path, read_json(checkpoint.path / "state.json"), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_missing_folder_raises_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        save_tensors({"a": torch.zeros(3)}, tmp_path / "nowhere" / "a.safetensors")


def with_state(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the metadata of an exported file, with its checksum, as a faulty program would."""
    with safe_open(file, "pt") as opened:
        state = json.loads(opened.metadata()["retro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(state)
    del state["checksum"]
    state["checksum"] = checkpoints.checksum(state, file)
    save_file(tensors, file, {"retro": json.dumps(state, sort_keys=True)})
    return file


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in (
            "step",
            "tokens",
            "datastores",
            "settings",
            "settings.model",
            "settings.train",
            "settings.data",
            "settings.data.sequence_length",
            "settings.data.datastores",
            "num_ids",
            "best",
        )
        for value in (None, "x")
        if (key, value) != ("best", None)
    ],
)
def test_wrong_metadata_are_named(exported: Path, key: str, value: str | None) -> None:
    def change(state: dict[str, Any]) -> None:
        *sections, name = key.split(".")
        for section in sections:
            state = state[section]
        state[name] = value

    with pytest.raises(InputError, match=rf"model\.safetensors: {key} = {json.dumps(value)}: should be an? "):
        checkpoints.open_checkpoint(with_state(exported, change))


def test_missing_metadata_are_named(exported: Path) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors: settings\.train is missing"):
        checkpoints.open_checkpoint(with_state(exported, lambda state: state["settings"].pop("train")))


@pytest.mark.parametrize(
    "sizes",
    [{"num_layers": 10**9}, {"num_layers": 1000}, {"d_ffw": 10**12}, {"vocab_size": 10**15}, {"d_model": 10**15}],
)
def test_settings_of_a_model_larger_than_the_file_are_refused_before_it_is_made(
    exported: Path, sizes: dict[str, int]
) -> None:
    changed = with_state(exported, lambda state: state["settings"]["model"].update(sizes))
    with pytest.raises(InputError, match=r"model\.safetensors: a model of .* but its files hold"):
        checkpoints.open_checkpoint(changed)


def test_weights_of_another_shape_are_refused_before_memory_is_allocated(exported: Path) -> None:
    changed = with_state(exported, lambda state: state["settings"]["model"]["attention"].update(smeared_tokens=3))
    opened = checkpoints.open_checkpoint(changed)
    with pytest.raises(InputError, match="it is the checkpoint of another model"):
        checkpoints.load_model(opened, torch.device("cpu"))
