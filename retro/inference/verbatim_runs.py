"""Runs of texts that occur verbatim in the training documents of datastores: of a given text, and of a text while it is
generated.

tokens ─► `trace`, datastore by datastore ─► runs in the order of the text ─► number of occurrences, places in documents
prompt, then each generated token ─► `Tracer` ─► runs that reach into the answer
runs ─► `grouped` ─► one run for equal and overlapping ones, those without a word last

Each datastore is searched on its own: a run is as long as possible in its datastore, and another one can have a longer
run there.
"""

import re
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from indexing.progress import during
from indexing.store.datastore import Datastore, Split
from indexing.store.remote import cache_folder, datastore_name, url_of
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from indexing.suffixes.order import FOLDER
from indexing.suffixes.search import SHORTEST_RUN, Match, Run, SuffixIndex, Tracer
from retro.inference.spans import ChunkTexts, characters

if TYPE_CHECKING:  # `retro trace` needs neither torch nor Faiss
    from retro.inference.generation import GeneratedToken

_PLACES = 3  # of a run of a generated text
_WORD = re.compile(r"\b_*[^\W\d_]")  # its begin: a number such as 0x00 or 1e5 is none
_DIGITS = 4  # different ones of a number that tells something


@dataclass(frozen=True)
class TracedDatastore:
    """A datastore whose documents are searched for runs.

    Attributes:
        name: for clients.
        number: in the retrieval set.
        index: its sorted prefixes.
    """

    name: str
    number: int
    index: SuffixIndex


@dataclass(frozen=True)
class Place:
    """An occurrence of a run. Both ends are the id of a chunk (`GET /chunks/ID`) and a character of its text."""

    document_id: str
    title: str
    source: str
    start: Annotated[tuple[int, int], Field(description="The chunk of the first token, and the first character.")]
    stop: Annotated[
        tuple[int, int], Field(description="The chunk of the last token, and the character after the last one.")
    ]


