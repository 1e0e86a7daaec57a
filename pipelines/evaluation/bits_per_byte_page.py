"""The page of `retro eval perplexity`: what its JSON file says, as plots and tables on one HTML page.

results (plain data) → bits-per-byte by k, by share of the datastore, by α; overlap → sections → write_report
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.reports.html import Line, Section, Table, line_plot, setting_rows, stairs, write_report

Rows = Sequence[Mapping[str, Any]]


def write_eval_page(path: Path, results: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        results: what `retro eval perplexity --json` writes.
    """
    sets = list(dict.fromkeys(row["set"] for row in results["results"]))
    sections = [
        Section("Held-out documents", table=_results(results["results"]), plots=_plots_by_k(results["results"], sets)),
        Section("Compared", text=_COMPARED, table=_changes(results["changes"])),
        Section(
            "By what stands in the datastore already",
            text=_LEAKAGE,
            table=_leakage(results["leakage"]),
            plots=_plots_by_leakage(results["leakage"], sets),
        ),
        Section(
            "Overlap with neighbors", table=_overlap(results["overlap"]), plots=_plots_of_overlap(results["overlap"])
        ),
        Section(
            "By size of the datastore",
            text=_SHARES,
            table=_shares(results["datastore_fractions"]),
            plots=_plots_by_share(results["datastore_fractions"], sets),
        ),
        Section("Fingerprints", table=Table(["of", "fingerprint"], setting_rows(results["fingerprints"]))),
        Section("Settings", table=Table(["setting", "value"], setting_rows(results["settings"]))),
    ]
    write_report(
        path,
        title="Evaluation",
        subtitle=", ".join(results["settings"]["checkpoints"]),
        figures=_figures(results),
        sections=[section for section in sections if section.plots or (section.table and section.table.rows)],
    )


_COMPARED = (
    "Bits per byte against another measurement of the same tokens; 95% of bootstraps over documents lie in the range."
)
_LEAKAGE = (
    "r of a chunk is its longest run of tokens that stands in one of its nearest neighbors, over its length. "
    "Bits per byte over the chunks with r of at most α: what is left at a small α is not copied."
)
_SHARES = (
    "Retrieval ON with neighbors from a share of the documents of the datastore, drawn by a hash; "
    "larger shares hold the smaller ones."
)


# --- figures and tables --------------------------------------------------------------------------------------------


