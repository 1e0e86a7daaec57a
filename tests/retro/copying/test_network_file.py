"""Networks of a copy head in a JSON file: the same numbers to the bit, and nothing else is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.copying.head import initial_weights, open_networks
from retro.copying.network_file import read_networks, write_networks

ABOUT = {"model": {"path": "模型", "family": "mamba"}, "fit": {"tokens": 600, "loss_off": 3.1415926535}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Networks of two of the three sources."""
    weights = {name: tensor for name, tensor in initial_weights().items() if not name.startswith("context")}
    write_networks(tmp_path / "new" / "networks.json", ABOUT, weights)
    return tmp_path / "new" / "networks.json"


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.numpy().view(np.int32)


def test_every_float32_number_is_read_as_it_was(tmp_path: Path) -> None:
    any_bits = np.random.default_rng(0).integers(0, 2**32, (300, 1000), dtype=np.uint32).view(np.float32)
    numbers = torch.from_numpy(np.where(np.isfinite(any_bits), any_bits, np.float32(-0.0)))
    limits = torch.finfo(torch.float32)
    edges = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal * 2**-23, 0.1])
    written = {"a.inner": numbers, "a.edges": edges}
    write_networks(tmp_path / "a.json", {}, written)
    read = read_networks(tmp_path / "a.json", {name: tuple(tensor.shape) for name, tensor in written.items()})
    assert all(np.array_equal(bits(read.weights[name]), bits(tensor)) for name, tensor in written.items())


def test_a_file_is_read_as_it_was_written(file: Path, tmp_path: Path) -> None:
    opened = open_networks(file)
    assert opened.about == ABOUT
    assert all(torch.equal(tensor, initial_weights()[name]) for name, tensor in opened.weights.items())
    assert {name.partition(".")[0] for name in opened.weights} == {"neighbors", "datastore"}
    write_networks(tmp_path / "again.json", opened.about, opened.weights)
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


def test_what_they_were_fitted_to_is_at_the_top_in_plain_text(file: Path) -> None:
    top = file.read_text().partition('"networks": {')[0].splitlines()
    assert len(top) < 20
    assert '  "path": "模型",' in top
    assert file.stat().st_size < 50_000


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Change the JSON in a file."""

    def edit(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return edit


def number(value: object) -> Callable[[bytes], bytes]:
    """Replace a number of the file."""
    return changed(lambda file: file["networks"]["datastore.inner"][3].__setitem__(5, value))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no JSON": (lambda data: data[:-20], "is not JSON: "),
    "a list": (lambda _: b"[]", "holds no JSON object"),
    "other JSON": (lambda _: b'{"model_type": "mamba"}', 'does not begin with "format": \'networks of a copy head, version 1\''),
    "another version": (changed(lambda file: file.update(format="networks, version 9")), "does not begin with"),
    "safetensors": (lambda _: b"\x38\0\0\0\0\0\0\0{}", "is a safetensors file, as earlier versions wrote"),
    "no fingerprint": (changed(lambda file: file.pop("fingerprint")), "the key fingerprint is missing"),
    "no networks": (changed(lambda file: file.pop("networks")), "the key networks is missing"),
    "no parameter": (changed(lambda file: file["networks"].clear()), "every network is missing under networks"),
    "a parameter less": (
        changed(lambda file: file["networks"].pop("neighbors.outer")), "neighbors.outer is missing under networks"
    ),
    "a parameter more": (
        changed(lambda file: file["networks"].update({"gate.weight": [1.0]})), "'gate.weight' is no parameter; "
    ),
    "a row less": (
        changed(lambda file: file["networks"]["datastore.inner"].pop()),
        "datastore.inner is a list of 15, it must be a list of 16 lists",
    ),
    "a short row": (
        changed(lambda file: file["networks"]["datastore.inner"][3].pop()),
        "datastore.inner[3] is a list of 97, it must be a list of 98 numbers",
    ),
    "no list": (changed(lambda file: file["networks"].update({"datastore.outer": 0.5})), "datastore.outer is 0.5, it must be"),
    "NaN": (number(float("nan")), "datastore.inner[3][5] is nan, it must be a finite float32 number"),
    "infinity": (number(float("inf")), "datastore.inner[3][5] is inf, it must be"),
    "a double": (number(1e39), "datastore.inner[3][5] is 1e+39, it must be"),
    "a string": (number("0.1"), "datastore.inner[3][5] is '0.1', it must be"),
    "a boolean": (number(True), "datastore.inner[3][5] is True, it must be"),
    "another number": (number(0.123), "has changed since it was written"),
    "another key": (changed(lambda file: file["model"].update(path="other")), "has changed since it was written"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_what_is_accepted(file: Path, damage: str) -> None:
    edit, words = DAMAGES[damage]
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(InputError) as raised:
        open_networks(file)
    assert str(raised.value).startswith(str(file))
    assert words in str(raised.value)
    assert "`retro add-retrieval MODEL --datastore DATASTORE --output FILE.json`" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=rf"{path} is not a file\. Accepted is a JSON file"):
            open_networks(path)
