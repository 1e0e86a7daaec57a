"""Optimizers and learning rates: bits per byte of held-out text after the same tokens, retrieval OFF and ON.

    python -m benchmarks.quality.recipe docs.jsonl.zst --output RUNS [--steps 240] [--seeds 0 1 2] [--recipes "AdamW, 3e-3" Muon] [--minutes 0]
    python -m benchmarks.quality.recipe summary --output RUNS

The model is a preset with its copying; a baseline is the same model with retrieval OFF. Finished runs are kept, so the
benchmark resumes. A step's time is compared within a run only: machines drift.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, corpora_parser, markdown, measure_corpora, say
from pipelines.cli.main import main as retro
from pipelines.cli.results import Table

_ADAMW = {"train.optimizer": "adamw", "train.lr": "3e-3"}  # its best rate
RECIPES: dict[str, dict[str, str]] = {
    **{f"AdamW, {rate}": {"train.optimizer": "adamw", "train.lr": rate} for rate in ("1e-3", "3e-3", "1e-2")},
    **{
        f"AdamW, 3e-3, betas {beta1} and 0.99": _ADAMW | {"train.beta1": beta1, "train.beta2": "0.99"}
        for beta1 in ("0.5", "0.8")
    },
    "AdamW, 3e-3, half the batch": _ADAMW | {"train.batch-size": "2"},
    "AdamW, 3e-3, betas 0.8 and 0.99, half the batch": _ADAMW
    | {"train.beta1": "0.8", "train.beta2": "0.99", "train.batch-size": "2"},
    "Muon": {"train.optimizer": "muon"},
    **{
        f"Muon, {muon}, others {rate}": {"train.optimizer": "muon", "train.lr": rate, "train.muon-lr": muon}
        for muon in ("0.02", "0.05")
        for rate in ("3e-3", "1e-2", "3e-2", "1e-1")
    },
    # One factor at a time, from the preset's own recipe.
    "default, beta1 0.8": {"train.beta1": "0.8"},
    "default, beta2 0.95": {"train.beta2": "0.95"},
    "default, momentum 0.95": {"train.muon-momentum": "0.95"},
    "default, betas and momentum before": {
        "train.beta1": "0.9",
        "train.beta2": "0.95",
        "train.muon-momentum": "0.95",
    },
    "default, no clipping": {"train.max-grad-norm": "0"},
    "default, cosine to zero": {"train.min-lr-ratio": "0"},
    "default, linear to zero": {"train.lr-schedule": "linear", "train.min-lr-ratio": "0"},
    "default, wsd to zero": {"train.lr-schedule": "wsd", "train.decay-ratio": "0.4", "train.min-lr-ratio": "0"},
    "default, qk norm": {"model.attention.qk-norm": "true"},
    "default, weight decay 0": {"train.weight-decay": "0"},
    "default, weight decay 1": {"train.weight-decay": "1"},
    "default, half the batch": {"train.batch-size": "2"},
    "default, twice the batch": {"train.batch-size": "8"},
}
"""Name → settings of `retro train`."""
_SEQUENCES = 4  # of a step, unless the recipe says otherwise


def verb(folder: Path, name: str, values: dict[str, str]) -> None:
    """Run a verb with settings."""
    config = folder / "config.toml"
    config.write_text("")
    flags = [part for key, value in values.items() for part in (f"--{key}", *value.split())]
    assert retro([name, str(config), *flags]) == 0


def train(folder: Path, run: Path, recipe: dict[str, str], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with a recipe, unless that is done; returns the last figures."""
    batch = recipe.get("train.batch-size", str(_SEQUENCES))
    steps = str(options.steps * _SEQUENCES // int(batch))  # as many tokens with all recipes
    sizes = {"data.sequence-length": "512", "train.batch-size": batch, "train.steps": steps}
    evaluated = {"train.eval-every": "0", "train.eval-tokens": str(options.tokens), "train.checkpoint-every": "1000"}
    common = {"datastore": str(folder / "datastore"), "model.preset": options.preset}
    named = {"run": str(run), "train.seed": str(seed), "train.precision": options.precision}
    verb(folder, "train", common | sizes | evaluated | named | recipe)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    last = {key: value for line in lines for key, value in line.items()}
    return {
        key: last[key]
        for key in ("valid_bits_per_byte_off", "valid_bits_per_byte_on", "tokens_per_second", "tokens")
        if key in last
    }


def measure(corpus: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Train all recipes and seeds on a corpus that fit into the time."""
    folder = options.output / corpus.name.partition(".")[0]
    folder.mkdir(parents=True, exist_ok=True)
    verb(folder, "index", {"corpus.paths": str(corpus), "datastore": str(folder / "datastore")})
    names = [name for name in RECIPES if not options.recipes or name in options.recipes]
    rows = []
    for name, seed in limit.each([(name, seed) for seed in options.seeds for name in names], "run"):
        run = folder / f"{options.preset}-{options.steps}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        rows.append({"recipe": name, "seed": seed, **train(folder, run, RECIPES[name], seed, options)})
        say(json.dumps(rows[-1]))
    return {"preset": options.preset, "steps": options.steps, "rows": rows}


def summary(folder: Path) -> None:
    """Print means over the seeds as Markdown."""
    for file in sorted(folder.glob("*-recipe-*.json")):
        found = json.loads(file.read_text())
        body = []
        for name in dict.fromkeys(row["recipe"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["recipe"] == name]
            means = [statistics.mean(row[f"valid_bits_per_byte_{mode}"] for row in rows) for mode in ("off", "on")]
            body.append(
                [name, str(len(rows)), *(f"{mean:.4f}" for mean in means), f"{rows[-1]['tokens_per_second']:,.0f}"]
            )
        say(f"{file.stem}: {found['machine']}, commit {found['commit']}, {found['steps']} steps of 2,048 tokens")
        say(markdown(Table(["recipe", "seeds", "OFF", "ON", "tokens/s"], body)))


def main() -> None:
    """Measure some corpora, or print the tables."""
    parser = corpora_parser(__doc__, tokens=50_000)
    parser.add_argument("--recipes", nargs="*", default=[], choices=list(RECIPES), help="default: all", metavar="NAME")
    summary(measure_corpora(parser, measure, "recipe"))


if __name__ == "__main__":
    main()
