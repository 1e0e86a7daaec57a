"""Compiled products equal float64 ones up to rounding, and a row has the same bits however the work is divided."""

import numpy as np
import pytest
import torch

from retro.inference import compiled_products
from retro.inference.compiled_products import LANES, multiply
from tests.retro.inference.test_packed_weights import needs_fbgemm

pytestmark = needs_fbgemm  # processors that convert float16


def arrays(num_rows: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    weight = (draw.standard_normal((outputs, inputs)) / inputs**0.5).astype(np.float16)
    return draw.standard_normal((num_rows, inputs), np.float32), weight, draw.standard_normal(outputs, np.float32)


def product(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    out = np.full((len(rows), len(weight)), np.nan, np.float32)
    multiply(rows, weight.view(np.uint16), bias, out)
    return out


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 16, 35])
@pytest.mark.parametrize("inputs", [LANES, 7 * LANES])
def test_products_equal_those_in_float64(num_rows: int, inputs: int) -> None:
    rows, weight, bias = arrays(num_rows, inputs, 51)
    np.testing.assert_allclose(
        product(rows, weight, bias), rows.astype(float) @ weight.astype(float).T + bias, atol=1e-5
    )


def test_all_float16_numbers_are_converted() -> None:
    """Small ones without a leading one, both zeros, and the largest ones."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.where(np.isfinite(numbers), numbers, np.float16(1))
    rows = np.zeros((1, LANES), np.float32)
    rows[0, 5] = 1
    weight = np.zeros((len(numbers), LANES), np.float16)
    weight[:, 5] = numbers
    found = product(rows, weight, np.zeros(len(numbers), np.float32))[0]
    assert np.array_equal(found, numbers.astype(np.float32))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rows, weight, bias = arrays(37, 3 * LANES, 40)
    together = product(rows, weight, bias)
    for count in range(1, 37):
        assert np.array_equal(product(rows[:count], weight, bias), together[:count])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_parts_of_several_threads_have_the_bits_of_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = arrays(5, 2 * LANES, 61)
    whole = product(rows, weight, bias)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled_products, "_PART", weight.size)
    assert np.array_equal(product(rows, weight, bias), whole)


def test_the_order_of_sums_is_the_same_on_every_processor() -> None:
    """32 sums of every 32nd product, each rounded once, and then halves of them."""
    rows, weight, bias = arrays(1, 4 * LANES, 9)
    parts = rows[0].reshape(-1, LANES), weight.astype(np.float32).reshape(9, -1, LANES)
    sums = np.zeros((9, LANES), np.float32)
    for step in range(4):
        sums = (parts[0][step].astype(float) * parts[1][:, step] + sums).astype(np.float32)
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    assert np.array_equal(product(rows, weight, bias)[0], sums[:, 0] + bias)
