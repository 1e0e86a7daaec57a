"""What a device is set up for before a model runs on it."""

import pytest
import torch

from retro.device import choose_placement


@pytest.fixture(autouse=True)
def kernels_as_before():
    """They are chosen for the process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_attention_on_cuda_has_every_kernel_but_that_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_placement("cuda", "float32").device.type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


def test_on_a_cpu_the_process_keeps_its_kernels() -> None:
    choose_placement("cpu", "float32")
    assert torch.backends.cuda.cudnn_sdp_enabled()
