"""Seconds follow from measured builds."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.config import Config
from pipelines.planning.calibration import name_in
from pipelines.planning.datastore import models_of, per_byte, text_of
from pipelines.planning.seconds import Observation, coefficients, reading_seconds, step_seconds
from tests.pipelines.planning.sizes import SIZE, calibrated, larger, seconds_of


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
