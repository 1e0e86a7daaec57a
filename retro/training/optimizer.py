"""The optimizer with its parameter groups, and the learning-rate schedules (paper, section 3 and table 11)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from indexing.store.errors import InputError
from retro.model.mixture_of_experts import ExpertLinear
from retro.model.retro import Retro
from retro.optimizers.muon import Muon, layer_matrices
from retro.training.settings import TrainSettings


def make_optimizer(
    parts: Iterable[nn.Module],
    settings: TrainSettings,
    factors: Mapping[str, float] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> torch.optim.AdamW:
    """The optimizer of `train.optimizer`, with weight decay on matrices and embeddings only; see `decaying`.

    Args:
        parts: parts of a model; a parameter has the same name in every part.
        settings: learning rate, betas and weight decay.
        factors: factors of the learning rate by name of the parameter, default 1; see `learning_rate_factors`. Each
            group keeps its factor as `lr_factor`. The decay per step does not depend on it. Muon's matrices have one of
            their own.
        dtype: of the products of Muon.

    Raises:
        InputError: `muon`, and no matrix of a layer is trained.
    """
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    models, muon = list(parts), settings.optimizer == "muon"
    named = [named for model in models for named in model.named_parameters()]
    matrices = {id(parameter) for model in models for parameter in decaying(model)}
    of_muon = {id(parameter) for model in models for parameter in layer_matrices(model).values()} if muon else set()
    for decays in (True, False):
        for name, parameter in named:
            if parameter.requires_grad and (id(parameter) in matrices) == decays:
                orthogonal = id(parameter) in of_muon
                factor = settings.muon_lr / settings.peak_lr if orthogonal else factors.get(name, 1.0)
                decay = (
                    settings.weight_decay / factor if decays else 0.0
                )  # the optimizer multiplies it by the learning rate
                new = {"params": [], "weight_decay": decay, "lr": settings.peak_lr * factor, "lr_factor": factor}
                new |= {"orthogonal": orthogonal, "momentum": settings.muon_momentum} if muon else {}
                groups.setdefault((orthogonal, decays, factor), new)["params"].append(parameter)
    if muon and not any(group["orthogonal"] for group in groups.values()):
        raise InputError(
            "train.optimizer = 'muon': no matrix of a layer is trained (train.weights, lora.rank). Set 'adamw', which updates the others."
        )
    options: dict[str, Any] = {"lr": settings.peak_lr, "betas": settings.betas, "fused": True}
    if muon:
        return Muon(groups.values(), torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, **options)
    return torch.optim.AdamW(list(groups.values()), **options)


def decaying(model: nn.Module) -> Iterator[Tensor]:
    """The parameters with weight decay: weights of linear layers and embeddings.

    Gains, biases and vectors of heads (`PerHead`: Transformer-XL's u and v, taps) have none.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
            yield module.weight


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The learning rate of a step, counted from 0: linear warm-up from 1e-7, then `train.lr_schedule`."""
    lr, warmup_steps = settings.peak_lr, settings.warmup
    if step < warmup_steps:
        return 1e-7 + (lr - 1e-7) * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, settings.steps - warmup_steps)
    if settings.lr_schedule == "constant":
        share = 1.0
    elif settings.lr_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif settings.lr_schedule == "linear":
        share = max(0.0, 1 - progress)
    else:
        share = min(1.0, max(0.0, (1 - progress) / settings.decay_ratio))
    return lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * share)


def learning_rate_factors(model: Retro) -> dict[str, float]:
    """Name of a parameter → factor of its learning rate, for those that do not learn at `train.lr`. Empty without muP.

    Maximal update parametrization (Yang et al. 2022, arXiv 2203.03466, table 8, for Adam): one learning rate for all
    widths. A step changes activations by the same amount in wide and narrow models. With `init` = mup

        hidden matrices    learn at mup_base_width / inputs of train.lr (here); initial weights as usual, 1/sqrt(inputs)
        embeddings         enter the stream times sqrt(mup_base_width), not sqrt(d_model), and learn at train.lr
        output layer       is read times mup_base_width / d_model; its first weights, where not tied, do not depend on the width
        attention          has scores q·k / C, not q·k / sqrt(C)

    Adapters learn at `train.lr`.
    """
    settings = model.settings
    if settings.init != "mup":
        return {}
    return {
        f"{name}.weight": settings.mup_base_width / module.in_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | ExpertLinear) and module is not model.head and ".lora_" not in name
    }
