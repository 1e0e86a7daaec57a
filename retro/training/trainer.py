"""Training (paper, section 3), on one device or many: batches in, checkpoints and metrics out.

    run/  settings.json   metrics.jsonl   checkpoints/00000200/ …

    Trainer ─ restore ─► train ─► train_step ─► log ─► save ─► evaluate ─┐
                           └───────────────── next step ◄────────────────┘

The same command resumes a stopped run from its last checkpoint, bit for bit on a CPU: the order of the data is a
function of the step, and everything else that matters is in the checkpoint. All processes of a run do the same steps;
the first one writes the files.

A checkpoint is saved before the evaluation of its step, so that a kill during the evaluation loses no step. The line in
`metrics.jsonl` records that a step is evaluated.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from indexing.progress import Advance, FinishedBefore, during, status
from indexing.store.files import write_json
from retro.adapters.adapters import check_parallel, describe, train_only
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints import training_state
from retro.checkpoints.background_saver import Saver
from retro.checkpoints.checkpoint import Checkpoint
from retro.data.loader import load
from retro.device import choose_placement, training_device
from retro.model.presets import count_parameters, resolve
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, from_json
from retro.parallel.coordination import on_first, open_group
from retro.parallel.process_mesh import Processes
from retro.training.initial_weights import load_initial_adapter, load_initial_weights
from retro.training.loggers import Logger, open_loggers
from retro.training.meter import Meter, Utilization
from retro.training.optimizer import learning_rate_factors, make_optimizer
from retro.training.run_folder import (
    better,
    last_checkpoint,
    precision_of,
    read_evaluation,
    read_metrics,
    read_sections,
)
from retro.training.run_settings import RunSettings
from retro.training.settings import OnNan, TrainSettings
from retro.training.signals import Stopped, signals_as_requests
from retro.training.step import OptimizerStep, StepResult, distributed_model
from retro.training.task import DocumentTask, Task

log = logging.getLogger("retro")

MAX_REFUSED_IN_A_ROW = 10
"""Give up after this many skipped batches in a row: the batches are not the problem."""


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run.

    Attributes:
        checkpoint: folder of the last checkpoint.
        metrics: all lines of `metrics.jsonl`.
        parameters: number of parameters without embeddings.
    """

    checkpoint: Path
    metrics: list[dict[str, Any]]
    parameters: int


def train(run: Path, settings: RunSettings, *, advance: Advance = lambda _: None) -> Outcome:
    """Train a model on the documents of datastores, or resume a stopped run.

    Args:
        run: folder of the run.
        settings: the sections of the configuration.
        advance: receives numbers of trained tokens.

    Raises:
        InputError: settings that do not fit together, the datastores, or the run's earlier settings.
        FloatingPointError: loss or gradient are not finite. The state before that step is saved, and the batch named.
        Stopped: SIGTERM or SIGINT. The step is finished and saved; its evaluation, if one was due, is left to the
            resumed run.
    """
    return Trainer(run, DocumentTask, settings, advance=advance).train()


