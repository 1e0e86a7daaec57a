"""Gain of retrieval: two baselines and three RETRO models with the same tokens and seeds, controls, and a RETROfit.

    python -m benchmarks.quality.retrieval_gain build CORPUS... --output FOLDER
    python -m benchmarks.quality.retrieval_gain train --output FOLDER [--models baseline lexical …] [--steps 6000]
    python -m benchmarks.quality.retrieval_gain train --output FOLDER --models retrofit retrofit-both [--share 0.03]
    python -m benchmarks.quality.retrieval_gain score --output FOLDER
    python -m benchmarks.quality.retrieval_gain summary --output FOLDER

`build` writes two datastores with the same chunks, lexical and MiniLM. `train` writes the runs of --seed N to
OUTPUT/seed-N. `score` scores the finished runs of all seeds. `summary` prints bits per byte, changes against `context` and
`baseline`, also by leakage, and curves, and writes OUTPUT/summary.html.

`baseline` has as many parameters as the RETRO models: its FFW width replaces encoder and cross-attention. `decoder` is
their decoder alone, the paper's baseline. The control `random` is trained and scored with random neighbors. `retrofit`
is the trained and frozen `baseline` with an encoder and cross-attention that are trained on a fraction of its tokens.

With a copy head: `context` is the baseline that copies from its own context, `copy` the same baseline that copies from its
neighbors too, `both` a RETRO with cross-attention that copies from both, `both-random` its control, and `decoder-context` its
decoder, which copies from its own context. `retrofit-both` is the trained and frozen `context`, with the neighbors' part of a copy
head, an encoder and cross-attention.
All models are scored on the same held-out documents. Leakage is always computed with the lexical neighbors, so that a
level has the same chunks for all models. Each part resumes if it was stopped.

A model can retrieve from more text than it was trained on. `build --larger` draws --corpus-mb from CORPUS for training, and
also builds OUTPUT/rest from all other documents, and OUTPUT/larger: the same chunks as OUTPUT/lexical, with neighbors from
both. `score --larger` and `summary --larger` use it.

By default the size of the corpus and the number of steps are chosen so that each part ends within --minutes, and few
held-out tokens are scored (--minutes 0: all). This is enough to try the script. Results need thousands of steps: see
docs/results/retrieval-gain.md.
"""

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, measured_on, say, seconds
from benchmarks.quality.experiments import SHORT_EVALUATION, retro, steps_that_fit, write_part, write_rest, written
from benchmarks.quality.retrieval_scores import score_runs
from benchmarks.quality.retrieval_summary import summarize
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.embedding.transformer import TransformerEmbedder
from indexing.neighbors.search import NeighborSettings
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from pipelines.planning.sample import draw_sample
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS, baseline_of
from retro.model.settings import NO_COPY_HEAD, ModelSettings, updated
from retro.training.settings import TrainSettings
from retro.tuning.settings import TuningSettings

_OWN_CONTEXT = ("context", "context-smeared", "context-init", "context-plain")
PLAIN = ("baseline", "decoder", "plain", *_OWN_CONTEXT, "decoder-context")
"""Models without retrieval."""
RETROFITS = {"retrofit": "baseline", "retrofit-both": "context"}
"""Model → the trained model that it starts from and freezes."""
MODELS = ("baseline", "decoder", "lexical", "random", "minilm", "retrofit")
COPY_HEADS: dict[str, dict[str, Any]] = {
    **{name: {"copy_head.context": True} for name in _OWN_CONTEXT},
    "decoder-context": {"copy_head.context": True},
    "copy": {"copy_head.context": True},
    "both": {"copy_head.context": True, "copy_head.neighbors": True},
    "both-random": {"copy_head.context": True, "copy_head.neighbors": True},
    "retrofit-both": {"copy_head.context": True},
    "all": {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True},
    "all-plain": {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True},
    "all-reads": {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True},
}
# Options with which a model learns to copy early (docs/results/copying.md), and models with some or none of them.
COPYING = {
    "shared_embeddings": True,
    "attention.smeared_keys": True,
    "attention.smeared_tokens": 3,
    "copying_init": True,
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "plain": {},  # the baseline of the paper
    "paper": {},
    "context-plain": {},
    "context-smeared": {"attention.smeared_keys": True, "attention.smeared_tokens": 3},
    "context-init": {"shared_embeddings": True, "copying_init": True},
    "all-plain": {"shared_embeddings": True},
    "all-reads": {"retrieval.cca_layers": (), "retrieval.reader": "decoder"},
    "shared": {"shared_embeddings": True},
    "shared-smeared": {"shared_embeddings": True, "attention.smeared_keys": True},
    "one-before": {"shared_embeddings": True, "attention.smeared_keys": True, "copying_init": True},
}
_LEAST_MEGABYTES = 0.3  # the least text for training a tokenizer
EMBEDDERS = {"lexical": EmbedderSettings(), "minilm": EmbedderSettings(kind="transformer", path="minilm")}


