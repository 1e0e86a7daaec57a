"""Tensors in safetensors files, whole or in parts, read into tensors that are whole or shared out among processes.

    model.safetensors                                      written by one process
    model-00001-of-00004.safetensors … 00004-of-00004      written by four, each its part (retro/checkpoints/sharded_writer.py)

    headers ─ index ─ Stored: what pieces of a tensor lie where ─┐
    live tensors, plain or DTensors ─────────────────────────────┴ plan ─ read what this process needs ─ copy in

The plan is that of `torch.distributed.checkpoint`, which knows DTensors of every mesh. No process waits for another.
A part's header has PyTorch's entry with the offsets of its tensors, so `HuggingFaceStorageReader` reads these files too.
"""

import errno
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from indexing.store.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

OFFSETS = "DCP_SHARDING_INFO"
"""The entry of a part's metadata: JSON, `saved_offsets` of each tensor in the whole one."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where it lies.

    Attributes:
        offsets: of the box in the whole tensor.
        shape: of the box.
        file: holds it,
        key: in the tensor of this name,
        start: from here on.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    key: str
    start: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in files.

    Attributes:
        shape: of the whole.
        dtype: as it was written.
        pieces: that make it up.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """`safetensors.torch.save_file`, with the permissions of any new file instead of the owner's alone.

    Raises:
        OSError: a full disk, a folder that is not there …
    """
    file.touch()
    permissions = file.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from error
    file.chmod(permissions)


def index(files: Iterable[Path]) -> dict[str, Stored]:
    """What lies in files, by today's names; only their headers are read."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            offsets = json.loads((opened.metadata() or {}).get(OFFSETS, "{}"))
            for key in opened.keys():  # noqa: SIM118  (it is no dictionary)
                header = opened.get_slice(key)
                shape = tuple(header.get_shape())
                offset = tuple(offsets[key]["saved_offsets"]) if key in offsets else (0,) * len(shape)
                for name, start, part in _todays(key, shape):
                    pieces[name].append(Piece(offset, part, file, key, start))
                    dtypes[name] = (header[:0] if shape else header[()]).dtype
    return {name: Stored(_whole(found), dtypes[name], tuple(found)) for name, found in pieces.items()}


def _whole(pieces: list[Piece]) -> torch.Size:
    """The shape of the tensor that pieces make up."""
    ends = ([start + size for start, size in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces)
    return torch.Size(max(sizes) for sizes in zip(*ends, strict=True))


def _todays(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """The tensors of today that a stored one holds: name, where it starts, shape.

    Attentions once had one matrix for keys and values, keys first, and their parameters by head had shorter names.
    """
    start = (0,) * len(shape)
    if key.endswith(".key_value.weight"):
        half = shape and (shape[0] // 2, *shape[1:])  # the optimizer's `step` is one number
        yield key.replace("key_value", "key"), start, half
        yield key.replace("key_value", "value"), half and (half[0], *start[1:]), half
    elif key.endswith((".smear", ".content_bias", ".distance_bias")):
        yield f"{key}.weight", start, shape
    else:
        yield key, start, shape


@torch.no_grad()
def fill(tensors: dict[str, Tensor], stored: Mapping[str, Stored]) -> None:
    """Copy stored tensors into live ones, plain or DTensors; of each only what this process holds is read.

    Raises:
        InputError: one is not there, or has another shape.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem

    _check(tensors, stored)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _described({name: stored[name] for name in tensors}))
    by_file: dict[Path, list[tuple[Piece, ReadItem]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        assert item.storage_index.index is not None  # set by the plan: the piece's number
        piece = stored[item.storage_index.fqn].pieces[item.storage_index.index]
        by_file[piece.file].append((piece, item))
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as opened:
            for piece, item in wanted:
                firsts = (first + offset for first, offset in zip(piece.start, item.storage_offsets, strict=True))
                box = tuple(slice(first, first + size) for first, size in zip(firsts, item.lengths, strict=True))
                planner.resolve_tensor(item).copy_(opened.get_slice(piece.key)[box])


def _check(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    where = next((str(one.pieces[0].file.parent) for one in stored.values()), "the checkpoint")
    for name, tensor in tensors.items():
        if name not in stored:
            raise InputError(
                f"{where} has no tensor {name}, which this model has: it is the checkpoint of another one."
            )
        if stored[name].shape != tensor.shape:
            shapes = f"the shape {list(stored[name].shape)}, here it has {list(tensor.shape)}"
            raise InputError(f"{where}: {name} has {shapes}: it is the checkpoint of another model.")
        assert not tensor.is_meta, name  # nothing could be copied into it


def _described(stored: Mapping[str, Stored]) -> "Metadata":
    """As `torch.distributed.checkpoint` speaks of it."""
    from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.metadata import TensorProperties

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=one.dtype),
                one.shape,
                [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in one.pieces],
            )
            for name, one in stored.items()
        }
    )


def read_tensors(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Stored tensors, whole, on the CPU."""
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    fill(tensors, stored)
    return tensors
