"""Answers of a chat model from passages: exact match, F1, questions without an answer, and the time to the first token.

    python -m benchmarks.quality.answers DATA --model MODEL --tokenizer FOLDER --output FOLDER [--sets squad_v11_dev …]

MODEL is a file of `retro add-retrieval` that copies from the whole datastore. DATA has a folder for each set, as for
`benchmarks.quality.passage_retrieval`. Of each set, random questions are asked in three modes: closed book, passages in
the prompt, passages and copying, and once more with the right passage first. Among them are questions of another set in
the same language, which the datastore does not answer. Datastores are built in FOLDER, and a stopped run goes on there.
Without `--model` only the share of both that get passages is measured.

`--first-token` measures the time to the first token of an answer with passages against the model's own time for the same
prompt, in turn.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_minutes, budget, say, seconds, write
from benchmarks.quality.passage_retrieval import SETS
from indexing.corpus.documents import CorpusSettings
from indexing.retrieval.retriever import Retriever
from indexing.tokenization.settings import TokenizerSettings
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import build
from pipelines.terminal.logger import setup_logging
from retro.evaluation.answer_journal import AnswerJournal
from retro.evaluation.question_answering import (
    Answered,
    ModePrompts,
    all_modes,
    found_passages,
    language_for,
    measure_answers,
    select,
)
from retro.evaluation.question_sets import Question, read_questions
from retro.evaluation.settings import QaSettings
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

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


def open_passages(work: Path, passages: Path, tokenizer: Path) -> Retriever:
    """Build a datastore with the model's tokenizer and all default stages, and open it."""
    config = Config(
        datastore=work,
        corpus=CorpusSettings(paths=(str(passages),), split=(1, 0, 0)),
        tokenizer=TokenizerSettings(kind="huggingface", path=str(tokenizer)),
    )
    build(config, make_executor(config.executor))
    return Retriever.open(work)


def asked_modes(modes: Iterator[ModePrompts]) -> Iterator[ModePrompts]:
    """Leave out neighbors of a prompt without passages, and copying with the right passage first."""
    for prompts in modes:
        if (not prompts.k or prompts.mode.passages) and not (prompts.mode.gold and prompts.mode.copying):
            yield prompts