def build(out: Path, options: argparse.Namespace, limit: Budget) -> None:
    """Build the datastores OUT/lexical and OUT/minilm."""
    paths = tuple(options.corpus)
    if options.corpus_mb != 0:
        file = out / "corpus.jsonl"
        megabytes = options.corpus_mb or (0 if file.exists() else megabytes_that_fit(paths, options, limit))
        paths = (write_part(paths, megabytes, file),)
    for name in options.embedders:
        retro("index", written(out / f"{name}.toml", datastore_config(out / name, name, paths, options)))
    if options.larger:
        build_larger(out, options)


def build_larger(out: Path, options: argparse.Namespace) -> None:
    """Build OUT/rest, all documents that OUT/corpus.jsonl left out, and OUT/larger, whose neighbors come from both."""
    rest = write_rest(options.corpus, out / "corpus.jsonl", out / "rest.jsonl")
    for name, path in {"rest": rest, "larger": str(out / "corpus.jsonl")}.items():
        config = datastore_config(out / name, "lexical", (path,), options)
        config = replace(
            config,
            tokenizer=TokenizerSettings("sentencepiece", str(out / "lexical/tokenizer/sentencepiece.model")),
            embedder=EmbedderSettings(path=str(out / "lexical")),
            neighbors=replace(config.neighbors, extra_datastores=(out / "rest",) if name == "larger" else ()),
        )
        retro("index", written(out / f"{name}.toml", config))


def datastore_config(folder: Path, name: str, paths: tuple[str, ...], options: argparse.Namespace) -> Config:
    """Return the config of a datastore with an embedder of `EMBEDDERS`."""
    return Config(
        datastore=folder,
        corpus=CorpusSettings(paths=paths),
        tokenizer=TokenizerSettings(vocab_size=options.vocab_size),
        chunks=ChunkSettings(chunk_length=options.chunk_length),
        embedder=EMBEDDERS[name],
        neighbors=NeighborSettings(
            search="exact", rerank=options.rerank
        ),  # the comparison is about models, not about search
    )


def megabytes_that_fit(paths: tuple[str, ...], options: argparse.Namespace, limit: Budget) -> float:
    """Return the megabytes of text that MiniLM embeds in half of the remaining time. The other stages are faster."""
    sample = draw_sample(CorpusSettings(paths=paths), 100_000)
    text = "".join(document.text for document in sample.documents).encode()
    size = 4 * options.chunk_length  # approximate bytes of a chunk
    rows = np.array([list(text[start : start + size]) for start in range(0, min(len(text), 64 * size) - size, size)])
    embedder = TransformerEmbedder(EMBEDDERS["minilm"], lambda row: bytes(row.tolist()).decode(errors="replace"))
    lengths = np.full(len(rows), size)
    embedder.embed(rows, lengths)  # warms up
    took = seconds(lambda: embedder.embed(rows, lengths))
    found = limit.left / 2 / took * rows.size / 1e6
    say(f"using {found:.2f} MB of the corpus, which fits into {options.minutes:g} minutes. --corpus-mb sets the size.")
    return max(found, _LEAST_MEGABYTES)


def train(out: Path, options: argparse.Namespace, limit: Budget) -> None:
    """Train the runs OUT/seed-N/run-NAME."""
    steps = options.steps
    if steps:
        limit = Budget(math.inf)  # --steps overrides the time limit
    else:
        slowest = next((name for name in options.models if name not in (*PLAIN, *RETROFITS)), options.models[0])
        shares = [options.share if name in RETROFITS else 1.0 for name in options.models]
        config_of = partial(run_config, out, slowest, options)
        steps = steps_that_fit(seeded(out, options) / "steps", "train", config_of, shares, limit)
    for name in limit.each(options.models, "model"):
        say(name)
        own = max(1, round(steps * options.share)) if name in RETROFITS else steps
        retro("train", written(seeded(out, options) / f"run-{name}.toml", run_config(out, name, options, own)))


def seeded(out: Path, options: argparse.Namespace) -> Path:
    """Return the folder of the runs with this seed."""
    return out / f"seed-{options.seed}"


