"""Tensors that several processes hold, written by all of them: `torch.distributed.checkpoint` into safetensors files.

Which process writes what of a tensor that several hold, whole or a shard of it, is planned by PyTorch: everything once,
about as much by each. Its own writers are not used: one pickles, the other makes files whose bytes differ from time to
time, and holds all of a file in memory twice.
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
    """Write this process's part of plain tensors and DTensors on the CPU; returns when every process has written its own.

    Args:
        tensors: by name; processes may hold other names. A plain tensor that several hold is the same in all of them.
        file: `model.safetensors` stands for `model-00001-of-00004.safetensors` …; one process writes it as it is.
        group: all of the processes; nothing else uses it meanwhile.

    Raises:
        OSError: no process goes on if one has failed: its error is raised in all of them.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        # Who writes what depends on the order, which is another one after a resume.
        save(dict(sorted(tensors.items())), storage_writer=_PartWriter(file), planner=planner, process_group=group)
    except CheckpointException as error:
        first = min(error.failures)
        raise error.failures[first][0] from error


class _PartWriter(StorageWriter):
    """What `torch.distributed.checkpoint.save` calls, in this order."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.file.parent.is_dir():
            raise InputError(
                f"{self.file.parent} is not there: `run` must lie on a file system that all processes share."
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
        """Nothing: the files' headers say everything."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True
