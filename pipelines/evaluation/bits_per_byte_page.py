"""The HTML page of `retro eval perplexity`: the tables and plots of its JSON file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.evaluation.bits_per_byte_tables import Rows, interval_in_words, label_of, tables_of
from pipelines.reports.html import PlotLine, Section, line_plot, settings_table, stairs, write_report


def write_eval_page(path: Path, results: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        results: the content of the JSON file.
    """
    sets = list(dict.fromkeys(row["set"] for row in results["results"]))
    plots = {
        "Held-out documents": _plots_by_k(results["results"], sets),
        "By leakage": _plots_by_leakage(results["leakage"], sets),
        "Overlap with neighbors": _plots_of_overlap(results["overlap"]),
        "By size of the datastore": _plots_by_fraction(results["datastore_fractions"], sets),
    }
    sections = [
        Section(title, text=_TEXTS.get(title, ""), table=table, plots=plots.get(title, []))
        for title, table in tables_of(results).items()
        if table.rows
    ]
    sections.append(Section("Fingerprints", table=settings_table(results["fingerprints"], "fingerprint of")))
    sections.append(Section("Settings", table=settings_table(results["settings"])))
    write_report(
        path,
        title="Evaluation",
        subtitle=", ".join(results["settings"]["checkpoints"]),
        figures=_figures(results),
        sections=sections,
    )


_TEXTS = {
    "Changes": "Bits per byte compared with another measurement of the same tokens.",
    "By leakage": (
        "Leakage r of a chunk: the longest run of its tokens that also occurs in one of its nearest neighbors, divided by its "
        "length. The table scores only chunks that share at most t tokens: r of at most α = t/m. Gains at a small t are not copies."
    ),
    "By size of the datastore": (
        "Retrieval ON with neighbors from a fraction of the datastore's documents, drawn by a hash. Larger fractions contain the "
        "smaller ones."
    ),
}


# --- figures ---------------------------------------------------------------------------------------------------------


def _figures(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Figures of the first set: OFF, the best ON, and its change from OFF."""
    first = results["results"][0]
    ours = [row for row in results["results"] if (row["set"], row["model"]) == (first["set"], first["model"])]
    figures = [(f"{first['set']}, OFF", f"{first['bits_per_byte']:.4f}", "bits per byte")]
    if on := [row for row in ours if row["k"]]:
        best = min(on, key=lambda row: row["bits_per_byte"])
        figures.append((f"{first['set']}, {label_of(best)}", f"{best['bits_per_byte']:.4f}", "bits per byte"))
    for change in results["changes"]:
        if change["set"] == first["set"] and on and change["measured"] == label_of(best):
            note = f"95% of bootstraps: {interval_in_words(change['low'], change['high'])}"
            figures.append((f"{change['measured']} against {change['reference']}", f"{change['percent']:+.2f}%", note))
    return figures


# --- plots ---------------------------------------------------------------------------------------------------------


def _plots_by_k(rows: Rows, sets: Sequence[str]) -> list[str]:
    """A curve of bits per byte by k for each set and model, with OFF at 0; none if only one k was measured."""
    plots = []
    for name in sets:
        lines: dict[str, PlotLine] = {}
        for color, model in enumerate(_models(rows)):
            ours = [row for row in rows if (row["set"], row["model"]) == (name, model)]
            if len(ours) > 2:
                points = sorted((row["k"], row["bits_per_byte"]) for row in ours)
                lines[model or "ON"] = _line(points, color)
        if lines:
            plots.append(line_plot(lines, "neighbors of each chunk, 0 = OFF", "bits per byte", f"{name}: by k"))
    return plots


def _plots_by_leakage(levels: Rows, sets: Sequence[str]) -> list[str]:
    """Bits per byte by shared tokens for every measurement; OFF is dashed, and orange if there is one model."""
    return _plots_by(
        levels, sets, "shared_tokens_at_most", "shared tokens at most", "by tokens shared with a neighbor", log_x=False
    )


def _plots_by_fraction(levels: Rows, sets: Sequence[str]) -> list[str]:
    """Bits per byte by fraction of the datastore for every measurement. OFF is dashed, and the same for all."""
    return _plots_by(
        levels, sets, "datastore_fraction", "fraction of the datastore", "by size of the datastore", log_x=True
    )


def _plots_by(levels: Rows, sets: Sequence[str], key: str, x_label: str, title: str, *, log_x: bool) -> list[str]:
    plots = []
    for name in sets:
        curves: dict[str, list[tuple[float, float]]] = {}
        colors: dict[str, tuple[int, bool]] = {}
        ours = [level for level in levels if level["set"] == name]
        models = _models([row for level in ours for row in level["results"]])
        ks = sorted({row["k"] for level in ours for row in level["results"]} - {0})
        for level in ours:
            for row in level["results"]:
                curves.setdefault(label_of(row), []).append((level[key], row["bits_per_byte"]))
                number = models.index(row["model"]) * max(1, len(ks)) + (ks.index(row["k"]) if row["k"] else 0)
                if len(models) == 1:  # blue is ON, orange is OFF
                    number = number + (number > 0) if row["k"] else 1
                colors[label_of(row)] = (number, not row["k"])
        lines = {label: _line(sorted(points), *colors[label]) for label, points in curves.items()}
        if any(len(points) > 1 for points in curves.values()):
            plots.append(line_plot(lines, x_label, "bits per byte", f"{name}: {title}", log_x=log_x))
    return plots


def _plots_of_overlap(rows: Rows) -> list[str]:
    return [
        stairs({"chunks": row["share_of_chunks"]}, row["edges"], "overlap r with a neighbor", f"{row['set']}: overlap")
        for row in rows
    ]


def _line(points: Sequence[tuple[float, float]], color: int, dashed: bool = False) -> PlotLine:
    return PlotLine([x for x, _ in points], [y for _, y in points], color, dashed)


def _models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))
