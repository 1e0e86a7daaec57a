"""`neighbors.search` = "auto" chooses n-grams where it can. Datastores keep the method they were built with."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.corpus.chunks import ChunkSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.index.product_search import ProductIndex
from indexing.neighbors.settings import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.config import Config
from pipelines.stages.choices import by_embeddings
from tests.conftest import build_local, contents, tiny_config, write_corpus

AUTO = NeighborSettings(stored=6, candidates=24, rerank="embeddings")


def config_of(folder: Path, *names: str, **changes) -> Config:
    files = [folder / f"{name}.jsonl" for name in names]
    for seed, file in enumerate(files):
        if not file.exists():
            write_corpus(file, 40, seed)
    config = tiny_config(folder, files[0], neighbors=AUTO, **changes)
    return replace(config, corpus=replace(config.corpus, paths=tuple(map(str, files))))


def recorded(datastore: Datastore) -> set[tuple[str, str]]:
    """The setting in the recipes of the neighbors, and the method in their counts."""
    manifests = [read_manifest(path) for path in (datastore.folder / "neighbors").iterdir()]
    return {(found["recipe"]["settings"]["neighbors.search"], found["counts"]["search"]) for found in manifests}


def test_the_lexical_embedder_has_ngrams_in_recipe_and_stages(tmp_path: Path) -> None:
    config = config_of(tmp_path, "a")
    datastore = build_local(config)
    assert recorded(datastore) == {("ngrams", "ngrams")}
    assert datastore.has("ngrams")
    before = contents(datastore.folder)
    for again in (config, replace(config, neighbors=replace(AUTO, search="ngrams"))):
        assert contents(build_local(again).folder) == before
    assert main(["verify", str(datastore.folder)]) == 0
    grown = build_local(config_of(tmp_path, "a", "b"), append=True)
    assert recorded(grown) == {("ngrams", "ngrams")}


def test_stored_neighbors_keep_their_method(tmp_path: Path) -> None:
    """Resume, append, verify and live search; a rebuild chooses again."""
    config = config_of(tmp_path, "a")
    build_local(replace(config, neighbors=replace(AUTO, search="exact")))
    before = contents(config.datastore)
    assert contents(build_local(config).folder) == before
    shutil.rmtree(config.datastore / "neighbors" / "00000")  # as a killed build leaves it
    assert contents(build_local(config).folder) == before
    grown = build_local(config_of(tmp_path, "a", "b"), append=True)
    assert recorded(grown) == {("exact", "exact")}
    assert not grown.has("ngrams")
    assert main(["verify", str(config.datastore)]) == 0
    assert isinstance(Retriever.open(config.datastore).neighbors.indexes[0], ProductIndex)
    rebuilt = build_local(config_of(tmp_path, "a", "b"), rebuild=True)
    assert recorded(rebuilt) == {("ngrams", "ngrams")}


def test_neighbors_alone_name_the_stage_that_is_missing(tmp_path: Path) -> None:
    config = config_of(tmp_path, "a")
    for stage in ("chunk", "embed", "train-index", "add"):
        build_local(config, only=stage)
    with pytest.raises(InputError, match=r"no finished 'ngrams' stage.*--stage ngrams"):
        build_local(config, only="neighbors")


def test_another_embedder_is_refused_by_name_although_stored_neighbors_keep_their_order(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "a"), neighbors=replace(AUTO, rerank="auto"))
    build_local(config)
    with pytest.raises(InputError, match=r"embedder\.kind was 'lexical', now 'transformer'"):
        build_local(replace(config, embedder=EmbedderSettings(kind="transformer", path=str(tmp_path))))


@pytest.mark.parametrize("missing", ["tokens", "ngrams of another datastore"])
def test_without_ngrams_a_line_says_why(tmp_path: Path, caplog, missing: str) -> None:
    config, reason = config_of(tmp_path, "a"), ""
    if missing == "tokens":
        config, reason = replace(config, chunks=replace(config.chunks, chunk_length=7)), "chunk_length = 7 is below 8"
    else:
        other = replace(config, datastore=tmp_path / "other", neighbors=replace(AUTO, search="exact"))
        build_local(other)
        model = str(other.datastore / "tokenizer" / "sentencepiece.model")
        config = replace(
            config,
            neighbors=replace(AUTO, extra_datastores=(other.datastore,)),
            tokenizer=replace(config.tokenizer, kind="sentencepiece", path=model),
            embedder=replace(config.embedder, path=str(other.datastore)),
        )
        reason = f"{other.datastore} has no finished 'ngrams' stage"
    with caplog.at_level(logging.INFO, "retro"):
        datastore = build_local(config)
    assert re.search(f"'auto' chooses 'exact': .*{re.escape(reason)}", caplog.text)
    assert recorded(datastore) == {("exact", "exact")}
    assert not datastore.has("ngrams")


@pytest.mark.parametrize(
    ("num_vectors", "visited", "method"),
    [
        (188_796, 48 / 2048, "index"),
        (172_033, 768 / 2048, "exact"),
        (10_000, 1, "exact"),
        (5_000_000, 1 / 4, "index"),
        (5_000_000, 0.3, "exact"),
        (10**8, 0.3, "index"),
    ],
)
def test_embeddings_are_searched_by_the_faster_method(num_vectors: int, visited: float, method: str) -> None:
    """By the index if a quarter of its lists is enough, or if the embeddings exceed the memory (docs/results/speed.md)."""
    assert by_embeddings(num_vectors, 384, visited) == method


@pytest.mark.parametrize(("target", "method"), [(0.1, "index"), (1.0, "exact")])
def test_auto_compares_all_embeddings_unless_few_lists_reach_the_recall_target(
    tmp_path: Path, target: float, method: str
) -> None:
    index = IndexSettings(factory="IVF16,PQ1x4", recall_target=target)
    config = replace(config_of(tmp_path, "a", index=index), chunks=ChunkSettings(chunk_length=7))
    assert recorded(build_local(config)) == {(method, method)}
