"""Reader for question sets: JSON Lines (also .gz or .zst) with a question, its answers, and the documents with an
answer.

{"id": "…", "question": "…", "answers": ["…", …], "positive_ids": ["…", …]}
{"id": "…", "question": "…", "unanswerable": true}
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from indexing.corpus.json_lines import read_json_lines
from indexing.store.errors import InputError


@dataclass(frozen=True)
class Question:
    """One question of a question set.

    Attributes:
        id: id in the file, or the line number if the file has no id.
        question: text of the question.
        answers: right answers.
        positive_ids: ids of documents with an answer; empty if the file does not name any.
        unanswerable: True if no document has an answer; then there are no right answers.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    positive_ids: tuple[str, ...] = ()
    unanswerable: bool = False


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a file in order.

    Raises:
        InputError: the file cannot be read or has no question, or a line is invalid; the message names file and line.
    """
    questions = [question for _, question in read_numbered_questions(path)]
    if not questions:
        raise InputError(f"{path} has no questions.")
    return questions


def read_numbered_questions(path: Path) -> Iterator[tuple[int, Question]]:
    """Yield the questions of a file with their line numbers, from 1. The file may be empty."""
    for line, row in read_json_lines(path, "a question set"):
        yield line, _question(f"{path}:{line}", line, row)


def _question(where: str, line: int, row: object) -> Question:
    if not isinstance(row, dict) or not isinstance(row.get("question"), str) or not row["question"].strip():
        raise InputError(
            f'{where} has no "question". Each line is an object with "question" (text) and "answers" (texts); "positive_ids" '
            "(ids of the documents with an answer) is needed by `retro eval retrieval` and by `retro eval qa --gold`."
        )
    lists = {}
    for key in ("answers", "positive_ids"):
        values = row.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InputError(f'{where}: "{key}" must be a list of texts.')
        lists[key] = tuple(values)
    unanswerable = row.get("unanswerable", False)
    if not isinstance(unanswerable, bool) or (unanswerable and (lists["answers"] or lists["positive_ids"])):
        raise InputError(
            f'{where}: "unanswerable" must be true or false, and true only without "answers" and "positive_ids".'
        )
    return Question(str(row.get("id", line)), row["question"], lists["answers"], lists["positive_ids"], unanswerable)
