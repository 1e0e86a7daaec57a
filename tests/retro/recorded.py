"""A stand-in for CUDA graphs: operations are recorded once, and repeated on the tensors of then, whatever the host does now."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value: not in a graph"
        out = func(*args, **(kwargs or {}))
        kinds = {leaf.device.type for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor) and leaf.ndim}
        assert len(kinds) < 2, "a copy from the host's memory: not in a graph"
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(work: Callable[[], Tensor], memory: object = None) -> tuple[Tensor, Callable[[], object], object]:
    """As `retro.inference.step_graphs.record`."""
    with _Recorder() as recorder:
        result = work()

    def replay() -> None:
        now: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value)

        for func, args, kwargs, out in recorder.calls:
            found = func(*tree_map(current, args), **tree_map(current, kwargs))
            now.update({id(old): new for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True)})
        result.copy_(now[id(result)])

    return result, replay, memory
