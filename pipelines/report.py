"""Reports that people look at: one HTML file, plots as inline SVG, nothing fetched from anywhere.

figures, tables, plots, examples (plain data) → templates/report.html → one file, written atomically
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.files import write_bytes

_TEMPLATES = Path(__file__).parent / "templates"
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
# Shorter runs of shared words are chance.
_MARKED_WORDS = 3


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; columns after the first are right-aligned."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class NeighborText:
    """One neighbor as text: its score, where it is from, the chunk and what follows it."""

    score: float
    document: str
    text: str
    continuation: str


@dataclass(frozen=True)
class NeighborExample:
    """A chunk, what follows it, and its neighbors."""

    chunk: str
    continuation: str
    neighbors: list[NeighborText]


@dataclass(frozen=True)
class Section:
    """A part of a report; what is empty is left out."""

    title: str
    text: str = ""
    table: Table | None = None
    plots: list[str] = field(default_factory=list)
    examples: list[NeighborExample] = field(default_factory=list)


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    figures: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Write a report.

    Args:
        path: the HTML file.
        title: its heading.
        subtitle: a line under it.
        sections: in order.
        figures: label, value and note of the few numbers that stand on top.
    """
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters["marked"] = marked
    html = environment.get_template("report.html").render(
        title=title, subtitle=subtitle, sections=sections, figures=figures
    )
    write_bytes(path, html.encode("utf-8", errors="replace"))


def marked(text: str, other: str) -> Any:
    """`text` as HTML in which the runs of words that stand in `other` too are marked."""
    from markupsafe import Markup, escape

    words, theirs = _words(text), _words(other)
    shared = np.zeros(len(words), dtype=bool)
    for match in SequenceMatcher(None, words, theirs, autojunk=False).get_matching_blocks():
        if sum(not word.isspace() for word in words[match.a : match.a + match.size]) >= _MARKED_WORDS:
            shared[match.a : match.a + match.size] = True
    out, start = Markup(""), 0
    for stop in range(1, len(words) + 1):
        if stop == len(words) or shared[stop] != shared[start]:
            part = escape("".join(words[start:stop]))
            out += Markup("<mark>{}</mark>").format(part) if shared[start] else part
            start = stop
    return out


def _words(text: str) -> list[str]:
    """Words, blanks, punctuation and single Chinese characters: together they are the text."""
    import re

    return re.findall(r"\s+|[a-zA-Z0-9_]+|.", text, flags=re.DOTALL)


# --- plots ---------------------------------------------------------------------------------------------------------


def line_plot(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines by name, each (xs, ys), as an SVG."""
    figure, axes = _figure(x_label, y_label, title)
    for number, (name, (xs, ys)) in enumerate(series.items()):
        axes.plot(
            xs, ys, label=name, color=_COLORS[number % len(_COLORS)], marker="o" if len(xs) < 30 else "", markersize=3
        )
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    return _svg(figure, axes, legend=bool(series))


def histogram(series: Mapping[str, Any], x_label: str, title: str, *, bins: int = 50) -> str:
    """Distributions by name over common bins, as an SVG."""
    figure, axes = _figure(x_label, "share", title)
    values = [np.asarray(value, dtype=np.float64) for value in series.values()]
    if values:
        edges = np.histogram_bin_edges(np.concatenate(values), bins=bins)
        for number, (name, value) in enumerate(zip(series, values, strict=True)):
            axes.hist(
                value,
                bins=edges.tolist(),
                weights=np.full(len(value), 1 / len(value)),
                histtype="stepfilled",
                alpha=0.35,
                label=name,
                color=_COLORS[number % len(_COLORS)],
            )
    return _svg(figure, axes, legend=bool(values))


def _figure(x_label: str, y_label: str, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,g}")
    return figure, axes


def _svg(figure: Any, axes: Any, *, legend: bool) -> str:
    import matplotlib

    if legend:
        axes.legend(frameon=False, fontsize=9)
    out = io.StringIO()
    # Text stays text and ids are fixed: small files, equal for equal data.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "retro", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    svg = out.getvalue()
    return svg[svg.index("<svg") :]
