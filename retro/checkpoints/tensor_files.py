"""Tensors in safetensors files, whole or sharded, read into tensors that are whole or sharded over processes.

    model.safetensors                                      written by one process
    model-00001-of-00004.safetensors … 00004-of-00004      written by four, each its shards (retro/checkpoints/sharded_writer.py)

    headers ─ index ─ StoredTensor: shards of a tensor and their files ─┐
    live tensors, plain or DTensors ────────────────────────────────────┴ plan ─ read what this process needs ─ copy

The plan is that of `torch.distributed.checkpoint`, which knows DTensors of every mesh. No process waits for another. A
part's header has PyTorch's entry with the offsets of its tensors, so `HuggingFaceStorageReader` reads these files too.
"""

import errno
import math
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
from indexing.store.files import parse_json
from retro.copying.network_file import LATER
from retro.model_settings import ModelSettings

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
            offsets = _offsets(file, opened.metadata() or {})
            for key in opened.keys():  # noqa: SIM118  (it is no dictionary)
                header = opened.get_slice(key)
                shape = tuple(header.get_shape())
                offset = offsets.get(key, (0,) * len(shape))
                shards[key].append(TensorShard(offset, shape, file, key))
                dtypes[key] = (header[:0] if shape else header[()]).dtype
    return {name: StoredTensor(_whole_shape(parts), dtypes[name], tuple(parts)) for name, parts in shards.items()}


def _offsets(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The offsets of the tensors of a part, by name; of a whole file there are none."""
    try:
        stored = parse_json(metadata.get(OFFSETS, "{}"))
        return {name: tuple(map(int, entry["saved_offsets"])) for name, entry in stored.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{file}: its metadata {OFFSETS} cannot be read ({error}). Copy the checkpoint again."
        ) from error


def _whole_shape(shards: list[TensorShard]) -> torch.Size:
    """The shape of the tensor that shards make up.

    Raises:
        InputError: the shards do not fill it, so that it could claim any size.
    """
    ends = [[start + size for start, size in zip(shard.offsets, shard.shape, strict=False)] for shard in shards]
    whole = tuple(max(sizes) for sizes in zip(*ends, strict=False))
    elements = sum(math.prod(shard.shape) for shard in shards)
    if elements != math.prod(whole) or any(len(shard.shape) != len(whole) for shard in shards):
        raise InputError(
            f"{shards[0].file}: the parts of {shards[0].name} do not fit together. Copy the checkpoint again."
        )
    return torch.Size(whole)


def check_size(settings: ModelSettings, num_tensors: int, num_elements: int, where: Path | str) -> None:
    """Refuse settings of a model that is larger than its files, before anything is made in the sizes that they claim.

    Args:
        settings: what a header claims.
        num_tensors: tensors in the files.
        num_elements: numbers that the files hold at most, such as their bytes.
        where: the file with the settings, for the message.

    Raises:
        InputError: there are fewer tensors than layers, or fewer elements than in the embedding, queries and
            feed-forward blocks.
    """
    attention = settings.attention
    rows = settings.vocab_size + (attention.max_positions if attention.positions == "learned" else 0)
    elements, layers = rows * settings.d_model + attention.smeared_tokens, 0
    for stack in (settings, settings.encoder) if settings.retrieval.cca_layers else (settings,):
        heads = settings.attention if stack is settings else settings.encoder
        layers += stack.num_layers
        elements += stack.num_layers * stack.d_model * (heads.num_heads * heads.head_dim + stack.d_ffw)
    if layers > num_tensors or elements > num_elements:
        raise InputError(
            f"{where}: a model of {layers:,} layers and width {settings.d_model:,} has at least {elements:,} parameters, but its "
            f"files hold {num_tensors:,} tensors with at most {num_elements:,}. The settings belong to another model."
        )


@torch.no_grad()
def fill(tensors: dict[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Copy stored tensors into live ones, plain or DTensors; of each only what this process holds is read.

    Those that are `absent_in_earlier_versions` become 0.

    Raises:
        InputError: one is not there, or has another shape.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem

    check_shapes(tensors, stored)
    assert not any(tensor.is_meta for tensor in tensors.values())  # nothing could be copied into them
    for name in [name for name in tensors if absent_in_earlier_versions(name, stored)]:
        tensors[name].zero_()
    tensors = {name: tensor for name, tensor in tensors.items() if name in stored}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _described({name: stored[name] for name in tensors}))
    by_file: dict[Path, list[tuple[str, ReadItem]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        assert item.storage_index.index is not None  # set by the plan: the number of the shard
        shard = stored[item.storage_index.fqn].shards[item.storage_index.index]
        by_file[shard.file].append((shard.name, item))
    for file, items in by_file.items():
        with safe_open(file, "pt") as opened:
            for name, item in items:
                box = tuple(
                    slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True)
                )
                planner.resolve_tensor(item).copy_(opened.get_slice(name)[box])


def check_shapes(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Raise InputError if a tensor is not stored, or has another shape."""
    where = next((str(one.shards[0].file.parent) for one in stored.values()), "the checkpoint")
    for name, tensor in tensors.items():
        if absent_in_earlier_versions(name, stored):
            continue
        if name not in stored:
            raise InputError(
                f"{where} has no tensor {name}, which this model has: it is the checkpoint of another model."
            )
        if stored[name].shape != tensor.shape:
            shapes = f"the shape {list(stored[name].shape)}, here it has {list(tensor.shape)}"
            raise InputError(f"{where}: {name} has {shapes}: it is the checkpoint of another model.")


def absent_in_earlier_versions(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether stored networks of a copy head lack a parameter since they were written by an earlier version."""
    return name.endswith(LATER) and name not in stored and name.replace(LATER, ".inner") in stored


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
