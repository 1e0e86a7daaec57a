"""Held-out passages colored by what retrieval brings to each token, with the sources that runs of tokens were copied
from.

chunks by their gain ─► near three quantiles ─► `choose_passages` ─► token gains, copied runs
runs copied from one neighbor, or from a place in the datastore ─► pieces of text and sources, for a terminal or a page
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from indexing.retrieval.passage_choice import candidates_of, choose_passages
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.order import FOLDER as SUFFIXES
from indexing.suffixes.order import LONGEST
from indexing.suffixes.search import Place, SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.bits_per_byte import TokenScores
from retro.evaluation.token_gains import Passage, chunks_by_gain
from retro.inference.spans import character_groups, characters, token_ends

_QUANTILES = (0.9, 0.5, 0.1)
"""Of the gains of all chunks: a passage is shown from around each of them. The terminal shows the first one."""
_AROUND_QUANTILE = 0.05
_CANDIDATES = 100  # around a quantile
_COPIED = 0.5  # share of a token's probability from which it counts as copied
_SHORTEST = 2  # tokens in a row; single ones are often punctuation
_SHORTEST_ANYWHERE = 4  # in the whole datastore, where shorter runs occur in many places
_BEFORE = 48  # tokens of the text before a passage that are shown
_TOKENS_AROUND = 24  # a run in the whole datastore
_PLACES = 8  # of a run, among which one is chosen
SHADE_BITS = (0.5, 2.0)
"""Gains from which a token has a pale and a strong color."""
_AROUND = 160  # characters around the copied parts of a source
_HALF = "\ufffd"  # decoded part of a character, where a text is cut between tokens


@dataclass(frozen=True)
class ShownChunk:
    """A held-out chunk to show. Of the `among` chunks that read neighbors, `better` gain more."""

    chunk: int
    better: int
    among: int


def chosen_chunks(
    off: TokenScores, on: TokenScores, datastore: Datastore, tokenizer: Tokenizer, k: int
) -> list[ShownChunk]:
    """Choose a held-out chunk around each quantile of the gain, of different documents if possible.

    Args:
        off: scores of the held-out tokens, retrieval OFF.
        on: retrieval ON.
        datastore: with the held-out documents.
        tokenizer: of the datastore.
        k: neighbors that a chunk reads.
    """
    split, shown, used = datastore.valid, list[ShownChunk](), set[int]()
    by_gain = chunks_by_gain(off, on, split)
    index = SuffixIndex.open(datastore.folder) if datastore.has(SUFFIXES) else None
    for quantile in _QUANTILES:
        low, high = ((quantile + side * _AROUND_QUANTILE) * (len(by_gain) - 1) for side in (-1, 1))
        ranks = np.unique(np.linspace(low, high, _CANDIDATES).round().astype(np.int64))
        read = split.neighbor_ids.gather(by_gain[ranks] - 1)[:, :k]
        candidates = candidates_of(split, RetrievalSet.of(datastore), by_gain[ranks], read)
        rows = [row for row, candidate in enumerate(candidates) if candidate.document not in used] or [
            *range(len(ranks))
        ]
        row = rows[choose_passages([candidates[row] for row in rows], 1, tokenizer, index)[0]]
        used.add(candidates[row].document)
        shown.append(ShownChunk(int(by_gain[ranks[row]]), len(by_gain) - 1 - int(ranks[row]), len(by_gain)))
    return shown


# --- sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedRun:
    """Tokens [start, stop) of a passage, copied from tokens of a neighbor that begin at `position`."""

    start: int
    stop: int
    neighbor: int
    position: int


@dataclass(frozen=True)
class DatastoreRun:
    """Tokens [start, stop) of a passage, copied from the whole datastore: a place where they occur."""

    start: int
    stop: int
    place: Place


def copied_runs(passage: Passage) -> list[CopiedRun]:
    """Runs of tokens, most of whose probability comes from successive tokens of one neighbor; in order, longest
    possible."""
    runs: list[CopiedRun] = []
    for at in np.flatnonzero((passage.copied >= _COPIED) & (passage.neighbors >= 0)).tolist():
        neighbor, position, last = int(passage.neighbors[at]), int(passage.positions[at]), runs[-1] if runs else None
        if last and (last.stop, last.neighbor, last.position + at - last.start) == (at, neighbor, position):
            runs[-1] = CopiedRun(last.start, at + 1, neighbor, last.position)
        else:
            runs.append(CopiedRun(at, at + 1, neighbor, position))
    return [run for run in runs if run.stop - run.start >= _SHORTEST]


def datastore_runs(passage: Passage, index: SuffixIndex) -> list[DatastoreRun]:
    """Runs of tokens, most of whose probability comes from the whole datastore, each with a place; in order.

    A run whose tokens come from several places is several runs. Of several documents, one that has another run is
    taken.
    """
    text = np.concatenate([passage.before[-LONGEST:], passage.tokens])
    first, runs, documents = len(text) - len(passage.tokens), list[DatastoreRun](), set[str]()
    copied = np.concatenate([[0], passage.from_datastore >= _COPIED, [0]])
    for start, stop in np.flatnonzero(np.diff(copied)).reshape(-1, 2).tolist():
        while stop - start >= _SHORTEST_ANYWHERE:
            match = index.longest_match(text[max(0, first + stop - LONGEST) : first + stop])
            places = sorted(index.places(match, _PLACES), key=lambda place: place.document["id"] not in documents)
            begin = max(start, stop - match.length)
            if stop - begin < _SHORTEST_ANYWHERE or not places:
                break
            runs.append(DatastoreRun(begin, stop, places[0]))
            documents.add(places[0].document["id"])
            stop = begin
    return sorted(runs, key=lambda run: run.start)


# --- text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A few characters of a text.

    Attributes:
        text: the characters.
        gain: bits that retrieval saves for them; negative = it costs bits.
        source: number of the source that the run of pieces ending here was copied from; 0 = none.
    """

    text: str
    gain: float = 0.0
    source: int = 0

    @property
    def shade(self) -> int:
        """Color: 2 and 1 = retrieval helps (blue), -1 and -2 = it hurts (orange), 0 = about the same, or only
        blanks."""
        if self.text.isspace():
            return 0
        return int(np.sign(self.gain)) * sum(abs(self.gain) >= bits for bits in SHADE_BITS)


