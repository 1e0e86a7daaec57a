"""`retro plan datastore`: planned bytes are close to those of real datastores; seconds follow from measured builds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.corpus.readers import CorpusSettings
from indexing.corpus.scan import split_of
from indexing.index.build import IndexSettings
from indexing.neighbors.search import NeighborSettings
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli import main
from pipelines.config import Config
from pipelines.planning import calibration as module
from pipelines.planning.bytes import (
    Layout,
    Workload,
    artifact_bytes,
    index_bytes,
    key_for,
    memory_bytes,
    with_lists_for,
)
from pipelines.planning.calibration import calibrate, crossing, draw_sample, name_in
from pipelines.planning.datastore import (
    Calibration,
    StepPlan,
    corpus_tokens,
    extrapolated,
    machines_within,
    models_of,
    paper_config,
    per_byte,
    plan_for,
    power_of_two,
    text_of,
)
from pipelines.planning.seconds import Observation, coefficients, reading_seconds, step_seconds
from pipelines.planning.tables import as_json, long_time, plan_tables
from tests.conftest import SHARED_DATA, build_local, tiny_config, write_corpus

SIZE = Workload(
    text_bytes=4e6,
    documents=100,
    tokens=1e6,
    chunks=16_000,
    train_chunks=15_000,
    shards=2,
    key="IVF256,PQ16x4fs",
    nprobe=16,
    trained_on=15_000,
    tune_queries=500,
)
LAYOUT = Layout(
    chunk_length=64,
    token_bytes=2,
    dimension=32,
    stored=16,
    materialized=0,
    document_bytes=100.0,
    parquet_bytes=3000.0,
    sparse_bytes=60.0,
    terms_bytes=5000.0,
)


def larger(factor: int, **changes) -> Workload:
    """The size of the same corpus repeated `factor` times."""
    names = ("text_bytes", "documents", "tokens", "chunks", "train_chunks", "trained_on")
    return replace(SIZE, **{name: getattr(SIZE, name) * factor for name in names} | changes)


# --- bytes -----------------------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def planned_bytes(datastore: Datastore, stored: int, materialized: int = 0) -> dict[str, float]:
    """Bytes that the formulas give for a finished datastore from its counts and the sizes of its Parquet files."""
    rows = [
        (sum(totals["chunks"]), sum(totals["documents"]), sum(totals["tokens"]), sum(totals["bytes"]))
        for totals in datastore.manifest["splits"].values()
    ]
    chunks, documents, tokens, text_bytes = map(sum, zip(*rows, strict=True))
    index = json.loads((datastore.folder / "index/trained/index.json").read_text())
    size = Workload(
        text_bytes, documents, tokens, chunks, datastore.train.num_chunks, len(datastore.train.chunk_rows),
        index["key"], 1, index["trained_on"], 100,
    )  # fmt: skip
    parquet = sum(path.stat().st_size for path in datastore.folder.glob("chunks/*/*/*.parquet"))
    dtype = datastore.train.tokens.shard(0).dtype
    lists = sum(file.stat().st_size for file in datastore.folder.glob("sparse/*/*") if file.suffix != ".json")
    layout = Layout(
        datastore.chunk_length,
        dtype.itemsize,
        index["dimension"],
        stored,
        materialized,
        parquet / documents,
        0.0,
        lists / datastore.train.num_chunks,
        0.0,
    )
    return artifact_bytes(size, layout)


def assert_bytes_close(datastore: Datastore, planned: dict[str, float]) -> None:
    for name, value in planned.items():
        assert value == pytest.approx(folder_bytes(datastore.folder / name), rel=0.05), name


def test_planned_bytes_are_close_to_those_of_a_datastore_with_an_exact_index(tiny_datastore: Datastore) -> None:
    planned = planned_bytes(tiny_datastore, stored=6)
    assert_bytes_close(tiny_datastore, planned)
    assert set(planned) == {"chunks", "embeddings", "index", "sparse", "neighbors"}


@pytest.mark.parametrize(
    "key",
    [
        "IVF16,PQ16x4fs",
        "IVF16,PQ16x4",
        "IVF8,SQ8",
        "IVF64_HNSW8,Flat",
        pytest.param("OPQ8_16,IVF8,PQ8x4", marks=pytest.mark.slow),
    ],
)
def test_planned_bytes_are_close_to_those_of_a_datastore_with_inverted_lists(tmp_path, tiny_corpus, key: str) -> None:
    config = tiny_config(tmp_path, tiny_corpus, index=IndexSettings(factory=key, tune_queries=50))
    datastore = build_local(config)
    assert_bytes_close(datastore, planned_bytes(datastore, stored=6))


def test_planned_bytes_are_close_to_those_of_materialized_neighbors(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    datastore = build_local(replace(config, neighbors=replace(config.neighbors, materialized=2)))
    planned = planned_bytes(datastore, stored=6, materialized=2)
    assert "materialized" in planned
    assert_bytes_close(datastore, planned)


def test_bytes_per_chunk_are_those_of_the_file_format() -> None:
    """docs/reference/file-formats.md: tokens and a length; float16; a code and an id; id and distance of each neighbor."""
    small, large = (
        artifact_bytes(SIZE, LAYOUT),
        artifact_bytes(replace(SIZE, chunks=17_000, train_chunks=16_000), LAYOUT),
    )
    grown = {name: (large[name] - small[name]) / 1000 for name in small}
    assert grown == pytest.approx(
        {"chunks": 64 * 2 + 2, "embeddings": 2 * 32, "index": 8 + 8, "sparse": 60, "neighbors": 16 * 12}
    )


def test_vocabularies_above_65536_take_four_bytes_per_token() -> None:
    wide = artifact_bytes(SIZE, replace(LAYOUT, token_bytes=4))
    assert wide["chunks"] - artifact_bytes(SIZE, LAYOUT)["chunks"] == 2 * 64 * SIZE.chunks


def test_bytes_of_codes_and_quantizers_are_those_of_faiss() -> None:
    assert index_bytes("Flat", 32) == (128, 200)
    assert index_bytes("IVF16,SQ8", 32)[0] == 32
    code, trained = index_bytes("IVF1024,PQ128x4", 256)
    assert code == 64
    assert trained == 4 * 256 * 1024 + 8 * 1024 + 4 * 256 * 16 + 200
    with pytest.raises(InputError, match=r"index\.factory = 'IVF16,Nonsense'"):
        index_bytes("IVF16,Nonsense", 32)


def test_memory_of_neighbors_workers_is_twice_the_index_up_to_a_limit() -> None:
    memory = memory_bytes(SIZE, LAYOUT, base=1e9)
    code, trained = index_bytes(SIZE.key, 32)
    assert memory["neighbors"] - 1e9 == 2 * ((code + 8) * SIZE.train_chunks + 2 * trained)
    assert memory["add"] < memory["neighbors"]
    assert memory_bytes(replace(SIZE, train_chunks=10**12, shards=10**4), LAYOUT, base=1e9)["neighbors"] == 9e9
    assert memory_bytes(replace(SIZE, search="exact"), LAYOUT, base=1e9)["neighbors"] == 1e9


# --- which index -----------------------------------------------------------------------------------------------------


def test_planned_index_is_that_of_retro_index_with_more_memory_if_none_fits() -> None:
    assert key_for(5000, 256, IndexSettings()) == ("Flat", IndexSettings())
    assert key_for(100_000, 256, IndexSettings())[0] == "IVF1024,PQ128x4"
    key, settings = key_for(28e9, 256, IndexSettings())
    assert key.startswith("IVF131072_HNSW32,PQ128x4")
    assert settings.memory == "512GB"


def test_number_of_lists_of_a_smaller_index_is_four_times_the_root_of_its_chunks() -> None:
    assert with_lists_for("IVF16384_HNSW32,PQ128x4", 40_000) == "IVF512_HNSW32,PQ128x4"
    assert with_lists_for("IVF128,PQ8", 10**6) == "IVF128,PQ8"
    assert with_lists_for("Flat", 1000) == "Flat"


def test_nprobe_is_extrapolated_from_two_sizes() -> None:
    seen = [(10_000, 30.0), (40_000, 60.0)]  # twice as large for four times the chunks: the square root
    assert extrapolated(160_000, 1024, seen) == pytest.approx(120)
    assert extrapolated(40_000, 1024, seen) == pytest.approx(60)
    assert extrapolated(160_000, 64, seen) == 64
    assert extrapolated(10**9, 1 << 17, [(10_000, 64.0), (40_000, 32.0)]) == pytest.approx(32)  # never smaller
    assert extrapolated(160_000, 1 << 17, [(10_000, 1.0), (40_000, 64.0)]) == pytest.approx(128)


def test_nprobe_of_the_index_is_a_power_of_two() -> None:
    assert [power_of_two(nprobe) for nprobe in (1, 2, 2.1, 120, 128)] == [1, 2, 4, 128, 128]


def test_crossing_of_a_curve_is_interpolated_between_powers_of_two() -> None:
    assert crossing([(1, 0.3), (2, 0.5), (4, 0.9)], 0.7) == pytest.approx(2 * 2**0.5)
    assert crossing([(1, 0.9)], 0.7) == 1
    assert crossing([(1, 0.3), (2, 0.5)], 0.7) == 0


# --- seconds ---------------------------------------------------------------------------------------------------------


def seconds_of(size: Workload) -> dict[str, float]:
    """Seconds that follow the cost models exactly."""
    return {
        "scan": 1e-8 * size.text_bytes,
        "tokenizer": 2 + 1e-7 * size.text_bytes,
        "chunk": 1e-7 * size.text_bytes,
        "embed": 1.5 + 1e-5 * size.chunks,
        "train-index": 7 + 1e-8 * size.trained_on * size.lists,
        "add": (1e-5 + 1e-8 * size.lists) * size.train_chunks,
        "tune nprobe": (1e-3 + 1e-7 * size.train_chunks * size.nprobe / size.lists) * size.tune_queries,
        "neighbors": (1e-4 + 1e-8 * size.compared + 2e-5 * (size.shards - 1)) * size.chunks,
    }


def calibrated() -> Calibration:
    seen = [
        larger(1, shards=1),
        larger(1, shards=4),
        larger(4, shards=1, key="IVF512,PQ16x4fs", nprobe=32),
    ]
    observations = tuple(
        Observation(size, seconds_of(size), size.nprobe, int(100 * size.documents + 9000 * size.shards), 0)
        for size in seen
    )
    return Calibration("machine", 10**10, 10**9, observations, 2, 32, "text", 8e8, 60.0)


def test_times_that_follow_the_models_are_predicted_exactly() -> None:
    target = larger(50, key="IVF2048,PQ16x4fs", nprobe=64, shards=3, tune_queries=1000)
    models = models_of(Config(tokenizer=replace(Config().tokenizer, sample_bytes=10**12)))
    assert step_seconds(target, calibrated().observations, models) == pytest.approx(seconds_of(target), rel=1e-6)


def test_search_time_is_predicted_only_from_searches_of_the_same_kind() -> None:
    seen = [
        Observation(replace(larger(n), search=search), {"neighbors": n * rate * larger(n).chunks}, 1.0, 0, 0)
        for search, rate in (("exact", 1e-3), ("index", 1e-5))
        for n in (1, 4)
    ]
    models = models_of(Config())
    exact = step_seconds(replace(larger(40), search="exact"), seen, models)["neighbors"]
    assert exact == pytest.approx(40 * 1e-3 * larger(40).chunks)  # a query is compared with all chunks
    assert step_seconds(larger(40), seen, models)["neighbors"] < exact / 50


def test_step_without_a_model_grows_with_the_number_of_chunks() -> None:
    seen = [Observation(larger(n), {"dedup": 3.0 * n}, 1.0, 0, 0) for n in (1, 4)]
    assert step_seconds(larger(40), seen, {}) == pytest.approx({"dedup": 120.0})


def test_tokenizer_trains_on_a_sample_but_reads_the_whole_corpus() -> None:
    assert reading_seconds(larger(1), 100.0, 10**9) == 0
    assert reading_seconds(replace(SIZE, text_bytes=4e9), 100.0, 10**9) == 75


def test_fitted_coefficients_are_never_negative_and_growth_is_never_zero() -> None:
    drivers = np.array([[1e6, 1.0], [4e6, 1.0]])
    assert coefficients(drivers, np.array([3.0, 9.0])) == pytest.approx([2e-6, 1.0])
    shrinking = coefficients(drivers, np.array([3.0, 2.0]))
    assert shrinking[0] > 0
    assert shrinking[1] >= 0
    steep = coefficients(drivers, np.array([1.0, 9.0]))
    assert steep[0] > 0
    assert steep[1] == 0


def test_fit_has_at_most_as_many_coefficients_as_sizes_and_averages_repetitions() -> None:
    once = coefficients(np.array([[2e6, 3.0, 7.0]]), np.array([4.0]))
    assert once == pytest.approx([2e-6, 0, 0])
    again = coefficients(np.array([[1e6, 1.0, 5.0], [4e6, 1.0, 5.0]] * 2), np.array([2.9, 8.8, 3.1, 9.2]))
    assert again == pytest.approx([2e-6, 1.0, 0], rel=0.02)


def test_step_names_of_a_build_match_their_cost_models() -> None:
    models = models_of(Config())
    assert name_in(models, "train-index IVF512,PQ128x4") == "train-index"
    assert name_in(models, "embed: count n-grams") == "embed: count n-grams"
    assert name_in(models, "dedup") == "dedup"


def test_chunks_per_byte_are_corrected_for_tokenizers_trained_on_a_small_sample() -> None:
    """Counted chunks of peps and TiDB's documentation at 2, 8 and 24 MB. The third count follows from the first two."""
    counted = {2.026e6: 8798, 8.003e6: 35_831, 23.959e6: 108_581}
    seen = [
        Observation(replace(SIZE, text_bytes=text, chunks=chunks, tokens=60 * chunks), {}, 1.0, 0, 0)
        for text, chunks in list(counted.items())[:2]
    ]
    trained = Config().tokenizer
    assert 23.959e6 * per_byte("chunks", 23.959e6, seen, trained) == pytest.approx(108_581, rel=0.003)
    at_most = per_byte("chunks", 1e15, seen, trained)
    assert at_most == per_byte("chunks", trained.sample_bytes, seen, trained)
    given = replace(trained, kind="sentencepiece", path="x.model")
    assert per_byte("chunks", 1e9, seen, given) == 35_831 / 8.003e6
    text = text_of(1e7, seen, trained)
    assert text * per_byte("tokens", text, seen, trained) == pytest.approx(1e7)


