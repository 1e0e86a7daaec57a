"""`retro trace`: which parts of a text occur verbatim in a datastore and in those that its neighbors come from."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import PositiveInt

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.settings import settings
from indexing.suffixes.search import SHORTEST_RUN, Run, trace
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.results import Format, print_result
from pipelines.cli.verbs.datastore import indented
from pipelines.cli.verbs.generate import such
from pipelines.terminal.output import one_line
from pipelines.terminal.units import counted, times
from retro.inference.spans import characters, token_ends

if TYPE_CHECKING:
    from retro.inference.verbatim_runs import Span, TracedDatastore

log = logging.getLogger("retro")

_LONGEST_NAME = 255  # of a file


@settings
class TraceOptions:
    """Show which parts of a text occur verbatim in a datastore, how often, and in which documents. The text `-` is read
    from standard input. The datastores of `neighbors.extra_datastores` are searched too. Each needs the
    stage `suffixes`:
    `retro index CONFIG --stage suffixes`."""

    least: PositiveInt = SHORTEST_RUN
    """Tokens of the shortest run that is shown."""
    documents: PositiveInt = 3
    """Documents that are named for each run."""
    format: Format = "text"
    """Print `text` or `json`."""


@dataclass(frozen=True)
class ShownRun:
    """Tokens of the text that occur in a row.

    Attributes:
        first_token, tokens: the first token and the number of tokens.
        characters: [start, stop) in the text of all tokens.
        text: of these characters.
        occurrences: how often they occur in the datastore.
        datastore: its name.
        documents: ids of documents that they occur in.
        distinctive, count, others: as in `TracedRun`.
    """

    first_token: int
    tokens: int
    characters: tuple[int, int]
    text: str
    occurrences: int
    datastore: str
    documents: list[str]
    distinctive: bool
    count: int
    others: tuple[tuple[int, int], ...]

    def line(self, named: bool) -> str:
        """Two lines or more for reading. `named`: with the name of the datastore."""
        example = "for example in" if self.occurrences > len(self.documents) else "in"
        names = ", ".join(map(one_line, self.documents)) + f" of {self.datastore}" * named
        start, stop = self.characters
        where = f"{times(self.occurrences)}, {example} {names}"
        return f"characters {start:,} to {stop:,} ({counted(self.tokens, 'token')}), {where}{such(self.count)}\n{indented(self.text)}"


def trace_text(datastore: str, text: str, options: TraceOptions) -> int:
    """`retro trace DATASTORE "text"`."""
    from retro.inference.verbatim_runs import Span, grouped, in_order, tokens_in, traced_datastores

    opened = Datastore.open(datastore)
    retrieval, tokenizer = RetrievalSet.of(opened), Tokenizer.open(opened.folder / "tokenizer")
    traced = traced_datastores(retrieval)
    names = [searched.name for searched in traced]
    for name in (datastore_name(split.folder) for split in retrieval.splits):
        if name not in names:
            log.warning("%s is not searched: it has no stage `suffixes`", name)
    tokens = tokenizer.encode(_read(datastore, text)).astype(np.int64)
    whole, ends = token_ends(tokenizer.decode_batch, tokens)
    pairs = in_order(traced, [trace(searched.index, tokens, options.least) for searched in traced])
    texts = [whole[slice(*characters(ends, run.first, run.stop))] for _, run in pairs]
    spans = [Span.of(searched.name, run, tokens, own) for (searched, run), own in zip(pairs, texts, strict=True)]
    runs = [
        _traced_run(*pairs[index], spans[index], [spans[other] for other in others], whole, ends, options.documents)
        for index, others in grouped(spans)
    ]
    share = {"tokens": len(tokens), "tokens_in_runs": tokens_in(run for _, run in pairs), "datastores": names}
    places = datastore if len(retrieval.splits) == 1 else " and ".join(names)
    summary = f"{share['tokens_in_runs']:,} of {len(tokens):,} tokens are in runs of at least {options.least} tokens that occur in {places}"
    if len(tokens) < options.least:
        summary += f"\nThe text is shorter than that: --least {len(tokens)} looks for all of it."
    elif not runs and options.least > 1:
        summary += f"\nNothing was found. Try a smaller --least, for example --least {max(1, options.least // 2)}."
    lines = [run.line(named=len(retrieval.splits) > 1) for run in runs]
    print_result(share | {"runs": [asdict(run) for run in runs]}, "\n".join([summary, *lines]), options.format)
    return 0


def _traced_run(
    datastore: "TracedDatastore",
    run: Run,
    span: "Span",
    others: Sequence["Span"],
    text: str,
    ends: list[int],
    documents: int,
) -> ShownRun:
    """A run of a text for printing, with the others that it stands for. `ends`: the character after each token.
    `documents`: how many are named at most."""
    from retro.inference.verbatim_runs import ranges_of

    index, (start, stop) = datastore.index, characters(ends, run.first, run.stop)
    names = [str(place.document["id"]) for place in index.places(run.match, documents)]
    ranges = ranges_of(characters(ends, other.first, other.stop) for other in others)
    return ShownRun(
        first_token=run.first,
        tokens=run.stop - run.first,
        characters=(start, stop),
        text=text[start:stop],
        occurrences=index.count(run.match),
        datastore=datastore.name,
        documents=names,
        distinctive=span.distinctive,
        count=1 + len(others),
        others=ranges,
    )


def _read(datastore: str, text: str) -> str:
    """Return the text, or that of standard input.

    Raises:
        InputError: it is empty, not UTF-8, or the name of a file.
    """
    if text != "-" and len(text) < _LONGEST_NAME and os.path.isfile(text):
        raise InputError(f"text = {text!r} is a file. To trace its text: retro trace {datastore} - < {text}")
    try:
        read = sys.stdin.read() if text == "-" else text
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text ({error}).") from error
    if not read.strip():
        raise InputError("the text to trace is empty. Give a text, or `-` for standard input.")
    return read
