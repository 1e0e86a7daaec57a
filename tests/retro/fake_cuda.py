"""A CUDA device without hardware: tensors on it have a shape, a dtype and a device, but no values.

    with fake_cuda() as cuda:
        model = build().to("cuda")          # CPU tensors stay real, CUDA tensors are fake
        model.hidden(Inputs(tokens.to("cuda")))  # raises if an operation mixes tensors of both devices
    cuda.reads                              # where the host waited for a value of the device

Fake tensors (`torch._subclasses`) compute shapes by torch's own rules and raise `FakeTensorDeviceMismatchError` where CUDA would
refuse an operation. A result whose shape depends on values (`nonzero`, boolean indexing) raises `DynamicOutputShapeException`.
"""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.device_guard import XLA, guard_of_meta
from retro.inference import step_graphs
from tests.retro.recorded import record

CUDA = torch.device("cuda", 0)
_SHOWN = torch.device("xla", 0)
_ROOT = Path(__file__).resolve().parents[2]
_DEVICE = torch.ops.prim.device.default


class FakeCuda(FakeTensorMode):
    """Computes with fake tensors on CUDA and real tensors on the CPU.

    Attributes:
        reads: `file:line: code` of every read of a device's value by the host, in order. It reads zeros.
    """

    avoid_device_init = True  # type: ignore[assignment]  # torch.cuda.is_available() is patched, but there is no device

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # needs a driver
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and _is_composite(func):
            with self:  # without autograd, `to` and `item` arrive here undivided
                return func.decompose(*args, **kwargs)
        has_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not has_fake and (wanted is None or wanted.type == "cpu"):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.read(args[0]).item()
        if func is torch.ops.aten._to_copy.default and has_fake and wanted is not None and wanted.type == "cpu":
            return self.read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.copy_.default and has_fake and not isinstance(args[0], FakeTensor):
            return args[0].copy_(self.read(args[1]))
        if wanted is not None and wanted.type == _SHOWN.type:  # C++ asked a fake tensor for its device
            kwargs["device"] = CUDA
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self, x: Tensor) -> Tensor:
        """The values of a fake tensor: zeros on the CPU."""
        ours = [frame for frame in traceback.extract_stack() if _is_ours(frame.filename)]
        file = Path(ours[-1].filename).relative_to(_ROOT) if ours else "?"
        self.reads.append(f"{file}:{ours[-1].lineno}: {ours[-1].line}" if ours else "?")
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros(tuple(x.shape), dtype=x.dtype)


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_ours(file: str) -> bool:
    return file.startswith(str(_ROOT)) and "site-packages" not in file and file != __file__


def _device_for_c(args: Any) -> torch.device:
    """The device that C++ sees. Python sees CUDA.

    Autograd asks a CUDA device for streams, which a build for CPUs does not have. It asks XLA for none, and autocast treats both
    alike. Inside a kernel the device is `meta`.
    """
    device = args[0].device
    return _SHOWN if device.type == "cuda" else device


def _move(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to`, which cannot exchange a real tensor for a fake one."""
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to(*args, **kwargs)
                module._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    return self


def _tolist(self: FakeTensor) -> Any:
    return self.fake_mode.read(self).tolist()  # type: ignore[attr-defined]  # one read for the whole tensor


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Run the code inside as on a machine with one GPU that has bfloat16."""
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def with_device(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device_for_c(args) if func is _DEVICE else dispatch(cls, func, types, args, kwargs or {})

    state = torch.zeros(16, dtype=torch.uint8)
    with contextlib.ExitStack() as stack:
        stack.enter_context(guard_of_meta(XLA))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        replaced = {
            "is_available": True,
            "is_bf16_supported": True,
            "get_rng_state": state,
            "device_count": 1,
            "set_rng_state": None,
        }
        for name, value in replaced.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
        stack.enter_context(mock.patch("torch.backends.cuda.is_flash_attention_available", return_value=True))
        stack.enter_context(mock.patch("torch.cuda.Event"))
        stack.enter_context(mock.patch.object(step_graphs, "record", record))
        stack.enter_context(mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(with_device)))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist))
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {_DEVICE: _device_for_c}))
        yield stack.enter_context(FakeCuda())
