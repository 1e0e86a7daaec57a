"""Which of several ways is fastest on this processor: measured once, and kept in the user's cache.

    question ─► kept for this processor and library? ─ yes ─► the fastest of its ways
                                 └ no ─► all ways in turn, on one thread, some rounds ─► kept

A processor that lists an instruction need not be fast with it: some with AVX512-BF16 multiply float32 twice as fast as
bfloat16. So instructions decide what can run, and a measurement decides what does. On a GPU nothing is measured.

Questions are defined where their answers are used: the precision of products here, kernels of packed weights in
`retro/inference/packed_kernels.py`, costs of drafts in `draft_costs.py` there, attention in `retro/model/kernels.py`.

One thread measures, so that processes with any number of threads choose the same: workers of a stage write one artifact.
It is a new thread, since modes such as autocast and inference are those of a thread.
"""

import functools
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from indexing.machine import one_thread_each, onednn_has_bfloat16, processor_name
from indexing.store.files import read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("retro")

Ways = Mapping[str, Callable[[], object]]
Products = Literal["float32", "bfloat16"]


class Question(NamedTuple):
    """What is measured.

    Attributes:
        name: in the cache and in `retro doctor`.
        ways: their names. The first one is preferred.
        prepare: creates the ways, with the weights that they multiply. Called if nothing is kept.
        better: share of the first way's time that another must stay below, so that noise does not decide.
    """

    name: str
    ways: tuple[str, ...]
    prepare: Callable[[], Ways]
    better: float = 0.97

    def best_of(self, milliseconds: Mapping[str, float]) -> str:
        """The way with the shortest time; the first one if others hardly save time."""
        first = self.ways[0]
        best = min(milliseconds, key=milliseconds.__getitem__)
        return best if milliseconds[best] < self.better * milliseconds[first] else first


_SECONDS, _ROUNDS, _MOST_SECONDS = 0.15, 3, 0.5
_BUSY = 1.5  # median to shortest time of a way
ROWS, WIDTH, INNER = 256, 512, 1536
"""Rows, width and inner features of a feed-forward layer between the presets `tiny` and `small`."""
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "FBGEMM_ENABLE_INSTRUCTIONS")


_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Table = dict[str, dict[str, dict[str, _Milliseconds]]]  # processor → name of a question → way → its time
_TABLE = TypeAdapter(_Table)


def fastest_products(question: Literal["training", "inference"], device: str) -> Products:
    """The precision in which products of matrices are faster: bfloat16 or float32.

    Args:
        question: `training`: forward and backward pass of a layer whose weights are float32. `inference`: products
            with weights that have the precision.
        device: a resolved one. CUDA devices with bfloat16 take it.
    """
    import torch

    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if not onednn_has_bfloat16():
        return "float32"
    return "bfloat16" if fastest(PRODUCTS[question]) == "bfloat16" else "float32"


@functools.cache
def fastest(question: Question) -> str:
    """The fastest way on this processor; see `times_of`. One answer for the life of the process."""
    return question.best_of(times_of(question))


def times_of(question: Question) -> dict[str, float]:
    """Milliseconds of each way on this processor, from the user's cache or measured now. A measurement that other work
    disturbed is kept too, so that a command that is run again chooses the same."""
    file = cache_file()
    kept = _kept(file, question)
    if kept is None:
        times, busy = _measured(question)
        kept = _kept(file, question) or times  # another process may have been faster
        _keep(file, question.name, kept)
        if busy:
            told = ", ".join(f"{way} {each:.1f} ms" for way, each in kept.items())
            log.info("%s was measured on a busy machine: %s. Remove %s to measure it again.", question.name, told, file)
    return kept


def _measured(question: Question) -> tuple[dict[str, float], bool]:
    import torch

    with one_thread_each(1), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        return thread.submit(lambda: measure(question.prepare())).result()


