"""One optimizer step: forward and backward passes over its batches, clipping, AdamW.

batches ─ loss · scale ─ gradients / scale ─ clip ─ is all of it finite? ─ AdamW
                                                        └ no: the weights stay as they were
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp import GradScaler

from indexing.store.errors import InputError
from retro.device import Placement, Tensors, random_state, restore_random_state
from retro.gradients import clip_
from retro.loss import loss
from retro.model import Retro
from retro.monitor import Monitor
from retro.optimizer import learning_rate
from retro.train_settings import Compile, TrainSettings

Update = Literal["applied", "overflow", "refused"]


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        metrics: `loss`, `lr`, `gradient_norm`; and `loss_scale` where there is one.
        figures: of the monitor; empty but in the steps in which it looks.
        num_tokens: seen.
        update: `applied`; `overflow`, left out because the gradient was too large for float16, which a lower loss scale
            cures; `refused`: the loss or the gradient is not finite, and all is as before the step, the random state too.
    """

    metrics: dict[str, float]
    figures: dict[str, float]
    num_tokens: int
    update: Update


def make_scaler(placement: Placement) -> GradScaler:
    """The dynamic loss scale of float16: halved when a gradient overflows, doubled after 2,000 steps without. Else none."""
    return GradScaler(placement.device.type, enabled=placement.dtype == torch.float16)


def make_step(
    model: Retro,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensors],
    placement: Placement,
    settings: TrainSettings,
    scaler: GradScaler | None = None,
) -> Callable[[int], StepResult]:
    """A function that does the step of a number, counted from 0.

    Args:
        model: in training mode.
        optimizer: of its parameters.
        batches: `settings.accumulation` of them are taken for each step.
        placement: device and precision.
        settings: schedule, clipping, compilation, monitor.
        scaler: of the loss; None: a new one.
    """
    scaler = scaler or make_scaler(placement)
    monitor = Monitor.of(model, placement.dtype, settings.monitor_every) if settings.monitor_every else None
    compiled = wants_compilation(settings.compile, placement)
    # Whole, so that a graph break is an error and not a slow step. Shapes are few: one for each number of neighbors,
    # with and without document borders. Each is compiled once.
    hidden_of: Any = torch.compile(model.hidden, fullgraph=True, dynamic=False) if compiled else model.hidden

    def forward_backward(batch: Tensors) -> Tensor:
        labels = batch.pop("labels")
        with placement.autocast():
            value = loss(hidden_of(**batch), model.output_weight, labels, compiled=compiled) / settings.accumulation
        scaler.scale(value).backward()
        return value.detach()

    def step(number: int) -> StepResult:
        lr = learning_rate(
            number,
            schedule=settings.schedule,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps,
            lr=settings.lr,
            min_lr_ratio=settings.min_lr_ratio,
            decay_share=settings.decay_share,
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        randomness = random_state(placement.device)
        total, num_tokens = torch.zeros((), device=placement.device), 0
        for _ in range(settings.accumulation):
            batch = next(batches)
            num_tokens += batch["tokens"].numel()
            total += forward_backward(batch)
        looking = monitor if monitor and monitor.due(number + 1) else None
        figures = looking.gradients(scaler.get_scale()) if looking else {}
        scaler.unscale_(optimizer)
        norm = clip_(model.parameters(), settings.clip or math.inf)
        metrics = {"loss": total.item(), "lr": lr, "gradient_norm": norm.item()}
        scale = scaler.get_scale()
        update = judge(metrics["loss"], metrics["gradient_norm"], scale if scaler.is_enabled() else None)
        if update == "applied":
            before = looking.weights() if looking else {}
            optimizer.step()
            if looking:
                figures |= looking.updates(before)
        elif update == "refused":
            restore_random_state(placement.device, randomness)
        scaler.update(scale if update == "refused" else None)  # a bad batch says nothing of the scale
        optimizer.zero_grad(set_to_none=True)
        if monitor:
            monitor.watch(number + 1, metrics["loss"], metrics["gradient_norm"], figures)
        if scaler.is_enabled():
            metrics["loss_scale"] = scale
        return StepResult(metrics, figures, num_tokens, update)

    return step


def judge(loss: float, gradient_norm: float, scale: float | None) -> Update:
    """What becomes of an update: the one place that decides, by figures that are the same in every process.

    Args:
        loss: mean over the step.
        gradient_norm: of the true gradient.
        scale: of the loss; None: there is none. Below 1 the true gradient is too large for float16: no scale cures that.
    """
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return "applied"
    return "overflow" if math.isfinite(loss) and scale is not None and scale >= 1 else "refused"


def wants_compilation(choice: Compile, placement: Placement) -> bool:
    """Whether to compile: `auto` does so on CUDA, where it always pays; on a CPU it takes a minute first.

    Raises:
        InputError: it is asked for, and there is no C++ compiler for code of a CPU.
    """
    if choice == "yes" and placement.device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise InputError(
                "train.compile = 'yes': no C++ compiler was found; install one (g++), or set 'no'."
            ) from error
    return choice == "yes" or (choice == "auto" and placement.device.type == "cuda")
