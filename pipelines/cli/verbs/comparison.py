"""What retrieval brings on held-out text, as both demos show it: rows with intervals, passages colored by gain.

results by name ─┬─ a sentence, a table with bars, a passage ─► terminal
                 └─ the same with all passages ─► sections of a report, bits_per_byte.svg
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from indexing.progress import during
from indexing.store.files import write_bytes
from pipelines.cli.reports.html import Fragment, Section, colored_text, write_report
from pipelines.cli.reports.pictures import Bar, Picture, bar_chart
from pipelines.cli.results import Table
from pipelines.terminal.output import aligned, echo, echo_shaded, is_colored, one_line
from pipelines.terminal.units import counted
from retro.evaluation.settings import LEAST_DOCUMENTS

if TYPE_CHECKING:
    from retro.evaluation.bits_per_byte import SetResult
    from retro.evaluation.evaluator import Evaluator
    from retro.evaluation.passages import ColoredPassage
    from retro.evaluation.sets import EvaluationSet

Change = tuple[float, float, float]
"""A difference in percent and its interval, as `compare` returns them."""

_BAR_CELLS = 20
"""Width of the longest bar on the terminal."""
_AROUND = 60  # characters around a copied run that are shown on the terminal
_LEGEND = [
    ("   With retrieval, tokens are ", 0),
    ("likelier", 2),
    (" or ", 0),
    ("less likely", -2),
    (". [n] ends a run that is copied from source n.\n", 0),
]


@dataclass(frozen=True)
class Comparison:
    """Models, or ways to read, on the same held-out documents.

    Attributes:
        results: of each row, by its name.
        header, changes: the last column; some rows have no change.
        verdict: what was gained, in a sentence.
        words: what the rows and columns of the table mean.
        passages: colored by the gain of their tokens, by the id of their chunk.
    """

    results: "dict[str, SetResult]"
    header: str
    changes: dict[str, Change]
    verdict: str
    words: dict[str, str]
    passages: "dict[int, ColoredPassage]"

    @property
    def bars(self) -> list[Bar]:
        """Bits per byte of each row with their intervals; blue are those with retrieval."""
        from retro.evaluation.bits_per_byte import interval

        return [
            Bar(name, row.bits_per_byte, interval(row), row.retrieval == "ON") for name, row in self.results.items()
        ]

    @property
    def chart(self) -> Picture:
        """The bars as a picture."""
        return bar_chart(self.bars, "Bits per byte of held-out text")

    @property
    def colored_text(self) -> Fragment:
        """The passages, for a notebook."""
        return colored_text(self.passages.values())

    @property
    def table(self) -> Table:
        """The rows as numbers."""
        changes = {name: percent(change) for name, change in self.changes.items()}
        rows = [[name, f"{row.bits_per_byte:.4f}", changes.get(name, "")] for name, row in self.results.items()]
        return Table(["held-out text", "bits per byte", self.header], rows)

    def print(self) -> None:
        """Print the sentence, the rows and the first passage, as parts 3 and 4 of a demo."""
        echo(f"\n3. {self.verdict}\n")
        self.print_rows()
        passage = next(iter(self.passages.values()))
        echo(f"\n4. {passage.title}")
        print_passage(passage)

    def print_rows(self) -> None:
        """Print the table with a bar in each row, and what its words mean."""
        bars, table = self.bars, self.table
        scale, drawn = _BAR_CELLS / max(bar.end for bar in bars), []
        for bar in bars:
            solid, end = (round(scale * value) for value in (bar.interval or (bar.value, bar.value)))
            solid = max(1, solid)  # the smallest value is seen, too
            drawn.append("█" * solid + "░" * (end - solid))
        header = "░ 95% interval" if bars[0].interval else ""
        cells = [
            [*row[:2], bar, *row[2:]] for row, bar in zip([table.header, *table.rows], [header, *drawn], strict=True)
        ]
        first, *lines = aligned(cells)
        echo(f"   {first}")
        for line, text, bar in zip(lines, drawn, bars, strict=True):
            before, _, after = line.partition(text)
            shade = (1 if bar.is_blue else -1) if is_colored(sys.stdout) else 0
            echo_shaded([(f"   {before}", 0), (text, shade), (after, 0)])
        echo()
        for line in aligned([[name, text] for name, text in self.words.items()]):
            echo(f"   {line}")

    def write(self, folder: Path, subtitle: str, sections: Sequence[Section]) -> None:
        """Write `report.html`, which ends with other sections, and the chart for light and for dark pages."""
        chart = self.chart
        write_bytes(folder / "bits_per_byte.svg", chart.light.encode())
        write_bytes(folder / "bits_per_byte-dark.svg", chart.dark.encode())
        write_report(
            folder / "report.html",
            title="RETRO demo",
            subtitle=subtitle,
            sections=[
                Section("Does retrieval help?", text=self.verdict, plots=[chart]),
                Section("In numbers", table=self.table),
                Section(
                    "What the words mean", table=Table(["word", "meaning"], [[*row] for row in self.words.items()])
                ),
                Section("Where retrieval helps, and what it copies", passages=list(self.passages.values())),
                *sections,
            ],
        )


def difference(model: str, other: str, change: Change, documents: int) -> str:
    """Say how many bits per byte a model needs, compared with `other`, unless it may be chance.

    It may with an interval that includes 0, and with few documents.
    """
    percent, low, high = change
    if documents < LEAST_DOCUMENTS:
        return (
            f"{counted(documents, 'held-out document')} cannot tell whether {model} needs fewer bits per byte with "
            f"retrieval than {other}: score {LEAST_DOCUMENTS} or more. Give the demo a larger corpus: it holds out one of "
            "about 50 documents."
        )
    interval = f"95% interval over {documents:,} held-out documents: {low:+.1f}% to {high:+.1f}%"
    if low <= 0 <= high:
        return f"With retrieval, {model} needs about as many bits per byte as {other} ({percent:+.1f}%; {interval})."
    fewer = "fewer" if percent < 0 else "more"
    return f"With retrieval, {model} needs {abs(percent):.1f}% {fewer} bits per byte than {other} ({interval})."


def percent(change: Change) -> str:
    """A change and its interval: `-10.7% (-20.0% to -4.4%)`."""
    percent, low, high = (f"{value:+.1f}%" for value in change)
    return f"{percent} ({low} to {high})" if low != high else percent


# --- passages ------------------------------------------------------------------------------------------------------


def passages_by_gain(
    evaluator: "Evaluator", off: "SetResult", on: "SetResult", held_out: "EvaluationSet"
) -> "dict[int, ColoredPassage]":
    """Held-out chunks from around quantiles of the gain, scored by token, by their ids."""
    from indexing.store.retrieval_set import RetrievalSet
    from indexing.suffixes.search import SuffixIndex
    from indexing.tokenization.tokenizer import Tokenizer
    from retro.evaluation.passages import ColoredPassage, chosen_chunks, colored
    from retro.evaluation.token_gains import score_passage

    datastore, passages = held_out.datastore, dict[int, ColoredPassage]()
    tokenizer, retrieval = Tokenizer.open(datastore.folder / "tokenizer"), RetrievalSet.of(datastore)
    window, index = evaluator.settings.window // held_out.split.chunk_length, SuffixIndex.open(datastore.folder)
    with during("scoring passages by token"):
        for shown in chosen_chunks(off.token_scores, on.token_scores, datastore, tokenizer, on.k):
            passage = score_passage(evaluator.model, held_out, shown.chunk, evaluator.placement, k=on.k, window=window)
            (document,) = held_out.split.metadata(held_out.split.documents_of(np.array([shown.chunk]))[0].tolist())
            title = (
                f"{one_line(str(document['id']))}, a passage of {len(passage.tokens)} tokens: {-passage.off.sum():.0f} bits without "
                f"retrieval, {-passage.on.sum():.0f} with it; {shown.better:,} of {shown.among:,} held-out passages gain more"
            )
            passages[shown.chunk] = colored(passage, title, tokenizer, retrieval, index)
    return passages


def print_passage(passage: "ColoredPassage") -> None:
    """Print the legend, a passage in color, and the part of each source around its longest copied run."""
    echo_shaded(_LEGEND)
    pieces: list[tuple[str, int]] = []
    for piece in passage.pieces:
        pieces += [(piece.text, piece.shade), *([(f"[{piece.source}]", 0)] if piece.source else [])]
    echo_shaded(_indented([("   ", 0), *pieces]))
    for source in passage.used:
        whole = "" if source.is_neighbor else ", in the whole datastore"
        echo_shaded([(f"   [{source.number}] {one_line(source.document)}{whole}: ", 0), *_excerpt(source.parts)])


def _indented(pieces: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(text.replace("\n", "\n   "), shade) for text, shade in pieces]


def _excerpt(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, int]]:
    """The longest copied part in one line, with a few characters before and after it."""
    longest = max(
        (part_index for part_index, part in enumerate(parts) if part[1]),
        key=lambda part_index: len(parts[part_index][0]),
    )
    before, after = ("".join(text for text, _ in group) for group in (parts[:longest], parts[longest + 1 :]))
    texts = ("…" + before[-_AROUND:], parts[longest][0], after[:_AROUND] + "…")
    return [(re.sub(r"\s*\n\s*", " ⏎ ", text), shade) for text, shade in zip(texts, (0, 2, 0), strict=True)]
