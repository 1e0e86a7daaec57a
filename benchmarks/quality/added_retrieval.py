"""Gain of retrieval that is added to a trained model, against a RETRO trained from scratch.

    python -m benchmarks.quality.added_retrieval DATASTORE --output FOLDER [--steps 400] [--own-context]

| model | |
|---|---|
| `base` | a decoder without retrieval |
| `scratch` | a RETRO with cross-attention and copying from neighbors, as many steps |
| `initial` | the base that copies from neighbors with the initial tables: no training |
| `fitted` | the same with fitted tables, by `retro add-retrieval`: no training |
| `retrofit-copying` | RETROfit of the copy head on a share of the steps |
| `retrofit-both` | RETROfit of the copy head and of cross-attention on a share of the steps |

With `--own-context` all models copy from their own context too. All are scored on the same held-out documents, with k
neighbors. The gain of a model is base OFF minus its ON. Each part resumes if it was stopped.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Budget, add_minutes, budget, measured_on, say, seconds
from benchmarks.quality.experiments import SHORT_EVALUATION, retro, steps_that_fit, written
from benchmarks.quality.retrieval_gain import COPYING
from pipelines.config import Config
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS, baseline_of
from retro.model.settings import ModelSettings, updated
from retro.training.settings import TrainSettings
from retro.tuning.settings import TuningSettings

TRAINED = ("base", "scratch", "retrofit-copying", "retrofit-both")
UNTRAINED = ("initial", "fitted")


def run_config(out: Path, name: str, options: argparse.Namespace, steps: int) -> Config:
    """Return the config of a model's run."""
    sizes = PRESETS["tiny"]
    width = {
        "encoder.d_model": sizes.d_model,
        "encoder.num_heads": sizes.attention.num_heads,
        "encoder.head_dim": sizes.attention.head_dim,
    }
    copying = {"copy_head.context": options.own_context, "copy_head.neighbors": True}
    whole = updated(sizes, COPYING | width | copying | {"retrieval.cca_layers": (2, 3, 4)})
    without = {"retrieval.cca_layers": ()} if name == "retrofit-copying" else {}
    base = ModelSettings(preset="base")
    models = {
        "base": baseline_of(whole),
        "scratch": whole,
        "retrofit-copying": updated(base, without | {"copy_head.neighbors": True}),
        "retrofit-both": updated(base, {"copy_head.neighbors": True}),
    }
    retrofit = name.startswith("retrofit")
    return Config(
        datastore=options.datastore,
        run=out / name,
        model=models[name],
        data=DataSettings(sequence_length=512, k=options.k, retrieval_dropout=0.5),
        train=TrainSettings(
            steps=steps,
            batch_size=2,
            lr=options.retrofit_lr if retrofit else options.lr,
            warmup_steps=min(100, steps // 10),
            init_from=str(out / "base") if retrofit else "",
            num_threads=options.threads,
            compile="no",
            eval_every=steps,
            eval_tokens=SHORT_EVALUATION,
            checkpoint_every=500,
        ),
        tuning=TuningSettings(weights="retrieval" if retrofit else "all"),
    )


def train(out: Path, options: argparse.Namespace, limit: Budget) -> None:
    """Train the runs OUT/NAME."""
    shares = [options.share if name.startswith("retrofit") else 1.0 for name in TRAINED]
    config_of = partial(run_config, out, "scratch", options)
    steps = options.steps or steps_that_fit(out / "steps", "train", config_of, shares, limit)
    for name, share in zip(TRAINED, shares, strict=True):
        say(name)
        retro("train", written(out / f"{name}.toml", run_config(out, name, options, max(1, round(share * steps)))))


def add(out: Path, options: argparse.Namespace) -> None:
    """Write OUT/fitted.safetensors, and OUT/initial.safetensors with the initial tables."""
    fitted = out / "fitted.safetensors"
    command = ("add-retrieval", str(out / "base"), "--k", str(options.k), "--output", str(fitted), "--overwrite")
    say(f"fitted in {seconds(lambda: retro(*command)):.0f} s, start of the process included")
    checkpoint = open_checkpoint(fitted)
    state, tensors = exported(checkpoint)
    model = load_model(checkpoint, torch.device("cpu"))
    assert model.copy_head is not None
    assert model.copy_head.neighbors is not None
    model.copy_head.neighbors.initialize()
    tensors |= {name: tensor for name, tensor in model.state_dict().items() if name in tensors}
    write_exported(state | {"fingerprint": "initial"}, tensors, out / "initial.safetensors")


def score(out: Path, options: argparse.Namespace) -> None:
    """Print bits per byte of each model, and its gain relative to that of `scratch`."""
    on: dict[str, float] = {}
    tokens = ("--evaluation.max-tokens", str(options.eval_tokens))
    for name in ("scratch", *UNTRAINED, "retrofit-copying", "retrofit-both"):
        path = out / f"{name}.safetensors" if name in UNTRAINED else out / name
        file = out / f"score-{name}.json"
        against = ("--against", str(out / "base"), "--k", str(options.k))
        retro("eval", "perplexity", str(path), *against, *tokens, "--output", str(file))
        results = json.loads(file.read_text())["results"]
        rows = {(row["model"], row["k"]): row["bits_per_byte"] for row in results}
        say(name, rows)
        on[name] = rows[path.name, options.k]
        off = rows["base", 0]
    for name, found in on.items():
        gain = (off - found) / (off - on["scratch"])
        say(f"{name:18} ON {found:.4f}  {100 * (found / off - 1):+.1f}%  {100 * gain:.0f}% of the gain from scratch")


def main() -> None:
    """Train, add retrieval, and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/added"))
    parser.add_argument("--own-context", action="store_true", help="all models copy from their own context too")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of base and scratch; 0: as many as fit into --minutes"
    )
    parser.add_argument("--share", type=float, default=0.03, help="steps of the RETROfits as a fraction of --steps")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--retrofit-lr", type=float, default=1e-3)
    parser.add_argument("--eval-tokens", type=int, help=f"default: 30,000 with --steps, else {SHORT_EVALUATION:,}")
    parser.add_argument("--threads", type=int, default=1)
    add_minutes(parser)
    options = parser.parse_args()
    limit = Budget(math.inf) if options.steps else budget(options).share(2)  # the other half: fitting and scoring
    options.eval_tokens = options.eval_tokens or (30_000 if options.steps else SHORT_EVALUATION)
    say(measured_on())
    train(options.output, options, limit)
    add(options.output, options)
    score(options.output, options)


if __name__ == "__main__":
    main()
