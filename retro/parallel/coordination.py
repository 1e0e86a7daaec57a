"""Coordination of processes: the first one decides for all, and an error on one is an error on all.

Without a group there is one process, and functions are simply called. With several, all must call the same functions in
the same order, or they wait for each other forever.
"""

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from indexing.store.errors import InputError

Result = TypeVar("Result")

_KINDS: tuple[type[Exception], ...] = (InputError, OSError, RuntimeError)
"""Type of an error in the other processes: the first of these that it is an instance of, else the last."""


@contextlib.contextmanager
def joined() -> Iterator[int]:
    """Form a process group of the processes that torchrun or Slurm started; yields the rank of this one, 0 if it is
    alone.

    Ranks above 0 log only errors. If several processes raise the same error, only one prints it. An existing group, for
    example Ray's, is used as it is.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    store = None
    if size > 1 and not dist.is_initialized():
        # A key-value store shared by all processes; the group uses it for rendezvous too.
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store survives a restart with addresses of dead processes (pytorch/pytorch#167288). The restart
            # count is per node, so several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of
            # torchrun.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:
        logging.getLogger("retro").setLevel(logging.ERROR)
    try:
        yield rank
    except BaseException as error:
        # The group is not destroyed: other processes may still wait in it, and this process ends now.
        if store is not None and _is_reported(store, error):
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        raise
    if store is not None:
        dist.destroy_process_group()


def _is_reported(store: dist.Store, error: BaseException) -> bool:
    """True if another process has already raised the same error, which it prints."""
    words, prefixes = re.subn(r"^(process \d+: )+", "", str(error) or repr(error))
    try:
        return store.add(f"reported/{words}", 1) > 1
    except RuntimeError:  # the process that hosted the store has ended
        return bool(prefixes)


def open_group() -> dist.ProcessGroup | None:
    """Create a gloo group of all processes, separate from the communication of the training loop; None without
    processes.

    Every call creates a new group. Threads must not share one.
    """
    return dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None


def rank_in(group: dist.ProcessGroup | None) -> int:
    """The rank of this process, from 0."""
    return 0 if group is None else dist.get_rank(group)


def on_first(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Call a function in the first process and return its result in all of them.

    Raises:
        Exception: what the function raised; in other processes an `InputError`, OSError or RuntimeError with its
            message.
    """
    if group is None:
        return act()
    sent: list[tuple[Result | None, str, int] | None] = [None]
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            sent[0] = (act(), "", 0)
        except BaseException as error:
            failure, sent[0] = error, (None, *_as_message(error))
    dist.broadcast_object_list(sent, group=group, group_src=0)
    if failure is not None:
        raise failure
    assert sent[0] is not None
    result, problem, kind = sent[0]
    if problem:
        raise _remote_error(0, problem, kind)
    return result  # type: ignore[return-value]


def on_all(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Call a function in every process, and return only if none has failed.

    Raises:
        Exception: what the function raised here; if only others failed, the error of the first of them, as in
            `on_first`.
    """
    if group is None:
        return act()
    failure: BaseException | None = None
    message, result = ("", 0), None
    try:
        result = act()
    except BaseException as error:
        failure, message = error, _as_message(error)
    received: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(received, message, group=group)
    if failure is not None:
        raise failure
    for rank, (problem, kind) in enumerate(received):
        if problem:
            raise _remote_error(rank, problem, kind)
    return result  # type: ignore[return-value]


def _as_message(error: BaseException) -> tuple[str, int]:
    """The message of an error and the index of its type in `_KINDS`: the error itself may not be picklable."""
    kinds = [index for index, kind in enumerate(_KINDS) if isinstance(error, kind)]
    message = str(error) if kinds and str(error) else repr(error)
    return message, kinds[0] if kinds else len(_KINDS) - 1


def _remote_error(rank: int, problem: str, kind: int) -> Exception:
    """The error of another process, from its message and type."""
    error = _KINDS[kind](f"process {rank}: {problem}")
    if isinstance(error, OSError):
        error.errno = errno.EIO  # without a number it would count as a bug of the program
    return error
