"""Data parallelism and ZeRO, with FSDP2 or `replicate`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from retro.model.mixture_of_experts import ExpertLinear, Experts
from retro.model.retro import Retro
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ParallelSettings


def share_data(model: Retro, root: nn.Module, processes: Processes, dtype: torch.dtype) -> None:
    """Sum gradients over data-parallel processes, and shard what ZeRO shards.

    Units of gathering and reduction are the matrices of attention and feed-forward of a layer, of a CCA, and of the
    encoder (a batch without neighbors uses neither of the last two), a table of the encoder's own, and the rest.
    Matrices are gathered in the dtype in which autocast multiplies them, so results are those of gathering float32.
    Gradients are reduced in float32.
    """
    settings, mesh = processes.settings, processes.mesh("data")
    if settings.zero:
        offload = CPUOffloadPolicy(mesh.device_type != "cpu") if settings.cpu_offload else OffloadPolicy()
        share: Callable[..., object] = partial(
            fully_shard, mesh=mesh, offload_policy=offload, reshard_after_forward=settings.zero == 3
        )
    else:
        share = partial(replicate, mesh=mesh)
    narrow = partial(share, mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False))
    for module in model.modules() if settings.expert > 1 else ():
        if isinstance(module, Experts):  # their gradients are already summed over the processes that share them
            narrow(module.experts, mesh=processes.mesh("replica"))
    if hasattr(model, "encoder") and hasattr(model.encoder, "embedding"):
        share(model.encoder.embedding)
    units: list[list[nn.Module]] = [[layer.attention, layer.feed_forward] for layer in model.layers]
    units += [[layer.cross] for layer in model.layers if layer.cross is not None]
    units += [[model.encoder]] if hasattr(model, "encoder") else []
    multiplied = {parameter for unit in units for module in unit for parameter in matrices(module).values()}
    # The root comes first, because a unit that is shared hides all its modules from it. The loss uses the output layer
    # after the model has run.
    share(root, ignored_params=multiplied, **({"reshard_after_forward": False} if settings.zero else {}))
    for unit in units:
        others = {parameter for module in unit for parameter in module.parameters()} - multiplied
        narrow(unit, ignored_params=others)
    if root is model:
        register_fsdp_forward_method(model, "hidden")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is already divided by the labels of all processes
            module.set_force_sum_reduction_for_comms(True)


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of matrix products, by name: those that autocast narrows. Routers of experts multiply in float32."""
    return {
        f"{name}.{key}".removeprefix("."): parameter
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | ExpertLinear) and name.rpartition(".")[2] != "router"
        for key, parameter in part.named_parameters(recurse=False)
    }


def sync_gradients(model: nn.Module, settings: ParallelSettings, last: bool) -> None:
    """Prepare a pass: reduce gradients once per step, or in every pass with ZeRO-2, which keeps only shards of them.

    Parameters, which only ZeRO-3 shards, are gathered once for all passes of a step.
    """
    if isinstance(model, FSDPModule) and settings.zero < 3:
        model.set_requires_gradient_sync(last or settings.zero == 2)
        model.set_reshard_after_backward(last)


def unshard(root: nn.Module) -> None:
    """Gather the output layer, after a forward pass without a backward pass."""
    if isinstance(root, FSDPModule):
        root.unshard()


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
