"""Training steps of this project and of retro-pytorch 0.3.9: tokens/s, model-FLOPs utilization, peak memory.

pip install --no-deps retro-pytorch==0.3.9
python -m benchmarks.speed.training [--rounds 5] [--steps 1] [--precision auto] [--datastore FOLDER] [--cases NAME ...]

Every case runs in a separate process, so that memory is measured separately. Rounds alternate between the cases,
because shared machines drift; ratios within a run are reliable. A step is forward, loss, backward, clipping and AdamW,
on one batch of random tokens that all cases with the same shape use. The ratio of a case is relative to the first case
with its shape. Matrix products use bfloat16 if the device is faster with it, otherwise float32. On a CUDA device the
models have the paper's sizes instead. With a datastore, the data path is measured too: one process makes batches,
without training.
"""

import argparse
import importlib.util
import multiprocessing
import resource
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    Budget,
    add_cases,
    add_minutes,
    add_precision,
    budget,
    say,
    seconds,
    training_placement,
    write,
)
from indexing.machine import keep_freed_memory
from retro.batch.inputs import Inputs
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.estimates.flops import forward_flops, peak_flops
from retro.model.presets import PRESETS, count_parameters
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, EncoderSettings, ModelSettings
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep

# The sizes in the documentation. retro-pytorch has 8 heads of 64 in every attention.
SMALL = ModelSettings(
    vocab_size=8192,
    chunk_length=64,
    d_model=256,
    d_ffw=1024,
    num_layers=6,
    attention=AttentionSettings(num_heads=8),
    encoder=EncoderSettings(d_model=256, d_ffw=1024, num_heads=8, cca_layers=(1, 2)),
)


@dataclass(frozen=True)
class Case:
    """A row of the table; an empty `precision` means that of the whole run."""

    name: str
    settings: ModelSettings
    batch_size: int
    num_tokens: int
    ours: bool = True
    compiled: bool = True
    precision: str = ""
    keeps_memory: bool = True
    k: int = 2


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    """Return the cases for a kind of device and a precision. On a CPU those that compile, which takes long, are
    last."""
    if device == "cpu":
        float32 = Case("retro, eager, float32", SMALL, 4, 512, compiled=False, precision="float32")
        return [
            Case("retro-pytorch 0.3.9", SMALL, 4, 512, ours=False),
            Case("retro, eager", SMALL, 4, 512, compiled=False),
            *([float32] if dtype != torch.float32 else []),
            Case("retro, eager, freed memory given back", SMALL, 4, 512, compiled=False, keeps_memory=False),
            Case("retro-pytorch 0.3.9, n = 2048", SMALL, 1, 2048, ours=False),
            Case("retro, compiled", SMALL, 4, 512),
            Case("retro, compiled, n = 2048", SMALL, 1, 2048),
        ]
    sizes = {name: replace(PRESETS[name], vocab_size=128_000, chunk_length=64) for name in ("172m", "1.5b")}
    return [
        Case("retro-pytorch 0.3.9, 172m", sizes["172m"], 8, 2048, ours=False),
        Case("retro 172m, compiled", sizes["172m"], 8, 2048),
        Case("retro 172m, eager", sizes["172m"], 8, 2048, compiled=False),
        Case("retro 1.5b, eager", sizes["1.5b"], 4, 2048, compiled=False),
        Case("retro 1.5b, compiled", sizes["1.5b"], 4, 2048),
    ]


