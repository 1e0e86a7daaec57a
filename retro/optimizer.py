"""AdamW with decay groups and the learning-rate schedules (paper, section 3 and table 11)."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from retro.train_settings import Schedule


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> torch.optim.AdamW:
    """AdamW whose decay spares what is not a matrix: norm gains and biases.

    Args:
        parameters: by name; they are grouped by their number of dimensions, and by their factors.
        lr: peak learning rate.
        betas: of the two moments (paper: 0.9, 0.95).
        weight_decay: of matrices and embeddings (paper: 0.1).
        fused: one kernel for the whole step.
        factors: learning rates over that of the schedule, by the parameters' names; 1 where it says nothing
            (`mup.learning_rate_factors`). A group has its factor as `lr_factor`. All matrices decay at one pace.
    """
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    named = list(parameters)
    for decays in (True, False):
        for name, parameter in named:
            if parameter.requires_grad and (parameter.ndim >= 2) == decays:
                factor = factors.get(name, 1.0)
                decay = weight_decay / factor if decays else 0.0  # AdamW multiplies it by the learning rate
                new = {"params": [], "weight_decay": decay, "lr": lr * factor, "lr_factor": factor}
                groups.setdefault((decays, factor), new)["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=lr, betas=betas, fused=fused)


def learning_rate(
    step: int, *, schedule: Schedule, steps: int, warmup_steps: int, lr: float, min_lr_ratio: float, decay_share: float
) -> float:
    """The learning rate of a step, counted from 0: linear warm-up from 1e-7, then the schedule down to `min_lr_ratio`·lr.

    Args:
        step: the step to come.
        schedule: `cosine`, `linear`, `constant`, or `wsd`: constant, then linear over the last `decay_share` of the steps.
        steps: of the whole run.
        warmup_steps: of the warm-up (paper: 750).
        lr: the peak.
        min_lr_ratio: last learning rate over the peak (paper: 0.1).
        decay_share: of the steps, for `wsd`.
    """
    if step < warmup_steps:
        return 1e-7 + (lr - 1e-7) * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "constant":
        share = 1.0
    elif schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif schedule == "linear":
        share = max(0.0, 1 - progress)
    else:
        share = min(1.0, max(0.0, (1 - progress) / decay_share))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * share)
