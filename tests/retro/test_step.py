"""What a step logs and sets, in float32; `test_float16.py` has the loss scale."""

from dataclasses import replace

import pytest

from retro.loss import losses
from retro.model import Retro
from retro.mup import learning_rate_factors
from retro.optimizer import make_optimizer
from retro.train_settings import TrainSettings
from tests.retro.small_model import batch, build, step_of


def test_the_loss_is_the_cross_entropy_and_the_z_loss_stands_beside_it() -> None:
    tokens, _, _ = batch()
    model = build()
    settings = TrainSettings(steps=10, warmup_steps=0, z_loss=0.01, accumulation=2, lr=1e-3)
    expected = losses(model.hidden(tokens), model.output_weight, tokens, z_weight=0.01)
    optimizer = make_optimizer(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = iter([{"tokens": tokens, "labels": tokens} for _ in range(2)])
    result = step_of(model, optimizer, batches, settings)(0)
    metrics = result.metrics
    assert result.num_tokens == 2 * tokens.numel()
    assert metrics["loss"] == pytest.approx(expected.cross_entropy.item())
    assert metrics["z_loss"] == pytest.approx(expected.z_loss.item())
    assert metrics["z_loss"] > 0


def test_groups_learn_at_their_share_of_the_schedule() -> None:
    tokens, _, _ = batch()
    model = Retro(replace(build().settings, init="mup", mup_base_width=16))
    settings = TrainSettings(steps=10, warmup_steps=2, lr=1e-3)
    optimizer = make_optimizer(
        model.named_parameters(),
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
        factors=learning_rate_factors(model),
    )
    metrics = step_of(model, optimizer, iter([{"tokens": tokens, "labels": tokens}]), settings)(0).metrics
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert metrics["lr"] == pytest.approx(5e-4, rel=1e-3)
    assert rates[id(model.embedding.weight)] == rates[id(model.norm.weight)] == metrics["lr"]
    assert rates[id(model.attention["0"].block.query.weight)] == metrics["lr"] / 2  # 32 inputs
    assert rates[id(model.feed_forward["0"].block.out.weight)] == metrics["lr"] / 4  # 64
