"""Fit the sources of the copy head that a run adds to a trained model, before the first step."""

from collections.abc import Iterator, Sequence

from retro.data.loader import BatchSource, as_tensors
from retro.device import Placement
from retro.model.inputs import Inputs
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.training.fitted_copy_head import fit_copy_head

_TOKENS = 20_000


def new_sources(settings: ModelSettings, base: ModelSettings) -> list[str]:
    """The sources of retrieval that the copy head has and that of the base lacks."""
    own, theirs = settings.copy_head, base.copy_head
    return [name for name in ("neighbors", "datastore") if getattr(own, name) and not getattr(theirs, name)]


def fit_sources_of_run(
    model: Retro, names: Sequence[str], data: BatchSource, sequence_length: int, placement: Placement
) -> None:
    """Fit sources of the copy head with the first sequences of training. The model ends on the CPU.

    Args:
        model: with the weights of the base.
        names: see `new_sources`.
        data: the batches of training.
        sequence_length: tokens of a sequence.
        placement: device and precision of training.
    """
    model.to(placement.device)
    fit_copy_head(model, read_batches(data, -(-_TOKENS // sequence_length), placement), placement, names)
    model.to("cpu")


def read_batches(data: BatchSource, num_samples: int, placement: Placement) -> Iterator[Inputs]:
    """The first samples, each as a batch, with neighbors in every sequence."""
    for sample in range(num_samples):
        yield placement.put(as_tensors(data.batch(range(sample, sample + 1), 0.0)))
