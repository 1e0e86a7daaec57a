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
import json
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import add_minutes, budget, markdown, say, write
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, Split
from indexing.suffixes.search import SuffixIndex
from pipelines.results import Table
from retro.inference.language_model import LanguageModel

BOUNDS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])
"""Match lengths at which a row of the gate's table begins."""
LONGEST = 64
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


def change(nats: np.ndarray, reference: np.ndarray, documents: np.ndarray) -> str:
    """Difference in percent, with its 95% interval in a bootstrap over documents."""
    a, b = (np.bincount(documents, values) for values in (nats, reference))
    draws = np.random.default_rng(0).integers(0, len(a), (1000, len(a)))
    low, high = np.percentile(a[draws].sum(1) / b[draws].sum(1), [2.5, 97.5])
    return f"{100 * (a.sum() / b.sum() - 1):+.1f}% ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})"


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
    all_texts = held_out_documents(datastore.valid, options.tokens)
    index = SuffixIndex.open(options.datastore)
    model = LanguageModel.open(options.checkpoint, Retriever.open(options.datastore))
    texts: list[np.ndarray] = []
    scores: dict[int, list[np.ndarray]] = {0: [], options.k: []}
    for text in limit.each(all_texts, "document", len):
        texts.append(text)
        for k, rows_of_k in scores.items():
            rows_of_k += model.score([text], k)
    scored = {k: np.exp(np.concatenate(rows_of_k)) for k, rows_of_k in scores.items()}
    documents = np.repeat(np.arange(len(texts)), [len(text) - 1 for text in texts])
    num_bytes = sum(len(model.tokenizer.decode(text).encode()) for text in texts)
    total = sum(datastore.manifest["splits"]["train"]["tokens"])
    say(f"{len(documents):,} held-out tokens of {len(texts)} documents; {total:,} in the datastore")
    began = time.process_time()
    store = Votes(*np.array([row for text in texts for row in votes_of_datastore(index, text)]).T)
    say(
        f"longest matches in the datastore: {1e6 * (time.process_time() - began) / len(documents):.0f} CPU microseconds a token"
    )
    own, half = Votes(*np.array([row for text in texts for row in votes_of_context(text)]).T), documents % 2
    base, near = scored[0], scored[options.k]
    context = mixed(base, own, half)
    rows = {
        "model alone": base,
        "+ own context": context,
        f"+ {options.k} neighbors": near,
        "+ datastore": mixed(base, store, half),
        f"+ {options.k} neighbors + datastore": mixed(near, store, half),
        "+ own context + datastore": mixed(context, store, half),
        f"+ own context + {options.k} neighbors + datastore": mixed(mixed(near, own, half), store, half),
    }
    nats = {name: -np.log(p.clip(min=1e-30)) for name, p in rows.items()}
    bits = {name: float(values.sum() / math.log(2) / num_bytes) for name, values in nats.items()}
    body = [
        [name, f"{bits[name]:.4f}", *(change(values, nats[of], documents) for of in ("model alone", "+ own context"))]
        for name, values in nats.items()
    ]
    say("\n" + markdown(Table(["", "bits per byte", "against the model alone", "against own context"], body)))
    lengths = [0, *BOUNDS.tolist()]
    table = []
    for low, high in zip(lengths, [*lengths[1:], 10**9], strict=True):
        here = (store.length >= low) & (store.length < high)
        if here.any():
            means = [
                float(nats[name][here].mean()) for name in ("model alone", f"+ {options.k} neighbors", "+ datastore")
            ]
            label = str(low) if high == low + 1 else f"{low} to {high - 1}" if high < 10**9 else f"{low} and more"
            table.append([label, f"{here.mean():.1%}", *(f"{mean:.2f}" for mean in means)])
    header = ["longest match (tokens)", "tokens", "nats, model alone", f"+ {options.k} neighbors", "+ datastore"]
    say("\n" + markdown(Table(header, table)))
    if options.output:
        write(options.output, {"rows": body, "by_length": table, "tokens": len(documents), "documents": len(texts)})
        say(json.dumps({"written": str(options.output)}))


if __name__ == "__main__":
    main()
