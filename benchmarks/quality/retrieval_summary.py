"""Tables and plots of the scores and curves of `retrieval_gain`, over all models and seeds.

OUT/seed-N/score-NAME.npz ┬→ bits per byte, changes against a reference, changes by shared tokens ┬→ Markdown
OUT/seed-N/run-NAME       └→ bits per byte during training ───────────────────────────────────────┴→ OUT/summary.html
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.common import markdown, percent, say
from benchmarks.quality.retrieval_scores import Scores, load_all
from pipelines.reports.html import PlotLine, Section, line_plot, write_report
from pipelines.reports.training_runs import open_run
from pipelines.results import Table
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.settings import EvaluationSettings

REFERENCES = ("context", "baseline", "copy")
"""Models that all others are compared with: `context` and `baseline` OFF; `copy`, which retrieves, with the same k."""

AllScores = Mapping[str, Mapping[int, Scores]]
"""Model → seed → scores."""
Curves = Mapping[str, Mapping[float, float]]
"""`copy ON` → tokens → bits per byte."""


def summarize(out: Path, order: Sequence[str], larger: bool = False) -> None:
    """Print all tables as Markdown, and write OUT/summary.html or, of scores with OUT/larger, OUT/summary-larger.html.

    Args:
        out: folder with `seed-N`.
        order: names of the models in order.
        larger: summarize the scores with the neighbors of OUT/larger.
    """
    scores = load_all(out, order, larger)
    curves = learning_curves(out, order)
    held_out = next(iter(next(iter(scores.values())).values())).results[0]
    text = f"{held_out.tokens:,} tokens of {np.count_nonzero(held_out.bytes_by_document)} held-out documents. {_MEANS}"
    sections = [Section("Bits per byte at the end", text, table=bits_table(scores))]
    for reference in REFERENCES:
        if reference in scores:
            sections.append(Section(f"Change against {reference}", _CHANGES, table=changes_table(scores, reference)))
    for reference in REFERENCES:
        if reference in scores:
            table, plot = leakage_table(scores, reference), _leakage_plot(scores, reference)
            sections.append(Section(f"Change against {reference} by shared tokens", _LEAKAGE, table, [plot]))
    plots = [_curve_plot(curves)]
    sections.append(Section("During training", _DURING, curve_table(curves), plots))
    for section in sections:
        assert section.table is not None
        say(f"## {section.title}\n\n{section.text}\n\n{markdown(section.table)}\n")
    page = out / ("summary-larger.html" if larger else "summary.html")
    write_report(page, title="Gain of retrieval", subtitle=str(out), sections=sections)
    say(f"report: {page}")


_MEANS = "With several seeds: the mean, and in brackets the lowest and the highest."
_CHANGES = (
    "Each seed against the reference with the same seed and, if the reference retrieves, the same k; in brackets the 95% interval "
    "of bootstraps over documents. Last column: mean over seeds, lowest to highest."
)
_LEAKAGE = (
    "Only chunks that share a run of at most this number of tokens with one of their ten nearest neighbors; α is this number "
    "divided by the chunk length. Bits of all seeds together, with the 95% interval of bootstraps over documents."
)
_DURING = "Bits per byte of `train.eval_tokens` held-out tokens, mean over seeds."

# --- tables ----------------------------------------------------------------------------------------------------------


def bits_table(scores: AllScores) -> Table:
    """A row for each model: bits per byte, OFF and ON for each k."""
    ks = sorted({k for seeds in scores.values() for each in seeds.values() for k in each.results})
    rows = []
    for name, seeds in scores.items():
        bits = {k: [each.results[k].bits_per_byte for each in seeds.values() if k in each.results] for k in ks}
        cells = [f"{mean(bits[k]):.4f}{_range(bits[k], '.4f')}" if bits[k] else "" for k in ks]
        rows.append([name, str(len(seeds)), *cells])
    return Table(["model", "seeds", *map(mode, ks)], rows)


def changes_table(scores: AllScores, reference: str) -> Table:
    """A row for each model and k: change of bits per byte against the reference with the same seed (and k)."""
    all_seeds = sorted({seed for seeds in scores.values() for seed in seeds})
    rows = []
    for name, k in _measurements(scores, reference):
        cells, found = [], []
        for seed in all_seeds:
            if seed in scores[name] and seed in scores[reference]:
                theirs = scores[reference][seed].results[same_k(scores, reference, k)]
                change = compare(scores[name][seed].results[k], theirs)
                found.append(change[0])
                cells.append(percent(change))
            else:
                cells.append("")
        rows.append([name, mode(k), *cells, f"{mean(found):+.1f}%{_range(found, '+.1f')}" if found else ""])
    return Table(["model", "", *(f"seed {seed}" for seed in all_seeds), "mean"], rows)


def leakage_table(scores: AllScores, reference: str) -> Table:
    """Bits per byte of the reference by shared tokens, and the change of each model and k against it."""
    levels = shared_tokens(scores)
    example = next(iter(scores[reference].values()))
    m = example.chunk_length
    header = [f"{t} tokens (α = {t / m:g}, {100 * example.share(t):.1f}% of chunks)" for t in levels]
    seeds = set(scores[reference])
    rows = []
    for k in example.results:
        parts = [pooled(scores[reference], k, tokens, seeds) for tokens in levels]
        rows.append(
            [reference, f"{mode(k)}: bits per byte", *(f"{part.bits_per_byte:.4f}" if part else "" for part in parts)]
        )
    for name, k in _measurements(scores, reference):
        both = seeds & set(scores[name])
        rows.append([name, mode(k), *(_level_change(scores, name, k, reference, t, both) for t in levels)])
    return Table(["model", "", *header], rows)


def curve_table(curves: Curves) -> Table:
    """Bits per byte by training tokens: a column for each model and mode."""
    positions = sorted({tokens for curve in curves.values() for tokens in curve})
    rows = [
        [f"{tokens / 1e6:.2f}M", *(f"{curve[tokens]:.3f}" if tokens in curve else "" for curve in curves.values())]
        for tokens in positions
    ]
    return Table(["tokens", *curves], rows)


def mode(k: int) -> str:
    """`OFF` or `ON, k = 4`."""
    return f"ON, k = {k}" if k else "OFF"


def _range(values: Sequence[float], form: str) -> str:
    return f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""


# --- figures ---------------------------------------------------------------------------------------------------------


def shared_tokens(scores: AllScores) -> list[int]:
    """Levels of leakage: the setting's default up to the chunk length, which includes all chunks."""
    m = next(iter(next(iter(scores.values())).values())).chunk_length
    return sorted({min(tokens, m) for tokens in EvaluationSettings().leakage_tokens})


