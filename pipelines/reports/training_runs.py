"""Report of one or more training runs, read from their folders, on one HTML page.

RUN/metrics.jsonl, RUN/settings.json → curves by metric, tables → RUN/report.html

Only these two files are read, so a page can be made while a run is in progress. Unknown metrics are plotted too, under their
own names.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.errors import InputError
from indexing.store.files import read_json
from pipelines.config import Config
from pipelines.reports.html import PlotLine, Section, flat, line_plot, shown, write_report
from pipelines.results import Table
from pipelines.settings.toml_file import as_plain
from retro.evaluation.sets import short_names
from retro.training.monitor import PREFIX
from retro.training.run_folder import read_metrics

# Title and unit of metrics with their own plot, in the order of the page.
_KNOWN = {
    "loss": ("Training loss", "nats per token"),
    "lr": ("Learning rate", ""),
    "gradient_norm": ("Norm of the gradient, before clipping", ""),
    "tokens_per_second": ("Speed", "tokens per second"),
}
# Title and unit of the monitor's figures of layer groups.
_GROUP_FIGURES = {
    "gradient_norm": ("Norm of the gradient", ""),
    "update_ratio": ("Update over weights", ""),
    "underflow": ("Underflow", "share of the gradient"),
    "overflow": ("Overflow", "share of the gradient"),
}
_POSITION = ("step", "tokens")
_HELD_OUT = re.compile(r"(.+)_(bits_per_byte|loss)_(on|off)")
_HELD_OUT_UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token of answers"}
_POINTS = 400  # of a curve on the page; longer curves are thinned


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
        name: unique on the page.
        lines: of `metrics.jsonl`.
        settings: `section.key` → value.
    """

    name: str
    lines: list[dict[str, Any]]
    settings: dict[str, Any]

    @property
    def metrics(self) -> list[str]:
        """Names of all logged numbers, in order of first appearance."""
        names = dict.fromkeys(
            name for line in self.lines for name, value in line.items() if isinstance(value, int | float)
        )
        return [name for name in names if name not in _POSITION]

    @property
    def sets(self) -> list[str]:
        """Names of the scored evaluation sets."""
        return list(dict.fromkeys(found[1] for name in self.metrics if (found := _HELD_OUT.fullmatch(name))))

    def figure(self, name: str) -> str:
        """The figure of an evaluation set: `bits_per_byte`, or `loss` if it holds examples."""
        return next(found[2] for each in self.metrics if (found := _HELD_OUT.fullmatch(each)) and found[1] == name)

    @property
    def position(self) -> tuple[int, int]:
        """The last step and its tokens."""
        return (self.lines[-1]["step"], self.lines[-1]["tokens"]) if self.lines else (0, 0)

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and finite values of a metric: each [n] float64."""
        pairs = [(line["tokens"], line[metric]) for line in self.lines if isinstance(line.get(metric), int | float)]
        tokens, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return tokens[np.isfinite(values)], values[np.isfinite(values)]

    def held_out(self, name: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and figure of an evaluation set, retrieval `on` or `off`; empty if it was not scored."""
        return self.curve(f"{name}_{self.figure(name)}_{mode}") if name in self.sets else (np.empty(0), np.empty(0))


def open_run(folder: Path, name: str) -> Run:
    """Read a run's folder; an incomplete last line is ignored.

    Raises:
        InputError: it is not the folder of a run.
    """
    settings = folder / "settings.json"
    if not settings.exists():
        raise InputError(
            f"{folder} is not the folder of a run ({settings} is missing). `retro train CONFIG` makes one."
        )
    return Run(name, read_metrics(folder), flat(read_json(settings)))


def write_run_report(folders: Sequence[Path], path: Path) -> Table:
    """Write the page.

    Args:
        folders: of the runs, one or several.
        path: the HTML file.

    Returns:
        the table of all runs.

    Raises:
        InputError: a folder is not a run, or is named twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError(f"{', '.join(map(str, folders))}: a run is named twice. Name different runs.")
    runs = [open_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    summary = runs_table(runs)
    changed, others = settings_sections(runs)
    sections = [
        Section("Runs", table=summary if len(runs) > 1 else None),
        changed,
        Section("Held-out documents", table=held_out_table(runs), plots=held_out_plots(runs)),
        Section(
            "Training", plots=[metric_plot(runs, name, *texts) for name, texts in _KNOWN.items() if _has(runs, name)]
        ),
        Section("Layer groups", text=_GROUPS_TEXT, table=groups_table(runs), plots=group_plots(runs)),
        Section("More", plots=[metric_plot(runs, name, name, "") for name in more_metrics(runs)]),
        others,
    ]
    write_report(
        path,
        title=", ".join(run.name for run in runs),
        subtitle=progress_of(runs[0]) if len(runs) == 1 else "Training runs side by side",
        figures=figures_of(runs[0]) if len(runs) == 1 else (),
        sections=[section for section in sections if section.plots or (section.table and section.table.rows)],
    )
    return summary


def _has(runs: Sequence[Run], metric: str) -> bool:
    return any(metric in run.metrics for run in runs)


def more_metrics(runs: Sequence[Run]) -> list[str]:
    """Names of metrics without their own plot."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return [name for name in names if not (name in _KNOWN or _HELD_OUT.fullmatch(name) or name.startswith(PREFIX))]


