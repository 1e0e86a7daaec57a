"""What `retro eval` measured, for people: tables, and a sentence about what retrieval brings."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.cli.results import Table
from pipelines.terminal.units import counted
from retro.evaluation.bits_per_byte import mode_of
from retro.evaluation.perplexity import Row
from retro.evaluation.retrieval_metrics import RetrievalResult
from retro.evaluation.settings import LEAST_DOCUMENTS
from retro.model_settings import ModelSettings

_MANY_DOCUMENTS = 50


def tables_of(results: Mapping[str, Any]) -> dict[str, Table]:
    """Tables of `evaluate_checkpoints` and, as `texts`, of `evaluate_texts` by their headings, without empty ones.

    Those by longest match and by leakage have OFF and the best ON of each model; the JSON file has all.
    """
    shown = _off_and_best(results["results"])
    tables = {
        "Held-out documents": _results_table(results["results"]),
        "Changes": _changes_table(results["changes"]),
        "By longest match of the document": _match_table(results["matches"], "document", shown),
        "By longest match before the token": _match_table(results["matches"], "token", shown),
        "By leakage": _leakage_table(results["leakage"], shown),
        "By size of the datastore": _fractions_table(results["datastore_fractions"]),
        _title_of_texts(results["texts"]): _texts_table(results["texts"]),
    }
    return {title: table for title, table in tables.items() if table.rows}


def _off_and_best(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Set and label of OFF, and of the ON with the fewest bits, of each model."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row["set"], row["model"], row["retrieval"]
        best[key] = min(best.get(key, row), row, key=lambda measured: measured["bits_per_byte"])
    return {(row["set"], _label(row)) for row in best.values()}


def _label(row: Row) -> str:
    return f"{row['model']} {mode_of(row['k'], row['votes'])}".strip()


def _results_table(rows: Sequence[Row]) -> Table:
    cells = [
        [
            row["set"],
            _label(row),
            f"{row['bits_per_byte']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]
    return Table(["set", "retrieval", "bits/byte", "perplexity", "tokens", "bytes", "tokens/s"], cells)


def _changes_table(rows: Sequence[Row]) -> Table:
    cells = [[row["set"], row["measured"], row["reference"], f"{row['percent']:+.2f}%", _interval(row)] for row in rows]
    return Table(["set", "measured", "against", "bits/byte", "95% of bootstraps over documents"], cells)


def _match_table(levels: Sequence[Row], unit: str, shown: set[tuple[str, str]]) -> Table:
    """Rows for each set and band of lengths that some text has."""
    levels = [level for level in levels if level["of"] == unit and level["tokens"]]

    def length(level: Row) -> str:
        first, last = level["match_at_least"], level["match_at_most"]
        return f"{first} and more" if last is None else f"{first} to {last}" if first < last else f"{first}"

    cells = [[level["set"], length(level), f"{level['documents']:,}", f"{level['tokens']:,}"] for level in levels]
    return _levels_table(["set", "longest match", "documents", "tokens"], cells, levels, shown)


def _leakage_table(levels: Sequence[Row], shown: set[tuple[str, str]]) -> Table:
    """Rows for each set and number of shared tokens."""
    cells = [
        [
            level["set"],
            f"{level['shared_tokens_at_most']}",
            f"{level['leakage_at_most']:g}",
            f"{100 * level['share_of_chunks']:.1f}%",
        ]
        for level in levels
    ]
    return _levels_table(["set", "shared tokens at most", "α", "chunks"], cells, levels, shown)


def _levels_table(
    header: list[str], cells: Sequence[list[str]], levels: Sequence[Row], shown: set[tuple[str, str]]
) -> Table:
    """A row for each result of a level, and for each further change of it. A level without text has none.

    The cells of the level are in its first row.
    """
    rows = []
    for cells_of_level, level in zip(cells, levels, strict=True):
        lines = [] if level["results"] else [["–"] * 4]
        for row in level["results"]:
            figures = [_label(row), f"{row['bits_per_byte']:.4f}"]
            if (level["set"], figures[0]) in shown:
                changes = [change for change in level["changes"] if change["measured"] == figures[0]]
                compared = [
                    [change["reference"], f"{change['percent']:+.2f}% ({_interval(change)})"] for change in changes
                ]
                first, *others = compared or [["", ""]]
                lines += [figures + first, *(["", "", *other] for other in others)]
        rows += [(cells_of_level if line is lines[0] else [""] * len(cells_of_level)) + line for line in lines]
    return Table([*header, "retrieval", "bits/byte", "against", "change"], rows)


def _fractions_table(levels: Sequence[Row]) -> Table:
    """A row for each fraction of the datastore and each measurement with retrieval ON, compared with OFF of the same
    model."""
    cells = []
    for level in levels:
        off = {row["model"]: row["bits_per_byte"] for row in level["results"] if row["retrieval"] == "OFF"}
        sizes = [f"{level['datastore_documents']:,}", f"{level['datastore_chunks']:,}"]
        for row in level["results"]:
            if row["retrieval"] == "ON":
                bits, change = row["bits_per_byte"], 100 * (row["bits_per_byte"] / off[row["model"]] - 1)
                fraction = f"{level['datastore_fraction']:g}"
                cells.append([level["set"], fraction, *sizes, _label(row), f"{bits:.4f}", f"{change:+.2f}%"])
    return Table(["set", "fraction", "documents", "chunks", "retrieval", "bits/byte", "against OFF"], cells)


def _title_of_texts(rows: Sequence[Row]) -> str:
    """The heading, which says where in the documents the windows are from."""
    beginnings = any(row["windows"] == "beginning" for row in rows)
    return f"Other texts: {'the beginning' if beginnings else 'a random window'} of each document"


def _texts_table(rows: Sequence[Row]) -> Table:
    """A row for each path of texts."""
    cells = []
    for row in rows:
        (off, on), (change,), worst = row["results"], row["changes"], row["worst"]
        cells.append(
            [
                row["set"],
                f"{off['documents']:,}",
                f"{off['tokens']:,}",
                _label(on),
                f"{off['bits_per_byte']:.4f}",
                f"{on['bits_per_byte']:.4f}",
                f"{change['percent']:+.2f}% ({_interval(change)})",
                f"{worst['id']}: {worst['percent']:+.2f}% ({worst['bits']:+.1f} bits)",
            ]
        )
    figures = ["retrieval", "bits/byte OFF", "bits/byte ON", "change", "worst document"]
    return Table(["texts", "documents", "tokens", *figures], cells)


def _interval(change: Row) -> str:
    """The interval of a change. A single document has none: both ends are its own change."""
    low, high = change["low"], change["high"]
    return f"{low:+.2f}% to {high:+.2f}%" if low < high else "no interval"


def gains_of(results: Mapping[str, Any], model: ModelSettings) -> list[str]:
    """A sentence for each set: what retrieval brings to the first model."""
    sentences = []
    for name in dict.fromkeys(row["set"] for row in results["results"]):
        rows, changes = ([row for row in results[key] if row["set"] == name] for key in ("results", "changes"))
        sentences.append(gain_in_words(rows, changes, model))
    return list(filter(None, sentences))


def gain_in_words(results: Sequence[Row], changes: Sequence[Row], model: ModelSettings) -> str:
    """What retrieval brings to a model on a set, in a sentence; empty if it was not measured with retrieval.

    Args:
        results: rows of the set over all chunks. The best ON counts, and its interval must differ from 0 as printed.
        changes: between them.
        model: settings of the first model.
    """
    off, *others = results
    on = [row for row in others if row["model"] == off["model"]]
    if not on:
        return ""
    best = min(range(len(on)), key=lambda row: on[row]["bits_per_byte"])
    change, documents = changes[best], off["documents"]
    read = [f"k = {on[best]['k']}"] * bool(on[best]["k"]) + ["datastore"] * on[best]["votes"]
    measured = f"{' + '.join(read)}, {counted(documents, 'held-out document')} of {off['set']}"
    low, high = sorted((abs(change["low"]), abs(change["high"])))
    size = (
        f"{abs(change['percent']):.1f}% of the bits per byte ({low:.1f} to {high:.1f}, 95% interval over documents; "
        f"{measured})"
    )
    plain = (
        f"{change['percent']:+.2f}% bits per byte (95% of bootstraps over documents: {_interval(change)}); {measured}"
    )
    if documents < LEAST_DOCUMENTS:
        return (
            f"Too few held-out documents to measure a gain: {plain}. Score {LEAST_DOCUMENTS} or more: raise the second weight of "
            "corpus.split, or evaluation.max_tokens if it is set."
        )
    if round(change["high"], 1) < 0:
        return f"Retrieval saves {size}."
    if round(change["low"], 1) > 0:
        return f"Retrieval costs {size}. {_advice(model, documents)}"
    return f"No measurable gain yet: {plain}. {_advice(model, documents)}"


def _advice(model: ModelSettings, documents: int) -> str:
    """What can make the gain of retrieval larger or its interval smaller."""
    tips = ["train longer", "more text in the datastore"]
    tips += [] if model.copy_head.neighbors else ["a copy head (model.copy_head.neighbors = true)"]
    tips += ["more held-out documents (corpus.split)"] if documents < _MANY_DOCUMENTS else []
    return f"Try: {', '.join(tips)}."


# --- the other evaluations -------------------------------------------------------------------------------------------


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each mode, from rows of `Answered.as_json`. Columns without a value are left out."""
    shares = {
        "hit": "hit",
        "answer in passages": "answer_in_passages",
        "verbatim": "verbatim",
        "refused": "refused",
        "unanswerable: verbatim": "unanswerable_verbatim",
        "unanswerable: refused": "unanswerable_refused",
    }
    shown = {title: key for title, key in shares.items() if any(row[key] is not None for row in rows)}
    scores = ["exact_match", "f1", "contains", "f1_gain"] if rows[0]["questions"] else []
    cells = []
    for row in rows:
        figures = [
            f"{100 * row[name]:.2f} ({100 * row[f'{name}_low']:.2f} to {100 * row[f'{name}_high']:.2f})"
            for name in scores
        ]
        parts = ["–" if row[key] is None else f"{100 * row[key]:.1f}" for key in shown.values()]
        counts = [f"{row[name]:,}" for name in ("questions", "unanswerable") if rows[0][name]]
        cells.append([row["mode"], *figures, *parts, *counts])
    titles = {
        "exact_match": "exact match",
        "f1": "F1",
        "contains": "contains the answer",
        "f1_gain": "F1 against closed book",
    }
    counted = [name for name in ("questions", "unanswerable") if rows[0][name]]
    return Table(["mode", *map(titles.__getitem__, scores), *shown, *counted], cells)


def retrieval_table(results: Sequence[RetrievalResult]) -> Table:
    """A row for each way of retrieval."""
    ks = list(results[0].hit)
    header = ["retrieval", *(f"hit@{k}" for k in ks), *(f"recall@{k}" for k in ks), "MRR", "questions"]
    rows = []
    for result in results:
        figures = (*result.hit.values(), *result.recall.values(), result.mrr)
        rows.append([result.retrieval, *(f"{figure:.3f}" for figure in figures), f"{result.num_questions:,}"])
    return Table(header, rows)
