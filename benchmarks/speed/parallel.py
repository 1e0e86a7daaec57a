"""Training steps in every parallel mode: step time, memory per process, bytes that a process sends.

    python -m benchmarks.speed.parallel [--processes 2] [--size small] [--rounds 3]
    torchrun … benchmarks/speed/parallel.py [--size small]          processes on several machines

There is one process per GPU, or `--processes` processes with one thread each and gloo. All modes do the same step: the
same sequences, float32 weights, eager. Rounds alternate between the modes, because machines drift. Only one model
exists at a time.

    time      of a step until the last process has finished it, median over the rounds
    held      between steps, in the process that holds most: parameters and moments; gradients when the optimizer steps
    peak      in a step, in the process that holds most. On CUDA: memory of torch's allocator. On a CPU: held memory
              plus the largest growth of live tensors in the step, from torch's profiler, which does not see gloo's
              buffers and blocks allocated earlier
    volume    of the collectives of a step, in multiples of the parameters' bytes, X. As in papers, an all-reduce counts
              2X, an all-gather and a reduce-scatter X each. The last column has the formula for data parallelism and
              ZeRO
    sent      by the process that sends most, in a ring

With several batches per step (--gradient-accumulation-steps A), data parallelism and ZeRO-1 sum gradients over
processes once per step, ZeRO-2 after every batch because it keeps only parts of them. ZeRO-3 does not gather the unit
of embeddings and output layer (R bytes) again for the backward pass, because the loss uses it right before.
"""

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import add_minutes, add_precision, agreed, budget, say, seconds, training_placement, write
from benchmarks.speed.traffic import Communication
from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.device import Placement
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model_settings import NO_COPY_HEAD, ModelSettings, updated
from retro.parallel.coordination import joined
from retro.parallel.forward_backward import DistributedModel, WholeModel, all_parameters
from retro.parallel.gradient_norms import local
from retro.parallel.pipeline_parallel import Pipeline
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, Checkpointing, ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep

VOCABULARY = 8192


@dataclass(frozen=True)
class Mode:
    """A parallel mode, which is a row of the table."""

    name: str
    parallel: ParallelSettings = ALONE
    alone: bool = False
    experts: int = 0


@dataclass(frozen=True)
class Running:
    """A mode's model, ready to step.

    Attributes:
        step: forward, backward, clipping, AdamW.
        passes: the distributed model.
        optimizer: the optimizer of its parameters.
        num_bytes: bytes of the whole model's parameters, X, and of those of its outermost unit, R.
    """

    step: Callable[[], object]
    passes: DistributedModel
    optimizer: torch.optim.Optimizer
    num_bytes: tuple[int, int]


def modes(n: int) -> Iterator[Mode]:
    """Yield the modes for `n` processes. A model may not be divisible in each."""
    recomputed: tuple[Checkpointing, ...] = ("selective", "full")
    yield Mode("one process", alone=True)
    if n == 1:
        for recompute in recomputed:
            yield Mode(f"checkpointing: {recompute}", ParallelSettings(activation_checkpointing=recompute))
        return
    yield Mode("data")
    for zero in (1, 2, 3):
        yield Mode(f"ZeRO-{zero}", ParallelSettings(zero=zero))
    yield Mode("ZeRO-3, CPU offload", ParallelSettings(zero=3, cpu_offload=True))
    for recompute in recomputed:
        yield Mode(f"data, checkpointing: {recompute}", ParallelSettings(activation_checkpointing=recompute))
    yield Mode("ZeRO-3, checkpointing: full", ParallelSettings(zero=3, activation_checkpointing="full"))
    yield Mode(f"tensor {n}", ParallelSettings(tensor=n))
    yield Mode(f"pipeline {n}", ParallelSettings(pipeline=n))
    yield Mode(f"pipeline {n}, interleaved", ParallelSettings(pipeline=n, pipeline_schedule="interleaved"))
    if n > 2 and n % 2 == 0:
        half = n // 2
        yield Mode(f"tensor 2 × data {half}", ParallelSettings(tensor=2))
        yield Mode(f"tensor 2 × ZeRO-3 {half}", ParallelSettings(tensor=2, zero=3))
        yield Mode(f"pipeline 2 × data {half}", ParallelSettings(pipeline=2))
        yield Mode(f"pipeline 2 × ZeRO-1 {half}", ParallelSettings(pipeline=2, zero=1))
        yield Mode(
            f"pipeline 2, interleaved × data {half}", ParallelSettings(pipeline=2, pipeline_schedule="interleaved")
        )
        if half == 2:
            yield Mode("pipeline 2 × tensor 2", ParallelSettings(pipeline=2, tensor=2))
    yield Mode(f"{n} experts: one process", alone=True, experts=n)
    yield Mode(f"{n} experts: data", experts=n)
    yield Mode(f"{n} experts: expert {n}", ParallelSettings(expert=n), experts=n)
    yield Mode(f"{n} experts: expert {n}, ZeRO-3", ParallelSettings(expert=n, zero=3), experts=n)