@dataclass(frozen=True)
class TracedRun:
    """A run of tokens that occurs verbatim in a datastore, as long as possible to both sides.

    It stands for equal and overlapping ones of the same datastore: see `grouped`.
    """

    text: Annotated[tuple[int, int], Field(description="Characters [start, stop) of the text of all tokens.")]
    first_token: Annotated[
        int, Field(description="Number of its first token: of the text, or of the answer (negative in the prompt).")
    ]
    tokens: int
    occurrences: int
    datastore: Annotated[str, Field(description="Name of the datastore, see `GET /datastore`.")]
    places: Annotated[
        list[Place],
        Field(
            description="One occurrence in each of the first documents that it occurs in. Only the longest 1,024 different runs "
            "of a text have places."
        ),
    ]
    distinctive: Annotated[
        bool, Field(description="Whether it has a word, or a number with four different digits. Others come last.")
    ]
    count: Annotated[
        int,
        Field(
            description="Runs of the text that this one stands for, itself included: those of the same tokens, in any number and "
            "order, and those that overlap it by at least half of their length."
        ),
    ] = 1
    others: Annotated[
        tuple[tuple[int, int], ...],
        Field(description="Characters [start, stop) of the other runs that it stands for, joined where they overlap."),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class GeneratedRun(TracedRun):
    """A run of at least 8 tokens that occurs verbatim in a datastore and has generated tokens."""

    text: Annotated[
        tuple[int, int], Field(description="Characters [start, stop) of the answer's text that were generated.")
    ]
    prompt_tokens: Annotated[int, Field(description="Tokens of the run that are the end of the prompt.")]
    group: Annotated[
        int,
        Field(
            description="Equal for runs of the same tokens, in any number and order. For clients of a stream that join its runs."
        ),
    ]


def is_traced(split: Split) -> bool:
    """Whether the datastore of a split has the stage `suffixes`."""
    return Datastore.open(split.folder).has(FOLDER)


def open_sorted_prefixes(folder: Path) -> SuffixIndex:
    """Open the sorted prefixes of a datastore.

    They are memory-mapped, and so are the tokens of each shard that a search reads. So of a datastore at a URL these
    files are fetched whole, unless the cache has them: the sorted prefixes now, tokens as they are needed.

    Raises:
        InputError: there are none, a file is missing or damaged, or the URL cannot be read.
    """
    message = f"opening the sorted prefixes of {datastore_name(folder)}"
    if url_of(folder) is not None:
        message = f"fetching the sorted prefixes of {datastore_name(folder)} into {cache_folder()}"
    with during("%s", message):
        return SuffixIndex.open(folder)


def traced_datastores(retrieval: RetrievalSet, opened: SuffixIndex | None = None) -> list[TracedDatastore]:
    """Open the datastores of a retrieval set that have the stage `suffixes`.

    Args:
        retrieval: the datastores.
        opened: sorted prefixes of the first one, if they are open already.

    Raises:
        InputError: none has the stage, or a file is damaged.
    """
    numbered = [(number, split) for number, split in enumerate(retrieval.splits) if is_traced(split)]
    if not numbered:
        Datastore.open(retrieval.own.folder).require(FOLDER)
    return [
        TracedDatastore(
            datastore_name(split.folder),
            number,
            opened if opened and number == 0 else open_sorted_prefixes(split.folder),
        )
        for number, split in numbered
    ]


def in_order(datastores: Sequence[TracedDatastore], runs: Sequence[Sequence[Run]]) -> list[tuple[TracedDatastore, Run]]:
    """The runs of a text in each of the datastores, all in the order of the text."""
    pairs = [(datastore, run) for datastore, in_it in zip(datastores, runs, strict=True) for run in in_it]
    return sorted(pairs, key=lambda pair: (pair[1].first, pair[1].stop))


def tokens_in(runs: Iterable[Run]) -> int:
    """How many tokens of a text are in one of its runs."""
    tokens, reached = 0, 0
    for first, stop in sorted((run.first, run.stop) for run in runs):
        tokens += max(0, stop - max(first, reached))
        reached = max(reached, stop)
    return tokens


class Span(NamedTuple):
    """A run, as far as `grouped` compares it.

    Attributes:
        datastore: its name.
        first, stop: its tokens in the text.
        same: equal for runs of the same tokens.
        distinctive: as `TracedRun.distinctive`.
    """

    datastore: str
    first: int
    stop: int
    same: Hashable
    distinctive: bool

    @classmethod
    def of(cls, datastore: str, run: Run, tokens: np.ndarray, text: str) -> "Span":
        """The span of a run of a text [t], from the text of its own tokens."""
        return cls(datastore, run.first, run.stop, same_tokens(tokens[run.first : run.stop]), is_distinctive(text))


def same_tokens(tokens: np.ndarray) -> Hashable:
    """Equal for runs of the same tokens in any number and order: a repeated line has runs that begin at each of its
    places."""
    return frozenset(tokens.tolist())


def is_distinctive(text: str) -> bool:
    """Whether a text has a word, or a number with four different digits."""
    return _WORD.search(text) is not None or any(len(set(number)) >= _DIGITS for number in re.findall(r"\w+", text))


def grouped(spans: Sequence[Span]) -> list[tuple[int, list[int]]]:
    """Let each run stand for the shorter ones of its datastore that say the same, so that repeats do not hide other
    runs.

    These are runs of the same tokens, and runs that have at least half of their tokens in it.

    Returns:
        indices of the runs that are left, in the order of the text, those without a word last; and of those that each
        stands for.
    """
    groups, kept = dict[int, list[int]](), defaultdict[str, list[tuple[int, int, int]]](list)
    same = dict[tuple[str, Hashable], int]()
    for index in sorted(
        range(len(spans)), key=lambda index: (spans[index].first - spans[index].stop, spans[index].first)
    ):
        span = spans[index]
        into = same.get((span.datastore, span.same))
        if into is None:
            into = _overlapped(kept[span.datastore], span)
        if into is None:
            groups[index], into = [], index
            insort(kept[span.datastore], (span.first, span.stop, index))
        else:
            groups[into].append(index)
        same.setdefault((span.datastore, span.same), into)
    left = sorted(groups, key=lambda index: (not spans[index].distinctive, spans[index].first, spans[index].stop))
    return [(index, sorted(groups[index])) for index in left]


def _overlapped(kept: list[tuple[int, int, int]], span: Span) -> int | None:
    """The index of the longer run that most of a run is in, at least half. `kept`: first and stop of longer runs and
    their indices, in order."""
    at = bisect(kept, (span.first,))
    near = kept[max(0, at - 1) : at + 1]  # none contains another, so others share less
    shared, index = max(
        ((min(stop, span.stop) - max(first, span.first), index) for first, stop, index in near), default=(0, 0)
    )
    return index if 2 * shared >= span.stop - span.first else None


def ranges_of(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges [start, stop) in order, joined where they overlap or touch."""
    joined = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def grouped_runs(runs: Sequence["GeneratedRun"]) -> list["GeneratedRun"]:
    """The runs of a generated text as `grouped` leaves them."""
    spans = [
        Span(run.datastore, run.first_token, run.first_token + run.tokens, run.group, run.distinctive) for run in runs
    ]
    left = list[GeneratedRun]()
    for index, others in grouped(spans):
        group = [runs[index], *(runs[other] for other in others)]
        ranges = [*(run.text for run in group[1:]), *(one for run in group for one in run.others)]
        left.append(replace(runs[index], count=sum(run.count for run in group), others=ranges_of(ranges)))
    return left


class PlaceFinder:
    """Finds the places of runs in a datastore. `texts`: of the request."""

    def __init__(self, datastore: TracedDatastore, texts: ChunkTexts) -> None:
        self.datastore, self._texts = datastore, texts

    def of(self, match: Match, most: int) -> list[Place]:
        """Return one place of a match in each of up to `most` documents."""
        places = self.datastore.index.places(match, most)
        return [self._place(place.document, place.first, place.last) for place in places]

    def _place(self, document: dict[str, Any], first: tuple[int, int], last: tuple[int, int]) -> Place:
        """Convert the first and the last token of an occurrence, each its chunk and its position there."""
        return Place(
            document_id=str(document["id"]),
            title=str(document.get("title") or ""),
            source=str(document.get("source") or ""),
            start=(self._id(first[0]), characters(self._ends(first[0]), first[1], first[1] + 1)[0]),
            stop=(self._id(last[0]), characters(self._ends(last[0]), last[1], last[1] + 1)[1]),
        )

    def _id(self, chunk: int) -> int:
        return int(neighbor_ids(self.datastore.number, np.array(chunk)))

    def _ends(self, chunk: int) -> list[int]:
        split = self.datastore.index.split
        tokens, lengths = split.tokens.read(chunk, chunk + 1)[0], split.lengths.read(chunk, chunk + 1)
        return self._texts.ends(self._id(chunk), tokens[: lengths[0]].astype(np.int64))


class GeneratedRuns:
    """Finds the runs of one generated text, from its first token to its last."""

    def __init__(
        self,
        datastores: Sequence[TracedDatastore],
        texts: ChunkTexts,
        prompt: np.ndarray,
        start: int = 0,
        least: int = SHORTEST_RUN,
    ) -> None:
        """Begin after a prompt.

        Args:
            datastores: the documents that are searched.
            texts: of the request.
            prompt: [t] token ids.
            start: characters of the answer before the generated text.
            least: tokens of the shortest run.
        """
        self._prompt, self._tokens, self._texts = len(prompt), prompt.tolist(), texts
        self._tracers = [
            (PlaceFinder(datastore, texts), Tracer(datastore.index, least, prompt)) for datastore in datastores
        ]
        self._ends = [start]  # characters of the answer up to each generated token

    def add(self, token: "GeneratedToken") -> list[GeneratedRun]:
        """Return the runs that end before the next token; after the last token, also the runs at the end.

        They are not grouped: a later one may be longer. `grouped_runs` groups those of a whole text.
        """
        self._ends.append(self._ends[-1] + len(token.text))
        self._tokens.append(token.token)
        ended = [(places, run) for places, tracer in self._tracers for run in tracer.add(token.token)]
        if token.finish_reason is not None:
            ended += [(places, run) for places, tracer in self._tracers for run in tracer.rest()]
        generated = [self._generated(places, run) for places, run in ended if run.stop > self._prompt]
        return [run for run in generated if run.text[0] < run.text[1] and run.occurrences]

    def _generated(self, places: PlaceFinder, run: Run) -> GeneratedRun:
        first, tokens = max(0, run.first - self._prompt), np.array(self._tokens[run.first : run.stop], np.int64)
        return GeneratedRun(
            text=(self._ends[first], self._ends[run.stop - self._prompt]),
            first_token=run.first - self._prompt,
            tokens=run.stop - run.first,
            distinctive=is_distinctive(self._texts.text(tokens)),
            group=int.from_bytes(blake2b(np.unique(tokens).tobytes(), digest_size=6).digest()),
            prompt_tokens=max(0, self._prompt - run.first),
            occurrences=places.datastore.index.count(run.match),
            datastore=places.datastore.name,
            places=places.of(run.match, _PLACES),
        )
