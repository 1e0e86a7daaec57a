"""Tensors in safetensors files, whole or sharded, read into tensors that are whole or sharded over processes.

    model.safetensors                                      written by one process
    model-00001-of-00004.safetensors … 00004-of-00004      written by four, each its shards (retro/checkpoints/sharded_writer.py)

    headers ─ index ─ StoredTensor: shards of a tensor and their files ─┐
    live tensors, plain or DTensors ────────────────────────────────────┴ plan ─ read what this process needs ─ copy

The plan is that of `torch.distributed.checkpoint`, which knows DTensors of every mesh. No process waits for another.
A part's header has PyTorch's entry with the offsets of its tensors, so `HuggingFaceStorageReader` reads these files too.
"""

import errno
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
class TensorShard:
    """A box of a tensor in one file.

    Attributes:
        offsets: of the box in the whole tensor.
        shape: of the box.
        file: that holds the box.
        name: of the tensor in the file; a caller of `index` can give the whole tensor another name.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    name: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one or more files.

    Attributes:
        shape: of the whole tensor.
        dtype: as written.
        shards: boxes that together make up the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    shards: tuple[TensorShard, ...]


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
        code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has no attribute with the error's number
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(file)) from error
    file.chmod(permissions)


def index(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors in some files, by name. Only headers are read."""
    shards: dict[str, list[TensorShard]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            offsets = json.loads((opened.metadata() or {}).get(OFFSETS, "{}"))
            for key in opened.keys():  # noqa: SIM118  (it is no dictionary)
                header = opened.get_slice(key)
                shape = tuple(header.get_shape())
                offset = tuple(offsets[key]["saved_offsets"]) if key in offsets else (0,) * len(shape)
                shards[key].append(TensorShard(offset, shape, file, key))
                dtypes[key] = (header[:0] if shape else header[()]).dtype
    return {name: StoredTensor(_whole_shape(parts), dtypes[name], tuple(parts)) for name, parts in shards.items()}


def _whole_shape(shards: list[TensorShard]) -> torch.Size:
    """The shape of the tensor that shards make up."""
    ends = ([start + size for start, size in zip(shard.offsets, shard.shape, strict=True)] for shard in shards)
    return torch.Size(max(sizes) for sizes in zip(*ends, strict=True))


@torch.no_grad()
def fill(tensors: dict[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Copy stored tensors into live ones, plain or DTensors; of each only what this process holds is read.

    Raises:
        InputError: one is not there, or has another shape.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem

    _check(tensors, stored)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _described({name: stored[name] for name in tensors}))
    by_file: dict[Path, list[tuple[str, ReadItem]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        assert item.storage_index.index is not None  # set by the plan: the number of the shard
        shard = stored[item.storage_index.fqn].shards[item.storage_index.index]
        by_file[shard.file].append((shard.name, item))
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as opened:
            for name, item in wanted:
                box = tuple(
                    slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True)
                )
                planner.resolve_tensor(item).copy_(opened.get_slice(name)[box])


def _check(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    where = next((str(one.shards[0].file.parent) for one in stored.values()), "the checkpoint")
    for name, tensor in tensors.items():
        if name not in stored:
            raise InputError(
                f"{where} has no tensor {name}, which this model has: it is the checkpoint of another model."
            )
        if stored[name].shape != tensor.shape:
            shapes = f"the shape {list(stored[name].shape)}, here it has {list(tensor.shape)}"
            raise InputError(f"{where}: {name} has {shapes}: it is the checkpoint of another model.")
        assert not tensor.is_meta, name  # nothing could be copied into it


def _described(stored: Mapping[str, StoredTensor]) -> "Metadata":
    """The stored tensors in the terms of `torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.metadata import TensorProperties

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=one.dtype),
                one.shape,
                [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.shape)) for shard in one.shards],
            )
            for name, one in stored.items()
        }
    )


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Stored tensors, whole, on the CPU."""
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    fill(tensors, stored)
    return tensors
