"""Texts for `copy_neighbors.py`: scored once without neighbors, cut into chunks of any length, with neighbors to copy from."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from indexing.embedding.embedder import open_embedder
from indexing.embedding.lexical import LexicalEmbedder, token_weights
from indexing.index.exact_search import rerank
from indexing.index.product_search import ProductIndex
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.sharded_array import ShardedArray
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.device import Placement
from retro.evaluation.windows import document_windows, window_batches
from retro.model.copy_head import CopySource
from retro.model.copy_matches import Matches, count_votes, longest_match, neighbor_matches
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro
from retro.training.fitted_copy_head import Tokens, fit_source, nats_with_copying

MANY = 256
"""Candidates of each chunk."""
CELLS = 2**21
"""Pairs of tokens compared at a time."""
_FITTED_TOKENS = 23_040


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


def read_text(
    model: Retro, split: Split, fitted: bool, max_tokens: int, sequence_length: int, place: Placement
) -> Text:
    """Read a split, and score its first documents, or a sample of windows (`fitted`), without neighbors."""
    rows, lengths = split.tokens.read(0, split.num_chunks), split.lengths.read(0, split.num_chunks).astype(np.int64)
    tokens = rows[np.arange(rows.shape[1]) < lengths[:, None]].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.append(before[split.chunk_ranges(np.arange(split.num_documents))[:, 0]], before[-1])
    stride = max(1, sequence_length // split.chunk_length // 2)  # chunks
    windows = list(document_windows(split, 2 * stride, stride))
    wanted = max(1, (_FITTED_TOKENS if fitted else max_tokens or len(tokens)) // (stride * split.chunk_length))
    if fitted:
        drawn = np.random.default_rng(0).choice(len(windows), min(wanted, len(windows)), replace=False)
        windows = [windows[number] for number in np.sort(drawn)]
    elif max_tokens:
        windows = windows[:wanted]
    nats, kept = np.full(len(tokens), np.nan, dtype=np.float32), np.zeros(len(tokens), dtype=np.float32)
    for part, batch in window_batches(split, RetrievalSet((split,)), windows, 8, NeighborUse(0)):
        losses, shares = _scored(model, place.put(as_tensors(batch)), place)
        for row, window in enumerate(part):
            scored = np.flatnonzero(batch.labels[row] != IGNORED_LABEL)
            nats[before[window.start] + scored + 1] = losses[row, scored]
            kept[before[window.start] + scored + 1] = shares[row, scored]
    return Text(tokens, starts, nats, kept)


@torch.inference_mode()
def _scored(model: Retro, batch: Inputs, place: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Losses and logs of the vocabulary's shares without neighbors, [B, T] each."""
    head = model.copy_head
    with place.autocast():
        hidden, _ = model.hidden(batch)
        sources = model.copy_sources(batch.off())
        mixture = None if head is None else head.mixture(hidden, batch.labels, sources)
        losses = token_losses(hidden, model.output_weight, batch.labels, mixture)
    shares = torch.zeros_like(losses) if mixture is None else mixture.log_keep
    return losses.float().cpu().numpy(), shares.float().cpu().numpy()


class CutCorpus:
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
        step = max(1, CELLS // (2 * m * m * ids.shape[1]))
        for start in range(0, len(ids), step):
            asked = self.queries[name][start : start + step]
            near, lengths = self.chunks["train"].with_continuation(ids[start : start + step].ravel(), self.pad)
            shape = (len(asked), 1, ids.shape[1])
            both = np.concatenate([chunks.tokens[asked], chunks.tokens[asked + 1][:, :-1]], axis=1).astype(np.int64)
            neighbors = torch.from_numpy(near.reshape(*shape, 2 * m)), torch.from_numpy(lengths.reshape(shape))
            matches = neighbor_matches(Inputs(torch.from_numpy(both), None, *neighbors), m)
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
            nats[scored] = copied_nats(sources[k], found[k])
            yield k, nats


def _readable(found: Tokens) -> Tokens:
    """Only the tokens that can read a neighbor."""
    return Tokens(*(each[found.longest >= 0] for each in found))


@torch.no_grad()
def copied_nats(source: CopySource, found: Tokens) -> np.ndarray:
    """Losses with copying; tokens that can read no neighbor keep theirs."""
    return nats_with_copying(source, found).where(found.longest >= 0, found.nats).numpy()
