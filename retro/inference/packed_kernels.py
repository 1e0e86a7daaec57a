"""Kernels of a CPU for products of activations with packed weights, and the choice among them.

                   weights          activations, sums   rows alone and among others
    float16        FBGEMM, 2 bytes  float32             same bits
    float32        BLAS, 4 bytes    float32             same bits, if the processor's BLAS has that property
    bfloat16       oneDNN, 2 bytes  16 bits             other bits

A token and its draft are few rows. They need a kernel that gives a row the same bits alone and among others, so that
texts with drafts equal those without. Results in bfloat16 are no choice there: many logits would be equal. Nor is int8,
whose scale of the activations depends on all rows.

`indexing/measured.py` measures products of one row and of many, once on a processor.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indexing.measured import INNER, ROWS, WIDTH, Question, fastest, layer_weights, random_numbers
from retro.inference.drafts import LONGEST_DRAFT

FEW_ROWS = 1 + LONGEST_DRAFT
"""Largest number of rows that the kernel for few rows multiplies: a token and its draft."""

Kernel = Callable[[Tensor], Tensor]
"""Rows [n, inputs] to rows [n, outputs]."""

_IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


class Float16:
    """FBGEMM's product with a weight in float16. It reads few rows' weights at most of the memory's bandwidth."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: float32."""
        missing = _missing_rows(len(rows)) if _IS_AVX2 else 0
        padded = F.pad(rows.float(), (0, 0, 0, missing)) if missing else rows.float()
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(padded, self._packed)
        return product[: len(rows)] if missing else product


def _missing_rows(count: int) -> int:
    """Rows of zeros to add, so that FBGEMM's kernels for AVX2 give a row the same bits as among others.

    Those for one and two rows add in another order than those for three to six. Measured for up to 700 rows: they are
    used for 1, 2, 7 and 14 rows, and from 31 on for many numbers, but for no multiple of 3. One row takes a tenth
    longer.
    """
    return -count % 3 if count in (1, 2, 7, 14) or count > 30 else 0


class Float32:
    """PyTorch's product with the weight as it is. BLAS adds less than four rows in another order, so they are padded
    with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Kernel`: float32."""
        padded = F.pad(rows.float(), (0, 0, 0, 4 - len(rows))) if len(rows) < 4 else rows.float()
        return F.linear(padded, self._weight, self._bias)[: len(rows)]


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
    "float32": Float32,
    "bfloat16": Bfloat16,
}
"""From a weight [outputs, inputs] and a bias [outputs] to a kernel."""


def has_fbgemm() -> bool:
    """True if PyTorch has FBGEMM, as on x86."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_equal_rows(name: str) -> bool:
    """True if a kernel gives rows of a token and a draft the same bits alone and among others, on this processor."""
    weight, rows = random_numbers(WIDTH, INNER), random_numbers(FEW_ROWS, INNER)
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        kernel = KERNELS[name](weight, None)
        together = kernel(rows)
        return all(torch.equal(kernel(rows[:count]), together[:count]) for count in range(1, FEW_ROWS))


class PackedProduct:
    """The product x W^T + b, by one kernel for few rows and one for many.

    Attributes:
        few: name of the kernel for few rows.
        of_few: this kernel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, few: str, many: str) -> None:
        """Pack a weight [outputs, inputs]; the bias has one number per output. `few`, `many`: see `KERNELS`."""
        self.few, self.of_few = few, KERNELS[few](weight, bias)
        self._many = self.of_few if many == few else KERNELS[many](weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the kernel's results."""
        rows = x.flatten(0, -2)
        kernel = self.of_few if len(rows) <= FEW_ROWS else self._many
        return kernel(rows).unflatten(0, x.shape[:-1])


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed.

    Attributes:
        few: its product for at most `FEW_ROWS` rows, see `Kernel`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, few: str, many: str) -> None:
        """Arguments as of `PackedProduct`."""
        super().__init__()
        self._product = PackedProduct(weight.detach(), None if bias is None else bias.detach(), few, many)
        self.few = self._product.of_few
        # The parameters are only counted, and have no memory.
        self.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the kernel's results."""
        return self._product(x)


# --- what is measured ------------------------------------------------------------------------------------------------

_LAYERS = 8  # weights of 38 MB in float16: those of a pass are hardly in the caches


@cache
def few_rows() -> Question:
    """Which kernel multiplies a token, among those that give its row the same bits in a draft."""
    names = tuple(name for name in ("float16", "float32") if has_equal_rows(name)) or ("float16",)
    return Question("generation", names, lambda: {name: partial(_Layers(name), 1) for name in names})


@cache
def many_rows() -> Question:
    """Which kernel multiplies prompts and texts to score, without bfloat16.

    Next to float16 for few rows, weights in float32 take three times the memory, so they must save a quarter of the
    time.
    """
    names = ("float16", "float32")
    return Question("prompts", names, lambda: {name: partial(_Layers(name, 1), ROWS) for name in names}, better=0.75)


def kernel_of(question: Question) -> str:
    """The fastest kernel, or the only one."""
    return question.ways[0] if len(question.ways) == 1 else fastest(question)


class _Layers:
    """Products of some rows with all weights of feed-forward layers."""

    def __init__(self, kernel: str, count: int = _LAYERS) -> None:
        weights = layer_weights()
        self._kernels = [
            (KERNELS[kernel](weight.clone(), None), weight.shape[1]) for _ in range(count) for weight in weights
        ]

    @torch.inference_mode()
    def __call__(self, num_rows: int) -> None:
        rows = {width: torch.ones(num_rows, width) for width in (WIDTH, INNER)}
        for kernel, width in self._kernels:
            kernel(rows[width])
