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
from retro.device import Placement, Precision, place
from retro.evaluation import EvaluationSettings, Result, evaluate
from retro.loggers import Logger, open_loggers
from retro.model import ModelSettings, Retro, loss
from retro.optimizer import Schedule, learning_rate, make_optimizer
from retro.presets import count_parameters, resolve

log = logging.getLogger("retro")


@dataclass(frozen=True)
class TrainSettings:
    """How long and how fast a model learns."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch_size: int = 8
    """Sequences of one forward pass."""
    accumulation: int = 1
    """Forward passes of one optimizer step."""
    lr: float = 1e-3
    """Peak learning rate (paper: 2e-4 for the sizes from 172M to 1.5B)."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak."""
    warmup_steps: int = 100
    """Linear warm-up from 1e-7 (paper: 750)."""
    schedule: Schedule = "cosine"
    """After the warm-up: `cosine`, `linear`, `constant`, or `wsd` (constant, then a linear end)."""
    decay_share: float = 0.2
    """Share of the steps in which `wsd` decays."""
    weight_decay: float = 0.1
    """Of matrices and embeddings; norms are spared."""
    beta1: float = 0.9
    """Of the first moment."""
    beta2: float = 0.95
    """Of the second moment."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 = no clipping."""
    retrieval_dropout: float = 0.1
    """Share of the sequences trained with retrieval OFF, so that the model stays good without."""
    seed: int = 0
    """Of the initial weights and of dropout."""
    precision: Precision = "auto"
    """`auto`: bfloat16 products where the hardware has fast ones, else float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` …"""
    threads: int = 0
    """CPU threads of torch; 0 leaves its own choice."""
    eval_every: int = 500
    """Steps between held-out evaluations, retrieval ON and OFF; 0 = at the end only."""
    eval_tokens: int = 50_000
    """Tokens scored in an evaluation while training; 0 = all."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest ones."""
    log_every: int = 10
    """Steps between lines of `metrics.jsonl`."""
    log_to: tuple[str, ...] = ()
    """More places for metrics: `tensorboard`, `wandb`."""

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "accumulation", "checkpoint_every", "keep_checkpoints", "log_every"):
            if getattr(self, key) < 1:
                raise InputError(f"train.{key} = {getattr(self, key)}: must be at least 1.")
        for key in ("warmup_steps", "eval_every", "eval_tokens", "threads", "clip", "weight_decay"):
            if getattr(self, key) < 0:
                raise InputError(f"train.{key} = {getattr(self, key)}: must be 0 or more.")
        for key in ("retrieval_dropout", "min_lr_ratio", "beta1", "beta2"):
            if not 0 <= getattr(self, key) <= 1:
                raise InputError(f"train.{key} = {getattr(self, key)}: must be between 0 and 1.")
        if self.lr <= 0:
            raise InputError(f"train.lr = {self.lr}: must be above 0.")
        if not 0 < self.decay_share <= 1:
            raise InputError(f"train.decay_share = {self.decay_share}: must be above 0 and at most 1.")
        if self.warmup_steps > self.steps:
            raise InputError(f"train.warmup_steps = {self.warmup_steps}: must not exceed train.steps = {self.steps}.")
        unknown = set(self.log_to) - {"tensorboard", "wandb"}
        if unknown:
            raise InputError(f"train.log_to has {sorted(unknown)}: accepted are 'tensorboard' and 'wandb'.")


# Settings that change neither weights nor losses: a run may be resumed with other values of these.
# Where a datastore lies is free too: its fingerprint is compared.
_FREE = {
    "train": [
        "device",
        "threads",
        "eval_every",
        "eval_tokens",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "log_to",
    ],
    "data": ["datastores"],
}


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
    first = data.datastores[0]
    model_settings = _fit_to(model_settings, first)
    resolved = {"model": asdict(model_settings), "data": asdict(data_settings), "train": asdict(settings)}
    resolved["data"]["datastores"] = [str(folder.resolve()) for folder in datastores]
    resolved = json.loads(json.dumps(resolved, default=str))
    last = _last_checkpoint(run, resolved, data.fingerprints)
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


def _last_checkpoint(run: Path, resolved: dict[str, Any], datastores: list[str]) -> checkpoints.Checkpoint | None:
    """The checkpoint to go on from.

    Raises:
        InputError: the run was started with other settings or on another datastore.
    """
    if checkpoints.latest(run) is None:
        return None
    found = checkpoints.open_checkpoint(run)
    changed = [
        f"{section}.{key} was {found.settings[section].get(key)!r}, now {value!r}"
        for section, values in resolved.items()
        for key, value in values.items()
        if found.settings[section].get(key) != value and key not in _FREE.get(section, [])
    ]
    if found.datastores != datastores:
        changed.append("the datastore has changed")
    if changed:
        raise InputError(
            f"{run} holds a run with other settings: {'; '.join(changed)}. Set them back or choose another `run`."
        )
    return found


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


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every line of a run's `metrics.jsonl`."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
