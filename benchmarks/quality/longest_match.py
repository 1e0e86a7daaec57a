"""What a model gains if it copies, at every token, from the longest match of the preceding tokens anywhere in a datastore.

    retro add-retrieval MODEL --datastore DATASTORE --output ADDED      # a model that copies from 4 neighbors of each chunk
    retro index CONFIG --stage suffixes
    python -m benchmarks.quality.longest_match ADDED DATASTORE [--tokens 20000] [--output FILE]

infini-gram's rule (Liu et al. 2024, arXiv 2401.17377): the tokens that follow the longest match vote, p = (1 - g) p_model + g votes.
The gate g is a table over the length of the match, whether all votes agree, and log2 of their number. It is fitted by expectation
maximization on half of the held-out documents and measured on the other half. The same rule is applied to the text of the document
itself ("own context"), which is the baseline of a model that copies without a datastore; sources are added one after another.
"""

import argparse
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, markdown, say, write
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, Split
from indexing.suffixes.search import SuffixIndex
from pipelines.results import Table
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.inference.language_model import LanguageModel

BOUNDS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])
"""Match lengths at which a row of the gate's table begins."""
LONGEST = 64
ALONE, CONTEXT, STORE = "model alone", "+ own context", "+ datastore"
_ROUNDS = 60


@dataclass(frozen=True)
class Votes:
    """What followed the longest match, for each of n tokens.

    Attributes:
        length: [n] tokens of the match, 0 = none.
        total: [n] votes.
        most: [n] votes for the token with the most.
        right: [n] votes for the token of the text.
    """

    length: np.ndarray
    total: np.ndarray
    most: np.ndarray
    right: np.ndarray

    @property
    def cells(self) -> np.ndarray:
        """Rows of the gate's table, [n]."""
        length = np.searchsorted(BOUNDS, self.length, side="right")
        agree, count = self.most == self.total, np.log2(self.total.clip(min=1)).astype(int).clip(max=3)
        return (length * 2 + agree) * 4 + count


def held_out_documents(split: Split, limit: int) -> list[np.ndarray]:
    """Whole documents with at least `limit` tokens together."""
    texts: list[np.ndarray] = []
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)):
        tokens, lengths = split.tokens.read(first, stop), split.lengths.read(first, stop)
        texts.append(
            np.concatenate([row[:length] for row, length in zip(tokens, lengths, strict=True)]).astype(np.int64)
        )
        if sum(map(len, texts)) >= limit:
            break
    return texts


def votes_of_datastore(index: SuffixIndex, text: np.ndarray) -> list[tuple[int, int, int, int]]:
    """A row of `Votes` for each token of a text except its first."""
    rows = []
    for at in range(1, len(text)):
        match = index.longest_match(text[max(0, at - LONGEST) : at])
        tokens, counts = index.next_tokens(match)
        if len(counts):
            rows.append((match.length, int(counts.sum()), int(counts[0]), int(counts[tokens == text[at]].sum())))
        else:
            rows.append((0, 0, 0, 0))
    return rows


def votes_of_context(text: np.ndarray) -> list[tuple[int, int, int, int]]:
    """The same from the tokens before, for the match lengths of the table."""
    rows, words = [], text.tolist()
    followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for at in range(1, len(words)):
        keys = [tuple(words[at - order : at]) for order in BOUNDS.tolist() if order <= at]
        known = [key for key in keys if key in followed]
        votes = followed[known[-1]] if known else Counter[int]()
        most = max(votes.values(), default=0)
        rows.append((len(known[-1]) if known else 0, votes.total(), most, votes[words[at]] if known else 0))
        for key in keys:
            followed[key][words[at]] += 1
    return rows


def mixed(probabilities: np.ndarray, votes: Votes, half: np.ndarray) -> np.ndarray:
    """Probabilities [n] of the tokens with these votes, with the gate fitted on the other half of the documents."""
    cells, copied, out = votes.cells, votes.right / votes.total.clip(min=1), probabilities.copy()
    has_votes = votes.total > 0
    for side in (0, 1):
        fitted, measured = has_votes & (half != side), has_votes & (half == side)
        gate, size = np.full(cells.max() + 1, 0.2), cells.max() + 1
        for _ in range(_ROUNDS):
            both = (1 - gate[cells]) * probabilities + gate[cells] * copied
            share = gate[cells] * copied / both.clip(min=1e-30)
            gate = (np.bincount(cells[fitted], share[fitted], size) + 0.2) / (
                np.bincount(cells[fitted], minlength=size) + 1
            )
        out[measured] = ((1 - gate[cells]) * probabilities + gate[cells] * copied)[measured]
    return out


