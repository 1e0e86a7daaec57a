"""Kernels of packed weights are chosen by a table of times, among those that give a row the same bits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing import measured
from indexing.measured import Question, cache_file, measure, this_processor
from retro.inference import draft_costs as costs_module
from retro.inference import packed_kernels
from retro.inference.draft_costs import GPU_COSTS, costs_of, draft_costs, drafts
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.packed_kernels import (
    KERNELS,
    few_rows,
    has_equal_rows,
    has_fbgemm,
    kernel_of,
    many_rows,
)
from retro.inference.packed_weights import pack
from tests.retro.inference.test_packed_weights import FLOAT32, needs_bfloat16, needs_fbgemm
from tests.retro.small_model import build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has measured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (measured.fastest, few_rows, costs_module._measured_costs):
        function.cache_clear()
    return cache_file()


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured."""
    monkeypatch.setattr(measured, "_measured", None)


def write(file: Path, **questions: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({this_processor(): questions}))


def both(float16: float, float32: float) -> dict[str, float]:
    return {"float16": float16, "float32": float32}


# --- what is chosen --------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize(("few", "many"), [("float16", "float32"), ("float32", "float16"), ("float16", "float16")])
def test_kernels_follow_the_table(
    few: str, many: str, cache: Path, no_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_kernels, "has_equal_rows", lambda _: True)
    times = {"float16": both(1.0, 2.0), "float32": both(2.0, 1.0)}
    write(cache, generation=times[few], prompts=times[many])
    assert (kernel_of(few_rows()), kernel_of(many_rows())) == (few, many)


def test_a_kernel_whose_rows_differ_is_never_chosen_for_few_rows(
    cache: Path, no_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache, generation=both(2.0, 1.0))
    monkeypatch.setattr(packed_kernels, "has_equal_rows", lambda name: name == "float16")
    assert kernel_of(few_rows()) == "float16"
    assert "float32" in cache.read_text(), "a process with another number of threads can use it"


def test_the_property_of_rows_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """As BLAS multiplies vectors: another order of the sums for a single row."""
    for alone, expected in ((0.0, True), (1e-3, False)):

        def kernel(rows: torch.Tensor, alone: float = alone) -> torch.Tensor:
            return rows.cumsum(1)[:, -2:] + alone * (len(rows) == 1)

        monkeypatch.setitem(KERNELS, "made up", lambda *_, kernel=kernel: kernel)
        assert has_equal_rows("made up") == expected


@needs_fbgemm
def test_fbgemm_has_the_property() -> None:
    assert has_equal_rows("float16")


@needs_bfloat16
def test_bfloat16_is_no_kernel_for_few_rows() -> None:
    assert "bfloat16" not in few_rows().ways


# --- what drafts cost ------------------------------------------------------------------------------------------------


def test_costs_of_drafts_follow_the_table_of_the_models_kernel(cache: Path, no_clock: None) -> None:
    lengths = [str(length) for length in range(1 + LONGEST_DRAFT)]
    plain = dict(zip(lengths, (2.0, 3.0, 4.0, 3.0, 3.5, 4.0, 4.5, 1.9, 6.0), strict=True))
    write(cache, **{"drafts, unpacked": plain, "drafts, float16": dict.fromkeys(lengths, 5.0)})
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


@pytest.mark.parametrize("name", ["generation", "prompts", "drafts, unpacked", "drafts, float16"])
def test_every_way_runs_once_in_a_measurement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "drafts, unpacked" and not has_fbgemm():
        pytest.skip("PyTorch has no FBGEMM on this machine")
    monkeypatch.setattr(packed_kernels, "_LAYERS", 1)
    question: Question = {"generation": few_rows, "prompts": many_rows}.get(
        name, lambda: drafts(name.removeprefix("drafts, "))
    )()
    assert question.name == name
    clock = iter(range(1000))
    times, _ = measure(question.prepare(), lambda: float(next(clock)))  # a second between two looks
    assert (*times,) == question.ways
