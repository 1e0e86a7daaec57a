"""Reports: one HTML file with plots as inline SVG, which loads nothing from other places.

figures, tables, plots, examples (plain data) → templates/report.html → one file, written atomically
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indexing.store.files import write_bytes
from pipelines.cli.results import Table

_TEMPLATES = Path(__file__).parent / "templates"
# Placeholders for colors of the page's theme, as in `retro/server/page/page.css`. A file with plots has the second value.
_THEMED = {
    "#010203": ("--ink", "#1f2937"),
    "#010204": ("--soft", "#566275"),
    "#010205": ("--line", "#e3e6eb"),
    "#010206": ("--helped-ink", "#1d4ed8"),
    "#010207": ("--hurt-ink", "#b03a05"),
}
_INK, _SOFT, _LINE, _BLUE, _ORANGE = _THEMED
# Blue: better, with retrieval. Orange: worse, without. The others are of medium lightness, for light and dark pages.
_COLORS = (_BLUE, _ORANGE, "#10b981", "#a855f7", "#ec4899", "#06b6d4")
# Shorter runs of shared words are likely to be chance. A Chinese character counts less than a word.
_MARKED_WORDS = 3
_CHARACTER = 0.75
SHADE_BITS = (0.5, 2.0)
"""Gains from which a token has a pale and a strong color."""
_AROUND = 160  # characters around the copied parts of a source
_SHADES = {2: "up2", 1: "up1", -1: "down1", -2: "down2"}  # classes of the page
# Characters that fit above a plot, with six for the sample of each line.
_LEGEND_CHARACTERS = 72


@dataclass(frozen=True)
class NeighborText:
    """A neighbor as text: score, document, chunk and continuation."""

    score: float
    document: str
    text: str
    continuation: str


@dataclass(frozen=True)
class NeighborExample:
    """A chunk of a document, its continuation, and its neighbors."""

    document: str
    chunk: str
    continuation: str
    neighbors: list[NeighborText]


@dataclass(frozen=True)
class Piece:
    """A few characters of a text.

    Attributes:
        text: the characters.
        gain: bits that retrieval saves for them; negative = it costs bits.
        source: number of the source that the run of pieces ending here was copied from; 0 = none.
    """

    text: str
    gain: float = 0.0
    source: int = 0

    @property
    def shade(self) -> int:
        """Color: 2 and 1 = retrieval helps (blue), -1 and -2 = it hurts (orange), 0 = about the same, or only blanks."""
        if self.text.isspace():
            return 0
        return int(np.sign(self.gain)) * sum(abs(self.gain) >= bits for bits in SHADE_BITS)


@dataclass(frozen=True)
class CopiedFrom:
    """A source as text, cut into parts that were copied (True) and others.

    Attributes:
        number: of the source.
        document: its document.
        parts: the text.
        is_neighbor: False = the source was found in the whole datastore.
    """

    number: int
    document: str
    parts: list[tuple[str, bool]]
    is_neighbor: bool = True

    @property
    def shortened(self) -> list[tuple[str, bool]]:
        """The parts, of the others only the characters next to copied ones."""
        out, last = list[tuple[str, bool]](), len(self.parts) - 1
        for number, (text, copied) in enumerate(self.parts):
            before = "" if number == 0 else text[:_AROUND]
            after = "" if number == last else text[-_AROUND:]
            is_short = copied or len(text) <= len(before) + len(after) + len("…")
            out.append((text, copied) if is_short else (f"{before}…{after}", False))
        return out


@dataclass(frozen=True)
class ColoredPassage:
    """A passage colored by the gain of its tokens, and the sources that it could copy from.

    Attributes:
        title: which passage it is.
        before: the end of the text before it.
        pieces: its text.
        sources: the neighbors, and documents of the datastore that it was copied from.
    """

    title: str
    before: str
    pieces: list[Piece]
    sources: list[CopiedFrom]

    @property
    def used(self) -> list[CopiedFrom]:
        """The sources that a piece names."""
        numbers = {piece.source for piece in self.pieces}
        return [source for source in self.sources if source.number in numbers]

    @property
    def unused(self) -> list[CopiedFrom]:
        """The other sources: neighbors without a copied run."""
        return [source for source in self.sources if source not in self.used]


@dataclass(frozen=True)
class Section:
    """A part of a report; empty parts are not shown."""

    title: str
    text: str = ""
    table: Table | None = None
    plots: list[str] = field(default_factory=list)
    examples: list[NeighborExample] = field(default_factory=list)
    passages: list[ColoredPassage] = field(default_factory=list)


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
        figures: label, value and note of the numbers at the top.
    """
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters |= {"marked": marked, "mark": mark}
    html = environment.get_template("report.html").render(
        title=title, subtitle=subtitle, sections=sections, figures=figures, shades=_SHADES
    )
    write_bytes(path, html.encode("utf-8", errors="replace"))


