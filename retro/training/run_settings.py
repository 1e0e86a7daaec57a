"""Settings of a training run: the sections of its configuration, in one object."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from indexing.store.errors import InputError
from indexing.store.remote import absolute
from retro.adapters.settings import NO_LORA, LoraSettings, check_trained
from retro.data.settings import DataSettings
from retro.evaluation.settings import EvaluationSettings
from retro.model_settings import ModelSettings
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.settings import TrainSettings


@dataclass(frozen=True)
class RunSettings:
    """The sections of a configuration that define a training run.

    Attributes:
        model: sizes and options; `vocab_size` 0 is filled in from the datastore's tokenizer.
        data: datastores (at least one), sequences and neighbors.
        train: steps, optimizer, schedule, intervals.
        evaluation: held-out documents and how they are scored.
        parallel: how the processes of torch's process group, if there is one, share the work.
        lora: the adapter that is added.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    parallel: ParallelSettings = ALONE
    lora: LoraSettings = NO_LORA

    @property
    def samples_per_step(self) -> int:
        """Sequences of an optimizer step."""
        return self.train.batch_size * self.train.gradient_accumulation_steps

    @property
    def flops_per_step(self) -> int:
        """FLOPs of an optimizer step, with `vocab_size` and `chunk_length` of the model filled in.

        Sequences without neighbors (`retrieval_dropout`) count without retrieval.
        """
        from retro.estimates.flops import training_flops  # it imports torch, which takes seconds

        model, length, trained = self.model, self.data.sequence_length, (self.train.weights, self.lora)
        on, off = (training_flops(model, length, k, *trained) for k in (self.data.k, 0))
        return round(self.samples_per_step * ((1 - self.retrieval_dropout) * on + self.retrieval_dropout * off))

    @property
    def retrieval_dropout(self) -> float:
        """`data.retrieval_dropout`, but 0 if only retrieval is trained: a frozen decoder learns nothing without
        neighbors."""
        return 0.0 if self.retrieval_only else self.data.retrieval_dropout

    @property
    def retrieval_only(self) -> bool:
        """True if a sequence without neighbors has no gradient."""
        adapts = self.lora.rank or self.model.attention.prefix_tokens
        return self.train.weights == "retrieval" and not adapts

    def check(self) -> None:
        """Raise InputError for sections that do not fit together."""
        check_trained(self.train.weights, self.lora, self.model.attention.prefix_tokens)
        if self.train.weights != "all" and not self.train.init_from:
            raise InputError(
                f"train.weights = {self.train.weights!r}: the frozen weights would stay random. Name trained weights in "
                "train.init_from."
            )
        if self.retrieval_only and not self.data.k:
            raise InputError("data.k = 0 with train.weights = 'retrieval' trains nothing: set data.k to 1 or more.")

    def recorded(self, extra: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The sections that a checkpoint keeps, as JSON holds them.

        Args:
            extra: settings of the task, dataclasses by the name of their section.
        """
        data = {**asdict(self.data), "datastores": [absolute(folder) for folder in self.data.datastores]}
        sections = {
            "model": asdict(self.model),
            "train": asdict(self.train),
            "lora": asdict(self.lora),
            "data": data,
        }
        sections |= {name: asdict(section) for name, section in extra.items()}
        return json.loads(json.dumps(sections, default=str))
