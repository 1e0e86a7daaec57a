"""The training loop on one device (paper, section 3): batches in, checkpoints and metrics out.

    run/  settings.json   metrics.jsonl   checkpoints/00000200/ …

A run that was stopped anywhere goes on from its last checkpoint with the same command, bit for bit on a CPU: the data
order is a function of the step, and everything else that matters is in the checkpoint.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from indexing.device import keep_freed_memory
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.store.remote import absolute
from retro import checkpoint as checkpoints
from retro.batches import DataSettings, TrainingData
from retro.device import Placement, Tensors, place
from retro.evaluation import EvaluationSettings, measure_sets
from retro.evaluation_sets import open_sets
from retro.flops import forward_flops, peak_flops
from retro.loader import load
from retro.loggers import Logger, open_loggers
from retro.meter import Meter
from retro.model import Retro
from retro.model_settings import ModelSettings
from retro.mup import learning_rate_factors
from retro.neighbors import NeighborUse
from retro.optimizer import make_optimizer
from retro.presets import count_parameters, resolve
from retro.processes import on_first, open_group, rank_in
from retro.run import better, last_checkpoint, read_metrics
from retro.saver import Saver
from retro.start import start_from
from retro.step import make_step
from retro.stop import Stopped, signals_as_requests
from retro.train_settings import TrainSettings

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Outcome:
    """What a finished run hands on.

    Attributes:
        checkpoint: folder of the last checkpoint.
        metrics: every line of `metrics.jsonl`.
        parameters: of the model without embeddings.
    """

    checkpoint: Path
    metrics: list[dict[str, Any]]
    parameters: int


def train(
    run: Path,
    datastores: list[Path],
    model_settings: ModelSettings,
    data_settings: DataSettings,
    settings: TrainSettings,
    evaluation: EvaluationSettings,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Train a model, or go on with a run that was stopped.

    Args:
        run: folder of the run.
        datastores: what it learns from.
        model_settings: its sizes; `vocab_size` 0 is filled in from the tokenizer.
        data_settings: sequences and neighbors.
        settings: steps, optimizer, schedule, intervals.
        evaluation: which held-out documents are scored, and how.
        advance: told of trained tokens.

    Raises:
        InputError: settings that do not fit together, the datastore, or the run's earlier settings.
        FloatingPointError: the loss is not a number; the last checkpoint stays.
        Stopped: SIGTERM or SIGINT came; the step, and its evaluation if it has one, was finished and saved.
    """
    placement = _placement(settings)
    model_settings = resolve(model_settings)
    retrieval = bool(model_settings.cca_layers)
    data = TrainingData(datastores, data_settings, retrieval=retrieval)
    data.plan(settings.steps * settings.accumulation * settings.batch_size)
    model_settings = _fit_to(model_settings, data.datastores[0])
    model_settings.check_length(data_settings.sequence_length)
    use = NeighborUse(data_settings.k if retrieval else 0, data_settings.neighbors, seed=data_settings.seed)
    sets = open_sets(evaluation.sets, datastores, model_settings, use.k, data_settings.reading)
    resolved = _resolved(model_settings, data_settings, settings, datastores)
    group = open_group()
    last = on_first(group, lambda: last_checkpoint(run, resolved, data.fingerprints))
    start = None
    if settings.start_from and last is None:
        start = on_first(group, lambda: checkpoints.open_checkpoint(Path(settings.start_from)))
    model, optimizer = _make(model_settings, settings, placement)
    if start is not None:
        start_from(start, model, data.fingerprints)
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "settings.json", resolved)
    position = Position()
    facts = {"settings": resolved, "datastores": data.fingerprints, "started_from": start and start.fingerprint}
    if last is not None:
        checkpoints.restore(last, model, optimizer, group)
        on_first(group, partial(checkpoints.name_best, run, last.best))
        position = Position(last.step, last.tokens, last.best, Meter(**last.unlogged))
        facts["started_from"] = last.started_from
        advance(last.tokens)
        log.info("%s: going on from step %d", run, last.step)
    model.train()
    batches = _batches(data, settings, position.step, placement)
    _loop(
        run,
        settings,
        position,
        facts,
        make_step(model, optimizer, batches, placement, settings),
        partial(
            measure_sets,
            model,
            sets,
            replace(evaluation, max_tokens=settings.eval_tokens),
            placement,
            use=use,
            sequence_length=data_settings.sequence_length,
        ),
        _utilisation(model_settings, data_settings, settings, placement),
        partial(checkpoints.tensors_of, model, optimizer, rank_in(group)),
        partial(checkpoints.publish, run, keep=settings.keep_checkpoints, group=group),
        advance,
    )
    newest = checkpoints.latest(run)
    assert newest is not None  # the last step has made one
    return Outcome(newest, read_metrics(run), count_parameters(model))


@dataclass
class Position:
    """How far a run is: all of a checkpoint that is neither tensors nor settings.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen.
        best: `step`, `metric` and `value` of the best evaluation, or None.
        meter: what the next line of metrics will say.
    """

    step: int = 0
    tokens: int = 0
    best: dict[str, Any] | None = None
    meter: Meter = field(default_factory=Meter)

    def as_json(self) -> dict[str, Any]:
        """As `state.json` holds it."""
        unlogged = {"loss": self.meter.loss, "steps": self.meter.steps}
        return {"step": self.step, "tokens": self.tokens, "unlogged": unlogged, "best": self.best}