# --- the plan --------------------------------------------------------------------------------------------------------

CONFIG = Config(
    corpus=CorpusSettings(paths=("x",), split=(3, 1, 0), shard_bytes=10**8),
    neighbors=NeighborSettings(search="index"),  # the search that was measured
)


def test_plan_of_a_corpus_scales_the_measured_sizes() -> None:
    plan = plan_for(CONFIG, calibrated(), tokens=2e8)
    assert (plan.size.chunks, plan.size.train_chunks, plan.size.text_bytes) == (3.2e6, 2.4e6, 8e8)
    assert (plan.size.documents, plan.size.shards, plan.size.tune_queries) == (20_000, 8, 1000)
    assert plan.size.key == key_for(2.4e6, 32, CONFIG.index)[0]
    assert plan.bytes["embeddings"] == pytest.approx(2 * 32 * 3.2e6, rel=1e-3)


def test_machines_divide_parallel_steps_and_cost_stays_the_same() -> None:
    one, four = (plan_for(CONFIG, calibrated(), 2e8, machines, price=3.6) for machines in (1, 4))
    by_name = {step.name: step for step in four.steps}
    assert by_name["neighbors"].wall_seconds == by_name["neighbors"].seconds / 4
    assert by_name["train-index"].wall_seconds == by_name["train-index"].seconds
    assert [step.cost for step in four.steps] == [step.cost for step in one.steps]
    assert by_name["embed"].cost == pytest.approx(by_name["embed"].seconds / 1000)
    many = plan_for(CONFIG, calibrated(), 2e8, machines=1000)
    assert {step.machines for step in many.steps} == {1, 8}  # no more machines than shards