def formula(mode: Mode, num_bytes: tuple[int, int], accumulation: int) -> float | None:
    """Return the volume of a step of data parallelism in X, by the formulas of the papers; None for other modes."""
    if mode.alone:
        return 0.0
    if mode.parallel.tensor * mode.parallel.pipeline * mode.parallel.expert > 1:
        return None
    whole, outermost = num_bytes
    if mode.parallel.zero < 2:
        return 2.0
    return 1.0 + accumulation if mode.parallel.zero == 2 else accumulation * (3 - outermost / whole)


def build(
    mode: Mode, model: ModelSettings, processes: Processes, placement: Placement, options: argparse.Namespace
) -> Running:
    """Create a model with random weights and its optimizer, and distribute them.

    Raises:
        InputError: the model cannot be divided this way.
    """
    torch.manual_seed(0)
    whole = Retro(updated(model, {"experts.num_experts": mode.experts}))
    parts = ("attention.", "cross.", "feed_forward.", "encoder.")
    outermost = sum(value.nbytes for name, value in whole.named_parameters() if not name.startswith(parts))
    num_bytes = sum(value.nbytes for value in whole.parameters()), outermost
    if processes.along("pipeline") is not None:
        passes: DistributedModel = Pipeline(whole, processes, placement, options.sequences)
    else:
        passes = WholeModel(whole.to(placement.device), processes, placement)
    for part in passes.model_parts:
        part.train()
    optimizer = make_optimizer(passes.model_parts, TrainSettings(lr=1e-4))
    settings = TrainSettings(
        lr=1e-4,
        lr_schedule="constant",
        batch_size=options.sequences,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        monitor_every=0,
    )
    data = placement.put(batch(model, processes.rows(options.sequences), options))
    step = OptimizerStep(passes, optimizer, processes, placement, settings)
    batches = [data] * settings.gradient_accumulation_steps
    return Running(lambda: step(settings.warmup, batches), passes, optimizer, num_bytes)