@dataclass(frozen=True)
class CopiedFrom:
    """A source as text, cut into parts that were copied (True) and others.

    Attributes:
        number: of the source.
        document: its document.
        parts: the text.
        is_neighbor: False = the source was found in the whole datastore.
    """

    number: int
    document: str
    parts: list[tuple[str, bool]]
    is_neighbor: bool = True

    @property
    def shortened(self) -> list[tuple[str, bool]]:
        """The parts, of the others only the characters next to copied ones."""
        out, last = list[tuple[str, bool]](), len(self.parts) - 1
        for number, (text, copied) in enumerate(self.parts):
            before = "" if number == 0 else text[:_AROUND]
            after = "" if number == last else text[-_AROUND:]
            is_short = copied or len(text) <= len(before) + len(after) + len("…")
            out.append((text, copied) if is_short else (f"{before}…{after}", False))
        return out


@dataclass(frozen=True)
class ColoredPassage:
    """A passage colored by the gain of its tokens, and the sources that it could copy from.

    Attributes:
        title: which passage it is.
        before: the end of the text before it.
        pieces: its text.
        sources: the neighbors, and documents of the datastore that it was copied from.
    """

    title: str
    before: str
    pieces: list[Piece]
    sources: list[CopiedFrom]

    @property
    def used(self) -> list[CopiedFrom]:
        """The sources that a piece names."""
        numbers = {piece.source for piece in self.pieces}
        return [source for source in self.sources if source.number in numbers]

    @property
    def unused(self) -> list[CopiedFrom]:
        """The other sources: neighbors without a copied run."""
        return [source for source in self.sources if source not in self.used]


def colored(
    passage: Passage, title: str, tokenizer: Tokenizer, retrieval: RetrievalSet, index: SuffixIndex | None = None
) -> ColoredPassage:
    """A passage as text: pieces with their gains, and the sources with the copied parts marked.

    Sources are the neighbors, and with the sorted prefixes `index` the documents of the whole datastore that were
    copied from.
    """
    before, text, ends = _text_of(passage, tokenizer)
    runs, placed = copied_runs(passage), [] if index is None else datastore_runs(passage, index)
    sources = _neighbors(passage, tokenizer, retrieval, runs)
    numbers = {run.stop: (run.start, run.neighbor + 1) for run in runs}
    # A source for runs of punctuation alone would say little.
    placed = [run for run in placed if any(map(str.isalnum, text[slice(*characters(ends, run.start, run.stop))]))]
    for document in dict.fromkeys(str(run.place.document["id"]) for run in placed):
        of_document = [run for run in placed if str(run.place.document["id"]) == document]
        number = len(passage.neighbor_tokens) + 1 + len([source for source in sources if not source.is_neighbor])
        numbers |= {run.stop: (run.start, number) for run in of_document}
        assert index is not None
        sources.append(CopiedFrom(number, document, _excerpts(of_document, index.split, tokenizer), is_neighbor=False))
    return ColoredPassage(title, before, list(_pieces(passage, text, ends, numbers)), sources)


