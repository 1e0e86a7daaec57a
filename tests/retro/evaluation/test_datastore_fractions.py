"""Fractions of the datastore are nested and uniform over documents. Each is searched like a whole datastore."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing import measured
from indexing.corpus.documents import CorpusSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.similarity.overlap import overlap
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from indexing.suffixes.votes import COLUMNS, as_columns, read_votes
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation import datastore_fractions
from retro.evaluation.datastore_fractions import (
    PartialDatastore,
    points_of,
    search_fractions,
    votes_in_fractions,
)
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model.retro import Retro
from tests.conftest import build_local, tiny_config, write_corpus
from tests.indexing.suffixes.test_votes_build import expected
from tests.indexing.suffixes.whole_search import documents_of as documents_of_split
from tests.retro.evaluation.test_bits_per_byte import evaluator_of

FRACTIONS = (0.05, 0.3, 1.0)


@pytest.fixture(scope="module")
def held_out(tiny_datastore: Datastore) -> EvaluationSet:
    return EvaluationSet("valid", tiny_datastore)


@pytest.fixture(scope="module")
def parts(held_out: EvaluationSet) -> list[PartialDatastore]:
    return list(search_fractions(held_out, held_out.split.num_chunks, 4, FRACTIONS))


def documents_of(part: PartialDatastore, held_out: EvaluationSet) -> set[int]:
    return set(held_out.datastore.train.documents_of(part.found[part.found >= 0])[0].tolist())


def exact_distances(held_out: EvaluationSet, chunks: np.ndarray, k: int) -> np.ndarray:
    """Distances [n, k] of the nearest of the given chunks, by brute force."""
    vectors = held_out.datastore.train.embeddings.gather(chunks).astype(np.float32)
    queries = held_out.split.embeddings.read(0, held_out.split.num_chunks).astype(np.float32)
    return np.sort(((queries[:, None] - vectors) ** 2).sum(2), axis=1)[:, :k]


def distances_of(held_out: EvaluationSet, ids: np.ndarray) -> np.ndarray:
    vectors = held_out.datastore.train.embeddings.gather(ids.ravel()).astype(np.float32).reshape(*ids.shape, -1)
    queries = held_out.split.embeddings.read(0, len(ids)).astype(np.float32)
    return ((queries[:, None] - vectors) ** 2).sum(2)


def test_each_fraction_is_searched_like_a_whole_datastore(
    held_out: EvaluationSet, parts: list[PartialDatastore]
) -> None:
    train = held_out.datastore.train
    everything = np.arange(train.num_chunks)
    points = points_of(train.documents_of(everything)[0], 0, 0)
    assert [part.fraction for part in parts] == list(FRACTIONS)
    for part in parts:
        chunks = everything[points < part.fraction]
        assert part.chunks == len(chunks)
        assert part.documents == len(set(train.documents_of(chunks)[0].tolist()))
        assert np.isin(part.found, chunks).all()
        assert np.allclose(distances_of(held_out, part.found), exact_distances(held_out, chunks, 4), atol=1e-3)


def test_the_whole_datastore_gives_the_stored_neighbors(held_out: EvaluationSet, parts: list[PartialDatastore]) -> None:
    stored = held_out.split.neighbor_ids.read(0, held_out.split.num_chunks)[:, :4]
    assert parts[-1].chunks == held_out.datastore.train.num_chunks
    assert np.allclose(distances_of(held_out, parts[-1].found), distances_of(held_out, stored), atol=1e-5)


def test_larger_fractions_include_smaller_ones_and_seeds_are_independent(held_out: EvaluationSet) -> None:
    numbers = np.arange(50_000)
    points = points_of(numbers, 0, 0)
    assert points.min() >= 0
    assert points.max() < 1
    assert abs((points < 0.1).mean() - 0.1) < 0.01
    assert abs((points_of(numbers, 0, 1)[points < 0.1] < 0.1).mean() - 0.1) < 0.02
    assert abs((points_of(numbers, 1, 0)[points < 0.1] < 0.1).mean() - 0.1) < 0.02
    alone = next(iter(search_fractions(held_out, 8, 4, (0.3,))))
    among = list(search_fractions(held_out, 8, 4, (0.3, 0.1, 0.2)))[-1]
    assert np.array_equal(alone.found, among.found)
    assert (alone.documents, alone.chunks) == (among.documents, among.chunks)


def test_the_block_size_does_not_change_results(
    held_out: EvaluationSet, parts: list[PartialDatastore], monkeypatch
) -> None:
    monkeypatch.setattr(datastore_fractions, "_BLOCK_CHUNKS", 400)
    monkeypatch.setattr(datastore_fractions, "_BLOCK_QUERIES", 20)
    for part, again in zip(parts, search_fractions(held_out, 50, 4, FRACTIONS), strict=True):
        assert (part.documents, part.chunks) == (again.documents, again.chunks)
        assert np.allclose(distances_of(held_out, part.found[:50]), distances_of(held_out, again.found), atol=1e-5)


def test_deleted_documents_are_in_no_fraction(held_out: EvaluationSet, tmp_path: Path) -> None:
    copy = EvaluationSet("copy", Datastore.open(shutil.copytree(held_out.datastore.folder, tmp_path / "copy")))
    train = copy.datastore.train
    gone = [row["id"] for row in train.metadata(range(0, train.num_documents, 2))]
    delete_documents(copy.datastore.folder, gone)
    (part,) = search_fractions(copy, 20, 4, (1.0,))
    assert part.documents == train.num_documents - len(gone)
    assert all(number % 2 for number in documents_of(part, copy))


def with_setting(held_out: EvaluationSet, folder: Path, key: str, value: object) -> EvaluationSet:
    """A copy of the datastore whose neighbors were found with another setting."""
    copy = Datastore.open(shutil.copytree(held_out.datastore.folder, folder))
    path = copy.folder / "neighbors" / "00000" / "manifest.json"
    manifest = read_json(path)
    manifest["recipe"]["settings"][key] = value
    write_checked(path, manifest | {"fingerprint": fingerprint(manifest["recipe"])})
    return EvaluationSet("copy", copy)


def test_the_datastores_max_overlap_is_applied(held_out: EvaluationSet, tmp_path: Path) -> None:
    changed = with_setting(held_out, tmp_path / "copy", "neighbors.max_overlap", 0.5)
    copy = changed.datastore
    (part,) = search_fractions(changed, 40, 4, (1.0,))
    tokens, lengths = copy.valid.tokens.read(0, 40), copy.valid.lengths.read(0, 40)
    rows, columns = np.nonzero(part.found >= 0)
    ids = part.found[rows, columns]
    assert (
        overlap(tokens[rows], lengths[rows], copy.train.tokens.gather(ids), copy.train.lengths.gather(ids)).max() <= 0.5
    )


def test_neighbors_ordered_by_tokens_keep_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "fastest_products", lambda *_: "float32")  # the same candidates on all processors
    settings = NeighborSettings(stored=6, candidates=24, rerank="tokens", search="exact")
    corpus = write_corpus(tmp_path / "corpus.jsonl", 90)
    ordered = EvaluationSet("ordered", build_local(tiny_config(tmp_path, corpus, neighbors=settings)))
    half, whole = search_fractions(ordered, 40, 4, (0.5, 1.0))
    assert np.array_equal(whole.found, ordered.split.neighbor_ids.read(0, 40)[:, :4])
    assert (np.diff(distances_of(ordered, whole.found)) < 0).any()
    assert half.found.shape == whole.found.shape


@pytest.fixture(scope="module")
def by_ngrams(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """A datastore of two generations whose neighbors share n-grams and were found in both."""
    folder = tmp_path_factory.mktemp("ngrams")
    files = [write_corpus(folder / f"{seed}.jsonl", 60, seed, num_paragraphs=60) for seed in range(2)]
    files[1].write_text(files[1].read_text().replace("doc-", "more-"))  # ids are different
    settings = NeighborSettings(stored=6, candidates=24, rerank="tokens", search="ngrams")
    config = tiny_config(folder, files[0], neighbors=settings)
    build_local(config)
    both = replace(config, corpus=replace(config.corpus, paths=tuple(map(str, files))))
    build_local(both, append=True)
    return build_local(both, only="neighbors", rebuild=True)


@pytest.mark.parametrize("rerank", ["tokens", "embeddings"])
def test_the_whole_datastore_gives_the_stored_neighbors_by_ngrams(
    by_ngrams: Datastore, tmp_path: Path, rerank: str
) -> None:
    datastore = by_ngrams
    if rerank == "embeddings":
        settings = NeighborSettings(stored=6, candidates=24, rerank=rerank, search="ngrams")
        folder = shutil.copytree(by_ngrams.folder, tmp_path / "datastore")
        config = tiny_config(tmp_path, Path(), corpus=CorpusSettings(shard_bytes=30_000, split=(900, 100, 0)))
        datastore = build_local(replace(config, datastore=folder, neighbors=settings), only="neighbors", rebuild=True)
    held_out = EvaluationSet("valid", datastore)
    (whole,) = search_fractions(held_out, held_out.split.num_chunks, 4, (1.0,))
    stored = held_out.split.neighbor_ids.read(0, held_out.split.num_chunks)[:, :4]
    assert whole.chunks == datastore.train.num_chunks
    assert whole.documents == datastore.train.num_documents
    assert (whole.found == stored).all()


def test_ngrams_of_a_fraction_are_counted_in_the_fraction(by_ngrams: Datastore, tmp_path: Path) -> None:
    """As if the other documents were deleted and the datastore built again."""
    held_out, train = EvaluationSet("valid", by_ngrams), by_ngrams.train
    half = next(search_fractions(held_out, 60, 4, (0.5, 1.0)))
    everything = np.arange(train.num_chunks)
    numbers = train.documents_of(everything)[0]
    inside = points_of(numbers, 0, 0) < 0.5
    assert (half.chunks, half.documents) == (inside.sum(), len(np.unique(numbers[inside])))
    assert np.isin(half.found[half.found >= 0], everything[inside]).all()
    copy = Datastore.open(shutil.copytree(by_ngrams.folder, tmp_path / "copy"))
    delete_documents(copy.folder, {row["id"] for row in train.metadata(np.unique(numbers[~inside]).tolist())})
    (left,) = search_fractions(EvaluationSet("copy", copy), 60, 4, (1.0,))
    assert np.array_equal(left.found, half.found)


def test_given_neighbors_replace_the_stored_ones(tiny_model: Retro, held_out: EvaluationSet) -> None:
    def bits(use: NeighborUse) -> float:
        return evaluator_of(tiny_model, max_tokens=500).score(held_out, use).bits_per_byte

    n = held_out.split.num_chunks
    stored = held_out.split.neighbor_ids.read(0, n).copy()
    assert bits(NeighborUse(2, found=stored)) == bits(NeighborUse(2))
    assert bits(NeighborUse(2, found=stored[:, ::-1].copy())) != bits(NeighborUse(2))
    nothing = np.full((n, 2), -1, dtype=np.int64)
    assert bits(NeighborUse(2, found=nothing)) == pytest.approx(bits(NeighborUse(0)), rel=1e-5)


@pytest.mark.parametrize("fractions", [(0.0,), (0.5, 1.5), (-0.1,)])
def test_fractions_outside_0_to_1_are_rejected(fractions: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="datastore_fractions"):
        EvaluationSettings(datastore_fractions=fractions)


def test_votes_in_a_fraction_are_those_of_a_search_through_its_documents(
    voting_datastore: Datastore, tmp_path: Path
) -> None:
    copy = Datastore.open(shutil.copytree(voting_datastore.folder, tmp_path / "copy"))
    names = [str(row["id"]) for row in copy.train.metadata(range(0, copy.train.num_documents, 5))]
    delete_documents(copy.folder, names)
    held_out = EvaluationSet("valid", Datastore.open(copy.folder))
    train, texts = held_out.datastore.train, documents_of_split(held_out.split)
    stop = held_out.split.chunk_range(1)[1]
    kept = np.setdiff1d(np.arange(train.num_documents), train.deleted_documents)
    points = points_of(kept, 0, 0)
    random, lengths = np.random.default_rng(0), []
    for part in votes_in_fractions(held_out, stop, FRACTIONS):
        documents = [
            text for text, point in zip(documents_of_split(train), points, strict=True) if point < part.fraction
        ]
        assert part.documents == len(documents)
        assert part.votes is not None
        assert part.votes.shape == (stop, train.chunk_length, COLUMNS)
        for number in range(2):
            first, end = held_out.split.chunk_range(number)
            votes = part.votes[first:end].reshape(-1, COLUMNS)
            for place in random.integers(0, len(texts[number]), 8).tolist():
                length, following = expected(documents, -1, texts[number][: place + 1])
                assert votes[place, 0] == (length if following else 0)
        lengths.append(part.votes[..., 0])
    assert (lengths[0] <= lengths[-1]).all()
    assert (lengths[0] < lengths[-1]).any()


def test_votes_of_the_whole_datastore_are_the_stored_ones(voting_datastore: Datastore) -> None:
    held_out = EvaluationSet("valid", voting_datastore)
    stop = held_out.split.num_chunks
    nothing, whole = votes_in_fractions(held_out, stop, (1e-9, 1.0))
    assert nothing.votes is not None
    assert (nothing.documents, nothing.chunks, nothing.votes.any()) == (0, 0, False)
    stored = as_columns(read_votes(held_out.split, np.arange(0, stop)))
    assert whole.found is None
    assert whole.votes is not None
    assert np.array_equal(whole.votes[..., 0], stored[..., 0])
    assert (whole.votes == stored).mean() > 0.99  # of more than 32 occurrences, others may be drawn


def test_a_datastore_without_sorted_prefixes_names_the_stage(held_out: EvaluationSet) -> None:
    with pytest.raises(InputError, match="--stage suffixes"):
        list(votes_in_fractions(held_out, 4, (1.0,)))
