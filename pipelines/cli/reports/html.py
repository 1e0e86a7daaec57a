"""Reports: one HTML file, which loads nothing from other places.

figures, tables, pictures, examples (plain data) → templates/report.html → one file, written atomically
colored passages → templates/fragment.html → a part of a notebook
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from indexing.store.files import write_bytes
from pipelines.cli.reports.pictures import THEMES, Picture
from pipelines.cli.results import Table

if TYPE_CHECKING:
    from retro.evaluation.passages import ColoredPassage

_TEMPLATES = Path(__file__).parent / "templates"
# Shorter runs of shared words are likely to be chance. A Chinese character counts less than a word.
_MARKED_WORDS = 3
_CHARACTER = 0.75
_SHADES = {2: "up2", 1: "up1", -1: "down1", -2: "down2"}  # classes of the page


@dataclass(frozen=True)
class NeighborText:
    """A neighbor as text: score, document, chunk and continuation."""

    score: float
    document: str
    text: str
    continuation: str


@dataclass(frozen=True)
class NeighborExample:
    """A chunk of a document, its continuation, and its neighbors."""

    document: str
    chunk: str
    continuation: str
    neighbors: list[NeighborText]


@dataclass(frozen=True)
class Section:
    """A part of a report; empty parts are not shown."""

    title: str
    text: str = ""
    table: Table | None = None
    plots: list[Picture] = field(default_factory=list)
    examples: list[NeighborExample] = field(default_factory=list)
    passages: "list[ColoredPassage]" = field(default_factory=list)


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    figures: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Write a report.

    Args:
        path: the HTML file.
        title: its heading.
        subtitle: a line under it.
        sections: in order.
        figures: label, value and note of the numbers at the top.
    """
    html = _rendered("report.html", title=title, subtitle=subtitle, sections=sections, figures=figures)
    write_bytes(path, html.encode("utf-8", errors="replace"))


@dataclass(frozen=True)
class Fragment:
    """A part of a page, which a notebook shows. It loads nothing."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return self.html


def colored_text(passages: Iterable["ColoredPassage"]) -> Fragment:
    """Passages with the colors of their tokens, and their sources."""
    return Fragment(_rendered("fragment.html", passages=[*passages]))


def _rendered(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters |= {"marked": marked, "mark": mark}
    return environment.get_template(template).render(**values, shades=_SHADES, themes=THEMES)


def marked(text: str, other: str) -> Any:
    """`text` as HTML, with marks on runs of words that `other` contains too."""
    from markupsafe import Markup, escape

    words, other_words = _words(text), _words(other)
    shared = np.zeros(len(words), dtype=bool)
    for match in SequenceMatcher(None, words, other_words, autojunk=False).get_matching_blocks():
        run = range(match.a, match.a + match.size)
        if sum(_weight(words[index]) for index in run) >= _MARKED_WORDS:
            inner = [index for index in run if not words[index].isspace()]
            shared[inner[0] : inner[-1] + 1] = True
    out, start = Markup(""), 0
    for stop in range(1, len(words) + 1):
        if stop == len(words) or shared[stop] != shared[start]:
            part = "".join(words[start:stop])
            out += mark(part) if shared[start] else escape(part)
            start = stop
    return out


def mark(text: str) -> Any:
    """`text` as HTML with marks on its words and single spaces between them: marked indentation would be a large
    block."""
    from markupsafe import Markup, escape

    parts = re.split(r"(\S+(?: \S+)*)", text)  # what the group matches has odd places
    return Markup("").join(
        Markup("<mark>{}</mark>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts)
    )


def _words(text: str) -> list[str]:
    """Split into words, blanks, punctuation, and single characters of scripts without blanks."""
    return re.findall(r"\s+|[^\W\u3040-\u30ff\u3400-\u9fff]+|.", text, flags=re.DOTALL)


def _weight(word: str) -> float:
    """Weight of a word; 0 for blanks and punctuation."""
    if not word[0].isalnum():
        return 0.0
    return _CHARACTER if word >= "\u3040" else 1.0
