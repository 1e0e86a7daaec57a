"""Training on many devices: how processes share a model and its batches, with PyTorch's own parts.

    processes = pipeline × data × tensor       one process for each device; tensor ranks are next to each other
                           data = replica × expert

    tensor_parallel.py           divides heads and feed-forward features of every layer; the sequence between blocks
    pipeline_parallel.py         divides the layers
    data_parallel.py             divides the sequences of a batch; with ZeRO also optimizer, gradients and parameters
    model/mixture_of_experts.py  divides the experts over data-parallel processes
    activation_checkpointing.py  computes activations twice instead of keeping them

A step computes the same in every mode: the mean over the labels of all its batches. The model knows nothing of meshes:
everything here changes its modules from outside.
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
    checkpoint_activations(model, settings.activation_checkpointing)
    if compiled:
        # One graph for each shape of batch (number of neighbors, borders of documents), and for each kind of block where blocks are
        # compiled. The settings bound the shapes. At the default limit of 8, a ninth graph of a whole model is an error.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    if compiled and processes.count > 1:
        for block in blocks(model):
            block.compile(dynamic=False)
    if processes.count > 1:
        share_data(model, root or model, processes)
