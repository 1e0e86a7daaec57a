"""Training over many devices: how processes share a model and its batches, with PyTorch's own parts.

    processes  =  pipeline × data × tensor             one torch process for each device, numbered so that tensor varies fastest
                             data = replica × expert

    tensor     heads and feed-forward features of every layer are divided; between blocks the sequence is (sequence parallel)
    pipeline   layers are divided (`pipeline.py`)
    data       sequences of a batch are divided, and with ZeRO (FSDP2) what is kept of optimizer, gradients and parameters
    expert     the data-parallel processes that differ in this way share the experts (`experts.py`)
    checkpointing   activations are computed twice instead of kept

What a step computes is the same however it is shared out: the mean over the labels of the whole batch. The model knows nothing
of it: everything here works on its modules from outside.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from indexing.store.errors import InputError
from retro.model.attention import Attention, PerHead
from retro.model.mixture_of_experts import Experts, share_experts
from retro.model.retro import ChunkedCrossAttention, Retro
from retro.parallel.settings import Checkpointing, ParallelSettings, divided


class Processes:
    """The processes of a run, and this one's place among them. One that is alone needs no process group."""

    def __init__(self, settings: ParallelSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        others = settings.pipeline * settings.tensor
        self.data = settings.data or max(1, self.count // others)
        if self.data * others != self.count:
            raise InputError(
                f"parallel: pipeline {settings.pipeline} × data {settings.data or 'any'} × tensor {settings.tensor} do not make "
                f"{self.count} process{'es' * (self.count > 1)}; start as many with torchrun, or set parallel.data = 0."
            )
        if self.data % settings.expert:
            raise InputError(
                f"parallel.expert = {settings.expert}: must divide the number of data-parallel processes, {self.data}."
            )
        self._meshes: dict[str, DeviceMesh] = {}
        self.data_rank = 0
        if self.count > 1:
            shape = (settings.pipeline, self.data // settings.expert, settings.expert, settings.tensor)
            names = ("pipeline", "replica", "expert", "tensor")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            self._meshes = {name: mesh[name] for name in names}
            self._meshes["data"] = mesh["replica", "expert"]._flatten("data")
            self.data_rank = self._meshes["data"].get_local_rank()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: logs, reports, decides."""
        return self.rank == 0

    def along(self, name: str) -> DeviceMesh | None:
        """The processes that differ from this one in one way alone; None where it is the only one."""
        mesh = self._meshes.get(name)
        return mesh if mesh is not None and mesh.size() > 1 else None

    def mesh(self, name: str) -> DeviceMesh:
        """As `along`, also of one process; for several processes only."""
        return self._meshes[name]

    def rows(self, batch_size: int) -> range:
        """Which sequences of a batch are this process's.

        Raises:
            InputError: the batch cannot be divided.
        """
        share, rest = divmod(batch_size, self.data)
        if rest:
            raise InputError(
                f"train.batch_size = {batch_size}: must be a multiple of the {self.data} data-parallel processes."
            )
        return range(self.data_rank * share, (self.data_rank + 1) * share)

    def sum(self, value: Tensor, *names: str) -> Tensor:
        """A value summed over processes that differ in the ways named; in all by default."""
        for name in names or ("pipeline", "data", "tensor"):
            if (mesh := self.along(name)) is not None:
                dist.all_reduce(value, group=mesh.get_group())
        return value

    def gathered(self, losses: Tensor) -> Tensor:
        """Losses of every token of a batch [B, T] from each process's [B / data, T / tensor]."""
        for name, dim in (("tensor", 1), ("data", 0)):
            if (mesh := self.along(name)) is not None:
                parts = [torch.empty_like(losses) for _ in range(mesh.size())]
                dist.all_gather(parts, losses.contiguous(), group=mesh.get_group())
                losses = torch.cat(parts, dim)
        return losses

    def merged(self, figures: dict[str, float]) -> dict[str, float]:
        """Figures by name of all stages of a pipeline."""
        if (mesh := self.along("pipeline")) is None:
            return figures
        found: list[dict[str, float]] = [{}] * mesh.size()
        dist.all_gather_object(found, figures, group=mesh.get_group())
        return {name: value for each in reversed(found) for name, value in each.items()}

    def largest(self, value: Tensor) -> Tensor:
        """The largest of all processes' values, in place."""
        if self.count > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value


# ---------------------------------------------------------------------------------------------------- tensor parallel


def _divide_layers(model: Retro, mesh: DeviceMesh) -> None:
    """Divide every block of decoder and encoder; the decoder's stream is divided by token between them.

    Embeddings, and what the encoder does between its blocks, every process computes in full.
    """
    for block in _blocks(model.encoder) if hasattr(model, "encoder") else ():
        _divide_block(block.block, mesh, Replicate(), local=True)
    for name, residual in _named_blocks(model):
        parallelize_module(residual.norm, mesh, SequenceParallel(use_local_output=False))
        if isinstance(residual.block, ChunkedCrossAttention):
            # It cuts windows out of the whole sequence, of any tokens: what it adds up is put in its places, then divided.
            _divide_block(residual.block.attention, mesh, Partial(), local=True)
            residual.block.register_forward_pre_hook(partial(_whole, mesh, True))
            residual.block.register_forward_hook(partial(_divided, mesh))
        else:
            _divide_block(residual.block, mesh, Shard(1), local=False)
            residual.block.register_forward_pre_hook(partial(_whole, mesh, False))
        if name in ("attention.0", "feed_forward.0"):
            residual.register_forward_pre_hook(partial(_first, mesh), with_kwargs=True)
    if model.norm is not None:  # the last stage of a pipeline has it
        parallelize_module(model.norm, mesh, SequenceParallel(use_local_output=False))
    if hasattr(model, "encoder"):
        model.encoder.register_forward_pre_hook(partial(_encoder_input, mesh))


def _divide_block(block: nn.Module, mesh: DeviceMesh, output: Any, local: bool) -> None:
    """Matrices into heads and features by rows, the one back into the stream by columns, what heads have by head."""
    if isinstance(block, Attention):
        block.first_head = mesh.get_local_rank() * (block.num_heads // mesh.size())
    for name, module in block.named_modules():
        if isinstance(module, nn.RMSNorm):  # of queries and keys [N, S, H, C], the same for all heads
            parallelize_module(module, mesh, SequenceParallel(sequence_dim=2, use_local_output=True))
        elif isinstance(module, PerHead):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
            module.register_forward_hook(lambda _module, _inputs, weight: weight.to_local())
        elif isinstance(module, nn.Linear):
            into_stream = name.endswith("out")
            style = RowwiseParallel(output_layouts=output, use_local_output=local) if into_stream else ColwiseParallel()
            parallelize_module(module, mesh, style)


def _whole(mesh: DeviceMesh, local: bool, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather what a block reads, [B, T / tensor, D] to [B, T, D]."""
    x = inputs[0].redistribute(mesh, [Replicate()])
    return (x.to_local() if local else x, *inputs[1:])


def _divided(mesh: DeviceMesh, _: nn.Module, __: Any, added: Tensor) -> DTensor:
    """Add up what processes have read [B, T, D], and leave each its tokens."""
    return DTensor.from_local(added, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(1)])


def _first(
    mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The embedded tokens, which all processes have, divided: the first layer's attention reads them, or both its blocks."""

    def shared_out(h: Tensor | None) -> Tensor | None:
        if h is None or isinstance(h, DTensor):  # a checkpointed block, computed again
            return h
        return DTensor.from_local(h, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)])

    if "reads" in kwargs:
        kwargs = {**kwargs, "reads": shared_out(kwargs["reads"])}
    return (shared_out(inputs[0]), *inputs[1:]), kwargs


def _encoder_input(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The encoder's third input is the stream."""
    tokens, mask, h, table = inputs
    return tokens, mask, h.redistribute(mesh, [Replicate()]).to_local(), table


def own_tokens(
    mesh: DeviceMesh | None, hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [B, T', D], output layer and labels [B, T'] of the tokens whose loss is this process's.

    Args:
        mesh: of tensor parallelism, or None.
        hidden: from `Retro.hidden`.
        weight: [V, D], the same in all processes; each adds a part to its gradient.
        labels: [B, T].
    """
    if mesh is None:
        return hidden, weight, labels
    assert isinstance(hidden, DTensor)
    shared = DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return hidden.to_local(), shared, labels.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


# ------------------------------------------------------------------------------------------- activation checkpointing

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""What selective checkpointing does not compute again."""


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_activations(model: Retro, how: Checkpointing) -> None:
    """Keep only the input of every block, and with `selective` the results of its matrix products.

    `forward` itself is wrapped. Dynamo cannot trace the hooks of `torch.distributed._composable.checkpoint`, and a wrapping module
    would change the names of the parameters.
    """
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    encoder = list(_blocks(model.encoder)) if hasattr(model, "encoder") else []
    for block in [*_blocks(model), *encoder] if how != "none" else []:
        block.forward = _checkpointed(block.forward, contexts)


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    """A function of this file: with `partial(checkpoint, forward)` in its place, compilation skips the block without a word."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return checkpointed


# ------------------------------------------------------------------------------------------------------- data parallel


def _share_data(model: Retro, root: nn.Module, processes: Processes) -> None:
    """Let gradients be summed over the data-parallel processes, and divide what ZeRO divides.

    A unit is gathered, and its gradients are summed, at a time: attention and feed-forward of a layer, a CCA, the encoder (a batch
    without neighbors passes neither), and what is left.
    """
    settings, mesh = processes.settings, processes.mesh("data")
    if settings.zero:
        offload = CPUOffloadPolicy(mesh.device_type != "cpu") if settings.offload else OffloadPolicy()
        share: Callable[..., Any] = partial(
            fully_shard, mesh=mesh, offload_policy=offload, reshard_after_forward=settings.zero == 3
        )
    else:
        share = partial(replicate, mesh=mesh)
    for module in model.modules() if settings.expert > 1 else ():
        if isinstance(module, Experts):  # their gradients are already sums over the processes that share them
            share(module.experts, mesh=processes.mesh("replica"))
    for name in model.attention:
        share([model.attention[name], model.feed_forward[name]])
    for cross in model.cross.values():
        share(cross)
    if hasattr(model, "encoder"):
        share(model.encoder)
    # The output layer is used after the model has run, by the loss.
    share(root, **({"reshard_after_forward": False} if settings.zero else {}))
    if root is model:
        register_fsdp_forward_method(model, "hidden_and_routing")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is already a part of the mean over all
            module.set_force_sum_reduction_for_comms(True)


def sync_gradients(model: nn.Module, settings: ParallelSettings, last: bool) -> None:
    """Before a pass: gradients of several batches are summed over processes once, but where ZeRO-2 keeps only parts of them.

    Parameters, which only ZeRO-3 keeps in parts, are gathered once for all batches of a step.
    """
    if isinstance(model, FSDPModule) and settings.zero < 3:
        model.set_requires_gradient_sync(last or settings.zero == 2)
        model.set_reshard_after_backward(last)


def unshard(root: nn.Module) -> None:
    """After a pass without a backward pass: hold the output layer whole."""
    if isinstance(root, FSDPModule):
        root.unshard()


def reshard(model: nn.Module) -> None:
    """After a pass without a backward pass: hold no more than the own part of the parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ----------------------------------------------------------------------------------------------------------- the whole


def distribute(model: Retro, processes: Processes, root: nn.Module | None = None, compiled: bool = False) -> None:
    """Share a model, or a stage's part of one, out, in place. It is the same in all processes before.

    Args:
        model: what is divided.
        processes: how.
        root: what is called with the model inside, if that is not its `hidden`.
        compiled: whether blocks are to be compiled, where several processes share the model.

    Raises:
        InputError: it cannot be divided so.
    """
    settings = processes.settings
    divided(model.settings, settings.tensor)  # raises where it cannot be
    if settings.expert > 1 and not model.settings.num_experts:
        raise InputError(f"parallel.expert = {settings.expert}: the model has no experts (model.num_experts = 0).")
    if (mesh := processes.along("tensor")) is not None:
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        _divide_layers(model, mesh)
        for name, parameter in model.named_parameters():  # PyTorch's divided norms forget it
            parameter.requires_grad_(name not in frozen)
    if (mesh := processes.along("expert")) is not None:
        share_experts(model, mesh)
    _checkpoint_activations(model, settings.checkpointing)
    if compiled:
        # One graph for each shape of batch (number of neighbors, borders of documents), and for each kind of block where blocks are
        # compiled. The settings bound the shapes. At the default limit of 8, a ninth graph of a whole model is an error.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    if compiled and processes.count > 1:
        for block in _blocks(model):
            block.compile(dynamic=False)
    if processes.count > 1:
        _share_data(model, root or model, processes)


def _named_blocks(model: Retro) -> Iterator[tuple[str, Any]]:
    """Every residual block of a decoder by name."""
    for kind in ("attention", "cross", "feed_forward"):
        for name, block in getattr(model, kind).items():
            yield f"{kind}.{name}", block


def _blocks(stack: nn.Module) -> Iterator[Any]:
    """Every residual block of a decoder or an encoder."""
    for kind in ("attention", "cross", "feed_forward"):
        children: Any = getattr(stack, kind)
        yield from children.values() if isinstance(children, nn.ModuleDict) else children