def batch(case: Case, placement: Placement) -> Inputs:
    """Return random tokens [B, T + 1] and neighbors [B, U, K, 2m] without padding, equal for all cases of a shape."""
    generator = torch.Generator().manual_seed(0)
    s, m = case.settings, case.settings.chunk_length
    shape = (case.batch_size, case.num_tokens // m, case.k, 2 * m)
    tokens = torch.randint(1, s.vocab_size, (case.batch_size, case.num_tokens + 1), generator=generator)
    neighbors = torch.randint(1, s.vocab_size, shape, generator=generator)
    return placement.put(Inputs(tokens, None, neighbors))


def our_step(case: Case, placement: Placement) -> tuple[Callable[[], object], int]:
    """Return a training step of this project and the number of parameters. Sets up the process as `train` does."""
    if placement.device.type == "cpu" and case.keeps_memory:
        keep_freed_memory()
    model = Retro(case.settings).to(placement.device)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-4))
    data = batch(case, placement)
    data = data._replace(tokens=data.tokens[:, :-1].contiguous(), labels=data.tokens[:, 1:].contiguous())
    settings = TrainSettings(lr=1e-4, lr_schedule="constant", compile="yes" if case.compiled else "no")
    processes = Processes(ALONE, placement.device)
    passes = WholeModel(model, processes, placement, compiled=placement.compiles(settings.compile))
    step = OptimizerStep(passes, optimizer, processes, placement, settings)
    return lambda: step(settings.warmup, [data]), count_parameters(model, embeddings=True)


def _without_its_index() -> None:
    """Let retro-pytorch be imported without autofaiss, which only its search for neighbors calls."""
    if "autofaiss" not in sys.modules and importlib.util.find_spec("autofaiss") is None:
        absent = types.ModuleType("autofaiss")
        absent.build_index = None  # type: ignore[attr-defined]
        sys.modules["autofaiss"] = absent


def their_model(settings: ModelSettings, num_tokens: int) -> torch.nn.Module:
    """Return retro-pytorch's RETRO with these sizes, for sequences of `num_tokens` tokens."""
    _without_its_index()
    from retro_pytorch import RETRO

    model: torch.nn.Module = RETRO(
        num_tokens=settings.vocab_size,
        max_seq_len=num_tokens,
        enc_dim=settings.encoder.d_model,
        enc_depth=settings.encoder.num_layers,
        enc_cross_attn_layers=settings.encoder.cca_layers,
        dec_dim=settings.d_model,
        dec_depth=settings.num_layers,
        dec_cross_attn_layers=settings.retrieval.cca_layers,
        chunk_size=settings.chunk_length,
    )
    return model


def their_step(case: Case, placement: Placement) -> tuple[Callable[[], object], int]:
    """Return a training step of retro-pytorch as in its README and its TrainingWrapper, under autocast."""
    _without_its_index()
    from retro_pytorch.optimizer import get_optimizer

    model = their_model(case.settings, case.num_tokens).to(placement.device)
    optimizer = get_optimizer(model.parameters(), lr=1e-4, wd=0.1)
    data = batch(case, placement)

    def step() -> None:
        with placement.autocast():
            value = model(data.tokens, data.neighbors, return_loss=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value.item()

    return step, sum(parameter.numel() for parameter in model.parameters())


def work(case: Case, precision: str, steps: int, turns: Connection) -> None:
    """Create a model, then send the seconds per step for every turn, and at the end the memory. Runs in a process."""
    torch.manual_seed(0)
    placed = training_placement(case.precision or precision)
    try:
        step, parameters = (our_step if case.ours else their_step)(case, placed)
        resting = _memory(placed)
        for _ in range(2):  # compiles and warms up
            step()
    except (ImportError, torch.OutOfMemoryError) as error:
        turns.send({"error": f"{type(error).__name__}: {error}"})
        return
    turns.send({"parameters": parameters})
    while turns.recv():
        turns.send(seconds(lambda: [step() for _ in range(steps)]) / steps)
    turns.send({"peak_bytes": _memory(placed), "resting_bytes": resting})


def _memory(placement: Placement) -> int:
    """Return the peak memory of this process: on the device, or resident."""
    if placement.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(chosen: list[Case], precision: str, count: int, steps: int, limit: Budget) -> list[dict[str, Any]]:
    """Run all cases in turn for some rounds; return a row per case."""
    context = multiprocessing.get_context("spawn")
    running: list[tuple[Case, Connection, int]] = []
    for case in limit.share(1.5).each(chosen, "case", lambda case: 4.0 if case.ours and case.compiled else 1.0):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(case, precision, steps, theirs), daemon=True).start()
        say(f"{case.name} …", end=" ", file=sys.stderr)
        started = time.perf_counter()
        ready = ours.recv()
        say(f"{time.perf_counter() - started:.0f} s for the model and two steps", file=sys.stderr)
        if "error" in ready:
            say(f"{case.name} is skipped: {ready['error']}")
            continue
        running.append((case, ours, ready["parameters"]))
    times: dict[str, list[float]] = {case.name: [] for case, _, _ in running}
    peaks = []
    for _ in limit.rounds(count):
        peaks.append(peak_flops(training_placement(precision)))  # measured on a CPU, so it drifts with the machine
        for case, turns, _ in running:
            turns.send(True)
            times[case.name].append(turns.recv())
    rows, references = [], dict[tuple[ModelSettings, int], list[float]]()
    for case, turns, parameters in running:
        turns.send(False)
        took, tokens = times[case.name], case.batch_size * case.num_tokens
        reference = references.setdefault((case.settings, case.num_tokens), took)
        ratios = [first / this for first, this in zip(reference, took, strict=True)]
        flops = 3 * case.batch_size * forward_flops(case.settings, case.num_tokens, case.k)
        rows.append(
            {
                "case": case.name,
                "parameters": parameters,
                "tokens_per_second": tokens / statistics.median(took),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "mfu": flops / statistics.median(took) / statistics.median(peaks),
                **turns.recv(),
            }
        )
    return rows


