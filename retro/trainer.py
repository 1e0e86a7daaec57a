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
from typing import Any

import torch

from indexing.device import keep_freed_memory
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.store.remote import absolute
from retro import checkpoint as checkpoints
from retro.bad_batch import name_batch
from retro.batches import DataSettings, TrainingData
from retro.device import Placement, Tensors, place
from retro.evaluation import EvaluationSettings, measure_sets
from retro.evaluation_sets import open_sets
from retro.flops import forward_flops, peak_flops
from retro.loader import load
from retro.loop import Position, Work, loop
from retro.meter import Meter
from retro.model import Retro
from retro.model_settings import ModelSettings
from retro.mup import learning_rate_factors
from retro.neighbors import NeighborUse
from retro.optimizer import make_optimizer
from retro.order import mix
from retro.parallel import Processes
from retro.parallel_settings import ALONE, ParallelSettings
from retro.passes import Passes, WholeModel, all_parameters
from retro.pipeline import Pipeline
from retro.presets import count_parameters, resolve
from retro.processes import on_first, open_group
from retro.run import last_checkpoint, read_metrics
from retro.start import start_from
from retro.step import make_scaler, make_step, wants_compilation
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
    parallel: ParallelSettings = ALONE,
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
        parallel: how the processes of torch's process group, if there is one, share the work; all call this alike.
        advance: told of trained tokens.

    Raises:
        InputError: settings that do not fit together, the datastore, or the run's earlier settings.
        FloatingPointError: loss or gradient are not finite; a checkpoint of the step before is saved, and the batch named.
        Stopped: SIGTERM or SIGINT came; the step, and its evaluation if it has one, was finished and saved.
    """
    placement = _placement(settings)
    processes, group = Processes(parallel, placement.device), open_group()
    model_settings = resolve(model_settings)
    retrieval = bool(model_settings.cca_layers)
    data = TrainingData(datastores, data_settings, retrieval=retrieval)
    data.plan(settings.steps * settings.accumulation * settings.batch_size)
    model_settings = _fit_to(model_settings, data.datastores[0])
    model_settings.check_length(data_settings.sequence_length)
    use = NeighborUse(data_settings.k if retrieval else 0, data_settings.neighbors, seed=data_settings.seed)
    sets = open_sets(evaluation.sets, datastores, model_settings, use.k, data_settings.reading)
    resolved = _resolved(model_settings, data_settings, settings, datastores)
    last = on_first(group, lambda: last_checkpoint(run, resolved, data.fingerprints))
    start = None
    if settings.start_from and last is None:
        start = on_first(group, lambda: checkpoints.open_checkpoint(Path(settings.start_from)))
    model = _model(model_settings, settings)
    num_parameters, factors = count_parameters(model), learning_rate_factors(model)
    if start is not None:
        start_from(start, model, data.fingerprints)
    passes = _share_out(model, processes, placement, settings)
    optimizer = _optimizer(passes, factors, settings)
    on_first(group, lambda: _begin(run, {**resolved, "parallel": asdict(parallel)}))
    position = Position(scaler=make_scaler(placement))
    facts = {"settings": resolved, "datastores": data.fingerprints, "started_from": start and start.fingerprint}
    if last is not None:
        checkpoints.restore(last, passes.parts, optimizer, group)
        on_first(group, partial(checkpoints.name_best, run, last.best))
        position.scaler.load_state_dict(last.scaler)
        position = Position(last.step, last.tokens, last.best, Meter(**last.unlogged), position.scaler, last.skipped)
        facts["started_from"] = last.started_from
        advance(last.tokens)
        log.info("%s: going on from step %d", run, last.step)
    for part in passes.parts:
        part.train()
    batches = _batches(data, settings, position.step, processes, placement)
    measure = partial(
        measure_sets,
        passes.parts[0],
        sets,
        replace(evaluation, max_tokens=settings.eval_tokens),
        placement,
        use=use,
        sequence_length=data_settings.sequence_length,
        token_losses_of=passes.token_losses,
    )
    work = Work(
        run,
        settings,
        processes,
        group,
        facts,
        take_step=make_step(passes, optimizer, batches, processes, placement, settings, position.scaler),
        name_refused=partial(name_batch, run, data, settings),
        measure=partial(_in_evaluation, passes, measure),
        utilisation=_utilisation(model_settings, data_settings, settings, placement, processes.count),
        tensors=partial(checkpoints.tensors_of, passes.parts, optimizer, processes.rank),
        publish=partial(checkpoints.publish, run, keep=settings.keep_checkpoints, group=open_group()),
        advance=advance,
    )
    loop(work, position)
    newest = checkpoints.latest(run)
    assert newest is not None  # the last step has made one
    return Outcome(newest, read_metrics(run), num_parameters)


def _placement(settings: TrainSettings) -> Placement:
    """The device of this process, which is set up for it."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device
    if device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    placement = place(device, settings.precision)
    if placement.device.type == "cpu":
        keep_freed_memory()
    elif placement.device.index is not None:
        torch.cuda.set_device(placement.device)
    return placement


def _begin(run: Path, resolved: dict[str, dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "settings.json", resolved)


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


def _model(model: ModelSettings, settings: TrainSettings) -> Retro:
    """A model with weights drawn from the seed."""
    torch.manual_seed(settings.seed)
    return Retro(model)


def _share_out(model: Retro, processes: Processes, placement: Placement, settings: TrainSettings) -> Passes:
    """The model, shared out over processes; each data-parallel one drops features of its own where there is dropout."""
    if processes.count > 1:
        torch.manual_seed(mix(mix(settings.seed) + processes.data_rank) >> 1)
    options: dict[str, Any] = {"z_weight": settings.z_loss, "compiled": wants_compilation(settings.compile, placement)}
    if processes.along("pipeline") is not None:
        return Pipeline(model, processes, placement, settings.batch_size, **options)
    return WholeModel(model, processes, placement, **options)


def _optimizer(passes: Passes, factors: Mapping[str, float], settings: TrainSettings) -> torch.optim.AdamW:
    return make_optimizer(
        all_parameters(passes.parts),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
        factors=factors,
    )


def _in_evaluation(passes: Passes, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Measure a model whose every part is in evaluation mode."""
    for part in passes.parts:
        part.eval()
    figures = measure()
    for part in passes.parts:
        part.train()
    return figures


def _batches(
    data: TrainingData, settings: TrainSettings, step: int, processes: Processes, placement: Placement
) -> Iterator[Tensors]:
    """This process's rows of the batches from a step to the end of the run."""
    workers = settings.data_workers
    return load(
        data,
        batches=range(step * settings.accumulation, settings.steps * settings.accumulation),
        batch_size=settings.batch_size,
        rows=processes.rows(settings.batch_size),
        dropped=settings.retrieval_dropout,
        workers=workers if workers >= 0 else 2 if placement.device.type == "cuda" else 0,
        placement=placement,
    )


def _utilisation(
    model: ModelSettings, data: DataSettings, settings: TrainSettings, placement: Placement, num_devices: int
) -> Callable[[float], float]:
    """Model-FLOPs utilisation at a rate in tokens per second; see `retro.flops`."""
    ks = data.k_choices or (data.k,)
    flops = 3 * sum(forward_flops(model, data.sequence_length, k) for k in ks) / len(ks) / data.sequence_length
    peak = settings.peak_tflops * 1e12 or peak_flops(placement)
    return lambda tokens_per_second: tokens_per_second * flops / (peak * num_devices)
