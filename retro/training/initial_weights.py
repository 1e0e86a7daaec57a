"""`train.init_from`: start a new run with the weights of a trained model.

A RETRO can start from a baseline (encoder and cross-attention are new, and add nothing at first), a baseline from a
RETRO (they are left out), and each from its own kind, with other data or settings. LoRA and a prefix are loaded too.
"""

import logging

from indexing.store.errors import InputError
from retro.adapters.adapters import RETRIEVAL, add_adapter, is_lora, stored_name
from retro.adapters.prefix import PREFIX, initialize_prefix
from retro.adapters.settings import NO_LORA, LoraSettings, Weights
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.tensor_files import absent_in_earlier_versions, fill, index
from retro.model.retro import Retro
from retro.model_settings import flatten, keys_with, keys_without_effect

log = logging.getLogger("retro")


def load_initial_weights(
    checkpoint: Checkpoint, model: Retro, datastores: list[str], weights: Weights = "all", tokenizer: str = ""
) -> None:
    """Copy the checkpoint's weights into the model. Weights that the checkpoint lacks stay random, and are logged.

    Output matrices of cross-attention that the checkpoint lacks become 0, so that retrieval ON starts equal to OFF:
    random ones harm a trained decoder at first, which costs a RETROfit some of its few tokens
    (docs/how-to/retrofit.md).

    Args:
        checkpoint: source of the weights.
        model: receives the weights.
        datastores: fingerprints of the run's data.
        weights: which weights will be trained.
        tokenizer: fingerprint of the data's tokenizer; empty = unknown.

    Raises:
        InputError: a weight has another shape; the checkpoint has a weight outside encoder and cross-attention that the
            model lacks; a setting that does not affect shapes differs; the checkpoint lacks a weight that will not be
            trained; or it was trained with another tokenizer.
    """
    path, ours = checkpoint.path, model.state_dict()
    theirs = {name: one for name, one in index(checkpoint.weights).items() if not is_lora(name)}
    advice = f"model.preset = 'base' takes its model's settings; `retro inspect {path}` prints them."
    _check_prefix(checkpoint, model)
    for name in ours:
        if name in theirs and theirs[name].shape != ours[name].shape:
            shapes = f"{list(theirs[name].shape)} there and {list(ours[name].shape)} in this model"
            raise InputError(f"train.init_from: {path}: {name} has the shape {shapes}. {advice}")
    left_out = [name for name in theirs if name not in ours]
    foreign = [name for name in left_out if not name.startswith(RETRIEVAL)]
    if foreign:
        raise InputError(
            f"train.init_from: {path} has weights that this model lacks: {', '.join(foreign)}. {_switch(foreign, 'true')}{advice}"
        )
    drawn = [name for name in ours if name not in theirs and not absent_in_earlier_versions(name, theirs)]
    trained = {"all": ("",), "retrieval": RETRIEVAL, "none": ()}[weights]
    if untrained := [name for name in drawn if not name.startswith(trained) and PREFIX not in name]:
        raise InputError(
            f"train.init_from: {path} lacks weights that this model has and that train.weights = {weights!r} does "
            f"not train: {', '.join(untrained)}. {_switch(untrained, 'false')}{advice}"
        )
    _check_function(checkpoint, model)
    recorded = checkpoint.tokenizer if tokenizer else ""
    if recorded not in ("", tokenizer):
        raise InputError(
            f"train.init_from: {path} has another tokenizer than data.datastores. Build these with the model's tokenizer."
        )
    fill({name: tensor for name, tensor in ours.items() if name not in drawn}, theirs)
    for name in drawn:
        if name.startswith("cross.") and name.endswith(".o_proj.weight"):
            ours[name].zero_()
    if any(PREFIX in name for name in drawn):
        initialize_prefix(model)
    if not recorded and not set(checkpoint.datastores) & set(datastores):
        log.warning("%s was trained on another datastore: check that its tokenizer is the same", path)
    log.info("starting from %s: step %d, %d weights", path, checkpoint.step, len(theirs) - len(left_out))
    for words, names in (("drawn at random", drawn), ("left out", left_out)):
        if names:
            log.info("%s: %s", words, ", ".join(names))


def _check_prefix(checkpoint: Checkpoint, model: Retro) -> None:
    """Refuse a prefix of another length than the checkpoint's, if that has one."""
    theirs, ours = (settings.attention.prefix_tokens for settings in (checkpoint.model, model.settings))
    if theirs not in (0, ours):
        raise InputError(
            f"train.init_from: {checkpoint.path} has model.attention.prefix_tokens = {theirs}, this model {ours}: set it to {theirs}, "
            "or start from a model without a prefix."
        )


def _switch(names: list[str], value: str) -> str:
    """The line that adds or removes a copy head over the context, if it is among these weights: it can be there by
    default."""
    is_copying = any(name.startswith("copy_head.context.") for name in names)
    return f"Set model.copy_head.context = {value}. " * is_copying


def load_initial_adapter(checkpoint: Checkpoint | None, model: Retro, lora: LoraSettings) -> None:
    """Add the adapter that `lora` sets, with the checkpoint's weights if it has one, else with new weights.

    Args:
        checkpoint: the checkpoint of `train.init_from`, or None.
        model: without an adapter.
        lora: rank and targets of the adapter.

    Raises:
        InputError: the checkpoint has another adapter; or as `add_adapter`.
    """
    theirs = checkpoint.lora if checkpoint else NO_LORA
    add_adapter(model, lora)
    if checkpoint is None or not theirs.rank:
        return
    for key in ("rank", "alpha", "targets"):
        if getattr(lora, key) != getattr(theirs, key):
            raise InputError(
                f"train.init_from: {checkpoint.path} has lora.{key} = {getattr(theirs, key)!r}, this run "
                f"{getattr(lora, key)!r}: set it to {getattr(theirs, key)!r}, or start from a file of `retro export`, which "
                "merges LoRA."
            )
    ours = {stored_name(name): tensor for name, tensor in model.state_dict().items() if is_lora(name)}
    fill(ours, index(checkpoint.weights))


def _check_function(checkpoint: Checkpoint, model: Retro) -> None:
    """Refuse settings with which the checkpoint's weights fit but compute something else: 8 heads of 32 features for 4
    of 64."""
    theirs, ours = flatten(checkpoint.model), flatten(model.settings)
    unused = keys_without_effect(checkpoint.model) | keys_without_effect(model.settings)
    for key in ours:
        if key in keys_with("changes_function") - unused and theirs[key] != ours[key]:
            raise InputError(
                f"train.init_from: {checkpoint.path} has model.{key} = {theirs[key]!r}, this model {ours[key]!r}; "
                f"set it to {theirs[key]!r}."
            )
