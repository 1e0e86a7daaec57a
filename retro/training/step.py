"""One optimizer step: forward and backward passes over its batches, clipping, AdamW.

batches ─ loss · scale ─ gradients / scale ─ clip ─ is all of it finite? ─ AdamW
                                                        └ no: the weights stay as they were
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.amp import GradScaler

from indexing.store.errors import InputError
from retro.device import Placement, TensorBatch, random_state, restore_random_state
from retro.model.loss import IGNORED_LABEL
from retro.model.mixture_of_experts import routing_metrics
from retro.parallel.forward_backward import Passes, Share, all_parameters
from retro.parallel.gradient_norms import clip_
from retro.parallel.process_mesh import Processes
from retro.training.monitor import Monitor
from retro.training.optimizer import learning_rate
from retro.training.settings import Compile, TrainSettings

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
    passes: Passes,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[TensorBatch],
    processes: Processes,
    placement: Placement,
    settings: TrainSettings,
    scaler: GradScaler | None = None,
) -> Callable[[int], StepResult]:
    """A function that does the step of a number, counted from 0.

    Args:
        passes: of a model in training mode.
        optimizer: of its parameters.
        batches: this process's rows; `settings.gradient_accumulation_steps` of them are taken for each step.
        processes: that do the step together.
        placement: device and precision.
        settings: schedule, clipping, monitor.
        scaler: of the loss; None: a new one.
    """
    scaler = scaler or make_scaler(placement)
    named = all_parameters(passes.parts)
    parameters = [parameter for _, parameter in named]
    model = passes.parts[0].settings
    monitor = Monitor.of(named, placement.dtype, settings.monitor_every) if settings.monitor_every else None

    def forward_backward(scale: float) -> tuple[Tensor, int]:
        """All batches of a step. Their labels are counted first: a mean of the batches' means is not the step's mean."""
        taken = [next(batches) for _ in range(settings.gradient_accumulation_steps)]
        counts = [(batch["labels"] != IGNORED_LABEL).sum() for batch in taken]
        num_labels = processes.sum(torch.stack(counts).sum(), "data").clamp(min=1)
        num_sequences = sum(len(batch["tokens"]) for batch in taken) * processes.data
        num_tokens = sum(batch["tokens"].numel() for batch in taken) * processes.data
        parts = [
            passes.forward_backward(batch, Share(num_labels, num_sequences, scale, last=number == len(taken)))
            for number, batch in enumerate(taken, start=1)
        ]
        return torch.stack(parts).sum(0), num_tokens

    def step(number: int) -> StepResult:
        lr = _schedule(number, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        randomness = random_state(placement.device)
        # A new scaler makes its scale now. Reading it waits for the device, so not where there is none.
        scale = float(scaler.scale(torch.ones((), device=placement.device))) if scaler.is_enabled() else 1.0
        parts, num_tokens = forward_backward(scale)
        measured = processes.sum(parts)
        looking = monitor if monitor and monitor.due(number + 1) else None
        figures = looking.gradients(scale) if looking else {}
        _unscale(scaler, optimizer, processes)
        clipped = clip_(parameters, settings.max_grad_norm or math.inf, passes.gradient_norm())
        norm, loss, z_loss, *routing = torch.cat((clipped.to(measured).reshape(1), measured)).tolist()  # waits
        metrics = {"loss": loss, "lr": lr, "gradient_norm": norm}
        update = judge(loss, norm, scale if scaler.is_enabled() else None)
        if update == "applied":
            before = looking.weights() if looking else {}
            optimizer.step()
            if looking:
                figures |= looking.updates(before)
        elif update == "refused":
            restore_random_state(placement.device, randomness)
        silent = update == "refused" or all(parameter.grad is None for parameter in parameters)
        scaler.update(scale if silent else None)  # a bad batch, or one without gradients, says nothing of the scale
        optimizer.zero_grad(set_to_none=True)
        figures = processes.merged(figures) if looking else {}
        if monitor:
            monitor.watch(number + 1, loss, norm, figures)
        metrics |= {"z_loss": z_loss} if settings.z_loss_weight else {}
        metrics |= {"loss_scale": scale} if scaler.is_enabled() else {}
        return StepResult(metrics | routing_metrics(routing, model), figures, num_tokens, update)

    return step


def _schedule(number: int, settings: TrainSettings) -> float:
    """The learning rate of a step."""
    return learning_rate(
        number,
        lr_schedule=settings.lr_schedule,
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        lr=settings.lr,
        min_lr_ratio=settings.min_lr_ratio,
        decay_ratio=settings.decay_ratio,
    )


def _unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer, processes: Processes) -> None:
    """True gradients. That one process's overflow is all processes' affair, torch leaves to its caller."""
    scaler.unscale_(optimizer)
    if scaler.is_enabled():
        for found in scaler._found_inf_per_device(optimizer).values():
            processes.largest(found)


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
