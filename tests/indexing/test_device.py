"""Which devices multiply bfloat16 in hardware."""

from types import SimpleNamespace

import pytest
import torch

from indexing.device import has_bfloat16


@pytest.mark.parametrize(("major", "has"), [(7, False), (8, True), (9, True)])
def test_gpu_that_emulates_bfloat16_does_not_count(monkeypatch: pytest.MonkeyPatch, major: int, has: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(major=major, minor=0))
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda _: True)  # as for V100 and T4
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_bfloat16("cuda") == has
