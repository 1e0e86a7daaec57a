"""The mesh of processes: pipeline × data × tensor."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from indexing.store.errors import InputError
from retro.parallel.settings import ParallelSettings


class Processes:
    """The processes of a run, in a mesh, seen from this one. A single process needs no process group."""

    def __init__(self, settings: ParallelSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        others = settings.pipeline * settings.tensor
        self.data = settings.data or max(1, self.count // others)
        if self.data * others != self.count:
            raise InputError(
                f"parallel: pipeline {settings.pipeline} × data {settings.data or 'any'} × tensor {settings.tensor} do not make "
                f"{self.count} process{'es' * (self.count > 1)}. Start that many with torchrun, or set parallel.data = 0."
            )
        if self.data % settings.expert:
            raise InputError(
                f"parallel.expert = {settings.expert}: must divide the number of data-parallel processes, {self.data}."
            )
        self._meshes: dict[str, DeviceMesh] = {}
        self.data_rank = 0
        if dist.is_initialized():
            shape = (settings.pipeline, self.data // settings.expert, settings.expert, settings.tensor)
            names = ("pipeline", "replica", "expert", "tensor")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            self._meshes = {name: mesh[name] for name in names}
            self._meshes["data"] = mesh["replica", "expert"]._flatten("data")
            self.data_rank = self._meshes["data"].get_local_rank()

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Number of processes along each dimension of the mesh; empty for a single process."""
        dims = {"pipeline": self.settings.pipeline, "data": self.data, "tensor": self.settings.tensor}
        return dims if self.count > 1 else {}

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and makes decisions."""
        return self.rank == 0

    def along(self, name: str) -> DeviceMesh | None:
        """The mesh of the processes along a dimension, this one included; None if it is the only one."""
        mesh = self._meshes.get(name)
        return mesh if mesh is not None and mesh.size() > 1 else None

    def mesh(self, name: str) -> DeviceMesh:
        """As `along`, but also for a dimension of one process. Needs a process group."""
        return self._meshes[name]

    def rows(self, batch_size: int) -> range:
        """The rows of a batch that this process computes.

        Raises:
            InputError: the batch size is not divisible.
        """
        count, rest = divmod(batch_size, self.data)
        if rest:
            raise InputError(
                f"train.batch_size = {batch_size}: must be a multiple of the {self.data} data-parallel processes."
            )
        return range(self.data_rank * count, (self.data_rank + 1) * count)

    def sum(self, value: Tensor, *names: str) -> Tensor:
        """Sum a value over the processes along some mesh dimensions, all by default, in place."""
        for name in names or ("pipeline", "data", "tensor"):
            if (mesh := self.along(name)) is not None:
                dist.all_reduce(value, group=mesh.get_group())
        return value

    def gathered(self, losses: Tensor) -> Tensor:
        """Gather the losses of every token of a batch [B, T] from each process's [B / data, T / tensor]."""
        for name, dim in (("tensor", 1), ("data", 0)):
            if (mesh := self.along(name)) is not None:
                parts = [torch.empty_like(losses) for _ in range(mesh.size())]
                dist.all_gather(parts, losses.contiguous(), group=mesh.get_group())
                losses = torch.cat(parts, dim)
        return losses

    def merged(self, metrics: dict[str, float]) -> dict[str, float]:
        """Merge the metrics of all stages of a pipeline."""
        if (mesh := self.along("pipeline")) is None:
            return metrics
        gathered: list[dict[str, float]] = [{}] * mesh.size()
        dist.all_gather_object(gathered, metrics, group=mesh.get_group())
        return {name: value for stage in reversed(gathered) for name, value in stage.items()}

    def largest(self, value: Tensor) -> Tensor:
        """The maximum of a value over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value
