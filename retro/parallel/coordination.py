"""Processes that train together: what the first one decides all learn, and what fails on one fails on all.

Without a group there is one process, and everything is just called. Where there are several, all call the same
functions in the same order, or they wait for each other.
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
"""What an error becomes in the processes that it did not happen in: the first that it is one of, else the last."""


@contextlib.contextmanager
def joined() -> Iterator[int]:
    """Inside, the processes that torchrun or Slurm have started are one group; yields the number of this one, 0 if it is alone.

    Processes beyond the first say only what is wrong, and what is wrong in several of them one alone says. A group that is
    there already, Ray's for example, stays as it is.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    store = None
    if size > 1 and not dist.is_initialized():
        # A store of names and values that all processes see; the group meets there too.
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store outlives a restart, with the addresses of the dead (pytorch/pytorch#167288). The count is that of
            # one node: several need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:
        logging.getLogger("retro").setLevel(logging.ERROR)
    try:
        yield rank
    except BaseException as error:
        # The group is left to the end of the process, which comes now: others may still be waiting in it.
        if store is not None and _is_said(store, error):
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        raise
    if store is not None:
        dist.destroy_process_group()


def _is_said(store: dist.Store, error: BaseException) -> bool:
    """Whether another process has come with the same error before. It says so, and this one need not."""
    words, heard = re.subn(r"^(process \d+: )+", "", str(error) or repr(error))
    try:
        return store.add(f"said/{words}", 1) > 1
    except RuntimeError:  # the store went with the process that kept it
        return bool(heard)


def open_group() -> dist.ProcessGroup | None:
    """A gloo group of all processes, for talk that must not mix with that of the training loop; None if none were started.

    Every call makes a group of its own: a thread that talks takes one that no other thread uses.
    """
    return dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None


def rank_in(group: dist.ProcessGroup | None) -> int:
    """The number of this process, from 0 on."""
    return 0 if group is None else dist.get_rank(group)


def on_first(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Let the first process act, and give all of them what it returns.

    Raises:
        Exception: what it raised; in the other processes an `InputError`, OSError or RuntimeError that says so.
    """
    if group is None:
        return act()
    said: list[tuple[Result | None, str, int] | None] = [None]
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            said[0] = (act(), "", 0)
        except BaseException as error:
            failure, said[0] = error, (None, *_told(error))
    dist.broadcast_object_list(said, group=group, group_src=0)
    if failure is not None:
        raise failure
    assert said[0] is not None
    result, problem, kind = said[0]
    if problem:
        raise _heard(0, problem, kind)
    return result  # type: ignore[return-value]


def on_all(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Let every process act, and go on only if none has failed.

    Raises:
        Exception: what it raised here; if only others failed, the error of the first of them, as in `on_first`.
    """
    if group is None:
        return act()
    failure: BaseException | None = None
    told, result = ("", 0), None
    try:
        result = act()
    except BaseException as error:
        failure, told = error, _told(error)
    heard: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(heard, told, group=group)
    if failure is not None:
        raise failure
    for rank, (problem, kind) in enumerate(heard):
        if problem:
            raise _heard(rank, problem, kind)
    return result  # type: ignore[return-value]


def _told(error: BaseException) -> tuple[str, int]:
    """An error in words, and the number of its kind: the error itself might not be one that can be sent."""
    kinds = [number for number, kind in enumerate(_KINDS) if isinstance(error, kind)]
    known = str(error) if kinds and str(error) else repr(error)
    return known, kinds[0] if kinds else len(_KINDS) - 1


def _heard(rank: int, problem: str, kind: int) -> Exception:
    """The error of another process, as `_told` has told it."""
    error = _KINDS[kind](f"process {rank}: {problem}")
    if isinstance(error, OSError):
        error.errno = errno.EIO  # without a number it would be taken for a defect of the program
    return error
