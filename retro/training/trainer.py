"""Training (paper, section 3), on one device or many: batches in, checkpoints and metrics out.

    run/  settings.json   metrics.jsonl   checkpoints/00000200/ …

A run that was stopped anywhere goes on from its last checkpoint with the same command, bit for bit on a CPU: the data
order is a function of the step, and everything else that matters is in the checkpoint.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from indexing.device import keep_freed_memory
from indexing.splitmix64 import mix
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.store.remote import absolute
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints import training_state
from retro.data.batches import TrainingData
from retro.data.loader import Source, load
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import Placement, TensorBatch, choose_placement
from retro.estimates.flops import peak_flops, training_flops
from retro.evaluation.bits_per_byte import measure_sets
from retro.evaluation.sets import open_sets
from retro.evaluation.settings import EvaluationSettings
from retro.model.presets import count_parameters, resolve
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.parallel.coordination import on_first, open_group
from retro.parallel.forward_backward import Passes, WholeModel
from retro.parallel.pipeline_parallel import Pipeline
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.bad_batches import name_batch
from retro.training.fitted_cross_attention import can_be_fitted, start_copying
from retro.training.initial_weights import start_adapter, start_from
from retro.training.learning_rate_scaling import learning_rate_factors
from retro.training.loop import Position, Work, loop
from retro.training.meter import Meter
from retro.training.optimizer import make_optimizer
from retro.training.run_folder import last_checkpoint, read_metrics
from retro.training.settings import TrainSettings
from retro.training.step import make_scaler, make_step, wants_compilation
from retro.tuning.adapters import check_parallel, describe, train_only
from retro.tuning.settings import ALL, RETRIEVAL, TuningSettings

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


@dataclass(frozen=True)
class Task:
    """What a run learns from, and how it is measured.

    Attributes:
        model: all sizes of the model.
        datastore: whose tokenizer it is.
        data: what batches are made of.
        data_settings: their sequences and neighbors.
        train: steps, optimizer, schedule, intervals.
        resolved: everything else that the task was told, section by section, as JSON holds it.
        sections: the types of these sections, whose defaults stand for what an older run does not know.
        measure: the figures of an evaluation of a model.
    """

    model: ModelSettings
    datastore: Datastore
    data: Source
    data_settings: DataSettings
    train: TrainSettings
    resolved: dict[str, dict[str, Any]]
    sections: Mapping[str, type[Any]]
    measure: "Measure"


class Measure(Protocol):
    """What a task is measured by."""

    def __call__(
        self, model: Retro, /, *, placement: Placement, token_losses_of: Callable[[TensorBatch], Tensor]
    ) -> dict[str, float]:
        """The figures of a model in evaluation mode, whose losses `token_losses_of` gives: `Passes.token_losses`."""


def train(
    run: Path,
    datastores: list[Path],
    model_settings: ModelSettings,
    data_settings: DataSettings,
    settings: TrainSettings,
    evaluation: EvaluationSettings,
    parallel: ParallelSettings = ALONE,
    tuning: TuningSettings = ALL,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Train a model on datastores, or go on with a run that was stopped.

    Args:
        run: folder of the run.
        datastores: what it learns from.
        model_settings: its sizes; `vocab_size` 0 is filled in from the tokenizer.
        data_settings: sequences and neighbors.
        settings: steps, optimizer, schedule, intervals.
        evaluation: which held-out documents are scored, and how.
        parallel: how the processes of torch's process group, if there is one, share the work; all call this alike.
        tuning: which weights are trained, and what adapter beside them.
        advance: told of trained tokens.

    Raises:
        InputError: settings that do not fit together, the datastore, or the run's earlier settings.
        FloatingPointError: loss or gradient are not finite; a checkpoint of the step before is saved, and the batch named.
        Stopped: SIGTERM or SIGINT came; the step, and its evaluation if it has one, was finished and saved.
    """

    def open_task(model: ModelSettings) -> Task:
        retrieval = bool(model.cca_layers)
        data = TrainingData(datastores, data_settings, retrieval=retrieval)
        data.plan(settings.steps * settings.gradient_accumulation_steps * settings.batch_size)
        model = fit_to(model, data.datastores[0])
        use = NeighborUse(data_settings.k if retrieval else 0, data_settings.neighbor_source, seed=data_settings.seed)
        measure = partial(
            measure_sets,
            sets=open_sets(evaluation.sets, datastores, model, use.k, data_settings.reading),
            settings=replace(evaluation, max_tokens=settings.eval_tokens),
            use=use,
            sequence_length=data_settings.sequence_length,
        )
        resolved = resolved_data(data_settings, datastores)
        sections = {"data": DataSettings}
        return Task(model, data.datastores[0], data, data_settings, settings, resolved, sections, measure)

    return fit(run, open_task, model_settings, settings, parallel, tuning, advance=advance)


