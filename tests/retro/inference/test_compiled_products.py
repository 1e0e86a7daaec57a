"""Compiled products equal float64 ones up to rounding, and a row has the same bits however the work is divided."""

import numpy as np
import pytest
import torch

from retro.inference import compiled_products
from retro.inference.compiled_products import LANES, PackedWeight, multiply
from tests.retro.inference.test_packed_weights import needs_fbgemm

pytestmark = needs_fbgemm  # processors that convert float16


def numbers(num_rows: int, inputs: int, outputs: int) -> tuple[np.ndarray, PackedWeight]:
    """Rows, and a weight whose numbers are of float16 already."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=draw).half().float() / 8
    packed = PackedWeight.of(weight, torch.randn(outputs, generator=draw))
    return torch.randn(num_rows, inputs, generator=draw).numpy(), packed


def unpacked(weight: PackedWeight) -> np.ndarray:
    halves: np.ndarray = weight.bits.view(np.float16)
    return halves.astype(np.float32) * weight.scales[:, None]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 16, 35])
@pytest.mark.parametrize("inputs", [1, LANES, 7 * LANES, 7 * LANES + 5])
def test_products_equal_those_in_float64(num_rows: int, inputs: int) -> None:
    rows, weight = numbers(num_rows, inputs, 51)
    exact = rows.astype(float) @ unpacked(weight)[:, :inputs].astype(float).T + weight.bias
    np.testing.assert_allclose(multiply(rows, weight), exact, atol=1e-5)


def test_all_float16_numbers_are_converted() -> None:
    """Small ones without a leading one, both zeros, and the largest ones."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = np.where(np.isfinite(halves), halves, np.float16(1))
    bits = np.zeros((len(halves), LANES), np.float16)
    bits[:, 5] = halves
    scales, bias = np.ones(len(halves), np.float32), np.zeros(len(halves), np.float32)
    row = np.zeros((1, LANES), np.float32)
    row[0, 5] = 1
    found = multiply(row, PackedWeight(bits.view(np.uint16), scales, bias))[0]
    assert np.array_equal(found, halves.astype(np.float32))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_weights_of_any_size_keep_eleven_binary_digits(size: float) -> None:
    weight = size * torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    packed = PackedWeight.of(weight, None)
    np.testing.assert_allclose(unpacked(packed)[:, :40], weight.numpy(), rtol=2**-11, atol=size * 2**-26)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rows, weight = numbers(37, 3 * LANES, 40)
    together = multiply(rows, weight)
    for count in range(1, 37):
        assert np.array_equal(multiply(rows[:count], weight), together[:count])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_parts_of_several_threads_have_the_bits_of_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = numbers(5, 2 * LANES, 61)
    whole = multiply(rows, weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled_products, "_PART", weight.bits.size)
    assert np.array_equal(multiply(rows, weight), whole)


def test_the_order_of_sums_is_the_same_on_every_processor() -> None:
    """32 sums of every 32nd product, each rounded once, and then halves of them."""
    rows, weight = numbers(1, 4 * LANES, 9)
    parts = rows[0].reshape(-1, LANES), weight.bits.view(np.float16).astype(float).reshape(9, -1, LANES)
    sums = np.zeros((9, LANES), np.float32)
    for step in range(4):
        sums = (parts[0][step].astype(float) * parts[1][:, step] + sums).astype(np.float32)
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    assert np.array_equal(multiply(rows, weight)[0], sums[:, 0] * weight.scales + weight.bias)
