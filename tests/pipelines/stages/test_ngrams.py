"""Neighbors by rare n-grams under the rules of the others, from a datastore that can be extended, damaged and interrupted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from indexing.embedding.lexical import token_weights
from indexing.index.exact_search import stored_distances
from indexing.neighbors import build
from indexing.neighbors.search import NeighborSearch
from indexing.neighbors.settings import NeighborSettings
from indexing.ngrams.search import NgramIndex
from indexing.similarity import shared_tokens
from indexing.similarity.overlap import overlap
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store.artifact import read_manifest, remove
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from pipelines.cli.main import main
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages import suffixes, token_indexes
from pipelines.stages.table import lock
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.suffixes.whole_search import problems_of

SETTINGS = NeighborSettings(stored=6, candidates=24, rerank="tokens", search="ngrams")


def config_of(folder: Path, corpus: Path, **changes) -> Config:
    return tiny_config(folder, corpus, neighbors=replace(SETTINGS, **changes))


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    folder = tmp_path_factory.mktemp("ngrams")
    config = config_of(folder, tiny_corpus)
    shutil.copytree(tiny_datastore.folder, config.datastore)
    for stage in ("ngrams", "neighbors"):
        build_local(config, only=stage, rebuild=True)
    return config


@pytest.mark.parametrize("name", ["train", "valid"])
def test_neighbors_are_distinct_and_not_of_the_own_document(built: Config, name: str) -> None:
    datastore = Datastore.open(built.datastore)
    split = datastore.split(name)
    ids = split.neighbor_ids.read(0, split.num_chunks)
    assert (ids >= 0).mean() > 0.95
    assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in ids)
    if name == "train":
        _, first, stop = split.documents_of(np.arange(split.num_chunks))
        assert not ((ids >= first[:, None]) & (ids < stop[:, None])).any()
    assert main(["verify", str(built.datastore)]) == 0


def test_neighbors_are_the_same_for_any_number_of_chunks_at_a_time(built: Config, tmp_path, monkeypatch) -> None:
    datastore = Datastore.open(built.datastore)
    retrieval, split = RetrievalSet.of(datastore), datastore.valid
    order = SharedTokens(token_weights(datastore.folder / "embedder"), retrieval)
    monkeypatch.setattr(build, "BLOCK_ROWS", 5)
    monkeypatch.setattr(shared_tokens, "_READ_PAIRS", 50)
    search = NeighborSearch([], built.neighbors, order, NgramIndex.open(retrieval))
    build.neighbor_shard(tmp_path, split, (0, split.num_chunks), search, advance=lambda _: None)
    same = (np.load(tmp_path / "ids.npy") == split.neighbor_ids.read(0, split.num_chunks)).all(axis=1)
    assert same.mean() > 0.9  # the others are completed by the index


def test_stored_distances_are_those_of_the_embeddings(built: Config) -> None:
    datastore = Datastore.open(built.datastore)
    retrieval, split, chunks = RetrievalSet.of(datastore), datastore.valid, np.arange(0, 40, 3)
    for ranks in ([0], [1, 5], range(6)):
        ids = split.neighbor_ids.gather(chunks)[:, ranks]
        vectors = split.embeddings.gather(chunks).astype(np.float32)
        near = datastore.train.embeddings.gather(ids.clip(0).ravel()).reshape(*ids.shape, -1)
        expected = np.where(ids >= 0, np.square(vectors[:, None] - near).sum(axis=2), np.inf)
        np.testing.assert_allclose(stored_distances(split, chunks, retrieval, ranks), expected, rtol=1e-5)


def test_neighbors_share_ngrams(built: Config) -> None:
    """Random words form few bigrams by chance, so most first neighbors hold a copied passage."""
    train = Datastore.open(built.datastore).train
    tokens, near = train.tokens.read(0, 300), train.tokens.gather(train.neighbor_ids.read(0, 300)[:, 0])

    def bigrams(row: np.ndarray) -> set[tuple[int, int]]:
        return set(zip(row.tolist(), row[1:].tolist(), strict=False))

    assert np.mean([len(bigrams(a) & bigrams(b)) >= 8 for a, b in zip(tokens, near, strict=True)]) > 0.7


def test_near_copies_are_dropped(tmp_path: Path, built: Config) -> None:
    shutil.copytree(built.datastore, tmp_path / "datastore")
    config = replace(built, datastore=tmp_path / "datastore", neighbors=replace(SETTINGS, max_overlap=0.5))
    train = build_local(config, only="neighbors", rebuild=True).train
    ids = train.neighbor_ids.read(0, 200)
    rows, columns = np.nonzero(ids >= 0)
    assert len(rows) == ids.size
    tokens, lengths = train.with_continuation(ids[rows, columns])
    assert overlap(train.tokens.read(0, 200)[rows], train.lengths.read(0, 200)[rows], tokens, lengths).max() <= 0.5


def test_a_lost_shard_and_a_killed_stage_are_made_again_with_the_same_bytes(tmp_path: Path, built: Config) -> None:
    shutil.copytree(built.datastore, tmp_path / "datastore")
    config = replace(built, datastore=tmp_path / "datastore")
    before = contents(config.datastore)
    shutil.rmtree(config.datastore / "ngrams" / "00002")
    executor = make_executor(config.executor)

    def die(stage, function, tasks, advance):
        if "ngrams/00002" in tasks[0].name:
            raise RuntimeError("killed")
        return executor.map(stage, function, tasks, advance)

    killed = SimpleNamespace(map=die)
    with pytest.raises(RuntimeError, match="killed"):
        token_indexes.run_ngrams(config, killed)
    assert any("runs" in name for name in contents(config.datastore))
    build_local(config)
    assert contents(config.datastore) == before


@pytest.mark.parametrize("stage", ["ngrams", "votes"])
def test_what_a_build_leaves_that_is_killed_after_its_last_shard_is_reported_and_removed_by_the_next(
    tmp_path: Path, built: Config, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    shutil.copytree(built.datastore, tmp_path / "datastore")
    config, folder = replace(built, datastore=tmp_path / "datastore"), tmp_path / "datastore" / stage
    if stage == "votes":
        build_local(config, only="suffixes")
    before = contents(build_local(config, only=stage).folder)

    def die(path: Path) -> None:
        if path.name in ("runs", "ranges"):
            raise RuntimeError("killed")
        remove(path)

    shutil.rmtree(folder / "00000")
    with monkeypatch.context() as patched:
        patched.setattr(suffixes if stage == "votes" else token_indexes, "remove", die)
        with pytest.raises(RuntimeError, match="killed"):
            build_local(config, only=stage)
    (folder / ".00000.0123abcd.tmp").mkdir()  # of a second process, which died when this one had finished the shard
    (folder / ".00000.0123abcd.tmp" / "x.npy").write_bytes(b"x")
    (temporary,) = {"runs", "ranges"} & {path.name for path in folder.iterdir()}
    reported = [str(problem) for problem in problems_of(config.datastore)]
    assert len(reported) == 2
    assert all("was left by a build that was killed" in line for line in reported)
    assert {f"{stage}/{temporary}", f"{stage}/.00000.0123abcd.tmp"} == {
        problem.artifact for problem in problems_of(config.datastore)
    }
    with lock(config.datastore):
        assert not problems_of(config.datastore)
    shutil.copytree(config.datastore, tmp_path / "repaired")
    assert main(["verify", str(tmp_path / "repaired"), "--repair"]) == 1
    build_local(config, only=stage)
    for made in (config.datastore, tmp_path / "repaired"):
        assert contents(made) == before
        assert not problems_of(made)


@pytest.mark.parametrize("where", ["own", "other"])
def test_datastores_without_ngrams_are_named_with_the_stage(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, built: Config, where: str
) -> None:
    config = config_of(tmp_path, tiny_corpus)
    if where == "own":
        shutil.copytree(tiny_datastore.folder, config.datastore)
    else:
        shutil.copytree(built.datastore, config.datastore)
        config = replace(config, neighbors=replace(SETTINGS, extra_datastores=(tiny_datastore.folder,)))
    lacking = config.datastore if where == "own" else tiny_datastore.folder
    with pytest.raises(InputError, match=rf"{lacking} has no finished 'ngrams' stage.*--stage ngrams"):
        build_local(config, only="neighbors", rebuild=True)


@pytest.mark.parametrize("repeated", ["chunk", "document of one chunk"])
def test_chunks_with_frequent_ngrams_only_get_neighbors_by_their_embeddings(tmp_path: Path, repeated: str) -> None:
    text = "the same few words in every document"
    texts = [text] * 320 if repeated == "document of one chunk" else [" ".join([text] * 6)] * 280
    datastore = build_local(config_of(tmp_path, write_texts(tmp_path / "corpus.jsonl", texts)))
    train = datastore.train
    assert train.num_chunks > 270
    ids = train.neighbor_ids.read(0, train.num_chunks)
    assert (ids >= 0).all()
    counts = [read_manifest(path)["counts"] for path in sorted((datastore.folder / "ngrams").iterdir())]
    assert sum(count["ngrams"] for count in counts) > 0
    assert sum(count["entries"] for count in counts) == 0


@pytest.mark.parametrize("chunk_length", [2, 3])
def test_chunks_shorter_than_the_longest_ngram_have_neighbors(tmp_path: Path, chunk_length: int) -> None:
    config = config_of(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 8))
    datastore = build_local(replace(config, chunks=replace(config.chunks, chunk_length=chunk_length)))
    train = datastore.train
    assert (train.neighbor_ids.read(0, train.num_chunks) >= 0).mean() > 0.9
