"""What a training step logs and which learning rates it sets, in float32; `test_float16.py` covers the loss scale."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retro.batch.inputs import Inputs
from retro.model.retro import Retro
from retro.training.optimizer import learning_rate_factors, make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import answers_only, batch, build, plain_loss, split_batch, step_of


def test_the_logged_loss_is_the_mean_cross_entropy() -> None:
    tokens, _, _ = batch()
    model = build()
    settings = TrainSettings(steps=10, warmup_steps=0, gradient_accumulation_steps=2, lr=1e-3)
    expected = plain_loss(model.hidden(Inputs(tokens))[0], model.output_weight, tokens)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    batches = iter([Inputs(tokens, labels=tokens) for _ in range(2)])
    result = step_of(model, optimizer, batches, settings)(0)
    assert result.num_tokens == 2 * tokens.numel()
    assert result.metrics["loss"] == pytest.approx(expected.item())


def test_learning_rates_of_groups_are_scaled_by_their_factor() -> None:
    tokens, _, _ = batch()
    model = Retro(replace(build().settings, init="mup", mup_base_width=16))
    settings = TrainSettings(steps=10, warmup_steps=2, lr=1e-3)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3), learning_rate_factors(model))
    metrics = step_of(model, optimizer, iter([Inputs(tokens, labels=tokens)]), settings)(0).metrics
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert metrics["lr"] == pytest.approx(5e-4, rel=1e-3)
    assert rates[id(model.embedding.weight)] == rates[id(model.norm.weight)] == metrics["lr"]
    assert rates[id(model.attention["0"].block.q_proj.weight)] == metrics["lr"] / 2  # 32 input features
    assert rates[id(model.feed_forward["0"].block.down_proj.weight)] == metrics["lr"] / 4  # 64 input features


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts.num_experts": 4, "experts.every": 1},
        {"copy_head.context": True, "copy_head.neighbors": True},
    ],
)
def test_a_step_averages_over_its_labels_for_any_number_of_batches(changes: dict[str, Any]) -> None:
    """The batches have unequal numbers of labels, so a mean of batch means would differ."""
    found: dict[int, tuple[dict[str, float], dict[str, torch.Tensor]]] = {}
    for accumulation in (1, 2, 4):
        model = build(**changes).train()
        settings = TrainSettings(
            steps=1,
            warmup_steps=0,
            gradient_accumulation_steps=accumulation,
            lr=1e-3,
            max_grad_norm=0,
            monitor_every=0,
        )
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lr_factor": 1.0}], lr=1e-3)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        metrics = step_of(model, optimizer, iter(split_batch(answers_only(), accumulation)), settings)(0).metrics
        steps = {name: value.detach() - before[name] for name, value in model.named_parameters()}
        found[accumulation] = metrics, steps  # with plain SGD a step is the gradient
    for accumulation in (2, 4):
        assert found[accumulation][0] == pytest.approx(found[1][0], rel=1e-4)
        torch.testing.assert_close(found[accumulation][1], found[1][1], rtol=1e-3, atol=1e-7)


class HostReads(TorchDispatchMode):
    """Counts scalars that the host reads one by one; each read waits for the GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_step_reads_all_its_metrics_in_one_transfer() -> None:
    """Only the loss reads one more number of each batch: how many of its labels count."""
    model, whole = (
        build(**{"experts.num_experts": 4, "experts.every": 1}).train(),
        answers_only(),
    )
    settings = TrainSettings(steps=2, warmup_steps=0, gradient_accumulation_steps=2, monitor_every=0)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    step = step_of(model, optimizer, iter(split_batch(whole, 2) * 2), settings)
    step(0)
    with HostReads() as reads:
        step(1)
    assert reads.count == settings.gradient_accumulation_steps
