"""One optimizer step: forward and backward passes over its batches, clipping, AdamW.

batches ─ loss · scale ─ gradients / scale ─ clip ─ are all values finite? ─ AdamW
                                                        └ no: the weights do not change
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.amp import GradScaler

from indexing.splitmix64 import mix
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.device import Placement, random_state, restore_random_state, start_copy
from retro.model.mixture_of_experts import routing_metrics
from retro.model.retro import Retro
from retro.parallel.forward_backward import DistributedModel, StepContext, WholeModel, all_parameters
from retro.parallel.gradient_norms import clip_
from retro.parallel.pipeline_parallel import Pipeline
from retro.parallel.process_mesh import Processes
from retro.training.monitor import Monitor
from retro.training.optimizer import learning_rate
from retro.training.settings import TrainSettings

Update = Literal["applied", "overflow", "refused"]


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        metrics: `loss`, `lr`, `gradient_norm`; with loss scaling also `loss_scale`.
        monitored: metrics of the layer groups; empty in steps that the monitor skips.
        num_tokens: tokens of the step, of all processes.
        update: `applied`; `overflow`: skipped because the gradient was too large for float16, which a lower loss scale
            fixes; `refused`: the loss or the gradient is not finite, and weights and random state are as before the
            step.
    """

    metrics: dict[str, float]
    monitored: dict[str, float]
    num_tokens: int
    update: Update


class OptimizerStep:
    """Forward and backward passes, clipping and AdamW for a model in training mode.

    Attributes:
        scaler: the loss scale; disabled unless the precision is float16.
    """

    def __init__(
        self,
        model: DistributedModel,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        placement: Placement,
        settings: TrainSettings,
    ) -> None:
        self.model, self.optimizer, self.processes = model, optimizer, processes
        self.placement, self.settings = placement, settings
        self.scaler = make_scaler(placement)
        named = all_parameters(model.model_parts)
        self.parameters = [parameter for _, parameter in named]
        # The fused optimizer can; not with sharded tensors, which it does not mix with a plain flag.
        self._skips_on_device = processes.count == 1 and hasattr(optimizer, "_step_supports_amp_scaling")
        self.monitor = Monitor.of(named, placement.dtype, settings.monitor_every) if settings.monitor_every else None

    def __call__(self, step: int, batches: Sequence[Inputs]) -> StepResult:
        """Do a step.

        Args:
            step: its number, from 0.
            batches: this process's rows of each batch of the step.
        """
        lr = self._set_learning_rate(step)
        monitor = self.monitor if self.monitor and self.monitor.due(step + 1) else None
        randomness = random_state(self.placement.device)
        scale = self._loss_scale()
        measured, num_tokens = self.forward_backward(batches, scale)
        monitored = monitor.gradients(scale) if monitor else {}
        self._unscale_gradients()
        norm = clip_(self.parameters, self.settings.max_grad_norm or math.inf, self.model.gradient_norm())
        figures = torch.cat((norm.to(measured).reshape(1), measured))
        read, before = start_copy(figures), monitor.weights() if monitor else {}
        if self._skips_on_device:
            # The optimizer is queued before the host waits, and changes nothing if a value is not finite.
            self.optimizer.found_inf = 1 - figures[:2].isfinite().all().float()  # type: ignore[attr-defined]
            self.optimizer.step()
        gradient_norm, loss, *routing = read()  # waits
        update = judge(loss, gradient_norm, scale if self.scaler.is_enabled() else None)
        if update == "applied":
            if not self._skips_on_device:
                self.optimizer.step()
            monitored |= monitor.updates(before) if monitor else {}
        elif update == "refused":
            restore_random_state(self.placement.device, randomness)
        self._finish(update, scale)
        monitored = self.processes.merged(monitored) if monitor else {}
        if self.monitor:
            self.monitor.watch(step + 1, loss, gradient_norm, monitored)
        metrics = {"loss": loss, "lr": lr, "gradient_norm": gradient_norm}
        metrics |= {"loss_scale": scale} if self.scaler.is_enabled() else {}
        metrics |= routing_metrics(routing, self.model.model_parts[0].settings)
        return StepResult(metrics, monitored, num_tokens, update)

    def forward_backward(self, batches: Sequence[Inputs], scale: float) -> tuple[Tensor, int]:
        """Add up the gradients of the batches.

        The labels of all batches are counted first: the mean over the step is not the mean of the batches' means.

        Returns:
            Cross-entropy and `ROUTING` of the step, float32 [1 + 3], and its number of tokens.
        """
        counts = [(batch.labels != IGNORED_LABEL).sum() for batch in batches]
        num_labels = self.processes.sum(torch.stack(counts).sum(), "data").clamp(min=1)
        num_sequences = sum(len(batch.tokens) for batch in batches) * self.processes.data
        num_tokens = sum(batch.tokens.numel() for batch in batches) * self.processes.data
        measured = [
            self.model.forward_backward(
                batch, StepContext(num_labels, num_sequences, scale, last=index == len(batches))
            )
            for index, batch in enumerate(batches, start=1)
        ]
        return self.processes.sum(torch.stack(measured).sum(0)), num_tokens

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        return lr

    def _loss_scale(self) -> float:
        """The current scale. Reading it waits for the device, so it is read only if there is one."""
        if not self.scaler.is_enabled():
            return 1.0
        return float(self.scaler.scale(torch.ones((), device=self.placement.device)))

    def _unscale_gradients(self) -> None:
        """Divide the gradients by the scale and all-reduce the overflow flag: GradScaler does not do it across
        processes."""
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            for found_inf in self.scaler._found_inf_per_device(self.optimizer).values():
                self.processes.largest(found_inf)

    def _finish(self, update: Update, scale: float) -> None:
        """Update the scale and free the gradients. Refused steps and steps without gradients keep the scale."""
        keep = update == "refused" or all(parameter.grad is None for parameter in self.parameters)
        self.scaler.update(scale if keep else None)
        self.optimizer.zero_grad(set_to_none=True)


def make_scaler(placement: Placement) -> GradScaler:
    """The dynamic loss scale of float16: halved when a gradient overflows, doubled after 2,000 steps without an
    overflow."""
    return GradScaler(placement.device.type, enabled=placement.dtype == torch.float16)


def judge(loss: float, gradient_norm: float, scale: float | None) -> Update:
    """Decide whether a step is applied. The arguments are the same in every process.

    Args:
        loss: mean over the step.
        gradient_norm: norm of the unscaled gradient.
        scale: the loss scale; None without loss scaling. Below 1 the unscaled gradient is too large for float16, which
            no scale fixes.
    """
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return "applied"
    return "overflow" if math.isfinite(loss) and scale is not None and scale >= 1 else "refused"


def distributed_model(
    model: Retro, processes: Processes, placement: Placement, settings: TrainSettings, flops: float
) -> DistributedModel:
    """Divide a model among the processes. With several, each data-parallel process has its own random numbers for
    dropout.

    `flops` are those of all steps in this process: see `Placement.compiles`.
    """
    if processes.count > 1:
        torch.manual_seed(mix(mix(settings.seed) + processes.data_rank) >> 1)
    compiled = placement.compiles(settings.compile, flops)
    if processes.along("pipeline") is not None:
        return Pipeline(model, processes, placement, settings.batch_size, compiled=compiled)
    return WholeModel(model, processes, placement, compiled=compiled)
