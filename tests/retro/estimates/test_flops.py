"""Operations by formula equal those that torch counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from retro.device import Placement
from retro.estimates.flops import forward_flops, measured_flops, peak_flops, training_flops
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model.settings import AttentionSettings, EncoderSettings, ModelSettings, RetrievalSettings, updated
from retro.tuning.adapters import train_only
from retro.tuning.settings import TuningSettings

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
    "biased": {"retrieval.positions": "alibi", "attention.bias": "all", "feed_forward_bias": True, "norm": "layer"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_formula_counts_what_torch_counts(option: str, k: int) -> None:
    settings = updated(SETTINGS, OPTIONS[option])
    model = Retro(settings)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    neighbors = torch.zeros(1, 3, k, 8, dtype=torch.int64) if k else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, neighbors=neighbors)
    # Transformer-XL's projections of distances, made once for a batch, are left out of the formula.
    decoder, encoder, asking = 3 * 23 * 32 * 24, 2 * 15 * 24 * 12 + 11 * 24 * 12, 2 * 11 * 32 * 24
    left_out = 2 * (decoder + (encoder + asking if k else 0)) if option == "transformer-xl" else 0
    assert forward_flops(settings, 12, k) + left_out == counter.get_total_flops()


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("weights", ["all", "retrieval"])
def test_of_training_the_gradients_that_there_are_are_counted(weights: Any, k: int) -> None:
    """Those of a frozen decoder end at its first cross-attention, here in the fourth of six layers."""
    settings, tuning = (
        updated(SETTINGS, {"num_layers": 6, "retrieval.cca_layers": (4, 5)}),
        TuningSettings(weights=weights),
    )
    model = Retro(settings)
    train_only(model, tuning)
    neighbors = torch.zeros(1, 3, k, 8, dtype=torch.int64) if k else None
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, 12, dtype=torch.int64), neighbors=neighbors)
        if logits.requires_grad:
            logits.sum().backward()
    rounding = 0.0 if weights == "all" else 0.02
    assert training_flops(settings, 12, k, tuning) == pytest.approx(counter.get_total_flops(), rel=rounding)


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_of_experts_those_that_a_token_asks_are_counted(experts_per_token: int) -> None:
    """In training with a capacity factor of 1 their queues have as many places."""
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
        model(torch.zeros(1, 12, dtype=torch.int64))
    assert forward_flops(settings, 12, 0) == counter.get_total_flops()


def test_of_large_models_it_is_about_two_for_each_parameter() -> None:
    settings = replace(PRESETS["7.5b"], vocab_size=128_000, chunk_length=64)
    per_token = forward_flops(settings, 2048, 0) / 2048
    assert per_token == pytest.approx(2 * 6.5e9 + 2 * 128_000 * 4096, rel=0.15)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the products that are measured, in place of measuring them."""
    found: list[int] = []
    monkeypatch.setattr("retro.estimates.flops.measured_flops", lambda _, size: found.append(size) or 1.0)
    return found


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_measures_a_large_product_only_in_types_that_it_multiplies_fast(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr("retro.estimates.flops.has_bfloat16", lambda _: has)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        peak_flops(Placement(torch.device("cpu"), dtype))
    assert sizes == [2048, 2048 if has else 256, 256]


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
def test_a_gpu_has_the_peak_of_its_exact_name_or_is_measured(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops(Placement(torch.device("cuda"), torch.bfloat16)) == (peak or 1.0)
    assert bool(sizes) == (peak is None)
    assert peak_flops(Placement(torch.device("cuda"), torch.float32)) == 1.0


def test_the_peak_of_a_device_without_a_data_sheet_is_measured() -> None:
    placement = Placement(torch.device("cpu"), torch.float32)
    assert 1e8 < peak_flops(placement) < 1e14
    assert measured_flops(placement, size=64, repeats=1) > 0
