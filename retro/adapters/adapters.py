"""LoRA (from peft), and frozen weights.

    Retro ─ add_adapter: peft's LoRA layers around its matrices ─ train_only: sets requires_grad
    merge: LoRA's products are added to the matrices; the model is plain again

A checkpoint stores the model's tensors under their names without LoRA, and LoRA's tensors in addition. A prefix is part
of the model.
"""

import logging
import re
from typing import Any

from torch import nn

from indexing.store.errors import InputError
from retro.adapters.prefix import PREFIX
from retro.adapters.settings import LoraSettings, Weights
from retro.copying.sources import SOURCES
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.parallel.settings import ParallelSettings

log = logging.getLogger("retro")

RETRIEVAL = ("encoder.", "cross.", *(f"copy_head.{source.name}." for source in SOURCES if source.of_retrieval))
"""Prefixes of the names of parameters that a baseline lacks: encoder, chunked cross-attention, and what retrieval
copies from."""


def peft() -> Any:
    """Import the package peft.

    Raises:
        InputError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise InputError(f"lora.rank needs the package peft ({error}): run pip install 'retro[peft]'.") from error
    return peft


def add_adapter(model: Retro, settings: LoraSettings) -> None:
    """Add LoRA to a plain model, in place, if it has a rank. Initially it changes nothing (bit-identical outputs).

    Raises:
        InputError: peft is missing, or the model has no matrix with the name of a target.
    """
    if settings.rank:
        lora = peft()
        config = lora.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="|".join(map(re.escape, _targeted(model, settings.targets))),
        )
        lora.inject_adapter_in_model(config, model)


def matrices(model: nn.Module) -> dict[str, list[str]]:
    """Modules that can have LoRA, by name in `lora.targets`: `attention.q_proj`, `cross.attention.o_proj` …

    Names omit the numbers of layers. Routers, experts, embeddings and the output layer cannot have LoRA.
    """
    modules: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if not part.isdigit() and part != "block"]
        if isinstance(module, nn.Linear) and parts[0] != "head" and parts[-1] != "router":
            modules.setdefault(".".join(parts), []).append(name)
    return modules


def _targeted(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    known, chosen = matrices(model), []
    for target in targets:
        mine = [module for name, modules in known.items() if f"{name}.".startswith(f"{target}.") for module in modules]
        if not mine:
            raise InputError(
                f"lora.targets has {target!r}: accepted are {', '.join(known)}, and beginnings of these names."
            )
        chosen += mine
    return chosen


def train_only(model: nn.Module, weights: Weights) -> None:
    """Train only the parameters that `train.weights` names, and those of LoRA and of a prefix.

    Raises:
        InputError: the model has none of them.
    """
    for name, parameter in model.named_parameters():
        whole = weights == "all" or (weights == "retrieval" and name.startswith(RETRIEVAL))
        parameter.requires_grad_(whole or is_adapter(name))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"train.weights = {weights!r}: the model has no retrieval to train; set model.retrieval.cca_layers or "
            "model.copy_head.neighbors."
        )


def describe(model: nn.Module) -> str:
    """Describe how many parameters are trained, for the log."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{trained:,} of {count_parameters(model, embeddings=True):,} parameters are trained"


def check_parallel(lora: LoraSettings, parallel: ParallelSettings) -> None:
    """Raise InputError if processes cannot share a model with this adapter."""
    if lora.rank and parallel.tensor > 1:
        raise InputError(f"parallel.tensor = {parallel.tensor}: must be 1 with lora.rank = {lora.rank}.")


def merge(model: Retro) -> Retro:
    """Add LoRA's products to the matrices, in place: a plain model with the same outputs up to rounding."""
    from peft.tuners.lora import LoraLayer

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(module, name, child.get_base_layer())
    del model.peft_config
    return model


def is_adapter(name: str) -> bool:
    """True for parameters of LoRA or of a prefix."""
    return is_lora(name) or PREFIX in name


def is_lora(name: str) -> bool:
    """True for parameters of LoRA."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """The name of a parameter in checkpoints, without the levels that peft's layers add."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")
