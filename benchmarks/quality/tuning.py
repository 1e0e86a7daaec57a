"""Full fine-tuning, LoRA and a prefix at equal steps: the loss of answers to held-out questions about a passage.

    retro import MODEL --output base.safetensors
    python -m benchmarks.quality.tuning base.safetensors FOLDER ... --output RUNS [--steps 40]
    python -m benchmarks.quality.tuning tiny-retro FOLDER ... --output RUNS
    python -m benchmarks.quality.tuning summary --output RUNS

Each FOLDER has passages (`id`, `text`) and questions (`question`, `answers`, `positive_ids`), as in the project's
shared data. An example is the part of the passage around the answer, the question and the answer. An imported model has
retrieval OFF. With `tiny-retro`, a small RETRO is first trained on the passages, whose datastore it also reads while it
is fine-tuned. Finished runs are kept, so the benchmark resumes.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, budget, markdown, model_parser, say, write
from indexing.corpus.documents import CorpusSettings
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files
from pipelines.cli.main import main as retro
from pipelines.cli.results import Table
from retro.checkpoints.checkpoint import open_checkpoint
from retro.evaluation.question_sets import read_questions

RETRO = "tiny-retro"
LORA = {"lora.rank": "8"}
PREFIX = {"model.attention.prefix-tokens": "16"}
BEFORE = {"before": {"train.weights": "none", "lora.rank": "1", "train.lr": "1e-30", "train.steps": "1", "train.eval-every": "1", "train.warmup-steps": "0"}}  # fmt: skip
METHODS: dict[str, dict[str, str]] = {
    **BEFORE,
    "all weights, 5e-5": {"train.weights": "all", "train.lr": "5e-5"},
    "LoRA of rank 8, 1e-3": {"train.weights": "none", "train.lr": "1e-3", **LORA},
    "16 prefix tokens, 1e-2": {"train.weights": "none", "train.lr": "1e-2", **PREFIX},
    "16 prefix tokens, 5e-2": {"train.weights": "none", "train.lr": "5e-2", **PREFIX},
}
RETRO_METHODS: dict[str, dict[str, str]] = {
    **BEFORE,
    "all weights, 1e-3": {"train.weights": "all", "train.lr": "1e-3"},
    "LoRA of rank 8, 3e-3": {"train.weights": "none", "train.lr": "3e-3", **LORA},
    "16 prefix tokens, 1e-2": {"train.weights": "none", "train.lr": "1e-2", **PREFIX},
    "retrieval, 1e-3": {"train.weights": "retrieval", "train.lr": "1e-3"},
    "16 prefix tokens, 5e-2": {"train.weights": "none", "train.lr": "5e-2", **PREFIX},
    "LoRA of rank 8, 1e-2": {"train.weights": "none", "train.lr": "1e-2", **LORA},
    "all weights, 3e-4": {"train.weights": "all", "train.lr": "3e-4"},
}
"""Name and learning rate → settings of `retro finetune`."""


def write_examples(folder: Path, file: Path, characters: int) -> None:
    """Write the questions as instructions: a part of the passage around the answer, the question, the answer."""
    (passages,) = folder.glob("passages*")
    (questions,) = folder.glob("questions*")
    files = list_files(CorpusSettings(paths=(str(passages),)))
    texts = {one.id: one.text for part in files for one in read_documents(part, CorpusSettings(), on_problem=print)}
    with open(file, "w") as out:
        for question in read_questions(questions):
            text, answer = texts[question.positive_ids[0]], question.answers[0]
            if (at := text.find(answer)) >= 0:
                start = max(0, at - characters // 2)
                row = {"instruction": text[start : start + characters], "input": question.question, "output": answer}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")


def common(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Settings of all fine-tuning runs."""
    return {
        "datastore": str(folder / "datastore"), "finetune.examples": str(folder / "examples.jsonl"), "data.sequence-length": "384",
        "train.batch-size": "2", "train.steps": str(options.steps), "train.warmup-steps": "4", "train.lr-schedule": "constant",
        "train.weight-decay": "0", "train.eval-every": str(options.steps), "train.eval-tokens": "1000",
        "train.checkpoint-every": str(options.steps),
    }  # fmt: skip


