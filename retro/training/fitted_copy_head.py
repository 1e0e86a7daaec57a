"""Fit sources of the copy head to a trained model with a few forward passes, without training.

The networks of the sources (`CopySource`) begin with weights that were fitted to other text, and are moved a little.
The loss of a token depends on them only through what a forward pass gives once: the vocabulary's loss, the probability
of its likeliest token, and the counts of votes. All sources are fitted together.

    a checkpoint + a datastore ─ forward passes ─► two numbers and the evidence of each token ─ L-BFGS on the mean loss ─► networks

All other weights of the model stay the same to the bit, so retrieval OFF is the model as it was. An added context is
copied from with retrieval OFF too, but must earn trust there (`retro/copying/switch.py`).
"""

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from indexing.progress import Advance, during
from indexing.retrieval.prefix_neighbors import searches_prefixes
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import absolute
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.suffixes.order import FOLDER as SUFFIXES
from indexing.suffixes.votes import stores_votes
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, Evidence, TokenLosses
from retro.checkpoints.any_model import for_datastore, load_scorer, without_copying, write_fitted
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.copying.head import STEP, CopyHead
from retro.copying.model import CopyingModel
from retro.copying.sources import SOURCES, sources_of
from retro.data.batches import TrainingData
from retro.data.loader import BatchSource, as_tensors
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model_settings import ModelSettings, SourceName, updated

log = logging.getLogger("retro")

SPAN = 256
"""Tokens of a sequence that `add_retrieval` reads: 6,000 tokens in sequences of 256 instead of 1,024 are of four times
as many documents, which brought 0.3% more with the PEPs."""
_PULL = 80.0
"""Nats that a weight costs at a distance of 1 from its start. With a quarter of it, 1,500 tokens of one kind of text
made another kind worse."""
_STEPS = 100


class CopyFit(NamedTuple):
    """What fitting did. Losses are means in nats, over the tokens for which one of the sources has something.

    Attributes:
        num_tokens: number of these tokens; 0 = nothing was fitted.
        off: loss with retrieval OFF. Cross-attention reads no neighbors either.
        before: loss with the initial networks.
        after: loss with the fitted networks.
    """

    num_tokens: int = 0
    off: float = 0.0
    before: float = 0.0
    after: float = 0.0


# --- retrieval for a checkpoint --------------------------------------------------------------------------------------


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
    """Write a model that copies from a datastore, and OFF equals the checkpoint unless `context` is added, as one file.

    Fitting reads the votes and neighbors of training text, or searches them if the datastore has `suffixes` alone.

    The file keeps the rules by which the run chose neighbors (`Checkpoint.neighbor_rules`).

    Args:
        checkpoint: the model.
        folder: folder or URL of a datastore with the stages of the sources: `suffixes`, and `neighbors` if it has
            embeddings. The file names it as its own.
        file: see `single_file.export`; for a decoder of transformers, see `any_model.write_fitted`.
        placement: device and precision.
        k: neighbors of each chunk in the forward passes.
        num_tokens: tokens of training text to read.
        names: sources to add; empty = neighbors and the whole datastore, as far as the datastore has them and the
            model lacks them.
        reader: `decoder` lets the decoder read the neighbors too (`RetrievalSettings.reader`); empty = as the
            checkpoint.
        advance: receives numbers of tokens that were read.

    Raises:
        InputError: the model copies from these already; or the datastore has another tokenizer, another chunk length
            than a model with retrieval, or fewer stored neighbors; or the decoder cannot be the reader.
    """
    datastore = Datastore.open(folder)
    checkpoint = without_copying(for_datastore(checkpoint, folder))
    names = _sources_to_add(checkpoint, datastore, names)
    checkpoint = replace(checkpoint, model=_with_reader(checkpoint, reader))
    settings = _settings(checkpoint.model, int(datastore.manifest["chunk_length"]), names)
    replace(checkpoint, model=settings).check_fits(
        datastore.manifest, folder, tokenizer=tokenizer_fingerprint(datastore.folder)
    )
    if settings.retrieves and not searches_prefixes(datastore):
        datastore.require("neighbors")
        if (stored := datastore.train.neighbor_ids.row_shape[0]) < k:
            raise InputError(f"k = {k}: {folder} stores {stored} neighbors of each chunk (neighbors.stored).")
    if settings.copy_head.datastore:
        stores_votes(datastore)  # raises an error if votes are neither stored nor can be searched
    data = _data(checkpoint, settings, folder, k)
    model = _with_copy_head(load_scorer(checkpoint, placement), settings, placement.device)
    batches = _training_batches(data, settings, num_tokens, placement)
    fit = fit_copy_head(model, _counted(batches, num_tokens, advance), placement, names)
    if checkpoint.of_transformers:
        assert model.copy_head is not None
        figures = {"tokens": fit.num_tokens, "loss_off": fit.off, "loss_before": fit.before, "loss_after": fit.after}
        write_fitted(checkpoint, model.copy_head, data, datastore, figures, file)
    else:
        _write(checkpoint, model, data, datastore, file, names)
    return fit