def measure_set(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return a row for each mode, with the set and the share of questions that have passages."""
    passages = options.data / name / f"{SETS[name][0]}.jsonl.zst"
    retriever = open_passages(options.output / name, passages, options.tokenizer)
    settings = QaSettings(
        shots=options.shots,
        prompt_passages=options.passages,
        passage_tokens=options.passage_tokens,
        least_match=options.least_match,
        gold=options.model is not None,
    )
    drawn = draw(options.data, name, options.shots, options.questions, options.foreign)
    shots, questions = select(drawn, settings, passages)
    language = language_for(questions, settings)
    found = found_passages(retriever, questions, settings)
    given = np.array([bool(row) for row in found.prompts[False]])
    foreign = np.array([each.unanswerable for each in questions])
    kept = {"kept": float(given[~foreign].mean()), "kept_foreign": float(given[foreign].mean())}
    if options.model is None:
        return [{"set": name, **kept}]
    model = LanguageModel.open(options.model, retriever)
    modes = all_modes(model, questions, settings, language=language, shots=shots, found=found)
    identity = {"set": name, **vars(settings), "drawn": [each.id for each in drawn]}
    journal = AnswerJournal(options.output / f"{name}.jsonl", json.loads(json.dumps(identity)))
    answered = measure_answers(model, asked_modes(modes), questions, settings, language, journal)
    return [{"set": name} | kept | row.as_json(0, answered[0]) | _paired(row, answered) for row in answered]


def _paired(row: Answered, answered: list[Answered]) -> dict[str, Any]:
    """The change of F1 against passages without copying, with its interval."""
    (plain,) = (each for each in answered if each.mode.passages and not (each.mode.copying or each.mode.gold))
    against = row.as_json(0, plain)
    return {f"f1_against_passages{end}": against[f"f1_gain{end}"] for end in ("", "_low", "_high")}


def first_token(options: argparse.Namespace, name: str, rounds: int = 8) -> dict[str, Any]:
    """Median seconds to the first token of prompts with passages: the model alone, and with search and copying."""
    passages = options.data / name / f"{SETS[name][0]}.jsonl.zst"
    retriever = open_passages(options.output / name, passages, options.tokenizer)
    settings = QaSettings(prompt_passages=4, passage_tokens=1024, least_match=0.0)
    questions = draw(options.data, name, 0, rounds, 0)
    model = LanguageModel.open(options.model, retriever)
    modes = list(
        all_modes(
            model,
            questions,
            settings,
            language=language_for(questions, settings),
            found=found_passages(retriever, questions, settings),
        )
    )
    plain, copying = (
        next(each for each in modes if each.mode.passages and each.mode.copying == copies) for copies in (False, True)
    )
    one = GenerationSettings(max_tokens=1, temperature=0)

    ratios = []
    for row in [0, *range(rounds)]:  # the first one warms up
        given = None if copying.given is None else [copying.given[row]]
        inserted = copying.inserted and [copying.inserted[row]]
        alone = seconds(partial(_exhaust, model.generate, [plain.prompts[row]], one))
        found = seconds(partial(retriever.passages, questions[row].question, 4, tokens=1024))
        copied = seconds(
            partial(_exhaust, model.generate, [copying.prompts[row]], one, copying.k, given, inserted=inserted)
        )
        ratios.append((found + copied) / alone)
        say(
            f"{len(plain.prompts[row]):,} tokens: alone {alone:.2f} s, search {found:.3f} s, with copying {copied:.2f} s"
        )
    ratios = ratios[1:]
    return {"set": name, "first_token": float(np.median(ratios)), "ratios": ratios}


def _exhaust(generate: Callable[..., Iterator[Any]], *arguments: Any, **named: Any) -> None:
    list(generate(*arguments, **named))


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table of docs/results/question-answering.md."""
    say(
        "| set | mode | contains the answer | exact match | F1 | change of F1 | hit | verbatim | without an answer: verbatim | have passages |"
    )
    say("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = [f"{100 * row[name]:.1f}" for name in ("contains", "exact_match", "f1")]
        numbers.append(
            f"{100 * row['f1_gain']:+.1f} ({100 * row['f1_gain_low']:.1f} to {100 * row['f1_gain_high']:.1f})"
        )
        optional = (row["hit"], row["verbatim"], row["unanswerable_verbatim"])
        numbers += ["" if value is None else f"{100 * value:.1f}" for value in optional]
        numbers.append(f"{100 * row['kept']:.0f}, {100 * row['kept_foreign']:.0f}" if row["passages"] else "")
        say(f"| {row['set']} | {row['mode']} | {' | '.join(numbers)} |")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, help="file of retro add-retrieval")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder for datastores, answers and results")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["squad_v11_dev"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--foreign", type=int, default=50, help="questions that the datastore does not answer")
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--passage-tokens", type=int, default=512)
    parser.add_argument("--least-match", type=float, default=None)
    parser.add_argument("--first-token", action="store_true", help="measure times instead of answers")
    add_minutes(parser, 0)
    options = parser.parse_args()
    setup_logging()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.first_token:
        rows = [first_token(options, name) for name in options.sets]
        say("\n".join(f"{row['set']}: first token {row['first_token']:.2f} times the model's own" for row in rows))
    else:
        rows = [row for name in budget(options).each(options.sets, "set") for row in measure_set(options, name)]
        for row in rows if options.model is None else ():
            say(
                f"{row['set']}: {100 * row['kept']:.1f}% of its questions get passages, {100 * row['kept_foreign']:.1f}% of foreign ones"
            )
        if options.model:
            print_rows(rows)
    write(options.output / ("first_token.json" if options.first_token else "answers.json"), {"rows": rows})


if __name__ == "__main__":
    main()