def test_number_of_machines_for_a_time_limit_is_the_smallest_or_none() -> None:
    steps = [StepPlan("neighbors", 100.0, True, 1, 100.0, 0.0, 0.0), StepPlan("tune", 20.0, False, 1, 20.0, 0.0, 0.0)]
    assert machines_within(steps, 45.0) == 4
    assert machines_within(steps, 1000.0) == 1
    assert machines_within(steps, 20.0) is None


def test_the_paper_has_28_billion_full_chunks_of_four_byte_tokens() -> None:
    plan = plan_for(paper_config(CONFIG), calibrated(), 64 * 28e9, nprobe=64, paper=True)
    assert plan.size.chunks == 28e9
    assert plan.size.nprobe == 64
    assert plan.bytes["chunks"] == pytest.approx(28e9 * (64 * 4 + 2), rel=0.02)
    assert set(plan.settings) == {"index.memory", "corpus.shard_bytes"}


def test_tables_and_json_contain_the_same_plan(tmp_path) -> None:
    seen = calibrated()
    plan = plan_for(CONFIG, seen, 2e8, machines=2, price=1.0)
    what, artifacts, steps, needs = plan_tables(plan, seen, 2, 1.0, 30)
    assert what[0][0] == "tokens"
    assert [row[0] for row in artifacts] == ["artifact", *plan.bytes, "all"]
    assert [row[0] for row in steps] == ["step", *(step.name for step in plan.steps), "all"]
    assert steps[0][-1] == "cost"
    assert needs[0][0] == "machines for 30 days"
    assert (needs[2][0], plan.calibrated_nprobe) == ("neighbors at nprobe 32", 32)
    assert plan.calibrated_seconds < next(step.seconds for step in plan.steps if step.name == "neighbors")
    assert "cost" not in plan_tables(plan, seen, 2, 0.0, 30)[2][0]
    written = json.loads(json.dumps(as_json(seen, {"planned": plan})))
    assert written["plans"]["planned"]["bytes"] == plan.bytes
    assert written["plans"]["planned"]["size"]["key"] == plan.size.key


