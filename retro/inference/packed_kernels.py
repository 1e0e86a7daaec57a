"""Kernels of a CPU for products of activations with packed weights, and the choice among them.

                   weights                    activations, sums
    float16        compiled loops, 2 bytes    float32            a row has the same bits alone and among others
    fbgemm         float16, FBGEMM, 2 bytes   float32
    float32        BLAS, 4 bytes              float32
    bfloat16       oneDNN, 2 bytes            16 bits

A token and its draft are few rows. They need a kernel that gives a row the same bits alone and among others, so that
texts with drafts equal those without, and one that takes as long as reading the weights: the compiled loops. For many
rows `indexing/measured.py` measures products, once on a processor.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indexing.measured import INNER, ROWS, WIDTH, Question, layer_weights
from retro.inference.drafts import LONGEST_DRAFT

FEW_ROWS = 1 + LONGEST_DRAFT
"""Largest number of rows that the kernel for few rows multiplies: a token and its draft."""

Kernel = Callable[[Tensor], Tensor]
"""Rows [n, inputs] to rows [n, outputs]."""


class Float16:
    """Compiled loops with a weight in float16 (`compiled_products.py`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from retro.inference.compiled_products import PackedWeight, multiply  # numba, which takes half a second

        self._weight, self._multiply = PackedWeight.of(weight, bias), multiply

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: float32."""
        return torch.from_numpy(self.of_array(rows.float().contiguous().numpy()))

    def of_array(self, rows: np.ndarray) -> np.ndarray:
        """The same for float32 arrays without gaps: calls of torch would take longer than some products."""
        return self._multiply(rows, self._weight)


class Fbgemm:
    """FBGEMM's product with a weight in float16: faster than the loops for many rows with AVX512."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: float32."""
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._packed)
        return product


class Float32:
    """PyTorch's product with the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: float32."""
        return F.linear(rows.float(), self._weight, self._bias)


class Bfloat16:
    """oneDNN's product with a weight in its layout for one row, on processors with bfloat16: fast for many rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 1)
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: bfloat16."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(torch.bfloat16), self._packed, self._bias, "none", [], ""
        )
        return product


KERNELS: dict[str, Callable[[Tensor, Tensor | None], Kernel]] = {
    "float16": Float16,
    "fbgemm": Fbgemm,
    "float32": Float32,
    "bfloat16": Bfloat16,
}
"""From a weight [outputs, inputs] and a bias [outputs] to a kernel."""


def has_fbgemm() -> bool:
    """True if PyTorch has FBGEMM: on x86 with AVX2, where processors convert float16 too."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class PackedProduct:
    """The product x W^T + b, by the compiled loops for few rows and any kernel for many.

    Attributes:
        of_few: the loops, for at most `FEW_ROWS` rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, many: str) -> None:
        """Pack a weight [outputs, inputs]; the bias has one number per output. `many`: see `KERNELS`."""
        self.of_few = Float16(weight, bias)
        self._many: Kernel = self.of_few if many == "float16" else KERNELS[many](weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the kernel's results."""
        rows = x.flatten(0, -2)
        kernel = self.of_few if len(rows) <= FEW_ROWS else self._many
        return kernel(rows).unflatten(0, x.shape[:-1])


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed.

    Attributes:
        few: see `PackedProduct.of_few`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, many: str) -> None:
        """Arguments as of `PackedProduct`."""
        super().__init__()
        self._product = PackedProduct(weight.detach(), None if bias is None else bias.detach(), many)
        self.few = self._product.of_few
        # The parameters are only counted, and have no memory.
        self.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the kernel's results."""
        return self._product(x)


# --- what is measured ------------------------------------------------------------------------------------------------


class _Layers:
    """Products of some rows with all weights of a feed-forward layer."""

    def __init__(self, kernel: str) -> None:
        self._kernels = [(KERNELS[kernel](weight, None), weight.shape[1]) for weight in layer_weights()]

    @torch.inference_mode()
    def __call__(self, num_rows: int) -> None:
        rows = {width: torch.ones(num_rows, width) for width in (WIDTH, INNER)}
        for kernel, width in self._kernels:
            kernel(rows[width])


def _many_rows() -> dict[str, Callable[[], None]]:
    return {name: partial(_Layers(name), ROWS) for name in MANY_ROWS.ways}


MANY_ROWS = Question("prompts", ("float16", "fbgemm", "float32"), _many_rows, better=0.75)
"""Which kernel multiplies prompts and texts to score, without bfloat16.

The loops need no other copy of the weights. Others must save a quarter of the time: with FBGEMM weights take twice the
memory, in float32 three times.
"""
