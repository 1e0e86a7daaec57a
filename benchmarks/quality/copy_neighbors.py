"""Which neighbors can a model copy most from? Kinds of neighbors, their number, and the chunk length.

    python -m benchmarks.quality.copy_neighbors DATASTORE CHECKPOINT --output FOLDER [--chunk-lengths 16 32 64] [--k 1 2 4 8 16]

CHECKPOINT is a model without retrieval, trained on the datastore's text. For each kind of neighbors and each k, a copy head is
fitted as by `retro add-retrieval` (51 numbers), and scored on the held-out documents, ON against OFF. The model reads the text
once; only the neighbors differ, so any chunk length can be tried with the datastore's tokenizer and embedder.

| kind | |
|---|---|
| `embeddings` | exact search by the lexical embeddings: `neighbors.rerank = "embeddings"` |
| `tokens` | 64 of these candidates, chosen by shared tokens: `neighbors.rerank = "tokens"` |
| `tokens 256` | the same with 256 candidates |
| `n-grams` | as `tokens`, with shared bigrams too |
| `alone` | as `tokens`, but each candidate is scored alone, whatever the neighbors before it share |
| `alone, even` | without the larger weight of the end of the chunk, too |
| `bm25` | 64 candidates, ordered by BM25 of the chunk's tokens |
| `end` | 64 candidates, ordered by the longest run of tokens that ends the chunk; equal runs by distance |
| `sparse` | exact search of all chunks by BM25 of tokens, bigrams and trigrams |
| `oracle` | 64 candidates, ordered by what each saves in the next chunk: an upper bound that no search reaches |

A chunk of m tokens reads k neighbors of 2 m tokens, so equal k means equal neighbor tokens per token for every m. Neighbors of a
chunk are never from its own document. Results of finished kinds are kept in FOLDER, so the script resumes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from benchmarks.common import add_minutes, add_precision, budget, placement, say, seconds, write
from benchmarks.quality.copy_texts import CELLS, MANY, CutCorpus, Text, copied_nats, read_text
from indexing.store.datastore import Datastore
from indexing.tokenization.tokenizer import read_token_bytes
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.leakage import leakage_of
from retro.evaluation.sets import EvaluationSet
from retro.model.copy_matches import match_lengths

CANDIDATES = 64
LEAKAGE = 0.25


# --- kinds of neighbors --------------------------------------------------------------------------------------------

Found = dict[str, np.ndarray]
"""Ids [n, c] of the neighbors of the queries of `train` and `valid`, best first."""


def reordered(corpus: CutCorpus, count: int, score: Callable[[str, np.ndarray], np.ndarray]) -> Found:
    """Order the nearest `count` candidates by a score [n, count]; equal scores by distance."""
    found = {}
    for name, (ids, _) in corpus.nearest.items():
        near = ids[:, :count]
        order = np.argsort(np.where(near < 0, np.inf, -score(name, near)), axis=1, kind="stable")
        found[name] = np.take_along_axis(near, order, 1)
    return found


def shared(corpus: CutCorpus, name: str, ids: np.ndarray) -> np.ndarray:
    """Length of the longest run that ends at each token of the chunk and is in the candidate: [n, c, m] int8."""
    asked, longest = torch.from_numpy(corpus.asked(name).astype(np.int32)), min(16, corpus.m)
    padded = torch.nn.functional.pad(asked, (longest - 1, 0), value=-1)
    train, out = corpus.chunks["train"], np.empty((*ids.shape, corpus.m), dtype=np.int8)
    step = max(1, 4 * CELLS // (ids.shape[1] * corpus.m**2))
    for start in range(0, len(ids), step):
        block = slice(start, start + step)
        texts = train.tokens[ids[block]].astype(np.int32)
        texts[np.arange(corpus.m) >= train.lengths[ids[block]][..., None]] = -2
        out[block] = match_lengths(padded[block][:, None], torch.from_numpy(texts), longest).amax(-1).numpy()
    return out


def alone(corpus: CutCorpus, name: str, ids: np.ndarray, *, even: bool = False) -> np.ndarray:
    """Sum over the tokens of the chunk that the candidate contains of their weights: [n, c]."""
    contained = (shared(corpus, name, ids) >= 1).astype(np.float32)
    return np.einsum("ncm,nm->nc", contained, _weights(corpus, name, even))


def _weights(corpus: CutCorpus, name: str, even: bool = False) -> np.ndarray:
    places = np.exp2(-2 * np.arange(corpus.m - 1, -1, -1) / corpus.m).astype(np.float32)
    return corpus.weights[corpus.asked(name)] * (1 if even else places)


def diverse(corpus: CutCorpus, count: int, longest: int) -> Found:
    """Choose candidates one after another; n-grams up to `longest` of those chosen before count half."""
    found = {}
    for name, (ids, _) in corpus.nearest.items():
        runs, rows = shared(corpus, name, ids[:, :count]), np.arange(len(ids))
        weights = np.repeat(_weights(corpus, name)[None], longest, axis=0)  # [lengths, n, m]
        chosen, taken = np.empty((len(ids), 16), dtype=np.int64), ids[:, :count] < 0
        for number in range(16):
            scores = sum(np.einsum("ncm,nm->nc", runs > n, each) for n, each in enumerate(weights))
            best = np.where(taken, -1, scores).argmax(1)
            chosen[:, number], taken[rows, best] = ids[rows, best], True
            for n in range(longest):
                weights[n] *= np.where(runs[rows, best] > n, 0.5, 1)
        found[name] = chosen
    return found


def oracle(corpus: CutCorpus) -> Found:
    """Order 64 candidates by the nats that each saves alone in the next chunk."""
    source = corpus.fitted(corpus.nearest["train"][0][:, :1], [1])[1]

    def saved(name: str, ids: np.ndarray) -> np.ndarray:
        columns = []
        for column in range(ids.shape[1]):
            found, scored = corpus.tokens(name, ids[:, column : column + 1], [1])
            each = np.zeros(len(corpus.texts[name].nats) + 1)
            each[scored + 1] = found[1].nats.numpy() - copied_nats(source, found[1])
            total, after = np.cumsum(each), corpus.queries[name] + 1
            first = corpus.chunks[name].places[after]
            columns.append(total[first + corpus.chunks[name].lengths[after]] - total[first])
        return np.stack(columns, axis=1)

    return reordered(corpus, CANDIDATES, saved)


class Bm25:
    """BM25 of hashed n-grams of tokens, as sparse matrices [chunks, buckets]."""

    K1, B, BUCKETS = 0.9, 0.4, 2**22

    def __init__(self, corpus: CutCorpus, sizes: tuple[int, ...]) -> None:
        self.corpus, self.queries = corpus, dict[str, Any]()
        train = corpus.chunks["train"].tokens
        documents, queries = [], {name: list[Any]() for name in corpus.queries}
        for size in sizes:
            matrix = self._counts(train, size)
            frequency = np.bincount(matrix.indices, minlength=self.BUCKETS)
            idf = np.log1p((len(train) - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
            lengths = np.asarray(matrix.sum(axis=1)).ravel()
            norms = self.K1 * (1 - self.B + self.B * lengths / lengths.mean())
            matrix.data *= (self.K1 + 1) / (matrix.data + np.repeat(norms, np.diff(matrix.indptr)))
            documents.append(matrix)
            for name in queries:
                queries[name].append(self._counts(corpus.asked(name), size).multiply(idf[None]).tocsr())
        self.documents = sparse.hstack(documents, format="csr")
        self.queries = {name: sparse.hstack(each, format="csr") for name, each in queries.items()}

    def _counts(self, tokens: np.ndarray, size: int) -> Any:
        hashed = np.zeros((len(tokens), tokens.shape[1] - size + 1), dtype=np.uint64)
        real = np.ones(hashed.shape, dtype=bool)
        for place in range(size):
            part = tokens[:, place : place + hashed.shape[1]]
            hashed = (hashed ^ (part + np.uint64(1))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed ^= hashed >> np.uint64(29)
            real &= self.corpus.weights[part] > 0
        rows, columns = np.nonzero(real)
        places = (hashed[rows, columns] % np.uint64(self.BUCKETS)).astype(np.int64)
        matrix = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, places)), (len(tokens), self.BUCKETS))
        matrix.sum_duplicates()
        return matrix

    def scores(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Scores [n, c] of candidates."""
        out, count = np.empty(ids.shape, dtype=np.float32), ids.shape[1]
        for start in range(0, len(ids), 256):
            block = np.maximum(ids[start : start + 256], 0)
            asked = self.queries[name][start + np.repeat(np.arange(len(block)), count)]
            sums = self.documents[block.ravel()].multiply(asked).sum(axis=1)
            out[start : start + 256] = np.asarray(sums).reshape(block.shape)
        return out

    def search(self) -> Found:
        """The 64 best of all chunks."""
        found, columns = {}, self.documents.T.tocsr()
        for name, queries in self.queries.items():
            own, blocks = self.corpus.own(name), list[np.ndarray]()
            for start in range(0, queries.shape[0], 128):
                scores = (queries[start : start + 128] @ columns).toarray()
                if own is not None:
                    for row, (first, stop) in enumerate(np.stack(own, axis=1)[start : start + 128]):
                        scores[row, first:stop] = -1
                blocks.append(torch.from_numpy(scores).topk(CANDIDATES, dim=1).indices.numpy())
            found[name] = np.concatenate(blocks)
        return found