def run_config(out: Path, name: str, options: argparse.Namespace, steps: int) -> Config:
    """Return the config of a model's run."""
    sizes = updated(_sizes(options), ABLATIONS.get(name, COPYING) | COPY_HEADS.get(name, {}))
    plain, decoder = baseline_of(sizes), updated(sizes, {"retrieval.cca_layers": ()})
    copying = updated(plain, {"copy_head.neighbors": True})
    cross_attention = {"retrieval.cca_layers": sizes.retrieval.cca_layers}
    models: dict[str, ModelSettings] = {
        **dict.fromkeys(("baseline", "plain", *_OWN_CONTEXT), plain),
        **dict.fromkeys(("decoder", "decoder-context"), decoder),
        "copy": copying,
        "retrofit": updated(plain, cross_attention),
        "retrofit-both": updated(copying, cross_attention),
    }
    model = models.get(name, sizes)
    source: Literal["random", "nearest"] = "random" if name.endswith("random") else "nearest"
    return Config(
        datastore=out / ("minilm" if name == "minilm" else "lexical"),
        run=seeded(out, options) / f"run-{name}",
        model=model,
        data=DataSettings(
            sequence_length=512,
            k=options.k,
            neighbor_source=source,
            retrieval_dropout=options.retrieval_dropout,
            seed=options.seed,
        ),
        train=TrainSettings(
            steps=steps,
            batch_size=2,  # with dropout, one sequence without neighbors leaves out the encoder
            lr=options.lr,
            seed=options.seed,
            warmup_steps=min(100, steps // 10),
            init_from=str(seeded(out, options) / f"run-{RETROFITS[name]}") if name in RETROFITS else "",
            num_threads=options.threads,
            compile="yes" if options.compile else "no",
            eval_every=min(500, max(1, steps // 3)),
            eval_tokens=options.eval_tokens if options.steps else SHORT_EVALUATION,
            checkpoint_every=500,
        ),
        tuning=TuningSettings(weights="retrieval" if name in RETROFITS else "all"),
    )


def _sizes(options: argparse.Namespace) -> ModelSettings:
    """Return the preset with the layers of cross-attention. Its encoder is as wide as the decoder, like that of the smallest
    model of the paper, unless --narrow-encoder keeps the preset's."""
    sizes = replace(PRESETS[options.preset], chunk_length=options.chunk_length, copy_head=NO_COPY_HEAD)
    sizes = updated(sizes, {"retrieval.cca_layers": tuple(options.cca_layers)})
    if options.narrow_encoder:
        return sizes
    width = {
        "encoder.d_model": sizes.d_model,
        "encoder.num_heads": sizes.attention.num_heads,
        "encoder.head_dim": sizes.attention.head_dim,
    }
    return updated(sizes, width)


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["build", "train", "score", "summary"])
    parser.add_argument("corpus", nargs="*")
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=[*MODELS, *COPY_HEADS, *ABLATIONS])
    parser.add_argument("--embedders", nargs="*", default=list(EMBEDDERS), choices=EMBEDDERS, help="of `build`")
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--cca-layers", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--narrow-encoder", action="store_true", help="an encoder half as wide as the decoder")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--rerank", default="embeddings", choices=["embeddings", "tokens"], help="of `build`")
    parser.add_argument("--chunk-length", type=int, default=64, help="must be the same for `build` and `train`")
    parser.add_argument("--retrieval-dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=0, help="steps of each model; 0: as many as fit into --minutes")
    parser.add_argument("--eval-tokens", type=int, default=30_000, help="held-out tokens of a curve, with --steps")
    parser.add_argument("--share", type=float, default=0.03, help="steps of a RETROfit as a fraction of --steps")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--corpus-mb", type=float, help="megabytes of text; 0: all; default: as much as fits into --minutes"
    )
    parser.add_argument("--larger", action="store_true", help="retrieve from more text; of `build`, `score`, `summary`")
    add_minutes(parser)
    options = parser.parse_args()
    if options.larger and options.part == "build" and not options.corpus_mb:
        parser.error(
            "--larger needs --corpus-mb, the megabytes of CORPUS to train on. All other text is retrieved from."
        )
    limit = budget(options)
    say(measured_on())
    if options.part == "build":
        build(options.output, options, limit)
    elif options.part == "train":
        train(options.output, options, limit)
    elif options.part == "score":
        torch.set_num_threads(options.threads or torch.get_num_threads())
        score_runs(options.output, limit, 0 if math.isinf(limit.seconds) else SHORT_EVALUATION, options.larger)
    else:
        try:
            summarize(options.output, [*MODELS, *COPY_HEADS, *ABLATIONS], options.larger)
        except InputError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