# --- figures and tables --------------------------------------------------------------------------------------------


def progress_of(run: Run) -> str:
    """Progress of a run."""
    step, steps = run.position[0], run.settings.get("train.steps", 0)
    return f"Finished after {step:,} steps" if step >= steps else f"Step {step:,} of {steps:,}: running or stopped"


def figures_of(run: Run) -> list[tuple[str, str, str]]:
    """Label, value and note of the most important numbers."""
    step, tokens = run.position
    figures = [("steps", f"{step:,}", f"{tokens:,} tokens")]
    _, losses = run.curve("loss")
    if len(losses):
        figures.append(("training loss", f"{smoothed(losses)[-1]:.4f}", "nats per token, smoothed"))
    for name in run.sets[:1]:
        unit = _HELD_OUT_UNITS[run.figure(name)]
        for mode in ("on", "off"):
            reached, values = run.held_out(name, mode)
            if len(values):
                best = f"best {values.min():.4f} after {reached[values.argmin()]:,.0f} tokens"
                figures.append((f"{name}, {unit}, {mode.upper()}", f"{values[-1]:.4f}", best))
        if change := gain(run, name):
            figures.append(("retrieval ON against OFF", change, f"{unit}, the same weights"))
    _, rates = run.curve("tokens_per_second")
    if len(rates):
        figures.append(("tokens per second", f"{np.median(rates):,.0f}", "median"))
    _, shares = run.curve("mfu")
    if len(shares):
        figures.append(("MFU", f"{100 * np.median(shares):.1f}%", "median; of the device's peak"))
    return figures


def gain(run: Run, name: str) -> str:
    """Change of the last figure of a set, ON against OFF, in percent; empty if one is missing."""
    _, changes = gain_curve(run, name)
    return f"{changes[-1]:+.2f}%" if len(changes) else ""