def _figures(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The first set's figures that people look for first: OFF, the best ON, and how far it lies from OFF."""
    first = results["results"][0]
    ours = [row for row in results["results"] if (row["set"], row["model"]) == (first["set"], first["model"])]
    figures = [(f"{first['set']}, OFF", f"{first['bits_per_byte']:.4f}", "bits per byte")]
    if on := [row for row in ours if row["k"]]:
        best = min(on, key=lambda row: row["bits_per_byte"])
        figures.append((f"{first['set']}, {_label(best)}", f"{best['bits_per_byte']:.4f}", "bits per byte"))
    for change in results["changes"]:
        if change["set"] == first["set"] and on and change["measured"] == _label(best):
            note = f"95% of bootstraps: {change['low']:+.2f}% to {change['high']:+.2f}%"
            figures.append((f"{change['measured']} against {change['reference']}", f"{change['percent']:+.2f}%", note))
    return figures


def _label(row: Mapping[str, Any]) -> str:
    """`OFF`, `ON k=2`, `baseline OFF`: as `Measured.label`."""
    mode = f"ON k={row['k']}" if row["k"] else "OFF"
    return f"{row['model']} {mode}".strip()


def _results(rows: Rows) -> Table:
    cells = [
        [
            row["set"],
            _label(row),
            f"{row['bits_per_byte']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
        ]
        for row in rows
    ]
    return Table(["set", "retrieval", "bits/byte", "perplexity", "tokens", "bytes"], cells)


def _changes(rows: Rows) -> Table:
    cells = [
        [
            row["set"],
            row["measured"],
            row["reference"],
            f"{row['percent']:+.2f}%",
            f"{row['low']:+.2f}% to {row['high']:+.2f}%",
        ]
        for row in rows
    ]
    return Table(["set", "measured", "against", "bits/byte", "95% of bootstraps"], cells)


def _leakage(levels: Rows) -> Table:
    labels = list(dict.fromkeys(_label(row) for level in levels for row in level["results"]))
    cells = []
    for level in levels:
        found = {_label(row): f"{row['bits_per_byte']:.4f}" for row in level["results"]}
        first = [level["set"], f"{level['leakage_at_most']:g}", f"{100 * level['share_of_chunks']:.1f}%"]
        cells.append(first + [found.get(label, "–") for label in labels])
    return Table(["set", "α", "chunks", *labels], cells)


def _overlap(rows: Rows) -> Table:
    cells = [
        [
            row["set"],
            f"{row['chunks']:,}",
            str(row["neighbors"]),
            f"{row['mean']:.3f}",
            f"{row['median']:.3f}",
            f"{100 * row['without_neighbors']:.1f}%",
            f"{row['sources']:,} ({row['source_column']})",
            f"{100 * row['nearest_of_same_source']:.1f}%",
            f"{100 * row['any_of_same_source']:.1f}%",
        ]
        for row in rows
    ]
    header = ["set", "chunks", "neighbors", "mean r", "median r", "without neighbors"]
    return Table([*header, "sources", "nearest of the same", "any of the same"], cells)


def _shares(levels: Rows) -> Table:
    labels = list(dict.fromkeys(_label(row) for level in levels for row in level["results"]))
    cells = []
    for level in levels:
        found = {_label(row): f"{row['bits_per_byte']:.4f}" for row in level["results"]}
        size = [f"{level['datastore_documents']:,}", f"{level['datastore_chunks']:,}"]
        first = [level["set"], f"{level['datastore_share']:g}", *size]
        cells.append(first + [found.get(label, "–") for label in labels])
    return Table(["set", "share", "documents", "chunks", *labels], cells)


# --- plots ---------------------------------------------------------------------------------------------------------


def _plots_by_k(rows: Rows, sets: Sequence[str]) -> list[str]:
    """A curve of bits-per-byte by k for each set and model, OFF at 0; nothing where only one k was measured."""
    plots = []
    for name in sets:
        lines: dict[str, Line] = {}
        for color, model in enumerate(_models(rows)):
            ours = [row for row in rows if (row["set"], row["model"]) == (name, model)]
            if len(ours) > 2:
                points = sorted((row["k"], row["bits_per_byte"]) for row in ours)
                lines[model or "ON"] = _line(points, color)
        if lines:
            plots.append(line_plot(lines, "neighbors of each chunk, 0 = OFF", "bits per byte", f"{name}: by k"))
    return plots


def _plots_by_leakage(levels: Rows, sets: Sequence[str]) -> list[str]:
    """Bits-per-byte(α) of every measurement, retrieval OFF dashed."""
    return _plots_by(levels, sets, "leakage_at_most", "α: overlap with neighbors at most", "by α", log_x=False)


def _plots_by_share(levels: Rows, sets: Sequence[str]) -> list[str]:
    """Bits-per-byte by share of the datastore of every measurement; OFF, dashed, is the same for all."""
    return _plots_by(levels, sets, "datastore_share", "share of the datastore", "by size of the datastore", log_x=True)


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
                curves.setdefault(_label(row), []).append((level[key], row["bits_per_byte"]))
                number = models.index(row["model"]) * max(1, len(ks)) + (ks.index(row["k"]) if row["k"] else 0)
                colors[_label(row)] = (number, not row["k"])
        lines = {label: _line(sorted(points), *colors[label]) for label, points in curves.items()}
        if any(len(points) > 1 for points in curves.values()):
            plots.append(line_plot(lines, x_label, "bits per byte", f"{name}: {title}", log_x=log_x))
    return plots


def _plots_of_overlap(rows: Rows) -> list[str]:
    return [
        stairs({"chunks": row["share_of_chunks"]}, row["edges"], "overlap r with a neighbor", f"{row['set']}: overlap")
        for row in rows
    ]


def _line(points: Sequence[tuple[float, float]], color: int, dashed: bool = False) -> Line:
    return Line([x for x, _ in points], [y for _, y in points], color, dashed)


def _models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))
