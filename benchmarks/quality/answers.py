"""Answers of a chat model from passages: on questions of a set, on questions that its datastore does not answer, and the
time to the first token.

    python -m benchmarks.quality.answers DATA --model MODEL --tokenizer FOLDER --output FOLDER [--sets squad_v11_dev …]

MODEL is a file of `retro add-retrieval` that copies from the whole datastore. DATA has a folder for each set, as for
`benchmarks.quality.passage_retrieval`. `retro eval qa` asks random questions of a set in all modes. Among them are questions
of another set in the same language (*foreign*), which this datastore does not answer. Datastores are built in the folder
`--output`. The same command continues a run that was stopped.

Without `--model` nothing is asked: the share of own and of foreign questions that get passages is counted.

`--first-token` measures the time to the first token of an answer with passages. The model's own time for the same prompt is
measured in turn.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_minutes, budget, say, seconds, write
from benchmarks.quality.passage_retrieval import SETS
from indexing.corpus.documents import CorpusSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.files import read_json
from indexing.tokenization.language import language_of
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main as retro
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import build
from pipelines.terminal.logger import setup_logging
from retro.evaluation.answer_metrics import contains, f1, mean_with_interval
from retro.evaluation.question_answering import (
    all_modes,
    found_passages,
    language_for,
)
from retro.evaluation.question_sets import Question, read_questions
from retro.evaluation.settings import QaSettings
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

SHOTS, PASSAGES, PASSAGE_TOKENS = 4, 2, 512  # what this small model answers best with
FOREIGN = {"squad_v11_dev": "qed_nq", "qed_nq": "squad_v11_dev", "cmrc2018": "drcd", "drcd": "cmrc2018"}


def draw(data: Path, name: str, shots: int, count: int, foreign: int) -> list[Question]:
    """Solved questions of a set, then other ones of it and foreign ones without an answer, mixed."""
    own, other = (list(read_questions(data / each / f"{SETS[each][1]}.jsonl.zst")) for each in (name, FOREIGN[name]))
    random.Random(0).shuffle(own)
    random.Random(1).shuffle(other)
    asked = own[shots : shots + count]
    asked += [replace(each, answers=(), positive_ids=(), unanswerable=True) for each in other[:foreign]]
    random.Random(2).shuffle(asked)
    return own[:shots] + asked


def open_passages(options: argparse.Namespace, name: str) -> Retriever:
    """Build the datastore of a set with the model's tokenizer and all default stages, and open it."""
    passages = options.data / name / f"{SETS[name][0]}.jsonl.zst"
    config = Config(
        datastore=options.output / name,
        corpus=CorpusSettings(paths=(str(passages),), split=(1, 0, 0)),
        tokenizer=TokenizerSettings(kind="huggingface", path=str(options.tokenizer)),
    )
    build(config, make_executor(config.executor))
    return Retriever.open(config.datastore)


