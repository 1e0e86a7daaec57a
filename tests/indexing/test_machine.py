"""Memory under limits of control groups, and work on several threads."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing import machine
from indexing.machine import (
    _copy_read_only_cache,
    choose_blas_kernels,
    compiled,
    for_each,
    map_ahead,
    map_largest_first,
    on_background_thread,
    on_ending_thread,
    one_thread_each,
    usable_memory,
)
from tests.conftest import PATIENCE

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Other than the single thread of each worker."""
    torch.set_num_threads(2)


def test_items_run_with_one_torch_thread_and_the_number_is_restored() -> None:
    before, seen = torch.get_num_threads(), []
    with one_thread_each(3) as run:
        run(lambda item: seen.append((item, torch.get_num_threads())), range(50))
    assert sorted(seen) == [(item, 1) for item in range(50)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("size", [1, 3])
def test_only_a_single_item_runs_on_the_calling_thread(size: int) -> None:
    seen: set[int] = set()
    with one_thread_each(3) as run:
        run(lambda _: seen.add(threading.get_ident()), range(size))
    assert (threading.get_ident() in seen) == (size == 1)


@pytest.mark.parametrize(("size", "workers"), [(0, None), (1, 3), (3, 1), (50, 3)])
def test_each_item_is_visited_once_and_few_of_them_on_this_thread(size: int, workers: int | None) -> None:
    seen = []
    for_each(lambda item: seen.append((item, threading.get_ident())), range(size), workers)
    assert sorted(item for item, _ in seen) == list(range(size))
    if size < 2 or workers == 1:
        assert {thread for _, thread in seen} <= {threading.get_ident()}


def test_overlapping_users_restore_the_original_number_of_threads() -> None:
    before, entered, inside = torch.get_num_threads(), threading.Event(), threading.Event()

    def first() -> None:
        with one_thread_each(1):
            entered.set()
            inside.wait(timeout=0.3)  # a second user could enter here if it were allowed to

    def second() -> None:
        assert entered.wait(timeout=PATIENCE)
        with one_thread_each(1):
            inside.set()
            threads[0].join()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before]


