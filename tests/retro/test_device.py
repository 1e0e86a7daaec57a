"""Process-wide settings made when a device is chosen."""

import threading

import pytest
import torch

from indexing.machine import Precision
from indexing.store.errors import InputError
from retro.device import Placement, choose_placement
from tests.conftest import PATIENCE


@pytest.fixture(autouse=True)
def restored_kernels():
    """Kernel selection is global to the process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_attention_on_cuda_uses_every_kernel_except_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_placement("cuda", "float32").device.type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


def test_choosing_a_cpu_changes_no_kernel_selection() -> None:
    choose_placement("cpu", "float32")
    assert torch.backends.cuda.cudnn_sdp_enabled()


CUDA, CPU = (Placement(torch.device(name), torch.bfloat16) for name in ("cuda", "cpu"))


@pytest.mark.parametrize(
    ("placement", "choice", "flops", "expected"),
    [
        (CUDA, "auto", 0, True),
        (CUDA, "no", 1e18, False),
        (CPU, "auto", 1e12, False),
        (CPU, "auto", 2e15, True),
        (CPU, "no", 2e15, False),
        (CPU, "yes", 0, True),
    ],
)
def test_auto_compiles_on_cuda_and_in_long_runs(
    placement: Placement, choice: str, flops: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retro.device._has_cxx_compiler", lambda: True)
    assert placement.compiles(choice, flops) == expected


def test_auto_needs_no_compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retro.device._has_cxx_compiler", lambda: False)
    assert not CPU.compiles("auto", 2e15)
    with pytest.raises(InputError, match="no C\\+\\+ compiler was found"):
        CPU.compiles("yes")


@pytest.mark.parametrize(("device", "together"), [("cpu", 2), ("meta", 1)])
def test_items_are_computed_on_threads_of_a_cpu_with_one_thread_of_torch_each(device: str, together: int) -> None:
    """Items that wait for each other, `together` at a time."""
    met, before, waiting = threading.Barrier(together), torch.get_num_threads(), list[int]()

    def compute(item: int) -> tuple[int, int]:
        met.wait(PATIENCE)
        return item, torch.get_num_threads()

    items = (waiting.append(item) or item for item in range(4))
    torch.set_num_threads(2)
    try:
        found = Placement(torch.device(device), torch.float32).each(compute, items)
        assert next(found)[0] == 0
        assert len(waiting) == together  # the others are not read yet
        assert [item for item, _ in found] == [1, 2, 3]
        assert torch.get_num_threads() == 2
        met = threading.Barrier(1)
        threads = {number for _, number in Placement(torch.device(device), torch.float32).each(compute, range(4))}
        assert threads == {1 if device == "cpu" else 2}
    finally:
        torch.set_num_threads(before)


def test_batches_for_cuda_are_pinned_and_prepared_by_processes() -> None:
    assert CUDA.pins_memory
    assert not CPU.pins_memory
    assert [CUDA.num_workers(-1), CUDA.num_workers(0), CPU.num_workers(-1), CPU.num_workers(3)] == [2, 0, 0, 3]


@pytest.mark.parametrize(("precision", "products"), [("tf32", "high"), ("float32", "highest"), ("bfloat16", "highest")])
def test_float32_products_on_cuda_use_tensorfloat32_only_if_it_is_chosen(
    precision: Precision, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("retro.device._has_tf32", lambda device: True)
    placement = choose_placement("cuda", precision)
    assert chosen == [products]
    assert placement.dtype == (torch.bfloat16 if precision == "bfloat16" else torch.float32)


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_on_gpus_that_multiply_it(supported: bool, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert choose_placement("cuda", "auto").dtype == dtype
