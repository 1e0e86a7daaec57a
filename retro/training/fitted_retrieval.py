"""Fit the retrieval that a run adds to a trained model, before the first step: cross-attention, then copying from neighbors."""

import logging
from collections.abc import Iterator

from retro.data.loader import BatchSource, as_tensors
from retro.device import Placement
from retro.model.inputs import Inputs
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.training.fitted_copy_head import fit_copy_head
from retro.training.fitted_cross_attention import can_be_fitted, fit_copying

log = logging.getLogger("retro")

_CROSS_ATTENTION_TOKENS = 8192
_COPYING_TOKENS = 20_000


def fits_cross_attention(model: Retro, base: ModelSettings) -> bool:
    """Whether cross-attention is new in the model and can be fitted."""
    return not base.retrieval.cca_layers and can_be_fitted(model)


def fits_copying(model: Retro, base: ModelSettings) -> bool:
    """Whether the model copies from a source of retrieval that is new."""
    return bool(new_sources(model.settings, base))


def new_sources(settings: ModelSettings, base: ModelSettings) -> list[str]:
    """The sources of retrieval that the copy head has and that of the base lacks."""
    own, theirs = settings.copy_head, base.copy_head
    return [name for name in ("neighbors", "datastore") if getattr(own, name) and not getattr(theirs, name)]


def fit_retrieval(
    model: Retro, base: ModelSettings, data: BatchSource, sequence_length: int, placement: Placement
) -> None:
    """Fit what the model has and the base lacks, with the first sequences of training. The model ends on the CPU.

    Args:
        model: with the weights of the base.
        base: settings of the model that it started from.
        data: the batches of training.
        sequence_length: tokens of a sequence.
        placement: device and precision of training.
    """
    model.to(placement.device)
    if fits_cross_attention(model, base):
        count = max(2, _CROSS_ATTENTION_TOKENS // sequence_length)
        (batch,) = read_batches(data, count, count, placement)
        if batch.neighbors is None:
            log.warning("data.k = 0: cross-attention is not fitted, and starts as in training from scratch")
        else:
            fit_copying(model, batch, placement)
    if fits_copying(model, base):
        batches = read_batches(data, -(-_COPYING_TOKENS // sequence_length), 1, placement)
        fit_copy_head(model, batches, placement, new_sources(model.settings, base))
    model.to("cpu")


def read_batches(data: BatchSource, num_samples: int, batch_size: int, placement: Placement) -> Iterator[Inputs]:
    """Batches of the first samples, with neighbors in every sequence."""
    for first in range(0, num_samples, batch_size):
        batch = data.batch(range(first, min(first + batch_size, num_samples)), 0.0)
        yield placement.put(as_tensors(batch))
