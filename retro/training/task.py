"""What a run learns from, and how it is evaluated: the documents of datastores here, examples in `retro/finetuning`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from indexing.store.retrieval_set import tokenizer_fingerprint
from retro.batch.inputs import Inputs
from retro.data.batches import TrainingData
from retro.data.loader import BatchSource
from retro.device import Placement
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.sets import open_sets
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.training.run_settings import RunSettings

TokenLosses = Callable[[Inputs], Tensor]
"""A batch → the loss of each token, float32 [B, T]: `DistributedModel.token_losses`."""


class Task(Protocol):
    """Training data and an evaluation."""

    @property
    def settings(self) -> RunSettings:
        """The run's settings, with everything filled in that the data decide."""

    @property
    def extra_sections(self) -> Mapping[str, Any]:
        """The task's own settings: dataclasses by the name of their section."""

    @property
    def data(self) -> BatchSource:
        """The batches."""

    @property
    def num_ids(self) -> int:
        """Ids of the tokenizer."""

    @property
    def tokenizer(self) -> str:
        """Fingerprint of the tokenizer."""

    def evaluate(self, model: Retro, placement: Placement, token_losses_of: TokenLosses) -> dict[str, float]:
        """Metrics of a model in evaluation mode; for a pipeline, `model` is this process's first part."""


class DocumentTask:
    """Learns the documents of one or several datastores, and measures bits per byte of held-out ones."""

    def __init__(self, settings: RunSettings) -> None:
        """Open the datastores.

        Raises:
            InputError: the datastores, the model and the settings do not fit together.
        """
        data, retrieval = settings.data, settings.model.retrieves
        votes = bool(settings.model.copy_head.datastore)
        self.data = TrainingData(data.datastores, data, retrieval=retrieval, votes=votes)
        self.data.announce(settings.train.steps * settings.samples_per_step)
        datastore = self.data.datastores[0]
        self.settings = replace(settings, model=fit_to(settings.model, datastore.manifest, datastore.folder))
        self.extra_sections: Mapping[str, Any] = {}
        self.num_ids = int(datastore.manifest["vocab_size"])
        self.tokenizer = tokenizer_fingerprint(datastore.folder)
        # An evaluation set can be in a datastore without copies of neighbors.
        self._use = replace(data.neighbor_use, k=data.k if retrieval else 0, materialized=False, votes=votes)
        self._sets = open_sets(
            settings.evaluation.sets, data.datastores, self.settings.model, self._use.k, data.reading
        )

    def evaluate(self, model: Retro, placement: Placement, token_losses_of: TokenLosses) -> dict[str, float]:
        """`NAME_bits_per_byte_off` of each evaluation set, and `NAME_bits_per_byte_on` of a model that retrieves."""
        settings = replace(self.settings.evaluation, max_tokens=self.settings.train.eval_tokens)
        settings = settings.in_windows_of(self.settings.data.sequence_length)
        evaluator = Evaluator(model, placement, settings, token_losses_of=token_losses_of)
        off, reads = replace(self._use, k=0, votes=False), self._use.k or self._use.votes
        results = [evaluator.score(one, use) for one in self._sets for use in ((off, self._use) if reads else (off,))]
        return {f"{result.set}_bits_per_byte_{result.retrieval.lower()}": result.bits_per_byte for result in results}