def test_long_times_are_days_and_years() -> None:
    assert [long_time(x) for x in (3.2, 90_000, 3e5, 1e9)] == ["3.2 s", "25 h 00 min", "3.5 days", "31.7 years"]


# --- calibration -----------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(module, "_SCANNED_BYTES", int(whole * 0.6))
    assert draw_sample(settings, 10_000).text_bytes == pytest.approx(whole)
    monkeypatch.setattr(module, "_SCANNED_BYTES", 20_000)  # too few bytes to read one file to its end
    assert draw_sample(settings, 10_000).text_bytes == 0


@pytest.mark.slow
def test_calibrated_plan_predicts_the_bytes_of_the_real_datastore(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    more = replace(config, neighbors=replace(config.neighbors, materialized=2))
    seen = calibrate(more, sample_bytes=60_000)
    assert not config.datastore.exists()
    assert "materialize" in seen.observations[-1].seconds
    plan = plan_for(config, seen, corpus_tokens(config, seen))
    assert plan.size.key == "Flat"
    assert plan.size.shards == len(tiny_datastore.train.chunk_rows)
    assert_bytes_close(tiny_datastore, plan.bytes)
    names = [step.name for step in plan.steps]
    assert names[0] == "scan"
    assert {"tokenizer", "chunk", "embed", "train-index", "add", "tune nprobe", "sparse", "neighbors"} < set(names)
    assert min(step.seconds for step in plan.steps) > 0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.exists(), reason="no corpora here")
def test_plan_predicts_the_bytes_of_a_real_corpus(tmp_path) -> None:
    corpus = CorpusSettings(paths=(str(SHARED_DATA / "ethereum_eips/eips.jsonl.zst"),))
    config = Config(datastore=tmp_path / "datastore", corpus=corpus)
    seen = calibrate(config, sample_bytes=2 * 10**6)
    assert_bytes_close(build_local(config), plan_for(config, seen, corpus_tokens(config, seen)).bytes)


def test_plan_without_a_corpus_requires_the_number_of_tokens(tmp_path) -> None:
    with pytest.raises(InputError, match="--tokens"):
        calibrate(Config())


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--tokens=-1", "tokens = -1"),
        ("--machines=0", "machines = 0"),
        ("--days=0", "days = 0"),
        ("--price=nan", "price"),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, named: str, capsys) -> None:
    assert main(["plan", "datastore", option]) == 2
    assert named in capsys.readouterr().err
