"""Measure the peak memory of a training step on a CPU. One process measures one step:

    python -m tests.retro.estimates.measure_step PRESET SEQUENCES TOKENS K PRECISION CHECKPOINTING VOCABULARY

Prints two numbers of bytes: what torch's allocator had handed out at the peak (from its profiler), and the growth of the resident
set. The second one includes libraries and blocks that the C library keeps; `measured` lets it keep few.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from retro.batch.inputs import Inputs
from retro.device import Placement
from retro.model.presets import resolve
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep, distributed_model


def measured(*arguments: str) -> tuple[int, int]:
    """Measure in another process, in which every freed block is returned to the kernel."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.retro.estimates.measure_step", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=Path(__file__).parents[3]
    )
    allocated, resident = map(int, done.stdout.split())
    return allocated, resident


def model_settings(preset: str, vocab_size: int) -> ModelSettings:
    """The model of a preset, with its copy head."""
    return replace(resolve(updated(ModelSettings(), {"preset": preset})), vocab_size=vocab_size, chunk_length=64)


def main(
    preset: str, num_sequences: str, num_tokens: str, k: str, precision: str, checkpointing: str, vocab_size: str
) -> None:
    """Do two steps; the second one has AdamW's moments from its start."""
    settings = model_settings(preset, int(vocab_size))
    warm = torch.ones(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()  # libraries are loaded before the first reading
    before = _resident("VmRSS")
    model = Retro(settings).train()
    processes = Processes(replace(ALONE, activation_checkpointing=checkpointing), torch.device("cpu"))  # type: ignore[arg-type]
    placement = Placement(torch.device("cpu"), getattr(torch, precision))
    train = TrainSettings(lr=1e-3, compile="no")
    distributed, optimizer = distributed_model(model, processes, placement, train, 0.0), make_optimizer([model], train)
    step = OptimizerStep(distributed, optimizer, processes, placement, train)
    batch = _batch(settings, num_sequences, num_tokens, k)
    step(0, [batch])
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *states))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(1, [batch])
    live = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    print(held + peak, _resident("VmHWM") - before)


def _batch(settings: ModelSettings, num_sequences: str, num_tokens: str, k: str) -> Inputs:
    rows, tokens, num_neighbors = int(num_sequences), int(num_tokens), int(k)
    m, v = settings.chunk_length, settings.vocab_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(1, v, (rows, *shape))

    return Inputs(
        random(tokens),
        torch.zeros(rows, tokens // m, dtype=torch.int64),
        random(tokens // m, num_neighbors, 2 * m),
        torch.full((rows, tokens // m, num_neighbors), 2 * m),
        labels=random(tokens),
    )


def _resident(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
