"""`retro trace`: which parts of a text occur verbatim in a datastore."""

import sys
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import PositiveInt

from indexing.store.datastore import Datastore
from indexing.store.settings import settings
from indexing.suffixes.search import SuffixIndex, trace
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.commands.datastore import indented
from pipelines.results import Format, print_result
from pipelines.terminal import one_line


@settings
class TraceOptions:
    """Show which parts of a text occur verbatim in a datastore, how often, and in which documents. The text `-` is read from standard
    input. The datastore needs the stage `suffixes`: `retro index CONFIG --stage suffixes`."""

    least: PositiveInt = 8
    """Tokens of the shortest run that is shown."""
    documents: PositiveInt = 3
    """Documents that are named for each run."""
    format: Format = "text"
    """Print `text` or `json`."""


@dataclass(frozen=True)
class TracedRun:
    """Tokens of the text that occur in a row: the first one and their number, as text, how often, and in which documents."""

    first_token: int
    tokens: int
    text: str
    occurrences: int
    documents: list[str]

    def __str__(self) -> str:
        times = "once" if self.occurrences == 1 else f"{self.occurrences:,} times"
        names = ", ".join(map(one_line, self.documents))
        return f"{self.tokens} tokens from token {self.first_token}, {times}, in {names}\n{indented(self.text)}"


def trace_text(datastore: str, text: str, options: TraceOptions) -> int:
    """`retro trace DATASTORE "text"`."""
    folder = Datastore.open(datastore).folder
    index, tokenizer = SuffixIndex.open(folder), Tokenizer.open(folder / "tokenizer")
    tokens = np.array(tokenizer.encode(sys.stdin.read() if text == "-" else text), dtype=np.int64)
    runs, in_run = [], np.zeros(len(tokens), dtype=bool)
    for run in trace(index, tokens, options.least):
        in_run[run.first : run.stop] = True
        words, names = tokenizer.decode(tokens[run.first : run.stop]), index.documents_of(run.match, options.documents)
        runs.append(TracedRun(run.first, run.stop - run.first, words, run.match.count, names))
    share = {"tokens": len(tokens), "tokens_in_runs": int(in_run.sum())}
    summary = (
        f"{share['tokens_in_runs']:,} of {len(tokens):,} tokens are in runs of at least {options.least} tokens that occur in "
        f"{datastore}"
    )
    print_result(share | {"runs": [asdict(run) for run in runs]}, "\n".join([summary, *map(str, runs)]), options.format)
    return 0