def marked(text: str, other: str) -> Any:
    """`text` as HTML, with marks on runs of words that `other` contains too."""
    from markupsafe import Markup, escape

    words, theirs = _words(text), _words(other)
    shared = np.zeros(len(words), dtype=bool)
    for match in SequenceMatcher(None, words, theirs, autojunk=False).get_matching_blocks():
        run = range(match.a, match.a + match.size)
        if sum(_weight(words[index]) for index in run) >= _MARKED_WORDS:
            inner = [index for index in run if not words[index].isspace()]
            shared[inner[0] : inner[-1] + 1] = True
    out, start = Markup(""), 0
    for stop in range(1, len(words) + 1):
        if stop == len(words) or shared[stop] != shared[start]:
            part = "".join(words[start:stop])
            out += mark(part) if shared[start] else escape(part)
            start = stop
    return out


def mark(text: str) -> Any:
    """`text` as HTML with marks on its words and single spaces between them: marked indentation would be a large block."""
    from markupsafe import Markup, escape

    parts = re.split(r"(\S+(?: \S+)*)", text)  # what the group matches has odd places
    return Markup("").join(
        Markup("<mark>{}</mark>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts)
    )


def _words(text: str) -> list[str]:
    """Split into words, blanks, punctuation, and single characters of scripts without blanks."""
    return re.findall(r"\s+|[^\W\u3040-\u30ff\u3400-\u9fff]+|.", text, flags=re.DOTALL)


def _weight(word: str) -> float:
    """Weight of a word; 0 for blanks and punctuation."""
    if not word[0].isalnum():
        return 0.0
    return _CHARACTER if word >= "\u3040" else 1.0


# --- plots ---------------------------------------------------------------------------------------------------------


Numbers = Sequence[float] | np.ndarray


class Bar(NamedTuple):
    """A bar of a chart.

    Attributes:
        name, value: its label and length.
        interval: 95% interval of the value; None = there is none.
        is_blue: blue = with retrieval, otherwise orange.
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    is_blue: bool

    @property
    def end(self) -> float:
        """The larger of the value and the end of its interval."""
        return self.interval[1] if self.interval else self.value

    @property
    def figure(self) -> str:
        """The value and its interval as text."""
        low, high = self.interval or (0, 0)
        return f"{self.value:.2f}" + (f" ({low:.2f} to {high:.2f})" if self.interval else "")


def bar_chart(bars: Sequence[Bar], title: str) -> str:
    """Draw horizontal bars with their intervals as an SVG, which is as wide as its place and brings its own light and dark colors.

    A shorter bar is better.
    """
    from html import escape

    scale = _BAR_WIDTH / max(bar.end for bar in bars)
    parts = []
    for row, bar in enumerate(bars):
        y = 76 + 56 * row
        parts.append(
            f'<text x="2%" y="{y}">{escape(bar.name)}</text><text x="98%" y="{y}" text-anchor="end">{bar.figure}</text>'
            f'<rect class="{"with" if bar.is_blue else "without"}" x="2%" y="{y + 8}" width="{scale * bar.value:.2f}%" height="18" rx="3"/>'
        )
        if bar.interval:
            low, high = (f"{2 + scale * end:.2f}%" for end in bar.interval)
            ends = [(low, high, y + 17, y + 17), (low, low, y + 11, y + 23), (high, high, y + 11, y + 23)]
            lines = "".join(f'<line x1="{a}" x2="{b}" y1="{c}" y2="{d}"/>' for a, b, c, d in ends)
            parts.append(f'<g class="interval">{lines}</g>')
    note = "line: 95% interval" if any(bar.interval for bar in bars) else "one document: no interval"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bars" role="img" aria-label="{escape(title)}" width="100%" '
        f'height="{64 + 56 * len(bars)}" font-family="system-ui, sans-serif" font-size="15">'
        f'<style>{_BAR_STYLE}</style><rect class="card" width="100%" height="100%" rx="8"/>'
        f'<text x="2%" y="24" font-weight="650">{escape(title)}</text><text class="note" x="2%" y="45">shorter is better; {note}</text>'
        f"{''.join(parts)}</svg>"
    )


_BAR_WIDTH = 96  # percent of the picture
_BAR_STYLE = (
    ".bars{--ink:#1f2937;--soft:#566275;--card:#ffffff;--helped:#4f9cf9;--hurt:#f98b32}"
    "@media(prefers-color-scheme:dark){"
    ".bars{--ink:#e5e7eb;--soft:#9aa7ba;--card:#182235;--helped:#1d55d0;--hurt:#a3460f}}"
    ".bars text{fill:var(--ink)}.bars .note{fill:var(--soft)}.bars .card{fill:var(--card)}"
    ".bars .with{fill:var(--helped)}.bars .without{fill:var(--hurt)}.bars line{stroke:var(--ink);stroke-width:2}"
)


class PlotLine(NamedTuple):
    """A line of a plot; a pair (xs, ys) is accepted too.

    Attributes:
        xs, ys: its points.
        color: number of its color; None = the next one.
        dashed: whether the line is dashed.
    """

    xs: Numbers
    ys: Numbers
    color: int | None = None
    dashed: bool = False


class Plot(NamedTuple):
    """A plot of lines by name."""

    lines: Mapping[str, PlotLine | tuple[Numbers, Numbers]]
    x_label: str
    y_label: str
    title: str
    log_x: bool = False


def line_plot(
    lines: Mapping[str, PlotLine | tuple[Numbers, Numbers]],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
) -> str:
    """Plot lines by name as an SVG of a page."""
    with _style(title):
        figure = _figure(1)
        _draw(figure, Plot(lines, x_label, y_label, title, log_x))
        return _svg(figure, title, on_page=True)


def plots_file(plots: Sequence[Plot], title: str) -> str:
    """Draw plots side by side as an SVG with a white background, for a file."""
    with _style(title):
        figure = _figure(len(plots))
        for part, plot in zip(figure.subfigures(1, len(plots), squeeze=False)[0], plots, strict=True):
            _draw(part, plot)
        return _svg(figure, title, on_page=False)


def histogram(series: Mapping[str, np.ndarray], x_label: str, title: str) -> str:
    """Plot distributions by name over 50 common bins as an SVG of a page."""
    edges = np.histogram_bin_edges(np.concatenate([*series.values(), np.empty(0)]), bins=50)
    with _style(title):
        figure = _figure(1)
        axes = _axes(figure, x_label, "share", title)
        for color, (name, values) in zip(cycle(_COLORS), series.items(), strict=False):
            shares = np.histogram(values, edges)[0] / max(1, len(values))
            axes.stairs(shares, edges, fill=True, color=color, alpha=0.25)
            axes.stairs(shares, edges, color=color, linewidth=1.4, label=name)
        return _svg(figure, title, on_page=True)


def _style(title: str) -> Any:
    """Style of all plots. Text stays text and ids are fixed, so files are small, and equal for equal data."""
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.size": 9.5,
        "text.color": _INK,
        "axes.labelcolor": _SOFT,
        "axes.edgecolor": _SOFT,
        "xtick.color": _SOFT,
        "ytick.color": _SOFT,
        "grid.color": _LINE,
    }
    return matplotlib.rc_context(settings)


def _figure(num_plots: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(5.4 * num_plots, 3.3), layout="constrained")


def _axes(figure: Any, x_label: str, y_label: str, title: str) -> Any:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label, labelpad=7)  # the fonts of readers may be wider
    axes.grid(linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(which="both", length=0)
    return axes


def _draw(figure: Any, plot: Plot) -> None:
    axes = _axes(figure, plot.x_label, plot.y_label, plot.title)
    for next_color, (name, points) in enumerate(plot.lines.items()):
        line = PlotLine(*points)
        axes.plot(
            line.xs,
            line.ys,
            label=name,
            color=_COLORS[(next_color if line.color is None else line.color) % len(_COLORS)],
            linestyle="--" if line.dashed else "-",
            marker="o" if len(line.xs) < 30 else "",
            linewidth=1.6,
            markersize=3.5,
        )
    if plot.log_x:
        axes.set_xscale("log", base=2)


def _svg(figure: Any, title: str, *, on_page: bool) -> str:
    from html import escape

    from matplotlib.ticker import NullFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: _tick(value))
            axis.set_minor_formatter(NullFormatter())
        if labels := axes.get_legend_handles_labels()[1]:
            # Above the axes, so that it never covers data.
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=max(1, min(3, _LEGEND_CHARACTERS // (max(map(len, labels)) + 6))),
                frameon=False,
                borderaxespad=0,
                borderpad=0.3,
                handlelength=1.2,
            )
    out, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=nothing, transparent=on_page)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    # Use the page's font. Older releases of matplotlib write it after the size.
    svg = re.sub(r"(font-family:|font: [\w. ]*px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    # An id must be unique on a page with several plots. No element refers to these.
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    for placeholder, (name, color) in _THEMED.items():
        svg = svg.replace(placeholder, f"var({name}, {color})" if on_page else color)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _tick(value: float) -> str:
    """The label of a tick: `200k`, `1.5M`, `0.25`."""
    for size, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 10_000):
            return f"{value / size:.4g}{prefix}"
    return f"{value:.4g}"
