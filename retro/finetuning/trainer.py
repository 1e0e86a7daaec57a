"""Fine-tuning: prepared examples through the trainer, and the held-out ones measured with retrieval ON and OFF.

    files ─ prepare ─ rows ─ trainer.fit ─ checkpoints, metrics
                       └ held out: loss and perplexity of the tokens of answers, ON and OFF

Bits per byte are for whole texts: an answer is a few tokens after a question, and what counts is how sure the model is of those.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.data.loader import as_tensors
from retro.data.settings import DataSettings
from retro.device import Placement, TensorBatch
from retro.evaluation.settings import EvaluationSettings
from retro.finetuning.chat_template import read_template
from retro.finetuning.example_batches import ExampleData, Rows
from retro.finetuning.prepare import preparation
from retro.finetuning.settings import FinetuneSettings
from retro.model.loss import IGNORED_LABEL
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.parallel.coordination import on_first, open_group
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.settings import TrainSettings
from retro.training.trainer import Outcome, Task, as_plain_json, fit, fit_to, resolved_data
from retro.tuning.settings import ALL, TuningSettings

HELD_OUT = "held_out"
"""The name of the examples that are measured, in front of metrics."""
_MOST_NATS = 700.0  # whose exponential is a number still


def finetune(
    run: Path,
    datastores: list[Path],
    model_settings: ModelSettings,
    data_settings: DataSettings,
    settings: TrainSettings,
    evaluation: EvaluationSettings,
    finetuning: FinetuneSettings,
    parallel: ParallelSettings = ALONE,
    tuning: TuningSettings = ALL,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Fine-tune a model, or go on with a run that was stopped; what is not said here is as in `trainer.train`.

    Args:
        run: folder of the run.
        datastores: the first has the tokenizer; neighbors, or passages, are found in all of them.
        model_settings: its sizes; its weights are those of `settings.init_from`.
        data_settings: sequence length; number of neighbors, 0 = no retrieval; seed.
        settings: steps, unless `finetuning.epochs` says how many.
        evaluation: `batch_size`, of held-out rows.
        finetuning: examples.
        parallel: how processes share the work.
        tuning: which weights are trained, and what adapter beside them.
        advance: told of trained tokens.

    Raises:
        InputError: as `trainer.train`; a line of the examples; settings that mean nothing here.
    """
    check_settings(data_settings, finetuning)

    def open_task(model: ModelSettings) -> Task:
        k = max((data_settings.k, *data_settings.k_choices)) if model.cca_layers else 0
        group, turns = open_group(), preparation(run, datastores, finetuning, k)
        while (folder := on_first(group, partial(next, turns))) is None:
            pass  # in turns, as processes wait for each other half an hour at most
        opened = [Datastore.open(location) for location in datastores]
        data = ExampleData(
            folder,
            finetuning.examples,
            data_settings,
            [each.fingerprint for each in opened],
            int(opened[0].manifest["pad_id"]),
            held_out=finetuning.held_out,
            packed=finetuning.packed
            and tuning.adapter not in ("prefix", "prompt"),  # which stand before a row, not an example
            retrieval=k > 0,
        )
        data.announce()
        measure = partial(
            measure_answers,
            rows=data.held_out,
            k=data_settings.k if k else 0,
            batch_size=evaluation.batch_size,
            max_tokens=settings.eval_tokens,
        )
        steps = math.ceil(
            finetuning.epochs * len(data.rows) / (settings.batch_size * settings.gradient_accumulation_steps)
        )
        train = replace(settings, steps=steps) if finetuning.epochs else settings
        # The template itself, so that a checkpoint says how it is spoken to.
        told = {**asdict(finetuning), "template": read_template(finetuning.template)}
        resolved = {**resolved_data(data_settings, datastores), **as_plain_json({"finetune": told})}
        sections = {"data": DataSettings, "finetune": FinetuneSettings}
        return Task(fit_to(model, opened[0]), opened[0], data, data_settings, train, resolved, sections, measure)

    return fit(run, open_task, model_settings, settings, parallel, tuning, advance=advance)


def check_settings(data: DataSettings, finetuning: FinetuneSettings) -> None:
    """Raise InputError for settings of training on documents that mean nothing for examples, and where there are no examples."""
    if not finetuning.examples:
        raise InputError("finetune.examples is empty: name the files of examples, JSON Lines.")
    defaults = DataSettings()
    for key in ("weights", "temperature", "token_budgets", "neighbor_source", "max_overlap", "materialized"):
        if getattr(data, key) != getattr(defaults, key):
            raise InputError(f"data.{key} = {getattr(data, key)!r}: `retro finetune` has no use for it; remove it.")


def measure_answers(
    model: Retro,
    *,
    rows: Rows,
    k: int,
    batch_size: int,
    max_tokens: int,
    placement: Placement,
    token_losses_of: Callable[[TensorBatch], Tensor],
) -> dict[str, float]:
    """`held_out_loss_off` and `held_out_perplexity_off`, and the same `_on` with k neighbors, if that is not 0."""
    figures = {}
    for mode, neighbors in (("off", 0), ("on", k))[: 2 if k else 1]:
        if rows.rows:
            loss = answer_loss(
                rows, neighbors, batch_size, max_tokens, placement=placement, token_losses_of=token_losses_of
            )
            figures[f"{HELD_OUT}_loss_{mode}"] = loss
            figures[f"{HELD_OUT}_perplexity_{mode}"] = math.exp(min(loss, _MOST_NATS))
    return figures


def answer_loss(
    rows: Rows,
    k: int,
    batch_size: int,
    max_tokens: int,
    *,
    placement: Placement,
    token_losses_of: Callable[[TensorBatch], Tensor],
) -> float:
    """The mean loss of the tokens of answers, in nats.

    Args:
        rows: examples, one row at least.
        k: neighbors of each chunk; 0 = retrieval OFF.
        batch_size: rows of a batch.
        max_tokens: stop after about so many tokens of answers; 0 = all.
        placement: of the batch.
        token_losses_of: a batch's; see `passes.Passes`.
    """
    nats, num_labels = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = rows.batch(range(start, min(start + batch_size, len(rows))), k)
        nats += float(token_losses_of(placement.put(as_tensors(batch))).double().sum())
        num_labels += int(np.count_nonzero(batch.labels != IGNORED_LABEL))
        if max_tokens and num_labels >= max_tokens:
            break
    return nats / num_labels
