"""Neighbors from several datastores are the nearest of all, read in place, and refused if a datastore has changed."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.index.exact_search import exact_search, stored_distances
from indexing.neighbors.search import merge_nearest
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet
from pipelines.cli.reports.datastore import measure_neighbors
from pipelines.config import Config
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.evaluation.datastore_fractions import search_fractions
from retro.evaluation.sets import EvaluationSet
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.verification.contents import check_contents


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    """Another datastore with the same tokenizer and embedder: 60 documents that only it has, and 20 copies."""
    folder = tmp_path_factory.mktemp("other")
    corpus = write_corpus(folder / "corpus.jsonl", 60, seed=1)
    with open(corpus, "a", encoding="utf-8") as file:
        copies = tiny_corpus.read_text(encoding="utf-8").splitlines(keepends=True)[:20]
        file.writelines(line.replace('"doc-', '"copy-') for line in copies)
    config = tiny_config(folder, corpus)
    model = tiny_datastore.folder / "tokenizer" / "sentencepiece.model"
    config = replace(
        config,
        tokenizer=replace(config.tokenizer, kind="sentencepiece", path=str(model)),
        embedder=replace(config.embedder, path=str(tiny_datastore.folder)),
    )
    build_local(config)
    return config


def with_extra(folder: Path, tiny_corpus: Path, tiny_datastore: Datastore, *extra: Path) -> Config:
    """A copy of the tiny datastore that also retrieves from other datastores."""
    config = tiny_config(folder, tiny_corpus)
    shutil.copytree(tiny_datastore.folder, config.datastore)
    config = replace(config, neighbors=replace(config.neighbors, extra_datastores=extra))
    build_local(config, only="neighbors", rebuild=True)
    return config


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_corpus, tiny_datastore, other: Config) -> Config:
    """The tiny datastore with the other one in its retrieval set. Read-only."""
    return with_extra(tmp_path_factory.mktemp("both"), tiny_corpus, tiny_datastore, other.datastore)


@pytest.mark.parametrize("split_name", ["train", "valid"])
def test_neighbors_are_the_exact_nearest_of_both_datastores(both: Config, other: Config, split_name: str) -> None:
    own, theirs = Datastore.open(both.datastore), Datastore.open(other.datastore)
    check_contents(own)
    split = own.split(split_name)
    queries = split.embeddings.read(0, split.num_chunks).astype(np.float32)
    excluded = split.documents_of(np.arange(split.num_chunks))[1:] if split_name == "train" else None
    exact = [
        exact_search(queries, own.train.embeddings, 6, excluded)[::-1],
        exact_search(queries, theirs.train.embeddings, 6)[::-1],
    ]
    _, distances = merge_nearest(exact, 6)
    stored = split.neighbor_ids.read(0, split.num_chunks)  # ids can differ in ties, so distances are compared
    assert all(len(set(row)) == 6 for row in stored.tolist())
    for number, train in enumerate((own.train, theirs.train)):
        rows, places = np.nonzero(stored >> CHUNK_ID_BITS == number)
        vectors = train.embeddings.gather(stored[rows, places] & (2**CHUNK_ID_BITS - 1)).astype(np.float32)
        assert np.allclose(((vectors - queries[rows]) ** 2).sum(1), distances[rows, places], atol=1e-5)
    assert 0.05 < (stored >> CHUNK_ID_BITS == 1).mean() < 0.95


def test_merged_neighbors_of_an_append_equal_those_of_one_search(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, other: Config
) -> None:
    config = with_extra(tmp_path, tiny_corpus, tiny_datastore, other.datastore)
    added = write_corpus(tmp_path / "added.jsonl", 30, seed=5)
    config = replace(config, corpus=replace(config.corpus, paths=(str(tiny_corpus), str(added))))
    train = build_local(config, append=True).train
    first = train.neighbor_ids.shard(0)
    assert (first >> CHUNK_ID_BITS == 1).any()
    assert (first[first >> CHUNK_ID_BITS == 0] >= tiny_datastore.train.num_chunks).any()
    merged = contents(config.datastore)
    build_local(config, only="neighbors", rebuild=True)
    assert contents(config.datastore) == merged


def test_batches_contain_the_tokens_of_the_other_datastore(both: Config, other: Config) -> None:
    data = TrainingData([both.datastore], DataSettings(sequence_length=64, k=6), retrieval=True)
    own, theirs = Datastore.open(both.datastore).train, Datastore.open(other.datastore).train
    seen = 0
    for sample in range(10):
        _, (first, stop) = data.locate(sample)
        batch = data.batch(range(sample, sample + 1))
        _, starts, stops = own.documents_of(np.arange(first, stop))
        for row, stored in enumerate(own.neighbor_ids.read(first, stop)):
            allowed = [i for i in stored.tolist() if not starts[0] <= i < stops[-1]]
            for place, name in enumerate(allowed):
                split, chunk = (theirs, name - 2**40) if name >= 2**40 else (own, name)
                assert np.array_equal(batch.neighbors[0, row, place], split.with_continuation(np.array([chunk]))[0][0])
                seen += name >= 2**40
    assert seen > 20


def test_copies_in_the_other_datastore_are_neighbors_until_overlap_excludes_them(both: Config) -> None:
    train = Datastore.open(both.datastore).train
    first, stop = train.chunk_range(0)
    nearest = train.neighbor_ids.read(first, stop)[:, 0]
    assert (nearest >> CHUNK_ID_BITS == 1).any()  # the first documents are in both datastores
    retrieval = RetrievalSet.of(Datastore.open(both.datastore))
    assert (stored_distances(train, np.arange(first, stop), retrieval, [0]) < 1e-3).any()
    for limit, copies in ((1.0, True), (0.5, False)):
        options = DataSettings(sequence_length=16, k=1, max_overlap=limit)
        data = TrainingData([both.datastore], options, retrieval=True)
        samples = [i for i in range(train.num_chunks) if first <= data.locate(i)[1][0] < stop]
        batches = [data.batch(range(i, i + 1)) for i in samples]
        found = [np.array_equal(b.tokens[0], b.neighbors[0, 0, 0, :16]) for b in batches if b.neighbors is not None]
        assert any(found) == copies


def test_random_neighbors_come_from_both_datastores_by_size(both: Config, other: Config) -> None:
    data = TrainingData(
        [both.datastore], DataSettings(sequence_length=64, k=4, neighbor_source="random"), retrieval=True
    )
    retrieval = data.retrieval[0]
    share = retrieval.splits[1].num_chunks / retrieval.num_chunks
    texts = {row.tobytes() for row in retrieval.splits[1].tokens.read(0, retrieval.splits[1].num_chunks)}
    texts -= {row.tobytes() for row in retrieval.own.tokens.read(0, retrieval.own.num_chunks)}
    batch = data.batch(range(60))
    found = batch.neighbors[..., :16].astype(retrieval.own.tokens.shard(0).dtype).reshape(-1, 16)
    drawn = np.mean([row.tobytes() in texts for row in found])
    assert 0.3 * share < drawn < 1.2 * share


def test_search_and_report_use_the_whole_retrieval_set(both: Config, other: Config) -> None:
    retriever, theirs = Retriever.open(both.datastore), Datastore.open(other.datastore).train
    wanted = theirs.metadata([40])[0]
    tokens = theirs.tokens.read(*theirs.chunk_range(40))[:1]
    hit = retriever.search([retriever.tokenizer.decode(tokens[0])], k=1).hits[0][0]
    assert hit.chunk_id >> CHUNK_ID_BITS == 1
    assert hit.metadata == wanted
    figures = measure_neighbors(retriever)
    assert figures["recall"]["recall_at_6"] == 1
    assert retriever.neighbors.find(tokens.astype(np.int64), 2)[0].shape == (1, 2, 32)


def test_missing_or_changed_datastore_is_refused_and_moved_one_can_be_renamed(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, other: Config
) -> None:
    copy = shutil.copytree(other.datastore, tmp_path / "first")
    config = with_extra(tmp_path, tiny_corpus, tiny_datastore, copy)
    options = DataSettings(sequence_length=64, k=2)
    assert TrainingData([config.datastore], options, retrieval=True).batch(range(2)).neighbors is not None
    moved = copy.rename(tmp_path / "second")
    with pytest.raises(InputError, match=r"neighbors in .*first.*neighbors\.extra_datastores.*cannot be opened"):
        RetrievalSet.of(Datastore.open(config.datastore))
    TrainingData([config.datastore], options, retrieval=False)  # a baseline needs no other datastore
    before = (config.datastore / "neighbors" / "00000" / "train" / "ids.npy").stat().st_mtime_ns
    config = replace(config, neighbors=replace(config.neighbors, extra_datastores=(moved,)))
    build_local(config)
    assert (config.datastore / "neighbors" / "00000" / "train" / "ids.npy").stat().st_mtime_ns == before
    TrainingData([config.datastore], options, retrieval=True)

    changed = replace(other, datastore=moved, corpus=replace(other.corpus, split=(700, 300, 0)))
    build_local(changed, rebuild=True)
    with pytest.raises(InputError, match=r"second.*neighbors\.extra_datastores"):
        TrainingData([config.datastore], options, retrieval=True)
    with pytest.raises(InputError, match=r"'neighbors\.extra_datastores\[0\]' has changed"):
        build_local(config)


def test_incompatible_datastores_are_refused_by_name(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, other: Config
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            build_local(
                replace(config, neighbors=replace(config.neighbors, extra_datastores=(folder,))), only="neighbors"
            )

    refused(tiny_datastore.folder, r"neighbors\.extra_datastores names .* the datastore itself")
    corpus = write_corpus(tmp_path / "c.jsonl", 30, seed=2)
    strange = tiny_config(tmp_path / "strange", corpus)
    build_local(strange)
    refused(strange.datastore, r"neighbors\.extra_datastores: .* different tokenizers")
    with pytest.raises(InputError, match=r"data\.datastores.*tokenizers"):
        TrainingData([tiny_datastore.folder, strange.datastore], DataSettings(sequence_length=64), retrieval=False)
    vectors = replace(strange, datastore=tmp_path / "vectors", tokenizer=other.tokenizer)
    build_local(vectors)
    refused(vectors.datastore, r"neighbors\.extra_datastores: the embedders .* different vectors")
    build_local(replace(other, datastore=tmp_path / "unfinished"), only="chunk")
    refused(tmp_path / "unfinished", "no finished 'add' stage")


def test_fractions_cover_every_datastore_and_the_whole_gives_the_stored_neighbors(both: Config) -> None:
    held_out = EvaluationSet("valid", Datastore.open(both.datastore))
    n = held_out.split.num_chunks
    half, whole = search_fractions(held_out, n, 6, (1.0, 0.5))
    retrieval = RetrievalSet.of(held_out.datastore)
    assert (whole.documents, whole.chunks) == (
        sum(split.num_documents for split in retrieval.splits),
        retrieval.num_chunks,
    )
    assert 0.3 * whole.chunks < half.chunks < 0.7 * whole.chunks
    stored = held_out.split.neighbor_ids.read(0, n)
    assert (whole.found == stored).mean() > 0.98  # except for ties
    assert set(np.unique(half.found >> CHUNK_ID_BITS)) == {0, 1}
