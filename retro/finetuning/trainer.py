"""Fine-tuning: prepared examples through the trainer. Held-out ones are measured with retrieval ON and OFF.

    files ─ prepare ─ rows ─ Trainer ─ checkpoints, metrics
                       └ held out: loss and perplexity of the answers' tokens, ON and OFF

Bits per byte measure whole texts. An answer is a few tokens after a question, so its own tokens are measured.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from indexing.progress import Advance
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.loader import as_tensors
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.finetuning.example_batches import ExampleData, Rows
from retro.finetuning.prepare import preparation
from retro.finetuning.settings import FinetuneSettings
from retro.inference.chat_template import read_template
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.parallel.coordination import on_first, open_group
from retro.training.run_settings import RunSettings
from retro.training.task import TokenLosses
from retro.training.trainer import Outcome, Trainer

HELD_OUT = "held_out"
"""Name of the held-out examples, the prefix of their metrics."""
_MAX_NATS = 700.0  # exp of more would overflow


def finetune(
    run: Path, settings: RunSettings, finetuning: FinetuneSettings, *, advance: Advance = lambda _: None
) -> Outcome:
    """Fine-tune a model on examples, or resume a stopped run.

    Args:
        run: folder of the run.
        settings: the sections of the configuration. The first datastore has the tokenizer; neighbors, or passages, are
            found in all of them. `data.k` 0 = no retrieval.
        finetuning: the examples. Its `epochs`, if not 0, replace `train.steps`.
        advance: receives numbers of trained tokens.

    Raises:
        InputError: as `trainer.train`; a line of the examples; settings that have no effect here.
        FloatingPointError, Stopped: as `trainer.train`.
    """
    check_settings(settings.data, finetuning)
    return Trainer(run, partial(ExampleTask, run, finetuning), settings, advance=advance).train()


class ExampleTask:
    """Learns the answers of examples, and measures the loss of held-out ones."""

    def __init__(self, run: Path, finetuning: FinetuneSettings, settings: RunSettings) -> None:
        """Prepare the examples, once for all processes.

        Raises:
            InputError: a line of the examples, or a model that does not fit the datastores.
        """
        data = settings.data
        k = data.k if settings.model.retrieves else 0
        datastores = [Datastore.open(folder) for folder in data.datastores]
        self.data = ExampleData(
            _prepared(run, data.datastores, finetuning, k),
            finetuning.examples,
            data,
            [datastore.built for datastore in datastores],
            int(datastores[0].manifest["pad_id"]),
            held_out=finetuning.held_out,
            packed=finetuning.packed,
            retrieval=k > 0,
        )
        self.data.announce()
        train = settings.train
        if finetuning.epochs:
            steps = math.ceil(finetuning.epochs * len(self.data.rows) / settings.samples_per_step)
            train = replace(train, steps=steps)
        self.settings = replace(
            settings, model=fit_to(settings.model, datastores[0].manifest, datastores[0].folder), train=train
        )
        # The text of the template, so that the checkpoint alone shows how prompts are written.
        template = read_template(finetuning.template)
        self.extra_sections: Mapping[str, Any] = {"finetune": replace(finetuning, template=template)}
        self.num_ids = int(datastores[0].manifest["vocab_size"])
        self.tokenizer = tokenizer_fingerprint(datastores[0].folder)
        self._k = data.k if k else 0

    def evaluate(self, model: Retro, placement: Placement, token_losses_of: TokenLosses) -> dict[str, float]:
        """`held_out_loss_off` and `held_out_perplexity_off`; with retrieval the same `_on`."""
        rows, metrics = self.data.held_out, {}
        if not rows.rows:
            return {}
        batch_size, max_tokens = self.settings.evaluation.batch_size, self.settings.train.eval_tokens
        for mode, k in (("off", 0), ("on", self._k))[: 2 if self._k else 1]:
            loss = answer_loss(rows, k, batch_size, max_tokens, placement=placement, token_losses_of=token_losses_of)
            metrics[f"{HELD_OUT}_loss_{mode}"] = loss
            metrics[f"{HELD_OUT}_perplexity_{mode}"] = math.exp(min(loss, _MAX_NATS))
        return metrics


def _prepared(run: Path, datastores: tuple[Path, ...], finetuning: FinetuneSettings, k: int) -> Path:
    """Prepare the examples in the first process, step by step: the others wait half an hour at most for each step."""
    group, steps = open_group(), preparation(run, list(datastores), finetuning, k)
    while (folder := on_first(group, partial(next, steps))) is None:
        pass
    return folder


def check_settings(data: DataSettings, finetuning: FinetuneSettings) -> None:
    """Raise InputError for settings that have no effect on examples, and if there are no examples."""
    if not finetuning.examples:
        raise InputError("finetune.examples is empty: name the files of examples, JSON Lines.")
    defaults = DataSettings()
    for key in ("weights", "neighbor_source", "max_overlap", "materialized"):
        if getattr(data, key) != getattr(defaults, key):
            raise InputError(f"data.{key} = {getattr(data, key)!r}: `retro finetune` has no use for it; remove it.")


def answer_loss(
    rows: Rows,
    k: int,
    batch_size: int,
    max_tokens: int,
    *,
    placement: Placement,
    token_losses_of: Callable[[Inputs], Tensor],
) -> float:
    """The mean loss of the answers' tokens, in nats.

    Args:
        rows: at least one row of examples.
        k: neighbors of each chunk; 0 = retrieval OFF.
        batch_size: rows in a batch.
        max_tokens: stop after about this many tokens of answers; 0 = all.
        placement: device of the batches.
        token_losses_of: see `DistributedModel.token_losses`.
    """
    nats, num_labels = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = rows.batch(range(start, min(start + batch_size, len(rows))), k)
        nats += float(token_losses_of(placement.put(as_tensors(batch))).double().sum())
        num_labels += int(np.count_nonzero(batch.labels != IGNORED_LABEL))
        if max_tokens and num_labels >= max_tokens:
            break
    return nats / num_labels
