"""The gain of copying from a datastore against its size, on windows of held-out documents.

    datastore ─ documents whose hash is below a fraction ─► nested parts ─ sorted prefixes of each ─┐
    held-out documents ─ tokens from their middle ─► windows ─ logits, read once ───────────────────┴─► WindowScores
    WindowScores of all windows ─► SizeCurve: change of the bits at each size, a line in log10 of the tokens, intervals

A part is searched as a datastore of its documents would be, but the prefixes are sorted once, for all parts. Nothing is
trained: a model without a network for the whole datastore gets the one that every copy head begins with.
"""

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from indexing.corpus.documents import Document
from indexing.retrieval.prefix_neighbors import PrefixNeighbors
from indexing.store.datastore import Split
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from indexing.store.stages import SkippedStage
from indexing.suffixes.order import LONGEST
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from retro.batch.inputs import Inputs
from retro.copying.datastore import DATASTORE
from retro.copying.head import CopyHead
from retro.copying.model import CopyingModel, mixed
from retro.data.loader import as_tensors
from retro.device import Placement

SKIPPED_STAGES: tuple[SkippedStage, ...] = ("neighbors", "sparse", "votes")
"""What a datastore does not need for these measurements: they copy from the whole datastore, by its sorted prefixes."""
BANDS = (0, 2, 4, 8, 16, 32)
"""Lengths of the longest match before a token at which a band begins."""
LONG_MATCH = 32
"""Tokens of a match from which a window counts as one with a long match."""
ROUNDS = 2000
"""Samples of the bootstrap."""
_CHARACTERS = 32  # of text that is tokenized for each token of a window: more than any token has on average

Interval = tuple[float, float, float]
"""A value, and its 2.5% and 97.5% quantiles over draws of windows. With one window all three are equal."""


def point_of(name: str, seed: int) -> float:
    """The hash of a name in [0, 1): the same on every machine, whatever other names there are."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53  # 53 bits are exact


# --- parts of a datastore ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Training documents of a datastore: those whose hash of the id (of a text file, its path) is below a fraction.

    Attributes:
        fraction: of the documents, above 0 and at most 1.
        chosen: bool [documents].
        tokens: in these documents.
    """

    fraction: float
    chosen: np.ndarray
    tokens: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.chosen.sum())


def nested_parts(train: Split, fractions: Iterable[float], seed: int = 0) -> list[Part]:
    """The parts of a training split without its deleted documents, smallest first. A larger part contains a smaller
    one.

    Raises:
        InputError: a part has no document, or as many as a smaller one.
    """
    points, tokens = np.zeros(train.num_documents), np.zeros(train.num_documents, np.int64)
    for first, table in train.documents.scan(["id", "tokens"]):
        rows = slice(first, first + table.num_rows)
        points[rows] = [point_of(name, seed) for name in table["id"].to_pylist()]
        tokens[rows] = table["tokens"].to_numpy()
    points[train.deleted_documents] = 1.0
    parts = list[Part]()
    for fraction in sorted(set(fractions)):
        chosen = points < fraction
        if chosen.sum() == (parts[-1].documents if parts else 0):
            raise InputError(
                f"fraction {fraction:g} of {train.num_documents:,} documents: it has {chosen.sum():,} documents"
                f"{', as a smaller one' if parts else ''}. Name larger fractions, or use more text."
            )
        parts.append(Part(fraction, chosen, int(tokens[chosen].sum())))
    return parts


def open_parts(
    index: SuffixIndex, parts: Sequence[Part], work: Path, on_part: Callable[[Part], object] = lambda _: None
) -> list[SuffixIndex]:
    """The sorted prefixes of nested parts. Each part is made from the next larger one.

    Args:
        index: of the whole datastore.
        parts: see `nested_parts`.
        work: a folder, to which 8 to 10 bytes are written for each token of each part that is not the whole datastore.
        on_part: called before a part is made.
    """
    present = index.split.num_documents - len(index.split.deleted_documents)
    opened = list[SuffixIndex]()
    for part in reversed(parts):
        on_part(part)
        if part.documents < present:
            index = index.of_documents(part.chosen, work / f"{part.fraction:.9f}")
        opened.insert(0, index)
    return opened