def fit(
    run: Path,
    open_task: Callable[[ModelSettings], Task],
    model_settings: ModelSettings,
    settings: TrainSettings,
    parallel: ParallelSettings = ALONE,
    tuning: TuningSettings = ALL,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Let a model learn a task, or go on with a run that was stopped; what is not said here is as in `train`.

    Args:
        run: folder of the run.
        open_task: gives what is learned by a model of some sizes, all but the vocabulary's.
        model_settings: its sizes.
        settings: of which a task may change the number of steps.
        parallel: how processes share the work.
        tuning: which weights are trained, and what adapter beside them.
        advance: told of trained tokens.
    """
    _check_tuning(tuning, settings)
    placement = _placement(settings)
    processes, group = Processes(parallel, placement.device), open_group()
    check_parallel(tuning, parallel, processes.count)
    start = on_first(group, lambda: _start(run, settings))
    base = on_first(group, lambda: _base(run, start)) if model_settings.preset == "base" else None
    task = open_task(resolve(model_settings, base))
    data, model_settings, settings = task.data, task.model, task.train
    model_settings.check_length(task.data_settings.sequence_length)
    told = {"model": asdict(model_settings), "train": asdict(settings), "tuning": asdict(tuning)}
    resolved = {**as_plain_json(told), **task.resolved}
    sections: dict[str, type[Any]] = {"model": ModelSettings, "train": TrainSettings, "tuning": TuningSettings}
    sections |= task.sections
    defaults = as_plain_json({name: asdict(section()) for name, section in sections.items()})
    last = on_first(group, lambda: last_checkpoint(run, resolved, defaults, data.fingerprints))
    model = _model(model_settings, settings)
    num_parameters = count_parameters(model)
    if start is not None:
        start_from(start, model, data.fingerprints, tuning)
        if not start.model.cca_layers and can_be_fitted(model):
            model.load_state_dict(on_first(group, lambda: _fitted(model, task, placement)), strict=False)
    start_adapter(start, model, tuning)
    train_only(model, tuning)
    if tuning != ALL:
        log.info("tuning: %s", describe(model))
    factors = learning_rate_factors(model)
    passes = _share_out(model, processes, placement, settings)
    optimizer = _optimizer(passes, factors, settings)
    on_first(group, lambda: _begin(run, {**resolved, "parallel": asdict(parallel)}))
    position = Position(scaler=make_scaler(placement))
    ways = {"pipeline": parallel.pipeline, "data": processes.data, "tensor": parallel.tensor}
    layout = ways if processes.count > 1 else {}
    facts: dict[str, Any] = {"settings": resolved, "datastores": data.fingerprints, "layout": layout}
    facts["started_from"] = start and start.fingerprint
    facts["num_ids"] = int(task.datastore.manifest["vocab_size"])
    if last is not None:
        training_state.restore(last, passes.parts, optimizer, group, layout=layout, stream=processes.data_rank)
        on_first(group, partial(checkpoints.name_best, run, last.best))
        position.scaler.load_state_dict(last.scaler)
        position = Position(last.step, last.tokens, last.best, Meter(**last.unlogged), position.scaler, last.skipped)
        facts["started_from"] = last.started_from
        advance(last.tokens)
        log.info("%s: going on from step %d", run, last.step)
    for part in passes.parts:
        part.train()
    # A frozen decoder learns nothing from sequences without neighbors.
    dropped = 0.0 if tuning.retrieval_only else task.data_settings.retrieval_dropout
    batches = _batches(data, settings, dropped, position.step, processes, placement)
    work = Work(
        run,
        settings,
        processes,
        group,
        facts,
        take_step=make_step(passes, optimizer, batches, processes, placement, settings, position.scaler),
        name_refused=partial(name_batch, run, data, settings),
        measure=partial(_measure, task, passes, placement),
        utilisation=_utilisation(model_settings, task.data_settings, settings, tuning, placement, processes.count),
        tensors=partial(training_state.tensors_of, passes.parts, optimizer, processes.rank),
        publish=partial(checkpoints.publish, run, keep=settings.keep_checkpoints, group=open_group()),
        advance=advance,
    )
    loop(work, position)
    newest = checkpoints.latest(run)
    assert newest is not None  # the last step has made one
    return Outcome(newest, read_metrics(run), num_parameters)


def _placement(settings: TrainSettings) -> Placement:
    """The device of this process, which is set up for it."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    device = settings.device
    if device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    placement = choose_placement(device, settings.precision)
    if placement.device.type == "cpu":
        keep_freed_memory()
    elif placement.device.index is not None:
        torch.cuda.set_device(placement.device)
    return placement


def _start(run: Path, settings: TrainSettings) -> checkpoints.Checkpoint | None:
    """The weights that a run begins with; None where it goes on, or draws its own."""
    if not settings.init_from or checkpoints.latest(run) is not None:
        return None
    return checkpoints.open_checkpoint(Path(settings.init_from))


def _base(run: Path, start: checkpoints.Checkpoint | None) -> ModelSettings | None:
    """What the preset `base` stands for: the model that a run begins with; its own, where it goes on."""
    if start is None and checkpoints.latest(run) is not None:
        return checkpoints.model_settings(read_json(run / "settings.json")["model"])
    return start.model if start else None


def _begin(run: Path, resolved: dict[str, dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "settings.json", resolved)


def fit_to(model: ModelSettings, datastore: Datastore) -> ModelSettings:
    """Fill in what the datastore decides. A model may have more rows than the tokenizer has ids: those of others often do."""
    vocab_size = int(datastore.manifest["vocab_size"])
    if 0 < model.vocab_size < vocab_size:
        raise InputError(
            f"model.vocab_size = {model.vocab_size}: the datastore's tokenizer has {vocab_size}; use 0, or more than these."
        )
    if model.chunk_length != datastore.chunk_length:
        raise InputError(
            f"model.chunk_length = {model.chunk_length}: the datastore has chunks of {datastore.chunk_length}."
        )
    return replace(model, vocab_size=model.vocab_size or vocab_size)


def resolved_data(data: DataSettings, datastores: list[Path]) -> dict[str, dict[str, Any]]:
    """The section `data` of a run's settings, with the datastores that it reads."""
    return as_plain_json({"data": {**asdict(data), "datastores": [absolute(folder) for folder in datastores]}})


def as_plain_json(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings as JSON holds them."""
    return json.loads(json.dumps(sections, default=str))


def _check_tuning(tuning: TuningSettings, settings: TrainSettings) -> None:
    """Raise InputError where nothing sensible would come of it."""
    if tuning.weights != "all" and not settings.init_from:
        raise InputError(
            f"tuning.weights = {tuning.weights!r}: what is frozen would stay as it was drawn; name trained weights in "
            "train.init_from."
        )


def _model(model: ModelSettings, settings: TrainSettings) -> Retro:
    """A model with weights drawn from the seed."""
    torch.manual_seed(settings.seed)
    return Retro(model)


def _fitted(model: Retro, task: Task, placement: Placement) -> dict[str, Tensor]:
    """Encoder and cross-attention that copy beside a trained decoder: by one process for all, so that all have the same."""
    start_copying(model, task.data, task.data_settings.sequence_length, placement)
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(RETRIEVAL)}


def _share_out(model: Retro, processes: Processes, placement: Placement, settings: TrainSettings) -> Passes:
    """The model, shared out over processes; each data-parallel one drops features of its own where there is dropout."""
    if processes.count > 1:
        torch.manual_seed(mix(mix(settings.seed) + processes.data_rank) >> 1)
    options: dict[str, Any] = {
        "z_weight": settings.z_loss_weight,
        "compiled": wants_compilation(settings.compile, placement),
    }
    if processes.along("pipeline") is not None:
        return Pipeline(model, processes, placement, settings.batch_size, **options)
    return WholeModel(model, processes, placement, **options)


def _optimizer(passes: Passes, factors: Mapping[str, float], settings: TrainSettings) -> torch.optim.AdamW:
    return make_optimizer(
        passes.parts,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
        factors=factors,
    )


def _measure(task: Task, passes: Passes, placement: Placement) -> dict[str, float]:
    """Measure a model whose every part is in evaluation mode."""
    for part in passes.parts:
        part.eval()
    figures = task.measure(passes.parts[0], placement=placement, token_losses_of=passes.token_losses)
    for part in passes.parts:
        part.train()
    return figures


def _batches(
    data: Source,
    settings: TrainSettings,
    dropped: float,
    step: int,
    processes: Processes,
    placement: Placement,
) -> Iterator[TensorBatch]:
    """This process's rows of the batches from a step to the end of the run."""
    workers = settings.num_workers
    return load(
        data,
        batches=range(
            step * settings.gradient_accumulation_steps, settings.steps * settings.gradient_accumulation_steps
        ),
        batch_size=settings.batch_size,
        rows=processes.rows(settings.batch_size),
        dropped=dropped,
        workers=workers if workers >= 0 else 2 if placement.device.type == "cuda" else 0,
        placement=placement,
    )


def _utilisation(
    model: ModelSettings,
    data: DataSettings,
    settings: TrainSettings,
    tuning: TuningSettings,
    placement: Placement,
    num_devices: int,
) -> Callable[[float], float]:
    """Model-FLOPs utilisation at a rate in tokens per second; see `retro.estimates.flops`."""
    ks = data.k_choices or (data.k,)
    length = data.sequence_length
    flops = sum(training_flops(model, length, k, tuning) for k in ks) / len(ks) / length
    peak = settings.peak_tflops * 1e12 or peak_flops(placement)
    return lambda tokens_per_second: tokens_per_second * flops / (peak * num_devices)
