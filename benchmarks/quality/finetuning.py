"""Question answering before and after fine-tuning: exact match and F1, closed-book, with neighbors, with prompts.

    python -m benchmarks.quality.finetuning build DATA     files and datastores of squad_v11_dev and cmrc2018
    python -m benchmarks.quality.finetuning pretrain       a small RETRO for each language
    python -m benchmarks.quality.finetuning finetune       on cloze and other questions, then on the set itself
    python -m benchmarks.quality.finetuning score          `retro eval qa` of the three models, and a table

DATA contains a folder for each set, as for `passage_retrieval.py`. `qa_data.py` describes training and test data. Each
part resumes if it was stopped; `--sets` selects one of the sets. By default the number of steps is chosen so that a
part ends within --minutes, which is enough to try the script. --steps 0 and --questions 200 give the results of
docs/results/question-answering.md.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, add_minutes, budget, measured_on, say
from benchmarks.quality.experiments import SHORT_EVALUATION, retro, steps_that_fit, written
from benchmarks.quality.qa_data import SETS, prepare
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.embedders import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.neighbors.search import NeighborSettings
from indexing.sparse.candidates import Retrieval
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from retro.data.settings import DataSettings
from retro.finetuning.settings import FinetuneSettings
from retro.model.settings import AttentionSettings, CopyHeadSettings, ModelSettings, RetrievalSettings
from retro.training.settings import TrainSettings

# The copy head alone reads passages: a model of this size does not learn to read them with cross-attention
# (docs/results/question-answering.md).
MODEL = ModelSettings(
    d_model=128,
    d_ffw=512,
    attention=AttentionSettings(num_heads=2, head_dim=64, smeared_keys=True, smeared_tokens=3),
    num_layers=4,
    retrieval=RetrievalSettings(cca_layers=()),
    copy_head=CopyHeadSettings(context=False, neighbors=True, content_width=64),
)
VOCABULARY = 8192


@dataclass(frozen=True)
class Phase:
    """A training run.

    Attributes:
        examples: name of the file of questions; empty: pretraining.
        init_from: phase that provides the initial weights.
        steps: number of steps; a step has 1,024 tokens in pretraining, otherwise `rows` rows of 512 tokens.
        rows: rows of a step.
        lr: peak learning rate.
        k: passages per question, or neighbors per chunk.
        retrieval: how passages are found. Embeddings are good enough if a passage with the answer always comes first.
    """

    examples: str
    init_from: str
    steps: int
    rows: int
    lr: float
    k: int
    retrieval: Retrieval = "dense"


PHASES = {
    "pretrained": Phase("", "", 200, 2, 2e-3, 2),
    "practised": Phase("practice", "pretrained", 200, 4, 2e-3, 4),
    "finetuned": Phase("train", "practised", 100, 4, 1e-3, 4, "hybrid"),
}


def build(data: Path, folder: Path, name: str, clozes: int, corpus_bytes: int) -> None:
    """Write the files and three datastores: `pretraining`, and with its tokenizer `reading` and `passages`."""
    print(name, prepare(data, name, folder, clozes, corpus_bytes), flush=True)
    pretraining = Config(
        datastore=folder / "pretraining",
        corpus=CorpusSettings(paths=(str(folder / "pretraining.jsonl"),)),
        tokenizer=TokenizerSettings(vocab_size=VOCABULARY),
        chunks=ChunkSettings(chunk_length=64),
        neighbors=NeighborSettings(rerank="embeddings"),
    )
    retro("index", written(folder / "pretraining.toml", pretraining))
    tokenizer = folder / "pretraining" / "tokenizer" / "sentencepiece.model"
    for searched in ("reading", "passages"):
        config = Config(
            datastore=folder / searched,
            corpus=CorpusSettings(paths=(str(folder / f"{searched}.jsonl"),), split=(1, 0, 0)),
            tokenizer=TokenizerSettings(kind="sentencepiece", path=str(tokenizer)),
            chunks=ChunkSettings(chunk_length=64),
            embedder=EmbedderSettings(dimension=1024),  # questions have few words (docs/results/passage-retrieval.md)
            index=IndexSettings(factory="Flat"),
        )
        file = written(folder / f"{searched}.toml", config)
        for stage in ("chunk", "embed", "train-index", "add"):  # chunks need no neighbors: only questions search
            retro("index", file, "--stage", stage)


def train(options: argparse.Namespace, phases: tuple[str, ...], limit: Budget) -> None:
    """Train the runs OUT/SET/PHASE of all sets."""
    runs = [(name, phase) for name in options.sets for phase in phases]
    steps = options.steps
    if steps is not None:
        limit = Budget(math.inf)  # --steps overrides the time limit
    else:
        name, phase = options.sets[0], phases[-1]  # the phase with the most passages
        config_of = partial(run_config, options.output / name, name, phase, options, init_from="pretrained")
        command = "finetune" if PHASES[phase].examples else "train"
        steps = steps_that_fit(options.output / f"steps-{options.part}", command, config_of, [1.0] * len(runs), limit)
    for name, phase in limit.each(runs, "run"):
        say(f"{name}, {phase}")
        config = run_config(options.output / name, name, phase, options, steps or PHASES[phase].steps)
        file = written(options.output / name / f"{phase}.toml", config)
        retro("finetune" if PHASES[phase].examples else "train", file)


def run_config(
    folder: Path, name: str, phase: str, options: argparse.Namespace, steps: int, init_from: str = ""
) -> Config:
    """Return the config of the run FOLDER/PHASE, which starts from the weights of another phase."""
    chosen = PHASES[phase]
    evaluations, eval_tokens = 5, 2_000 if chosen.examples else 30_000  # tokens of answers, or of text
    if options.steps is None:  # a row has few tokens of an answer
        evaluations, eval_tokens = 2, SHORT_EVALUATION // 40 if chosen.examples else SHORT_EVALUATION
    init_from = chosen.init_from and (init_from or chosen.init_from)
    config = Config(
        datastore=folder / ("reading" if chosen.examples else "pretraining"),
        run=folder / phase,
        model=MODEL,
        data=DataSettings(sequence_length=512, k=chosen.k),
        train=TrainSettings(
            steps=steps,
            batch_size=chosen.rows,
            lr=chosen.lr,
            warmup_steps=min(100, steps // 10),
            init_from=str(folder / init_from) if init_from else "",
            num_threads=options.threads,
            compile="yes" if options.compile else "no",
            eval_every=max(1, steps // evaluations),
            eval_tokens=eval_tokens,
            checkpoint_every=max(1, steps // evaluations),
        ),
    )
    if not chosen.examples:
        return config
    finetune = FinetuneSettings(
        examples=(folder / f"{chosen.examples}.jsonl",),
        format="questions",
        language=SETS[name].language,
        retrieval=chosen.retrieval,
        positives_first=True,
    )
    return replace(config, finetune=finetune)


def score(folder: Path, name: str, k: int, questions: int, limit: Budget) -> None:
    """Write FOLDER/score-PHASE.json for each run."""
    for phase in limit.each(tuple(PHASES), "run"):
        out = folder / f"score-{phase}.json"
        if out.exists() or not (folder / phase).exists():
            continue
        arguments = {
            "passages": str(folder / "passages"),
            "k": "0",
            "max-questions": str(questions),
            "neighbor-passages": str(k),
            "retrieval": "hybrid",
            "language": SETS[name].language,
            "max-tokens": "48",  # answers in Chinese are long
            "batch-size": "32",
            "output": str(out),
        }
        options = [part for key, value in arguments.items() for part in (f"--{key}", value)]
        retro("eval", "qa", str(folder / phase), str(folder / "test.jsonl"), "--gold", *options)


def table(folder: Path, name: str) -> list[str]:
    """Return the results of `score` as a Markdown table with a row for each mode and a column for each run."""
    scores = {
        phase: json.loads(file.read_text()) for phase in PHASES if (file := folder / f"score-{phase}.json").exists()
    }
    lines = [f"| {name}, exact match / F1, % | answer in passages | " + " | ".join(scores) + " |"]
    lines.append("|---" * (len(scores) + 2) + "|")
    for number, row in enumerate(next(iter(scores.values()))["results"]) if scores else ():
        held = row["answer_in_passages"]
        cells = [_cell(each["results"][number]) for each in scores.values()]
        lines.append(" | ".join((f"| {row['mode']}", "" if held is None else f"{100 * held:.1f}%", *cells)) + " |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    figures = (
        f"{100 * row[key]:.1f} ({100 * row[f'{key}_low']:.1f} to {100 * row[f'{key}_high']:.1f})"
        for key in ("exact_match", "f1")
    )
    return " / ".join(figures)


def main() -> None:
    """Run one of the four parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["build", "pretrain", "finetune", "score"])
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--clozes", type=int, default=0, help="cloze questions per passage of about 60 words")
    parser.add_argument(
        "--corpus-bytes", type=int, default=1_000_000, help="bytes of other corpora in the pretraining text"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of each run; 0: those of the published results; default: as many as fit into --minutes",
    )
    parser.add_argument("--questions", type=int, default=20, help="number of test questions of each set; 0: all")
    parser.add_argument("--k", type=int, default=4, help="passages read as neighbors in `score`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    if options.part == "build" and options.data is None:
        parser.error("`build` needs DATA")
    say(measured_on())
    if options.part != "build":  # a build may have stopped after the first set
        options.sets = [name for name in options.sets if (options.output / name / "passages").exists()]
        if not options.sets:
            parser.error(f"{options.output} has none of the sets: run `build` first")
        say(f"sets: {', '.join(options.sets)}")
    if options.part in ("pretrain", "finetune"):
        train(options, ("pretrained",) if options.part == "pretrain" else ("practised", "finetuned"), limit)
        return
    for number, name in enumerate(limit.each(options.sets, "set")):
        folder = options.output / name
        say(f"{name}: {options.part}")
        if options.part == "build":
            build(options.data, folder, name, options.clozes, options.corpus_bytes)
        else:
            score(folder, name, options.k, options.questions, limit.share(len(options.sets) - number))
            print("\n".join(table(folder, name)), flush=True)


if __name__ == "__main__":
    main()