def measure_set(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Count the questions that get passages and, with a model, let `retro eval qa` ask all of them."""
    retriever = open_passages(options, name)
    asked = draw(options.data, name, SHOTS, options.questions, options.foreign)
    settings = QaSettings(prompt_passages=PASSAGES, passage_tokens=PASSAGE_TOKENS)
    found = found_passages(retriever, asked[SHOTS:], settings).prompts[False]
    shares = {}
    for kind, is_foreign in (("own", False), ("foreign", True)):
        rows = [bool(row) for row, each in zip(found, asked[SHOTS:], strict=True) if each.unanswerable == is_foreign]
        shares[kind] = sum(rows) / max(1, len(rows))
    say(f"{name}: {shares['own']:.1%} of its questions get passages, {shares['foreign']:.1%} of foreign ones")
    if options.model:
        file = options.output / f"{name}.jsonl"
        file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in asked))
        passages = ["--passages", str(options.output / name), "--gold", "--shots", str(SHOTS)]
        passages += ["--prompt-passages", str(PASSAGES), "--passage-tokens", str(PASSAGE_TOKENS)]
        if retro(["eval", "qa", str(options.model), str(file), *passages, "--output", f"{file.with_suffix('.json')}"]):
            raise SystemExit(1)
    return shares


def copying_changes(files: Sequence[Path]) -> dict[str, tuple[float, float, float]]:
    """What copying changes in answers from passages, over the questions of all sets that have a right answer: the mean of
    the differences of F1 and of `contains`, in points, with 95% intervals. `gold first` has the right passage."""
    found = {}
    for gold in ("", ", gold first"):
        changes: dict[str, list[float]] = {"F1": [], "contains": []}
        for answer in (row for file in files for row in read_json(file)["answers"] if row["right"]):
            language = language_of([answer["question"]])
            mode = "chat, passages in the prompt"
            with_copying, without = answer[f"{mode}, copying{gold}"], answer[mode + gold]
            for name, score in (("F1", f1), ("contains", contains)):
                both = [float(score(text, answer["right"], language)) for text in (with_copying, without)]
                changes[name].append(100 * (both[0] - both[1]))
        for name, values in changes.items():
            found[f"{name}{gold}"] = mean_with_interval(np.array(values))
    return found


def first_token(options: argparse.Namespace, name: str, rounds: int = 8) -> dict[str, Any]:
    """Median seconds to the first token of prompts with passages: the model alone, and with search and copying."""
    retriever = open_passages(options, name)
    settings = QaSettings(prompt_passages=4, passage_tokens=1024, least_match=0.0)
    questions = draw(options.data, name, 0, rounds, 0)
    model = LanguageModel.open(options.model, retriever)
    found = found_passages(retriever, questions, settings)
    modes = all_modes(model, questions, settings, language=language_for(questions, settings), found=found)
    plain, copying = (each for each in modes if each.mode.passages)
    one = GenerationSettings(max_tokens=1, temperature=0)

    ratios = []
    for row in [0, *range(rounds)]:  # the first one warms up
        given = None if copying.given is None else [copying.given[row]]
        inserted = copying.inserted and [copying.inserted[row]]
        alone = seconds(partial(_exhaust, model.generate, [plain.prompts[row]], one))
        searched = seconds(partial(retriever.passages, questions[row].question, 4, tokens=1024))
        copied = seconds(
            partial(_exhaust, model.generate, [copying.prompts[row]], one, copying.k, given, inserted=inserted)
        )
        ratios.append((searched + copied) / alone)
        say(
            f"{len(plain.prompts[row]):,} tokens: alone {alone:.2f} s, search {searched:.3f} s, with copying {copied:.2f} s"
        )
    median = float(np.median(ratios[1:]))
    say(f"{name}: the first token takes {median:.2f} times the model's own time")
    return {"median": median, "ratios": ratios[1:]}


def _exhaust(generate: Callable[..., Iterator[Any]], *arguments: Any, **named: Any) -> None:
    list(generate(*arguments, **named))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, help="file of retro add-retrieval")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder for datastores, answers and results")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["squad_v11_dev"])
    parser.add_argument("--questions", type=int, default=24, help="about 15 seconds each on two cores")
    parser.add_argument("--foreign", type=int, default=8, help="questions that the datastore does not answer")
    parser.add_argument("--first-token", action="store_true", help="measure times instead of answers")
    add_minutes(parser)
    options = parser.parse_args()
    setup_logging()
    options.output.mkdir(parents=True, exist_ok=True)
    measure, file = (first_token, "first_token") if options.first_token else (measure_set, "with_passages")
    results = {name: measure(options, name) for name in budget(options).each(options.sets, "set")}
    changes = {}
    if options.model and not options.first_token:
        changes = copying_changes([options.output / f"{name}.json" for name in results])
        for name, values in changes.items():
            say("copying, {}: {:+.1f} ({:+.1f} to {:+.1f}) points".format(name, *values))
    write(options.output / f"{file}.json", {"sets": results, "copying": changes})


if __name__ == "__main__":
    main()