def batch(model: ModelSettings, rows: range, options: argparse.Namespace) -> Inputs:
    """Return rows of a batch of random tokens [B, T] with two neighbors per chunk, the same in all modes."""
    generator = torch.Generator().manual_seed(0)
    m = model.chunk_length
    both = torch.randint(1, VOCABULARY, (options.sequences, options.tokens + 1), generator=generator)
    shape = (options.sequences, options.tokens // m, 2, 2 * m)
    neighbors = torch.randint(1, VOCABULARY, shape, generator=generator)
    own = slice(rows.start, rows.stop)
    return Inputs(both[own, :-1].contiguous(), None, neighbors[own], labels=both[own, 1:].contiguous())


# --- measurements --------------------------------------------------------------------------------------------------


def held(running: Running) -> dict[str, int]:
    """Do a step; return the bytes of this process's parts of parameters, gradients and moments."""
    gradients: list[int] = []

    def record(*_: Any) -> None:
        found = (parameter.grad for _, parameter in all_parameters(running.passes.model_parts))
        gradients.append(num_bytes(gradient for gradient in found if gradient is not None))

    hook = running.optimizer.register_step_pre_hook(record)
    running.step()
    hook.remove()
    parameters = num_bytes(parameter for _, parameter in all_parameters(running.passes.model_parts))
    moments = (value for state in running.optimizer.state.values() for value in state.values())
    return {"parameters": parameters, "gradients": gradients[0], "optimizer": num_bytes(moments)}


def num_bytes(tensors: Any) -> int:
    """Return the bytes of this process's parts of tensors."""
    return sum(local(tensor).nbytes for tensor in tensors)


def peak(running: Running, resting: int, device: torch.device) -> int:
    """Return the largest number of bytes of live tensors in a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        running.step()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        running.step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return resting + max(accumulate((event.nbytes() for event in events), initial=0))


def inspect_step(running: Running, device: torch.device) -> dict[str, Any]:
    """Return this process's memory and communication in steps that are not timed."""
    memory = held(running)
    with Communication() as communication:
        running.step()
    memory["peak"] = peak(running, memory["parameters"] + memory["optimizer"], device)
    return {
        "memory": memory,
        "calls": dict(communication.calls),
        "volume": dict(communication.volume),
        "sent": dict(communication.sent),
    }


def compare(
    chosen: list[Mode], processes: dict[str, Processes], placement: Placement, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run all modes in turn for some rounds; return a row per mode, the same in all processes."""
    model = replace(PRESETS[options.size], vocab_size=VOCABULARY, chunk_length=64, copy_head=NO_COPY_HEAD)
    rows: dict[str, dict[str, Any]] = {}
    for number in agreed(budget(options).rounds(options.rounds)):
        for mode in chosen:
            if dist_rank() == 0 and number == 0:
                say(mode.name, file=sys.stderr)
            takes_part = not mode.alone or dist_rank() == 0
            try:
                running = build(mode, model, processes[mode.name], placement, options) if takes_part else None
            except InputError as error:
                rows[mode.name] = {"mode": mode.name, "skipped": str(error)}
                continue
            found = None
            if running is not None:
                running.step()  # warms up and creates the moments
                found = inspect_step(running, placement.device) if number == 0 else None
            took = []
            for _ in range(options.steps):
                wait(placement.device)
                took.append(seconds(partial(step_together, running, placement.device)))
            if number == 0:
                of_all = [each for each in gathered(found) if each is not None]
                sizes = running and running.num_bytes
                rows[mode.name] = summary(
                    mode, of_all, next(filter(None, gathered(sizes))), options.gradient_accumulation_steps
                )
            rows[mode.name]["seconds"].append(statistics.median(took))
            del running
            gc.collect()
        chosen = [mode for mode in chosen if "skipped" not in rows[mode.name]]
    return list(rows.values())


def step_together(running: Running | None, device: torch.device) -> None:
    """Do a step in the processes that take part, and wait for them."""
    if running is not None:
        running.step()
    wait(device)


def summary(mode: Mode, of_all: list[dict[str, Any]], num_bytes: tuple[int, int], accumulation: int) -> dict[str, Any]:
    """Combine the results of all processes into a row."""
    largest = {name: max(each["memory"][name] for each in of_all) for name in of_all[0]["memory"]}
    volumes = [sum(each["volume"].values()) for each in of_all]
    return {
        "mode": mode.name,
        "parameter_bytes": num_bytes[0],
        "memory": largest,
        "volume_in_parameters": max(volumes) / num_bytes[0],
        "formula_in_parameters": formula(mode, num_bytes, accumulation),
        "sent_bytes": max(sum(each["sent"].values()) for each in of_all),
        "processes": of_all,
        "seconds": [],
    }


# --- processes -----------------------------------------------------------------------------------------------------


def dist_rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait(device: torch.device) -> None:
    """Wait until all processes and their devices arrive here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """Return the values of all processes."""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    names = ("step", "ratio", "params", "grads", "moments", "peak", "sent", "volume", "formula")
    yield f"{'memory and bytes sent in MB':38}" + "".join(f"{name:>10}" for name in names)
    first: list[float] = []
    for row in rows:
        if "skipped" in row:
            yield f"{row['mode']:38}  skipped: {row['skipped']}"
            continue
        first = row["seconds"] if row["processes"] and not row["sent_bytes"] else first or row["seconds"]
        ratio = statistics.median(one / this for one, this in zip(first, row["seconds"], strict=True))
        memory = "".join(
            f"{row['memory'][name] / 1e6:10.1f}" for name in ("parameters", "gradients", "optimizer", "peak")
        )
        expected = row["formula_in_parameters"]
        yield (
            f"{row['mode']:38}{statistics.median(row['seconds']) * 1e3:7.0f} ms{ratio:9.2f}×{memory}"
            f"{row['sent_bytes'] / 1e6:10.1f}{row['volume_in_parameters']:9.3f}X"
            + (f"{expected:9.3f}X" if expected is not None else "")
        )


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="0: one per GPU, or one per core, up to 4")
    parser.add_argument("--size", choices=list(PRESETS), default="small")
    parser.add_argument(
        "--sequences", type=int, default=0, help="sequences of a batch, over all processes; 0: two per process"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    add_precision(parser)
    parser.add_argument("--modes", nargs="*", default=[], help="run only modes whose name contains one of these")
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-parallel.json"))
    options = parser.parse_args()
    count = options.processes or torch.cuda.device_count() or min(4, max(2, len(os.sched_getaffinity(0))))
    if "WORLD_SIZE" not in os.environ:  # start the processes with this command
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        # The profiler warns about memory that was allocated before it started.
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
    cuda = torch.cuda.is_available()
    placed = training_placement(options.precision, f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(placed.device)
    else:
        torch.set_num_threads(1)
    one = Processes(ALONE, placed.device)  # before the process group exists
    with joined():
        count = int(os.environ["WORLD_SIZE"])
        options.sequences = options.sequences or 2 * count
        chosen = [
            mode for mode in modes(count) if not options.modes or any(part in mode.name for part in options.modes)
        ]
        processes = {mode.name: one if mode.alone else Processes(mode.parallel, placed.device) for mode in chosen}
        rows = compare(chosen, processes, placed, options)
        if dist_rank() == 0:
            settings = {
                name: getattr(options, name)
                for name in ("size", "sequences", "tokens", "gradient_accumulation_steps", "rounds", "steps")
            }
            on = f"{count} GPUs" if cuda else f"{len(os.sched_getaffinity(0))} cores"
            print(f"{count} processes on {on}, {placed.dtype}; {settings}", *table(rows), sep="\n", flush=True)
            write(
                options.output, {"processes": count, "on": on, "precision": str(placed.dtype), **settings, "rows": rows}
            )


if __name__ == "__main__":
    main()
