"""Products of activations with weights in float16, as compiled loops with float32 sums.

A generated token reads each weight once, so its product should take as long as reading them. Libraries are slower with
few rows: FBGEMM takes 1.2 to 1.8 times as long (docs/results/speed.md), and its sums for one row have another order
than those for several. Here the order is fixed: `LANES` sums of every 32nd product, then added in halves. So a row has
the same bits alone and among others, in parts and as a whole, with any number of threads, and on any processor.

numba has no float16 on a CPU, so the inner loop is written in LLVM's instructions.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from indexing.machine import compiled

LANES = 32
"""Numbers that are multiplied together. Rows and weights have a multiple of it."""
_BLOCK = 16
"""Rows whose numbers stay in the first cache while weights pass by."""
_PART = 1 << 20
"""Least number of products of a thread, a tenth of a millisecond: waking another one takes as long as some thousands."""


def multiply(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` with the products of rows and weights, plus the bias.

    Args:
        rows: float32 [n, inputs].
        weight: bits of float16 numbers, uint16 [outputs, inputs].
        bias: float32 [outputs].
        out: float32 [n, outputs].
    """
    multiply_part = compiled(_multiply)
    threads = min(torch.get_num_threads(), weight.size * len(rows) // _PART)
    if threads < 2:
        multiply_part(rows, weight, bias, out, 0, len(weight))
        return
    borders = [part * len(weight) // threads for part in range(threads + 1)]
    others = [
        _helpers().submit(multiply_part, rows, weight, bias, out, start, stop) for start, stop in pairwise(borders[1:])
    ]
    multiply_part(rows, weight, bias, out, 0, borders[1])
    for other in others:
        other.result()


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "product")


def _multiply(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray, start: int, stop: int) -> None:
    """`multiply` for the outputs from `start` to `stop`."""
    for first in range(0, len(rows), _BLOCK):
        last = min(first + _BLOCK, len(rows))
        for output in range(start, stop):
            row, added = first, bias[output]
            while row + 4 <= last:
                four = _products_of_4(rows, weight, row, output)
                out[row, output], out[row + 1, output] = four[0] + added, four[1] + added
                out[row + 2, output], out[row + 3, output] = four[2] + added, four[3] + added
                row += 4
            if row + 2 <= last:
                two = _products_of_2(rows, weight, row, output)
                out[row, output], out[row + 1, output] = two[0] + added, two[1] + added
                row += 2
            if row < last:
                out[row, output] = _products_of_1(rows, weight, row, output)[0] + added


def _products(count: int) -> Callable[..., Any]:
    """A function for compiled loops: products of `count` rows, from a number on, with the weights of one output."""

    def products(context: Any, rows: Any, weight: Any, row: Any, output: Any) -> tuple[Any, Callable[..., Any]]:
        signature = types.UniTuple(types.float32, count)(rows, weight, row, output)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            rows, weight = (context.make_array(signature.args[n])(context, builder, values[n]) for n in (0, 1))
            sums = _emit_products(builder, count, rows, weight, *values[2:])
            return context.make_tuple(builder, signature.return_type, sums)

        return signature, generate

    return intrinsic(products)


def _emit_products(builder: Any, count: int, rows: Any, weight: Any, row: Any, output: Any) -> list[Any]:
    """Emit a loop over the inputs: `LANES` weights at a time become float32, and are multiplied with each row."""
    halves, floats = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), ir.FloatType()))
    inputs = builder.extract_value(weight.shape, 1)

    def part(array: Any, number: Any, at: Any, kind: ir.Type) -> Any:
        """`LANES` numbers of a row of an array."""
        address = builder.gep(array.data, [builder.add(builder.mul(number, inputs), at)])
        align = 2 if kind is halves else 4
        return builder.load(builder.bitcast(address, kind.as_pointer()), align=align)

    numbers = [builder.add(row, ir.Constant(row.type, place)) for place in range(count)]
    sums = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * LANES)) for _ in numbers]
    for each in sums:
        builder.store(ir.Constant(floats, [0.0] * LANES), each)
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{LANES}f32"
    )
    lanes = ir.Constant(inputs.type, LANES)
    with cgutils.for_range(builder, builder.udiv(inputs, lanes)) as loop:
        at = builder.mul(loop.index, lanes)
        weights = builder.fpext(part(weight, output, at, halves), floats)
        for number, each in zip(numbers, sums, strict=True):
            product = builder.call(multiply_add, [part(rows, number, at, floats), weights, builder.load(each)])
            builder.store(product, each)
    return [_emit_sum(builder, builder.load(each)) for each in sums]


def _emit_sum(builder: Any, vector: Any) -> Any:
    """Emit the sum of a vector: halves are added until one number is left."""
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
