"""Packed weights change the time of products, never a bit of them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from indexing.machine import has_bfloat16
from retro.device import Placement
from retro.inference.packed_weights import PackedLinear, can_pack, pack
from retro.model.presets import count_parameters
from tests.retro.small_model import build, inputs

BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)
needs_packing = pytest.mark.skipif(not can_pack(BFLOAT16), reason="oneDNN packs no weights on this machine")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # the libraries use no newer instructions
GENERATE = """
import torch
from retro.device import choose_placement
from retro.inference.decoder import Decoder
from retro.inference.packed_weights import can_pack, pack
from tests.retro.small_model import build

assert choose_placement("cpu", "auto").dtype == torch.float32
placement = choose_placement("cpu", "bfloat16")
assert not can_pack(placement)
model = build("rope").eval()
placement.cast(model)
pack(model, placement)
decoder = Decoder(model, placement, 32)
row = decoder.add([1, 2, 3], None)
assert decoder.read([row]).isfinite().all()
"""


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 33)])
def test_a_packed_product_equals_that_of_a_linear_layer(bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 80, bias=bias).bfloat16(), torch.randn(*shape, 96)
    with torch.inference_mode():
        packed = PackedLinear(layer.weight, layer.bias)(x)
        assert packed.dtype == torch.bfloat16
        torch.testing.assert_close(packed, layer(x.bfloat16()))


@needs_packing
@pytest.mark.parametrize("scheme", ["rope", "transformer-xl", "neox", "copying"])
def test_a_packed_model_computes_the_same_losses_and_counts_as_many_parameters(scheme: str) -> None:
    model, batch = build(scheme), inputs()
    BFLOAT16.cast(model)
    parameters = count_parameters(model, embeddings=True)
    with torch.inference_mode(), BFLOAT16.autocast():
        expected = model.token_losses(batch)
        pack(model, BFLOAT16)
        assert torch.equal(model.token_losses(batch), expected)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert count_parameters(model, embeddings=True) == parameters


def test_other_precisions_keep_their_weights() -> None:
    model, placement = build(), Placement(torch.device("cpu"), torch.float32)
    pack(model, placement)
    assert not can_pack(placement)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_processor_without_kernels_for_bfloat16_generates_in_bfloat16_without_packing() -> None:
    ran = subprocess.run([sys.executable, "-c", GENERATE], env=os.environ | AVX2, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_every_processor_that_multiplies_bfloat16_fast_packs_weights() -> None:
    assert can_pack(BFLOAT16) or not has_bfloat16("cpu")
