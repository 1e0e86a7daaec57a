"""The training loop: step, log, evaluate, save, until a run is complete or asked to stop.

Several processes go through it side by side. What one of them alone knows or does (a signal, files), the others hear of.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints.background_saver import Saver
from retro.parallel.coordination import on_first
from retro.parallel.process_mesh import Processes
from retro.training.loggers import Logger, open_loggers
from retro.training.meter import Meter
from retro.training.run_folder import better
from retro.training.settings import TrainSettings
from retro.training.signals import Stopped, signals_as_requests
from retro.training.step import StepResult

log = logging.getLogger("retro")

_MOST_REFUSED = 10  # batches in a row that are skipped: then it is not the batches


@dataclass
class Position:
    """How far a run is: all of a checkpoint that is neither tensors nor settings.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen.
        best: `step`, `metric` and `value` of the best evaluation, or None.
        meter: what the next line of metrics will say.
        scaler: of the loss.
        skipped: `steps` that the scaler has left out, and `batches` that were not finite.
    """

    step: int = 0
    tokens: int = 0
    best: dict[str, Any] | None = None
    meter: Meter = field(default_factory=Meter)
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    skipped: dict[str, int] = field(default_factory=lambda: {"steps": 0, "batches": 0})

    def take_in(self, result: StepResult) -> None:
        """One optimizer step, with what was skipped of it."""
        self.step, self.tokens = self.step + 1, self.tokens + result.num_tokens
        if result.update == "refused":
            self.meter.add_without_loss(result.num_tokens)
        else:
            self.meter.add(result.metrics["loss"], result.num_tokens)
        self.skipped["steps"] += result.update == "overflow"
        self.skipped["batches"] += result.update == "refused"

    def counts(self, settings: TrainSettings) -> dict[str, float]:
        """For a line of metrics: how often a step has left the weights as they were, where that can be."""
        counted = {"skipped_steps": self.scaler.is_enabled(), "skipped_batches": settings.on_nan == "skip"}
        return {name: self.skipped[name.removeprefix("skipped_")] for name, wanted in counted.items() if wanted}

    def as_json(self) -> dict[str, Any]:
        """As `state.json` holds it."""
        unlogged = {"loss": self.meter.loss, "steps": self.meter.steps}
        return {
            "step": self.step,
            "tokens": self.tokens,
            "unlogged": unlogged,
            "best": self.best,
            "scaler": self.scaler.state_dict(),
            "skipped": {**self.skipped},  # another thread writes it
        }


@dataclass(frozen=True)
class Work:
    """What a run does, as the loop calls it.

    Attributes:
        run: its folder.
        settings: intervals and ends.
        processes: that go through the loop together.
        group: of the same processes, for talk about files; the saver's thread has one of its own.
        facts: what checkpoints say beside the position.
        take_step: does the step of a number, counted from 0.
        name_refused: names the batch of a step, counted from 1, in a file; its path.
        measure: evaluates; metrics.
        utilisation: of a rate in tokens per second.
        tensors: of a checkpoint.
        publish: writes a checkpoint of a state and tensors.
        advance: is told of trained tokens.
    """

    run: Path
    settings: TrainSettings
    processes: Processes
    group: dist.ProcessGroup | None
    facts: dict[str, Any]
    take_step: Callable[[int], StepResult]
    name_refused: Callable[[int, StepResult], Path]
    measure: Callable[[], dict[str, float]]
    utilisation: Callable[[float], float]
    tensors: Callable[[], checkpoints.Tensors]
    publish: Callable[[dict[str, Any], checkpoints.Tensors], None]
    advance: Callable[[int], None]


def loop(work: Work, at: Position) -> None:
    """Go on from a position to the end.

    Raises:
        FloatingPointError: loss or gradient are not finite, and that is where to stop.
        Stopped: a signal came.
    """
    settings, first_step, refused_in_a_row = work.settings, at.step + 1, 0
    with contextlib.ExitStack() as stack:
        loggers = open_loggers(work.run, at.step, settings.steps, settings.report_to) if work.processes.is_first else []
        for logger in loggers:
            stack.callback(logger.close)
        asked_to_stop = stack.enter_context(signals_as_requests())  # before the saver, so that its last write is safe
        saver = stack.enter_context(contextlib.closing(Saver()))

        def save() -> None:
            saver.save(work.tensors(), partial(work.publish, {**at.as_json(), **work.facts}))

        while at.step < settings.steps:
            result = work.take_step(at.step)
            refused_in_a_row = refused_in_a_row + 1 if result.update == "refused" else 0
            if result.update == "refused":
                problem = _refused(work, at, result)
                if settings.on_nan == "stop" or refused_in_a_row > _MOST_REFUSED:
                    saver.wait()
                    if not on_first(work.group, checkpoints.step_folder(work.run, at.step).exists):
                        save()
                    raise FloatingPointError(f"{work.run}: {problem}. {_what_now(settings, at.step)}")
                log.warning("%s; it is skipped", problem)
            at.take_in(result)
            work.advance(result.num_tokens)
            due = partial(_due, at.step, settings.steps)
            record = partial(_record, loggers, {"step": at.step, "tokens": at.tokens})
            if due(settings.log_every):
                line = {**result.metrics, **at.meter.read(), **at.counts(settings)}
                record({**line, "mfu": work.utilisation(line["tokens_per_second"])})
            if result.figures:
                record(result.figures)
            if due(settings.eval_every):
                with at.meter.paused():
                    figures = work.measure()
                record(figures)
                at.best = better(at.best, at.step, figures)
            signal = _agreed(asked_to_stop(), work.processes)
            if due(settings.checkpoint_every) or (at.best and at.best["step"] == at.step) or signal:
                save()
            elif at.step == first_step:
                saver.prepare(work.tensors())
            if signal and at.step < settings.steps:
                raise Stopped(work.run, at.step, signal)


def _agreed(signal: int | None, processes: Processes) -> int:
    """The number of the signal that any process has had, or 0: all stop after the same step."""
    if processes.count == 1:
        return signal or 0
    return int(processes.largest(torch.tensor(signal or 0, device=processes.device)))


def _refused(work: Work, at: Position, result: StepResult) -> str:
    path = on_first(work.group, partial(work.name_refused, at.step + 1, result))
    return f"step {at.step + 1}: {_not_finite(result)}; the batch is in {path}"


def _not_finite(result: StepResult) -> str:
    metrics = result.metrics
    return f"loss {metrics['loss']:.4g}, norm of the gradient {metrics['gradient_norm']:.4g}"


def _what_now(settings: TrainSettings, step: int) -> str:
    """Advice for a run that has stopped after a step."""
    saved = f"Nothing of it was applied: the checkpoint of step {step} is the last good state."
    if settings.on_nan == "skip":
        return (
            f"{saved} More than {_MOST_REFUSED} batches in a row were so: train with a lower train.lr in another `run`."
        )
    return (
        f"{saved} To go on without this batch, run the same command with --train.on-nan skip; to train with a lower "
        "train.lr, choose another `run`."
    )


def _due(step: int, steps: int, every: int) -> bool:
    """Whether something that is done every so many steps (0 = never), and after the last one, is due."""
    return step == steps or bool(every and step % every == 0)


def _record(loggers: list[Logger], position: dict[str, int], figures: dict[str, float]) -> None:
    """A line of metrics to every logger."""
    for logger in loggers:
        logger.write({**position, **figures})