class Trainer:
    """Trains a model on a task.

    Attributes:
        step: optimizer steps done.
        tokens: tokens trained on.
        saved: step of the newest checkpoint, -1 without one.
        evaluated: whether the current step is evaluated.
        best: `step`, `metric` and `value` of the best evaluation, or None.
        skipped: number of `steps` skipped because of an overflow, and of `batches` skipped because they were not
            finite.
    """

    def __init__(
        self,
        run: Path,
        open_task: Callable[[RunSettings], Task],
        settings: RunSettings,
        *,
        advance: Advance = lambda _: None,
    ) -> None:
        """Build model and optimizer; restore the last checkpoint if the run has one.

        Args:
            run: folder of the run.
            open_task: opens the data, given settings whose model has the sizes of its preset.
            settings: the sections of the configuration.
            advance: receives numbers of trained tokens.
        """
        settings.check()
        _warn_of_short_warmup(settings.train)
        settings = replace(settings, train=settings.train.for_model(settings.model.preset))
        status("opening the data and the model")
        self.run, self.advance = run, advance
        device = training_device(settings.train.device)
        self.processes = Processes(settings.parallel, device)
        self.group = open_group()
        # What the first process measures, or measured when the run began, holds for all.
        self.precision = on_first(self.group, lambda: precision_of(run, settings.train.precision, device))
        self.placement = choose_placement(str(device), self.precision)
        check_parallel(settings.lora, settings.parallel)
        # The base and the datastore decide sizes of the model, so the task opens with the base's settings and completes
        # them.
        initial = on_first(self.group, lambda: _initial_checkpoint(run, settings.train))
        base = on_first(self.group, lambda: _base(run, initial)) if settings.model.preset == "base" else None
        self.task = open_task(replace(settings, model=resolve(settings.model, base)))
        self.settings = settings = self.task.settings
        settings.model.check_length(settings.data.sequence_length)
        # A run with other settings is refused before a model takes memory.
        last = on_first(self.group, self._last_checkpoint)
        self.metadata = self._metadata(initial, last)
        model = self._initial_model(initial)
        factors = learning_rate_factors(model)  # of whole matrices, before they are divided
        flops = settings.train.steps * settings.flops_per_step / self.processes.count
        self.model = distributed_model(model, self.processes, self.placement, settings.train, flops)
        self.optimizer = make_optimizer(self.model.model_parts, settings.train, factors, self.placement.dtype)
        self.optimizer_step = OptimizerStep(self.model, self.optimizer, self.processes, self.placement, settings.train)
        on_first(self.group, self._write_settings)  # after all checks of them
        self.step, self.tokens, self.saved = 0, 0, -1
        self.evaluated = True  # there is no step to evaluate
        self.best: dict[str, Any] | None = None
        self.skipped, self.refused_in_a_row = {"steps": 0, "batches": 0}, 0
        self.meter = Meter()
        if last is not None:
            self.restore(last)
        for part in self.model.model_parts:
            part.train()
        self.batches = self._load_batches()
        self.utilization = Utilization.of(settings, self.placement, self.processes.count)
        self.saver, self.saver_group = Saver(), open_group()
        self.loggers: list[Logger] = []
        self.signal_received: Callable[[], int | None] = lambda: None

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Train to the last step.

        Raises:
            FloatingPointError: loss or gradient are not finite.
            Stopped: SIGTERM or SIGINT.
        """
        settings, first_step = self.settings.train, self.step + 1
        status("starts at step %s", f"{first_step:,}")
        with contextlib.ExitStack() as stack:
            self._open_loggers(stack)
            # Before the saver, whose last write is then safe.
            self.signal_received = stack.enter_context(signals_as_requests())
            stack.enter_context(contextlib.closing(self.saver))
            self.evaluate_if_due()  # of a resumed run that was stopped during its evaluation
            while self.step < settings.steps:
                self.log(self.train_step())
                if self.is_due(settings.checkpoint_every):
                    self.save()
                elif self.step == first_step:
                    self.saver.prepare(self.tensors())
                self.evaluate_if_due()
                if self.step < settings.steps:
                    self.stop_if_signaled()
        newest = checkpoints.latest(self.run)
        assert newest is not None  # the last step has saved one
        return Outcome(newest, read_metrics(self.run), self.num_parameters)

    def train_step(self) -> StepResult:
        """Do one optimizer step on the next batches.

        Raises:
            FloatingPointError: loss or gradient are not finite, and `train.on_nan` or too many of them in a row stop
                the run.
        """
        batches = [next(self.batches) for _ in range(self.settings.train.gradient_accumulation_steps)]
        result = self.optimizer_step(self.step, batches)
        if result.update == "refused":
            self._skip_or_stop(result)
            self.meter.add_without_loss(result.num_tokens)
        else:
            self.refused_in_a_row = 0
            self.meter.add(result.metrics["loss"], result.num_tokens)
        self.step, self.tokens, self.evaluated = self.step + 1, self.tokens + result.num_tokens, False
        self.skipped["steps"] += result.update == "overflow"
        self.skipped["batches"] += result.update == "refused"
        self.advance(result.num_tokens)
        return result

    def log(self, result: StepResult) -> None:
        """Write the metrics of a step, if they are due, and those of the monitor."""
        if self.is_due(self.settings.train.log_every):
            line = {**result.metrics, **self.meter.read()}
            if self.optimizer_step.scaler.is_enabled():
                line["skipped_steps"] = self.skipped["steps"]
            if self.settings.train.on_nan == "skip":
                line["skipped_batches"] = self.skipped["batches"]
            self._write({**line, "mfu": self.utilization.at(line["tokens_per_second"])})
        if result.monitored:
            self._write(result.monitored)

    def evaluate_if_due(self) -> None:
        """Measure the model on the task's held-out data, log the metrics, and keep the checkpoint of the best
        evaluation.

        Raises:
            Stopped: a signal came; no metrics are logged.
        """
        if self.evaluated or not self.is_due(self.settings.train.eval_every):
            return
        parts = self.model.model_parts
        with self.meter.paused(self.advance), during("evaluation at step %s", f"{self.step:,}"):
            for part in parts:
                part.eval()
            metrics = self.task.evaluate(parts[0], self.placement, self._token_losses)
            for part in parts:
                part.train()
        if metrics:
            self._write(metrics)
        self.evaluated, before = True, self.best
        self.best = better(before, self.step, metrics)
        if self.best != before:
            self._keep_best()

    def _token_losses(self, inputs: Inputs) -> Tensor:
        """The losses of a batch of the evaluation, unless a signal came."""
        self.stop_if_signaled()
        return self.model.token_losses(inputs)

    def stop_if_signaled(self) -> None:
        """Save the step and raise `Stopped`, in all processes, if one of them received a signal."""
        if signal := self._agreed(self.signal_received()):
            if self.saved != self.step:
                self.save()
            raise Stopped(self.run, self.step, signal)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint keeps in addition to tensors, as `state.json` holds it."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "unlogged": {"loss": self.meter.loss, "steps": self.meter.steps},
            "best": self.best,
            "scaler": self.optimizer_step.scaler.state_dict(),
            "skipped": {**self.skipped},  # a copy: another thread writes it
            **self.metadata,
        }

    def tensors(self) -> checkpoints.TensorFiles:
        """The tensors that a checkpoint keeps, by file: weights, moments and random states."""
        return training_state.tensors_of(self.model.model_parts, self.optimizer, self.processes.rank)

    def save(self) -> None:
        """Save a checkpoint. Tensors are copied now; a thread writes the files."""
        keep = self.settings.train.keep_checkpoints
        publish = partial(checkpoints.publish, self.run, keep=keep, group=self.saver_group)
        self.saver.save(self.tensors(), partial(publish, self.state_dict()))
        self.saved = self.step

    def _keep_best(self) -> None:
        """Keep the checkpoint of this step as the best one."""
        if self.saved != self.step:
            self.save()
            return
        self.saver.wait()
        on_first(self.group, partial(checkpoints.rotate, self.run, self.best, self.settings.train.keep_checkpoints))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run."""
        training_state.restore(
            checkpoint,
            self.model.model_parts,
            self.optimizer,
            self.group,
            mesh_dims=self.metadata["mesh_dims"],
            stream=self.processes.data_rank,
        )
        evaluation = on_first(self.group, partial(read_evaluation, self.run, checkpoint.step))
        self.evaluated, self.best = bool(evaluation), better(checkpoint.best, checkpoint.step, evaluation)
        on_first(self.group, partial(checkpoints.name_best, self.run, self.best))
        self.optimizer_step.scaler.load_state_dict(checkpoint.scaler)
        self.step, self.tokens, self.saved = checkpoint.step, checkpoint.tokens, checkpoint.step
        self.skipped, self.meter = checkpoint.skipped, Meter(**checkpoint.unlogged)
        self.advance(FinishedBefore(checkpoint.tokens))
        log.info("%s: resuming from step %d", self.run, checkpoint.step)

    # --- preparation -------------------------------------------------------------------------------------------------

    def _metadata(self, initial: Checkpoint | None, last: Checkpoint | None) -> dict[str, Any]:
        """What checkpoints record of the run in addition to its progress."""
        started_from = last.started_from if last else initial and initial.fingerprint
        return {
            "settings": self._recorded_settings() | _imported(last or initial),
            "datastores": self.task.data.fingerprints,
            "mesh_dims": self.processes.mesh_dims,
            "precision": self.precision,
            "started_from": started_from,
            "num_ids": self.task.num_ids,
            "tokenizer": self.task.tokenizer,
        }

    def _recorded_settings(self) -> dict[str, dict[str, Any]]:
        return self.settings.recorded(self.task.extra_sections)

    def _last_checkpoint(self) -> Checkpoint | None:
        extra = {name: type(section)() for name, section in self.task.extra_sections.items()}
        defaults, fingerprints = RunSettings().recorded(extra), self.task.data.fingerprints
        return last_checkpoint(self.run, self._recorded_settings(), defaults, fingerprints)

    def _initial_model(self, initial: Checkpoint | None) -> Retro:
        """A model with weights drawn from the seed or read from `train.init_from`, and its adapter."""
        weights, lora = self.settings.train.weights, self.settings.lora
        torch.manual_seed(self.settings.train.seed)
        model = Retro(self.settings.model)
        self.num_parameters = count_parameters(model)
        if initial is not None:
            load_initial_weights(initial, model, self.task.data.fingerprints, weights, self.task.tokenizer)
        load_initial_adapter(initial, model, lora)
        train_only(model, weights)
        if weights != "all" or lora.rank:
            log.info("%s", describe(model))
        return model

    def _write_settings(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        write_json(
            self.run / "settings.json", {**self.metadata["settings"], "parallel": asdict(self.settings.parallel)}
        )

    def _load_batches(self) -> Iterator[Inputs]:
        """This process's rows of the batches from the current step to the end of the run."""
        settings = self.settings.train
        count = settings.gradient_accumulation_steps
        return load(
            self.task.data,
            batches=range(self.step * count, settings.steps * count),
            batch_size=settings.batch_size,
            rows=self.processes.rows(settings.batch_size),
            retrieval_dropout=self.settings.retrieval_dropout,
            workers=self.placement.num_workers(settings.num_workers),
            placement=self.placement,
        )

    # --- details of the loop -----------------------------------------------------------------------------------------

    def is_due(self, every: int) -> bool:
        """True every `every` steps (0 = never) and after the last step."""
        return self.step == self.settings.train.steps or bool(every and self.step % every == 0)

    def _open_loggers(self, stack: contextlib.ExitStack) -> None:
        if self.processes.is_first:
            settings = self.settings.train
            self.loggers = open_loggers(self.run, self.step, settings.steps, settings.report_to)
        for logger in self.loggers:
            stack.callback(logger.close)

    def _write(self, metrics: dict[str, float]) -> None:
        """Write a line of metrics to every logger."""
        for logger in self.loggers:
            logger.write({"step": self.step, "tokens": self.tokens, **metrics})

    def _agreed(self, signal: int | None) -> int:
        """The number of the signal that any process received, or 0: all stop after the same step.

        Processes agree in the host's memory. On a GPU they would wait for the optimizer first.
        """
        agreed = torch.tensor(signal or 0)
        if self.group is not None:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.group)
        return int(agreed)

    def _skip_or_stop(self, result: StepResult) -> None:
        """Name a batch that is not finite in a file. Raise FloatingPointError if the run stops here, after a
        checkpoint."""
        settings = self.settings
        file = on_first(self.group, lambda: self._name_batch(result))
        figures = f"loss {result.metrics['loss']:.4g}, norm of the gradient {result.metrics['gradient_norm']:.4g}"
        problem = f"step {self.step + 1}: {figures}; the batch is in {file}"
        self.refused_in_a_row += 1
        if settings.train.on_nan == "skip" and self.refused_in_a_row <= MAX_REFUSED_IN_A_ROW:
            log.warning("%s; it is skipped", problem)
            return
        if self.saved != self.step:
            self.save()
        raise FloatingPointError(f"{self.run}: {problem}. {_advice(settings.train.on_nan, self.step)}")

    def _name_batch(self, result: StepResult) -> Path:
        """Write `RUN/bad_batches/00000137.json` with the sources of all sequences of a step, and return its path.

        A run that is resumed from an earlier checkpoint writes the same file again.
        """
        step, size = self.step + 1, self.settings.samples_per_step
        samples = range((step - 1) * size, step * size)
        path = self.run / "bad_batches" / f"{step:08d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {name: str(result.metrics[name]) for name in ("loss", "gradient_norm")}  # JSON has no NaN
        write_json(path, {"step": step, **figures, "sequences": [self.task.data.origin(sample) for sample in samples]})
        return path


