"""A datastore on an S3 server: built there, resumed from another machine, and read in every reading mode."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from indexing.progress import STATUS
from indexing.retrieval.retriever import Retriever
from indexing.store import remote
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from pipelines.cli.main import main
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors.settings import ExecutorSettings, Resources
from pipelines.executors.tasks import Task
from pipelines.stages.table import build
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.inference.verbatim_runs import traced_datastores
from tests.conftest import build_local, contents, tiny_config, write_corpus


def at(url: str) -> dict[str, bytes]:
    """Every file at a URL except the reports and the lock of a local build."""
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    found = filesystem.cat([path for path in filesystem.find(root) if "/report." not in path and "/.lock" not in path])
    return {path[len(root) + 1 :]: data for path, data in found.items()}


def here(datastore: Datastore) -> dict[str, bytes]:
    """Every file of a local datastore except the reports and the lock."""
    return {name: data for name, data in contents(datastore.folder).items() if name != ".lock"}


def fetched(cache: Path) -> set[str]:
    """Names of the files in a cache, without manifests, locks, and notes of files that were compared with their checksums."""
    files = {path.name for path in cache.rglob("*") if path.is_file() and path.parent.name != "checked"}
    return files - {"manifest.json", ".fetch.lock", ".lock"}


@pytest.fixture(scope="module")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Override the shared corpus by a smaller one: each file of each shard takes several requests to the server."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 40)


@pytest.fixture(scope="module")
def tiny_datastore(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Datastore:
    """A finished datastore of this corpus, in several shards. Read-only."""
    datastore = build_local(tiny_config(tmp_path_factory.mktemp("tiny"), tiny_corpus))
    assert len(datastore.train.chunk_rows) > 1
    return datastore


@pytest.fixture
def url(bucket: str, tiny_datastore: Datastore) -> str:
    """The URL of a copy of the tiny datastore, uploaded by an ordinary tool."""
    filesystem, root = fsspec.core.url_to_fs(f"{bucket}/wiki")
    filesystem.put(f"{tiny_datastore.folder}/", f"{root}/", recursive=True)
    return f"{bucket}/wiki"


@pytest.fixture
def config(url: str, tmp_path: Path, tiny_corpus: Path) -> Config:
    return replace(tiny_config(tmp_path, tiny_corpus), datastore=Path(url))


def test_another_machine_resumes_the_build(
    bucket, tmp_path, tiny_corpus, tiny_datastore, another_machine: Callable[[], Path]
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=Path(f"{bucket}/wiki"))
    build_local(config, only="chunk")
    made = at(f"{bucket}/wiki")
    for stage in ("embed", "train-index", "add", "sparse", "neighbors"):
        another_machine()
        build_local(config, only=stage)
    now = at(f"{bucket}/wiki")
    assert now == here(tiny_datastore)
    assert all(now[name] == data for name, data in made.items() if name != "manifest.json")


def test_the_first_trace_fetches_the_sorted_prefixes_and_says_so_and_searches_fetch_the_tokens_that_they_read(
    url: str,
    config: Config,
    another_machine: Callable[[], Path],
    caplog: pytest.LogCaptureFixture,
    tiny_datastore: Datastore,
) -> None:
    """Memory mapping needs whole files."""
    build_local(config, only="suffixes")
    cache = another_machine()
    retriever = Retriever.open(url)
    with caplog.at_level(STATUS):
        (traced,) = traced_datastores(retriever.retrieval)
    assert f"fetching the sorted prefixes of {url} into {cache}" in caplog.text
    mirror, stored = remote.local_folder(url), at(url)
    assert all((mirror / name).exists() for name in stored if name.startswith("suffixes/"))
    train = tiny_datastore.train  # the same text
    for shard in range(len(train.chunk_rows)):
        for chunk in train.tokens.shard(shard):
            traced.index.longest_match(chunk[:8])
    tokens = [name for name in stored if name.endswith("train/tokens.npy")]
    assert len(tokens) == len(train.chunk_rows) > 1
    assert all((mirror / name).exists() for name in tokens)


class ElsewhereExecutor:
    """Runs every task as if on its own machine, which shares only URLs with this one."""

    def __init__(self, another_machine: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.monkeypatch, self.here = another_machine, monkeypatch, str(another_machine())

    def map(
        self, stage: str, function: Callable[..., Any], tasks: Sequence[Task], advance: Callable[[int], None]
    ) -> Iterator[Any]:
        for task in tasks:
            self.go()
            yield function(*task.arguments, advance=advance)
            self.monkeypatch.setenv("RETRO_CACHE", self.here)
            if isinstance(task.arguments[0], Path):  # the finished artifact is on that machine, not here
                shutil.rmtree(task.arguments[0])

    def expect(self, text_bytes: int) -> None:
        pass


def test_workers_without_a_shared_folder_build_the_same_bytes(
    bucket, tmp_path, tiny_corpus, tiny_datastore, another_machine, monkeypatch
) -> None:
    executor = ElsewhereExecutor(another_machine, monkeypatch)
    build(replace(tiny_config(tmp_path, tiny_corpus), datastore=Path(f"{bucket}/wiki")), executor)
    assert at(f"{bucket}/wiki") == here(tiny_datastore)
    assert not {"train.npy", "vectors.faiss"} & fetched(Path(executor.here))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")  # warnings of Ray itself
def test_ray_builds_the_same_bytes_at_a_url(bucket, tmp_path, tiny_corpus, tiny_datastore, cluster) -> None:
    import ray

    one = Resources(workers=1)  # importing everything in a process is the slow part here
    stages: Any = dict.fromkeys(("chunk", "embed", "add", "sparse", "neighbors"), one)
    executor = ExecutorSettings(kind="ray", ray_address=cluster.address, resources=stages)
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=Path(f"{bucket}/wiki"), executor=executor)
    known = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "RETRO_"))}
    ray.init(cluster.address, runtime_env={"env_vars": known}, log_to_driver=False)  # nodes started before the server
    try:
        build_local(config)
    finally:
        ray.shutdown()
    assert at(f"{bucket}/wiki") == here(tiny_datastore)


def test_finished_artifacts_are_not_rebuilt_and_few_files_are_fetched(config, another_machine, monkeypatch) -> None:
    cache = another_machine()
    monkeypatch.setattr(remote, "_put", None)  # an upload would fail
    assert build_local(config).has("neighbors")
    assert fetched(cache) <= {"files.json", "plan.json", "problems.json", "meta.json", "token_bytes.npy"} | {
        "sentencepiece.model",
        "report.json",
        "report.html",
    }


def test_changed_setting_is_refused_by_name_with_an_empty_cache(config, another_machine) -> None:
    another_machine()
    with pytest.raises(InputError, match=r"neighbors\.stored was 6, now 4"):
        build_local(replace(config, neighbors=replace(config.neighbors, stored=4)))


@pytest.mark.slow
def test_stage_rebuilt_elsewhere_replaces_the_files_at_the_url(
    config, url, tmp_path, tiny_corpus, another_machine
) -> None:
    first = build_local(config)
    cache = another_machine()
    changed = replace(config, neighbors=replace(config.neighbors, stored=4, materialized=2))
    build_local(changed, only="neighbors", rebuild=True)
    assert "documents.parquet" not in fetched(cache)  # the search fetches only the files it reads
    build_local(changed)
    local = build_local(tiny_config(tmp_path / "local", tiny_corpus, neighbors=changed.neighbors))
    assert at(url) == here(local)
    again = Datastore.open(url)
    assert again.fingerprint == local.fingerprint != first.fingerprint
    build_local(changed, rebuild=True)
    assert at(url) == here(local)


@pytest.mark.slow
def test_append_at_a_url_gives_the_bytes_of_a_local_append(
    bucket, tmp_path, tiny_corpus, another_machine, monkeypatch
) -> None:
    """Every task runs on its own machine. Neighbors that were stored before are merged with the new ones."""
    config = tiny_config(tmp_path, tiny_corpus)
    more = write_corpus(tmp_path / "more.jsonl", 30, 7)
    grown = replace(config, corpus=replace(config.corpus, paths=(*config.corpus.paths, str(more))))
    build_local(config)
    local = here(build_local(grown, append=True))
    executor, moved, move = ElsewhereExecutor(another_machine, monkeypatch), [], remote.move
    monkeypatch.setattr(remote, "move", lambda folder, to: (moved.append(to.name), move(folder, to)))
    build(replace(config, datastore=Path(f"{bucket}/wiki")), executor)
    build(replace(grown, datastore=Path(f"{bucket}/wiki")), executor, append=True)
    assert "00000.before" in moved
    assert at(f"{bucket}/wiki") == local


def test_dedup_at_a_url_gives_the_bytes_of_a_local_build(
    bucket, tmp_path, tiny_corpus, another_machine, monkeypatch
) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    write_corpus(tmp_path / "evaluation.jsonl", 10, 7)
    config = replace(config, dedup=replace(config.dedup, within=True, paths=(str(tmp_path / "evaluation.jsonl"),)))
    local = here(build_local(config, only="chunk"))
    executor = ElsewhereExecutor(another_machine, monkeypatch)
    build(replace(config, datastore=Path(f"{bucket}/wiki")), executor, only="chunk")
    assert at(f"{bucket}/wiki") == local


def test_deletion_at_a_url_is_visible_from_every_machine(url, another_machine, capsys) -> None:
    another_machine()
    whole = Datastore.open(url)
    victim = Retriever.open(url).search(["search model index"], 1).hits[0][0].document_id
    cache = another_machine()
    assert main(["delete", url, "--ids", victim]) == 0
    assert "1 documents deleted" in capsys.readouterr().out
    assert "deleted.json" in fetched(cache)
    there = another_machine()
    assert not {hit.document_id for hit in Retriever.open(url).search(["search model index"], 9).hits[0]} & {victim}
    assert "deleted.json" in fetched(there)
    assert Datastore.open(url).fingerprint != whole.fingerprint
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{root}/deleted.json")  # the URL is authoritative, not the cache
    assert Datastore.open(url).fingerprint == whole.fingerprint
    assert main(["verify", url]) == 2
    assert "Copy the datastore" in capsys.readouterr().err


@pytest.mark.parametrize(("reading", "materialized"), [("mmap", False), ("pread", False), ("pread", True)])
def test_batches_from_a_url_equal_those_of_the_local_datastore(
    config, url, tiny_datastore, another_machine, reading: str, materialized: bool
) -> None:
    if materialized:
        build_local(replace(config, neighbors=replace(config.neighbors, materialized=3)))
    cache = another_machine()
    settings = DataSettings(sequence_length=64, k=2, reading=reading, materialized=materialized)  # type: ignore[arg-type]
    local = TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=2), retrieval=True)
    away = TrainingData([Path(url)], settings, retrieval=True)
    assert away.fingerprints == local.fingerprints
    for first in (0, 40):
        ours, theirs = local.batch(range(first, first + 4)), away.batch(range(first, first + 4))
        for name in ("tokens", "labels", "neighbors", "neighbor_lengths"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    whole = {"tokens.npy", "lengths.npy", "ids.npy"} & fetched(cache)
    assert whole == (set() if reading == "pread" else {"tokens.npy", "lengths.npy", "ids.npy"})
    assert not {"documents.parquet", "train.npy", "vectors.faiss"} & fetched(cache)


def test_datastore_at_a_url_can_be_searched_inspected_and_used_for_training(
    config: Config, url: str, tiny_datastore, tmp_path, another_machine, capsys
) -> None:
    another_machine()
    hits = [Retriever.open(where).search(["search model index"], 3).hits for where in (url, tiny_datastore.folder)]
    assert hits[0] == hits[1]
    assert main(["inspect", url]) == 0
    assert tiny_datastore.fingerprint in capsys.readouterr().out
    file = tmp_path / "config.toml"
    file.write_text(to_toml(replace(config, run=tmp_path / "run")))
    assert f'datastore = "{url}"' in file.read_text()
    assert load(Config, file, [], verb="train").datastore == config.datastore
    assert main(["train", str(file), "--data.reading", "pread", "--train.steps", "2"]) == 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["data"]["datastores"] == [url]
    limits = ["--evaluation.max-tokens", "200", "--evaluation.leakage-tokens", "64"]
    assert main(["eval", "perplexity", str(tmp_path / "run"), *limits]) == 0
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the", "--max-tokens", "4"]) == 0
    assert not Path("s3:").exists()  # what was fetched is in the cache
    with pytest.raises(InputError, match=r"run = 's3://x/run'"):
        replace(config, run=Path("s3://x/run"))


@pytest.mark.slow
def test_datastore_at_a_url_retrieves_from_another_url(
    config: Config, bucket: str, url: str, tmp_path, tiny_corpus, another_machine
) -> None:
    """Neighbors of both datastores are read from a machine that has neither."""
    model = remote.present(remote.local_folder(url) / "tokenizer" / "sentencepiece.model")
    other = replace(
        tiny_config(tmp_path / "other", tiny_corpus),
        datastore=Path(f"{bucket}/deeper/other"),
        tokenizer=replace(config.tokenizer, kind="sentencepiece", path=str(model)),
        embedder=replace(config.embedder, path=url),
    )
    build_local(other)
    config = replace(config, neighbors=replace(config.neighbors, extra_datastores=(other.datastore,)))
    build_local(config, only="neighbors", rebuild=True)
    another_machine()
    opened = Datastore.open(url)
    assert opened.manifest["extra_datastores"][0]["folder"] == "../deeper/other"
    with pytest.raises(InputError, match=f"RETRO_EXTRA_DATASTORES={bucket}/deeper/other"):
        RetrievalSet.of(opened)  # only a person decides what else is read
    retrieval = RetrievalSet.of(opened, [other.datastore])
    assert [split.num_chunks for split in retrieval.splits] == [opened.train.num_chunks] * 2
    ids = opened.train.neighbor_ids.read(0, 50)
    assert (ids >> 40).max() == 1
    tokens, lengths = retrieval.with_continuation(ids.ravel())
    assert (lengths > 0).all()
    assert np.array_equal(tokens[:, :16], opened.train.tokens.gather(ids.ravel() & ((1 << 40) - 1)))  # equal corpora
