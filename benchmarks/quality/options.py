"""Options of model and data against their defaults, in short runs of small models on one corpus.

    python -m benchmarks.quality.options CORPUS... --output FOLDER [--parts mup balance] [--steps 500]

- `mup`: does `model.init = "mup"` let a wide decoder learn best at the learning rate that is best for a narrow one?
  Half of --steps for each initialization, width and learning rate.
- `balance`: what does the loss that balances the load of experts change? Bits per byte, the fraction of choices that
  were dropped, and the load of the busiest expert relative to an even load, both over the second half of the training.

By default the number of steps is chosen so that all runs end within --minutes, which is enough to try the script: see
docs/results/options.md. A stopped script resumes.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, add_minutes, budget, measured_on, say, write
from benchmarks.quality.experiments import SHORT_EVALUATION, retro, steps_that_fit, write_part, written
from benchmarks.quality.retrieval_gain import COPYING
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.neighbors.search import NeighborSettings
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from retro.data.settings import DataSettings
from retro.model.settings import NO_COPY_HEAD, ModelSettings, updated
from retro.training.settings import TrainSettings
from retro.training.trainer import train

WIDTHS = (64, 256)
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (0, 1)
EVALUATION = 30_000  # tokens


@dataclass(frozen=True)
class Run:
    """A model to train."""

    part: str
    name: str
    model: dict[str, Any]
    lr: float = 4e-3
    seed: int = 0

    @property
    def share(self) -> float:
        """Steps relative to --steps."""
        return 0.5 if self.part == "mup" else 1.0


def mup_runs() -> list[Run]:
    """Decoders of each width, with each initialization and learning rate. The narrow one has the base width."""
    return [
        Run("mup", f"{init} {width} {lr:g}", decoder(width) | {"init": init, "mup_base_width": WIDTHS[0]}, lr)
        for init in ("depth-scaled", "mup")
        for width in WIDTHS
        for lr in LEARNING_RATES
    ]


def balance_runs() -> list[Run]:
    """RETROs with eight experts in every layer, with and without the loss that balances their load."""
    model = small_retro() | {"experts.num_experts": 8, "experts.every": 1}
    return [
        Run("balance", f"balance {weight:g} seed {seed}", model | {"experts.balance_loss_weight": weight}, seed=seed)
        for seed in SEEDS
        for weight in (0.0, ModelSettings().experts.balance_loss_weight)
    ]


PARTS = {"mup": mup_runs, "balance": balance_runs}


def decoder(width: int) -> dict[str, Any]:
    """Two layers without retrieval; a wider decoder has more heads."""
    heads = {"attention.num_heads": width // 32, "attention.head_dim": 32}
    return {"d_model": width, "d_ffw": 4 * width, "num_layers": 2, "retrieval.cca_layers": (), **heads}


def small_retro() -> dict[str, Any]:
    """A RETRO that learns to copy early, with an encoder of one layer that is as wide as its decoder."""
    encoder = {"d_model": 64, "d_ffw": 256, "num_heads": 2, "head_dim": 32, "num_layers": 1}
    encoder_settings = {f"encoder.{key}": value for key, value in encoder.items()}
    return decoder(64) | {"num_layers": 3, "retrieval.cca_layers": (2, 3)} | encoder_settings | COPYING


def config_of(out: Path, run: Run, options: argparse.Namespace, steps: int) -> Config:
    """Return the config of a run of `steps` times its share."""
    steps = max(1, round(steps * run.share))
    return Config(
        datastore=out / "datastore",
        run=out / run.name.replace(" ", "_"),
        model=updated(ModelSettings(copy_head=NO_COPY_HEAD), run.model),
        data=DataSettings(sequence_length=512),
        train=TrainSettings(
            steps=steps,
            batch_size=2,
            lr=run.lr,
            seed=run.seed,
            warmup_steps=steps // 10,
            eval_every=0,
            eval_tokens=EVALUATION if options.steps else SHORT_EVALUATION,
            checkpoint_every=steps,
            num_threads=options.threads,
            compile="no",
        ),
    )


def build(out: Path, options: argparse.Namespace) -> None:
    """Build the datastore of all runs."""
    config = Config(
        datastore=out / "datastore",
        corpus=CorpusSettings(paths=(write_part(options.corpus, options.corpus_mb, out / "corpus.jsonl"),)),
        tokenizer=TokenizerSettings(vocab_size=2048),
        chunks=ChunkSettings(chunk_length=32),
        neighbors=NeighborSettings(search="exact", rerank="embeddings"),
    )
    retro("index", written(out / "datastore.toml", config))


def num_steps(out: Path, runs: Sequence[Run], options: argparse.Namespace, limit: Budget) -> int:
    """Return --steps, or the number with which all runs fit into the remaining time. The last run is the slowest."""
    if options.steps:
        return int(options.steps)
    config = partial(config_of, out, runs[-1], options)
    return steps_that_fit(out / "steps", "train", config, [run.share for run in runs], limit)


def measure(config: Config) -> dict[str, float]:
    """Train a model and return held-out bits per byte, with experts also their load."""
    lines = train(config.run, config.run_settings).metrics
    row: dict[str, float] = {"tokens": max(line["tokens"] for line in lines)}
    row |= {name: lines[-1][key] for name in ("off", "on") if (key := f"valid_bits_per_byte_{name}") in lines[-1]}
    routed = [line for line in lines if "busiest_expert" in line]
    for key in ("dropped_choices", "busiest_expert") if routed else ():
        row[key] = statistics.mean(line[key] for line in routed[len(routed) // 2 :])
    return row


def main() -> None:
    """Train and score the runs of the parts, print a row for each and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/options"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--steps", type=int, default=0, help="steps of a run; 0: as many as fit into --minutes")
    parser.add_argument("--corpus-mb", type=float, default=4.0, help="megabytes of text")
    parser.add_argument("--threads", type=int, default=0)
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    say(measured_on())
    build(options.output, options)
    runs = [run for part in options.parts for run in PARTS[part]()]
    steps = num_steps(options.output, runs, options, limit)
    rows = {}
    for run in (Budget(math.inf) if options.steps else limit).each(runs, "run", lambda run: run.share):
        rows[run.name] = measure(config_of(options.output, run, options, steps))
        say(f"{run.name:24} " + "  ".join(f"{key} {value:.5g}" for key, value in rows[run.name].items()))
    write(options.output / f"options-{'-'.join(options.parts)}.json", {"steps": steps, "rows": rows})


if __name__ == "__main__":
    main()
