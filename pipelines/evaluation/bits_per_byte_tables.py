"""The tables of `retro eval perplexity`, for the terminal and for the page, from the rows of its JSON file."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.results import Table

Rows = Sequence[Mapping[str, Any]]


def tables_of(results: Mapping[str, Any]) -> dict[str, Table]:
    """All tables by their headings.

    Args:
        results: the content of the JSON file.
    """
    return {
        "Held-out documents": _results(results["results"]),
        "Changes": _changes(results["changes"]),
        "By leakage": _leakage(results["leakage"]),
        "Overlap with neighbors": _overlap(results["overlap"]),
        "By size of the datastore": _fractions(results["datastore_fractions"]),
    }


def label_of(row: Mapping[str, Any]) -> str:
    """`OFF`, `ON k=2`, `baseline OFF`."""
    mode = f"ON k={row['k']}" if row["k"] else "OFF"
    return f"{row['model']} {mode}".strip()


def _results(rows: Rows) -> Table:
    cells = [
        [
            row["set"],
            label_of(row),
            f"{row['bits_per_byte']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]
    return Table(["set", "retrieval", "bits/byte", "perplexity", "tokens", "bytes", "tokens/s"], cells)


def _changes(rows: Rows) -> Table:
    cells = [[row["set"], row["measured"], row["reference"], _percent(row), _interval(row)] for row in rows]
    return Table(["set", "measured", "against", "bits/byte", "95% of bootstraps over documents"], cells)


def _leakage(levels: Rows) -> Table:
    """A row for each set and number of shared tokens. The changes are those of all chunks; a level without chunks has none."""
    labels = list(dict.fromkeys(label_of(row) for level in levels for row in level["results"]))
    pairs = list(dict.fromkeys(_pair(change) for level in levels for change in level["changes"]))
    cells = []
    for level in levels:
        figures = {label_of(row): f"{row['bits_per_byte']:.4f}" for row in level["results"]}
        figures |= {_pair(change): f"{_percent(change)} ({_interval(change)})" for change in level["changes"]}
        first = [
            level["set"],
            f"{level['shared_tokens_at_most']}",
            f"{level['leakage_at_most']:g}",
            f"{100 * level['share_of_chunks']:.1f}%",
        ]
        cells.append(first + [figures.get(column, "–") for column in (*labels, *pairs)])
    return Table(["set", "shared tokens at most", "α", "chunks", *labels, *pairs], cells)


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
    return Table([*header, "sources", "nearest of the same source", "any of the same source"], cells)


def _fractions(levels: Rows) -> Table:
    """A row for each fraction of the datastore and each measurement with retrieval ON, compared with OFF of the same model."""
    cells = []
    for level in levels:
        off = {row["model"]: row["bits_per_byte"] for row in level["results"] if not row["k"]}
        size = [
            f"{level['datastore_fraction']:g}",
            f"{level['datastore_documents']:,}",
            f"{level['datastore_chunks']:,}",
        ]
        for row in level["results"]:
            if row["k"]:
                change = 100 * (row["bits_per_byte"] / off[row["model"]] - 1)
                cells.append([level["set"], *size, label_of(row), f"{row['bits_per_byte']:.4f}", f"{change:+.2f}%"])
    return Table(["set", "fraction", "documents", "chunks", "retrieval", "bits/byte", "against OFF"], cells)


def _pair(change: Mapping[str, Any]) -> str:
    return f"{change['measured']} against {change['reference']}"


def _percent(change: Mapping[str, Any]) -> str:
    return f"{change['percent']:+.2f}%"


def _interval(change: Mapping[str, Any]) -> str:
    return interval_in_words(change["low"], change["high"])


def interval_in_words(low: float, high: float) -> str:
    """An interval of percentages. A single document has none: both ends are its own change."""
    return f"{low:+.2f}% to {high:+.2f}%" if low < high else "no interval"
