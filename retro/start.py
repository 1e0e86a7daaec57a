"""`train.start_from`: the weights of a new run from those of a trained model.

A RETRO starts from a baseline (encoder and cross-attention stay random), a baseline from a RETRO (they are left out), or
either from its like, on other data or with another schedule.
"""

import logging

from indexing.store.errors import InputError
from retro.checkpoint import Checkpoint
from retro.model import Retro
from retro.tensor_files import fill, index

log = logging.getLogger("retro")

_RETRIEVAL = ("encoder.", "cross.")
"""What the parameters of encoder and chunked cross-attention begin with: a baseline has none of them."""


def start_from(checkpoint: Checkpoint, model: Retro, datastores: list[str]) -> None:
    """Copy into the model every weight of the checkpoint that it has. The rest of it stays as drawn, and is logged.

    Args:
        checkpoint: whose weights.
        model: they go into.
        datastores: fingerprints of what it will be trained on.

    Raises:
        InputError: a weight has another shape in the checkpoint, or a name that the model does not have and that is not of
            encoder or cross-attention; or a setting that shapes do not show is another one.
    """
    path, ours = checkpoint.path, model.state_dict()
    theirs = index(checkpoint.weights)
    advice = f"`retro inspect {path}` prints its model's settings."
    for name in ours:
        if name in theirs and theirs[name].shape != ours[name].shape:
            shapes = f"{list(theirs[name].shape)} there and {list(ours[name].shape)} in this model"
            raise InputError(f"train.start_from: {path}: {name} has the shape {shapes}. {advice}")
    left_out = [name for name in theirs if name not in ours]
    foreign = [name for name in left_out if not name.startswith(_RETRIEVAL)]
    if foreign:
        raise InputError(f"train.start_from: {path} has weights that this model lacks: {', '.join(foreign)}. {advice}")
    _check_meaning(checkpoint, model)
    fill({name: tensor for name, tensor in ours.items() if name in theirs}, theirs)
    if not set(checkpoint.datastores) & set(datastores):
        log.warning("%s was trained on another datastore: its tokenizer must be the same as here", path)
    log.info("starting from %s: step %d, %d weights", path, checkpoint.step, len(theirs) - len(left_out))
    drawn = [name for name in ours if name not in theirs]
    for words, names in (("drawn at random", drawn), ("left out", left_out)):
        if names:
            log.info("%s: %s", words, ", ".join(names))


def _check_meaning(checkpoint: Checkpoint, model: Retro) -> None:
    """Queries of 4 heads of 64 features have the shape of 8 heads of 32, and mean something else; so do other settings."""
    keys = ["num_heads", "positions", "activation", "qk_norm", "init"]
    if checkpoint.model.cca_layers and model.settings.cca_layers:
        keys.append("encoder_num_heads")
    if model.settings.init == "mup":
        keys.append("mup_base_width")
    for key in keys:
        theirs, ours = getattr(checkpoint.model, key), getattr(model.settings, key)
        if theirs != ours:
            raise InputError(
                f"train.start_from: {checkpoint.path} has model.{key} = {theirs!r}, this model {ours!r}; set it to {theirs!r}."
            )