def same_k(scores: AllScores, reference: str, k: int) -> int:
    """The k that the reference is compared with: the same, or OFF if it does not retrieve."""
    return k if k in next(iter(scores[reference].values())).results else 0


def pooled(seeds: Mapping[int, Scores], k: int, tokens: int, chosen: set[int]) -> SetResult | None:
    """Scores of some seeds together, over the chunks that share at most this number of tokens; None if there are none."""
    parts = [part for seed in sorted(chosen) if (part := seeds[seed].at_most(k, tokens)) is not None]
    if not parts:
        return None
    return replace(
        parts[0],
        tokens=sum(part.tokens for part in parts),
        nats_by_document=np.sum([part.nats_by_document for part in parts], axis=0),
        bytes_by_document=np.sum([part.bytes_by_document for part in parts], axis=0),
    )


def learning_curves(out: Path, order: Sequence[str]) -> dict[str, dict[float, float]]:
    """Held-out bits per byte during training of the scored runs, mean over seeds."""
    curves: dict[str, dict[float, float]] = {}
    for name in order:
        folders = [file.parent / f"run-{name}" for file in sorted(out.glob(f"seed-*/score-{name}.npz"))]
        for which in ("off", "on"):
            points: dict[float, list[float]] = {}
            for folder in folders:
                for tokens, bits in zip(*open_run(folder, name).held_out("valid", which), strict=True):
                    points.setdefault(float(tokens), []).append(float(bits))
            if points:
                curves[f"{name} {which.upper()}"] = {tokens: mean(points[tokens]) for tokens in sorted(points)}
    return curves


def _measurements(scores: AllScores, reference: str) -> list[tuple[str, int]]:
    """Model and k of all measurements of other models than the reference."""
    return [
        (name, k) for name, seeds in scores.items() if name != reference for k in next(iter(seeds.values())).results
    ]


def _level_change(scores: AllScores, name: str, k: int, reference: str, tokens: int, seeds: set[int]) -> str:
    ours = pooled(scores[name], k, tokens, seeds)
    theirs = pooled(scores[reference], same_k(scores, reference, k), tokens, seeds)
    return percent(compare(ours, theirs)) if ours and theirs else ""


# --- plots -----------------------------------------------------------------------------------------------------------


def _curve_plot(curves: Curves) -> str:
    """Bits per byte by training tokens, a color for each model; OFF is dashed."""
    names = list(dict.fromkeys(label.rpartition(" ")[0] for label in curves))
    lines = {
        label: PlotLine(list(curve), list(curve.values()), names.index(label.rpartition(" ")[0]), label.endswith("OFF"))
        for label, curve in curves.items()
    }
    return line_plot(lines, "training tokens", "bits per byte", "During training")


def _leakage_plot(scores: AllScores, reference: str) -> str:
    """Change against the reference by shared tokens, for the largest k of each model."""
    levels, lines = shared_tokens(scores), {}
    largest = dict(_measurements(scores, reference))  # the last k of a model
    for color, (name, k) in enumerate(largest.items()):
        seeds = set(scores[name]) & set(scores[reference])
        own = same_k(scores, reference, k)
        pairs = [(t, pooled(scores[name], k, t, seeds), pooled(scores[reference], own, t, seeds)) for t in levels]
        points = [(t, 100 * (a.bits_per_byte / b.bits_per_byte - 1)) for t, a, b in pairs if a and b]
        lines[f"{name} {mode(k)}"] = PlotLine([t for t, _ in points], [change for _, change in points], color)
    return line_plot(lines, "shared tokens at most", "change of bits per byte, %", f"against {reference}", log_x=True)