# --- windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Tokens from the middle of a held-out document.

    Attributes:
        name: of the document.
        tokens: the token that begins a document, then t tokens of text.
        bytes: UTF-8 bytes of the text.
    """

    name: str
    tokens: tuple[int, ...]
    bytes: int


def middle_window(document: Document, tokenizer: Tokenizer, length: int) -> Window | None:
    """The first `length` tokens after the line in the middle of a document; None if fewer tokens follow.

    The middle, since beginnings repeat licenses and imports, which gain more from copying than other text.
    """
    half = _second_half(document)
    tokens = tokenizer.encode((half.partition("\n")[2] or half)[: _CHARACTERS * length])[:length]
    if len(tokens) < length:
        return None
    sizes = tokenizer.token_bytes[tokens]
    added = min(int(sizes[0]), tokenizer.meta.added_bytes)
    return Window(document.id, (tokenizer.bos_id, *tokens.tolist()), int(sizes.sum()) - added)


def _second_half(document: Document) -> str:
    """The text from the middle on; of a large document, to the end of the block with the middle."""
    read, middle = 0, document.size // 2
    for block in document.blocks():
        size = len(block.encode())
        if read + size > middle:
            return block[len(block) * (middle - read) // size :]
        read += size
    return ""


def write_windows(file: Path, windows: Sequence[Window], about: dict[str, Any]) -> None:
    """Write windows, and what was found when they were chosen, as JSON."""
    write_json(file, {"windows": [asdict(window) for window in windows], "about": about})


def read_windows(file: Path) -> tuple[list[Window], dict[str, Any]]:
    """Read a file of `write_windows`."""
    stored = read_json(file)
    return [Window(row["name"], tuple(row["tokens"]), row["bytes"]) for row in stored["windows"]], stored["about"]


# --- scores -----------------------------------------------------------------------------------------------------------


class WindowScores(NamedTuple):
    """Scores of the t tokens of a window: OFF, then ON with each of S parts.

    Attributes:
        nats: losses, float32 [1 + S, t].
        right: whether the likeliest token is the right one, bool [1 + S, t].
        matches: tokens of the longest match in each part before the token, at most 64, uint8 [S, t].
    """

    nats: np.ndarray
    right: np.ndarray
    matches: np.ndarray

    def write(self, file: Path) -> None:
        """Write the scores, atomically."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **self._asdict())
        write_bytes(file, buffer.getvalue())

    @classmethod
    def read(cls, file: Path) -> "WindowScores":
        """Read a file of `write`."""
        with np.load(file) as stored:
            return cls(*(stored[name] for name in cls._fields))

    @property
    def is_copy(self) -> bool:
        """Whether the largest part has the whole window: every run of 64 tokens of it, and there are some."""
        after = self.matches[-1][LONGEST:]  # before a token that 64 tokens of text precede
        return bool(len(after) and (after == LONGEST).all())


def copy_head_of(model: CopyingModel, placement: Placement) -> CopyHead:
    """The copy head of a model that copies from the whole datastore, otherwise a new one, not fitted, in evaluation
    mode."""
    own = model.copy_head
    if own is not None and own.network(DATASTORE) is not None:
        return own
    head = CopyHead((DATASTORE.name,), model.settings.chunk_length)
    head.initialize()
    return head.to(placement.device).eval()


@torch.inference_mode()
def score_window(
    model: CopyingModel,
    head: CopyHead,
    window: Window,
    parts: Sequence[SuffixIndex],
    placement: Placement,
    k: int = 0,
) -> WindowScores:
    """Score a window with the model alone, and copying from each part. The model reads it once, so its decoder reads
    no neighbors.

    Args:
        model: in evaluation mode. Logits of all tokens of the window are in memory, a few times.
        head: see `copy_head_of`.
        window: the window.
        parts: the sorted prefixes of S parts of a datastore.
        placement: device and precision.
        k: neighbors of each chunk, found in the same part, for a head that copies from neighbors; 0 = none.
    """
    tokens = np.array(window.tokens, np.int64)
    found = [_found(part, tokens, head.chunk_length, k) for part in parts]
    off = placement.put(Inputs(torch.from_numpy(tokens)[None]))
    with placement.autocast():
        logits = model.logits(model.hidden(off)[0])
    alone = logits.float().log_softmax(-1)
    following = off.tokens[0, 1:]
    nats, right = list[np.ndarray](), list[np.ndarray]()
    for inputs in (off, *map(placement.put, found)):
        log_p = mixed(head, alone, inputs)[0, :-1]  # `alone` itself if there is nothing to copy from
        nats.append(-log_p.gather(-1, following[:, None])[:, 0].cpu().numpy())
        right.append((log_p.argmax(-1) == following).cpu().numpy())
    matches = np.stack([inputs.votes[0, :-1, 0].numpy() for inputs in found]).astype(np.uint8)
    return WindowScores(np.stack(nats), np.stack(right), matches)