def gain_curve(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and change of a set's figure, ON against OFF, in percent."""
    (tokens, on), (tokens_off, off) = run.held_out(name, "on"), run.held_out(name, "off")
    both, left, right = np.intersect1d(tokens, tokens_off, return_indices=True)
    return both, 100 * (on[left] / off[right] - 1)


def runs_table(runs: Sequence[Run]) -> Table:
    """Progress, speed and loss of each run."""
    rows = []
    for run in runs:
        step, tokens = run.position
        losses, rates = run.curve("loss")[1], run.curve("tokens_per_second")[1]
        loss = f"{smoothed(losses)[-1]:.4f}" if len(losses) else "–"
        rate = f"{np.median(rates):,.0f}" if len(rates) else "–"
        rows.append([run.name, f"{step:,} of {run.settings.get('train.steps', 0):,}", f"{tokens:,}", loss, rate])
    return Table(["run", "steps", "tokens", "training loss", "tokens/s"], rows)


def held_out_table(runs: Sequence[Run]) -> Table:
    """For every run and set the last and the best figure, OFF and ON, and their change."""
    rows = []
    for run in runs:
        for name in run.sets:
            curves = [run.held_out(name, mode)[1] for mode in ("off", "on")]
            last, best = ([f"{pick(c):.4f}" if len(c) else "–" for c in curves] for pick in (lambda c: c[-1], np.min))
            rows.append([run.name, name, *last, gain(run, name) or "–", *best])
    return Table(["run", "set", "OFF", "ON", "ON against OFF", "best OFF", "best ON"], rows)


def settings_sections(runs: Sequence[Run]) -> tuple[Section, Section]:
    """Settings that differ between runs, with a column for each run, and the others; of one run, those that differ from defaults."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    columns = {run.name: run.settings for run in runs}
    if len(runs) == 1:
        columns["default"] = flat(as_plain(Config()))
    values = {key: [shown(column.get(key, "–")) for column in columns.values()] for key in keys}
    differing = [[key, *row] for key, row in values.items() if len(set(row)) > 1]
    common = [[key, row[0]] for key, row in values.items() if len(set(row)) == 1]
    titles = (
        ("Settings that differ", "Settings in common") if len(runs) > 1 else ("Changed settings", "Default settings")
    )
    return (
        Section(titles[0], table=Table(["setting", *columns], differing)),
        Section(titles[1], table=Table(["setting", "value"], common)),
    )


# --- layer groups --------------------------------------------------------------------------------------------------

_GROUPS_TEXT = (
    "The plots show the largest value of all decoder layers of a kind. Update over weights: norm of a step's update over the "
    "norm of the weights. Overflow: share of entries that are not finite. Underflow: share of entries below the smallest "
    "normal number of the precision, after loss scaling."
)


def groups_of(run: Run) -> list[str]:
    """The monitored layer groups: embedding, encoder and head, then the layers by kind."""
    names = {name.split("/")[2] for name in run.metrics if name.startswith(PREFIX)}
    return sorted(names, key=lambda name: (kind_of(name) != name, name))


def kind_of(group: str) -> str:
    """`attention` for `attention_03`; other groups are their own kind."""
    return re.sub(r"_\d+$", "", group)


def groups_table(runs: Sequence[Run]) -> Table:
    """Last and largest values of every layer group."""
    rows = []
    for run in runs:
        for group in groups_of(run):
            curves = [run.curve(f"{PREFIX}{figure}/{group}")[1] for figure in _GROUP_FIGURES]
            norms, ratios, underflow, overflow = (
                [f"{v[-1]:.3g}", f"{v.max():.3g}"] if len(v) else ["–"] * 2 for v in curves
            )
            rows.append([run.name, group, *norms, *ratios, underflow[1], overflow[1]])
    header = ["gradient norm", "largest", "update ratio", "largest", "largest underflow", "largest overflow"]
    return Table(["run", "group", *header], rows)


def group_plots(runs: Sequence[Run]) -> list[str]:
    """A plot for each run and figure, with a line for the largest value of each kind of layer. Plots of zeros are left out."""
    plots = []
    for run in runs:
        kinds = list(dict.fromkeys(map(kind_of, groups_of(run))))
        for figure, (title, unit) in _GROUP_FIGURES.items():
            lines = {kind: PlotLine(*thinned(*largest_of(run, figure, kind))) for kind in kinds}
            if any(np.any(line.ys) for line in lines.values()):
                name = f"{title}, {run.name}" if len(runs) > 1 else title
                plots.append(line_plot(lines, "tokens", unit, f"{name}, by layer group", log_y=not unit))
    return plots


def largest_of(run: Run, figure: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the largest value of a figure over the layer groups of a kind: each [n] float64."""
    names = [f"{PREFIX}{figure}/{group}" for group in groups_of(run) if kind_of(group) == kind]
    found: dict[float, float] = {}
    for tokens, values in map(run.curve, names):
        for at, value in zip(tokens.tolist(), values.tolist(), strict=True):
            found[at] = max(value, found.get(at, value))
    return np.array(sorted(found)), np.array([found[at] for at in sorted(found)])


# --- plots ---------------------------------------------------------------------------------------------------------


def metric_plot(runs: Sequence[Run], metric: str, title: str, unit: str) -> str:
    """Plot a metric of every run against tokens, smoothed; with one or two runs, over the raw values."""
    lines = {}
    for number, run in enumerate(runs):
        tokens, values = run.curve(metric)
        if metric == "lr":
            lines[run.name] = PlotLine(*thinned(tokens, values), color=number)
        elif len(values):
            raw = spikes(tokens, values) if len(runs) < 3 else None
            lines[run.name] = PlotLine(*thinned(tokens, smoothed(values)), color=number, raw=raw)
    return line_plot(lines, "tokens", unit, title)


def held_out_plots(runs: Sequence[Run]) -> list[str]:
    """Plots of every set's figure, and of its change by retrieval."""
    plots = []
    for name in dict.fromkeys(name for run in runs for name in run.sets):
        lines, gains = {}, {}
        for number, run in enumerate(runs):
            for mode in ("on", "off"):
                curve = run.held_out(name, mode)
                if len(curve[0]):
                    label = f"{run.name} {mode.upper()}" if len(runs) > 1 else f"retrieval {mode.upper()}"
                    color = number if len(runs) > 1 else int(mode == "off")
                    lines[label] = PlotLine(*thinned(*curve), color=color, dashed=mode == "off")
            if len(gain_curve(run, name)[0]):
                gains[run.name] = PlotLine(*thinned(*gain_curve(run, name)), color=number)
        unit = next(_HELD_OUT_UNITS[run.figure(name)] for run in runs if name in run.sets)
        plots.append(line_plot(lines, "tokens", unit, f"Held out: {name}"))
        if gains:
            plots.append(line_plot(gains, "tokens", "percent", f"Held out: {name}, retrieval ON against OFF"))
    return plots


def smoothed(values: np.ndarray) -> np.ndarray:
    """Moving mean over a thirtieth of the curve [n], over fewer values near the ends."""
    window = np.ones(len(values) // 60 * 2 + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def thinned(tokens: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve at equal distances, with the first and the last."""
    kept = np.unique(np.linspace(0, max(0, len(values) - 1), _POINTS).round().astype(np.int64))[: len(values)]
    return tokens[kept], values[kept]


def spikes(tokens: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of every stretch of a curve, so that thinning keeps spikes."""
    stretches = np.array_split(np.arange(len(values)), min(len(values), _POINTS))
    kept = np.unique([part[pick(values[part])] for part in stretches for pick in (np.argmin, np.argmax)])
    return tokens[kept], values[kept]
