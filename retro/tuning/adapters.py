"""What a run trains of a model, and the adapters beside it, which are peft's.

    Retro ─ add_adapter ─ lora: peft's layers around its matrices       ┐
                          prefix, prompt: `virtual_tokens`, for peft's  ├─ train_only: what gets a gradient
                          encoder of a prefix, or its prompt embedding  ┘
    merged: LoRA's products added to the matrices, and a plain model again

A checkpoint has the model's tensors under the names that they have without an adapter, and the adapter's beside them.
"""

import logging
import re
from typing import Any

from torch import nn

from indexing.store.errors import InputError
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.parallel.settings import ParallelSettings
from retro.tuning.settings import RETRIEVAL, TuningSettings
from retro.tuning.virtual_tokens import Prefix, Prompt

log = logging.getLogger("retro")


def peft() -> Any:
    """The package.

    Raises:
        InputError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise InputError(f"tuning.adapter needs the package peft ({error}): pip install 'retro[peft]'.") from error
    return peft


def add_adapter(model: Retro, tuning: TuningSettings) -> None:
    """Give a plain model the adapter of the settings, in place, if they ask for one.

    LoRA begins as nothing, to the bit. A prefix or prompt begins as what tokens drawn from the vocabulary say.

    Raises:
        InputError: peft is missing, or the model has nothing of the name of a target.
    """
    if tuning.adapter == "lora":
        lora = peft()
        config = lora.LoraConfig(
            r=tuning.rank,
            lora_alpha=tuning.alpha,
            lora_dropout=tuning.dropout,
            target_modules="|".join(map(re.escape, _targeted(model, tuning.targets))),
        )
        lora.inject_adapter_in_model(config, model)
    elif tuning.adapter != "none":
        make = Prefix if tuning.adapter == "prefix" else Prompt
        model.virtual_tokens = make(peft(), model, tuning.virtual_tokens)


def matrices(model: nn.Module) -> dict[str, list[str]]:
    """Modules that LoRA can be beside, by the names that `tuning.targets` knows: `attention.q_proj`, `cross.attention.o_proj` …

    Names leave out numbers of layers. Routers and experts, embeddings and the output layer get none.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if not part.isdigit() and part != "block"]
        if isinstance(module, nn.Linear) and parts[0] != "head" and parts[-1] != "router":
            found.setdefault(".".join(parts), []).append(name)
    return found


def _targeted(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    known, chosen = matrices(model), []
    for target in targets:
        mine = [module for name, modules in known.items() if f"{name}.".startswith(f"{target}.") for module in modules]
        if not mine:
            raise InputError(
                f"tuning.targets has {target!r}: this model has {', '.join(known)}, and what these begin with."
            )
        chosen += mine
    return chosen


def train_only(model: nn.Module, tuning: TuningSettings) -> None:
    """Let gradients reach the parameters that the settings name, and no others.

    Raises:
        InputError: the model has none of them.
    """
    for name, parameter in model.named_parameters():
        whole = tuning.weights == "all" or (tuning.weights == "retrieval" and name.startswith(RETRIEVAL))
        parameter.requires_grad_(whole or is_adapter(name))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"tuning.weights = {tuning.weights!r}: the model has no encoder and no chunked cross-attention to train; "
            "set model.cca_layers."
        )


def describe(model: nn.Module) -> str:
    """How much of a model is trained, for the log."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{trained:,} of {count_parameters(model, embeddings=True):,} parameters are trained"


def check_parallel(tuning: TuningSettings, parallel: ParallelSettings, num_processes: int) -> None:
    """Raise InputError where processes cannot share a model with this adapter.

    A prompt passes the layers before the sequences do. Data parallelism gathers a layer's weights for the gradients of its last
    call, and they would be gone for those of the first.
    """
    if tuning.adapter == "prompt" and num_processes > 1:
        raise InputError(
            f"tuning.adapter = 'prompt': is trained by one process, not {num_processes}; 'prefix' can be trained by several."
        )
    ways = {"lora": ("tensor",), "prefix": ("tensor", "pipeline")}
    for way in ways.get(tuning.adapter, ()):
        if getattr(parallel, way) > 1:
            raise InputError(
                f"parallel.{way} = {getattr(parallel, way)}: must be 1 with tuning.adapter = {tuning.adapter!r}."
            )


def merge(model: Retro) -> Retro:
    """Add LoRA's products to the matrices that they are beside, in place: a plain model, of the same function but for rounding."""
    from peft.tuners.lora import LoraLayer

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(module, name, child.get_base_layer())
    del model.peft_config
    return model


def is_adapter(name: str) -> bool:
    """Whether a parameter is of an adapter and not of the model."""
    return name.startswith("virtual_tokens.") or ".lora_" in name


def stored_name(name: str) -> str:
    """The name of a parameter in checkpoints: peft's layers stand between a model and its matrices there."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")