def test_torch_has_one_thread_in_the_background_and_its_number_elsewhere() -> None:
    def threads_of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    with on_background_thread("saves") as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert pool.submit(lambda: threading.current_thread().name).result().startswith("saves")
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of the system are counted on Linux")
def test_threads_of_openmp_end_with_an_ending_thread() -> None:
    def threads_of_the_system() -> int:
        return len(os.listdir("/proc/self/task"))

    large, before = torch.ones(1 << 22), threads_of_the_system()
    assert on_ending_thread(lambda: large.exp() is not None and threads_of_the_system()) >= before + 2
    deadline = time.monotonic() + PATIENCE
    while threads_of_the_system() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_error_in_a_thread_is_raised_and_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread_each(2) as run:
        run(lambda item: 1 // item, [1, 0])
    assert torch.get_num_threads() == before


def test_results_are_ordered_and_the_next_ones_are_computed_ahead() -> None:
    made = [threading.Event() for _ in range(5)]

    def make(number: int) -> int:
        made[number].set()
        return number

    results = map_ahead(make, range(5), 2)
    assert next(results) == 0
    assert made[1].wait(timeout=PATIENCE)
    assert made[2].wait(timeout=PATIENCE)
    assert not made[4].is_set()  # the whole input is not computed at once
    assert list(results) == [1, 2, 3, 4]


def test_results_keep_the_order_of_items_and_the_largest_item_begins_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    begun, units = list[int](), list[int]()

    def half(item: int, count: Callable[[int], None]) -> float:
        begun.append(item)
        count(item)
        return item / 2

    assert map_largest_first(half, [2, 5, 3, 5], [2, 5, 3, 5], units.append) == [1, 2.5, 1.5, 2.5]
    assert begun == units == [5, 5, 3, 2]
    assert map_largest_first(half, [], []) == []


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_and_ctrl_c_end_all_calls_within_their_work(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    begun = set[int]()

    def work(item: int, count: Callable[[int], None]) -> None:
        begun.add(item)
        while len(begun) < 3:
            time.sleep(0.001)
        if item == 1 and error is KeyError:
            raise error
        again = 0.0
        while True:  # to the next count
            if item == 1 and time.monotonic() > again:
                # The main thread receives it. Within a callback of the garbage collector it would be lost.
                os.kill(os.getpid(), signal.SIGINT)
                again = time.monotonic() + 5
            count(1)

    with pytest.raises(error):
        map_largest_first(work, range(100), [1] * 100)
    assert len(begun) < 100


def test_compiled_code_needs_no_folder_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba.core.caching

    def double(values: np.ndarray) -> None:
        for row in range(len(values)):
            values[row] *= 2

    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    values = np.arange(3)
    compiled(double)(values)
    assert values.tolist() == [0, 2, 4]


def test_compilation_is_logged_once_for_a_file_and_not_if_its_result_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba.core.caching

    file = tmp_path / "loops.py"
    file.write_text("def first(values):\n    return values[0]\n\n\ndef last(values):\n    return values[-1]\n")

    def logged() -> list[str]:
        """What a process logs that runs these functions."""
        spec = importlib.util.spec_from_file_location("loops", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        machine._log_compilation.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "retro"):
            assert (compiled(module.first)(np.arange(3)), compiled(module.last)(np.arange(3))) == (0, 2)
        return caplog.messages

    (message,) = logged()
    assert message.startswith("Compiling the loops of loops, once for this version")
    assert logged() == []
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    (message,) = logged()
    assert "in every process" in message


def test_a_read_only_cache_of_compiled_code_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import config

    (tmp_path / "suffixes_1").mkdir()
    (tmp_path / "suffixes_1" / "find.nbi").write_bytes(b"index")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    _copy_read_only_cache.__wrapped__()
    assert str(tmp_path) == config.CACHE_DIR  # it can be written to
    monkeypatch.setattr(os, "access", lambda *_: False)
    _copy_read_only_cache.__wrapped__()
    assert str(tmp_path) != config.CACHE_DIR
    assert (Path(config.CACHE_DIR) / "suffixes_1" / "find.nbi").read_bytes() == b"index"


def test_error_is_raised_at_the_position_of_its_item() -> None:
    results = map_ahead(lambda item: 1 // item, [1, 0, 1], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "400"}, 400),
        ("0::/\n", {"memory.max": "300"}, 300),  # seen from inside a container
        ("4:cpu,memory:/a\n2:pids:/a\n", {"memory/a/memory.limit_in_bytes": "200", "memory.max": "100"}, 200),
        ("0::/a\n", {"a/memory.max": "max"}, MACHINE),
        ("0::/a\n", {}, MACHINE),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(1 << 62)}, MACHINE),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, membership: str, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_memory(tmp_path / "membership", tmp_path) == expected


def test_a_machine_without_control_groups_has_its_memory(tmp_path: Path) -> None:
    assert usable_memory(tmp_path / "none", tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("description", "kernels"),
    [
        ("vendor_id: GenuineIntel\nflags: sse avx2 avx512f avx512vl", "SkylakeX"),
        ("vendor_id: GenuineIntel\nflags: sse avx2", "Haswell"),
        ("vendor_id: GenuineIntel\nflags: sse", None),
        ("vendor_id: AuthenticAMD\nflags: sse avx2 avx512f avx512vl", None),
    ],
)
def test_openblas_uses_the_vector_instructions_of_an_intel_processor(
    description: str, kernels: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(description)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "")  # restored afterwards
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    choose_blas_kernels(tmp_path / "cpuinfo")
    assert os.environ.get("OPENBLAS_CORETYPE") == kernels


def test_a_choice_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id: GenuineIntel\nflags: sse avx2")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    choose_blas_kernels(tmp_path / "cpuinfo")
    assert os.environ["OPENBLAS_CORETYPE"] == "Zen"


def test_a_machine_without_a_description_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "")
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    choose_blas_kernels(tmp_path / "cpuinfo")
    assert "OPENBLAS_CORETYPE" not in os.environ


def test_faiss_does_not_use_kernels_of_2004_on_this_machine() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or " avx2 " not in cpuinfo.read_text():
        pytest.skip("a processor without AVX2")
    code = "import json, indexing, faiss, threadpoolctl; print(json.dumps(threadpoolctl.threadpool_info()))"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "Prescott" not in [each.get("architecture") for each in json.loads(printed.stdout)]


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("", 5), ("0", 5), ("many", 5), ("4,2", 5)])
def test_threads_are_those_that_were_given_or_one_for_each_core(
    given: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert machine.allowed_threads() == threads
