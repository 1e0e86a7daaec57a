"""Questions to a model that people have: exact match and F1, closed book, with passages in the prompt, as neighbors, and both.

The parts `prompt N` and `reads N` compare N passages in the prompt with N passages that the decoder reads with its own attention
(`model.retrieval.reader`), without a copy head.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --chunk-length 64 --output smollm2.safetensors
    python -m benchmarks.quality.smollm2_questions smollm2.safetensors DATA --output FOLDER [--sets squad_v11_dev …]
    python -m benchmarks.quality.smollm2_questions summary --output FOLDER

DATA contains a folder for each set, as for `passage_retrieval`. For each set: `retro index` of all passages, `retro
add-retrieval`, then questions from the whole file at equal distances, after solved questions of the same file. Finished modes
are kept in FOLDER, so the script resumes. `summary` prints the tables.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import budget, markdown, measured_on, model_parser, peak_growth, say, write
from benchmarks.quality.passage_retrieval import SETS
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.neighbors.search import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.cli import main as retro
from pipelines.config import Config
from pipelines.evaluation.question_answering import (
    ModePrompts,
    all_modes,
    answer,
    found_passages,
    language_for,
    measure_answers,
    open_model,
)
from pipelines.evaluation.settings import QaSettings
from pipelines.results import Table
from pipelines.settings.toml_file import to_toml
from pipelines.terminal.logger import setup_logging
from retro.checkpoints.checkpoint import open_checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.evaluation.question_sets import Question, read_questions
from retro.inference.language_model import LanguageModel
from retro.model.settings import updated

HYBRID = QaSettings(k=0, prompt_passages=2, neighbor_passages=4, gold=True, retrieval="hybrid")
PARTS = {
    "hybrid": HYBRID,
    "sparse": replace(HYBRID, retrieval="sparse", neighbor_passages=0, gold=False),
    "dense": replace(HYBRID, retrieval="dense", neighbor_passages=0, gold=False),
    "lines": replace(HYBRID, neighbor_passages=0),
}
"""Ways to find passages; `lines`: hybrid, asked without the chat template, as base models are."""
PARTS |= {f"prompt {n}": replace(HYBRID, prompt_passages=n, neighbor_passages=0, gold=False) for n in (1, 4, 12)}
READS = {f"reads {n}": replace(HYBRID, prompt_passages=0, neighbor_passages=n, gold=False) for n in (1, 4, 20)}
PARTS |= READS

COSTS = {
    "CPU s": "seconds",
    "MB": "megabytes",
    "tokens of the prompt": "prompt_tokens",
    "tokens of neighbors": "neighbor_tokens",
}
"""Costs of a question, and their keys: means, and the memory of a question that is answered alone."""

FITTED_TOKENS = 5_000
"""Tokens that the copy head is fitted to."""


def build(name: str, passages: Path, base: Path, folder: Path) -> tuple[Path, Path]:
    """Build a datastore of the passages, and add retrieval to the model. Returns both paths."""
    datastore, file = folder / name, folder / f"{name}.safetensors"
    opened = open_checkpoint(base)
    config = Config(
        datastore=datastore,
        skip_stages=("suffixes", "votes"),  # with votes, `retro add-retrieval` adds the whole datastore as a source too
        corpus=CorpusSettings(paths=(str(passages),), split=(1, 0, 0)),
        tokenizer=TokenizerSettings(kind="huggingface", path=opened.settings["imported"]["folder"]),
        chunks=ChunkSettings(chunk_length=opened.model.chunk_length),
        neighbors=NeighborSettings(rerank="tokens"),
    )
    if not (datastore / "manifest.json").exists():
        (folder / f"{name}.toml").write_text(to_toml(config))
        assert retro(["index", str(folder / f"{name}.toml")]) == 0
    if not file.exists():
        options = ["--datastore", str(datastore), "--output", str(file), "--tokens", str(FITTED_TOKENS)]
        assert retro(["add-retrieval", str(base), *options]) == 0
    return datastore, file


def reading(base: Path, folder: Path) -> Path:
    """The model whose decoder reads neighbors, as a file."""
    file, opened = folder / "reads.safetensors", open_checkpoint(base)
    if not file.exists():
        model = json.loads(json.dumps(asdict(updated(opened.model, {"retrieval.reader": "decoder"}))))
        write_exported(*exported(replace(opened, settings=opened.settings | {"model": model})), file)
    return file


def chosen(questions: list[Question], count: int, num_shots: int) -> tuple[list[Question], list[Question]]:
    """Return solved questions and others to ask, both at equal distances in the file."""
    step = max(1, len(questions) // count)
    ask = list(range(step // 2, len(questions), step))[:count]
    rest = [number for number in range(len(questions)) if number not in {*ask}]
    shots = [rest[len(rest) * number // num_shots] for number in range(num_shots)]
    return [questions[number] for number in shots], [questions[number] for number in ask]


def modes_of(
    part: str, model: LanguageModel, retriever: Retriever, questions: list[Question], shots: list[Question]
) -> tuple[LanguageModel, list[ModePrompts]]:
    """Return the modes of a part and the model that answers in them. Only `hybrid` and `lines` are measured closed book."""
    settings, language = PARTS[part], language_for(questions, PARTS[part])
    if part == "lines":
        without = model.checkpoint.settings | {"imported": {}}
        model = replace(model, checkpoint=replace(model.checkpoint, settings=without))
    passages = found_passages(retriever, questions, settings)
    modes = list(all_modes(model, questions, settings, language=language, shots=shots, passages=passages))
    return model, [mode for mode in modes if mode.texts or part in ("hybrid", "lines")]


def run(base: Path, name: str, part: str, options: argparse.Namespace) -> None:
    """Measure one part of one set; modes that are finished are skipped."""
    stored = options.output / f"{name}.json"
    finished: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    finished = {key: value for key, value in finished.items() if key not in measured_on()}
    passages, file_of_questions = (options.data / name / f"{file}.jsonl.zst" for file in SETS[name])
    datastore, file = build(name, passages, base, options.output)
    shots, questions = chosen(read_questions(file_of_questions), options.questions, options.shots)
    file = reading(base, options.output) if part in READS else file
    model, retriever = open_model(file, datastore, PARTS[part], "auto")
    assert retriever is not None
    model, modes = modes_of(part, model, retriever, questions, shots)
    finished |= {"shots": len(shots), "precision": str(model.placement.dtype).removeprefix("torch.")}
    rows = finished.setdefault(part, [])
    for mode in sorted(modes, key=lambda mode: mode.mode.neighbors):
        if any(row["mode"] == mode.mode.name for row in rows):
            continue
        began = time.process_time()
        (answered,) = measure_answers(model, [mode], questions, PARTS[part], language_for(questions, PARTS[part]))
        row = answered.as_json(seed=0)
        row["seconds"] = (time.process_time() - began) / len(questions)
        row["prompt_tokens"] = sum(map(len, mode.prompts)) / len(questions)
        row["megabytes"] = megabytes(model, mode)
        row["neighbor_tokens"] = sum(int(lengths.sum()) for _, lengths in mode.given or ()) / len(questions)
        say(f"{name}, {part}, {row['mode']}: exact match {100 * row['exact_match']:.1f}, F1 {100 * row['f1']:.1f}")
        rows.append(row | {"answers": answered.answers})
        write(stored, finished)


def megabytes(model: LanguageModel, mode: ModePrompts) -> float:
    """Memory of one question that is answered alone, in MB: keys, values and activations, the largest of four questions."""

    def answer_one(number: int) -> None:
        given = None if mode.given is None else [mode.given[number]]
        answer(
            model,
            mode.prompts[number : number + 1],
            k=mode.mode.k,
            given=given,
            ends=mode.ends,
            max_tokens=8,
            batch_size=1,
        )

    answer_one(0)
    return max(peak_growth(partial(answer_one, number)) for number in range(4)) / 1e6


def summary(folder: Path) -> None:
    """Print a table for each set as Markdown."""
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text())
        body = []
        for part in PARTS:
            for row in stored.get(part, ()):
                figures = [
                    f"{100 * row[key]:.1f} ({100 * row[f'{key}_low']:.1f} to {100 * row[f'{key}_high']:.1f})"
                    for key in ("exact_match", "f1")
                ]
                held = "" if row["answer_in_passages"] is None else f"{100 * row['answer_in_passages']:.0f}%"
                found = "" if held == "" else PARTS[part].retrieval
                costs = (f"{row.get(key, math.nan):.2f}" for key in COSTS.values())
                body.append([part, row["mode"], found, held, *figures, *costs])
        count = next(stored[part][0]["questions"] for part in PARTS if part in stored)
        say(f"\n## {path.stem}, {count} questions, {stored['shots']} solved before each\n")
        columns = ["part", "mode", "passages by", "answer in passages", "exact match, %", "F1, %", *COSTS]
        say(markdown(Table(columns, body)))
        say(json.dumps({key: stored[key] for key in ("machine", "commit", "precision")}))


def main() -> None:
    """Measure sets, or print the tables."""
    parser = model_parser(__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sets", nargs="+", default=["squad_v11_dev"], choices=list(SETS))
    parser.add_argument("--parts", nargs="+", default=["hybrid", "sparse", "dense", "lines"], choices=list(PARTS))
    parser.add_argument("--questions", type=int, default=200, help="questions of each set")
    parser.add_argument("--shots", type=int, default=8, help="solved questions before each")
    options = parser.parse_args()
    if options.base == "summary":
        summary(options.output)
        return
    setup_logging()
    options.output.mkdir(parents=True, exist_ok=True)
    work = [(name, part) for part in options.parts for name in options.sets]
    for name, part in budget(options).each(work, "part"):
        run(Path(options.base), name, part, options)


if __name__ == "__main__":
    main()
