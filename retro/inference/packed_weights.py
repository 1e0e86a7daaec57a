"""Weights of matrix products in the layout of oneDNN's kernels, for inference in bfloat16 on a CPU.

Otherwise oneDNN reads each weight row by row, at a third of the memory bandwidth, which decides the speed of generation. The
sums have the same order: results are equal to the bit.
"""

import torch
from torch import Tensor, nn

from indexing.machine import onednn_has_bfloat16
from retro.device import Placement
from retro.model.retro import Retro


class PackedLinear(nn.Module):
    """The product x W^T + b with a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a weight [outputs, inputs] bfloat16; the bias has one number per output."""
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)  # for one row, as in generation
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] bfloat16."""
        x = x.to(torch.bfloat16)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def can_pack(placement: Placement) -> bool:
    """True if this CPU has oneDNN's kernels for packed weights, and the model multiplies in bfloat16."""
    return placement.device.type == "cpu" and placement.dtype == torch.bfloat16 and onednn_has_bfloat16()


@torch.no_grad()
def pack(model: Retro, placement: Placement) -> None:
    """Pack the weights of blocks that `Placement.cast` has cast, and a copy of the output layer's, if the machine has such kernels.

    The model can then only compute outputs: its blocks have no weights to train, save or copy to another device.
    """
    if not can_pack(placement):
        return
    # The function, not the module: the weight is a copy, and no further parameter of the model.
    model.packed_output = PackedLinear(model.output_weight.to(placement.dtype)).forward
    for name in ("attention", "feed_forward", "cross", "encoder"):
        for block in list(getattr(model, name, nn.Module()).modules()):
            for key, child in list(block.named_children()):
                if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and key != "distance_proj":
                    setattr(block, key, PackedLinear(child.weight, child.bias))
