"""Question answering before and after fine-tuning: exact match and F1, closed book, with passages as neighbors, and in prompts.

python -m benchmarks.quality.finetuning build DATA --output runs/finetuning     files and datastores of squad_v11_dev and cmrc2018
python -m benchmarks.quality.finetuning pretrain --output runs/finetuning       a small RETRO of each language
python -m benchmarks.quality.finetuning finetune --output runs/finetuning       on cloze and other questions, then on the set's own
python -m benchmarks.quality.finetuning score --output runs/finetuning          `retro eval qa` of all three, and a table

DATA is a folder with a folder for each set, as for `questions.py`. What is learned and what is asked: `qa_data.py`. Every part goes
on where it was stopped; `--sets` names one of the two. The defaults of --steps and --questions try the script out, in minutes:
give 0 for the whole of it, which takes hours.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import measured_on, say
from benchmarks.quality.qa_data import SETS, prepare
from indexing.corpus.readers import CorpusSettings
from indexing.embedders import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.retrieval.results import Rerank
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from pipelines.config_files import to_toml
from retro.data.settings import DataSettings
from retro.finetuning.settings import FinetuneSettings
from retro.model.settings import ModelSettings
from retro.training.settings import TrainSettings

# What brings copying sooner (docs/results/copying.md). The encoder's second layer knows where a neighbor and its question share words.
MODEL = ModelSettings(
    d_model=128,
    d_ffw=512,
    num_heads=2,
    head_dim=64,
    num_layers=4,
    cca_layers=(2, 3, 4),
    encoder_d_model=128,
    encoder_d_ffw=256,
    encoder_num_heads=2,
    encoder_head_dim=64,
    encoder_num_layers=2,
    encoder_cca_layers=(1,),
    shared_embeddings=True,
    smeared_keys=True,
    smeared_tokens=3,
    copying_init=True,
)
VOCABULARY = 8192


@dataclass(frozen=True)
class Phase:
    """A training run.

    Attributes:
        examples: the file of its questions; empty: pretraining.
        init_from: the phase whose weights it begins with.
        steps: of 1,024 tokens in pretraining, else of `rows` rows of 512.
        rows: of a step.
        lr: at its peak.
        k: passages of a question, or neighbors of a chunk.
        rerank: what passages are ordered by; where one holds the answer in any case and is put first, embeddings are good enough.
    """

    examples: str
    init_from: str
    steps: int
    rows: int
    lr: float
    k: int
    rerank: Rerank = "embeddings"


PHASES = {
    "pretrained": Phase("", "", 2500, 2, 2e-3, 2),
    "practised": Phase("practice", "pretrained", 1500, 4, 1e-3, 2),
    "finetuned": Phase("train", "practised", 600, 4, 5e-4, 4, "hybrid"),
}


def retro(*arguments: str) -> None:
    """The command line, as a user runs it."""
    subprocess.run([sys.executable, "-m", "pipelines.cli", *arguments], check=True)


def build(data: Path, folder: Path, name: str, clozes: int, corpus_bytes: int) -> None:
    """Files and three datastores: `pretraining`, and with its tokenizer `reading` and `passages`, searched by questions."""
    print(name, prepare(data, name, folder, clozes, corpus_bytes), flush=True)
    pretraining = Config(
        datastore=folder / "pretraining",
        corpus=CorpusSettings(paths=(str(folder / "pretraining.jsonl"),)),
        tokenizer=TokenizerSettings(vocab_size=VOCABULARY),
    )
    retro("index", _written(folder / "pretraining.toml", pretraining))
    tokenizer = folder / "pretraining" / "tokenizer" / "sentencepiece.model"
    for searched in ("reading", "passages"):
        config = Config(
            datastore=folder / searched,
            corpus=CorpusSettings(paths=(str(folder / f"{searched}.jsonl"),), split=(1, 0, 0)),
            tokenizer=TokenizerSettings(kind="sentencepiece", path=str(tokenizer)),
            embedder=EmbedderSettings(dimension=1024),  # a question has few words (docs/results/passage-retrieval.md)
            index=IndexSettings(factory="Flat"),
        )
        file = _written(folder / f"{searched}.toml", config)
        for stage in ("chunk", "embed", "train-index", "add"):  # chunks need no neighbors here: questions search
            retro("index", file, "--stage", stage)


def train(folder: Path, name: str, phase: str, steps: int, threads: int, compiled: bool) -> None:
    """The run FOLDER/PHASE."""
    chosen = PHASES[phase]
    steps = steps or chosen.steps
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
            init_from=str(folder / chosen.init_from) if chosen.init_from else "",
            num_threads=threads,
            compile="yes" if compiled else "no",
            eval_every=max(1, steps // 5),
            eval_tokens=2_000 if chosen.examples else 30_000,  # of answers, or of text
            checkpoint_every=max(1, steps // 5),
        ),
    )
    if chosen.examples:
        finetune = FinetuneSettings(
            examples=(folder / f"{chosen.examples}.jsonl",),
            format="questions",
            language=SETS[name].language,
            rerank=chosen.rerank,
            positives_first=True,
        )
        config = replace(config, finetune=finetune)
    retro("finetune" if chosen.examples else "train", _written(folder / f"{phase}.toml", config))


def score(folder: Path, name: str, k: int, questions: int) -> None:
    """FOLDER/score-PHASE.json of each run."""
    for phase in PHASES:
        out = folder / f"score-{phase}.json"
        if out.exists() or not (folder / phase).exists():
            continue
        arguments = {
            "passages": str(folder / "passages"),
            "k": "0",
            "max-questions": str(questions),
            "neighbor-passages": str(k),
            "rerank": "hybrid",
            "language": SETS[name].language,
            "max-tokens": "48",  # answers in Chinese are long
            "batch-size": "32",
            "output": str(out),
        }
        options = [part for key, value in arguments.items() for part in (f"--{key}", value)]
        retro("eval", "qa", str(folder / phase), str(folder / "test.jsonl"), "--gold", *options)


def table(folder: Path, name: str) -> list[str]:
    """What `score` has measured, as Markdown: a row for each mode, a column for each run."""
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


def _written(file: Path, config: Config) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(config))
    return str(file)


def main() -> None:
    """One of the four parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["build", "pretrain", "finetune", "score"])
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--clozes", type=int, default=1, help="cloze questions of a passage of about 60 words")
    parser.add_argument("--corpus-bytes", type=int, default=6_000_000, help="of the corpora beside the passages")
    parser.add_argument("--steps", type=int, default=50, help="of each run, at most; 0: as many as the results are of")
    parser.add_argument("--questions", type=int, default=50, help="of each set that are asked; 0: all")
    parser.add_argument("--k", type=int, default=4, help="passages as neighbors when scored")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if options.part == "build" and options.data is None:
        parser.error("build needs DATA")
    say(measured_on())
    for name in options.sets:
        folder = options.output / name
        say(f"{name}: {options.part}")
        if options.part == "build":
            build(options.data, folder, name, options.clozes, options.corpus_bytes)
        elif options.part == "score":
            score(folder, name, options.k, options.questions)
            print("\n".join(table(folder, name)), flush=True)
        else:
            for phase in ("pretrained",) if options.part == "pretrain" else ("practised", "finetuned"):
                train(folder, name, phase, options.steps, options.threads, options.compile)


if __name__ == "__main__":
    main()
