"""Learning-rate schedules at their ends, and which parameters decay."""

import pytest
import torch
from torch import nn

from retro.training.optimizer import learning_rate, make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import build


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1), ("wsd", 1, 0.1)]
)
def test_schedules_warm_up_and_end_at_their_final_rate(schedule, middle: float, end: float) -> None:
    settings = TrainSettings(
        lr_schedule=schedule, steps=210, warmup_steps=10, lr=1.0, min_lr_ratio=0.1, decay_ratio=0.2
    )

    def rate(step: int) -> float:
        return learning_rate(step, settings)

    assert rate(0) == pytest.approx(0.1, abs=1e-6)
    assert rate(9) == pytest.approx(1)
    assert rate(10) == pytest.approx(1)
    assert rate(110) == pytest.approx(middle)
    assert rate(210) == pytest.approx(end)
    values = [rate(step) for step in range(10, 211)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(99, 9), (60, 6), (5, 0), (100, 100), (1000, 100)])
def test_a_run_with_fewer_steps_than_its_warmup_warms_up_in_a_tenth_of_them(steps: int, warmup: int) -> None:
    settings = TrainSettings(steps=steps, warmup_steps=100, lr=1.0)
    rates = [learning_rate(step, settings) for step in range(steps)]
    assert max(range(steps), key=rates.__getitem__) == max(0, warmup - 1)
    assert rates[max(0, warmup - 1)] == pytest.approx(1.0)


def test_matrices_decay_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
    }
    assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("scheme", ["transformer-xl", "smeared", "smeared-far", "neox"])
def test_biases_and_taps_of_heads_do_not_decay(scheme: str) -> None:
    """Biases (Transformer-XL's u and v), taps and smear ratios do not decay although they have two dimensions."""
    model = build(scheme, **{"experts.num_experts": 0 if scheme == "neox" else 4})  # experts have no biases
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    spared = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters() if not decay[id(p)]}
    found = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters()}
    of_heads = {"content_bias", "distance_bias", "key_taps", "query_taps", "smear"}
    assert of_heads & found == of_heads & spared
    assert bool(of_heads & found) == (scheme != "neox")
    matrices = {
        "embedding",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "up_proj",
        "down_proj",
        "router",
        "distance_proj",
        "head",
    }
    assert {name for name, p in model.named_parameters() if decay[id(p)]} == {
        name for name, p in model.named_parameters() if name.split(".")[-2] in matrices and name.endswith(".weight")
    }


def test_betas_are_the_decay_of_the_moments() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = make_optimizer([layer], TrainSettings(beta1=0.8, beta2=0.6))
    layer.weight.grad = gradient = torch.randn(4, 4)
    optimizer.step()
    moments = optimizer.state[layer.weight]
    torch.testing.assert_close(moments["exp_avg"], 0.2 * gradient)
    torch.testing.assert_close(moments["exp_avg_sq"], 0.4 * gradient.square())


def test_lr_factors_scale_the_learning_rate_and_keep_the_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    factors = {"1.weight": 0.25}
    optimizer = make_optimizer([model], TrainSettings(lr=1e-2), factors)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert {name: found[id(p)]["lr_factor"] for name, p in model.named_parameters()} == {
        "0.weight": 1,
        "0.bias": 1,
        "1.weight": 0.25,
        "1.bias": 1,
    }
    before = [layer.weight.detach().clone() for layer in model]
    for layer in model:
        layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    for layer, weight in zip(model, before, strict=True):  # zero gradients leave only the decay
        torch.testing.assert_close(layer.weight.detach(), weight * (1 - 1e-2 * 0.1))
