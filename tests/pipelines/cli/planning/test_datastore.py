"""`retro plan datastore`: the plan of a corpus, and the samples that it scales."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import split_of
from indexing.embedding.settings import EmbedderSettings
from indexing.index.coarse_quantizer import comparisons
from indexing.neighbors.settings import NeighborSettings
from indexing.store.errors import InputError
from indexing.suffixes.order_build import RUN_BYTES
from pipelines.cli.main import main
from pipelines.cli.planning import sample as sample_module
from pipelines.cli.planning.bytes import index_for
from pipelines.cli.planning.datastore import ALONE, plan_for, plan_tables, scaling, seconds_of, size_of
from pipelines.cli.planning.sample import _search, draw_sample, idle_seconds, measure
from pipelines.config import Config
from pipelines.stages.choices import with_choices
from pipelines.terminal.stages import Step
from pipelines.terminal.units import long_time
from tests.conftest import SHARED_DATA, build_local, tiny_config, write_corpus
from tests.pipelines.cli.planning import sizes
from tests.pipelines.cli.planning.sizes import SECONDS, assert_bytes_close, larger, measured

CONFIG = Config(
    corpus=CorpusSettings(paths=("x",), split=(3, 1, 0), shard_bytes=10**8),
    chunks=ChunkSettings(chunk_length=64),
    neighbors=NeighborSettings(search="index", rerank="embeddings"),
)


def test_plan_of_a_corpus_scales_the_measured_sizes() -> None:
    plan = plan_for(CONFIG, measured(), tokens=2e8)
    assert (plan.size.chunks, plan.size.train_chunks, plan.size.text_bytes) == (3.2e6, 2.4e6, 8e8)
    assert (plan.size.documents, plan.size.shards, plan.size.tune_queries) == (20_000, 8, 1000)
    assert plan.size.key == index_for(2.4e6, 32, CONFIG.index).factory
    assert plan.bytes["embeddings"] == pytest.approx(2 * 32 * 3.2e6, rel=1e-3)
    assert plan_for(CONFIG, measured()) == plan  # all of the corpus


def test_times_are_those_of_the_sample_times_the_growth_of_one_quantity() -> None:
    target = larger(50, key="IVF2048,PQ16x4fs", shards=3, tune_queries=1000, trained_on=45_000)
    config = Config(tokenizer=replace(Config().tokenizer, sample_bytes=10**12))
    assert seconds_of(target, measured(), config) == pytest.approx(
        {name: 50 * took for name, took in SECONDS.items()}
        | {
            "train-index": SECONDS["train-index"] * 3 * 8,  # vectors, and lists that each is compared with
            "tune nprobe": SECONDS["tune nprobe"] * 50 * 2,
        }
    )


def test_exact_search_grows_with_the_square_of_the_chunks() -> None:
    one, many = (larger(factor, search="exact") for factor in (1, 40))
    assert seconds_of(many, measured(size=one), Config())["neighbors"] == SECONDS["neighbors"] * 1600


def test_many_lists_are_trained_in_two_levels() -> None:
    size = larger(1000, key="IVF65536,PQ16x4fs")
    planned = seconds_of(size, measured(), Config())["train-index"]
    assert planned == pytest.approx(SECONDS["train-index"] * 1000 * comparisons(65_536) / 256)
    assert comparisons(65_536) < 65_536 / 4


def test_tokenizer_trains_on_a_sample_but_reads_the_whole_corpus() -> None:
    config = Config(tokenizer=replace(Config().tokenizer, sample_bytes=16 * 10**6))
    target = larger(1000)
    seconds = seconds_of(target, measured(), config)
    rest = seconds["scan"] * (1 - 16e6 / target.text_bytes)
    assert seconds["tokenizer"] == pytest.approx(SECONDS["tokenizer"] * 4 + rest)


def test_a_step_without_a_quantity_of_its_own_grows_with_the_chunks() -> None:
    assert seconds_of(larger(40), measured(seconds={"dedup": 4.0}), Config()) == pytest.approx({"dedup": 160})


def test_ngrams_are_written_in_at_most_four_passes_over_the_chunks() -> None:
    config = Config(chunks=replace(Config().chunks, chunk_length=64))
    for factor, passes in ((40, 1), (40_000, 4)):
        seconds = seconds_of(larger(factor), measured(seconds={"ngrams": 1.0}), config)["ngrams"]
        assert seconds == pytest.approx(passes * factor)


def test_tokens_and_chunks_of_a_byte_are_those_of_the_sample() -> None:
    assert size_of(CONFIG, measured(), tokens=1e7).tokens == pytest.approx(1e7)
    assert size_of(CONFIG, measured(), tokens=1e7).chunks == pytest.approx(10 * sizes.SIZE.chunks)


def test_machines_divide_parallel_steps_up_to_the_number_of_shards() -> None:
    four, many = (plan_for(CONFIG, measured(), 2e8, machines) for machines in (4, 1000))
    for step in four.steps:
        assert step.wall_seconds == step.seconds / (1 if step.name in ALONE else 4)
    assert {step.machines for step in many.steps} == {1, 8}


def test_a_busy_machine_makes_no_plan_longer() -> None:
    alone = Step("chunk", "chunk", 10, "chunks", seconds=1.0, cpu_seconds=1.0)
    among_others = replace(alone, seconds=9.0)  # it waited for a processor
    on_two_processors = replace(alone, seconds=0.5)
    assert [idle_seconds(step) for step in (alone, among_others, on_two_processors)] == [1.0, 1.0, 0.5]


def test_a_plan_has_the_processor_time_and_the_time_when_idle() -> None:
    sample = measured(cpu_seconds={name: 2 * took for name, took in SECONDS.items()})
    plan = plan_for(CONFIG, sample, tokens=2e8, machines=4)
    assert all(step.cpu_seconds == pytest.approx(2 * step.seconds) for step in plan.steps)
    *_, steps = plan_tables(plan, sample, 4)
    assert steps[0] == ["step", "CPU time", "machines", "time when idle", "memory of a worker"]
    assert steps[1][1] == long_time(plan.steps[0].cpu_seconds)
    assert steps[1][3] == long_time(plan.steps[0].wall_seconds)
    assert "CPU time" in scaling(plan, sample)


def test_search_is_the_configured_one_or_the_one_that_auto_chooses_at_the_planned_size() -> None:
    auto = replace(CONFIG, neighbors=NeighborSettings())
    dense = replace(auto, embedder=EmbedderSettings(kind="transformer", path="model"), neighbors=NeighborSettings())
    assert _search(with_choices(auto), 1e5, 32, "Flat") == "ngrams"
    assert _search(dense, 1e4, 32, "Flat") == "exact"
    assert _search(dense, 1e5, 32, "IVF1024,PQ16x4fs") == "index"
    assert _search(dense, 1e11, 32, "IVF1024,PQ16x4fs") == "index"
    assert _search(CONFIG, 1e5, 32, "Flat") == "index"


def test_an_index_that_fits_into_no_memory_names_the_setting() -> None:
    plan = plan_for(CONFIG, measured(), 64 * 28e9)
    assert set(plan.settings) == {"index.memory"}


# --- samples ---------------------------------------------------------------------------------------------------------


def test_sample_is_uniform_reproducible_and_of_the_requested_size(tmp_path) -> None:
    settings = CorpusSettings(paths=(str(write_corpus(tmp_path / "c.jsonl", 300)),), split=(9, 1, 0))
    every = draw_sample(settings, 10**9)
    assert every.text_bytes == sum(document.size for document in every.documents + every.valid)
    assert sorted(document.record for document in every.documents + every.valid) == list(range(300))
    assert {split_of(document.text, settings.split) for document in every.valid} == {"valid"}
    some = draw_sample(settings, 50_000)
    assert 50_000 <= sum(document.size for document in some.documents) < 53_000
    assert 5000 <= sum(document.size for document in some.valid) < 8000
    assert some == draw_sample(settings, 50_000)
    assert some.text_bytes == every.text_bytes
    assert 90 < np.mean([document.record for document in some.documents]) < 210


def test_size_of_a_large_corpus_is_estimated_from_some_of_its_files(tmp_path, monkeypatch) -> None:
    for number in range(4):
        write_corpus(tmp_path / f"{number}.jsonl", 50, seed=0)
    settings = CorpusSettings(paths=(str(tmp_path),))
    whole = draw_sample(settings, 10_000).text_bytes
    monkeypatch.setattr(sample_module, "_SCANNED_BYTES", int(whole * 0.6))
    assert draw_sample(settings, 10_000).text_bytes == pytest.approx(whole)
    monkeypatch.setattr(sample_module, "_SCANNED_BYTES", 20_000)  # too few bytes to read one file to its end
    assert draw_sample(settings, 10_000).text_bytes == 0


def test_a_plan_names_the_first_paths_of_a_corpus_of_many(tmp_path, tiny_corpus) -> None:
    paths = [str(shutil.copy(tiny_corpus, tmp_path / f"{number}.jsonl")) for number in range(7)]
    config = replace(CONFIG, corpus=replace(CONFIG.corpus, paths=tuple(paths)))
    assert sample_module._drawn(config, 10**6, tmp_path)[1] == ", ".join([*paths[:4], "3 more"])


@pytest.mark.slow
def test_planning_a_small_corpus_reads_less_text_than_building_it(tmp_path, tiny_corpus, monkeypatch) -> None:
    monkeypatch.setattr(sample_module, "_LEAST_BYTES", 10_000)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 400))
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    sample = measure(config)
    assert 0 < sample.size.text_bytes < sample.corpus_bytes / 4


@pytest.mark.slow
def test_plan_has_the_bytes_and_the_steps_of_the_real_datastore(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    more = replace(config, neighbors=replace(config.neighbors, materialized=2))
    seen = measure(more, sample_bytes=60_000)
    assert not config.datastore.exists()
    assert "materialize" in seen.seconds
    plan = plan_for(config, seen)
    assert plan.size.key == "Flat"
    assert plan.size.shards == len(tiny_datastore.train.chunk_rows)
    assert_bytes_close(tiny_datastore, plan.bytes, within=0.15)  # of shards this small, fixed bytes are a part
    names = [step.name for step in plan.steps]
    assert names[0] == "scan"
    assert {"tokenizer", "chunk", "embed", "train-index", "add", "tune nprobe", "sparse", "neighbors"} < set(names)
    assert min(step.seconds for step in plan.steps) > 0


@pytest.mark.slow
def test_plan_has_the_bytes_that_copying_from_the_whole_datastore_needs(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus, skip_stages=())
    plan = plan_for(config, measure(config, sample_bytes=60_000))
    datastore = build_local(config)
    for name in ("suffixes", "votes"):
        assert plan.bytes[name] == pytest.approx(sizes.folder_bytes(datastore.folder / name), rel=0.05), name
        assert any(step.name.startswith(name) for step in plan.steps)
    (sorting,) = (step.memory_bytes for step in plan.steps if step.name == "suffixes, runs")
    (scanning,) = (step.memory_bytes for step in plan.steps if step.name == "sparse")
    assert sorting - scanning == pytest.approx(
        RUN_BYTES * plan.size.train_chunks * config.chunks.chunk_length / plan.size.shards
    )


def test_a_plan_has_the_steps_and_bytes_of_only_the_stages_that_are_not_left_out(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus, skip_stages=("neighbors", "sparse", "votes"))
    sample = measure(config, sample_bytes=60_000)
    plan = plan_for(config, sample)
    assert set(plan.bytes) == {"chunks", "suffixes"}
    assert {step.name.partition(",")[0] for step in plan.steps} == {"scan", "tokenizer", "chunk", "suffixes"}
    text = str(plan_tables(plan, sample, 1))
    assert "vectors" not in text
    assert "search:" not in text


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.exists(), reason="no corpora here")
def test_plan_predicts_the_bytes_of_a_real_corpus(tmp_path) -> None:
    corpus = CorpusSettings(paths=(str(SHARED_DATA / "ethereum_eips/eips.jsonl.zst"),))
    config = Config(datastore=tmp_path / "datastore", corpus=corpus)
    plan = plan_for(config, measure(config, sample_bytes=2 * 10**6))
    assert {"ngrams", "ngrams, merge"} < {step.name for step in plan.steps}
    assert plan.bytes["ngrams"] > 7e6
    # A tokenizer that is trained on the sample alone fits it better, so the sample has fewer tokens for each byte.
    assert_bytes_close(build_local(config), plan.bytes, within=0.1)


def test_plan_without_a_corpus_requires_the_number_of_tokens(tmp_path) -> None:
    with pytest.raises(InputError, match="--tokens"):
        measure(Config())


@pytest.mark.parametrize(
    ("option", "named"),
    [("--tokens=-1", "tokens = -1"), ("--machines=0", "machines = 0"), ("--sample-bytes=1", "sample-bytes = 1")],
)
def test_invalid_options_are_refused_by_name(option: str, named: str, capsys) -> None:
    assert main(["plan", "datastore", option]) == 2
    assert named in capsys.readouterr().err
