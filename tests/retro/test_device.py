"""Process-wide settings made when a device is chosen."""

import pytest
import torch

from retro.device import choose_placement


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
