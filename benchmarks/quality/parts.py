"""What each part of retrieval brings to models that are trained from scratch: bits per byte of held-out documents,
against a decoder that copies from its own context.

    python -m benchmarks.quality.parts docs.jsonl.zst ... --output RUNS [--steps 240] [--seeds 0] [--preset tiny] [--minutes 0]
    python -m benchmarks.quality.parts summary --output RUNS

All models have as many parameters as the RETRO: decoders have wider feed-forward blocks instead of encoder and
cross-attention. Neighbors and datastore are added to the trained decoder (`retro add-retrieval`), or trained with it.
Finished runs are kept, so the benchmark resumes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, corpora_parser, markdown, measure_corpora, percent, placement, say
from benchmarks.quality.recipe import verb
from indexing.store.datastore import Datastore
from pipelines.cli.main import main as retro
from pipelines.cli.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import SetResult, compare, joined
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model.presets import baseline_of, resolve
from retro.model_settings import ModelSettings, flatten, updated

LENGTH, SEQUENCES, K = 512, 4, 4
COPIES = {"copy_head.neighbors": True, "copy_head.datastore": True}
OWN, ADDED = "own context", "neighbors and datastore, added"


def models(preset: str) -> dict[str, ModelSettings]:
    """The models that are trained, by what they read."""
    whole = resolve(updated(ModelSettings(), {"preset": preset}))
    decoder = baseline_of(whole)
    return {
        OWN: decoder,
        "neighbors and datastore, trained": updated(decoder, COPIES),
        "cross-attention": updated(whole, dict.fromkeys(COPIES, False)),
        "cross-attention, neighbors and datastore": whole,
    }


def train(folder: Path, run: Path, model: ModelSettings, seed: int, options: argparse.Namespace) -> Path:
    """Train a model, unless that is done."""
    default = flatten(ModelSettings())
    sizes = {
        f"model.{key}": " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in flatten(model).items()
        if value != default[key]
    }
    batches = {"data.sequence-length": LENGTH, "data.k": K, "train.batch-size": SEQUENCES, "train.steps": options.steps}
    learns = {"train.optimizer": "muon", "train.seed": seed, "train.precision": options.precision}
    ends = {"train.eval-every": 0, "train.eval-tokens": 2000, "train.checkpoint-every": 1000}
    given = {"datastore": folder / "datastore", "run": run, **batches, **learns, **ends}
    verb(folder, "train", sizes | {key: str(value) for key, value in given.items()})
    return run


def scores(checkpoint: Path, held_out: EvaluationSet, options: argparse.Namespace) -> list[SetResult]:
    """A checkpoint with retrieval OFF, and with everything that it can read."""
    place = placement(options.precision)
    model = load_model(open_checkpoint(checkpoint), place.device)
    settings = EvaluationSettings(max_tokens=options.tokens).in_windows_of(LENGTH)
    copies = model.settings.copy_head
    reads = model.settings.activations_read or copies.neighbors or copies.datastore
    uses = [NeighborUse(0), NeighborUse(K, votes=bool(copies.datastore))] if reads else [NeighborUse(0)]
    return Evaluator(model, place, settings, checkpoint.name).score_each(held_out, uses)


def scored_models(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, SetResult]:
    """Train and score all models with a seed, with retrieval OFF and ON."""
    held_out, found = EvaluationSet("valid", Datastore.open(folder / "datastore")), dict[str, SetResult]()
    for name, model in models(options.preset).items():
        run = folder / f"parts-{options.preset}-{options.steps}-{name.replace(',', '').replace(' ', '-')}-{seed}"
        found[name], *on = scores(train(folder, run, model, seed, options), held_out, options)
        if on:
            found[f"{name}: OFF"], found[name] = found[name], on[0]
        if name == OWN:
            added = run.with_name(f"{run.name}.safetensors")
            if not added.exists():
                assert retro(["add-retrieval", str(run), "--k", str(K), "--output", str(added)]) == 0
            found[ADDED] = scores(added, held_out, options)[1]
    return found


def measure(corpus: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """All models on a corpus; changes are over all seeds, intervals over documents."""
    folder = options.output / corpus.name.partition(".")[0]
    folder.mkdir(parents=True, exist_ok=True)
    verb(folder, "index", {"corpus.paths": str(corpus), "datastore": str(folder / "datastore")})
    seeds = [scored_models(folder, seed, options) for seed in limit.each(options.seeds, "seed")]
    found = {name: joined([one[name] for one in seeds]) for name in seeds[0]}
    rows = [
        {"model": name, "bits_per_byte": one.bits_per_byte, "change": compare(one, found[OWN])}
        for name, one in found.items()
    ]
    sizes = {"seeds": len(seeds), "documents": found[OWN].documents, "tokens": found[OWN].tokens // len(seeds)}
    return {"preset": options.preset, "steps": options.steps, **sizes, "rows": rows}


def summary(folder: Path) -> None:
    """Print a table of all corpora as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*-parts-*.json"))}
    names = [row["model"] for row in next(iter(found.values()))["rows"]]
    body = [
        [name, *(f"{row['bits_per_byte']:.4f}, {percent(row['change'])}" for row in rows)]
        for name, *rows in zip(names, *(one["rows"] for one in found.values()), strict=True)
    ]
    say(markdown(Table(["", *found], body)))
    kept = ("preset", "steps", "seeds", "documents", "tokens", "machine", "commit")
    say(json.dumps({name: {key: one[key] for key in kept} for name, one in found.items()}))


def main() -> None:
    """Measure some corpora, or print the table."""
    summary(measure_corpora(corpora_parser(__doc__, tokens=40_000), measure, "parts"))


if __name__ == "__main__":
    main()
