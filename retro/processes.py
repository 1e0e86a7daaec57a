"""Processes that train together: what the first one decides all learn, and what fails on one fails on all.

Without a group there is one process, and everything is just called. Where there are several, all call the same
functions in the same order, or they wait for each other.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from indexing.store.errors import InputError

Result = TypeVar("Result")

_KINDS: tuple[type[Exception], ...] = (InputError, OSError, RuntimeError)
"""What an error becomes in the processes that it did not happen in: the first that it is one of, else the last."""


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
        raise _KINDS[kind](f"process 0: {problem}")
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
            raise _KINDS[kind](f"process {rank}: {problem}")
    return result  # type: ignore[return-value]


def _told(error: BaseException) -> tuple[str, int]:
    """An error in words, and the number of its kind: the error itself might not be one that can be sent."""
    kinds = [number for number, kind in enumerate(_KINDS) if isinstance(error, kind)]
    known = str(error) if kinds and str(error) else repr(error)
    return known, kinds[0] if kinds else len(_KINDS) - 1
