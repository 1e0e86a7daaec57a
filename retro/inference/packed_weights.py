"""Packed weights of a model for inference on a CPU: one kernel for few rows, and one for many.

A pass over few tokens takes as long as reading all weights. Plain weights have four bytes, and are read below the
memory's bandwidth. Packed ones have two, and a kernel that reaches most of it.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from indexing.machine import onednn_has_bfloat16
from indexing.measured import fastest
from retro.device import Placement
from retro.inference.few_tokens import with_loops
from retro.inference.packed_kernels import MANY_ROWS, PackedLinear, PackedProduct, has_fbgemm
from retro.model.retro import Retro


def can_pack(placement: Placement) -> bool:
    """True if weights may be float16, and PyTorch has FBGEMM, as on x86."""
    return placement.half_weights and has_fbgemm()


def kernel_for_many(placement: Placement) -> str:
    """Name of the kernel for many rows: that of the precision, or for `auto` the fastest one."""
    if placement.dtype == torch.bfloat16 and onednn_has_bfloat16():
        return "bfloat16"
    return fastest(MANY_ROWS) if placement.is_measured else "float16"


JOINED = {
    "attention": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "feed_forward": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""By kind of block, the linear layer that replaces several with the same input: one product takes less time, and gives
the same bits in float16."""


def pack(model: Retro, placement: Placement) -> None:
    """Pack a model's weights by the precision, if the machine has such kernels."""
    if can_pack(placement):
        pack_with(model, kernel_for_many(placement))


@torch.no_grad()
def pack_with(model: Retro, many: str) -> None:
    """Pack the weights of blocks, and a copy of the output layer's. `many`: see `PackedProduct`.

    The model can then only compute outputs: its blocks have no weights to train, save or copy to another device.
    """
    model.packed_output = PackedProduct(model.output_weight.detach(), None, many)
    for name in ("attention", "feed_forward", "cross", "encoder"):
        for block in list(getattr(model, name, nn.Module()).modules()):
            joined, parts = JOINED.get(name, ("", ()))
            if joined and all(type(getattr(block, part, None)) is nn.Linear for part in parts):
                setattr(block, joined, PackedLinear(*_joined(block, parts), many))
            for key, child in list(block.named_children()):
                if type(child) is nn.Linear and key not in ("distance_proj", "router"):
                    setattr(block, key, PackedLinear(child.weight, child.bias, many))
    with_loops(model)


def _joined(block: nn.Module, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Remove linear layers from a block, and return weight and bias of one with the outputs of all."""
    parts = [cast(nn.Linear, block.get_submodule(name)) for name in names]
    for name in names:
        delattr(block, name)
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return torch.cat([part.weight for part in parts]), bias
