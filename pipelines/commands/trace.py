"""`retro trace`: which parts of a text occur verbatim in a datastore."""

import os
import sys
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import PositiveInt

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.settings import settings
from indexing.suffixes.search import SHORTEST_RUN, SuffixIndex, trace
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.commands.datastore import indented
from pipelines.results import Format, print_result
from pipelines.terminal import one_line
from retro.server.spans import characters, token_ends

_LONGEST_NAME = 255  # of a file


@settings
class TraceOptions:
    """Show which parts of a text occur verbatim in a datastore, how often, and in which documents. The text `-` is read from standard
    input. The datastore needs the stage `suffixes`: `retro index CONFIG --stage suffixes`."""

    least: PositiveInt = SHORTEST_RUN
    """Tokens of the shortest run that is shown."""
    documents: PositiveInt = 3
    """Documents that are named for each run."""
    format: Format = "text"
    """Print `text` or `json`."""


@dataclass(frozen=True)
class TracedRun:
    """Tokens of the text that occur in a row.

    Attributes:
        first_token, tokens: the first token and the number of tokens.
        characters: [start, stop) in the text of all tokens.
        text: of these characters.
        occurrences: how often they occur.
        documents: ids of documents that they occur in.
    """

    first_token: int
    tokens: int
    characters: tuple[int, int]
    text: str
    occurrences: int
    documents: list[str]

    def __str__(self) -> str:
        times = "once" if self.occurrences == 1 else f"{self.occurrences:,} times"
        example = "for example in" if self.occurrences > len(self.documents) else "in"
        names = ", ".join(map(one_line, self.documents))
        start, stop = self.characters
        return f"characters {start:,} to {stop:,} ({self.tokens:,} tokens), {times}, {example} {names}\n{indented(self.text)}"


def trace_text(datastore: str, text: str, options: TraceOptions) -> int:
    """`retro trace DATASTORE "text"`."""
    folder = Datastore.open(datastore).folder
    index, tokenizer = SuffixIndex.open(folder), Tokenizer.open(folder / "tokenizer")
    tokens = tokenizer.encode(_read(datastore, text)).astype(np.int64)
    whole, ends = token_ends(tokenizer.decode_batch, tokens)
    runs, in_run = [], np.zeros(len(tokens), dtype=bool)
    for run in trace(index, tokens, options.least):
        in_run[run.first : run.stop] = True
        start, stop = characters(ends, run.first, run.stop)
        names = [str(place.document["id"]) for place in index.places(run.match, options.documents)]
        size, count = run.stop - run.first, index.count(run.match)
        runs.append(TracedRun(run.first, size, (start, stop), whole[start:stop], count, names))
    share = {"tokens": len(tokens), "tokens_in_runs": int(in_run.sum())}
    summary = (
        f"{share['tokens_in_runs']:,} of {len(tokens):,} tokens are in runs of at least {options.least} tokens that occur in "
        f"{datastore}"
    )
    if len(tokens) < options.least:
        summary += f"\nThe text is shorter than that: --least {len(tokens)} looks for all of it."
    print_result(share | {"runs": [asdict(run) for run in runs]}, "\n".join([summary, *map(str, runs)]), options.format)
    return 0


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
