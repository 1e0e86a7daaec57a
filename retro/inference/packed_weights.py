"""Weights of matrix products in the layout of a CPU's kernels, for inference: float16 for few rows, bfloat16 for many.

A pass over few tokens takes as long as reading all weights. Plain weights are read row by row, far below the memory's
bandwidth. FBGEMM's kernels reach most of it, and read two bytes a weight; activations and sums are float32. A row's
sums do not depend on the others: a token has the same bits alone, in a draft and in a batch of few rows. Processors
with bfloat16 multiply many rows twice as fast in oneDNN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indexing.machine import onednn_has_bfloat16
from retro.device import Placement
from retro.inference.drafts import LONGEST_DRAFT
from retro.model.retro import Retro

FEW_ROWS = 1 + LONGEST_DRAFT
"""Largest number of rows that float16 weights multiply, where there are bfloat16 weights too: a token and its draft."""
_IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


class PackedLinear(nn.Module):
    """The product x W^T + b with a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bfloat16: bool) -> None:
        """Pack a weight [outputs, inputs]; the bias has one number per output. `bfloat16`: multiply many rows in it."""
        super().__init__()
        weight, self._bfloat16 = weight.detach(), bfloat16
        self._half = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self.bias = None if bias is None else nn.Parameter(bias.bfloat16() if bfloat16 else bias, requires_grad=False)
        # The layout for one row. Without bfloat16 the parameter is only counted, and has no memory.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 1) if bfloat16 else weight.to("meta")
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]: float32, or bfloat16 if that multiplies."""
        product: Tensor
        if self._bfloat16 and x.shape[:-1].numel() > FEW_ROWS:
            x = x.to(torch.bfloat16)
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            rows = x.float().flatten(0, -2)
            padded = F.pad(rows, (0, 0, 0, _missing_rows(len(rows)))) if _IS_AVX2 else rows
            product = torch.ops.quantized.linear_dynamic_fp16(padded, self._half)[: len(rows)]
            product = product.unflatten(0, x.shape[:-1])
        return product


def _missing_rows(count: int) -> int:
    """Rows of zeros to add, so that FBGEMM's kernels for AVX2 give a row the same bits as among others.

    Those for one and two rows add in another order than those for three to six. Measured for up to 700 rows: they are
    used for 1, 2, 7 and 14 rows, and from 31 on for many numbers, but for no multiple of 3. One row takes a tenth
    longer.
    """
    return -count % 3 if count in (1, 2, 7, 14) or count > 30 else 0


def can_pack(placement: Placement) -> bool:
    """True if weights may be float16, and PyTorch has FBGEMM, as on x86."""
    return placement.half_weights and "fbgemm" in torch.backends.quantized.supported_engines


@torch.no_grad()
def pack(model: Retro, placement: Placement) -> None:
    """Pack the weights of blocks, and a copy of the output layer's, if the machine has such kernels.

    The model can then only compute outputs: its blocks have no weights to train, save or copy to another device.
    """
    if not can_pack(placement):
        return
    bfloat16 = placement.dtype == torch.bfloat16 and onednn_has_bfloat16()
    # The function, not the module: the weight is a copy, and no further parameter of the model.
    model.packed_output = PackedLinear(model.output_weight, None, bfloat16).forward
    for name in ("attention", "feed_forward", "cross", "encoder"):
        for block in list(getattr(model, name, nn.Module()).modules()):
            for key, child in list(block.named_children()):
                if type(child) is nn.Linear and key not in ("distance_proj", "router"):
                    setattr(block, key, PackedLinear(child.weight, child.bias, bfloat16))
