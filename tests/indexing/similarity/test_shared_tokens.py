"""Neighbors ordered by shared tokens: the scores, and the same order in the datastore, after appending, and in a live search."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from indexing import measured
from indexing.embedding.lexical import token_weights
from indexing.embedding.settings import EmbedderSettings
from indexing.index.exact_search import exact_search
from indexing.neighbors.settings import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from pipelines.cli.reports.datastore import measure_neighbors
from pipelines.config import Config
from tests.conftest import build_local, tiny_config, write_corpus

SETTINGS = NeighborSettings(stored=6, candidates=24, rerank="tokens", search="exact")


def config_of(folder: Path, *files: Path) -> Config:
    config = tiny_config(folder, files[0], neighbors=SETTINGS)
    return replace(config, corpus=replace(config.corpus, paths=tuple(map(str, files))))


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("ordered")
    with pytest.MonkeyPatch.context() as patch:  # the same candidates on all processors
        patch.setattr(measured, "fastest_products", lambda *_: "float32")
        return build_local(config_of(folder, write_corpus(folder / "a.jsonl", 90)))


def order_of(datastore: Datastore) -> SharedTokens:
    return SharedTokens(token_weights(datastore.folder / "embedder"), RetrievalSet.of(datastore))


def chosen_one_by_one(order: SharedTokens, tokens: np.ndarray, ids: np.ndarray, k: int) -> list[int]:
    """The definition: k of the candidates ids [c], nearest first, of a chunk tokens [m]."""
    m, chosen, left = len(tokens), list[int](), ids.tolist()
    weights = [float(order.weights[token]) * 2 ** (-2 * (m - 1 - t) / m) for t, token in enumerate(tokens)]
    texts = {each: set(order.retrieval.tokens(np.array([each]))[0].tolist()) for each in left}
    for _ in range(k):
        scores = [sum(w for w, x in zip(weights, tokens, strict=True) if x in texts[each]) for each in left]
        best = left.pop(int(np.argmax(np.round(scores, 4))))  # equal sums differ by rounding
        weights = [w / 2 if x in texts[best] else w for w, x in zip(weights, tokens, strict=True)]
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("m", [1, 5, 64, 70, 130])
def test_chunks_of_any_length_are_ordered_by_the_definition(m: int) -> None:
    rng, stored = np.random.default_rng(m), SimpleNamespace()
    chunks = rng.integers(0, 3 * m + 20, (200, m)).astype(np.uint16)
    stored.tokens = lambda ids: chunks[ids]
    order = SharedTokens(rng.random(3 * m + 20).astype(np.float32), stored)
    ids = np.stack([rng.permutation(200)[:12] for _ in range(150)])
    ids[::7, 9:] = -1
    best = order.best(chunks[:150], ids, 5)
    for row in range(150):
        assert best[row].tolist() == chosen_one_by_one(order, chunks[row], ids[row][ids[row] >= 0], 5)


def test_each_neighbor_shares_most_of_what_the_ones_before_lack(ordered: Datastore) -> None:
    order, queries = order_of(ordered), ordered.valid.embeddings.read(0, 40).astype(np.float32)
    _, ids = exact_search(queries, ordered.train.embeddings, 24)
    tokens = ordered.valid.tokens.read(0, 40)
    best = order.best(tokens, ids, 6)
    expected = [chosen_one_by_one(order, *row, 6) for row in zip(tokens, ids, strict=True)]
    assert (best == np.array(expected)).all(axis=1).mean() > 0.9  # equal scores


def test_weights_fall_as_tokens_are_in_more_chunks_and_are_zero_for_special_tokens(ordered: Datastore) -> None:
    weights, train = token_weights(ordered.folder / "embedder"), ordered.train
    is_special = np.load(ordered.folder / "embedder" / "is_special.npy")
    counts = np.zeros(len(weights), dtype=np.int64)
    for row in train.tokens.read(0, train.num_chunks):
        counts[np.unique(row)] += 1
    text = np.flatnonzero(~is_special)
    rarest_first = text[np.argsort(counts[text], kind="stable")]
    assert (np.diff(weights[rarest_first]) <= 0).all()
    assert weights[rarest_first[0]] > weights[rarest_first[-1]] > 0
    assert is_special[train.pad_id]
    assert not weights[is_special].any()


def test_equal_scores_keep_their_order_and_missing_candidates_are_last(ordered: Datastore) -> None:
    order = replace(order_of(ordered), weights=np.zeros(400, np.float32))
    assert order.best(ordered.valid.tokens.read(0, 1), np.array([[9, 7, -1, 5]]), 4).tolist() == [[9, 7, 5, -1]]


def test_tokens_above_the_vocabulary_are_refused(ordered: Datastore) -> None:
    order = replace(order_of(ordered), weights=np.zeros(10, np.float32))
    with pytest.raises(InputError, match="tokens above the vocabulary of 10"):
        order.best(np.zeros((1, ordered.chunk_length), dtype=np.uint16), np.array([[9, 7]]), 2)


@pytest.mark.parametrize("split_name", ["train", "valid"])
def test_stored_neighbors_are_chosen_from_the_nearest_candidates(ordered: Datastore, split_name: str) -> None:
    split, train = ordered.split(split_name), ordered.train
    excluded = split.documents_of(np.arange(split.num_chunks))[1:] if split_name == "train" else None
    queries = split.embeddings.read(0, split.num_chunks).astype(np.float32)
    _, ids = exact_search(queries, train.embeddings, SETTINGS.candidates, excluded)
    best = order_of(ordered).best(split.tokens.read(0, split.num_chunks), ids, SETTINGS.stored)
    stored = split.neighbor_ids.read(0, split.num_chunks)
    assert (stored == best).all(axis=1).mean() > 0.9  # equal distances
    texts = [train.tokens.gather(each.ravel()).reshape(len(each), -1) for each in (stored, best)]  # many are the same
    assert (texts[0] == texts[1]).all(axis=1).mean() > 0.99
    assert not np.array_equal(stored, ids[:, : SETTINGS.stored])


def test_live_search_returns_the_stored_neighbors(ordered: Datastore) -> None:
    lengths = ordered.valid.lengths.read(0, ordered.valid.num_chunks)
    full = np.flatnonzero(lengths == ordered.chunk_length)[:20]
    tokens, *_ = Retriever.open(ordered.folder).neighbors.find(ordered.valid.tokens.gather(full).astype(np.int64), 3)
    stored, _ = ordered.train.with_continuation(ordered.valid.neighbor_ids.gather(full)[:, :3].ravel())
    assert (tokens == stored.reshape(tokens.shape)).all(axis=2).mean() > 0.95  # equal scores, candidates in bfloat16


def test_report_has_no_recall_because_the_best_are_not_the_nearest(ordered: Datastore) -> None:
    assert measure_neighbors(Retriever.open(ordered.folder))["recall"] == {}


def test_other_embedders_have_no_token_weights() -> None:
    with pytest.raises(InputError, match=r"neighbors\.rerank = 'tokens' needs.*embedder\.kind = 'lexical'"):
        Config(neighbors=SETTINGS, embedder=EmbedderSettings(kind="transformer", path="minilm"))
