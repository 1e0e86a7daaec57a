"""Cost of a training step if only part of the model is trained: CPU seconds, bytes kept for the backward pass, moments.

    python -m benchmarks.speed.tuning [--preset small] [--sequences 2] [--length 512] [--steps 5]

All methods run in one process and their steps alternate, so that other load affects them equally. The table has the
minimum over the steps of each method. Times are processor times on one thread.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_minutes, add_precision, budget, placement, write
from retro.device import TensorBatch
from retro.estimates.activation_trace import Pass, trace_model
from retro.estimates.flops import training_flops
from retro.model.presets import PRESETS, usual_retrieval
from retro.model.retro import Retro
from retro.model.settings import NO_COPY_HEAD, updated
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep
from retro.tuning.adapters import add_adapter, train_only
from retro.tuning.settings import TuningSettings

METHODS: dict[str, dict[str, Any]] = {
    "all": {},
    "retrieval": {"weights": "retrieval"},
    "retrieval + lora": {"weights": "retrieval", "adapter": "lora"},
    "lora": {"weights": "none", "adapter": "lora"},
    "prefix": {"weights": "none", "adapter": "prefix"},
    "prompt": {"weights": "none", "adapter": "prompt"},
}


def batch(options: argparse.Namespace, chunk_length: int) -> TensorBatch:
    """Return random tokens with two neighbors per chunk."""
    tokens = torch.randint(options.vocab_size, (options.sequences, options.length))
    shape = (options.sequences, options.length // chunk_length, 2, 2 * chunk_length)
    found = {"neighbors": torch.randint(options.vocab_size, shape), "neighbor_lengths": None}
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "documents": None, **found}


def steps_of(method: dict[str, Any], options: argparse.Namespace) -> tuple[Callable[[int], object], dict[str, float]]:
    """Return a training step with a tuning method, and its sizes: parameters, bytes, relative operations."""
    settings = replace(
        PRESETS[options.preset],
        vocab_size=options.vocab_size,
        chunk_length=64,
        copy_head=NO_COPY_HEAD,
        shared_embeddings=True,
    )
    settings = updated(settings, usual_retrieval(settings) | {"retrieval.cca_layers": settings.retrieval.cca_layers})
    tuning = TuningSettings(**method)
    torch.manual_seed(0)
    model = Retro(settings).train()
    add_adapter(model, tuning)
    train_only(model, tuning)
    placed = placement(options.precision, "cpu")
    narrow = placed.dtype != torch.float32
    kept = trace_model(
        model, Pass(options.sequences, options.length, 2, narrow=narrow, gpu=False, documents=False)
    ).kept("none")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    processes = Processes(ALONE, placed.device)
    passes = WholeModel(model, processes, placed)
    optimizer = make_optimizer(passes.model_parts, TrainSettings(lr=1e-3))
    data = batch(options, settings.chunk_length)
    step = OptimizerStep(passes, optimizer, processes, placed, TrainSettings(monitor_every=0))
    operations = training_flops(settings, options.length, 2, tuning) / training_flops(settings, options.length, 2)
    return lambda number: step(number, [data]), {
        "trained": trained,
        "kept": kept,
        "states": 12 * trained,
        "operations": operations,
    }


def main() -> None:
    """Print a row for each method and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    add_precision(parser)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-tuning.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    methods = {name: steps_of(method, options) for name, method in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in limit.rounds(options.steps + 1):  # the first one warms up
        for name, (step, _) in methods.items():
            started = time.process_time()
            step(number)
            seconds[name].append(time.process_time() - started)
    print(
        "method               trained   CPU s of a step          operations   kept for backward      gradients, moments"
    )
    whole = min(seconds["all"][1:])
    for name, (_, sizes) in methods.items():
        least = min(seconds[name][1:])
        kept, states = sizes["kept"], sizes["states"]
        print(
            f"{name:17} {sizes['trained']:11,} {least:8.2f} ({least / whole:4.0%} of all) {sizes['operations']:12.0%}"
            f" {kept / 1e6:9.0f} MB ({kept / methods['all'][1]['kept']:4.0%}) {states / 1e6:9.1f} MB"
        )
    rows = {name: {**sizes, "seconds": seconds[name]} for name, (_, sizes) in methods.items()}
    write(options.output, {"precision": str(placement(options.precision, "cpu").dtype), "rows": rows})


if __name__ == "__main__":
    main()
