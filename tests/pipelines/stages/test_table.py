"""The stage table: finished stages are kept, changed settings are refused, kills leave no trace, bytes are the same."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import split_of
from indexing.index import build as index
from indexing.index.build import IndexSettings
from indexing.store.datastore import SPLITS, Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from indexing.store.stages import SkippedStage
from indexing.suffixes.votes import has_votes
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors.settings import ExecutorSettings
from pipelines.stages import embed
from retro.model_settings import ModelSettings
from tests.conftest import (
    ARTIFACTS,
    at_operation,
    build_local,
    contents,
    forkserver,
    kill_itself,
    tiny_config,
    write_corpus,
)


def changed_since(folder: Path, moment: float) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.stat().st_mtime > moment
    ]


def test_bytes_depend_neither_on_threads_nor_on_how_stages_are_run(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus, executor=ExecutorSettings(num_threads=2))
    build_local(config, only="chunk")
    with pytest.raises(InputError, match="'embed' stage"):
        build_local(config, only="train-index")
    for stage in ("embed", "train-index", "add", "sparse", "neighbors"):
        build_local(config, only=stage)
    assert contents(config.datastore) == contents(tiny_datastore.folder)
    time.sleep(0.05)
    moment = time.time()
    build_local(config)
    assert changed_since(config.datastore, moment) == []


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("corpus", {"shard_bytes": 40_000}, "corpus.shard_bytes was 30000, now 40000"),
        ("corpus", {"split": (930, 50, 20)}, "corpus.split was [900, 100, 0], now [930, 50, 20]"),
        ("tokenizer", {"vocab_size": 350}, "tokenizer.vocab_size was 400, now 350"),
        ("chunks", {"chunk_length": 8}, "chunks.chunk_length was 16, now 8"),
        ("embedder", {"dimension": 16}, "embedder.dimension was 32, now 16"),
        ("index", {"factory": "IVF4,Flat"}, "index.factory was '', now 'IVF4,Flat'"),
        ("index", {"recall_target": 0.5}, "index.recall_target was 0.8, now 0.5"),
        ("neighbors", {"stored": 4}, "neighbors.stored was 6, now 4"),
    ],
)
def test_changed_setting_is_refused_by_name(tmp_path, tiny_corpus, tiny_datastore, section, change, named) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    with pytest.raises(InputError, match="--rebuild") as caught:
        build_local(replace(config, **{section: replace(getattr(config, section), **change)}))
    assert named in str(caught.value)


def test_settings_without_effect_on_the_bytes_can_change(tmp_path, tiny_corpus, tiny_datastore: Datastore) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    build_local(replace(config, embedder=replace(config.embedder, device="cpu")))


def test_a_datastore_keeps_the_values_of_settings_that_were_removed(tmp_path, tiny_corpus, monkeypatch) -> None:
    config = tiny_config(tmp_path, tiny_corpus, index=IndexSettings(factory="IVF4,Flat"))
    with monkeypatch.context() as former:
        former.setattr(index, "POINTS_PER_LIST", 8)
        former.setattr(index, "TUNE_QUERIES", 20)
        former.setattr(embed, "FIT_CHUNKS", 50)
        build_local(config)
    before = contents(config.datastore)
    (config.datastore / "index" / "trained" / "trained.faiss").write_bytes(b"")
    (config.datastore / "index" / "tuned" / "tuned.json").write_bytes(b"")
    build_local(config)
    assert contents(config.datastore) == before


def test_rebuilding_a_stage_rebuilds_later_stages_and_keeps_earlier_ones(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    build_local(config)
    before = contents(config.datastore)
    changed = replace(config, index=replace(config.index, factory="IVF8,Flat"))
    build_local(changed, only="train-index", rebuild=True)
    assert not Datastore.open(config.datastore).has("neighbors")
    build_local(changed)
    after = contents(config.datastore)
    fresh = build_local(tiny_config(tmp_path / "fresh", tiny_corpus, index=changed.index))
    assert after == contents(fresh.folder)
    assert all(after[name] == data for name, data in before.items() if name.startswith(("chunks", "embeddings")))


def test_rebuilding_everything_replaces_a_datastore_of_another_format(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    build_local(config)
    manifest = config.datastore / "manifest.json"
    write_checked(manifest, read_json(manifest) | {"format_version": 99})
    before = contents(config.datastore)
    for options in ({}, {"only": "embed"}, {"only": "neighbors", "rebuild": True}, {"append": True}):
        with pytest.raises(InputError, match=r"format version 99.*`retro index CONFIG --rebuild`"):
            build_local(config, **options)
        assert contents(config.datastore) == before
    build_local(config, rebuild=True)
    assert contents(config.datastore) == contents(tiny_datastore.folder)


def test_corpus_is_compared_by_its_bytes_not_by_time_or_size(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", 40)
    config = tiny_config(tmp_path, corpus)
    build_local(config)
    os.utime(corpus, (1, 1))
    build_local(config)
    corpus.write_bytes(corpus.read_bytes().replace(b"Document 3", b"Dokument 3"))
    with pytest.raises(InputError, match=r"c\.jsonl.* has changed"):
        build_local(config)


def test_second_builder_of_a_datastore_is_refused(tmp_path, tiny_corpus) -> None:
    import fcntl

    config = tiny_config(tmp_path, tiny_corpus)
    config.datastore.mkdir()
    with open(config.datastore / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            build_local(config)


def build_until_killed(config: Config, operation: int) -> None:
    at_operation(operation, config.datastore, kill_itself)
    build_local(config)


@pytest.mark.slow
def test_repeatedly_killed_index_run_resumes_to_the_same_bytes(tmp_path, tiny_corpus, tiny_datastore) -> None:
    """Killed repeatedly at random operations of any stage, then run to the end."""
    config = tiny_config(tmp_path, tiny_corpus)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    draw = random.Random(0)
    statuses = []
    for _ in range(5):  # a build takes more than 300 operations
        process = forkserver().Process(target=build_until_killed, args=(config, draw.randint(1, 100)))
        process.start()
        process.join()
        statuses.append(process.exitcode)
    assert set(statuses) <= {0, -signal.SIGKILL}
    assert statuses[:3] == 3 * [-signal.SIGKILL]
    subprocess.run([sys.executable, "-m", "pipelines.index", str(file)], check=True, capture_output=True)
    assert contents(config.datastore) == contents(tiny_datastore.folder)


@pytest.mark.parametrize("stage", ARTIFACTS)
def test_artifact_interrupted_by_a_kill_is_built_again(tmp_path, tiny_corpus, tiny_datastore, stage: str) -> None:
    """A SIGKILL inside `create` leaves earlier artifacts and a half-written temporary folder."""
    config = tiny_config(tmp_path, tiny_corpus)
    shutil.copytree(tiny_datastore.folder, config.datastore)
    for later in ARTIFACTS[ARTIFACTS.index(stage) + 1 :]:
        for path in config.datastore.glob(re.sub(r"\d+", "[0-9]*", later)):
            shutil.rmtree(path)
    victim = config.datastore / stage
    work = victim.with_name(f".{victim.name}.tmp")
    victim.rename(work)
    (work / "manifest.json").unlink()
    largest = max((path for path in work.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    build_local(config)
    assert contents(config.datastore) == contents(tiny_datastore.folder)


def test_every_datastore_gets_sorted_prefixes_and_votes_whatever_its_model_copies(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 20)
    config = tiny_config(tmp_path, corpus, skip_stages=(), model=ModelSettings(preset="172m"))
    datastore = build_local(config)
    assert datastore.has("suffixes")
    assert has_votes(datastore)
    assert main(["verify", str(config.datastore)]) == 0
    before = contents(config.datastore)
    build_local(replace(config, model=ModelSettings(preset="tiny")))
    assert contents(config.datastore) == before


@pytest.mark.parametrize("left_out", ["suffixes", "votes"])
def test_a_stage_that_is_left_out_runs_by_name(tmp_path: Path, left_out: Literal["suffixes", "votes"]) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 20), skip_stages=(left_out,))
    datastore = build_local(config)
    assert [datastore.has(stage) for stage in ("suffixes", "votes")] == [left_out == "votes", False]
    assert build_local(config, only=left_out).has(left_out)


@pytest.mark.parametrize(
    ("skipped", "finished"),
    [
        (("neighbors",), ["chunk", "sparse", "suffixes", "votes"]),
        (("neighbors", "sparse", "votes"), ["chunk", "suffixes"]),
        (("embed", "suffixes"), ["chunk", "sparse"]),
        (("sparse", "suffixes"), ["chunk", "embed", "train-index", "add", "neighbors"]),
    ],
)
def test_a_datastore_has_only_the_stages_that_are_not_left_out_in_equal_bytes(
    tmp_path: Path,
    tiny_corpus: Path,
    voting_datastore: Datastore,
    skipped: tuple[SkippedStage, ...],
    finished: list[str],
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, skip_stages=skipped)
    built, whole = build_local(config), voting_datastore.manifest["fingerprints"]
    assert list(built.manifest["fingerprints"]) == sorted(finished)
    assert built.manifest["fingerprints"] == {stage: whole[stage] for stage in finished}
    complete, own = contents(voting_datastore.folder), contents(built.folder)
    assert {name for name, data in own.items() if complete.get(name) != data} <= {"manifest.json", ".lock"}
    assert main(["verify", str(config.datastore)]) == 0
    assert main(["inspect", str(config.datastore)]) == 0


def test_a_stage_that_was_left_out_can_be_added_later(
    tmp_path: Path, copying_datastore: Datastore, tiny_corpus: Path, voting_datastore: Datastore
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, skip_stages=())
    shutil.copytree(copying_datastore.folder, config.datastore)
    build_local(config)
    assert contents(config.datastore).keys() == contents(voting_datastore.folder).keys()


def test_appended_documents_get_the_stages_that_are_not_left_out(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 20), skip_stages=("neighbors",))
    build_local(config)
    more = write_corpus(tmp_path / "more.jsonl", 20, seed=1)
    grown = build_local(replace(config, corpus=replace(config.corpus, paths=(str(more),))), append=True)
    assert list(grown.manifest["fingerprints"]) == ["chunk", "sparse", "suffixes", "votes"]
    assert grown.train.num_documents + grown.valid.num_documents == 40


@pytest.mark.parametrize(
    ("skipped", "changes", "words"),
    [
        (("neighbors",), {"materialized": 2}, "neighbors.materialized needs the stage 'neighbors'"),
        (("embed",), {"extra_datastores": (Path("other"),)}, "neighbors.extra_datastores needs the stage 'neighbors'"),
        (("ngrams",), {"search": "ngrams"}, "neighbors.search = 'ngrams' needs the stage 'ngrams'"),
    ],
)
def test_a_stage_that_other_settings_need_cannot_be_left_out(
    tmp_path: Path, skipped: tuple[SkippedStage, ...], changes: dict[str, Any], words: str
) -> None:
    config = tiny_config(tmp_path, tmp_path / "corpus.jsonl", skip_stages=())
    with pytest.raises(InputError, match=re.escape(words)):
        replace(config, skip_stages=skipped, neighbors=replace(config.neighbors, **changes))


def test_chunks_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match="skip_stages"):
        Config(skip_stages=("chunk",))  # type: ignore[arg-type]


def test_datastore_of_few_chunks_stores_all_possible_neighbors(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    (tmp_path / "b.md").write_text("# 标题\n\n检索增强的语言模型需要一个数据库。\n")
    config = tiny_config(
        tmp_path, tmp_path / "*.*", corpus=CorpusSettings(paths=(str(tmp_path / "*.*"),), split=(1, 0, 0))
    )
    datastore = build_local(config)
    train = datastore.train
    assert 2 <= train.num_chunks <= 20
    ids = train.neighbor_ids.read(0, train.num_chunks)
    documents, _, _ = train.documents_of(np.arange(train.num_chunks))
    for chunk, row in enumerate(ids):
        others = np.flatnonzero(documents != documents[chunk])
        assert set(row[row >= 0]) <= set(others)
        assert (row >= 0).sum() == min(6, len(others))


def test_corpus_problems_are_listed_by_file_and_line_and_refused_by_strict(tmp_path, caplog) -> None:
    corpus = tmp_path / "bad.jsonl"
    write_corpus(corpus, 30)
    lines = corpus.read_text().splitlines()
    lines[4:4] = ["{broken", '{"id": "empty", "text": ""}', lines[0]]
    corpus.write_text("\n".join(lines) + "\n")
    config = tiny_config(tmp_path, corpus)
    strict = replace(config, corpus=replace(config.corpus, strict=True))
    with pytest.raises(InputError, match=r"bad\.jsonl:5: broken JSON"):
        build_local(strict)
    datastore = build_local(config)
    found = read_json(datastore.folder / "corpus" / "problems.json")
    assert found["counts"] == {"broken JSON": 1, "duplicate id": 1, "empty document": 1}
    assert {(p["kind"], p["line"]) for p in found["examples"]} == {
        ("broken JSON", 5),
        ("empty document", 6),
        ("duplicate id", 7),
    }
    assert "bad.jsonl:5" in caplog.text


def test_the_list_of_problems_is_bounded_for_any_number_of_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pipelines.stages.corpus._LISTED", 3)
    write_corpus(tmp_path / "a.jsonl", 30)
    for number in range(5):
        (tmp_path / f"bad{number}.jsonl").write_text('{broken\n{"id": "empty", "text": ""}\n')
    found = read_json(build_local(tiny_config(tmp_path, tmp_path)).folder / "corpus" / "problems.json")
    assert found["counts"] == {"broken JSON": 5, "empty document": 5}
    listed = [(Path(problem["file"]).name, problem["kind"]) for problem in found["examples"]]
    assert listed == [(f"bad{number}.jsonl", kind) for number in range(3) for kind in ("broken JSON", "empty document")]


def test_held_out_documents_do_not_change_artifacts_of_the_training_documents(tmp_path) -> None:
    """Tokenizer, n-gram weights, index, training chunks and their neighbors are the same as without valid and test."""
    corpus, others = write_corpus(tmp_path / "all.jsonl", 60), tmp_path / "train" / "all.jsonl"
    weights = (6, 2, 2)
    lines = corpus.read_text().splitlines(keepends=True)
    splits = [split_of(json.loads(line)["text"], weights) for line in lines]
    others.parent.mkdir()
    others.write_text("".join(line for line, split in zip(lines, splits, strict=True) if split == "train"))
    made = {}
    for name, path in (("all", corpus), ("train", others)):
        settings = CorpusSettings(paths=(str(path),), split=weights)  # one shard
        datastore = build_local(tiny_config(tmp_path / name, path, corpus=settings))
        assert datastore.train.num_documents == splits.count("train")
        held_out = (datastore.valid.num_documents, datastore.test.num_documents)
        assert held_out == ((splits.count("valid"), splits.count("test")) if name == "all" else (0, 0))
        made[name] = {
            file: data
            for file, data in contents(datastore.folder).items()
            if not re.search("manifest|^corpus|valid|test|tuned|lock", file)
        }
    assert min(splits.count(split) for split in SPLITS) > 3
    assert {"tokenizer/sentencepiece.model", "embedder/weights.npy", "index/00000/vectors.faiss"} < set(made["all"])
    assert made["all"] == made["train"]


def test_corpus_without_training_documents_is_refused(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    with pytest.raises(InputError, match=r"corpus\.split = \(1, 10000000, 0\)"):
        build_local(replace(config, corpus=replace(config.corpus, split=(1, 10_000_000, 0))))
    build_local(config, rebuild=True)


def test_corpus_without_text_is_refused(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "text"}\n')
    with pytest.raises(InputError, match=r"corpus\.text_key = 'text'"):
        build_local(tiny_config(tmp_path, tmp_path / "x.jsonl"))
    assert not (tmp_path / "datastore").exists()


def test_files_with_unusual_names_pass_every_stage_and_verification(tmp_path, capsys) -> None:
    """Two files with one name, one file given twice, a name that is not UTF-8, one with `::`, and a wrong suffix."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
    corpus = write_corpus(tmp_path / "a" / "c.jsonl", 12)
    write_corpus(tmp_path / "b" / "c.jsonl", 12, seed=1)
    undecodable = os.fsdecode(os.fsencode(str(tmp_path)) + b"/b/caf\xe9.txt")
    Path(undecodable).write_text("A text in a file with an odd name. " * 9)
    (tmp_path / "b" / "x::y.jsonl.gz").write_text('{"text": "plain"}\n')
    (tmp_path / "a" / "again.jsonl").symlink_to(corpus)
    paths = (str(corpus), str(tmp_path / "b" / ".." / "a"), str(tmp_path / "a" / "again.jsonl"), str(tmp_path / "b"))
    config = tiny_config(tmp_path, corpus)
    config = replace(config, corpus=replace(config.corpus, paths=paths))
    datastore = build_local(config)
    assert sum(datastore.split(name).num_documents for name in SPLITS) == 12 + 12 + 1 + 1
    assert main(["verify", str(datastore.folder)]) == 0
    before = contents(datastore.folder)
    assert build_local(config).fingerprint == datastore.fingerprint
    assert contents(datastore.folder) == before
    problems = read_json(datastore.folder / "corpus" / "problems.json")["counts"]
    assert problems == {"duplicate id": 12, "wrong suffix": 1}  # write_corpus gives both files the same ids


def test_more_neighbors_than_chunks_give_a_warning(tmp_path, caplog) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "c.jsonl", 4))
    config = replace(config, neighbors=replace(config.neighbors, stored=4096, candidates=4096))
    with caplog.at_level(logging.WARNING, "retro"):
        build_local(config)
    (warning,) = [record.message for record in caplog.records if "neighbors.stored" in record.message]
    assert re.search(r"neighbors\.stored = 4,096, but there are only \d+ chunks to retrieve", warning)
