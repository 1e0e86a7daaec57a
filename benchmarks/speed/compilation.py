"""Compiling a model as one graph or block by block, on a CPU: seconds until the first steps are done, and of a step.

    python -m benchmarks.speed.compilation [--presets small tiny] [--layers 0] [--minutes 9]

Each way runs in its own process, without code from earlier runs: random tokens, two neighbors, all copying, float32.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.common import add_minutes, budget, markdown, say
from pipelines.cli.results import Table
from retro.batch.inputs import Inputs
from retro.device import Placement
from retro.model.presets import resolve
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.parallel.forward_backward import StepContext, WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE

WAYS = {"not compiled": (False, False), "block by block": (True, True), "one graph": (True, False)}
"""Name → `compiled` and `by_block` of `WholeModel`."""
ROWS, TOKENS, VOCABULARY, CHUNK, STEPS = 4, 512, 8192, 32, 12


def inputs() -> Inputs:
    """A batch of random tokens, with neighbors and votes."""
    chunks = TOKENS // CHUNK

    def drawn(*shape: int, high: int = VOCABULARY) -> torch.Tensor:
        return torch.randint(1, high, (ROWS, *shape))

    return Inputs(
        tokens=drawn(TOKENS),
        documents=torch.zeros(ROWS, chunks, dtype=torch.int64),
        neighbors=drawn(chunks, 2, 2 * CHUNK),
        neighbor_lengths=torch.full((ROWS, chunks, 2), 2 * CHUNK),
        votes=drawn(TOKENS, 32, high=100),
        labels=drawn(TOKENS),
    )


def measure(preset: str, layers: int, way: str) -> tuple[float, float]:
    """CPU seconds of the first two steps, and the median seconds of the next ones."""
    sizes = {"vocab_size": VOCABULARY, "chunk_length": CHUNK} | ({"num_layers": layers} if layers else {})
    model = Retro(updated(resolve(updated(ModelSettings(), {"preset": preset})), sizes)).train()
    cpu = torch.device("cpu")
    placement = Placement(cpu, torch.float32)
    compiled, by_block = WAYS[way]
    passes = WholeModel(model, Processes(ALONE, cpu), placement, compiled=compiled, by_block=by_block)

    def step() -> float:
        began = time.perf_counter()
        passes.forward_backward(inputs(), StepContext(torch.tensor(ROWS * TOKENS), ROWS, 1.0, last=True))
        return time.perf_counter() - began

    step(), step()
    first = sum(os.times()[:4])
    return first, statistics.median(step() for _ in range(STEPS))


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["small", "tiny"])
    parser.add_argument("--layers", type=int, default=0, help="of the decoder; 0 = those of the preset")
    parser.add_argument("--way", choices=WAYS, help="measure this way only, in this process")
    add_minutes(parser, 9)
    options = parser.parse_args()
    if options.way:
        say(*measure(options.presets[0], options.layers, options.way))
        return
    rows = []
    own = dict(os.environ, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    for preset, way in budget(options).each([(preset, way) for preset in options.presets for way in WAYS], "way"):
        named = ["--presets", preset, "--layers", str(options.layers), "--way", way]
        command = [sys.executable, "-m", "benchmarks.speed.compilation", *named]
        out = subprocess.run(command, env=own, check=True, stdout=subprocess.PIPE, text=True).stdout
        first, step = map(float, out.split()[-2:])
        rows.append([preset, way, f"{first:.0f}", f"{step:.2f}"])
        say("  ".join(rows[-1]))
    say(markdown(Table(["preset", "", "CPU seconds until two steps are done", "seconds of a step"], rows)))


if __name__ == "__main__":
    main()