def _loop(
    run: Path,
    settings: TrainSettings,
    at: Position,
    facts: dict[str, Any],
    take_step: Callable[[int], tuple[dict[str, float], int]],
    measure: Callable[[], dict[str, float]],
    utilisation: Callable[[float], float],
    tensors: Callable[[], checkpoints.Tensors],
    publish: Callable[[dict[str, Any], checkpoints.Tensors], None],
    advance: Callable[[int], None],
) -> None:
    """Step, log, evaluate, save, until the run is complete or asked to stop."""
    first_step = at.step + 1
    with contextlib.ExitStack() as stack:
        loggers = open_loggers(run, at.step, settings.steps, settings.log_to)
        for logger in loggers:
            stack.callback(logger.close)
        asked_to_stop = stack.enter_context(signals_as_requests())  # before the saver, so that its last write is safe
        saver = stack.enter_context(contextlib.closing(Saver()))
        while at.step < settings.steps:
            metrics, seen = take_step(at.step)
            at.step, at.tokens = at.step + 1, at.tokens + seen
            advance(seen)
            if not math.isfinite(metrics["loss"]):
                raise FloatingPointError(
                    f"{run}: loss {metrics['loss']} at step {at.step}; lower train.lr and run again."
                )
            at.meter.add(metrics["loss"], seen)
            due = partial(_due, at.step, settings.steps)
            record = partial(_record, loggers, {"step": at.step, "tokens": at.tokens})
            if due(settings.log_every):
                line = {**metrics, **at.meter.read()}
                record({**line, "mfu": utilisation(line["tokens_per_second"])})
            if due(settings.eval_every):
                with at.meter.paused():
                    figures = measure()
                record(figures)
                at.best = better(at.best, at.step, figures)
            signal = asked_to_stop()
            if due(settings.checkpoint_every) or (at.best and at.best["step"] == at.step) or signal:
                saver.save(tensors(), partial(publish, {**at.as_json(), **facts}))
            elif at.step == first_step:
                saver.prepare(tensors())
            if signal and at.step < settings.steps:
                raise Stopped(run, at.step, signal)


def _placement(settings: TrainSettings) -> Placement:
    """The device of the run; this process is set up for it."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    placement = place(settings.device, settings.precision)
    if placement.device.type == "cpu":
        keep_freed_memory()
    return placement


def _due(step: int, steps: int, every: int) -> bool:
    """Whether something that is done every so many steps (0 = never), and after the last one, is due."""
    return step == steps or bool(every and step % every == 0)


def _record(loggers: list[Logger], position: dict[str, int], figures: dict[str, float]) -> None:
    """A line of metrics to every logger."""
    for logger in loggers:
        logger.write({**position, **figures})


def _fit_to(model: ModelSettings, datastore: Datastore) -> ModelSettings:
    """Fill in what the datastore decides."""
    vocab_size = int(datastore.manifest["vocab_size"])
    if model.vocab_size not in (0, vocab_size):
        raise InputError(f"model.vocab_size = {model.vocab_size}: the datastore's tokenizer has {vocab_size}; use 0.")
    if model.chunk_length != datastore.chunk_length:
        raise InputError(
            f"model.chunk_length = {model.chunk_length}: the datastore has chunks of {datastore.chunk_length}."
        )
    return replace(model, vocab_size=vocab_size)


def _resolved(
    model: ModelSettings, data: DataSettings, settings: TrainSettings, datastores: list[Path]
) -> dict[str, dict[str, Any]]:
    """Everything that the run was told, as JSON holds it."""
    resolved = {"model": asdict(model), "data": asdict(data), "train": asdict(settings)}
    resolved["data"]["datastores"] = [absolute(folder) for folder in datastores]
    return json.loads(json.dumps(resolved, default=str))


def _make(model: ModelSettings, settings: TrainSettings, placement: Placement) -> tuple[Retro, torch.optim.Optimizer]:
    """A model with weights drawn from the seed, and its optimizer."""
    torch.manual_seed(settings.seed)
    made = Retro(model).to(placement.device)
    betas = (settings.beta1, settings.beta2)
    return made, make_optimizer(
        made,
        lr=settings.lr,
        betas=betas,
        weight_decay=settings.weight_decay,
        fused=True,
        factors=learning_rate_factors(made),
    )


def _batches(data: TrainingData, settings: TrainSettings, step: int, placement: Placement) -> Iterator[Tensors]:
    """The batches from a step to the end of the run."""
    workers = settings.data_workers
    return load(
        data,
        batches=range(step * settings.accumulation, settings.steps * settings.accumulation),
        batch_size=settings.batch_size,
        dropped=settings.retrieval_dropout,
        workers=workers if workers >= 0 else 2 if placement.device.type == "cuda" else 0,
        placement=placement,
    )


def _utilisation(
    model: ModelSettings, data: DataSettings, settings: TrainSettings, placement: Placement
) -> Callable[[float], float]:
    """Model-FLOPs utilisation at a rate in tokens per second; see `retro.flops`."""
    ks = data.k_choices or (data.k,)
    flops = 3 * sum(forward_flops(model, data.sequence_length, k) for k in ks) / len(ks) / data.sequence_length
    peak = settings.peak_tflops * 1e12 or peak_flops(placement)
    return lambda tokens_per_second: tokens_per_second * flops / peak
