"""Which neighbors can a model copy most from? Kinds of neighbors, their number, and the chunk length.

    python -m benchmarks.quality.copy_neighbors DATASTORE CHECKPOINT --output FOLDER [--chunk-lengths 16 32 64] [--k 1 2 4 8 16]

CHECKPOINT is a model without retrieval, trained on the datastore's text. For each kind of neighbors and each k, a copy head is
fitted as by `retro add-retrieval` (51 numbers), and scored on the held-out documents, ON against OFF. The model reads the text
once; only the neighbors differ, so any chunk length can be tried with the datastore's tokenizer and embedder.

| kind | |
|---|---|
| `embeddings` | exact search by the lexical embeddings: `neighbors.rerank = "embeddings"` |
| `tokens` | 64 of these candidates, ordered by shared tokens: `neighbors.rerank = "tokens"` |
| `tokens 256` | the same with 256 candidates |
| `tokens, even` | without the larger weight of the end of the chunk |
| `n-grams` | as `tokens`, with shared bigrams too |
| `bm25` | 64 candidates, ordered by BM25 of the chunk's tokens |
| `end` | 64 candidates, ordered by the longest run of tokens that ends the chunk; equal runs by distance |
| `diverse` | as `n-grams`, one after another: n-grams of neighbors chosen before count half |
| `sparse` | exact search of all chunks by BM25 of tokens, bigrams and trigrams |
| `oracle` | 64 candidates, ordered by what each saves in the next chunk: an upper bound that no search reaches |

A chunk of m tokens reads k neighbors of 2 m tokens, so equal k means equal neighbor tokens per token for every m. Neighbors of a
chunk are never from its own document. Results of finished kinds are kept in FOLDER, so the script resumes.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from benchmarks.common import add_minutes, add_precision, budget, placement, say, seconds, write
from indexing.embedders import LexicalEmbedder, open_embedder, token_weights
from indexing.store.datastore import Datastore, ShardedArray, Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import read_token_bytes
from indexing.vectors.exact_search import rerank
from indexing.vectors.product_search import ProductIndex
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.leakage import leakage_of
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.windows import document_windows, window_batches
from retro.model.copy_head import (
    CopyHead,
    CopySource,
    Matches,
    count_votes,
    longest_match,
    match_lengths,
    neighbor_matches,
)
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro
from retro.training.fitted_copy_head import Tokens, fit_source, nats_with_copying

CANDIDATES = 64
MANY = 256
LEAKAGE = 0.25
_WINDOW_CHUNKS, _FITTED_WINDOWS = 16, 90  # windows of 512 tokens for chunks of 32
_CELLS = 2**21  # pairs of tokens compared at a time


# --- texts and chunks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """The documents of a split without padding, and what the model predicts without neighbors.

    Attributes:
        tokens: [t] int64.
        starts: [documents + 1] int64, first token of each document.
        nats: loss of each token without neighbors, float32 [t]; nan = not scored.
        kept: log of the share that the vocabulary has without neighbors, float32 [t].
    """

    tokens: np.ndarray
    starts: np.ndarray
    nats: np.ndarray
    kept: np.ndarray


@dataclass(frozen=True)
class Chunks:
    """Documents cut into chunks of m tokens, the last one of each padded.

    Attributes:
        tokens: [n, m] uint16 or uint32.
        lengths: [n] tokens without padding.
        places: [n] first token of each chunk in the text.
        first, stop: [n] chunks of the own document.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, text: Text, m: int, pad: int, dtype: Any) -> "Chunks":
        """Cut the documents of a text."""
        sizes = -(-np.diff(text.starts) // m)
        first = np.concatenate([[0], np.cumsum(sizes)])
        document = np.repeat(np.arange(len(sizes)), sizes)
        places = text.starts[document] + m * (np.arange(first[-1]) - first[document])
        lengths = np.minimum(m, text.starts[document + 1] - places)
        inside = np.minimum(places[:, None] + np.arange(m), len(text.tokens) - 1)
        tokens = np.where(np.arange(m) < lengths[:, None], text.tokens[inside], pad).astype(dtype)
        return cls(tokens, lengths, places, first[document], first[document + 1])

    def with_continuation(self, ids: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Split.with_continuation`: ids [n] → tokens [n, 2m] int64, lengths [n]."""
        m = self.tokens.shape[1]
        tokens, lengths = np.full((len(ids), 2 * m), pad, dtype=np.int64), np.zeros(len(ids), dtype=np.int64)
        present = np.flatnonzero(ids >= 0)
        tokens[present, :m], lengths[present] = self.tokens[ids[present]], self.lengths[ids[present]]
        continued = present[ids[present] + 1 < self.stop[ids[present]]]
        tokens[continued, m:] = self.tokens[ids[continued] + 1]
        lengths[continued] += self.lengths[ids[continued] + 1]
        return tokens, lengths


def read_text(model: Retro, split: Split, fitted: bool, max_tokens: int, place: Any) -> Text:
    """Read a split, and score its first documents, or a sample of windows (`fitted`), without neighbors."""
    rows, lengths = split.tokens.read(0, split.num_chunks), split.lengths.read(0, split.num_chunks).astype(np.int64)
    tokens = rows[np.arange(rows.shape[1]) < lengths[:, None]].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.append(before[split.chunk_ranges(np.arange(split.num_documents))[:, 0]], before[-1])
    windows = list(document_windows(split, _WINDOW_CHUNKS, _WINDOW_CHUNKS // 2))
    if fitted:
        drawn = np.random.default_rng(0).choice(len(windows), min(_FITTED_WINDOWS, len(windows)), replace=False)
        windows = [windows[number] for number in np.sort(drawn)]
    elif max_tokens:
        windows = windows[: max(1, max_tokens // (_WINDOW_CHUNKS // 2 * split.chunk_length))]
    nats, kept = np.full(len(tokens), np.nan, dtype=np.float32), np.zeros(len(tokens), dtype=np.float32)
    for part, batch in window_batches(split, RetrievalSet((split,)), windows, 8, NeighborUse(0)):
        losses, shares = _scored(model, place.put(as_tensors(batch)), place)
        for row, window in enumerate(part):
            scored = np.flatnonzero(batch.labels[row] != IGNORED_LABEL)
            nats[before[window.start] + scored + 1] = losses[row, scored]
            kept[before[window.start] + scored + 1] = shares[row, scored]
    return Text(tokens, starts, nats, kept)


@torch.inference_mode()
def _scored(model: Retro, batch: dict[str, Any], place: Any) -> tuple[np.ndarray, np.ndarray]:
    """Losses and logs of the vocabulary's shares without neighbors, [B, T] each."""
    labels = batch.pop("labels")
    head: CopyHead | None = model.copy_head
    with place.autocast():
        hidden = model.hidden(**batch)
        copying = (
            None if head is None else head.mixture_of(hidden, labels, head.find(batch["tokens"], batch["documents"]))
        )
        losses = token_losses(hidden, model.output_weight, labels, copying)
    shares = torch.zeros_like(losses) if copying is None else copying.log_keep
    return losses.float().cpu().numpy(), shares.float().cpu().numpy()


# --- one chunk length ----------------------------------------------------------------------------------------------


class World:
    """The chunks of one length: training text to search, and queries whose next chunk is scored.

    Args:
        datastore: the texts' datastore.
        texts: the splits `train` and `valid`.
        m: chunk length.
        folder: keeps the embeddings.
    """

    def __init__(self, datastore: Datastore, texts: dict[str, Text], m: int, folder: Path) -> None:
        self.m, self.texts, self.pad = m, texts, datastore.train.pad_id
        dtype = datastore.train.tokens.shard(0).dtype
        self.chunks = {name: Chunks.of(text, m, self.pad, dtype) for name, text in texts.items()}
        self.queries = {name: self._queries(name) for name in texts}
        self.embedder = open_embedder(datastore.folder / "embedder", lambda tokens: "")
        assert isinstance(self.embedder, LexicalEmbedder)
        self.weights = token_weights(datastore.folder / "embedder")
        file, train = folder / f"embeddings-{m}.npy", self.chunks["train"]
        if not file.exists():
            blocks = [slice(start, start + 8192) for start in range(0, len(train.tokens), 8192)]
            vectors = [self.embedder.embed(train.tokens[b], train.lengths[b]).astype(np.float16) for b in blocks]
            np.save(file, np.concatenate(vectors))
        self.embeddings = ShardedArray([file], [len(train.tokens)])

    def _queries(self, name: str) -> np.ndarray:
        """Chunks [n] whose next chunk is in the same document and scored."""
        chunks = self.chunks[name]
        ids = np.arange(len(chunks.tokens) - 1)
        ids = ids[ids + 1 < chunks.stop[ids]]
        return ids[np.isfinite(self.texts[name].nats[chunks.places[ids + 1]])]

    def own(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Chunks of the own documents, which are no candidates."""
        chunks, ids = self.chunks[name], self.queries[name]
        return (chunks.first[ids], chunks.stop[ids]) if name == "train" else None

    def asked(self, name: str) -> np.ndarray:
        """Tokens [n, m] of the queries."""
        return self.chunks[name].tokens[self.queries[name]]

    @cached_property
    def nearest(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Ids and distances [n, 256] of the nearest chunks by embeddings, nearest first."""
        found = {}
        for name, ids in self.queries.items():
            vectors = self.embedder.embed(self.asked(name), self.chunks[name].lengths[ids])
            vectors = vectors.astype(np.float16).astype(np.float32)
            candidates = ProductIndex(self.embeddings).search(vectors, MANY, self.own(name))
            distances, candidates = rerank(vectors, candidates, self.embeddings)
            found[name] = candidates, distances
        return found

    def tokens(self, name: str, ids: np.ndarray, ks: list[int]) -> tuple[dict[int, Tokens], np.ndarray]:
        """What copying from neighbors ids [n, k] finds for every scored token, for each k; and the tokens' places [t]."""
        chunks, text, m = self.chunks[name], self.texts[name], self.m
        parts: dict[int, list[tuple[torch.Tensor, ...]]] = {k: [] for k in ks}
        places = []
        step = max(1, _CELLS // (2 * m * m * ids.shape[1]))
        for start in range(0, len(ids), step):
            asked = self.queries[name][start : start + step]
            near, lengths = self.chunks["train"].with_continuation(ids[start : start + step].ravel(), self.pad)
            shape = (len(asked), 1, ids.shape[1])
            both = np.concatenate([chunks.tokens[asked], chunks.tokens[asked + 1][:, :-1]], axis=1).astype(np.int64)
            neighbors = torch.from_numpy(near.reshape(*shape, 2 * m)), torch.from_numpy(lengths.reshape(shape))
            matches = neighbor_matches(torch.from_numpy(both), *neighbors, None, m)
            labels = torch.from_numpy(chunks.tokens[asked + 1].astype(np.int64))
            place = chunks.places[asked + 1][:, None] + np.arange(m)
            real = np.arange(m) < chunks.lengths[asked + 1][:, None]
            real &= np.isfinite(text.nats[np.minimum(place, len(text.nats) - 1)])
            places.append(place[real])
            for k in ks:
                first = Matches(matches.lengths[:, :, : 2 * m * k], matches.following[:, : 2 * m * k])
                found = (*count_votes(first, labels), *longest_match(first))
                parts[k].append(tuple(each[torch.from_numpy(real)] for each in found))
        scored = np.concatenate(places)
        known = (torch.from_numpy(text.nats[scored]), torch.from_numpy(text.kept[scored]))
        return {k: Tokens(*known, *map(torch.cat, zip(*part, strict=True))) for k, part in parts.items()}, scored

    def fitted(self, ids: np.ndarray, ks: list[int]) -> dict[int, CopySource]:
        """Copy heads for neighbors [n, k] of the queries of `train`, for each k."""
        sources = {}
        for k, found in self.tokens("train", ids, ks)[0].items():
            source = CopySource(1)
            source.initialize()
            fit_source(source, _readable(found))
            sources[k] = source
        return sources

    def nats_on(self, ids: dict[str, np.ndarray], ks: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each k and the losses [t] of the text of `valid` with neighbors."""
        sources = self.fitted(ids["train"][:, : max(ks)], ks)
        found, scored = self.tokens("valid", ids["valid"][:, : max(ks)], ks)
        for k in ks:
            nats = self.texts["valid"].nats.copy()
            nats[scored] = _with_copying(sources[k], found[k])
            yield k, nats


def _readable(found: Tokens) -> Tokens:
    """Only the tokens that can read a neighbor."""
    return Tokens(*(each[found.longest >= 0] for each in found))


@torch.no_grad()
def _with_copying(source: CopySource, found: Tokens) -> np.ndarray:
    """Losses with copying; tokens that can read no neighbor keep theirs."""
    return nats_with_copying(source, found).where(found.longest >= 0, found.nats).numpy()


# --- kinds of neighbors --------------------------------------------------------------------------------------------

Found = dict[str, np.ndarray]
"""Ids [n, c] of the neighbors of the queries of `train` and `valid`, best first."""


def reordered(world: World, count: int, score: Callable[[str, np.ndarray], np.ndarray]) -> Found:
    """Order the nearest `count` candidates by a score [n, count]; equal scores by distance."""
    found = {}
    for name, (ids, _) in world.nearest.items():
        order = np.argsort(-score(name, ids[:, :count]), axis=1, kind="stable")
        found[name] = np.take_along_axis(ids, order, 1)
    return found


def shared(world: World, name: str, ids: np.ndarray) -> np.ndarray:
    """Length of the longest run that ends at each token of the chunk and is in the candidate: [n, c, m] int8."""
    asked, longest = torch.from_numpy(world.asked(name).astype(np.int32)), min(16, world.m)
    padded = torch.nn.functional.pad(asked, (longest - 1, 0), value=-1)
    train, out = world.chunks["train"], np.empty((*ids.shape, world.m), dtype=np.int8)
    step = max(1, 4 * _CELLS // (ids.shape[1] * world.m**2))
    for start in range(0, len(ids), step):
        block = slice(start, start + step)
        texts = train.tokens[ids[block]].astype(np.int32)
        texts[np.arange(world.m) >= train.lengths[ids[block]][..., None]] = -2
        out[block] = match_lengths(padded[block][:, None], torch.from_numpy(texts), longest).amax(-1).numpy()
    return out


def by_runs(world: World, longest: int, name: str, ids: np.ndarray, *, even: bool = False) -> np.ndarray:
    """Sum over tokens and run lengths up to `longest` of the weight of the token, if the candidate has the run."""
    runs = np.minimum(shared(world, name, ids), longest).astype(np.float32)
    return np.einsum("ncm,nm->nc", runs, _weights(world, name, even))


def _weights(world: World, name: str, even: bool = False) -> np.ndarray:
    places = np.exp2(-2 * np.arange(world.m - 1, -1, -1) / world.m).astype(np.float32)
    return world.weights[world.asked(name)] * (1 if even else places)


def diverse(world: World, count: int) -> Found:
    """Choose candidates one after another; n-grams of those chosen before count half."""
    found = {}
    for name, (ids, _) in world.nearest.items():
        runs, rows = shared(world, name, ids[:, :count]), np.arange(len(ids))
        has = np.stack([runs >= 1, runs >= 2], axis=2).astype(np.float32)  # [n, c, 2, m]
        weights = np.repeat(_weights(world, name)[:, None], 2, axis=1)
        chosen, taken = np.empty((len(ids), 16), dtype=np.int64), np.zeros(has.shape[:2], dtype=bool)
        for number in range(16):
            best = np.where(taken, -1, np.einsum("ncgm,ngm->nc", has, weights)).argmax(1)
            chosen[:, number], taken[rows, best] = ids[rows, best], True
            weights = weights * 0.5 ** has[rows, best]
        found[name] = chosen
    return found


def oracle(world: World) -> Found:
    """Order 64 candidates by the nats that each saves alone in the next chunk."""
    source = world.fitted(world.nearest["train"][0][:, :1], [1])[1]

    def saved(name: str, ids: np.ndarray) -> np.ndarray:
        columns = []
        for column in range(ids.shape[1]):
            found, scored = world.tokens(name, ids[:, column : column + 1], [1])
            each = np.zeros(len(world.texts[name].nats) + 1)
            each[scored + 1] = found[1].nats.numpy() - _with_copying(source, found[1])
            total, after = np.cumsum(each), world.queries[name] + 1
            first = world.chunks[name].places[after]
            columns.append(total[first + world.chunks[name].lengths[after]] - total[first])
        return np.stack(columns, axis=1)

    return reordered(world, CANDIDATES, saved)


class Bm25:
    """BM25 of hashed n-grams of tokens, as sparse matrices [chunks, buckets]."""

    K1, B, BUCKETS = 0.9, 0.4, 2**22

    def __init__(self, world: World, sizes: tuple[int, ...]) -> None:
        self.world, self.queries = world, dict[str, Any]()
        train = world.chunks["train"].tokens
        documents, queries = [], {name: list[Any]() for name in world.queries}
        for size in sizes:
            matrix = self._counts(train, size)
            frequency = np.bincount(matrix.indices, minlength=self.BUCKETS)
            idf = np.log1p((len(train) - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
            lengths = np.asarray(matrix.sum(axis=1)).ravel()
            norms = self.K1 * (1 - self.B + self.B * lengths / lengths.mean())
            matrix.data *= (self.K1 + 1) / (matrix.data + np.repeat(norms, np.diff(matrix.indptr)))
            documents.append(matrix)
            for name in queries:
                queries[name].append(self._counts(world.asked(name), size).multiply(idf[None]).tocsr())
        self.documents = sparse.hstack(documents, format="csr")
        self.queries = {name: sparse.hstack(each, format="csr") for name, each in queries.items()}

    def _counts(self, tokens: np.ndarray, size: int) -> Any:
        hashed = np.zeros((len(tokens), tokens.shape[1] - size + 1), dtype=np.uint64)
        real = np.ones(hashed.shape, dtype=bool)
        for place in range(size):
            part = tokens[:, place : place + hashed.shape[1]]
            hashed = (hashed ^ (part + np.uint64(1))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed ^= hashed >> np.uint64(29)
            real &= self.world.weights[part] > 0
        rows, columns = np.nonzero(real)
        places = (hashed[rows, columns] % np.uint64(self.BUCKETS)).astype(np.int64)
        matrix = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, places)), (len(tokens), self.BUCKETS))
        matrix.sum_duplicates()
        return matrix

    def scores(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Scores [n, c] of candidates."""
        out = np.empty(ids.shape, dtype=np.float32)
        for row, each in enumerate(ids):
            out[row] = (self.documents[np.maximum(each, 0)] @ self.queries[name][row].T).toarray()[:, 0]
        return out

    def search(self) -> Found:
        """The 64 best of all chunks."""
        found, columns = {}, self.documents.T.tocsr()
        for name, queries in self.queries.items():
            own, blocks = self.world.own(name), []
            for start in range(0, queries.shape[0], 128):
                scores = (queries[start : start + 128] @ columns).toarray()
                for row in range(len(scores) if own is not None else 0):
                    scores[row, own[0][start + row] : own[1][start + row]] = -1
                blocks.append(torch.from_numpy(scores).topk(CANDIDATES, dim=1).indices.numpy())
            found[name] = np.concatenate(blocks)
        return found


KINDS: dict[str, Callable[[World], Found]] = {
    "embeddings": lambda world: {name: ids for name, (ids, _) in world.nearest.items()},
    "tokens": lambda world: reordered(world, CANDIDATES, partial(by_runs, world, 1)),
    "tokens 256": lambda world: reordered(world, MANY, partial(by_runs, world, 1)),
    "tokens, even": lambda world: reordered(world, CANDIDATES, partial(by_runs, world, 1, even=True)),
    "n-grams": lambda world: reordered(world, CANDIDATES, partial(by_runs, world, 2)),
    "bm25": lambda world: reordered(world, CANDIDATES, Bm25(world, (1,)).scores),
    "end": lambda world: reordered(
        world, CANDIDATES, lambda name, ids: shared(world, name, ids)[..., -1].astype(float)
    ),
    "diverse": lambda world: diverse(world, CANDIDATES),
    "sparse": lambda world: Bm25(world, (1, 2, 3)).search(),
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
        begins = self.text.starts[:-1]
        sums = (np.add.reduceat(each, begins) for each in (nats, self.sizes * kept))
        return SetResult("valid", k, int((nats != 0).sum()), 0.0, *sums)

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


def measure(world: World, scale: Scale, kind: str, ks: list[int]) -> dict[str, Any]:
    """Find the neighbors of a kind, and measure them for each k."""
    found: Found = {}
    took = seconds(lambda: found.update(KINDS[kind](world)))
    rows = [scale.row(nats, k) for k, nats in world.nats_on(found, ks)]
    for row in rows:
        low = row[f"change at leakage {LEAKAGE}"]
        say(
            f"m = {world.m} {kind:13} k = {row['k']:2}  {row['bits_per_byte']:.4f}  {_percent(row['change'])}  "
            f"leakage up to {LEAKAGE}: {_percent(low)}"
        )
    return {"chunk_length": world.m, "kind": kind, "seconds": took, "rows": rows}


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
    model = load_model(open_checkpoint(options.checkpoint), place.device).eval()
    texts = {
        name: read_text(model, datastore.split(name), name == "train", options.max_tokens, place)
        for name in ("train", "valid")
    }
    scale = Scale.of(datastore, texts["valid"])
    off = scale.result(texts["valid"].nats, 0)
    say(f"OFF: {off.bits_per_byte:.4f} bits per byte of {off.tokens:,} tokens")
    file = options.output / f"copy-neighbors-{off.tokens}.json"
    results = json.loads(file.read_text())["results"] if file.exists() else []
    done = {(each["chunk_length"], each["kind"]) for each in results}
    todo = [(m, kind) for m in options.chunk_lengths for kind in options.kinds if (m, kind) not in done]
    world: World | None = None
    for m, kind in limit.each(todo, "kind"):
        if world is None or world.m != m:
            world = World(datastore, texts, m, options.output)
        results.append(measure(world, scale, kind, sorted(options.k)))
        write(file, {"off": off.bits_per_byte, "tokens": off.tokens, "results": results})


if __name__ == "__main__":
    main()
