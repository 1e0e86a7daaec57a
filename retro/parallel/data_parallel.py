"""Data parallelism and ZeRO, with FSDP2 or `replicate`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from retro.model.mixture_of_experts import Experts
from retro.model.retro import Retro
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ParallelSettings


def share_data(model: Retro, root: nn.Module, processes: Processes) -> None:
    """Sum gradients over data-parallel processes, and shard what ZeRO shards.

    Units of gathering and reduction are attention and feed-forward of a layer, a CCA, the encoder (a batch without neighbors
    uses neither of the last two), and the rest.
    """
    settings, mesh = processes.settings, processes.mesh("data")
    if settings.zero:
        offload = CPUOffloadPolicy(mesh.device_type != "cpu") if settings.cpu_offload else OffloadPolicy()
        share: Callable[..., Any] = partial(
            fully_shard, mesh=mesh, offload_policy=offload, reshard_after_forward=settings.zero == 3
        )
    else:
        share = partial(replicate, mesh=mesh)
    for module in model.modules() if settings.expert > 1 else ():
        if isinstance(module, Experts):  # their gradients are already summed over the processes that share them
            share(module.experts, mesh=processes.mesh("replica"))
    for name in model.attention:
        share([model.attention[name], model.feed_forward[name]])
    for cross in model.cross.values():
        share(cross)
    if hasattr(model, "encoder"):
        share(model.encoder)
    # The loss uses the output layer after the model has run.
    share(root, **({"reshard_after_forward": False} if settings.zero else {}))
    if root is model:
        register_fsdp_forward_method(model, "hidden_and_routing")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is already divided by the labels of all processes
            module.set_force_sum_reduction_for_comms(True)


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
