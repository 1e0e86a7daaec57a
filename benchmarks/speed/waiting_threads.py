"""Speed of training and generation by the time that OpenMP's threads spin before they sleep, on idle and on busy cores.

python -m benchmarks.speed.waiting_threads CONFIG --model MODEL [--presets tiny] [--steps 16] [--tokens 48] [--rounds 2]

CONFIG is the TOML file of a finished datastore, on which `retro train` trains each preset for some steps; MODEL
generates tokens one after another, as `retro generate` does. Every case is a process with other variables of GNU
OpenMP. Cores are idle otherwise, or busy with another process each. Cases run in turn, and ratios within a run are
reliable.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.common import Budget, add_minutes, budget, markdown, say, seconds, write
from indexing.machine import usable_cores
from pipelines.cli.results import Table
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

CASES: dict[str, dict[str, str]] = {
    "OpenMP's default": {},
    **{f"{spins:,} spins": {"GOMP_SPINCOUNT": str(spins)} for spins in (100_000, 10_000, 3_000, 1_000)},
    "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE"},
}
_FIRST_STEPS = 3
"""Steps of training that are not measured: they compile and allocate."""


@contextlib.contextmanager
def other_work(count: int) -> Iterator[None]:
    """Keep some processes busy."""
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()


def _compute() -> None:
    while True:
        pass


def training(config: Path, preset: str, steps: int, variables: dict[str, str]) -> float:
    """Tokens per second of `retro train`: the median of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = f"--model.preset {preset} --train.steps {steps} --train.warmup-steps 5 --train.log-every 1"
        sizes = "--train.batch-size 4 --data.sequence-length 512 --train.eval-every 0 --train.eval-tokens 300"
        command = ["-m", "pipelines.cli", "train", str(config), "--run", str(run), *options.split(), *sizes.split()]
        subprocess.run([sys.executable, *command], env=os.environ | variables, check=True, capture_output=True)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        return statistics.median(rates[_FIRST_STEPS:])


def generation(model: Path, tokens: int, variables: dict[str, str]) -> float:
    """Tokens per second of generation, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--generate", str(tokens), str(model)]
    done = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def generate(model: Path, tokens: int) -> float:
    """Generate a text a few times after a warm-up; return the median of tokens per second."""
    opened = LanguageModel.open(model)
    settings = GenerationSettings(max_tokens=tokens, temperature=0.0)
    prompt = opened.tokenizer.encode("The kernel of an operating system")
    times = [seconds(lambda: sum(map(len, opened.generate([prompt], settings)))) for _ in range(4)]
    return tokens / statistics.median(times[1:])


def compare(options: argparse.Namespace, limit: Budget) -> Table:
    """Measure all cases in turn; a row for each kind of work."""
    works = {f"train {preset}": partial(training, options.config, preset, options.steps) for preset in options.presets}
    if options.model:
        works["generate"] = partial(generation, options.model, options.tokens)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    cases = {name: CASES[name] for name in CASES if not options.cases or name in options.cases}
    for _ in limit.rounds(options.rounds):
        for load, processes in (("idle cores", 0), ("busy cores", usable_cores())):
            for work, run in works.items():
                for case, variables in cases.items():
                    with other_work(processes):
                        rates[f"{work}, {load}", case].append(run(variables))
                    say(f"{work}, {load}, {case}: {rates[f'{work}, {load}', case][-1]:,.1f} tokens/s", file=sys.stderr)
    rows = list(dict.fromkeys(row for row, _ in rates))
    cells = [[row, *(f"{statistics.mean(rates[row, case]):,.1f}" for case in cases)] for row in rows]
    return Table(["tokens/s", *cases], cells)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--model", type=Path, help="a model that generates")
    parser.add_argument("--presets", nargs="*", default=["tiny"])
    parser.add_argument("--cases", nargs="*", default=[], help="names of cases (default: all)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--generate", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("benchmark-waiting-threads.json"))
    add_minutes(parser)
    options = parser.parse_args()
    if options.generate:
        print(generate(options.config, options.generate))
        return
    table = compare(options, budget(options))
    print(markdown(table))
    write(options.output, {"columns": table.header, "rows": table.rows})


if __name__ == "__main__":
    main()
