"""Networks of a copy head in a file: the same numbers to the bit, and nothing else is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from indexing.store.errors import InputError
from retro.checkpoints.checkpoint import open_checkpoint
from retro.copying.head import initial_weights, open_networks
from retro.copying.network_file import has_networks, read_networks, write_networks

ABOUT = {"model": {"path": "模型", "family": "mamba"}, "fit": {"tokens": 600, "loss_off": 3.1415926535}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Networks of two of the three sources."""
    weights = {name: tensor for name, tensor in initial_weights().items() if not name.startswith("context")}
    write_networks(tmp_path / "new" / "networks.safetensors", ABOUT, weights)
    return tmp_path / "new" / "networks.safetensors"


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.numpy().view(np.int32)


def test_every_float32_number_is_read_as_it_was(tmp_path: Path) -> None:
    any_bits = np.random.default_rng(0).integers(0, 2**32, (30, 1000), dtype=np.uint32).view(np.float32)
    written = {"a.inner": torch.from_numpy(np.where(np.isfinite(any_bits), any_bits, np.float32(-0.0)))}
    write_networks(tmp_path / "a.safetensors", {}, written)
    read = read_networks(tmp_path / "a.safetensors", {"a.inner": (30, 1000)})
    assert np.array_equal(bits(read.weights["a.inner"]), bits(written["a.inner"]))


def test_a_file_is_read_as_it_was_written(file: Path, tmp_path: Path) -> None:
    opened = open_networks(file)
    assert opened.about == ABOUT
    assert all(torch.equal(tensor, initial_weights()[name]) for name, tensor in opened.weights.items())
    assert {name.partition(".")[0] for name in opened.weights} == {"neighbors", "datastore"}
    write_networks(tmp_path / "again.safetensors", opened.about, opened.weights)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_a_file_of_an_earlier_version_has_networks_that_do_not_read_the_best_candidates(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in initial_weights().items() if not name.endswith("inner_best")}
    write_networks(tmp_path / "earlier.safetensors", ABOUT, weights)
    opened = open_networks(tmp_path / "earlier.safetensors")
    assert opened.weights.keys() == initial_weights().keys()
    assert not any(opened.weights[name].any() for name in opened.weights.keys() - weights.keys())


def changed(
    tensors: Callable[[dict[str, Tensor]], object] = len, head: Callable[[dict[str, Any]], object] = len
) -> Callable[[Path], bytes]:
    """Change the tensors or the metadata of a file."""

    def edit(file: Path) -> bytes:
        weights = load(file.read_bytes())
        with safe_open(file, "pt") as opened:
            metadata = json.loads(opened.metadata()["networks"])
        tensors(weights)
        head(metadata)
        return save(weights, {"networks": json.dumps(metadata)})

    return edit


def number(value: float) -> Callable[[Path], bytes]:
    """Replace a number of the file."""
    return changed(lambda weights: weights["datastore.inner"][3, 5].fill_(value))


def inner(change: Callable[[Tensor], Tensor]) -> Callable[[Path], bytes]:
    """Replace a parameter of the file."""
    return changed(lambda weights: weights.update({"datastore.inner": change(weights["datastore.inner"]).contiguous()}))


DAMAGES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "cut": (lambda file: file.read_bytes()[:-20], "is not a file of networks: "),
    "JSON, as before 0.9.0": (lambda _: b'{"format": "networks of a copy head, version 1"}', "is not a file of networks: "),
    "other tensors": (lambda _: save({"a": torch.zeros(2)}), "does not have the format 'networks of a copy head, version 2'"),
    "no JSON in the metadata": (lambda _: save({"a": torch.zeros(2)}, {"networks": "{"}), "is not a file of networks: "),
    "a list in the metadata": (lambda _: save({"a": torch.zeros(2)}, {"networks": "[]"}), "does not have the format"),
    "another version": (changed(head=lambda head: head.update(format="networks, version 9")), "does not have the format"),
    "no fingerprint": (changed(head=lambda head: head.pop("fingerprint")), "has changed since it was written"),
    "no parameter": (changed(lambda weights: weights.clear()), "every network is missing"),
    "a parameter less": (changed(lambda weights: weights.pop("neighbors.outer")), "neighbors.outer is missing"),
    "a parameter more": (
        changed(lambda weights: weights.update({"gate.weight": torch.ones(1)})), "gate.weight is no parameter; "
    ),
    "a row less": (
        inner(lambda inner: inner[1:]),
        "datastore.inner is torch.float32 [15, 98]; it must be finite float32 [16, 98]",
    ),
    "short rows": (inner(lambda inner: inner[:, 1:]), "datastore.inner is torch.float32 [16, 97]; it must be"),
    "another type": (inner(lambda inner: inner.double()), "datastore.inner is torch.float64 [16, 98]; it must be"),
    "integers": (inner(lambda inner: inner.int()), "datastore.inner is torch.int32 [16, 98]; it must be"),
    "NaN": (number(float("nan")), "datastore.inner is torch.float32 [16, 98], not all finite; it must be"),
    "infinity": (number(float("-inf")), "datastore.inner is torch.float32 [16, 98], not all finite; it must be"),
    "another number": (number(0.123), "has changed since it was written"),
    "another key": (changed(head=lambda head: head["model"].update(path="other")), "has changed since it was written"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_what_is_accepted(file: Path, damage: str) -> None:
    edit, words = DAMAGES[damage]
    file.write_bytes(edit(file))
    with pytest.raises(InputError) as raised:
        open_networks(file)
    assert str(raised.value).startswith(str(file))
    assert words in str(raised.value)
    assert "`retro add-retrieval MODEL --datastore DATASTORE --output FILE.safetensors`" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(InputError, match=rf"{path} is not a file of networks: .* Accepted is a safetensors file"):
            open_networks(path)
        assert not has_networks(path)


def test_networks_in_json_are_refused_with_the_command_that_makes_them_again(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"format": "networks of a copy head, version 1"}')
    with pytest.raises(InputError, match=r"old\.json is neither a checkpoint .*`retro add-retrieval`"):
        open_checkpoint(old)
