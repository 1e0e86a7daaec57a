"""`retro plan datastore`: the plan of a corpus, and its calibration on a sample."""

import json
from dataclasses import replace

import numpy as np
import pytest

from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.corpus.scan import split_of
from indexing.neighbors.search import NeighborSettings
from indexing.store.errors import InputError
from pipelines.cli import main
from pipelines.config import Config
from pipelines.planning import calibration as module
from pipelines.planning.bytes import key_for
from pipelines.planning.calibration import calibrate, draw_sample
from pipelines.planning.datastore import StepPlan, corpus_tokens, machines_within, paper_config, plan_for
from pipelines.planning.tables import as_json, long_time, plan_tables
from tests.conftest import SHARED_DATA, build_local, tiny_config, write_corpus
from tests.pipelines.planning.sizes import assert_bytes_close, calibrated

CONFIG = Config(
    corpus=CorpusSettings(paths=("x",), split=(3, 1, 0), shard_bytes=10**8),
    chunks=ChunkSettings(chunk_length=64),
    neighbors=NeighborSettings(search="index", rerank="embeddings"),  # the search that was measured
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