def result_of(nats: np.ndarray, documents: np.ndarray, num_bytes: np.ndarray) -> SetResult:
    """Nats of tokens [n] as the measurement of documents with these bytes, for intervals."""
    return SetResult("valid", 0, len(nats), 0.0, np.bincount(documents, nats), num_bytes)


def change(measured: SetResult, reference: SetResult) -> str:
    """Difference in percent, with its 95% interval in a bootstrap over documents."""
    difference, low, high = compare(measured, reference)
    return f"{difference:+.1f}% ({low:+.1f} to {high:+.1f})"


def probabilities(model: LanguageModel, texts: list[np.ndarray], k: int, limit: Budget) -> dict[str, np.ndarray]:
    """The model's probabilities of all tokens of as many documents as fit into the time, without and with k neighbors."""
    scores: dict[str, list[np.ndarray]] = {ALONE: [], f"+ {k} neighbors": []}
    for text in limit.each(texts, "document", len):
        for rows, neighbors in zip(scores.values(), (0, k), strict=True):
            rows += model.score([text], neighbors)
    return {name: np.exp(np.concatenate(rows)) for name, rows in scores.items()}


def combined(scored: dict[str, np.ndarray], context: Votes, store: Votes, half: np.ndarray) -> dict[str, np.ndarray]:
    """Probabilities of all combinations of the sources."""
    (_, base), (near_name, near) = scored.items()
    with_context = mixed(base, context, half)
    return {
        ALONE: base,
        CONTEXT: with_context,
        near_name: near,
        STORE: mixed(base, store, half),
        f"{near_name} {STORE}": mixed(near, store, half),
        f"{CONTEXT} {STORE}": mixed(with_context, store, half),
        f"{CONTEXT} {near_name} {STORE}": mixed(mixed(near, context, half), store, half),
    }


def table_by_length(store: Votes, nats: dict[str, np.ndarray], near: str) -> Table:
    """Mean nats of the tokens with a longest match of each length."""
    shown, rows = (ALONE, near, STORE), []
    bounds = [0, *BOUNDS.tolist(), 10**9]
    for low, high in pairwise(bounds):
        here = (store.length >= low) & (store.length < high)
        if here.any():
            label = f"{low} and more" if high == bounds[-1] else str(low) if high == low + 1 else f"{low} to {high - 1}"
            rows.append([label, f"{here.mean():.1%}", *(f"{nats[name][here].mean():.2f}" for name in shown)])
    return Table(["longest match (tokens)", "tokens", *(f"nats, {name}" for name in shown)], rows)


def main() -> None:
    """Measure one model with one datastore."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="held-out tokens, in whole documents")
    parser.add_argument("--k", type=int, default=4, help="neighbors of the row that copies from neighbors")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    add_minutes(parser)
    options = parser.parse_args()
    limit, datastore = budget(options), Datastore.open(options.datastore)
    texts, index = held_out_documents(datastore.valid, options.tokens), SuffixIndex.open(options.datastore)
    model = LanguageModel.open(options.checkpoint, Retriever.open(options.datastore))
    scored = probabilities(model, texts, options.k, limit)
    ends = np.cumsum([len(text) - 1 for text in texts])
    texts = texts[: int(np.searchsorted(ends, len(scored[ALONE]))) + 1]
    documents = np.repeat(np.arange(len(texts)), [len(text) - 1 for text in texts])
    total = sum(datastore.manifest["splits"]["train"]["tokens"])
    say(f"{len(documents):,} held-out tokens of {len(texts)} documents; {total:,} in the datastore")

    began = time.process_time()
    store = Votes(*np.array([row for text in texts for row in votes_of_datastore(index, text)]).T)
    each = (time.process_time() - began) / len(documents)
    say(f"longest matches in the datastore: {1e6 * each:.0f} CPU microseconds a token")
    context = Votes(*np.array([row for text in texts for row in votes_of_context(text)]).T)
    sources = combined(scored, context, store, documents % 2)
    nats = {name: -np.log(values.clip(min=1e-30)) for name, values in sources.items()}
    num_bytes = np.array([len(model.tokenizer.decode(text).encode()) for text in texts], dtype=np.float64)
    results = {name: result_of(values, documents, num_bytes) for name, values in nats.items()}
    body = [
        [name, f"{result.bits_per_byte:.4f}", *(change(result, results[other]) for other in (ALONE, CONTEXT))]
        for name, result in results.items()
    ]
    by_length = table_by_length(store, nats, [*scored][1])
    say("\n" + markdown(Table(["", "bits per byte", "against the model alone", "against own context"], body)))
    say("\n" + markdown(by_length))
    if options.output:
        figures = {"rows": body, "by_length": by_length.rows, "tokens": len(documents), "documents": len(texts)}
        write(options.output, figures)


if __name__ == "__main__":
    main()
