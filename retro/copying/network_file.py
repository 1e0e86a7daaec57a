"""The networks of a copy head as a JSON file: those that the package comes with, and those of `retro add-retrieval`.

    {
     "format": "networks of a copy head, version 1",
     "model": …,                                     what they were fitted to: other keys in each file
     "fingerprint": "…",                             of all other keys
     "networks": {
      "datastore.inner": [
       [0.1, -0.25, …],                              a row of numbers for each row of the parameter
       …

A number has the digits that tell it from other float32 numbers, so it is read as the same number to the bit.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.store.files import parse_json, write_bytes

SUFFIX = ".json"
FORMAT = "networks of a copy head, version 1"
ACCEPTED = (
    "Accepted is a JSON file of this version, which `retro add-retrieval MODEL --datastore DATASTORE --output FILE.json` makes "
    "for a model of transformers."
)
_INFINITE = (
    2.0**128 - 2.0**103
)  # rounded to float32; the shortest digits of its largest number are a little larger than it

Shapes = Mapping[str, tuple[int, ...]]


class NetworkFile(NamedTuple):
    """What a file holds.

    Attributes:
        about: what the networks were fitted to, JSON.
        fingerprint: identifies the file in results.
        weights: of one or more networks, float32 by name.
    """

    about: dict[str, Any]
    fingerprint: str
    weights: dict[str, Tensor]


def write_networks(file: Path, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write networks atomically. Equal networks, with equal keys about them, give equal bytes.

    Args:
        file: to write; its folder is made.
        about: what the networks were fitted to, JSON.
        weights: float32 by name, with one or two dimensions.
    """
    networks = {name: _shortest(tensor) for name, tensor in weights.items()}
    head = {"format": FORMAT, **about, "fingerprint": _fingerprint(about, networks)}
    rows = ",\n".join(f'  "{name}": {_lines(values)}' for name, values in networks.items())
    text = f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "networks": {{\n{rows}\n }}\n}}\n'
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, text.encode(errors="backslashreplace"))


def read_networks(file: Path, shapes: Shapes) -> NetworkFile:
    """Read networks.

    Args:
        file: of `write_networks`.
        shapes: of the parameters of all networks, such as `datastore.inner`. A file has all parameters of a network or
            none.

    Raises:
        InputError: there is no such file, it is not JSON or of another version, lacks a key or a parameter, has another
            one, another shape, something that is not a finite float32 number, or has changed since it was written.
    """
    value = _read_object(file)
    if value.pop("format", None) != FORMAT:
        raise InputError(f'{file} does not begin with "format": {FORMAT!r}. {ACCEPTED}')
    for key, kind in (("fingerprint", str), ("networks", dict)):
        if not isinstance(value.get(key), kind):
            found = f"{key} is {value[key]!r:.50}" if key in value else f"the key {key} is missing"
            raise InputError(f"{file}: {found}. {ACCEPTED}")
    known, networks = value.pop("fingerprint"), value.pop("networks")
    _check_names(file, networks, shapes)
    weights = {name: _tensor(f"{file}: {name}", values, shapes[name]) for name, values in networks.items()}
    if known != _fingerprint(value, networks):
        raise InputError(f"{file} has changed since it was written (fingerprint). {ACCEPTED}")
    return NetworkFile(value, known, weights)


def _fingerprint(about: Mapping[str, Any], networks: dict[str, Any]) -> str:
    return fingerprint([about, networks])


def _shortest(tensor: Tensor) -> list[Any]:
    """The numbers of a tensor, or lists of them, with as few digits as tell them from other float32 numbers."""
    if tensor.dim() > 1:
        return [_shortest(row) for row in tensor]
    return [float(str(number)) for number in tensor.detach().cpu().numpy()]


def _lines(values: list[Any]) -> str:
    """A list as JSON, each list in it on its own line."""
    if not isinstance(values[0], list):
        return json.dumps(values, allow_nan=False)
    rows = ",\n".join(f"   {json.dumps(row, allow_nan=False)}" for row in values)
    return f"[\n{rows}\n  ]"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(f"{file} is not a file. {ACCEPTED}") from error
    if data[7:9] == b"\0{":  # a header of JSON behind its length in 8 bytes
        raise InputError(f"{file} is a safetensors file, as earlier versions wrote for networks. {ACCEPTED}")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}. {ACCEPTED}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} holds no JSON object. {ACCEPTED}")
    return value


def _check_names(file: Path, networks: dict[str, Any], shapes: Shapes) -> None:
    """Raise InputError if there are parameters of no network, or not all of one."""
    if unknown := [name for name in networks if name not in shapes]:
        raise InputError(
            f"{file}: {unknown[0]!r:.50} is no parameter; the parameters are {', '.join(shapes)}. {ACCEPTED}"
        )
    of_network = {name.partition(".")[0] for name in networks}
    missing = [name for name in shapes if name.partition(".")[0] in of_network and name not in networks]
    if missing or not networks:
        raise InputError(f"{file}: {missing[0] if missing else 'every network'} is missing under networks. {ACCEPTED}")


def _tensor(where: str, values: object, shape: tuple[int, ...]) -> Tensor:
    """A parameter; raises InputError if it has another shape, or something in it is not a number."""
    _check_numbers(where, values, shape)
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _check_numbers(where: str, values: object, shape: tuple[int, ...]) -> None:
    size, *inner = shape
    if not isinstance(values, list) or len(values) != size:
        found = f"a list of {len(values)}" if isinstance(values, list) else f"{values!r:.50}"
        raise InputError(
            f"{where} is {found}, it must be a list of {size}{' lists' if inner else ' numbers'}. {ACCEPTED}"
        )
    for position, value in enumerate(values):
        if inner:
            _check_numbers(f"{where}[{position}]", value, tuple(inner))
        elif type(value) not in (int, float) or not abs(value) < _INFINITE:  # NaN is not less either
            raise InputError(f"{where}[{position}] is {value!r:.50}, it must be a finite float32 number. {ACCEPTED}")
