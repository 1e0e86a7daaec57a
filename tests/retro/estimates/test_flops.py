"""FLOPs by formula equal those that PyTorch counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from retro.adapters.adapters import train_only
from retro.batch.inputs import Inputs
from retro.device import Placement
from retro.estimates.flops import forward_flops, measured_flops, peak_flops, training_flops
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings, updated

SETTINGS = ModelSettings(
    vocab_size=50,
    d_model=32,
    d_ffw=48,
    attention=AttentionSettings(num_heads=3, head_dim=8),
    num_layers=3,
    retrieval=RetrievalSettings(cca_layers=(2, 3)),
    encoder=EncoderSettings(d_model=24, d_ffw=40, num_heads=2, head_dim=6, num_layers=2, cca_layers=(1,)),
    chunk_length=4,
)


OPTIONS: dict[str, dict[str, Any]] = {
    "rope": {},
    "transformer-xl": {"attention.positions": "transformer-xl"},
    "grouped": {"attention.positions": "alibi", "attention.num_kv_heads": 1, "activation": "swiglu"},
    "learned": {"attention.positions": "learned", "attention.qk_norm": True, "init": "mup", "shared_embeddings": True},
    "reading": {"retrieval.reader": "decoder", "retrieval.cca_layers": (), "attention.num_kv_heads": 1},
    "prefix": {"attention.prefix_tokens": 5, "attention.num_kv_heads": 1},
    "reading, prefix": {"retrieval.reader": "decoder", "retrieval.cca_layers": (), "attention.prefix_tokens": 5},
    "biased": {"retrieval.positions": "alibi", "attention.bias": "all", "feed_forward_bias": True, "norm": "layer"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_formula_equals_pytorchs_count(option: str, k: int) -> None:
    settings = updated(SETTINGS, OPTIONS[option])
    model = Retro(settings)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    neighbors = torch.zeros(1, 3, k, 8, dtype=torch.int64) if k else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(Inputs(tokens, neighbors=neighbors))
    # The formula omits Transformer-XL's projections of distances, which are computed once per batch.
    decoder, encoder, asking = 3 * 23 * 32 * 24, 2 * 15 * 24 * 12 + 11 * 24 * 12, 2 * 11 * 32 * 24
    left_out = 2 * (decoder + (encoder + asking if k else 0)) if option == "transformer-xl" else 0
    assert forward_flops(settings, 12, k) + left_out == counter.get_total_flops()


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("weights", ["all", "retrieval"])
def test_only_computed_gradients_are_counted(weights: Any, k: int) -> None:
    """Gradients of a frozen decoder stop at its first cross-attention, here in the fourth of six layers."""
    settings = updated(SETTINGS, {"num_layers": 6, "retrieval.cca_layers": (4, 5)})
    model = Retro(settings)
    train_only(model, weights)
    neighbors = torch.zeros(1, 3, k, 8, dtype=torch.int64) if k else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(Inputs(torch.zeros(1, 12, dtype=torch.int64), neighbors=neighbors))
        if logits.requires_grad:
            logits.sum().backward()
    rounding = 0.0 if weights == "all" else 0.02
    assert training_flops(settings, 12, k, weights) == pytest.approx(counter.get_total_flops(), rel=rounding)


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_only_the_experts_of_a_token_are_counted(experts_per_token: int) -> None:
    """With a capacity factor of 1 the queues in training have as many slots."""
    settings = updated(
        SETTINGS,
        {
            "experts.num_experts": 4,
            "experts.every": 1,
            "experts.per_token": experts_per_token,
            "experts.capacity_factor": 1.0,
        },
    )
    model = Retro(settings).train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(Inputs(torch.zeros(1, 12, dtype=torch.int64)))
    assert forward_flops(settings, 12, 0) == counter.get_total_flops()


def test_a_large_model_needs_about_two_flops_per_parameter() -> None:
    settings = replace(PRESETS["7.5b"], vocab_size=128_000, chunk_length=64)
    per_token = forward_flops(settings, 2048, 0) / 2048
    assert per_token == pytest.approx(2 * 6.5e9 + 2 * 128_000 * 4096, rel=0.15)


@pytest.fixture
def measured_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the matrix products that would be measured."""
    found: list[int] = []
    monkeypatch.setattr("retro.estimates.flops.measured_flops", lambda _, size: found.append(size) or 1.0)
    return found


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_measures_large_products_only_in_fast_types(
    measured_sizes: list[int], monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr("retro.estimates.flops.onednn_has_bfloat16", lambda: has)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        peak_flops(Placement(torch.device("cpu"), dtype))
    assert measured_sizes == [2048, 2048 if has else 256, 256]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_gpu_with_a_known_name_has_its_peak_and_others_are_measured(
    measured_sizes: list[int], monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops(Placement(torch.device("cuda"), torch.bfloat16)) == (peak or 1.0)
    assert bool(measured_sizes) == (peak is None)
    assert peak_flops(Placement(torch.device("cuda"), torch.float32)) == 1.0


def test_the_peak_of_a_cpu_is_measured() -> None:
    placement = Placement(torch.device("cpu"), torch.float32)
    assert 1e8 < peak_flops(placement) < 1e14
    assert measured_flops(placement, size=64, repeats=1) > 0
