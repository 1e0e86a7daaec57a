"""Full fine-tuning, LoRA and a prefix at equal steps: the loss of answers to held-out questions about a passage.

    retro import MODEL --output base.safetensors
    python -m benchmarks.quality.tuning base.safetensors FOLDER ... --output RUNS [--steps 40]
    python -m benchmarks.quality.tuning summary --output RUNS

Each FOLDER has passages (`id`, `text`) and questions (`question`, `answers`, `positive_ids`), as in the project's shared data. An example is the
part of the passage around the answer, the question and the answer. Retrieval is OFF. Finished runs are kept, so the benchmark resumes.
"""

import argparse
import json
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

METHODS = {
    "before": ["--train.weights", "none", "--lora.rank", "1", "--train.lr", "1e-30"],
    "all weights, 5e-5": ["--train.weights", "all", "--train.lr", "5e-5"],
    "LoRA of rank 8, 1e-3": ["--train.weights", "none", "--lora.rank", "8", "--train.lr", "1e-3"],
    "16 prefix tokens, 1e-2": [
        "--train.weights",
        "none",
        "--model.attention.prefix-tokens",
        "16",
        "--train.lr",
        "1e-2",
    ],
    "16 prefix tokens, 5e-2": [
        "--train.weights",
        "none",
        "--model.attention.prefix-tokens",
        "16",
        "--train.lr",
        "5e-2",
    ],
}
"""Name and learning rate → options of `retro finetune`."""


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


def settings(base: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """Options of all runs."""
    tokenizer = open_checkpoint(base).settings["imported"]["folder"]
    every = str(options.steps)
    values = {
        "datastore": str(folder / "datastore"), "corpus.paths": str(folder / "passages.jsonl"), "corpus.split": "1 0 0",
        "tokenizer.kind": "huggingface", "tokenizer.path": tokenizer, "finetune.examples": str(folder / "examples.jsonl"),
        "finetune.template": tokenizer, "data.sequence-length": "384", "data.k": "0", "model.preset": "base",
        "model.retrieval.cca-layers": "", "train.init-from": str(base), "train.batch-size": "2", "train.steps": every,
        "train.warmup-steps": "4", "train.lr-schedule": "constant", "train.weight-decay": "0", "train.eval-every": every,
        "train.eval-tokens": "1000", "train.checkpoint-every": every,
    }  # fmt: skip
    return [part for key, value in values.items() for part in (f"--{key}", *value.split())]


def run(base: Path, source: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Train with each method; returns the rows."""
    folder = options.output / source.name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.toml"
    config.write_text("")
    write_examples(source, folder / "examples.jsonl", options.characters)
    (folder / "passages.jsonl").write_text(
        json.dumps({"id": "0", "text": "Fine-tuning reads the examples alone."}) + "\n"
    )
    shared = settings(base, folder, options)
    assert retro(["index", str(config), "--stage", "chunk", *shared]) == 0
    rows = []
    for number, (name, flags) in enumerate(limit.each([*METHODS.items()], "method")):
        of_run = folder / f"run-{number}"
        one = ["--train.steps", "1", "--train.eval-every", "1", "--train.warmup-steps", "0"] if name == "before" else []
        assert retro(["finetune", str(config), "--run", str(of_run), *shared, *flags, *one]) == 0
        for weights in of_run.glob("checkpoints/*/*.safetensors"):
            weights.unlink()  # a run of all weights holds 1.6 GB
        metrics = list(map(json.loads, (of_run / "metrics.jsonl").read_text().splitlines()))
        loss = [line["held_out_loss_off"] for line in metrics if "held_out_loss_off" in line][-1]
        rate = [line["tokens_per_second"] for line in metrics if "tokens_per_second" in line][-1]
        rows.append({"method": name, "held_out_loss": loss, "tokens_per_second": rate})
    return {"steps": options.steps, "rows": rows}


def summary(folder: Path) -> None:
    """Print the losses as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    by_set = {name: {row["method"]: row["held_out_loss"] for row in one["rows"]} for name, one in found.items()}
    body = [
        [method, *(f"{rows[method]:.3f}" if method in rows else "" for rows in by_set.values())] for method in METHODS
    ]
    say(markdown(Table(["trained", *found], body)))
    say(json.dumps({name: {key: one[key] for key in ("machine", "commit", "steps")} for name, one in found.items()}))


def main() -> None:
    """Measure some sets of questions, or print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--characters", type=int, default=600, help="of the passage in an example; Chinese needs fewer")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    for folder in options.folders:
        stored = options.output / f"{folder.name}.json"
        if not stored.exists():
            write(stored, run(Path(options.base), folder, options, limit))
    summary(options.output)


if __name__ == "__main__":
    main()
