"""Add retrieval to a trained model without training: a copy head that reads neighbors, fitted with a few forward passes.

    checkpoint ─ (+ retrieval.reader) + sources of copy_head ─ fit_copy_head ─► FILE.safetensors, accepted as CHECKPOINT everywhere

All weights of the checkpoint stay the same to the bit, so retrieval OFF is the model as it was.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from indexing.progress import Advance
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import absolute
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.suffixes.votes import require_votes
from retro.checkpoints.checkpoint import Checkpoint, load_model
from retro.checkpoints.single_file import exported, write_exported
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model.copy_head import CopyHead
from retro.model.inputs import Inputs
from retro.model.retro import Retro
from retro.model.settings import ModelSettings, updated
from retro.training.fitted_copy_head import CopyFit, fit_copy_head
from retro.training.fitted_retrieval import read_batches

SourceName = Literal["context", "neighbors", "datastore"]


def add_retrieval(
    checkpoint: Checkpoint,
    folder: Path | str,
    file: Path,
    placement: Placement,
    *,
    k: int,
    num_tokens: int,
    names: Sequence[SourceName] = (),
    reader: str = "",
    advance: Advance = lambda _: None,
) -> CopyFit:
    """Write a model that copies from a datastore, and OFF equals the checkpoint, as one file.

    The file keeps the rules by which the run chose neighbors (`Checkpoint.neighbor_rules`).

    Args:
        checkpoint: the model.
        folder: folder or URL of a datastore with neighbors. The file names it as its own.
        file: see `single_file.export`.
        placement: device and precision.
        k: neighbors of each chunk in the forward passes.
        num_tokens: tokens of training text to read.
        names: sources to add; empty = neighbors, and the whole datastore if it has votes, as far as the model lacks them.
        reader: `decoder` lets the decoder read the neighbors too (`RetrievalSettings.reader`); empty = as the checkpoint.
        advance: receives numbers of tokens that were read.

    Raises:
        InputError: the model copies from these already; or the datastore has another tokenizer, another chunk length than
            a model with retrieval, or fewer stored neighbors; or the decoder cannot be the reader.
    """
    datastore = Datastore.open(folder)
    names = _new_sources(checkpoint, datastore, names)
    checkpoint = replace(checkpoint, model=_with_reader(checkpoint, reader))
    settings = _settings(checkpoint.model, int(datastore.manifest["chunk_length"]), names)
    replace(checkpoint, model=settings).check_fits(
        datastore.manifest, folder, tokenizer=tokenizer_fingerprint(datastore.folder)
    )
    datastore.require("neighbors")
    if settings.copy_head.datastore:
        require_votes(datastore)
    if (stored := datastore.train.neighbor_ids.row_shape[0]) < k:
        raise InputError(f"k = {k}: {folder} stores {stored} neighbors of each chunk (neighbors.stored).")
    m = settings.chunk_length
    length = max(m, checkpoint.settings["data"]["sequence_length"] // m * m)
    data = DataSettings(datastores=(Path(folder),), sequence_length=length, k=k, **checkpoint.neighbor_rules)
    source = TrainingData(data.datastores, data, retrieval=True, votes=bool(settings.copy_head.datastore))
    model = _with_copying(load_model(checkpoint, placement.device), settings, names)
    batches = read_batches(source, -(-num_tokens // length), placement)
    fit = fit_copy_head(model, _counted(batches, num_tokens, advance), placement, names)
    _write(checkpoint, model, data, datastore, file, names)
    return fit


def _counted(batches: Iterable[Inputs], num_tokens: int, advance: Advance) -> Iterator[Inputs]:
    """Count the batches when they were read; `num_tokens` together, as the last one may have more."""
    for batch in batches:
        yield batch
        counted = min(batch.tokens.numel(), num_tokens)
        num_tokens -= counted
        advance(counted)


def _new_sources(checkpoint: Checkpoint, datastore: Datastore, names: Sequence[SourceName]) -> list[SourceName]:
    """The sources to add. Raises InputError if the model has one of `names`, or all that it could get."""
    has = {name for name, value in asdict(checkpoint.model.copy_head).items() if value}
    usual: list[SourceName] = ["neighbors", "datastore"] if datastore.has("votes") else ["neighbors"]
    chosen = list(dict.fromkeys(names)) or [name for name in usual if name not in has]
    if twice := [name for name in chosen if name in has] or ([] if chosen else ["neighbors"]):
        raise InputError(
            f"{checkpoint.path} copies from {' and '.join(twice)} already. Use it with --datastore, or train it further."
        )
    return chosen


def _with_reader(checkpoint: Checkpoint, reader: str) -> ModelSettings:
    """Settings of the checkpoint with another reader, which has no weights."""
    base = checkpoint.model
    if reader == "decoder" and base.retrieval.cca_layers:
        raise InputError(
            f"reader = 'decoder': {checkpoint.path} reads neighbors with cross-attention (model.retrieval.cca_layers = "
            f"{list(base.retrieval.cca_layers)}); only a decoder without it can read them itself."
        )
    return updated(base, {"retrieval.reader": reader or base.retrieval.reader})


def _settings(base: ModelSettings, chunk_length: int, names: Sequence[SourceName]) -> ModelSettings:
    """Settings with copying, and the datastore's chunk length if no weight of the base depends on it."""
    free = not base.retrieves and base.retrieval_positions != "learned"
    added: dict[str, Any] = {f"copy_head.{name}": True for name in names}
    return updated(base, added | ({"chunk_length": chunk_length} if free else {}))


def _with_copying(model: Retro, settings: ModelSettings, names: Sequence[SourceName]) -> Retro:
    """The model with a copy head of these settings. Sources that it has keep their weights."""
    head = CopyHead(settings.copy_head, settings.d_model, settings.chunk_length)
    for name in names:
        getattr(head, name).initialize()
    if model.copy_head is not None:
        head.load_state_dict(model.copy_head.state_dict(), strict=False)
    model.settings, model.copy_head = settings, head.to(model.norm.weight.device)
    return model


def _write(
    checkpoint: Checkpoint,
    model: Retro,
    data: DataSettings,
    datastore: Datastore,
    file: Path,
    names: Sequence[SourceName],
) -> None:
    state, tensors = exported(checkpoint)
    prefixes = tuple(f"copy_head.{name}." for name in names)
    added = {name: tensor.cpu() for name, tensor in model.state_dict().items() if name.startswith(prefixes)}
    model_and_data = {
        "model": asdict(model.settings),
        "data": {**asdict(data), "datastores": [absolute(data.datastores[0])]},
    }
    settings = {**state["settings"], **json.loads(json.dumps(model_and_data, default=str))}
    made_of = [checkpoint.fingerprint, settings["model"], {name: tensor.tolist() for name, tensor in added.items()}]
    state |= {
        "settings": settings,
        "datastores": [datastore.built],
        "num_ids": int(datastore.manifest["vocab_size"]),
        "tokenizer": tokenizer_fingerprint(datastore.folder),
        "started_from": checkpoint.fingerprint,
        "fingerprint": fingerprint(made_of),
    }
    write_exported(state, tensors | added, file)