KINDS: dict[str, Callable[[CutCorpus], Found]] = {
    "embeddings": lambda corpus: {name: ids for name, (ids, _) in corpus.nearest.items()},
    "tokens": lambda corpus: diverse(corpus, CANDIDATES, 1),
    "tokens 256": lambda corpus: diverse(corpus, MANY, 1),
    "n-grams": lambda corpus: diverse(corpus, CANDIDATES, 2),
    "alone": lambda corpus: reordered(corpus, CANDIDATES, partial(alone, corpus)),
    "alone, even": lambda corpus: reordered(corpus, CANDIDATES, partial(alone, corpus, even=True)),
    "bm25": lambda corpus: reordered(corpus, CANDIDATES, Bm25(corpus, (1,)).scores),
    "end": lambda corpus: reordered(
        corpus, CANDIDATES, lambda name, ids: shared(corpus, name, ids)[..., -1].astype(float)
    ),
    "sparse": lambda corpus: Bm25(corpus, (1, 2, 3)).search(),
    "oracle": oracle,
}


# --- measurement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Sums of losses over the held-out text.

    Attributes:
        text: the held-out text.
        sizes: bytes of each scored token, else 0: float64 [t].
        low: tokens of chunks with a leakage of at most `LEAKAGE`, bool [t].
    """

    text: Text
    sizes: np.ndarray
    low: np.ndarray

    @classmethod
    def of(cls, datastore: Datastore, text: Text) -> "Scale":
        split = datastore.valid
        leakage = leakage_of(EvaluationSet("valid", datastore), np.arange(split.num_chunks))
        low = np.repeat(leakage <= LEAKAGE, split.lengths.read(0, split.num_chunks).astype(np.int64))
        sizes = read_token_bytes(datastore.folder / "tokenizer")[text.tokens] * np.isfinite(text.nats)
        return cls(text, sizes.astype(np.float64), low)

    def result(self, nats: np.ndarray, k: int, kept: np.ndarray | bool = True) -> SetResult:
        """Sums by document over the tokens `kept`."""
        nats = np.where(np.isfinite(nats) & kept, nats, 0.0)
        of_documents, sizes = (np.add.reduceat(each, self.text.starts[:-1]) for each in (nats, self.sizes * kept))
        return SetResult("valid", k, int((nats != 0).sum()), 0.0, of_documents, sizes)

    def row(self, nats: np.ndarray, k: int) -> dict[str, Any]:
        """Bits per byte ON, and the change against OFF in percent with its interval, of all chunks and of those with little leakage."""
        all_of_it, off = self.result(nats, k), self.result(self.text.nats, 0)
        low = self.result(nats, k, self.low), self.result(self.text.nats, 0, self.low)
        return {
            "k": k,
            "bits_per_byte": all_of_it.bits_per_byte,
            "change": compare(all_of_it, off),
            f"change at leakage {LEAKAGE}": compare(*low),
        }


def measure(corpus: CutCorpus, scale: Scale, kind: str, ks: list[int]) -> dict[str, Any]:
    """Find the neighbors of a kind, and measure them for each k."""
    found: Found = {}
    took = seconds(lambda: found.update(KINDS[kind](corpus)))
    rows = [scale.row(nats, k) for k, nats in corpus.nats_on(found, ks)]
    for row in rows:
        low = row[f"change at leakage {LEAKAGE}"]
        say(
            f"m = {corpus.m} {kind:13} k = {row['k']:2}  {row['bits_per_byte']:.4f}  {_percent(row['change'])}  "
            f"leakage up to {LEAKAGE}: {_percent(low)}"
        )
    return {"chunk_length": corpus.m, "kind": kind, "seconds": took, "rows": rows}


def _percent(change: tuple[float, float, float]) -> str:
    return f"{change[0]:+.2f}% ({change[1]:+.1f} to {change[2]:+.1f})"


def main() -> None:
    """Read the text once, then measure each chunk length and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("checkpoint", type=Path, help="a model without retrieval: run, checkpoint or exported file")
    parser.add_argument("--output", type=Path, default=Path("runs/copy-neighbors"))
    parser.add_argument("--chunk-lengths", nargs="*", type=int, default=[32])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--k", nargs="*", type=int, default=[1, 4], help="at most 16")
    parser.add_argument("--max-tokens", type=int, default=20_000, help="held-out tokens; 0: all")
    add_precision(parser)
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    options.output.mkdir(parents=True, exist_ok=True)
    datastore, place = Datastore.open(options.datastore), placement(options.precision)
    checkpoint = open_checkpoint(options.checkpoint)
    model, length = load_model(checkpoint, place.device).eval(), checkpoint.settings["data"]["sequence_length"]
    texts = {
        name: read_text(model, datastore.split(name), name == "train", options.max_tokens, length, place)
        for name in ("train", "valid")
    }
    scale = Scale.of(datastore, texts["valid"])
    off = scale.result(texts["valid"].nats, 0)
    say(f"OFF: {off.bits_per_byte:.4f} bits per byte of {off.tokens:,} tokens")
    file = options.output / f"copy-neighbors-{off.tokens}.json"
    results = json.loads(file.read_text())["results"] if file.exists() else []
    ks = sorted(options.k)
    done = [(each["chunk_length"], each["kind"], [row["k"] for row in each["rows"]]) for each in results]
    todo = [(m, kind) for m in options.chunk_lengths for kind in options.kinds if (m, kind, ks) not in done]
    corpus: CutCorpus | None = None
    for m, kind in limit.each(todo, "kind"):
        if corpus is None or corpus.m != m:
            corpus = CutCorpus(datastore, texts, m, options.output)
        results.append(measure(corpus, scale, kind, ks))
        write(file, {"off": off.bits_per_byte, "tokens": off.tokens, "results": results})


if __name__ == "__main__":
    main()
