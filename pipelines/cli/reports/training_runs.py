"""Curves of training runs: the loss, and the bits per byte of held-out documents, retrieval OFF and ON.

RUN/metrics.jsonl, RUN/settings.json → curves by metric → RUN/curves.svg, and a table

Both files can be read while a run is in progress. TensorBoard and Weights & Biases show all other metrics
(`train.report_to`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.errors import InputError
from indexing.store.files import write_bytes
from pipelines.cli.reports.pictures import Plot, PlotLine, line_plots
from pipelines.cli.results import Table
from retro.evaluation.sets import short_names
from retro.training.run_folder import read_metrics, read_sections

_HELD_OUT = re.compile(r"(.+)_(bits_per_byte|loss)_(on|off)")
_UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token of answers"}
_POINTS = 400  # of a curve; longer curves are thinned


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
        name: unique among the runs of a plot.
        lines: of `metrics.jsonl`.
        steps: that the run trains for.
    """

    name: str
    lines: list[dict[str, Any]]
    steps: int

    @property
    def sets(self) -> dict[str, str]:
        """Name of each scored evaluation set → its figure: `bits_per_byte`, or `loss` if it holds examples."""
        matches = (_HELD_OUT.fullmatch(name) for line in self.lines for name in line)
        return {match[1]: match[2] for match in matches if match}

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and finite values of a metric: each [n] float64."""
        pairs = [(line["tokens"], line[metric]) for line in self.lines if isinstance(line.get(metric), int | float)]
        tokens, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return tokens[np.isfinite(values)], values[np.isfinite(values)]

    def held_out(self, name: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and figure of an evaluation set, retrieval `on` or `off`; empty if it was not scored."""
        return self.curve(f"{name}_{self.sets.get(name)}_{mode}")


def open_run(folder: Path, name: str) -> Run:
    """Read a run's folder; an incomplete last line is ignored.

    Raises:
        InputError: it is not the folder of a run.
    """
    steps = read_sections(folder)["train"].get("steps", 0)
    return Run(name, read_metrics(folder), steps if isinstance(steps, int) else 0)


def plot_runs(folders: Sequence[Path], path: Path) -> Table:
    """Plot the curves of runs in one SVG.

    Args:
        folders: of the runs, one or several.
        path: the SVG file.

    Returns:
        progress, speed, loss and last held-out figures of each run.

    Raises:
        InputError: a folder is not a run, or is named twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError(f"{', '.join(map(str, folders))}: a run is named twice. Name different runs.")
    runs = [open_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    losses = {
        run.name: PlotLine(*_thinned(tokens, smoothed(values)), color=color)
        for color, run in enumerate(runs)
        for tokens, values in [run.curve("loss")]
        if len(values)
    }
    plots = [Plot(losses, "tokens", "nats per token", "Training loss")]
    plots += [_held_out_plot(runs, name, figure) for name, figure in _sets_of(runs).items()]
    write_bytes(path, line_plots(*plots).light.encode())
    return _table(runs)


def _sets_of(runs: Sequence[Run]) -> dict[str, str]:
    return {name: figure for run in runs for name, figure in run.sets.items()}


def _held_out_plot(runs: Sequence[Run], name: str, figure: str) -> Plot:
    """A set's figure, OFF dashed. One run is blue with retrieval and orange without; several runs have a color each."""
    lines = {}
    for run_color, run in enumerate(runs):
        for mode in ("on", "off"):
            tokens, values = run.held_out(name, mode)
            if len(values):
                label = f"{run.name} {mode.upper()}" if len(runs) > 1 else f"retrieval {mode.upper()}"
                color = run_color if len(runs) > 1 else int(mode == "off")
                lines[label] = PlotLine(*_thinned(tokens, values), color, dashed=mode == "off")
    return Plot(lines, "tokens", _UNITS[figure], f"Held out: {name}")


def _table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        step, tokens = (run.lines[-1]["step"], run.lines[-1]["tokens"]) if run.lines else (0, 0)
        losses, rates = run.curve("loss")[1], run.curve("tokens_per_second")[1]
        loss = f"{smoothed(losses)[-1]:.4f}" if len(losses) else "–"
        rate = f"{np.median(rates):,.0f}" if len(rates) else "–"
        row = [run.name, f"{step:,} of {run.steps:,}", f"{tokens:,}", rate, loss]
        for name in _sets_of(runs):
            row += [f"{curve[-1]:.4f}" if len(curve := run.held_out(name, mode)[1]) else "–" for mode in ("off", "on")]
        rows.append(row)
    held_out = [f"{name} {mode}" for name in _sets_of(runs) for mode in ("OFF", "ON")]
    return Table(["run", "steps", "tokens", "tokens/s", "training loss", *held_out], rows)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Moving mean over a thirtieth of the curve [n], over fewer values near the ends."""
    window = np.ones(len(values) // 60 * 2 + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _thinned(tokens: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve at equal distances, with the first and the last."""
    points = np.unique(np.linspace(0, max(0, len(values) - 1), _POINTS).round().astype(np.int64))[: len(values)]
    return tokens[points], values[points]
