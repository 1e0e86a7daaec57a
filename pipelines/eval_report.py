"""What `retro eval` measures: every evaluation set, retrieval OFF and ON, as results, tables and JSON."""

from collections.abc import Sequence

from pipelines.progress import progress
from pipelines.report import Table
from retro.device import Placement
from retro.evaluation import EvaluationSettings, Result, compare, evaluate
from retro.evaluation_sets import EvaluationSet
from retro.model import Retro


def measure_all(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: EvaluationSettings,
    placement: Placement,
    *,
    sequence_length: int,
) -> list[Result]:
    """Results with retrieval OFF, then ON for each k, if the model can retrieve; with a progress bar."""
    ks = (0, *settings.k) if model.settings.cca_layers else (0,)
    total = min(settings.max_tokens or evaluation_set.tokens, evaluation_set.tokens)
    results = []
    for k in ks:
        name = f"eval {evaluation_set.name} k={k}" if k else f"eval {evaluation_set.name} OFF"
        with progress(name, total=total, unit="tokens") as advance:
            results.append(
                evaluate(
                    model,
                    evaluation_set,
                    settings,
                    placement,
                    k=k,
                    sequence_length=sequence_length,
                    advance=advance,
                )
            )
    return results


def results_table(results: Sequence[Result]) -> Table:
    """A row for each measurement."""
    rows = [
        [
            result.set,
            result.retrieval,
            str(result.k),
            f"{result.bits_per_byte:.4f}",
            f"{result.perplexity:.2f}",
            f"{result.tokens:,}",
            f"{result.tokens_per_second:,.0f}",
        ]
        for result in results
    ]
    return Table(["set", "retrieval", "k", "bits/byte", "perplexity", "tokens", "tokens/s"], rows)


def describe_change(measured: Result, reference: Result, seed: int = 0) -> str:
    """The change of bits-per-byte in words, with its uncertainty."""
    change, low, high = compare(measured, reference, seed)
    return f"{change:+.2f}% bits per byte (95% of bootstraps over documents: {low:+.2f}% to {high:+.2f}%)"
