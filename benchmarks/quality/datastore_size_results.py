"""Results of `datastore_size`: plain values, tables and a picture from the scores of windows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import markdown, say, write
from indexing.store.files import write_bytes
from pipelines.cli.reports.pictures import Picture, Plot, PlotLine, line_plots
from pipelines.cli.results import Table
from retro.evaluation.datastore_size import (
    BANDS,
    LONG_MATCH,
    Interval,
    Line,
    Part,
    SizeCurve,
    Window,
    WindowScores,
    by_match,
    likeliest_right,
    without_long_matches,
)

ALL, SHORT = "all windows", f"longest match below {LONG_MATCH} tokens"


def report(
    about: dict[str, Any],
    parts: Sequence[Part],
    windows: Sequence[Window],
    scores: Sequence[WindowScores],
    folder: Path,
) -> None:
    """Write results and pictures to a folder, and print the tables. `about` has what else is written, and `chosen`, the
    number of all windows."""
    curves = curves_of(parts, scores)
    results, drawn = about | results_of(parts, windows, scores, curves), picture(curves)
    write(folder / "results.json", results)
    write_bytes(folder / "gain.svg", drawn.light.encode())
    write_bytes(folder / "gain-dark.svg", drawn.dark.encode())
    say(f"\n{results['windows']} of {results['chosen']} windows, {results['tokens']:,} tokens\n")
    say(markdown(size_table(results)) + "\n\n" + markdown(match_table(results)) + "\n")
    for line in line_words(results):
        say(line)
    say(f"picture: {folder / 'gain.svg'}")


def curves_of(parts: Sequence[Part], scores: Sequence[WindowScores]) -> dict[str, SizeCurve]:
    """The curve of all windows, and of those without long matches if these are only some."""
    tokens, short = [part.tokens for part in parts], without_long_matches(scores)
    kinds = {ALL: scores} | ({SHORT: short} if 0 < len(short) < len(scores) else {})
    return {name: SizeCurve.of(tokens, some) for name, some in kinds.items()}


def results_of(
    parts: Sequence[Part], windows: Sequence[Window], scores: Sequence[WindowScores], curves: dict[str, SizeCurve]
) -> dict[str, Any]:
    """All figures of some windows, as plain values."""
    whole, right, num_bytes = curves[ALL], likeliest_right(scores), sum(window.bytes for window in windows)
    bits = np.append(whole.off.sum(), whole.on.sum(1)) / np.log(2) / num_bytes
    return {
        "windows": len(windows),
        "tokens": sum(one.nats.shape[1] for one in scores),
        "bytes": num_bytes,
        "off": {"bits_per_byte": float(bits[0]), "likeliest_right": float(right[0])},
        "sizes": [
            {
                "fraction": part.fraction,
                "documents": part.documents,
                "tokens": part.tokens,
                "bits_per_byte": float(bits[number + 1]),
                "likeliest_right": float(right[number + 1]),
                "changes": {name: curve.changes[number] for name, curve in curves.items()},
                "by_match": [band._asdict() for band in by_match(scores, number)],
            }
            for number, part in enumerate(parts)
        ],
        "lines": {
            name: {"windows": len(curve.off), "per_decade": curve.line.per_decade, "distance": curve.line.distance}
            for name, curve in curves.items()
            if curve.line
        },
        "per_window": [
            {
                "name": window.name,
                "bits_off": float(one.nats[0].sum() / np.log(2)),
                "changes": (100 * (one.nats[1:].sum(1) / one.nats[0].sum() - 1)).tolist(),
                "longest_match": int(one.matches[-1].max()),
            }
            for window, one in zip(windows, scores, strict=True)
        ],
    }


def words(change: Interval) -> str:
    """A change in percent, or in points, with its interval."""
    return "{:+.2f} ({:+.2f} to {:+.2f})".format(*change)


def size_table(found: dict[str, Any]) -> Table:
    """A row for OFF and for each size."""
    names = list(found["sizes"][0]["changes"])
    off = found["off"]
    rows = [["OFF", "", f"{off['bits_per_byte']:.4f}", *("" for _ in names), f"{off['likeliest_right']:.1%}"]]
    for size in found["sizes"]:
        changes = [words(size["changes"][name]) for name in names]
        figures = [f"{size['documents']:,}", f"{size['bits_per_byte']:.4f}", *changes]
        rows.append([f"{size['tokens']:,}", *figures, f"{size['likeliest_right']:.1%}"])
    columns = [f"change in %, {name}" for name in names]
    return Table(["tokens", "documents", "bits per byte", *columns, "likeliest token right"], rows)


def match_table(found: dict[str, Any]) -> Table:
    """A row for each band of the longest match: share of the tokens and change with each size."""
    rows = []
    for number, first in enumerate(BANDS):
        cells = [size["by_match"][number] for size in found["sizes"]]
        changes = ["" if one["change"] is None else f", {one['change']:+.1f}%" for one in cells]
        rows.append(
            [f"from {first}", *(f"{one['share']:.1%}{change}" for one, change in zip(cells, changes, strict=True))]
        )
    return Table(["longest match", *(f"{size['tokens']:,} tokens" for size in found["sizes"])], rows)


def line_words(found: dict[str, Any]) -> list[str]:
    """The slope of each line in words. Two sizes are always on their line."""
    is_fitted = len(found["sizes"]) > 2
    return [
        f"{name}, {line['windows']}: {words(line['per_decade'])} points with ten times the tokens"
        + (f", largest distance from the line {line['distance']:.2f}" if is_fitted else "")
        for name, line in found["lines"].items()
    ]


def picture(curves: dict[str, SizeCurve]) -> Picture:
    """Changes with their intervals over the tokens, and the fitted lines."""
    lines = dict[str, PlotLine]()
    for color, (name, curve) in enumerate(curves.items()):
        values, low, high = zip(*curve.changes, strict=True)
        slope = f": {curve.line.per_decade[0]:+.1f} points a decade" if curve.line else ""
        shifted = 1.05**color * curve.tokens  # so that the intervals of two curves are side by side
        lines[name + slope] = PlotLine(shifted, values, color, intervals=(low, high))
        if curve.line:
            lines[f"_{name}"] = fitted(curve.line, curve.tokens, color)  # not in the legend
    title = "Bits of held-out text, ON against OFF"
    return line_plots(Plot(lines, "tokens of the datastore", "change in %", title, log_x=True, log_base=10), large=True)


def fitted(line: Line, tokens: np.ndarray, color: int) -> PlotLine:
    """A fitted line from the smallest to the largest size."""
    xs = np.geomspace(tokens[0], tokens[-1], 50)
    return PlotLine(xs, [line.at(x)[0] for x in xs], color, dashed=True)
