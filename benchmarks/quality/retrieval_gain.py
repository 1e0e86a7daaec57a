"""Does retrieval pay? Two baselines and three RETROs with the same tokens and seeds, on one corpus, with controls; and a RETROfit.

python -m benchmarks.quality.retrieval_gain build CORPUS... --output runs/learning        two datastores of the same chunks: lexical, MiniLM
python -m benchmarks.quality.retrieval_gain train --output runs/learning [--models baseline lexical minilm random] [--steps 6000] [--k 2]
python -m benchmarks.quality.retrieval_gain train --output runs/learning --models retrofit [--share 0.03]
python -m benchmarks.quality.retrieval_gain score --output runs/learning                  held-out bits per byte by leakage, and curves

`baseline` has as many parameters as the RETROs (encoder and cross-attention are added to its FFW width), `decoder` is their
decoder alone, the paper's baseline. The control is
trained and scored with neighbors drawn at random. `retrofit` is the trained `baseline`, frozen, with an encoder and
cross-attention that learn from a share of its tokens. All are scored on the same held-out documents, and filtered by what leaks
through the lexical neighbors, so that one α means the same chunks for all. Every part goes on where it was stopped.

The default of --steps tries the script out, in minutes. Results need thousands of steps: see docs/results/retrieval-gain.md.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from benchmarks.common import measured_on, say
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.embedders import EmbedderSettings
from indexing.neighbors.search import NeighborSettings
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from pipelines.config_files import to_toml
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS, baseline_of
from retro.model.settings import ModelSettings
from retro.training.settings import TrainSettings
from retro.tuning.settings import TuningSettings

MODELS = ("baseline", "decoder", "lexical", "random", "minilm", "retrofit")
# What brings copying sooner (docs/results/retrieval-gain.md), and the same models without part of it: `paper` has none of it.
COPYING = {"shared_embeddings": True, "smeared_keys": True, "smeared_tokens": 3, "copying_init": True}
ABLATIONS: dict[str, dict[str, bool]] = {
    "plain": {},  # the baseline of the paper
    "paper": {},
    "shared": {"shared_embeddings": True},
    "shared-smeared": {"shared_embeddings": True, "smeared_keys": True},
    "one-before": {"shared_embeddings": True, "smeared_keys": True, "copying_init": True},
}
EMBEDDERS = {"lexical": EmbedderSettings(), "minilm": EmbedderSettings(kind="transformer", path="minilm")}


def retro(*arguments: str) -> None:
    """The command line, as a user runs it."""
    subprocess.run([sys.executable, "-m", "pipelines.cli", *arguments], check=True)


def build(out: Path, corpus: list[str], vocab_size: int, chunk_length: int) -> None:
    """Datastores OUT/lexical and OUT/minilm."""
    for name, embedder in EMBEDDERS.items():
        config = Config(
            datastore=out / name,
            corpus=CorpusSettings(paths=tuple(corpus)),
            tokenizer=TokenizerSettings(vocab_size=vocab_size),
            chunks=ChunkSettings(chunk_length=chunk_length),
            embedder=embedder,
            neighbors=NeighborSettings(search="exact"),  # what is compared is models, not searches
        )
        retro("index", _written(out / f"{name}.toml", config))


def train(out: Path, options: argparse.Namespace) -> None:
    """Runs OUT/run-NAME."""
    for number, name in enumerate(options.models):
        say(f"{name}: model {number + 1} of {len(options.models)}")
        retrofit = name == "retrofit"
        steps = max(1, round(options.steps * options.share)) if retrofit else options.steps
        sizes = replace(_sizes(options), **ABLATIONS.get(name, COPYING))
        plain = {"baseline": baseline_of(sizes), "plain": baseline_of(sizes), "decoder": replace(sizes, cca_layers=())}
        model: ModelSettings = plain.get(name, sizes)
        if retrofit:
            model = replace(plain["baseline"], cca_layers=sizes.cca_layers)
        source: Literal["random", "nearest"] = "random" if name == "random" else "nearest"
        config = Config(
            datastore=out / ("minilm" if name == "minilm" else "lexical"),
            run=out / f"run-{name}",
            model=model,
            data=DataSettings(
                sequence_length=512, k=options.k, neighbor_source=source, retrieval_dropout=options.retrieval_dropout
            ),
            train=TrainSettings(
                steps=steps,
                batch_size=2,
                lr=options.lr,
                warmup_steps=min(100, steps // 10),
                init_from=str(out / "run-baseline") if retrofit else "",
                num_threads=options.threads,
                compile="yes" if options.compile else "no",
                eval_every=min(500, max(1, steps // 3)),
                eval_tokens=30_000,
                checkpoint_every=500,
            ),
            tuning=TuningSettings(weights="retrieval" if retrofit else "all"),
        )
        retro("train", _written(out / f"run-{name}.toml", config))


def _sizes(options: argparse.Namespace) -> ModelSettings:
    """The preset, whose encoder is as wide as its decoder, as the smallest of the paper's is."""
    sizes = replace(PRESETS[options.preset], chunk_length=options.chunk_length)
    width = {"encoder_d_model": sizes.d_model, "encoder_num_heads": sizes.num_heads, "encoder_head_dim": sizes.head_dim}
    return replace(sizes, cca_layers=tuple(options.cca_layers), **width)


def score(out: Path) -> None:
    """OUT/score-NAME.json for each model against the baseline, and one page with all curves."""
    runs = [name for name in (*MODELS, *ABLATIONS) if (out / f"run-{name}").exists()]
    for name in runs[1:]:
        to = ("--evaluation.k", "1", "2", "4", "8") if name not in ("baseline", "plain", "decoder") else ()
        to += ("--against", str(out / "run-baseline"), "--leakage-from", str(out / "lexical"))
        retro("eval", "perplexity", str(out / f"run-{name}"), *to, "--output", str(out / f"score-{name}.json"))
    retro("report", *(str(out / f"run-{name}") for name in runs), "--output", str(out / "learning.html"))
    for name in runs:
        lines = [json.loads(line) for line in (out / f"run-{name}" / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if "valid_bits_per_byte_off" in line:
                on = line.get("valid_bits_per_byte_on")
                print(
                    f"{name:9} {line['tokens']:10,} tokens  OFF {line['valid_bits_per_byte_off']:.4f}"
                    + (f"  ON {on:.4f}" if on else "")
                )


def _written(file: Path, config: Config) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(config))
    return str(file)


def main() -> None:
    """One of the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["build", "train", "score"])
    parser.add_argument("corpus", nargs="*")
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=[*MODELS, *ABLATIONS])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--cca-layers", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--chunk-length", type=int, default=64, help="the same for all three parts")
    parser.add_argument("--retrieval-dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=200, help="of each model")
    parser.add_argument("--share", type=float, default=0.03, help="of the steps, for the RETROfit")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=4096)
    options = parser.parse_args()
    say(measured_on())
    if options.part == "build":
        build(options.output, options.corpus, options.vocab_size, options.chunk_length)
    elif options.part == "train":
        train(options.output, options)
    else:
        score(options.output)


if __name__ == "__main__":
    main()
