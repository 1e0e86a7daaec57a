"""Products of activations with weights in float16, as compiled loops with float32 sums.

A generated token reads each weight once, so its product should take about as long as reading them. FBGEMM's is as fast
for one row (docs/results/speed.md), but with AVX2 its sums for one and two rows have another order than those for
more, so a token would have other bits in a draft. Here the order is fixed: `LANES` sums of every 32nd product, then
added in halves. So a row has the same bits alone and among others, in parts and as a whole, with any number of threads,
and on any processor.

numba has no float16 on a CPU, so the inner loop is written in LLVM's instructions.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.machine import compiled

LANES = 32
"""Numbers that are multiplied together."""
_BLOCK = 16
"""Rows whose numbers stay in the first cache while weights pass by."""
_PART = 1 << 20
"""Least number of multiplications of a thread: waking one for fewer takes longer than it saves."""


class PackedWeight(NamedTuple):
    """A weight in float16.

    Attributes:
        bits: of its numbers, each output's divided by its scale; zeros up to a multiple of `LANES` inputs; uint16
            [outputs, inputs].
        scales: powers of two, so that the largest number of each output is between 2^14 and 2^15: numbers below 2^-14
            have fewer digits, and processors with AVX512-FP16 are slow to convert them. float32 [outputs].
        bias: float32 [outputs].
    """

    bits: np.ndarray
    scales: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "PackedWeight":
        """Pack a weight [outputs, inputs]; the bias has one number per output."""
        numbers = weight.float()
        _, exponents = np.frexp(numbers.abs().amax(1).numpy())
        scales = np.ldexp(np.float32(1), np.maximum(exponents - 15, -126))
        halves = F.pad((numbers / torch.from_numpy(scales)[:, None]).half(), (0, -numbers.shape[1] % LANES))
        added = np.zeros(len(numbers), np.float32) if bias is None else bias.float().numpy()
        return cls(halves.view(torch.uint16).numpy(), scales, added)


def multiply(rows: np.ndarray, weight: PackedWeight) -> np.ndarray:
    """Multiply rows, float32 [n, inputs], with a weight, and add its bias: float32 [n, outputs]."""
    multiply_part, outputs = compiled(_multiply), len(weight.bits)
    out = np.empty((len(rows), outputs), np.float32)
    if missing := weight.bits.shape[1] - rows.shape[1]:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    threads = min(torch.get_num_threads(), weight.bits.size * len(rows) // _PART)
    if threads < 2:
        multiply_part(rows, *weight, out, 0, outputs)
        return out
    borders = [part * outputs // threads for part in range(threads + 1)]
    others = [
        _helpers().submit(multiply_part, rows, *weight, out, start, stop) for start, stop in pairwise(borders[1:])
    ]
    multiply_part(rows, *weight, out, 0, borders[1])
    for other in others:
        other.result()
    return out


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "product")


def _multiply(
    rows: np.ndarray,
    bits: np.ndarray,
    scales: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """`multiply` for the outputs from `start` to `stop`."""
    for first in range(0, len(rows), _BLOCK):
        last = min(first + _BLOCK, len(rows))
        for output in range(start, stop):
            row, scale, added = first, scales[output], bias[output]
            while row + 4 <= last:
                four = _products_of_4(rows, bits, row, output)
                out[row, output], out[row + 1, output] = four[0] * scale + added, four[1] * scale + added
                out[row + 2, output], out[row + 3, output] = four[2] * scale + added, four[3] * scale + added
                row += 4
            if row + 2 <= last:
                two = _products_of_2(rows, bits, row, output)
                out[row, output], out[row + 1, output] = two[0] * scale + added, two[1] * scale + added
                row += 2
            if row < last:
                out[row, output] = _products_of_1(rows, bits, row, output)[0] * scale + added


def _products(count: int) -> Callable[..., Any]:
    """A function for compiled loops: products of `count` rows, from a number on, with the weights of one output."""
    from numba import types
    from numba.extending import intrinsic

    def products(context: Any, rows: Any, bits: Any, row: Any, output: Any) -> tuple[Any, Callable[..., Any]]:
        signature = types.UniTuple(types.float32, count)(rows, bits, row, output)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            rows, bits = (context.make_array(signature.args[n])(context, builder, values[n]) for n in (0, 1))
            sums = _emit_products(builder, count, rows, bits, *values[2:])
            return context.make_tuple(builder, signature.return_type, sums)

        return signature, generate

    return intrinsic(products)


def _emit_products(builder: Any, count: int, rows: Any, bits: Any, row: Any, output: Any) -> list[Any]:
    """Emit a loop over the inputs: `LANES` weights at a time become float32, and are multiplied with each row."""
    from llvmlite import ir
    from numba.core import cgutils

    halves, floats = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), ir.FloatType()))
    inputs = builder.extract_value(bits.shape, 1)

    def part(array: Any, number: Any, at: Any, kind: Any) -> Any:
        """`LANES` numbers of a row of an array."""
        address = builder.gep(array.data, [builder.add(builder.mul(number, inputs), at)])
        align = 2 if kind is halves else 4
        return builder.load(builder.bitcast(address, kind.as_pointer()), align=align)

    numbers = [builder.add(row, ir.Constant(row.type, place)) for place in range(count)]
    sums = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * LANES)) for _ in numbers]
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{LANES}f32"
    )
    lanes = ir.Constant(inputs.type, LANES)
    with cgutils.for_range(builder, builder.udiv(inputs, lanes)) as loop:
        at = builder.mul(loop.index, lanes)
        weights = builder.fpext(part(bits, output, at, halves), floats)
        for number, each in zip(numbers, sums, strict=True):
            product = builder.call(multiply_add, [part(rows, number, at, floats), weights, builder.load(each)])
            builder.store(product, each)
    return [_emit_sum(builder, builder.load(each)) for each in sums]


def _emit_sum(builder: Any, vector: Any) -> Any:
    """Emit the sum of a vector: halves are added until one number is left."""
    from llvmlite import ir

    index, size = ir.IntType(32), LANES
    while size > 1:
        size //= 2
        nothing = ir.Constant(vector.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(
                vector, nothing, ir.Constant(ir.VectorType(index, size), list(range(start, start + size)))
            )
            for start in (0, size)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.Constant(index, 0))


_products_of_1, _products_of_2, _products_of_4 = map(_products, (1, 2, 4))