def data_path(folder: Path, count: int, limit: Budget) -> float:
    """Return the tokens per second of one process that makes 50 batches of 8 sequences with two neighbors per chunk."""
    data = TrainingData([folder], DataSettings(sequence_length=512), retrieval=True)

    def batches(first: int) -> None:
        for sample in range(first, first + 400, 8):
            data.batch(range(sample, sample + 8))

    times = [seconds(partial(batches, 400 * number)) for number in limit.rounds(count + 1)]
    return 400 * 512 / statistics.median(times[1:])  # the first round warms up


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of a round")
    add_precision(parser)
    parser.add_argument("--datastore", type=Path, help="also measure the data path on this datastore")
    add_cases(parser)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-training.json"))
    options = parser.parse_args()
    limit = budget(options)
    placed = training_placement(options.precision)
    device = placed.device.type
    chosen = [
        case
        for case in cases(device, placed.dtype)
        if not options.cases or any(part in case.name for part in options.cases)
    ]
    rows = compare(chosen, options.precision, options.rounds, options.steps, limit.share(2 if options.datastore else 1))
    print(f"{'':38}{'parameters':>14}{'tokens/s':>11}{'ratio':>8}{'MFU':>8}{'peak memory':>14}{'above rest':>13}")
    for row in rows:
        above = row["peak_bytes"] - row["resting_bytes"]
        print(
            f"{row['case']:38}{row['parameters']:14,}{row['tokens_per_second']:11,.0f}{row['ratio']:7.2f}×{row['mfu']:8.1%}"
            f"{row['peak_bytes'] / 2**20:10,.0f} MiB{above / 2**20:9,.0f} MiB"
        )
    found: dict[str, Any] = {"precision": str(placed.dtype), "rows": rows}
    if options.datastore:
        rate = found["data_path_tokens_per_second"] = data_path(options.datastore, options.rounds, limit)
        fastest = max(row["tokens_per_second"] for row in rows)
        print(f"data path alone, one process: {rate:,.0f} tokens/s, {rate / fastest:.0f} times the fastest case")
    if device == "cpu":
        print("This machine has no CUDA device. With one, the same command measures 172m and 1.5b at n = 2048.")
    write(options.output, found)


if __name__ == "__main__":
    main()
