"""Training over many devices: how processes share a model and its batches, with PyTorch's own parts.

    processes  =  pipeline × data × tensor             one torch process for each device, numbered so that tensor varies fastest
                             data = replica × expert

    tensor     heads and feed-forward features of every layer are divided; between blocks the sequence is (sequence parallel)
    pipeline   layers are divided (`pipeline_parallel.py`)
    data       sequences of a batch are divided, and with ZeRO (FSDP2) what is kept of optimizer, gradients and parameters
    expert     the data-parallel processes that differ in this way share the experts (`model/mixture_of_experts.py`)
    checkpointing   activations are computed twice instead of kept

What a step computes is the same however it is shared out: the mean over the labels of the whole batch. The model knows nothing
of it: everything here works on its modules from outside.
"""

import torch
from torch import nn

from indexing.store.errors import InputError
from retro.model.mixture_of_experts import share_experts
from retro.model.retro import Retro
from retro.parallel.activation_checkpointing import checkpoint_activations
from retro.parallel.blocks import blocks
from retro.parallel.data_parallel import share_data
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import divided
from retro.parallel.tensor_parallel import divide_layers

# ---------------------------------------------------------------------------------------------------- tensor parallel


# ------------------------------------------------------------------------------------------- activation checkpointing


# ------------------------------------------------------------------------------------------------------- data parallel


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
        divide_layers(model, mesh)
        for name, parameter in model.named_parameters():  # PyTorch's divided norms forget it
            parameter.requires_grad_(name not in frozen)
    if (mesh := processes.along("expert")) is not None:
        share_experts(model, mesh)
    checkpoint_activations(model, settings.checkpointing)
    if compiled:
        # One graph for each shape of batch (number of neighbors, borders of documents), and for each kind of block where blocks are
        # compiled. The settings bound the shapes. At the default limit of 8, a ninth graph of a whole model is an error.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    if compiled and processes.count > 1:
        for block in blocks(model):
            block.compile(dynamic=False)
    if processes.count > 1:
        share_data(model, root or model, processes)
