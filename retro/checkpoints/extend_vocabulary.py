"""Extend the embedding tables of a model: the row of a new token is the mean of the rows of its old tokens.

    old rows ─────────────────────────────► the same, to the bit
    ids without a row (padding, at times) ─► the mean of all rows
    new tokens ───────────────────────────► the mean of the rows of the ids into which the old tokenizer splits them
    rows beyond, of padded tables ────────► the same

As an input, a new token starts as the average of its parts, and as an output it has the average of their logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.store.artifact import fingerprint
from indexing.store.errors import InputError
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import ModelSettings

_PADDING = 1024  # more than the unused rows of any published model's tables


def check_tables(checkpoint: Checkpoint, num_ids: int, num_model_tokens: int) -> None:
    """Reject a tokenizer whose size shows that it is not the model's.

    Args:
        checkpoint: the model.
        num_ids: `vocab_size` of the installed tokenizer, with the ids for padding, begin and end.
        num_model_tokens: tokens without the ids that were added here; imported models may have no rows for these.

    Raises:
        InputError: more tokens than rows, many more rows than tokens, or another number than in training.
    """
    rows = checkpoint.model.vocab_size
    fits = num_model_tokens <= rows < num_ids + _PADDING if not checkpoint.datastores else False
    if num_ids != checkpoint.num_ids and not fits:
        raise InputError(
            f"{checkpoint.path} has {rows:,} rows for {checkpoint.num_ids:,} ids, the tokenizer has {num_ids:,}. "
            "Name the tokenizer of this model."
        )


def extend_tables(checkpoint: Checkpoint, first_id: int, cuts: Sequence[Sequence[int]], file: Path) -> None:
    """Write a model with rows for new tokens as one file.

    Args:
        checkpoint: the model; `check_tables` has accepted its tokenizer.
        first_id: id of the first new token.
        cuts: the old ids of each new token.
        file: see `single_file.export`. It names no datastores, because those of the old tokenizer no longer fit.
    """
    num_ids = first_id + len(cuts)
    vocab_size = max(checkpoint.model.vocab_size, num_ids)
    state, tensors = exported(checkpoint)
    for name in tables(checkpoint.model):
        tensors[name] = _extended(tensors[name], first_id, cuts)
    settings = {**state["settings"], "data": {**state["settings"]["data"], "datastores": []}}
    settings["model"] = {**settings["model"], "vocab_size": vocab_size}
    extended = fingerprint([checkpoint.fingerprint, first_id, cuts])
    state |= {"fingerprint": extended, "settings": settings, "datastores": [], "num_ids": num_ids, "tokenizer": ""}
    write_exported(state, tensors, file)


def tables(settings: ModelSettings) -> list[str]:
    """Names of the weights with a row for each id: embedding, output layer and the encoder's embedding, if the model
    has them."""
    with shapes_only():
        model, larger = Retro(settings), Retro(replace(settings, vocab_size=settings.vocab_size + 1))
    shapes = {name: weight.shape for name, weight in larger.state_dict().items()}
    return [name for name, weight in model.state_dict().items() if weight.shape != shapes[name]]


def _extended(table: Tensor, first_id: int, cuts: Sequence[Sequence[int]]) -> Tensor:
    """[rows, width] to [at least first_id + len(cuts), width], of the same type."""
    unseen = table.float().mean(0, keepdim=True).expand(max(0, first_id - len(table)), -1)
    lengths = torch.tensor([0, *map(len, cuts)])
    ids = torch.tensor([token for cut in cuts for token in cut])
    new = F.embedding_bag(ids, table.float(), lengths.cumsum(0)[:-1], mode="mean")  # [len(cuts), width]
    parts = (table[:first_id], unseen.to(table.dtype), new.to(table.dtype), table[first_id + len(cuts) :])
    return torch.cat(parts)
