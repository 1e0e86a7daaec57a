"""Packed weights change the time of products, and their values by the rounding of weights to 16 bits."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from indexing.machine import Precision, onednn_has_bfloat16
from retro import device
from retro.device import Placement, choose_inference_placement
from retro.inference import packed_weights
from retro.inference.decoder import Decoder
from retro.inference.packed_kernels import FEW_ROWS
from retro.inference.packed_weights import PackedLinear, can_pack, kernel_for_many, pack
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from tests.retro.inference.test_decoder import retriever
from tests.retro.small_model import build, inputs

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = (Placement(CPU, dtype, half_weights=True) for dtype in (torch.float32, torch.bfloat16))
needs_fbgemm = pytest.mark.skipif(not can_pack(FLOAT32), reason="PyTorch has no FBGEMM on this machine")
needs_bfloat16 = pytest.mark.skipif(not onednn_has_bfloat16(), reason="oneDNN packs no weights on this machine")
WITH_BFLOAT16 = pytest.param("bfloat16", marks=needs_bfloat16)
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # the libraries use no newer instructions
GENERATE = """
import torch
from retro.device import choose_inference_placement
from retro.inference.decoder import Decoder
from retro.inference.packed_weights import PackedLinear, can_pack, pack
from tests.retro.small_model import build

assert choose_inference_placement("cpu", "auto").dtype == torch.float32
for precision in ("auto", "bfloat16"):
    placement = choose_inference_placement("cpu", precision)
    model = build("rope").eval()
    pack(model, placement)
    placement.cast(model)
    assert can_pack(placement) == any(isinstance(module, PackedLinear) for module in model.modules())
    decoder = Decoder(model, placement, 32)
    row = decoder.add([1, 2, 3], None)
    assert decoder.read([row]).isfinite().all()
"""


def packed(placement: Placement, scheme: str = "rope") -> Retro:
    model = build(scheme).eval()
    pack(model, placement)
    placement.cast(model)
    return model


@needs_fbgemm
@pytest.mark.parametrize("many", ["float16", "fbgemm", "float32", WITH_BFLOAT16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (1, FEW_ROWS), (2, 33)])
@pytest.mark.parametrize("inputs", [96, 45])
def test_a_packed_product_equals_that_of_a_linear_layer(
    inputs: int, shape: tuple[int, int], bias: bool, many: str
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, 80, bias=bias), torch.randn(*shape, inputs)
    with torch.inference_mode():
        product = PackedLinear(layer.weight, layer.bias, many)(x)
        kernel = many if shape[0] * shape[1] > FEW_ROWS else "float16"
        assert product.dtype == (torch.bfloat16 if kernel == "bfloat16" else torch.float32)
        if kernel == "bfloat16":
            assert torch.equal(product, layer.bfloat16()(x.bfloat16()))
        else:
            weight = layer.weight if kernel == "float32" else layer.weight.half().float()
            torch.testing.assert_close(product, F.linear(x, weight, layer.bias))


@needs_fbgemm
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    layer, x = PackedLinear(torch.randn(1000, 600), None, "float16"), torch.randn(140, 600)
    for rows in range(1, 140):
        assert torch.equal(layer(x[:rows]), layer(x)[:rows])


@needs_fbgemm
@pytest.mark.parametrize("num_rows", [1, 2, FEW_ROWS, 40])
def test_joined_products_have_the_bits_of_single_ones(num_rows: int) -> None:
    torch.manual_seed(0)
    weights, x = [torch.randn(outputs, 100) for outputs in (72, 24, 24)], torch.randn(num_rows, 100)
    single = [PackedLinear(weight, None, "float16")(x) for weight in weights]
    assert torch.equal(PackedLinear(torch.cat(weights), None, "float16")(x), torch.cat(single, dim=1))


@needs_fbgemm
@pytest.mark.parametrize(
    ("precision", "many"),
    [("float16", "float16"), ("auto", "fbgemm"), pytest.param("bfloat16", "bfloat16", marks=needs_bfloat16)],
)
def test_a_precision_names_its_kernel_for_many_rows_and_auto_asks_the_table(
    precision: Precision, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "fastest_products", lambda *_: "float32")
    monkeypatch.setattr(packed_weights, "fastest", lambda _: "fbgemm")
    assert kernel_for_many(choose_inference_placement("cpu", precision)) == many


@needs_fbgemm
@pytest.mark.parametrize("scheme", ["rope", "transformer-xl", "neox", "copying"])
@pytest.mark.parametrize(("placement", "bound"), [(FLOAT32, 2e-3), pytest.param(BFLOAT16, 0.05, marks=needs_bfloat16)])
def test_losses_change_by_the_rounding_of_weights_and_no_parameter_is_lost(
    scheme: str, placement: Placement, bound: float
) -> None:
    batch, exact = inputs(), build(scheme).eval()
    model = packed(placement, scheme)
    with torch.inference_mode():
        expected = exact.token_losses(batch)
        with placement.autocast():
            losses = model.token_losses(batch)
    assert 0 < float((losses - expected).abs().max()) < bound
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert count_parameters(model, embeddings=True) == count_parameters(exact, embeddings=True)


@needs_fbgemm
@pytest.mark.parametrize("placement", [FLOAT32, pytest.param(BFLOAT16, marks=needs_bfloat16)])
@pytest.mark.parametrize("scheme", ["rope", "copying"])
def test_few_tokens_have_logits_of_float32_with_float16_weights(scheme: str, placement: Placement) -> None:
    """Read token by token: with prompts of many rows, bfloat16 would round more."""
    exact, text = build(scheme).eval(), np.arange(1, 8)
    found = list[torch.Tensor]()
    for model, place in ((exact, Placement(CPU, torch.float32)), (packed(placement, scheme), placement)):
        decoder = Decoder(model, place, 32)
        row = decoder.add(text[:1], retriever(0))
        for token in text[1:]:
            logits = decoder.read([row])
            decoder.append(row, int(token))
        found.append(logits)
    torch.testing.assert_close(found[1], found[0], atol=5e-3, rtol=0)


def test_float32_keeps_its_weights() -> None:
    model, placement = build(), choose_inference_placement("cpu", "float32")
    pack(model, placement)
    assert not can_pack(placement)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_processor_without_kernels_for_bfloat16_generates_in_every_precision() -> None:
    ran = subprocess.run([sys.executable, "-c", GENERATE], env=os.environ | AVX2, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
