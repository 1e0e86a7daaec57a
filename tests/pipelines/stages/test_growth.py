"""An appended datastore equals one built at once with the same trained index. Deleted documents appear in no result."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.index.sharded import ShardedIndex
from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.deletions import delete_ranges, deleted_ranges
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.cli import main
from pipelines.config import Config
from pipelines.reports.datastore import measure
from retro.data.batches import read_sequences
from retro.data.neighbor_choice import NeighborUse
from tests.conftest import build_local, contents, tiny_config, write_corpus

INDEXES = {"exact": "Flat", "index": "IVF8,PQ8x4", "lists": "IVF8,PQ8x4"}


def corpora(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{name}.jsonl" for name in ("a", "b", "c")]
    return [file if file.exists() else write_corpus(file, 60, seed) for seed, file in enumerate(files)]


def config_of(folder: Path, files: list[Path], method: str = "exact") -> Config:
    config = tiny_config(folder, files[0])
    return replace(
        config,
        corpus=replace(config.corpus, paths=tuple(map(str, files))),
        index=replace(config.index, factory=INDEXES[method], recall_target=0.5),
        neighbors=replace(config.neighbors, search=method),
    )


def grown(folder: Path, method: str) -> tuple[Config, Datastore]:
    """Settings and datastore, built from one file and extended by two more, one by one."""
    files = corpora(folder)
    build_local(config_of(folder, files[:1], method))
    build_local(config_of(folder, files[:2], method), append=True)
    return config_of(folder, files, method), build_local(config_of(folder, files, method), append=True)


@pytest.mark.parametrize("method", INDEXES)
def test_appended_datastore_equals_a_rebuild_with_the_same_trained_index(tmp_path, method: str) -> None:
    config, datastore = grown(tmp_path, method)
    before = contents(datastore.folder)
    assert datastore.train.num_documents > 150
    assert main(["verify", str(datastore.folder)]) == 0
    assert read_manifest(datastore.folder / "neighbors" / "00000")["counts"]["search"] == method
    told = {"exact": "exhaustive search", "index": r"index, nprobe \d+", "lists": r"lists, nprobe \d+"}
    assert re.fullmatch(told[method], measure(Retriever.open(datastore.folder))["search"])
    build_local(config, only="add", rebuild=True)
    build_local(config)
    assert contents(datastore.folder) == before
    if method == "index":
        merge_and_search(config, datastore)


def merge_and_search(config: Config, datastore: Datastore) -> None:
    """Merge the index on disk, and search it with less memory than the bytes of the shards."""
    build_local(config, only="merge")
    assert main(["verify", str(datastore.folder)]) == 0
    queries = datastore.train.embeddings.read(0, 50).astype(np.float32)
    folder, numbers = datastore.folder / "index", range(len(datastore.train.chunk_rows))
    found = [ShardedIndex.open(folder, numbers, memory).search(queries, 12) for memory in (4_000_000_000, 1)]
    assert np.mean([len(set(a) & set(b)) / 12 for a, b in zip(*found, strict=True)]) > 0.9
    assert Datastore.open(datastore.folder).fingerprint == datastore.fingerprint
    # The merged index does not apply to a part of the shards.
    part, stop = numbers[: len(numbers) // 2], int(datastore.train.tokens.starts[len(numbers) // 2])
    assert ShardedIndex.open(folder, part, 1).search(queries, 12).max() < stop
    more = write_corpus(datastore.folder.with_name("d.jsonl"), 60, 3)
    larger = replace(config, corpus=replace(config.corpus, paths=(*config.corpus.paths, str(more))))
    new = build_local(larger, append=True).train
    last = new.embeddings.read(new.num_chunks - 5, new.num_chunks).astype(np.float32)
    found = ShardedIndex.open(folder, range(len(new.chunk_rows)), 1).search(last, 12)
    assert (found >= datastore.train.num_chunks).any()  # the index merged earlier lacks these chunks


def test_appended_datastore_with_exact_search_equals_one_build(tmp_path) -> None:
    """With the same documents, order, tokenizer and embedder weights, the neighbors are the same."""
    _, datastore = grown(tmp_path / "grown", "exact")
    fresh = config_of(tmp_path / "grown", corpora(tmp_path / "grown"))
    fresh = replace(
        fresh,
        datastore=tmp_path / "fresh",
        tokenizer=TokenizerSettings(
            kind="sentencepiece", path=str(datastore.folder / "tokenizer" / "sentencepiece.model")
        ),
        embedder=replace(fresh.embedder, path=str(datastore.folder)),
    )
    whole = build_local(fresh)
    for name in ("train", "valid"):
        ours, theirs = datastore.split(name), whole.split(name)
        assert ours.num_chunks == theirs.num_chunks
        assert np.array_equal(ours.tokens.read(0, ours.num_chunks), theirs.tokens.read(0, theirs.num_chunks))
        found = [split.neighbor_distances.read(0, split.num_chunks) for split in (ours, theirs)]
        assert np.isclose(*found, atol=1e-5).mean() > 0.999  # candidates are selected in bfloat16


def test_append_keeps_existing_artifacts(tmp_path) -> None:
    files = corpora(tmp_path)
    first = build_local(config_of(tmp_path, files[:1]))
    before = contents(first.folder)
    after = contents(build_local(config_of(tmp_path, files[:2]), append=True).folder)
    kept = ("corpus", "tokenizer", "embedder", "chunks", "embeddings", "index")
    assert all(after[name] == data for name, data in before.items() if name.startswith(kept))
    assert not any("before" in name for name in after)


def test_materialized_neighbors_are_updated_by_append(tmp_path) -> None:
    files = corpora(tmp_path)
    configs = [config_of(tmp_path, files[:count]) for count in (1, 2)]
    configs = [replace(each, neighbors=replace(each.neighbors, materialized=2)) for each in configs]
    build_local(configs[0])
    grown = build_local(configs[1], append=True)
    before = contents(grown.folder)
    assert grown.has("materialize")
    build_local(configs[1], only="neighbors", rebuild=True)
    build_local(configs[1])
    assert contents(grown.folder) == before


def test_killed_append_resumes_to_the_same_bytes(tmp_path) -> None:
    config, datastore = grown(tmp_path / "whole", "exact")
    expected = contents(datastore.folder)
    files = corpora(tmp_path / "whole")
    cut = config_of(tmp_path / "cut", files[:2])
    build_local(replace(cut, corpus=replace(cut.corpus, paths=cut.corpus.paths[:1])))
    build_local(cut, append=True)
    cut = replace(cut, corpus=config.corpus)
    build_local(cut, only="chunk", append=True)
    for stage in ("embed", "train-index", "add"):
        build_local(cut, only=stage)
    neighbors = cut.datastore / "neighbors"  # killed before and during the rewrite of a moved folder
    for number, name in enumerate(("00000", "00001")):
        (neighbors / name).rename(neighbors / f"{name}.before")
        if number:
            shutil.copytree(neighbors / f"{name}.before", neighbors / f".{name}.tmp")
    assert contents(build_local(cut).folder) == expected


def test_new_files_need_append_and_append_needs_a_datastore(tmp_path, caplog) -> None:
    files = corpora(tmp_path)
    with pytest.raises(InputError, match="nothing to append to"):
        build_local(config_of(tmp_path, files[:1]), append=True)
    build_local(config_of(tmp_path, files[:1]))
    with pytest.raises(InputError, match=r"without 1 files .*b\.jsonl.*--append"):
        build_local(config_of(tmp_path, files[:2]))
    build_local(config_of(tmp_path, files[:1]), append=True)
    assert "names no file" in caplog.text


def test_files_with_the_same_name_are_distinguished_by_folder(tmp_path) -> None:
    for number, name in enumerate(("2024", "2025")):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "docs.jsonl", 60, number)
    files = [tmp_path / name / "docs.jsonl" for name in ("2024", "2025")]
    first = build_local(config_of(tmp_path, files[:1]))
    grown = build_local(config_of(tmp_path, files), append=True)
    assert grown.train.num_documents > 1.5 * first.train.num_documents
    build_local(config_of(tmp_path, files))
    moved = tmp_path / "moved"
    moved.mkdir()
    files[1] = files[1].rename(moved / "docs.jsonl")  # the corpus can move between builds
    assert build_local(config_of(tmp_path, files)).fingerprint == grown.fingerprint


# --- deleting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(tmp_path, tiny_datastore: Datastore) -> tuple[Datastore, Retriever]:
    """A copy of the datastore, opened for search before any document is deleted."""
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    return Datastore.open(folder), Retriever.open(folder)


def test_deleted_documents_disappear_from_results_at_once(searched, capsys) -> None:
    datastore, retriever = searched
    text = retriever.tokenizer.decode(datastore.train.tokens.gather(np.array([40]))[0])
    hits = retriever.search([text], 5).hits[0]
    victims = sorted({hit.document["id"] for hit in hits})
    print_before = datastore.fingerprint
    assert main(["delete", str(datastore.folder), "--ids", *victims]) == 0
    assert f"{len(victims)} documents deleted" in capsys.readouterr().out
    after = retriever.search([text], 5).hits[0]  # the retriever opened before the deletion
    assert len(after) == 5
    assert not {hit.document["id"] for hit in after} & set(victims)
    assert datastore.fingerprint != print_before

    split = datastore.train
    gone = {chunk for number in split.find_documents(victims) for chunk in range(*split.chunk_range(number))}
    assert set(split.neighbor_ids.read(0, split.num_chunks).ravel().tolist()) & gone
    batch = read_sequences(split, RetrievalSet.of(datastore), [(0, split.num_chunks)], split.num_chunks, NeighborUse(2))
    assert batch.neighbors is not None
    texts = {tuple(row) for row in split.with_continuation(np.array(sorted(gone)))[0].tolist()}
    others = np.array([chunk for chunk in range(split.num_chunks) if chunk not in gone])
    texts -= {tuple(row) for row in split.with_continuation(others)[0].tolist()}  # also in other documents
    read = {tuple(row) for row in batch.neighbors.reshape(-1, 2 * split.chunk_length).tolist()}
    assert texts
    assert not texts & read


def test_remaining_document_is_found_after_deleting_all_others(searched) -> None:
    datastore, retriever = searched
    ids = [row["id"] for row in datastore.train.metadata(range(datastore.train.num_documents))]
    assert main(["delete", str(datastore.folder), "--ids", *ids[1:]]) == 0
    hits = retriever.search(["alpha beta"], 3).hits[0]
    assert {hit.document["id"] for hit in hits} == {ids[0]}


def test_deletions_with_equal_modification_times_are_all_read(tmp_path) -> None:
    for number in range(3):
        delete_ranges(tmp_path, np.array([[10 * number, 10 * number + 5]]))
        os.utime(tmp_path / "deleted.npy", (1, 1))
        assert len(deleted_ranges(tmp_path)) == number + 1


def test_unknown_id_is_refused_and_nothing_is_deleted(searched, capsys, tmp_path) -> None:
    datastore, _ = searched
    listed = tmp_path / "ids.txt"
    known = datastore.train.metadata([0])[0]["id"]
    listed.write_text(f"{known}\nno-such-id\n")
    assert main(["delete", str(datastore.folder), "--ids-from", str(listed)]) == 2
    assert "no document 'no-such-id'" in capsys.readouterr().err
    assert not (datastore.folder / "deleted.npy").exists()