def _found(part: SuffixIndex, tokens: np.ndarray, chunk_length: int, k: int) -> Inputs:
    """A text [t] with its votes and neighbors in a part, as a batch of one."""
    inputs = Inputs(tokens[None], votes=part.votes(tokens)[None])
    if k:
        chunks = tokens[: len(tokens) // chunk_length * chunk_length].reshape(-1, chunk_length)
        neighbors, lengths = PrefixNeighbors(part).find(chunks, k)[:2]
        inputs = inputs._replace(neighbors=neighbors[None], neighbor_lengths=lengths[None])
    return as_tensors(inputs)


# --- the curve --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Lines through the changes of all windows (the first row), and of each draw of windows, over log10 of the tokens.

    Attributes:
        center: mean of log10 of the tokens.
        heights, slopes: the change at the center, and points a decade: [1 + draws] each.
        distance: largest distance of a measured change from the first line, in points.
    """

    center: float
    heights: np.ndarray
    slopes: np.ndarray
    distance: float

    @property
    def per_decade(self) -> Interval:
        """The change of the change, in points, with ten times the tokens."""
        return _interval(self.slopes)

    def at(self, tokens: float) -> Interval:
        """The change on the line at a number of tokens, in percent."""
        return _interval(self.heights + self.slopes * (math.log10(tokens) - self.center))


@dataclass(frozen=True)
class SizeCurve:
    """Changes of the bits of W windows with S sizes of the datastore.

    Attributes:
        tokens: of each size, ascending, float64 [S].
        off, on: sums of the losses of each window, float64 [W] and [S, W].
        seed: of the draws of windows.
    """

    tokens: np.ndarray
    off: np.ndarray
    on: np.ndarray
    seed: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], scores: Sequence[WindowScores]) -> "SizeCurve":
        """The curve of some windows, at least one."""
        nats = np.stack([one.nats.sum(1, dtype=np.float64) for one in scores], axis=1)
        return cls(np.array(tokens, np.float64), nats[0], nats[1:])

    @property
    def changes(self) -> list[Interval]:
        """Change of the bits with each size, in percent of OFF; negative = fewer bits."""
        return [_interval(row) for row in self._drawn]

    @cached_property
    def line(self) -> Line | None:
        """The line of least squares through the changes; None with fewer than two sizes."""
        if len(self.tokens) < 2:
            return None
        x = np.log10(self.tokens)
        heights = self._drawn.mean(0)
        slopes = (x - x.mean()) @ self._drawn / ((x - x.mean()) ** 2).sum()
        distances = self._drawn[:, 0] - heights[0] - slopes[0] * (x - x.mean())
        return Line(float(x.mean()), heights, slopes, float(np.abs(distances).max()))

    @cached_property
    def _drawn(self) -> np.ndarray:
        """Changes in percent, of all windows and of each draw of as many windows: [S, 1 + draws]."""
        count = len(self.off)
        drawn = np.random.default_rng(self.seed).integers(0, count, (ROUNDS, count))
        off = np.append(self.off.sum(), self.off[drawn].sum(1))
        on = np.concatenate([self.on.sum(1)[:, None], self.on[:, drawn].sum(2)], axis=1)
        changes: np.ndarray = 100 * (on / off - 1)
        return changes


def _interval(values: np.ndarray) -> Interval:
    """The first value, and quantiles of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


def without_long_matches(scores: Sequence[WindowScores], least: int = LONG_MATCH) -> list[WindowScores]:
    """The windows whose longest match in the largest part is shorter."""
    return [one for one in scores if one.matches[-1].max() < least]


class Band(NamedTuple):
    """The tokens whose longest match in a part has a length of a band.

    Attributes:
        first: the shortest length of the band.
        share: of all tokens.
        change: of their bits, in percent of OFF; None without such tokens.
    """

    first: int
    share: float
    change: float | None


def by_match(scores: Sequence[WindowScores], part: int) -> list[Band]:
    """The tokens of windows by the longest match before them in a part (number from 0), in `BANDS`."""
    lengths = np.concatenate([one.matches[part] for one in scores])
    off, on = (np.concatenate([one.nats[row] for one in scores]).astype(np.float64) for row in (0, part + 1))
    numbers = np.searchsorted(BANDS, lengths, side="right") - 1
    bands = list[Band]()
    for number, first in enumerate(BANDS):
        inside = numbers == number
        change = 100 * float(on[inside].sum() / off[inside].sum() - 1) if inside.any() else None
        bands.append(Band(first, float(inside.mean()), change))
    return bands


def likeliest_right(scores: Sequence[WindowScores]) -> np.ndarray:
    """Share of the tokens that are the likeliest one, OFF and with each size: float64 [1 + S]."""
    share: np.ndarray = np.concatenate([one.right for one in scores], axis=1).mean(1)
    return share
