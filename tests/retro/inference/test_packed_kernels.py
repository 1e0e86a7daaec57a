"""The kernel for many rows and the costs of drafts follow a table of times."""

import json
from pathlib import Path

import numpy as np
import pytest

from indexing import measured
from indexing.measured import Question, cache_file, measure, this_processor
from retro.inference import draft_costs as costs_module
from retro.inference.draft_costs import GPU_COSTS, costs_of, draft_costs, drafts
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.packed_kernels import (
    MANY_ROWS,
    has_fbgemm,
)
from retro.inference.packed_weights import pack
from tests.retro.inference.test_packed_weights import FLOAT32
from tests.retro.small_model import build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has measured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (measured.fastest, costs_module._measured_costs):
        function.cache_clear()
    return cache_file()


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured."""
    monkeypatch.setattr(measured, "_measured", None)


def write(file: Path, **questions: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({this_processor(): questions}))


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "many"), [((2.0, 1.6, 2.1), "float16"), ((2.0, 1.4, 1.6), "fbgemm"), ((2.0, 1.6, 1.4), "float32")]
)
def test_other_kernels_for_many_rows_must_save_a_quarter_of_the_time(
    times: tuple[float, ...], many: str, cache: Path, no_clock: None
) -> None:
    write(cache, prompts=dict(zip(MANY_ROWS.ways, times, strict=True)))
    assert measured.fastest(MANY_ROWS) == many


# --- what drafts cost ------------------------------------------------------------------------------------------------


def test_costs_of_drafts_follow_the_table_of_the_models_kernel(cache: Path, no_clock: None) -> None:
    lengths = [str(length) for length in range(1 + LONGEST_DRAFT)]
    plain = dict(zip(lengths, (2.0, 3.0, 4.0, 3.0, 3.5, 4.0, 4.5, 1.9, 6.0), strict=True))
    write(cache, **{"drafts, unpacked": plain, "drafts, packed": dict.fromkeys(lengths, 5.0)})
    model = build()
    assert draft_costs(model).tolist() == [0, 0.5, 1, 0.5, 0.75, 1, 1.25, 0, 2]
    if has_fbgemm():
        pack(model, FLOAT32)
        assert draft_costs(model).tolist() == [0] * (1 + LONGEST_DRAFT)


def test_a_model_on_another_device_takes_costs_that_were_not_measured(no_clock: None) -> None:
    assert np.array_equal(draft_costs(build().to("meta")), GPU_COSTS)


def test_a_draft_that_a_measurement_finds_free_costs_nothing() -> None:
    assert costs_of({"0": 2.0, "1": 1.9, "2": 3.0}).tolist() == [0, 0, 0.5]


# --- the ways --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [MANY_ROWS, drafts(True), drafts(False)], ids=lambda question: question.name)
def test_every_way_runs_once_in_a_measurement(question: Question) -> None:
    if question.name != "drafts, unpacked" and not has_fbgemm():
        pytest.skip("PyTorch has no FBGEMM on this machine")
    clock = iter(range(1000))
    times, _ = measure(question.prepare(), lambda: float(next(clock)))  # a second between two looks
    assert (*times,) == question.ways
