"""`neighbors.search` = "auto" chooses n-grams where it can. Datastores keep the method they were built with."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.corpus.chunks import ChunkSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.settings import Method, NeighborSettings, stored_settings
from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import fingerprint, read_manifest
from indexing.store.datastore import Datastore, read_datastore_manifest, write_datastore_manifest
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from pipelines.cli.main import main
from pipelines.cli.reports.datastore import measure
from pipelines.config import Config
from pipelines.stages.agreement import check_agreement
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


def written_by_an_earlier_version(
    config: Config, search: Method = "exact", method: str = "exact", setting: str = "auto"
) -> Config:
    """A datastore as earlier versions built it: `setting` in the recipes of its neighbors, and the method in their counts."""
    folder = build_local(replace(config, neighbors=replace(config.neighbors, search=search))).folder
    prints = []
    for path in sorted((folder / "neighbors").glob("*/manifest.json")):
        manifest = read_json(path)
        manifest["recipe"]["settings"]["neighbors.search"] = setting
        manifest["counts"]["search"] = method
        prints.append(fingerprint(manifest["recipe"]))
        write_checked(path, manifest | {"fingerprint": prints[-1]})
    manifest = read_datastore_manifest(folder)
    prints = {**manifest["fingerprints"], "neighbors": fingerprint(prints)}
    write_datastore_manifest(folder, {**manifest, "fingerprints": prints})
    return config


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


def test_stored_neighbors_keep_the_method_of_earlier_versions(tmp_path: Path) -> None:
    """Resume, append, verify and live search; a rebuild chooses again."""
    config = written_by_an_earlier_version(config_of(tmp_path, "a"))
    before = contents(config.datastore)
    assert contents(build_local(config).folder) == before
    shutil.rmtree(config.datastore / "neighbors" / "00000")  # as a killed build leaves it
    assert contents(build_local(config).folder) == before
    grown = build_local(config_of(tmp_path, "a", "b"), append=True)
    assert recorded(grown) == {("auto", "exact")}
    assert not grown.has("ngrams")
    assert main(["verify", str(config.datastore)]) == 0
    assert isinstance(Retriever.open(config.datastore).neighbors.indexes[0], ProductIndex)
    rebuilt = build_local(config_of(tmp_path, "a", "b"), rebuild=True)
    assert recorded(rebuilt) == {("ngrams", "ngrams")}


@pytest.mark.parametrize("setting", ["auto", "lists"])
def test_neighbors_found_by_lists_are_read_but_not_extended(tmp_path: Path, setting: str) -> None:
    """Live search uses the index for them, nearest first; a rebuild searches again by another method."""
    config = replace(config_of(tmp_path, "a"), index=IndexSettings(factory="IVF8,PQ8x4"))
    ordered = replace(config, neighbors=replace(AUTO, rerank="none"))
    folder = written_by_an_earlier_version(ordered, "index", "lists", setting).datastore
    before = contents(folder)
    assert main(["verify", str(folder)]) == 0
    check_agreement(replace(ordered, given=frozenset({"neighbors.search"})))
    assert stored_settings(Datastore.open(folder)) == (replace(AUTO, search="index"), "index")
    retriever = Retriever.open(folder)
    assert isinstance(retriever.neighbors.indexes[0], ShardedIndex)
    assert (retriever.neighbors.rank(retriever.datastore.train.tokens.read(0, 3).astype(np.int64), 4).ids >= 0).all()
    assert measure(retriever)["search"] == "lists"
    assert contents(folder) == before
    for append in (False, True):
        files = replace(ordered, corpus=config_of(tmp_path, "a", "b").corpus)
        with pytest.raises(InputError, match=r"neighbors\.search = 'lists'.*--stage neighbors --rebuild"):
            build_local(files if append else ordered, append=append)
        assert contents(folder) == before
    again = replace(ordered, neighbors=replace(AUTO, search="index"))
    assert recorded(build_local(again, only="neighbors", rebuild=True)) == {("index", "index")}


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
