"""An appended datastore equals one built at once with the same trained index, but for neighbors that are not merged."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.index.exact_search import stored_distances
from indexing.index.sharded import ShardedIndex
from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main
from pipelines.cli.reports.datastore import measure_neighbors
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages import corpus as corpus_stage
from pipelines.stages.generations import generations
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.verification.contents import check_contents

INDEXES = {"exact": "Flat", "index": "IVF8,PQ8x4", "ngrams": "Flat"}


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
        neighbors=replace(config.neighbors, search=method, rerank="tokens" if method == "ngrams" else "embeddings"),
    )


def grown(folder: Path, method: str) -> tuple[Config, Datastore]:
    """Settings and datastore, built from one file and extended by two more, one by one."""
    files = corpora(folder)
    build_local(config_of(folder, files[:1], method))
    build_local(config_of(folder, files[:2], method), append=True)
    return config_of(folder, files, method), build_local(config_of(folder, files, method), append=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Datastore]:
    """A grown datastore with exact search. Read-only."""
    return grown(tmp_path_factory.mktemp("whole"), "exact")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """The three files, and a datastore of the first one with exact search. Read-only."""
    folder = tmp_path_factory.mktemp("first")
    files = corpora(folder)
    return files, build_local(config_of(folder, files[:1])).folder


@pytest.fixture
def files(first: tuple[list[Path], Path], tmp_path: Path) -> list[Path]:
    """The three files; `tmp_path` has a copy of the datastore of the first one."""
    files, folder = first
    shutil.copytree(folder, tmp_path / "datastore")
    return files


@pytest.mark.parametrize("method", INDEXES)
def test_appended_datastore_equals_a_rebuild_with_the_same_trained_index(tmp_path, method: str, whole) -> None:
    if method == "exact":
        config = replace(whole[0], datastore=tmp_path / "datastore")
        datastore = Datastore.open(shutil.copytree(whole[1].folder, config.datastore))
    else:
        config, datastore = grown(tmp_path, method)
    before = contents(datastore.folder)
    assert datastore.train.num_documents > 150
    check_contents(datastore)
    assert main(["verify", str(datastore.folder)]) == 0
    assert read_manifest(datastore.folder / "neighbors" / "00000")["counts"]["search"] == method
    told = {"exact": "exhaustive search", "index": r"index, nprobe \d+", "ngrams": "rare n-grams"}
    assert re.fullmatch(told[method], measure_neighbors(Retriever.open(datastore.folder))["search"])
    build_local(config, only="add", rebuild=True)
    build_local(config)
    after = contents(datastore.folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if method != "ngrams":
        assert not changed
    else:  # only the chunks of the last file have searched all the others before too
        *earlier, _ = generations(datastore.folder)
        kept = [f"neighbors/{shard:05d}/" for shards in earlier for shard in shards]
        assert changed
        assert all(name.startswith((*kept, "manifest.json")) for name in changed)
    if method == "index":
        merge_and_search(config, datastore)


def test_with_ngrams_earlier_chunks_keep_their_neighbors_until_a_rebuild(tmp_path) -> None:
    """Also those of a shard, or of all shards of a generation, that are made again."""
    files = corpora(tmp_path)
    small, large = (config_of(tmp_path, files[:count], "ngrams") for count in (1, 2))

    def neighbors() -> dict[str, bytes]:
        return {name: data for name, data in contents(small.datastore).items() if name.startswith("neighbors/")}

    def largest(shards: range) -> int:
        train = Datastore.open(small.datastore).train
        return int(
            train.neighbor_ids.read(int(train.tokens.starts[shards.start]), int(train.tokens.starts[shards.stop])).max()
        )

    def assert_made_again(expected: dict[str, bytes], lost: range) -> None:
        for shard in lost:
            shutil.rmtree(small.datastore / "neighbors" / f"{shard:05d}")
        build_local(small)
        assert neighbors() == expected

    build_local(small)
    first = neighbors()
    build_local(large, append=True)
    appended = neighbors()
    earlier, later = generations(small.datastore)
    num_earlier = int(Datastore.open(small.datastore).train.tokens.starts[later.start])
    assert len(earlier) > 1
    assert first.items() < appended.items()
    assert largest(earlier) < num_earlier <= largest(later)
    assert_made_again(appended, earlier[:1])
    assert_made_again(appended, earlier)
    assert main(["verify", str(small.datastore)]) == 0

    build_local(large, only="neighbors", rebuild=True)
    rebuilt = neighbors()
    assert largest(earlier) >= num_earlier
    assert_made_again(rebuilt, earlier[:1])
    assert_made_again(rebuilt, earlier)
    assert main(["verify", str(small.datastore)]) == 0


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


def test_appended_datastore_with_exact_search_equals_one_build(tmp_path, whole) -> None:
    """With the same documents, order, tokenizer and embedder weights, the neighbors are the same."""
    fresh, datastore = whole
    fresh = replace(
        fresh,
        datastore=tmp_path / "fresh",
        tokenizer=TokenizerSettings(
            kind="sentencepiece", path=str(datastore.folder / "tokenizer" / "sentencepiece.model")
        ),
        embedder=replace(fresh.embedder, path=str(datastore.folder)),
    )
    other = build_local(fresh)
    for name in ("train", "valid"):
        ours, theirs = datastore.split(name), other.split(name)
        assert ours.num_chunks == theirs.num_chunks
        assert np.array_equal(ours.tokens.read(0, ours.num_chunks), theirs.tokens.read(0, theirs.num_chunks))
        found = [
            stored_distances(each.split(name), np.arange(ours.num_chunks), RetrievalSet.of(each), range(6))
            for each in (datastore, other)
        ]
        assert np.isclose(*found, atol=1e-5).mean() > 0.999  # candidates are selected in bfloat16


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


def test_killed_append_resumes_to_the_same_bytes(tmp_path, whole) -> None:
    config, datastore = whole
    expected = contents(datastore.folder)
    cut = config_of(tmp_path / "cut", corpora(datastore.folder.parent)[:2])
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


def test_new_files_need_append_and_append_needs_a_datastore(tmp_path, caplog, files) -> None:
    with pytest.raises(InputError, match="nothing to append to"):
        build_local(config_of(tmp_path / "none", files[:1]), append=True)
    with pytest.raises(InputError, match=r"without 1 files .*b\.jsonl.*--append"):
        build_local(config_of(tmp_path, files[:2]))
    before = contents(tmp_path / "datastore")
    caplog.set_level("INFO", "retro")
    build_local(config_of(tmp_path, files[:1]), append=True)
    assert "names no file that" in caplog.text
    assert contents(tmp_path / "datastore") == before


def test_new_files_alone_can_be_appended(tmp_path, caplog, whole, files) -> None:
    caplog.set_level("INFO", "retro")
    for file in files[1:]:
        build_local(config_of(tmp_path, [file]), append=True)
        assert "append: 1 new files with 60 documents" in caplog.text
        caplog.clear()
        build_local(config_of(tmp_path, files[:1]))  # the original command
    ours, theirs = (contents(folder) for folder in (tmp_path / "datastore", whole[1].folder))
    described = ("files.json", "plan.json", "manifest.json", "report.json")  # with paths and times of the files
    assert {name: data for name, data in ours.items() if not name.endswith(described)} == {
        name: data for name, data in theirs.items() if not name.endswith(described)
    }
    assert main(["verify", str(tmp_path / "datastore")]) == 0
    build_local(config_of(tmp_path, files))  # all files, as if they had been named from the beginning
    build_local(config_of(tmp_path, files[1:2]))
    assert contents(tmp_path / "datastore") == ours


def test_original_command_finishes_a_killed_append_of_new_files(tmp_path, files) -> None:
    first = Datastore.open(tmp_path / "datastore")
    config = config_of(tmp_path, files[1:2])
    corpus_stage.append(config, *corpus_stage.files_to_append(config, make_executor(config.executor)))
    finished = build_local(config_of(tmp_path, files[:1]))
    assert finished.train.num_documents > 1.5 * first.train.num_documents
    assert main(["verify", str(finished.folder)]) == 0


def test_files_with_the_same_name_are_distinguished_by_folder_and_can_move(tmp_path) -> None:
    """Such as a file of every day: its name is no reason to take it for the indexed one."""
    for number, name in enumerate(("2024", "2025")):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "docs.jsonl", 60, number)
    first = build_local(config_of(tmp_path, [tmp_path / "2024"]))
    for repeat in range(2):
        both = build_local(config_of(tmp_path, [tmp_path / "2025"]), append=not repeat)
        assert both.train.num_documents > 1.5 * first.train.num_documents
    before = contents(both.folder)
    build_local(config_of(tmp_path, [tmp_path / "2024"]))
    build_local(config_of(tmp_path, [tmp_path / "20*" / "*"]))  # found by another pattern, so with another name
    assert contents(both.folder) == before
    (tmp_path / "2025").rename(tmp_path / "moved")
    assert build_local(config_of(tmp_path, [tmp_path / "2024", tmp_path / "moved"])).fingerprint == both.fingerprint


def changed(file: Path, files: list[Path]) -> list[Path]:
    write_corpus(files[0], 30, seed=7)
    return [files[0], file]


def copied(file: Path, files: list[Path]) -> list[Path]:
    return [shutil.copy(files[0], file.with_name("copy.jsonl")), file]


def empty(file: Path, files: list[Path]) -> list[Path]:
    file.with_name("empty.jsonl").write_text("")
    return [file.with_name("empty.jsonl")]


REFUSED = {changed: r"a\.jsonl has changed", copied: r"copy\.jsonl is a copy of .*a\.jsonl", empty: r"corpus\.paths"}


@pytest.mark.parametrize("make", REFUSED)
def test_append_refuses_before_it_writes(tmp_path, make) -> None:
    files = corpora(tmp_path)
    build_local(config_of(tmp_path, files[:1]))
    before = contents(tmp_path / "datastore")
    with pytest.raises(InputError, match=REFUSED[make]):
        build_local(config_of(tmp_path, make(files[1], files)), append=True)
    assert contents(tmp_path / "datastore") == before


def test_append_with_other_settings_writes_nothing(tmp_path, files) -> None:
    before = contents(tmp_path / "datastore")
    config = config_of(tmp_path, files[1:2])
    for section, key, value in (
        ("corpus", "text_key", "title"),
        ("tokenizer", "vocab_size", 500),
        ("neighbors", "stored", 5),
    ):
        changed = replace(config, **{section: replace(getattr(config, section), **{key: value})})
        with pytest.raises(InputError, match=f"{section}.{key} was"):
            build_local(changed, append=True)
        assert contents(tmp_path / "datastore") == before


def test_lost_appended_files_are_named_and_can_be_appended_again(tmp_path, capsys, files) -> None:
    folder = build_local(config_of(tmp_path, files[1:2]), append=True).folder
    before = contents(folder)
    (folder / "appended" / "00001" / "plan.json").write_text("{}")
    assert main(["verify", str(folder), "--repair"]) == 1
    assert "appended/00001" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"appended/00001.*--append"):
        build_local(config_of(tmp_path, files[:1]))
    with pytest.raises(InputError, match=r"appended/00001.*corpus\.paths"):
        build_local(config_of(tmp_path, files[2:]), append=True)
    build_local(config_of(tmp_path, files[1:2]), append=True)
    assert contents(folder) == before


def test_rebuild_checks_the_files_first_and_names_appended_ones_that_it_leaves_out(tmp_path, caplog, files) -> None:
    build_local(config_of(tmp_path, files[1:2]), append=True)
    before = contents(tmp_path / "datastore")
    with pytest.raises(InputError, match="does not exist"):
        build_local(config_of(tmp_path, [tmp_path / "typing-eror.jsonl"]), rebuild=True)
    assert contents(tmp_path / "datastore") == before
    build_local(config_of(tmp_path, files[:1]), rebuild=True)
    assert re.search(r"1 appended files are left out.*b\.jsonl", caplog.text)


def test_a_stage_takes_only_those_that_depend_on_it_out_of_the_record(tmp_path) -> None:
    files = corpora(tmp_path)
    build_local(config_of(tmp_path, files[:1], "ngrams"))
    config = config_of(tmp_path, files[:2], "ngrams")
    build_local(config, only="chunk", append=True)
    for stage in ("suffixes", "votes"):
        build_local(config, only=stage)
    assert all(build_local(config, only="embed").has(stage) for stage in ("suffixes", "votes"))
    assert not Datastore.open(config.datastore).has("neighbors")
    whole = build_local(config)
    votes = contents(whole.folder / "votes")
    rebuilt = build_local(config, only="ngrams", rebuild=True)
    assert [stage for stage in ("add", "sparse", "suffixes", "votes") if rebuilt.has(stage)] == [
        "add",
        "sparse",
        "suffixes",
        "votes",
    ]
    assert not rebuilt.has("neighbors")
    assert contents(rebuilt.folder / "votes") == votes