def measure(ways: Ways, clock: Callable[[], float] = time.thread_time) -> tuple[dict[str, float], bool]:
    """Time all ways in turn for about 0.15 seconds, or longer on a busy machine, but at most half a second.

    Seconds of this thread, without those in which another program has its core.

    Returns:
        the shortest time of each way in milliseconds, and whether the times differ much.
    """
    started, times = clock(), {name: list[float]() for name in ways}
    for way in ways.values():
        way()  # compiles kernels
    while True:
        for name, way in ways.items():
            before = clock()
            way()
            times[name].append(1000 * (clock() - before))
        spent, rounds = clock() - started, len(next(iter(times.values())))
        busy = any(statistics.median(each) > _BUSY * min(each) for each in times.values())
        if (rounds >= _ROUNDS and spent > (_MOST_SECONDS if busy else _SECONDS)) or spent > _MOST_SECONDS:
            return {name: min(each) for name, each in times.items()}, busy


def cache_file() -> Path:
    """The file that keeps what was measured, in the user's cache; of a user without a home, as in a container, in the
    folder of temporary files."""
    folder = os.environ.get("XDG_CACHE_HOME")
    if not folder:
        try:
            folder = str(Path.home() / ".cache")
        except RuntimeError:
            folder = tempfile.gettempdir()
    return Path(folder) / "retro" / "measured.json"


@functools.cache
def this_processor() -> str:
    """What times depend on: the processor's name, the instructions that are in use, and PyTorch."""
    import torch

    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return ", ".join([processor_name(), torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}", *limits])


def _kept(file: Path, question: Question) -> dict[str, float] | None:
    """What is kept for this processor, in the order of the ways; None if it is not about all of them."""
    found = _read(file).get(this_processor(), {}).get(question.name, {})
    return {way: found[way] for way in question.ways} if found.keys() == {*question.ways} else None


def _read(file: Path) -> _Table:
    """What is kept; nothing if there is no readable file."""
    try:
        return _TABLE.validate_python(read_json(file)) if file.exists() else {}
    except (OSError, ValueError, ValidationError) as error:
        log.debug("%s is made again: %s", file, error)
        return {}


def _keep(file: Path, question: str, milliseconds: dict[str, float]) -> None:
    """Add times to the file. A user without a writable cache measures in each process."""
    table = _read(file)
    table.setdefault(this_processor(), {})[question] = milliseconds
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, table)
    except OSError as error:
        log.debug("what was measured is not kept: %s", error)


# --- precision of products -------------------------------------------------------------------------------------------


def _training_ways() -> Ways:
    """Both passes of a gated feed-forward layer under autocast, which casts weights and activations each time."""
    import torch
    from torch.nn.functional import linear, silu

    x, (gate, up, down) = random_numbers(ROWS, WIDTH), layer_weights()
    weights = [each.requires_grad_() for each in (gate, up, down)]

    def step(precision: torch.dtype) -> object:
        with torch.enable_grad(), torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            out = linear(silu(linear(x, gate)) * linear(x, up), down).float().square().mean()
        return torch.autograd.grad(out, weights)

    return {"float32": lambda: step(torch.float32), "bfloat16": lambda: step(torch.bfloat16)}


def _inference_ways() -> Ways:
    """The same layer forward, with weights that were cast before."""
    import torch
    from torch.nn.functional import linear, silu

    def layer(precision: torch.dtype) -> Callable[[], object]:
        x, (gate, up, down) = (
            random_numbers(ROWS, WIDTH).to(precision),
            (each.to(precision) for each in layer_weights()),
        )

        def run() -> object:
            with torch.inference_mode():
                return linear(silu(linear(x, gate)) * linear(x, up), down)

        return run

    return {"float32": layer(torch.float32), "bfloat16": layer(torch.bfloat16)}


def random_numbers(*shape: int) -> "Tensor":
    """Random numbers of a generator of their own, so that those of a run stay the same."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5


def layer_weights() -> list["Tensor"]:
    """Weights of a gated feed-forward layer, `WIDTH` to `INNER` features twice and back, float32 [outputs, inputs]."""
    return [random_numbers(INNER, WIDTH), random_numbers(INNER, WIDTH), random_numbers(WIDTH, INNER)]


PRODUCTS = {
    "training": Question("training", ("float32", "bfloat16"), _training_ways),
    "inference": Question("inference", ("float32", "bfloat16"), _inference_ways),
}
"""The questions of `fastest_products`."""