def all_sources(
    checkpoint: Checkpoint, folder: Path, placement: Placement, *, k: int, num_tokens: int
) -> tuple[CopyingModel, Iterator[Inputs]]:
    """A model that copies from all `SOURCES`, with the weights that every copy head begins with, and batches of
    training text; the arguments are those of `add_retrieval`."""
    checkpoint = without_copying(for_datastore(checkpoint, folder))
    settings = _settings(checkpoint.model, Datastore.open(folder).chunk_length, [source.name for source in SOURCES])
    data = _data(checkpoint, settings, folder, k)
    model = _with_copy_head(load_scorer(checkpoint, placement), settings, placement.device)
    return model, _training_batches(data, settings, num_tokens, placement)


def _data(checkpoint: Checkpoint, settings: ModelSettings, folder: Path | str, k: int) -> DataSettings:
    """What to read of a datastore."""
    m = settings.chunk_length
    length = max(m, checkpoint.settings["data"]["sequence_length"] // m * m)
    return DataSettings(datastores=(Path(folder),), sequence_length=length, k=k, **checkpoint.neighbor_rules)


def _training_batches(
    data: DataSettings, settings: ModelSettings, num_tokens: int, placement: Placement
) -> Iterator[Inputs]:
    """At least `num_tokens` tokens of training text, in sequences of at most `SPAN` tokens, with what the sources
    read."""
    m = settings.chunk_length
    span = max(m, min(SPAN, data.sequence_length) // m * m)
    votes = bool(settings.copy_head.datastore)
    spans = replace(data, sequence_length=span)
    source = TrainingData(data.datastores, spans, retrieval=settings.retrieves, votes=votes, search=True)
    return read_batches(source, -(-num_tokens // span), placement)


def _counted(batches: Iterable[Inputs], num_tokens: int, advance: Advance) -> Iterator[Inputs]:
    """Count the batches when they were read; `num_tokens` together, as the last one may have more."""
    for batch in batches:
        yield batch
        counted = min(batch.tokens.numel(), num_tokens)
        num_tokens -= counted
        advance(counted)


def _sources_to_add(checkpoint: Checkpoint, datastore: Datastore, names: Sequence[SourceName]) -> list[SourceName]:
    """The sources to add. Raises InputError if the model has one of `names`, or all that it could get."""
    has = checkpoint.model.copy_head.names
    near = datastore.has("neighbors") or searches_prefixes(datastore)
    there: dict[SourceName, bool] = {"neighbors": near, "datastore": datastore.has(SUFFIXES)}
    usual: list[SourceName] = [name for name, is_there in there.items() if is_there] or ["neighbors"]
    chosen = list(dict.fromkeys(names)) or [name for name in usual if name not in has]
    if twice := [name for name in chosen or ["neighbors"] if name in has]:
        raise InputError(
            f"{checkpoint.path} copies from {' and '.join(twice)} already. Use it with --datastore, or train it further."
        )
    return chosen


def _with_reader(checkpoint: Checkpoint, reader: str) -> ModelSettings:
    """Settings of the checkpoint with another reader, which has no weights."""
    base = checkpoint.model
    if reader and checkpoint.of_transformers:
        raise InputError(
            f"reader = {reader!r}: {checkpoint.path} is computed by transformers, so it can only copy from neighbors."
        )
    if reader == "decoder" and base.retrieval.cca_layers:
        raise InputError(
            f"reader = 'decoder': {checkpoint.path} reads neighbors with cross-attention (model.retrieval.cca_layers = "
            f"{list(base.retrieval.cca_layers)}); only a decoder without it can read them itself."
        )
    return updated(base, {"retrieval.reader": reader or base.retrieval.reader})


def _settings(base: ModelSettings, chunk_length: int, names: Sequence[str]) -> ModelSettings:
    """Settings with copying, and the datastore's chunk length if no weight of the base depends on it."""
    free = not base.retrieves and base.retrieval_positions != "learned"
    added: dict[str, Any] = {f"copy_head.{name}": True for name in names}
    added |= {"copy_head.context_added": True} if "context" in names else {}
    return updated(base, added | ({"chunk_length": chunk_length} if free else {}))


def _with_copy_head(model: CopyingModel, settings: ModelSettings, device: torch.device) -> CopyingModel:
    """The model with a copy head of these settings. Sources that it has keep their weights."""
    head = CopyHead(settings.copy_head.names, settings.chunk_length, sources_of(settings.copy_head))
    head.initialize()
    if model.copy_head is not None:
        head.load_state_dict(model.copy_head.state_dict(), strict=False)
    model.settings, model.copy_head = settings, head.to(device)
    return model


def _write(
    checkpoint: Checkpoint,
    model: CopyingModel,
    data: DataSettings,
    datastore: Datastore,
    file: Path,
    names: Sequence[SourceName],
) -> None:
    state, tensors = exported(checkpoint)
    added = _weights_of_sources(model, names)
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


def read_batches(data: BatchSource, num_samples: int, placement: Placement) -> Iterator[Inputs]:
    """The first samples, each as a batch, with neighbors in every sequence."""
    for sample in range(num_samples):
        yield placement.put(as_tensors(data.batch(range(sample, sample + 1), 0.0)))


def _weights_of_sources(model: CopyingModel, names: Sequence[str]) -> dict[str, Tensor]:
    """The weights of these sources, on the CPU, by their names in the model."""
    prefixes = tuple(f"copy_head.{name}." for name in names)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items() if name.startswith(prefixes)}


# --- the fit ---------------------------------------------------------------------------------------------------------


class TokensToFit(NamedTuple):
    """The n tokens that sources are fitted to.

    Attributes:
        vocabulary: `TokenLosses` [1, n].
        evidence: of all sources of the model.
    """

    vocabulary: TokenLosses
    evidence: Evidence

    def losses(self, head: CopyHead) -> Tensor:
        """The loss of each token with copying, float32 [1, n]."""
        return head.losses(self.vocabulary, torch.zeros_like(self.vocabulary.nats, dtype=torch.int64), self.evidence)


def fit_copy_head(
    model: CopyingModel,
    batches: Iterable[Inputs],
    placement: Placement,
    names: Sequence[str] = ("neighbors",),
    hidden: Iterable[Tensor] | None = None,
) -> CopyFit:
    """Fit the networks of some sources. All other weights stay the same.

    Args:
        model: a trained model with these sources, on the device of the placement.
        batches: as for training; some thousand tokens. Those that lack one of the sources are skipped.
        placement: device and precision.
        names: the sources: `context`, `neighbors`, `datastore`.
        hidden: hidden states of the batches, if they are known; they do not depend on the copy head.
    """
    head, training = model.copy_head, model.training
    assert head is not None
    model.eval()
    pairs = ((batch, None) for batch in batches) if hidden is None else zip(batches, hidden, strict=True)
    found = placement.each(lambda pair: tokens_to_fit(model, pair[0], placement, names, pair[1]), pairs)
    reads = [read for read in found if read is not None]
    model.train(training)
    if not reads:
        log.warning("copying from %s is not fitted: the batches have none", " and ".join(names))
        return CopyFit()
    parts, off = zip(*reads, strict=True)
    tokens, fitted = joined(parts), copy.deepcopy(head).cpu()
    with during("fitting what is copied from %s", " and ".join(names)):
        before, after = fit_networks(fitted, names, tokens)
    head.load_state_dict(fitted.state_dict())
    count = tokens.vocabulary.nats.numel()
    fit = CopyFit(count, float(torch.cat(off).sum()) / max(1, count), before, after)
    log.info(
        "copying from %s is fitted to %s tokens: loss %.4f before, %.4f after, %.4f with retrieval OFF",
        *(" and ".join(names), f"{fit.num_tokens:,}", fit.before, fit.after, fit.off),
    )
    return fit


@torch.no_grad()
def tokens_to_fit(
    model: CopyingModel, batch: Inputs, placement: Placement, names: Sequence[str], hidden: Tensor | None = None
) -> tuple[TokensToFit, Tensor] | None:
    """The tokens of a batch for which a source has something, and their losses with retrieval OFF, float32 [n]; None =
    it lacks a source."""
    head, sources = model.copy_head, model.copy_sources(batch)
    assert head is not None
    if not set(names) <= set(sources):
        return None
    with placement.autocast():
        if hidden is None:
            hidden, _ = model.hidden(batch)
        read, read_off = model.read([batch, batch.off()], hidden)
        off = model.token_losses(batch.off()) if model.settings.activations_read else None
        if off is None:  # the same activations
            off, _ = model.with_copying(read_off, batch.off())
    vocabulary, evidence = read
    assert evidence is not None
    present = (evidence.votes[:, :, [head.index(name) for name in names], :, 0] > 0).any(-1).any(-1)
    counted = (batch.labels != IGNORED_LABEL) & present
    losses, of_losses = ([part[counted].cpu()[None] for part in parts] for parts in (vocabulary, evidence))
    return TokensToFit(TokenLosses(*losses), Evidence(*of_losses)), off[counted].cpu()


def joined(parts: Sequence[TokensToFit]) -> TokensToFit:
    """The tokens of several batches."""
    vocabulary, evidence = (
        [torch.cat(columns, 1) for columns in zip(*tables, strict=True)] for tables in zip(*parts, strict=True)
    )
    return TokensToFit(TokenLosses(*vocabulary), Evidence(*evidence))


def fit_networks(head: CopyHead, names: Sequence[str], tokens: TokensToFit) -> tuple[float, float]:
    """Fit the networks of some sources of a copy head on the CPU; returns the mean loss before and after."""
    named = [pair for name in names for pair in getattr(head, name).named_parameters()]
    fitted, scales = (
        [parameter for _, parameter in named],
        [STEP if name.startswith("outer") else 1.0 for name, _ in named],
    )
    initial = [parameter.detach().clone() for parameter in fitted]
    optimizer = torch.optim.LBFGS(fitted, max_iter=_STEPS, line_search_fn="strong_wolfe")
    count = max(1, tokens.vocabulary.nats.numel())

    def objective() -> Tensor:
        optimizer.zero_grad()
        moves = zip(fitted, initial, scales, strict=True)
        moved = [(scale * (parameter - start)).square().sum() for parameter, start, scale in moves]
        value = (tokens.losses(head).sum() + _PULL * torch.stack(moved).sum()) / count
        value.backward()
        return value

    with torch.enable_grad():
        before = float(objective().detach())
        optimizer.step(objective)
    optimizer.zero_grad()
    with torch.no_grad():
        after = float(tokens.losses(head).sum() / count)
    return before, after
