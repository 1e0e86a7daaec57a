"""Training on many devices, with PyTorch's own building blocks.

    processes = pipeline × data × tensor       one process for each device; tensor ranks are next to each other
                           data = replica × expert

    tensor_parallel.py           divides heads and feed-forward features of every layer; the sequence between blocks
    pipeline_parallel.py         divides the layers
    data_parallel.py             divides the sequences of a batch; with ZeRO also optimizer states, gradients, parameters
    model/mixture_of_experts.py  divides the experts over data-parallel processes

Activation checkpointing, below, recomputes activations instead of keeping them. A step computes the same in every mode:
the mean over the labels of all its batches. Parallelism is applied to the modules of a plain model from outside.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # defines torch.ops.torch_attn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from indexing.store.errors import InputError
from retro.model.mixture_of_experts import share_experts
from retro.model.retro import Retro
from retro.parallel.data_parallel import share_data
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import Checkpointing, divided
from retro.parallel.tensor_parallel import divide_layers


def distribute(
    model: Retro,
    processes: Processes,
    root: nn.Module | None = None,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Distribute a model, or a pipeline stage of one, over processes, in place.

    Args:
        model: equal in all processes.
        processes: with their settings.
        root: the module that is called and contains the model; None = the model, by its `hidden`.
        compiled: use `torch.compile`, see `compile_blocks`.
        dtype: of matrix products.

    Raises:
        InputError: the model cannot be divided this way.
    """
    settings = processes.settings
    divided(model.settings, settings.tensor)  # raises if it is not divisible
    if settings.expert > 1 and not model.settings.experts.num_experts:
        raise InputError(
            f"parallel.expert = {settings.expert}: the model has no experts (model.experts.num_experts = 0)."
        )
    if (mesh := processes.along("tensor")) is not None:
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        divide_layers(model, mesh)
        for name, parameter in model.named_parameters():  # PyTorch's sharded norms lose it
            parameter.requires_grad_(name not in frozen)
    if (mesh := processes.along("expert")) is not None:
        share_experts(model, mesh)
    checkpoint_activations(model, settings.activation_checkpointing)
    if compiled:
        compile_blocks(model, fullgraph=processes.count == 1)
    if processes.count > 1:
        share_data(model, root or model, processes, dtype)


def _blocks(model: Retro) -> list[nn.Module]:
    """All blocks of decoder and encoder."""
    return [*model.blocks.values(), *(model.encoder.blocks if hasattr(model, "encoder") else [])]


# --- compilation ------------------------------------------------------------------------------------------------------


def allow_many_graphs() -> None:
    """There is one graph for each shape of batch (number of neighbors, document boundaries), and each kind of block. The
    settings bound their number. With the default limit of 8, a ninth graph of a whole model is an error."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024


def compile_blocks(model: Retro, fullgraph: bool) -> None:
    """Compile every block, and what the copy head reads. Blocks of a kind share their code, so that a deep model
    compiles as fast as a shallow one.

    Args:
        model: with its checkpointing.
        fullgraph: a graph break is an error and not a slow step. Several processes communicate within blocks.
    """
    allow_many_graphs()
    for block in _blocks(model):
        block.compile(dynamic=False, fullgraph=fullgraph)
    model.evidence = torch.compile(model.evidence, dynamic=False, fullgraph=fullgraph)  # type: ignore[method-assign]


# --- activation checkpointing -----------------------------------------------------------------------------------------

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
"""Operations whose results selective checkpointing keeps."""


def _policy(_: object, operation: object, *args: object, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(model: Retro, how: Checkpointing) -> None:
    """Keep only the input of every block, and with `selective` the results of its matrix products.

    This wraps `forward`: Dynamo cannot trace the hooks of `torch.distributed._composable.checkpoint`, and a wrapper
    module would change the names of parameters.
    """
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in _blocks(model) if how != "none" else []:
        block.forward = _checkpointed(block.forward, contexts)


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    """Wrap `forward` in a function of this file: compilation silently skips `partial(checkpoint, forward)`."""

    def checkpointed(*args: object, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return checkpointed
