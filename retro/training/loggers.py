"""Loggers of metrics: always `metrics.jsonl` and the console, optionally TensorBoard and Weights & Biases."""

import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from indexing.progress import status
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from retro.training.monitor import PREFIX

log = logging.getLogger("retro")


class Logger(Protocol):
    """Writes lines of metrics."""

    def write(self, values: dict[str, Any]) -> None:
        """Write values by name, with `step`."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """Writes `metrics.jsonl`. Lines after the step from which a run resumes are removed, because the run writes them
    again."""

    def __init__(self, path: Path, step: int) -> None:
        lines = []
        if path.exists():
            complete = path.read_text().split("\n")[:-1]  # a kill may have cut the last line
            lines = [line for line in complete if json.loads(line)["step"] <= step]
        write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
        self._file = open(path, "a")  # noqa: SIM115  (closed by close())

    def write(self, values: dict[str, Any]) -> None:
        """One line, flushed."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Console:
    """Logs the loss as the status of the run, and a line for the last step and for every evaluation."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def write(self, values: dict[str, Any]) -> None:
        """Log `step 200 of 1,000, loss 5.123`, or all values but the metrics of layer groups."""
        values = readable(values)
        if "loss" in values and values["step"] < self._steps:
            status("step %s of %s, loss %.4g", f"{values['step']:,}", f"{self._steps:,}", values["loss"])
        elif values:
            log.info(as_line(values))

    def close(self) -> None:
        """Do nothing."""


def readable(values: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without those of layer groups, which are hundreds; empty if there are no others."""
    others = {name: value for name, value in values.items() if not name.startswith(PREFIX)}
    return others if others.keys() > {"step", "tokens"} else {}


def as_line(values: dict[str, Any]) -> str:
    """Format metrics for reading: counts with separators, other values with four digits."""
    whole = ("step", "tokens", "tokens_per_second")
    return "  ".join(
        f"{name} {value:,.0f}" if name in whole else f"{name} {value:.4g}" for name, value in values.items()
    )


class TensorBoard:
    """Writes scalars to `run/tensorboard`."""

    def __init__(self, run: Path, _step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise InputError("train.report_to: 'tensorboard' needs pip install 'retro[tensorboard]'.") from error
        self._writer = SummaryWriter(str(run / "tensorboard"))

    def write(self, values: dict[str, Any]) -> None:
        """Write a point for each value."""
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to the project `WANDB_PROJECT` (default `retro`), named after the run's folder. `wandb.json` keeps the id
    for resuming.

    Weights & Biases rejects a step that it already has, so a run that starts over gets a new id.
    """

    def __init__(self, run: Path, step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError("train.report_to: 'wandb' needs pip install 'retro[wandb]'.") from error
        identity = run / "wandb.json"
        if step == 0 or not identity.exists():
            write_json(identity, {"id": secrets.token_hex(6)})
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "retro"),
                name=run.name,
                id=read_json(identity)["id"],
                resume="allow",
                dir=str(run),
                config=read_json(run / "settings.json") if step == 0 else None,
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"train.report_to: 'wandb': {error} Or set WANDB_MODE=offline, and run `wandb sync` later."
            ) from error

    def write(self, values: dict[str, Any]) -> None:
        """Write a point for each value."""
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


def open_loggers(run: Path, step: int, steps: int, report_to: tuple[str, ...]) -> list[Logger]:
    """The loggers of a run of `steps` steps that starts or resumes at `step`.

    Raises:
        InputError: a package that `report_to` needs is missing.
    """
    makers: dict[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    extra = [makers[name](run, step) for name in report_to]
    return [JsonLines(run / "metrics.jsonl", step), Console(steps), *extra]
