"""Memory that `retro plan train` predicts against the real size of the tensors, and a table for the paper's four sizes.

    python -m benchmarks.speed.memory [--presets small base-cpu]     predicted against measured, in this process
    python -m benchmarks.speed.memory --table                        2,048 tokens on each of 8 devices of 80 GB

Measured are the bytes of parameters, gradients and optimizer state after a step, and the growth of the process's
resident memory in a forward pass, while the allocator returns freed memory at once. The latter is compared with the
predicted activations.
"""

import argparse
import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_minutes, add_precision, budget, placement, say, write
from pipelines.planning.training import PlanTrainOptions, plan_training
from retro.data.settings import DataSettings
from retro.estimates.activation_trace import Pass, trace
from retro.estimates.training_memory import parameter_units, state_bytes
from retro.model.loss import loss
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model.settings import NO_COPY_HEAD, ModelSettings
from retro.parallel.settings import ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings

SIZES = ("172m", "425m", "1.5b", "7.5b")


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["small", "base-cpu"])
    parser.add_argument(
        "--sequences", type=int, default=4, help="sequences of a batch, of 512 tokens with 2 neighbors per chunk"
    )
    add_precision(parser)
    parser.add_argument("--table", action="store_true", help="print predictions for the paper's sizes")
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-memory.json"))
    options = parser.parse_args()
    if options.table:
        print_sizes()
        return
    return_freed_memory()
    rows = []
    for preset in budget(options).each(options.presets, "preset", lambda name: PRESETS[name].d_model ** 2):
        say(f"{preset}, {options.sequences} sequences, {placement(options.precision, 'cpu').dtype}")
        rows.append(row := measured(preset, options.sequences, options.precision))
        for what, (predicted, found) in row["bytes"].items():
            say(
                f"  {what:12} predicted {predicted / 1e6:9.3f} MB   measured {found / 1e6:9.3f} MB   ratio {predicted / found:.3f}"
            )
    write(options.output, {"rows": rows})


def measured(preset: str, num_sequences: int, precision: str) -> dict[str, Any]:
    """Return the predicted and measured bytes of one model in a step."""
    settings = replace(PRESETS[preset], vocab_size=8192, chunk_length=64, copy_head=NO_COPY_HEAD)
    placed = placement(precision, "cpu")
    run = Pass(num_sequences, 512, 2, gpu=False, narrow=placed.dtype != torch.float32)
    model = Retro(settings).train()
    optimizer = make_optimizer([model], TrainSettings(lr=1e-4))
    tokens = torch.zeros(num_sequences, 512, dtype=torch.int64)
    documents = torch.zeros(num_sequences, 8, dtype=torch.int64)
    neighbors = torch.zeros(num_sequences, 8, 2, 128, dtype=torch.int64)

    def forward() -> torch.Tensor:
        with placed.autocast():
            return loss(model.hidden(tokens, documents, neighbors), model.output_weight, tokens)

    forward().backward()  # allocates what is allocated only once
    optimizer.step()
    moments = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    before = resident()
    value = forward()
    activations = resident() - before
    value.backward()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    predicted = state_bytes(parameter_units(settings, ParallelSettings()), ParallelSettings())
    names = ("parameters", "gradients", "optimizer")
    pairs = dict(zip(names, zip(predicted, (parameters, gradients, moments), strict=True), strict=True))
    return {"preset": preset, "bytes": {**pairs, "activations": (trace(settings, run).kept("none"), activations)}}


def resident() -> int:
    """Return the bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def return_freed_memory() -> None:
    """Make glibc return freed blocks of 64 KiB or more at once (M_MMAP_THRESHOLD): resident = used memory."""
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)


def print_sizes() -> None:
    """Print a Markdown table: memory of a device by mode, and how many sequences fit."""
    print("| | parameters | GFLOP a token | ZeRO | none | selective | full |\n|---|---|---|---|---|---|---|")
    for size in SIZES:
        one, five = (planned(size, count) for count in (1, 5))
        rows: dict[int, list[str]] = {}
        for few, many in zip(one.modes, five.modes, strict=True):
            if few.parallel.cpu_offload or few.parallel.zero == 2:  # with one batch per step, ZeRO-2 equals ZeRO-1
                continue
            each = (many.memory.device - few.memory.device) / 4
            room = int(max(0, 1 + (0.9 * 80e9 - few.memory.device) // each))
            rows.setdefault(few.parallel.zero, []).append(f"{few.memory.device / 1e9:.1f} GB ({room})")
        for zero, cells in rows.items():
            first = (
                (size, f"{one.parameters / 1e6:,.0f}M", f"{one.flops_per_token / 1e9:.2f}")
                if zero == 0
                else ("", "", "")
            )
            print("| " + " | ".join((*first, str(zero), *cells)) + " |")


def planned(size: str, num_sequences: int) -> Any:
    """Return the plan of a size on 8 devices of 80 GB, with `num_sequences` sequences each."""
    return plan_training(
        PlanTrainOptions(
            model=ModelSettings(preset=size, vocab_size=128_000),
            data=DataSettings(sequence_length=2048),
            train=TrainSettings(batch_size=8 * num_sequences, device="cuda"),
        )
    )


if __name__ == "__main__":
    main()
