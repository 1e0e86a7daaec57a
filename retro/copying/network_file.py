"""The networks of a copy head as a safetensors file: those that the package comes with, and those of
`retro add-retrieval`.

datastore.inner, datastore.inner_bias …    parameters by name, float32
metadata, one entry `networks`:            JSON
    format                                 `FORMAT`
    fingerprint                            of all other keys and all parameters
    model, datastore …                     what they were fitted to: other keys in each file
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from indexing.store.files import parse_json, write_bytes

FORMAT = "networks of a copy head, version 2"
LATER = ".inner_best"
"""End of the names of parameters that 0.9.0 did not have. In what it wrote they are 0."""
ACCEPTED = (
    "Accepted is a safetensors file with networks, which `retro add-retrieval MODEL --datastore DATASTORE --output FILE.safetensors` "
    "writes for a model of transformers."
)
_KEY = "networks"  # a single entry, because safetensors writes several in any order

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
        weights: float32 by name.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    head = {**about, "format": FORMAT, "fingerprint": _fingerprint(about, stored)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, save(stored, {_KEY: json.dumps(head)}))


def has_networks(file: Path) -> bool:
    """Whether a path is a file of `write_networks`, by its metadata."""
    try:
        with safe_open(file, "pt") as opened:
            return _KEY in (opened.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read_networks(file: Path, shapes: Shapes) -> NetworkFile:
    """Read networks.

    Args:
        file: of `write_networks`.
        shapes: of the parameters of all networks, such as `datastore.inner`. A file has all parameters of a network or
            none.

    Raises:
        InputError: there is no such file, it is not a safetensors file of this version, lacks a parameter, has another
            one, another shape or type, something that is not a finite number, or has changed since it was written.
    """
    try:
        with safe_open(file, "pt") as opened:
            head = parse_json((opened.metadata() or {}).get(_KEY, "{}"))
            weights = {name: opened.get_tensor(name) for name in shapes if name in opened.keys()}  # noqa: SIM118
            unknown = [name for name in opened.keys() if name not in shapes]  # noqa: SIM118  (it is no dictionary)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{file} is not a file of networks: {error}. {ACCEPTED}") from error
    if not isinstance(head, dict) or head.pop("format", None) != FORMAT:
        raise InputError(f"{file} does not have the format {FORMAT!r} in its metadata. {ACCEPTED}")
    if unknown:
        raise InputError(f"{file}: {unknown[0]} is no parameter; the parameters are {', '.join(shapes)}. {ACCEPTED}")
    networks = {name.partition(".")[0] for name in weights}
    of_file = {name: shape for name, shape in shapes.items() if name.partition(".")[0] in networks}
    missing = [name for name in of_file if name not in weights and not name.endswith(LATER)]
    if missing or not networks:
        raise InputError(f"{file}: {missing[0] if missing else 'every network'} is missing. {ACCEPTED}")
    for name, tensor in weights.items():
        if tensor.shape != shapes[name] or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            found = f"{tensor.dtype} {list(tensor.shape)}{'' if tensor.isfinite().all() else ', not all finite'}"
            raise InputError(f"{file}: {name} is {found}; it must be finite float32 {list(shapes[name])}. {ACCEPTED}")
    known = head.pop("fingerprint", None)
    if known != _fingerprint(head, weights):
        raise InputError(f"{file} has changed since it was written (fingerprint). {ACCEPTED}")
    later = {name: torch.zeros(shape, device="cpu") for name, shape in of_file.items() if name not in weights}
    return NetworkFile(head, known, weights | later)


def _fingerprint(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    return fingerprint([about, {name: tensor.tolist() for name, tensor in weights.items()}])
