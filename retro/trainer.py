"""The training loop on one device (paper, section 3): batches in, checkpoints and metrics out.

    run/  settings.json   metrics.jsonl   checkpoints/00000200/ …

A run that was stopped anywhere goes on from its last checkpoint with the same command, bit for bit on a CPU: the data
order is a function of the step, and everything else that matters is in the checkpoint.
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.tokenizer import read_token_bytes
from retro import checkpoint as checkpoints
from retro.batches import DataSettings, TrainingData
from retro.device import Placement, place
from retro.evaluation import EvaluationSettings, Result, evaluate
from retro.loggers import Logger, open_loggers
from retro.loss import loss
from retro.model import ModelSettings, Retro
from retro.optimizer import learning_rate, make_optimizer
from retro.presets import count_parameters, resolve
from retro.run import last_checkpoint, read_metrics
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
        datastores: what it learns from; held-out documents are those of the first.
        model_settings: its sizes; `vocab_size` 0 is filled in from the tokenizer.
        data_settings: sequences and neighbors.
        settings: steps, optimizer, schedule, intervals.
        evaluation: how held-out documents are scored.
        advance: told of trained tokens.

    Raises:
        InputError: settings that do not fit together, the datastore, or the run's earlier settings.
        FloatingPointError: the loss is not a number; the last checkpoint stays.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    placement = place(settings.device, settings.precision)
    model_settings = resolve(model_settings)
    data = TrainingData(datastores, data_settings, retrieval=bool(model_settings.cca_layers))
    data.plan(settings.steps * settings.accumulation * settings.batch_size)
    first = data.datastores[0]
    model_settings = _fit_to(model_settings, first)
    resolved = {"model": asdict(model_settings), "data": asdict(data_settings), "train": asdict(settings)}
    resolved["data"]["datastores"] = [str(folder.resolve()) for folder in datastores]
    resolved = json.loads(json.dumps(resolved, default=str))
    last = last_checkpoint(run, resolved, data.fingerprints)
    torch.manual_seed(settings.seed)
    model = Retro(model_settings).to(placement.device)
    optimizer = make_optimizer(
        model,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "settings.json", resolved)
    step, tokens = 0, 0
    if last is not None:
        checkpoints.restore(last, model, optimizer)
        step, tokens = last.step, last.tokens
        advance(tokens)
        log.info("%s: going on from step %d", run, step)
    measure = _measure(model, first, evaluation, settings, data_settings, placement)
    model.train()
    with contextlib.ExitStack() as stack:
        loggers = open_loggers(run, step, settings.steps, settings.log_to)
        for logger in loggers:
            stack.callback(logger.close)
        while step < settings.steps:
            metrics, seen = _step(model, optimizer, data, placement, settings, step)
            step, tokens = step + 1, tokens + seen
            advance(seen)
            if not math.isfinite(metrics["loss"]):
                raise FloatingPointError(f"{run}: loss {metrics['loss']} at step {step}; lower train.lr and run again.")
            _log(loggers, settings, step, {"step": step, "tokens": tokens}, metrics, measure)
            if step == settings.steps or step % settings.checkpoint_every == 0:
                state = {"step": step, "tokens": tokens, "settings": resolved, "datastores": data.fingerprints}
                checkpoints.save(run, state, model, optimizer)
                checkpoints.keep_last(run, settings.keep_checkpoints)
    return Outcome(checkpoints.open_checkpoint(run).folder, read_metrics(run), count_parameters(model))


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


def _step(
    model: Retro,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
    placement: Placement,
    settings: TrainSettings,
    step: int,
) -> tuple[dict[str, float], int]:
    """One optimizer step: its metrics and the number of tokens in it."""
    started = time.perf_counter()
    lr = learning_rate(
        step,
        schedule=settings.schedule,
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        lr=settings.lr,
        min_lr_ratio=settings.min_lr_ratio,
        decay_share=settings.decay_share,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    total, tokens = 0.0, 0
    for micro in range(settings.accumulation):
        first = (step * settings.accumulation + micro) * settings.batch_size
        batch = data.batch(range(first, first + settings.batch_size), settings.retrieval_dropout)
        labels = placement.tensor(batch.labels)
        assert labels is not None
        with placement.autocast():
            value = loss(model(**placement.tensors(batch)), labels) / settings.accumulation
        value.backward()
        total += value.item()
        tokens += batch.tokens.size
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started
    return {"loss": total, "lr": lr, "gradient_norm": float(norm), "tokens_per_second": tokens / seconds}, tokens


def _measure(
    model: Retro,
    datastore: Datastore,
    evaluation: EvaluationSettings,
    settings: TrainSettings,
    data: DataSettings,
    placement: Placement,
) -> Callable[[], dict[str, float]]:
    """A function that scores held-out documents, ON and OFF; where none are held out it measures nothing."""
    if not datastore.valid.num_documents:
        log.warning("%s holds no held-out documents: nothing is evaluated while training", datastore.folder)
        return dict
    token_bytes = read_token_bytes(datastore.folder / "tokenizer")
    limited = replace(evaluation, max_tokens=settings.eval_tokens)

    def measure() -> dict[str, float]:
        ks = (0, data.k) if model.settings.cca_layers and data.k else (0,)
        results: list[Result] = [
            evaluate(model, datastore, token_bytes, limited, placement, k=k, sequence_length=data.sequence_length)
            for k in ks
        ]
        return {f"valid_bits_per_byte_{result.retrieval.lower()}": result.bits_per_byte for result in results}

    return measure


# --- metrics -------------------------------------------------------------------------------------------------------


def _log(
    loggers: list[Logger],
    settings: TrainSettings,
    step: int,
    position: dict[str, int],
    metrics: dict[str, float],
    measure: Callable[[], dict[str, float]],
) -> None:
    """A line of training metrics and one of held-out figures, where the step asks for them."""
    at_end = step == settings.steps
    lines = [metrics] if at_end or step % settings.log_every == 0 else []
    if at_end or (settings.eval_every and step % settings.eval_every == 0):
        lines.append(measure())
    for line in lines:
        for logger in loggers:
            logger.write({**position, **line})
