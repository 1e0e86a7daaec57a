"""Write sharded tensors by all processes: `torch.distributed.checkpoint` with safetensors files.

PyTorch plans which process writes which shard, so that each is written once and the work is even. Its own writers are
not used: one pickles, and the other writes files whose bytes differ between runs, and holds each file in memory twice.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
    save,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from indexing.store.errors import InputError
from retro.checkpoints.tensor_files import OFFSETS, save_tensors


def save_parts(tensors: dict[str, Tensor], file: Path, group: dist.ProcessGroup) -> None:
    """Write this process's part of plain tensors and DTensors on the CPU. Returns when every process has written its
    part.

    Args:
        tensors: by name; names may differ between processes. A plain tensor is the same in all processes that have it.
        file: for `model.safetensors`, several processes write `model-00001-of-00004.safetensors` …
        group: all processes; nothing else may use it meanwhile.

    Raises:
        OSError: an error of one process is raised in all of them.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        # The plan depends on the order of the names, which may differ after a resume.
        save(dict(sorted(tensors.items())), storage_writer=_PartWriter(file), planner=planner, process_group=group)
    except CheckpointException as error:
        first = min(error.failures)
        raise error.failures[first][0] from error


class _PartWriter(StorageWriter):
    """The methods that `torch.distributed.checkpoint.save` calls, in this order."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.file.parent.is_dir():
            raise InputError(
                f"{self.file.parent} does not exist: `run` must be on a file system that all processes share."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=(number, len(plans))) for number, plan in enumerate(plans, start=1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        number, count = plan.storage_data
        file = self.file.with_stem(f"{self.file.stem}-{number:05d}-of-{count:05d}") if count > 1 else self.file
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor), name
            assert name not in tensors, name  # a DTensor's local part is one box
            tensors[name], offsets[name] = data, {"saved_offsets": list(item.index.offset or ())}
        save_tensors(tensors, file, {OFFSETS: json.dumps(offsets, sort_keys=True)})
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the headers of the files have all metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True
