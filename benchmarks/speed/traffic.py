"""Communication volume of a process: bytes of every collective operation and send, by kind.

    c10d and functional collectives ─ kind, whole tensor of S bytes, N processes ─┬─ volume   as papers count it (ZeRO, section 7)
                                                                                  └─ sent     by each process, in a ring

    kind                          volume      sent
    all-gather, reduce-scatter    S           S · (N - 1) / N
    all-to-all, broadcast         S           S · (N - 1) / N
    all-reduce                    2 S         2 S · (N - 1) / N
    send                          S           S

FSDP, DTensor, pipelines and `torch.distributed` are all counted, since they call the dispatcher.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "isend": "send",
}
_SILENT = ("recv", "irecv", "barrier", "monitoredbarrier", "wait", "wrap", "checkfornan")
"""Beginnings of the names of operations that send no tensor."""


class Communication(TorchDispatchMode):
    """Counts communication of this process while the context is active. Compiled code is not counted.

    Attributes:
        calls: number of operations, by kind.
        volume: bytes, by kind, independent of the number of processes.
        sent: bytes that this process sends in a ring, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.volume: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it.

        Raises:
            NotImplementedError: the volume of the operation is unknown.
        """
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its operations on local tensors are dispatched here afterwards
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {}), result)
        return result

    def _count(self, operation: str, arguments: dict[str, Any], result: Any) -> None:
        name = operation.partition("::")[2].replace("_", "")
        if name.startswith(_SILENT):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        if kind is None:
            raise NotImplementedError(f"{operation}: its communication volume is not known.")
        size = _group(arguments).size()
        if size == 1:
            return
        whole = max(map(_num_bytes, (*arguments.values(), result)))  # of input and output, one can be a shard
        volume = 2 * whole if kind == "all-reduce" else whole
        self.calls[kind] += 1
        self.volume[kind] += volume
        self.sent[kind] += volume if kind == "send" else volume * (size - 1) // size


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    """The process group of an operation, given by name or as an object."""
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(GroupName(group))
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _num_bytes(value: Any) -> int:
    """Bytes of a tensor or of several tensors."""
    several = isinstance(value, Tensor | Sequence) and not isinstance(value, str)
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)) if several else 0
