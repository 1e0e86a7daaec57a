"""The faster precision is measured once on a processor and kept; nothing that is wrong with the cache stops a command."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from indexing import measured
from indexing.machine import onednn_has_bfloat16
from indexing.measured import PRODUCTS, Question, cache_file, fastest_products, measure, this_processor

Table = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has measured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured.fastest.cache_clear()
    return cache_file()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A processor that multiplies bfloat16, but slowly; its products are recorded."""
    made: list[str] = []

    def way(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            made.append(name)
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

        return run

    monkeypatch.setattr(measured, "onednn_has_bfloat16", lambda: True)
    ways = {"float32": way("float32", 0.001), "bfloat16": way("bfloat16", 0.02)}
    for name in PRODUCTS:
        monkeypatch.setitem(PRODUCTS, name, Question(name, tuple(ways), lambda: ways))
    return made


def write(file: Path, table: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table if isinstance(table, str) else json.dumps(table))


def asked_again() -> str:
    """The answer in a new process."""
    measured.fastest.cache_clear()
    return fastest_products("training", "cpu")


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bfloat16", "best"), [(20.0, "float32"), (9.9, "float32"), (9.6, "bfloat16"), (2.0, "bfloat16")]
)
def test_a_made_up_table_decides_and_a_small_difference_does_not(
    cache: Path, calls: list[str], bfloat16: float, best: str
) -> None:
    write(cache, {this_processor(): {"training": {"bfloat16": bfloat16, "float32": 10.0}}})
    assert fastest_products("training", "cpu") == best
    assert calls == []


def test_the_first_way_wins_a_draw() -> None:
    assert PRODUCTS["training"].best_of({"float32": 1.0, "bfloat16": 1.0}) == "float32"


def test_a_way_that_costs_memory_must_save_more_time() -> None:
    question = Question("prompts", ("small", "large"), dict, better=0.75)
    assert question.best_of({"small": 10.0, "large": 8.0}) == "small"
    assert question.best_of({"small": 10.0, "large": 7.0}) == "large"


def test_a_processor_without_bfloat16_measures_nothing(
    cache: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "onednn_has_bfloat16", lambda: False)
    assert fastest_products("inference", "cpu") == "float32"
    assert not calls
    assert not cache.exists()


@pytest.mark.parametrize(("major", "has"), [(7, False), (8, True), (9, True)])
def test_gpu_that_emulates_bfloat16_does_not_count(monkeypatch: pytest.MonkeyPatch, major: int, has: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(major=major, minor=0))
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda _: True)  # as for V100 and T4
    monkeypatch.setattr(torch.version, "hip", None)
    assert fastest_products("training", "cuda") == ("bfloat16" if has else "float32")


# --- the measurement -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", list(PRODUCTS.values()), ids=list(PRODUCTS))
def test_every_way_runs_on_a_processor_that_has_it_and_leaves_random_states(question: Question) -> None:
    before = torch.get_rng_state()
    assert (*question.prepare(),) == question.ways
    for name, way in question.prepare().items():
        if name == "float32" or onednn_has_bfloat16():
            way()
    assert torch.equal(torch.get_rng_state(), before)


def clock_of(*seconds: float) -> Callable[[], float]:
    """A clock that the ways below move."""
    times = iter(seconds)
    now = 0.0

    def clock() -> float:
        return now

    def move() -> None:
        nonlocal now
        now += next(times, seconds[-1])

    clock.move = move  # type: ignore[attr-defined]
    return clock


def test_the_shortest_time_counts_and_a_busy_machine_is_measured_longer() -> None:
    quiet, busy = clock_of(0.01), clock_of(0.01, 0.02, 0.01, 0.02, *(0.03, 0.06) * 100)
    assert measure({"a": quiet.move, "b": quiet.move}, quiet) == (pytest.approx({"a": 10, "b": 10}), False)
    assert quiet() < 0.2
    assert measure({"a": busy.move, "b": busy.move}, busy) == (pytest.approx({"a": 10, "b": 20}), True)
    assert 0.5 < busy() < 0.7


def test_a_slow_way_ends_the_measurement() -> None:
    clock = clock_of(0.01, 2.0)
    measure({"float32": clock.move, "bfloat16": clock.move}, clock)
    assert clock() < 10


def test_modes_of_the_thread_that_asks_do_not_reach_a_measurement() -> None:
    modes = list[tuple[bool, bool]]()

    def way() -> None:
        modes.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode():
        measured.times_of(Question("modes", ("way",), lambda: {"way": way}))
        assert torch.get_num_threads() >= 1
    assert {*modes} == {(False, False)}


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_measurement_is_kept_for_the_next_command(cache: Path, calls: list[str]) -> None:
    assert fastest_products("training", "cpu") == "float32"
    kept: Table = json.loads(cache.read_text())
    assert kept[this_processor()]["training"]["bfloat16"] > 15
    made = len(calls)
    assert asked_again() == "float32"
    assert len(calls) == made


@pytest.mark.parametrize(
    "table",
    [
        "",
        "{",
        "[1, 2]",
        {"PROCESSOR": 3},
        {"PROCESSOR": {"training": {"float32": "fast", "bfloat16": 1.0}}},
        {"PROCESSOR": {"training": {"float32": -1.0, "bfloat16": 1.0}}},
        {"PROCESSOR": {"training": {"float32": 1.0}}},
        {"PROCESSOR": {"training": {"float32": 1.0, "bfloat16": 0.1, "float8": 0.1}}},
        {"another processor": {"training": {"float32": 10.0, "bfloat16": 1.0}}},
    ],
)
def test_a_damaged_cache_or_another_processors_is_measured_again(cache: Path, calls: list[str], table: object) -> None:
    if isinstance(table, dict):
        table = {name.replace("PROCESSOR", this_processor()): value for name, value in table.items()}
    write(cache, table)
    assert fastest_products("training", "cpu") == "float32"
    assert calls
    assert json.loads(cache.read_text())[this_processor()]["training"].keys() == {"float32", "bfloat16"}


def test_what_other_processors_measured_stays(cache: Path, calls: list[str]) -> None:
    other = {"another processor": {"training": {"bfloat16": 1.0, "float32": 10.0}}}
    write(cache, other)
    fastest_products("training", "cpu")
    assert json.loads(cache.read_text()).items() >= other.items()


def test_without_a_writable_cache_each_process_measures(cache: Path, calls: list[str]) -> None:
    cache.parent.parent.write_text("a file where the folder of caches should be")
    for _ in range(2):
        before = len(calls)
        assert asked_again() == "float32"
        assert len(calls) > before
        assert fastest_products("training", "cpu") == "float32"  # not again in this process


def test_limits_of_instructions_are_another_processor_and_threads_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> set[str]:
        this_processor.cache_clear()
        return {this_processor()}

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    found = names()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found |= names()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        found |= names()
    finally:
        torch.set_num_threads(threads)
        this_processor.cache_clear()
    assert len(found) == 2


def test_a_busy_machine_is_named(
    cache: Path, calls: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "measure", lambda ways: (dict.fromkeys(ways, 7.0), True))
    with caplog.at_level(logging.INFO, "retro"):
        fastest_products("inference", "cpu")
    assert "busy machine" in caplog.text
    assert str(cache) in caplog.text


def test_the_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.sep + "home")
    assert cache_file() == Path("/home/.cache/retro/measured.json")
    monkeypatch.setattr("indexing.measured.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_file().is_absolute()