def _warn_of_short_warmup(settings: TrainSettings) -> None:
    if settings.warmup_steps is not None and settings.warmup != settings.warmup_steps:
        text = "train.warmup_steps = %d is more than train.steps: the warm-up ends at step %d instead"
        log.warning(text, settings.warmup_steps, settings.warmup)


def _advice(on_nan: OnNan, step: int) -> str:
    """What to do about a run that stopped after `step` steps."""
    saved = f"The update was not applied: the checkpoint of step {step} is the last good state."
    if on_nan == "skip":
        return f"{saved} Too many batches in a row were not finite: train with a lower train.lr in another `run`."
    return (
        f"{saved} To skip this batch, run the same command with --train.on-nan skip. To train with a lower train.lr, "
        "choose another `run`."
    )


def _initial_checkpoint(run: Path, settings: TrainSettings) -> Checkpoint | None:
    """The checkpoint of `train.init_from`; None for random weights, and for a run that is resumed."""
    if not settings.init_from or checkpoints.latest(run) is not None:
        return None
    return checkpoints.open_checkpoint(Path(settings.init_from))


def _imported(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The section of an imported model, whose chat template a run that continues it keeps."""
    return {name: section for name, section in checkpoint.settings.items() if name == "imported"} if checkpoint else {}


def _base(run: Path, initial: Checkpoint | None) -> ModelSettings | None:
    """The model of the preset `base`: that of `train.init_from`, or of the run if it is resumed."""
    if initial is None and checkpoints.latest(run) is not None:
        return from_json(read_sections(run)["model"])
    return initial.model if initial else None
