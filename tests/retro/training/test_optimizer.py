"""Learning-rate schedules at their ends, which parameters decay, and with muP equal changes of activations at every width."""

from typing import Any

import pytest
import torch
from torch import nn

from retro.model.retro import Retro
from retro.model_settings import updated
from retro.training.optimizer import learning_rate, learning_rate_factors, make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import SETTINGS, build, inputs, plain_loss


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


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (60, 12), (120, 20), (240, 24), (90_000, 100)])
def test_the_warmup_is_a_tenth_of_the_steps_but_20_to_100_and_at_most_a_fifth(steps: int, warmup: int) -> None:
    assert TrainSettings(steps=steps).warmup == TrainSettings(steps=steps).for_model("tiny").warmup_steps == warmup


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


@pytest.mark.parametrize("scheme", ["transformer-xl", "smeared", "neox"])
def test_biases_and_taps_of_heads_do_not_decay(scheme: str) -> None:
    """Biases (Transformer-XL's u and v) and taps do not decay although they have two dimensions."""
    model = build(scheme, **{"experts.num_experts": 0 if scheme == "neox" else 4})  # experts have no biases
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    spared = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters() if not decay[id(p)]}
    found = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters()}
    of_heads = {"content_bias", "distance_bias", "key_taps", "query_taps"}
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


# --- one learning rate for all widths --------------------------------------------------------------------------------


def movement(width: int, **changes: Any) -> dict[str, float]:
    """Root mean square change of activations in three training steps of a model of the given width."""
    torch.manual_seed(0)
    sizes = {
        "d_model": width,
        "d_ffw": 2 * width,
        "attention.head_dim": width // 2,
        "num_layers": 2,
        "retrieval.cca_layers": (2,),
    }
    encoder = {"encoder.d_model": width, "encoder.d_ffw": 2 * width, "encoder.head_dim": width // 2}
    model = Retro(updated(SETTINGS, {**sizes, **encoder, "mup_base_width": 32, **changes}))
    optimizer = make_optimizer([model], TrainSettings(lr=1e-2, weight_decay=0.0), learning_rate_factors(model))
    found: dict[str, torch.Tensor] = {}
    watched = {"self-attention": model.attention["1"], "cross-attention": model.cross["2"]}
    watched |= {"feed-forward": model.feed_forward["1"], "encoder": model.encoder.feed_forward[1]}
    for name, residual in watched.items():
        residual.block.register_forward_hook(lambda _, __, output, name=name: found.__setitem__(name, output.detach()))
    read = inputs()

    def current_activations() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found["logits"] = model(read)
        return dict(found)

    before = current_activations()
    for _ in range(3):
        plain_loss(model.hidden(read)[0], model.output_weight, read.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = current_activations()
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


@pytest.mark.parametrize("tied", [True, False])
def test_activations_change_equally_at_every_width(tied: bool) -> None:
    """The coordinate check of Yang et al. (2022), appendix D.1."""

    def growth(**changes: Any) -> dict[str, float]:
        """Ratio of the changes in a model eight times as wide."""
        narrow, wide = (movement(width, tied_embeddings=tied, **changes) for width in (32, 256))
        return {name: wide[name] / narrow[name] for name in narrow}

    assert all(factor < 1.5 for factor in growth(init="mup").values())
    without = growth(init="depth-scaled")
    assert all(without[name] > 2.5 for name in ("self-attention", "cross-attention", "feed-forward", "encoder"))


@pytest.mark.parametrize(
    ("preset", "changes", "optimizer", "lr"),
    [
        ("tiny", {}, "muon", 3e-2),
        ("base-cpu", {}, "muon", 3e-2),
        ("small", {"lr": 5e-3}, "muon", 5e-3),
        ("small", {"optimizer": "adamw"}, "adamw", 1e-3),
        ("small", {"init_from": "run"}, "adamw", 1e-3),
        ("small", {"init_from": "run", "weights": "retrieval"}, "adamw", 1e-3),
        ("172m", {}, "adamw", 1e-3),
        ("", {}, "adamw", 1e-3),
        ("", {"optimizer": "muon"}, "muon", 3e-2),
    ],
)
def test_new_models_of_small_presets_learn_with_muon(preset: str, changes: dict, optimizer: str, lr: float) -> None:
    settings = TrainSettings(**changes).for_model(preset)
    assert (settings.optimizer, settings.lr) == (optimizer, lr)
    assert settings.betas == ((0.5, 0.99) if optimizer == "muon" else (0.9, 0.95))  # docs/results/recipe.md
    assert settings.for_model(preset) == settings  # as a run records it
