"""Where metrics go: `metrics.jsonl` and the console always, TensorBoard and Weights & Biases where asked for."""

import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from retro.training.monitor import PREFIX

log = logging.getLogger("retro")


class Logger(Protocol):
    """Takes one line of metrics at a time."""

    def write(self, values: dict[str, Any]) -> None:
        """Values by name; `step` is among them."""

    def close(self) -> None:
        """Flush."""


class JsonLines:
    """`metrics.jsonl`. Lines after the step that a run goes on from are dropped: they will come again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = []
        if path.exists():
            complete = path.read_text().split("\n")[:-1]  # a kill may have cut the last line
            kept = [line for line in complete if json.loads(line)["step"] <= step]
        write_bytes(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115  (closed by close())

    def write(self, values: dict[str, Any]) -> None:
        """One line, flushed."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Console:
    """A readable line through the project's logger: about twenty for a run, and one for every evaluation."""

    def __init__(self, steps: int) -> None:
        self._every = max(1, steps // 20)
        self._next = 0

    def write(self, values: dict[str, Any]) -> None:
        """`step 200  loss 5.1234  …`. Figures of single layer groups are too many to be read here."""
        values = {name: value for name, value in values.items() if not name.startswith(PREFIX)}
        if values.keys() <= {"step", "tokens"}:
            return
        if "loss" in values and values["step"] < self._next:
            return
        if "loss" in values:
            self._next = values["step"] + self._every
        log.info(as_line(values))

    def close(self) -> None:
        """Nothing to do."""


def as_line(values: dict[str, Any]) -> str:
    """Metrics as people read them: counts with separators, the rest to four digits."""
    whole = ("step", "tokens", "tokens_per_second")
    return "  ".join(
        f"{name} {value:,.0f}" if name in whole else f"{name} {value:.4g}" for name, value in values.items()
    )


class TensorBoard:
    """Scalars in `run/tensorboard`."""

    def __init__(self, run: Path, _step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise InputError("train.report_to: 'tensorboard' needs pip install 'retro[tensorboard]'.") from error
        self._writer = SummaryWriter(str(run / "tensorboard"))

    def write(self, values: dict[str, Any]) -> None:
        """A point for each value."""
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run in the project `WANDB_PROJECT` (else `retro`), named after its folder; resumed under the id kept in `wandb.json`.

    Weights & Biases never takes a step twice, so a run that begins again from nothing gets another id.
    """

    def __init__(self, run: Path, step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError("train.report_to: 'wandb' needs pip install 'retro[wandb]'.") from error
        known = run / "wandb.json"
        if step == 0 or not known.exists():
            write_json(known, {"id": secrets.token_hex(6)})
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "retro"),
                name=run.name,
                id=read_json(known)["id"],
                resume="allow",
                dir=str(run),
                config=read_json(run / "settings.json") if step == 0 else None,
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"train.report_to: 'wandb': {error} Or set WANDB_MODE=offline, and run `wandb sync` later."
            ) from error

    def write(self, values: dict[str, Any]) -> None:
        """A point for each value."""
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


def open_loggers(run: Path, step: int, steps: int, report_to: tuple[str, ...]) -> list[Logger]:
    """The loggers of a run of `steps` that starts, or goes on, at `step`.

    Raises:
        InputError: a package that `report_to` needs is missing.
    """
    makers: dict[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    extra = [makers[name](run, step) for name in report_to]
    return [JsonLines(run / "metrics.jsonl", step), Console(steps), *extra]
