"""Tokens per second of a training step, float32 against bfloat16, with and without retrieval: one run, alternating.

python benchmarks/training_step.py [--rounds 5] [--preset small]
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from retro.device import Placement
from retro.loss import loss
from retro.model import Retro
from retro.presets import PRESETS, count_parameters


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--out", type=Path, default=Path("benchmark-training-step.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = replace(PRESETS[options.preset], vocab_size=8192)
    model = Retro(settings).to(device)
    batch, length, m, k = 4, 512, settings.chunk_length, 2
    tokens = torch.randint(8192, (batch, length), device=device)
    neighbors = torch.randint(8192, (batch, length // m, k, 2 * m), device=device)
    cases = {
        (name, retrieval): (Placement(device, name == "bfloat16"), neighbors if retrieval == "ON" else None)
        for name in ("float32", "bfloat16")
        for retrieval in ("ON", "OFF")
    }
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for number in range(options.rounds + 1):
        for case, (placement, near) in cases.items():
            started = time.perf_counter()
            with placement.autocast():
                value = loss(model.hidden(tokens, neighbors=near), model.output_weight, tokens.roll(-1, 1))
            value.backward()
            value.item()
            model.zero_grad()
            if number:  # the first round warms up
                rates[case].append(batch * length / (time.perf_counter() - started))
    medians = {case: statistics.median(values) for case, values in rates.items()}
    print(
        f"{options.preset}: {count_parameters(model):,} parameters, {batch} × {length} tokens, k {k}, {torch.get_num_threads()} threads"
    )
    rows = []
    for (name, retrieval), rate in medians.items():
        ratio = rate / medians["float32", retrieval]
        rows.append({"precision": name, "retrieval": retrieval, "tokens_per_second": rate, "against_float32": ratio})
        print(f"{name:9} retrieval {retrieval:3}  {rate:9,.0f} tokens/s  {ratio:.2f} × float32")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    options.out.write_text(json.dumps({"machine": platform.processor(), "commit": commit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
