"""A held-out passage colored by what retrieval brings to each token, with the neighbors that runs of tokens were copied from.

token gains of a passage ─┬─ runs copied from one neighbor ─┬─ a few lines on the terminal
                          └─ characters of each token ──────┴─ a card of a report
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.reports.html import ColoredPassage, CopiedNeighbor, Piece
from pipelines.terminal.output import echo_shaded, one_line
from retro.evaluation.token_gains import Passage
from retro.server.spans import character_groups, characters, token_ends

_COPIED = 0.5  # share of a token's probability from which it counts as copied
_SHORTEST = 2  # tokens in a row; single ones are often punctuation
_BEFORE = 48  # tokens of the text before a passage that are shown
_AROUND = 60  # characters around a copied run that are shown on the terminal
_LEGEND = [
    ("   With retrieval, tokens are ", 0),
    ("likelier", 2),
    (" or ", 0),
    ("less likely", -2),
    (". [n] ends a run that is copied from neighbor n.\n", 0),
]


@dataclass(frozen=True)
class CopiedRun:
    """Tokens [start, stop) of a passage, copied from tokens of a neighbor that begin at `position`."""

    start: int
    stop: int
    neighbor: int
    position: int


def copied_runs(passage: Passage) -> list[CopiedRun]:
    """Runs of tokens, most of whose probability comes from successive tokens of one neighbor; in order, longest possible."""
    runs: list[CopiedRun] = []
    for at in np.flatnonzero((passage.copied >= _COPIED) & (passage.neighbors >= 0)).tolist():
        neighbor, position, last = int(passage.neighbors[at]), int(passage.positions[at]), runs[-1] if runs else None
        if last and (last.stop, last.neighbor, last.position + at - last.start) == (at, neighbor, position):
            runs[-1] = CopiedRun(last.start, at + 1, neighbor, last.position)
        else:
            runs.append(CopiedRun(at, at + 1, neighbor, position))
    return [run for run in runs if run.stop - run.start >= _SHORTEST]


def colored(passage: Passage, title: str, tokenizer: Tokenizer, retrieval: RetrievalSet) -> ColoredPassage:
    """A passage as text: pieces with their gains, and the neighbors with the copied parts marked."""
    runs = copied_runs(passage)
    text, ends = token_ends(tokenizer.decode_batch, passage.tokens)
    groups = [(start, stop, slice(*characters(ends, start, stop))) for start, stop in character_groups(ends)]
    numbers = {}
    for run in runs:
        words = [start for start, stop, part in groups if run.start < stop <= run.stop and text[part].strip()]
        if words:  # not only blanks
            numbers[words[-1]] = run.neighbor + 1
    pieces = []
    for start, stop, part in groups:
        neighbor, word, gain = numbers.get(start, 0), text[part], float(passage.gains[start:stop].sum())
        blank = word[len(word.rstrip()) :] if neighbor else ""  # the number comes before a line break
        pieces += [Piece(word.removesuffix(blank), gain, neighbor), *([Piece(blank)] if blank else [])]
    present = [neighbor for neighbor, tokens in enumerate(passage.neighbor_tokens) if len(tokens)]
    documents = retrieval.metadata(passage.neighbor_ids[present]) if present else []
    return ColoredPassage(
        title,
        tokenizer.decode(passage.before[-_BEFORE:]),
        pieces,
        [
            CopiedNeighbor(
                neighbor + 1,
                str(row["id"]),
                _parts(tokenizer, passage.neighbor_tokens[neighbor], [run for run in runs if run.neighbor == neighbor]),
            )
            for neighbor, row in zip(present, documents, strict=True)
        ],
    )


def _parts(tokenizer: Tokenizer, tokens: np.ndarray, runs: Sequence[CopiedRun]) -> list[tuple[str, bool]]:
    """The text of a neighbor in parts; True = copied."""
    text, ends = token_ends(tokenizer.decode_batch, tokens)
    copied = np.zeros(len(text) + 1, dtype=bool)
    for run in runs:
        begin, end = characters(ends, run.position, run.position + run.stop - run.start)
        copied[begin:end] = True
    borders = [0, *(np.flatnonzero(copied[1:-1] != copied[:-2]) + 1).tolist(), len(text)]
    return [(text[a:b], bool(copied[a])) for a, b in pairwise(borders) if b > a]


def print_passage(passage: ColoredPassage) -> None:
    """Print the legend, a passage in color, and the part of each neighbor around its longest copied run."""
    echo_shaded(_LEGEND)
    pieces: list[tuple[str, int]] = []
    for piece in passage.pieces:
        pieces += [(piece.text, piece.shade), *([(f"[{piece.neighbor}]", 0)] if piece.neighbor else [])]
    echo_shaded(_indented([("   ", 0), *pieces]))
    used = {piece.neighbor for piece in passage.pieces}
    for neighbor in passage.neighbors:
        if neighbor.number in used:
            echo_shaded([(f"   [{neighbor.number}] {one_line(neighbor.document)}: ", 0), *_excerpt(neighbor.parts)])


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