def imported(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Settings of an imported model, with its tokenizer and without retrieval."""
    tokenizer = open_checkpoint(Path(options.base)).settings["imported"]["folder"]
    text = folder / "passages.jsonl"
    text.write_text(json.dumps({"id": "0", "text": "Fine-tuning reads the examples alone."}) + "\n")
    datastore = {
        "corpus.paths": str(text), "corpus.split": "1 0 0", "tokenizer.kind": "huggingface", "tokenizer.path": tokenizer
    }  # fmt: skip
    verb(folder, "index", {"stage": "chunk", "datastore": str(folder / "datastore"), **datastore})
    model = {"data.k": "0", "model.preset": "base", "model.retrieval.cca-layers": "", "train.init-from": options.base}
    return {**datastore, **model, "finetune.template": tokenizer}


def trained_here(folder: Path, source: Path, options: argparse.Namespace) -> dict[str, str]:
    """Settings of a RETRO that this trains on the passages."""
    (passages,) = source.glob("passages*")
    model = {"corpus.paths": str(passages), "model.preset": "tiny", "data.k": "2"}
    run = folder / "retro"
    train = {
        "run": str(run), "data.sequence-length": "512", "train.batch-size": "4", "train.steps": str(options.pretraining_steps),
        "train.warmup-steps": "10", "train.lr": "2e-3", "train.eval-every": "0", "train.eval-tokens": "1000", "train.checkpoint-every": "100",
    }  # fmt: skip
    datastore = {"datastore": str(folder / "datastore")}
    verb(folder, "index", datastore | model)
    verb(folder, "train", datastore | model | train)
    return {**model, "train.init-from": str(run)}


def verb(folder: Path, name: str, values: dict[str, str]) -> None:
    """Run a verb with settings."""
    config = folder / "config.toml"
    config.write_text("")
    flags = [part for key, value in values.items() for part in (f"--{key}", *value.split())]
    assert retro([name, str(config), *flags]) == 0


def run(source: Path, folder: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Fine-tune with each method; returns the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_examples(source, folder / "examples.jsonl", options.characters)
    model = trained_here(folder, source, options) if options.base == RETRO else imported(folder, options)
    methods, rows = RETRO_METHODS if options.base == RETRO else METHODS, []
    for number, (name, flags) in enumerate(limit.each([*methods.items()], "method")):
        of_run = folder / f"run-{number}"
        if number:  # the search of the neighbors takes a minute
            shutil.copytree(folder / "run-0" / "examples", of_run / "examples", dirs_exist_ok=True)
        verb(folder, "finetune", common(folder, options) | model | flags | {"run": str(of_run)})
        for weights in of_run.glob("checkpoints/*/*.safetensors"):
            weights.unlink()  # a run of all weights holds 1.6 GB
        metrics = list(map(json.loads, (of_run / "metrics.jsonl").read_text().splitlines()))
        last = {key: value for line in metrics for key, value in line.items()}
        losses = {mode: last.get(f"held_out_loss_{mode}") for mode in ("off", "on")}
        rows.append({"method": name, "held_out_loss": losses, "tokens_per_second": last["tokens_per_second"]})
    return {"steps": options.steps, "rows": rows}


def summary(folder: Path) -> None:
    """Print the losses as Markdown."""
    sets = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    losses = {
        f"{name} {mode.upper()}": {row["method"]: row["held_out_loss"][mode] for row in one["rows"]}
        for name, one in sets.items()
        for mode in ("off", "on")
        if one["rows"][0]["held_out_loss"][mode] is not None
    }
    methods = dict.fromkeys((*METHODS, *RETRO_METHODS))
    body = [[name, *(f"{rows[name]:.3f}" if name in rows else "" for rows in losses.values())] for name in methods]
    say(markdown(Table(["trained", *losses], body)))
    say(json.dumps({name: {key: one[key] for key in ("machine", "commit", "steps")} for name, one in sets.items()}))


def main() -> None:
    """Measure some sets of questions, or print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pretraining-steps", type=int, default=100, help="of 2,048 tokens, for the small RETRO")
    parser.add_argument("--characters", type=int, default=600, help="of the passage in an example; Chinese needs fewer")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    for folder in options.folders:
        name = f"{RETRO} {folder.name}" if options.base == RETRO else folder.name
        stored = options.output / f"{name}.json"
        if not stored.exists():
            write(stored, run(folder, options.output / name.replace(" ", "-"), options, limit))
    summary(options.output)


if __name__ == "__main__":
    main()