def _text_of(passage: Passage, tokenizer: Tokenizer) -> tuple[str, str, list[int]]:
    """The end of the text before a passage, its own text, and `token_ends` of its tokens. A character of both is of the
    passage."""
    context = passage.before[-_BEFORE:]
    text, ends = token_ends(tokenizer.decode_batch, np.concatenate([context, passage.tokens]))
    border = ends[len(context) - 1] if len(context) else 0
    own = text[border:].rstrip(_HALF)
    return text[:border].lstrip(_HALF), own, [min(end - border, len(own)) for end in ends[len(context) :]]


def _neighbors(
    passage: Passage, tokenizer: Tokenizer, retrieval: RetrievalSet, runs: Sequence[CopiedRun]
) -> list[CopiedFrom]:
    """The neighbors of a passage, numbered from 1."""
    present = [neighbor for neighbor, tokens in enumerate(passage.neighbor_tokens) if len(tokens)]
    metadata = retrieval.metadata(passage.neighbor_ids[present]) if present else []
    sources = []
    for neighbor, row in zip(present, metadata, strict=True):
        copied = [(run.position, run.position + run.stop - run.start) for run in runs if run.neighbor == neighbor]
        parts = _parts(tokenizer, passage.neighbor_tokens[neighbor], copied)
        sources.append(CopiedFrom(neighbor + 1, str(row["id"]), parts))
    return sources


def _excerpts(runs: Sequence[DatastoreRun], split: Split, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The parts of a document around runs; True = copied."""
    m, (chunk, _) = split.chunk_length, runs[0].place.last
    _, first, stop = (int(ids[0]) for ids in split.documents_of(np.array([chunk])))
    end = (stop - 1) * m + int(split.lengths.read(stop - 1, stop)[0])
    # Positions in all tokens of the split; only the last chunk of a document is padded.
    copied = sorted(
        (
            run.place.last[0] * m + run.place.last[1] + 1 - (run.stop - run.start),
            run.place.last[0] * m + run.place.last[1] + 1,
        )
        for run in runs
    )
    windows: list[list[int]] = []
    for begin, after in copied:
        window = [max(first * m, begin - _TOKENS_AROUND), min(end, after + _TOKENS_AROUND)]
        if windows and window[0] <= windows[-1][1]:
            windows[-1][1] = max(windows[-1][1], window[1])
        else:
            windows.append(window)
    parts: list[tuple[str, bool]] = [("…", False)] if windows[0][0] > first * m else []
    for begin, after in windows:
        low = begin // m
        tokens = split.tokens.read(low, -(-after // m)).reshape(-1)[begin - low * m : after - low * m].astype(np.int64)
        inside = [(a - begin, b - begin) for a, b in copied if begin <= a < after]
        parts += [*_parts(tokenizer, tokens, inside), ("…" if after < end else "", False)]
    return parts


def _pieces(passage: Passage, text: str, ends: list[int], numbers: dict[int, tuple[int, int]]) -> Iterator[Piece]:
    """The text in pieces; line breaks and indentation around a word are pieces without gain. `numbers`: end of a run ->
    start, number of its source."""
    groups = [(start, stop, slice(*characters(ends, start, stop))) for start, stop in character_groups(ends)]
    named = {}
    for run_stop, (run_start, number) in numbers.items():
        words = [start for start, stop, part in groups if run_start < stop <= run_stop and text[part].strip()]
        if words:  # not only blanks
            named[words[-1]] = number
    for start, stop, part in groups:
        word, gain = text[part], float(passage.gains[start:stop].sum())
        before, after = len(word) - len(word.lstrip()), len(word.rstrip())
        if before >= after:  # only blanks
            yield Piece(word, gain)
            continue
        before = 0 if word.startswith(" ") and before == 1 else before  # a single space belongs to its word
        split = (Piece(word[:before]), Piece(word[before:after], gain, named.get(start, 0)), Piece(word[after:]))
        yield from (piece for piece in split if piece.text)


def _parts(tokenizer: Tokenizer, tokens: np.ndarray, runs: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The text of a source in parts; True = copied. `runs`: of its tokens, [start, stop)."""
    text, ends = token_ends(tokenizer.decode_batch, tokens)
    copied = np.zeros(len(text) + 1, dtype=bool)
    for start, stop in runs:
        begin, end = characters(ends, start, stop)
        copied[begin:end] = True
    whole = len(text) - len(text.lstrip(_HALF)), len(text.rstrip(_HALF))
    changes = (np.flatnonzero(copied[1:-1] != copied[:-2]) + 1).tolist()
    borders = [whole[0], *(border for border in changes if whole[0] < border < whole[1]), whole[1]]
    return [(text[a:b], bool(copied[a])) for a, b in pairwise(borders) if b > a]
