"""AdamW with decay groups and the learning-rate schedules (paper, section 3 and table 11)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from retro.model.mixture_of_experts import ExpertLinear
from retro.training.settings import Schedule


def make_optimizer(
    parts: Iterable[nn.Module],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> torch.optim.AdamW:
    """AdamW that decays matrices, tables of embeddings and virtual tokens, and nothing else: see `decaying`.

    Args:
        parts: of a model, with names of parameters that do not depend on the part.
        lr: peak learning rate.
        betas: of the two moments (paper: 0.9, 0.95).
        weight_decay: of what decays (paper: 0.1).
        fused: one kernel for the whole step.
        factors: learning rates over that of the schedule, by the parameters' names; 1 for other names
            (`mup.learning_rate_factors`). A group has its factor as `lr_factor`. All matrices decay at one pace.
    """
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    models = list(parts)
    named = [named for model in models for named in model.named_parameters()]
    matrices = {id(parameter) for model in models for parameter in decaying(model)}
    for decays in (True, False):
        for name, parameter in named:
            if parameter.requires_grad and (id(parameter) in matrices) == decays:
                factor = factors.get(name, 1.0)
                decay = weight_decay / factor if decays else 0.0  # AdamW multiplies it by the learning rate
                new = {"params": [], "weight_decay": decay, "lr": lr * factor, "lr_factor": factor}
                groups.setdefault((decays, factor), new)["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=lr, betas=betas, fused=fused)


def decaying(model: nn.Module) -> Iterator[Tensor]:
    """The parameters that decay, by the modules that hold them: weights of matrices and tables.

    Gains, biases, and the vectors and numbers that each head has (`PerHead`: Transformer-XL's u and v, taps, smear) do not.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
            yield module.weight


def learning_rate(
    step: int,
    *,
    lr_schedule: Schedule,
    steps: int,
    warmup_steps: int,
    lr: float,
    min_lr_ratio: float,
    decay_ratio: float,
) -> float:
    """The learning rate of a step, counted from 0: linear warm-up from 1e-7, then the schedule down to `min_lr_ratio`·lr.

    Args:
        step: the step to come.
        lr_schedule: `cosine`, `linear`, `constant`, or `wsd`: constant, then linear over the last `decay_ratio` of the steps.
        steps: of the whole run.
        warmup_steps: of the warm-up (paper: 750).
        lr: the peak.
        min_lr_ratio: last learning rate over the peak (paper: 0.1).
        decay_ratio: of the steps, for `wsd`.
    """
    if step < warmup_steps:
        return 1e-7 + (lr - 1e-7) * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if lr_schedule == "constant":
        share = 1.0
    elif lr_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif lr_schedule == "linear":
        share = max(0.0, 1 - progress)
    else:
        share = min(1.0, max(0.0, (1 - progress) / decay_ratio))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * share)
