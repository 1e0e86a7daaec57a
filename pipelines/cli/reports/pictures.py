"""Pictures as SVG by matplotlib, each for light and for dark pages.

lines, distributions or bars ─► drawn once for each theme ─► `Picture`: a part of a page, or a file
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np

Theme = Mapping[str, str]
_COLORS = {  # light, dark
    "ink": ("#1f2937", "#e5e7eb"),
    "soft": ("#566275", "#9aa7ba"),
    "paper": ("#f6f7f9", "#0f172a"),
    "card": ("#ffffff", "#182235"),
    "line": ("#e3e6eb", "#2c384d"),
    "mark": ("#bfdbfe", "#274a86"),
    "accent": ("#2563eb", "#7db0ff"),
    "helped": ("#4f9cf9", "#1d55d0"),
    "hurt": ("#f98b32", "#a3460f"),
    "helped-ink": ("#1d4ed8", "#7db0ff"),
    "hurt-ink": ("#b03a05", "#ffa35c"),
}
THEMES: dict[str, Theme] = {
    theme: {name: pair[number] for name, pair in _COLORS.items()} for number, theme in enumerate(("light", "dark"))
}
"""Colors of pages and pictures, as in `retro/server/page/page.css`. Blue: better, with retrieval. Orange: worse,
without."""
_MORE_COLORS = ("#10b981", "#a855f7", "#ec4899", "#06b6d4")  # of medium lightness, for both themes
_SIZE = (5.4, 3.3)  # inches
# Characters that fit above a plot, with six for the sample of each line.
_LEGEND_CHARACTERS = 72

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Picture:
    """A picture as SVG.

    Attributes:
        title: for readers who cannot see it.
        light, dark: the picture in both themes.
    """

    title: str
    light: str = field(repr=False)
    dark: str = field(repr=False)

    def uri(self, theme: str) -> str:
        """The picture in a theme as a data URI, for `<img src>`. So ids in it belong to it, and a page loads
        nothing."""
        return f"data:image/svg+xml;base64,{base64.b64encode(getattr(self, theme).encode()).decode()}"

    @property
    def html(self) -> str:
        """The picture in the theme of the reader."""
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{self.uri("dark")}">'
        return f'<picture>{dark}<img src="{self.uri("light")}" alt="{escape(self.title)}"></picture>'

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return self.html


class PlotLine(NamedTuple):
    """A line of a plot.

    Attributes:
        xs, ys: its points.
        color: number of its color; None = the next one.
        dashed: whether the line is dashed.
        intervals: the lower and the upper end at each point, which then are drawn without a line; None = a line.
    """

    xs: Numbers
    ys: Numbers
    color: int | None = None
    dashed: bool = False
    intervals: tuple[Numbers, Numbers] | None = None


class Plot(NamedTuple):
    """A plot of lines by name. With `log_x`, x is in powers of `log_base`."""

    lines: Mapping[str, PlotLine]
    x_label: str
    y_label: str
    title: str
    log_x: bool = False
    log_base: int = 2


def line_plots(*plots: Plot, large: bool = False) -> Picture:
    """Plots side by side; `large`: as wide as a page, with its text in a readable size there."""

    def draw(figure: Any, _: Theme) -> None:
        for part, plot in zip(figure.subfigures(1, len(plots), squeeze=False)[0], plots, strict=True):
            axes = _axes(part, plot.x_label, plot.y_label, plot.title)
            for number, (name, line) in enumerate(plot.lines.items()):
                style: dict[str, Any] = {
                    "linestyle": "--" if line.dashed else "-",
                    "marker": "o" if len(line.xs) < 30 else "",
                }
                color = f"C{number if line.color is None else line.color}"
                style |= {"label": name, "color": color, "linewidth": 1.6, "markersize": 3.5}
                if line.intervals:
                    ends = np.abs(np.asarray(line.intervals) - np.asarray(line.ys))
                    axes.errorbar(line.xs, line.ys, yerr=ends, capsize=3, **style | {"linestyle": ""})
                else:
                    axes.plot(line.xs, line.ys, **style)
            if plot.log_x:
                axes.set_xscale("log", base=plot.log_base)
            _finish(axes)

    (width, height), font_size = ((10.0, 5.0), 16.5) if large else (_SIZE, 9.5)
    return _picture(", ".join(plot.title for plot in plots), draw, (width * len(plots), height), font_size)


def histogram(series: Mapping[str, np.ndarray], x_label: str, title: str) -> Picture:
    """Distributions by name over 50 common bins."""
    edges = np.histogram_bin_edges(np.concatenate([*series.values(), np.empty(0)]), bins=50)

    def draw(figure: Any, _: Theme) -> None:
        axes = _axes(figure, x_label, "share", title)
        for number, (name, values) in enumerate(series.items()):
            shares = np.histogram(values, edges)[0] / max(1, len(values))
            axes.stairs(shares, edges, fill=True, color=f"C{number}", alpha=0.25)
            axes.stairs(shares, edges, color=f"C{number}", linewidth=1.4, label=name)
        _finish(axes)

    return _picture(title, draw, _SIZE)


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


def bar_chart(bars: Sequence[Bar], title: str) -> Picture:
    """Horizontal bars with their intervals. A shorter bar is better."""
    note = "line: 95% interval" if any(bar.interval for bar in bars) else "one document: no interval"

    def draw(figure: Any, theme: Theme) -> None:
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        figure.suptitle(title, x=0.015, ha="left", fontsize="large", fontweight="bold")
        axes, rows = figure.add_subplot(), range(len(bars))
        axes.set_title(f"shorter is better; {note}", loc="left", fontsize="medium", color=theme["soft"])
        colors = [theme["helped" if bar.is_blue else "hurt"] for bar in bars]
        axes.barh(rows, [bar.value for bar in bars], height=0.55, color=colors)
        for row, bar in enumerate(bars):
            if bar.interval:
                ends = np.abs(np.array([bar.interval]).T - bar.value)
                axes.errorbar(bar.value, row, xerr=ends, color=theme["ink"], linewidth=2, capsize=5, capthick=2)
            axes.annotate(bar.figure, (bar.end, row), (10, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, [bar.name for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, max(bar.end for bar in bars) * 1.4)  # room for the figures
        axes.tick_params(length=0, labelcolor=theme["ink"], labelbottom=False)
        axes.spines[:].set_visible(False)

    return _picture(title, draw, (10, 1.4 + 0.6 * len(bars)), font_size=15)


def _picture(
    title: str, draw: Callable[[Any, Theme], None], size: tuple[float, float], font_size: float = 9.5
) -> Picture:
    return Picture(title, **{name: _svg(title, draw, size, font_size, theme) for name, theme in THEMES.items()})


def _svg(
    title: str, draw: Callable[[Any, Theme], None], size: tuple[float, float], font_size: float, theme: Theme
) -> str:
    """Draw a figure. Text stays text and ids are fixed, so pictures are small, and equal for equal data."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.size": font_size,
        "text.color": theme["ink"],
        "figure.facecolor": theme["card"],
        "axes.facecolor": theme["card"],
        "axes.prop_cycle": cycler(color=[theme["helped-ink"], theme["hurt-ink"], *_MORE_COLORS]),
        "grid.color": theme["line"],
        **dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme["soft"]),
    }
    with matplotlib.rc_context(style):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure, theme)
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()


def _axes(figure: Any, x_label: str, y_label: str, title: str) -> Any:
    figure.suptitle(title, x=0.01, ha="left", fontsize="large", fontweight="bold")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label, labelpad=7)  # the fonts of readers may be wider
    axes.grid(linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(which="both", length=0)
    return axes


def _finish(axes: Any) -> None:
    """Short ticks, and a legend above the axes, where it never covers data."""
    from matplotlib.ticker import NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _tick(value))
        axis.set_minor_formatter(NullFormatter())
    if labels := axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=max(1, min(3, _LEGEND_CHARACTERS // (max(map(len, labels)) + 6))),
            frameon=False,
            borderaxespad=0,
            borderpad=0.3,
            handlelength=1.2,
        )


def _tick(value: float) -> str:
    """The label of a tick: `200k`, `1.5M`, `0.25`."""
    for size, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 10_000):
            return f"{value / size:.4g}{prefix}"
    return f"{value:.4g}"
