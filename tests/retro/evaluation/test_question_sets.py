"""Question sets are read from plain and compressed files; invalid lines are rejected with file and line."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from indexing.store.errors import InputError
from retro.evaluation.question_sets import Question, read_questions

ROWS = [
    {"id": "a", "question": "Who?", "answers": ["me", "I"], "positive_ids": ["p/1"], "title": "passed over"},
    {"question": "谁？", "answers": []},
    {"question": "Why?", "unanswerable": True},
]


@pytest.mark.parametrize(
    ("name", "pack"),
    [("q.jsonl", bytes), ("q.jsonl.gz", gzip.compress), ("q.JSONL.zst", zstandard.ZstdCompressor().compress)],
)
def test_lines_are_parsed_into_questions(tmp_path: Path, name: str, pack) -> None:
    path = tmp_path / name
    path.write_bytes(pack("\n\n".join(json.dumps(row) for row in ROWS).encode()))
    assert read_questions(path) == [
        Question("a", "Who?", ("me", "I"), ("p/1",)),
        Question("3", "谁？", (), ()),
        Question("5", "Why?", (), unanswerable=True),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question": "Who?"}\n{"question"', r"q\.jsonl:2.*JSON"),
        (b'{"question": " ", "answers": []}', r'q\.jsonl:1.*"question"'),
        (b"[1]", r'q\.jsonl:1.*"question"'),
        (b'{"question": "Who?", "answers": "me"}', r'q\.jsonl:1.*"answers"'),
        (b'{"question": "Who?", "unanswerable": 1}', r'q\.jsonl:1: "unanswerable" must be true or false'),
        (b'{"question": "Who?", "answers": ["I"], "unanswerable": true}', 'only without "answers"'),
        (b"\n", r"q\.jsonl"),
    ],
)
def test_invalid_lines_are_rejected_with_their_number(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_questions(path)


def test_missing_or_truncated_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        read_questions(tmp_path / "nowhere.jsonl")
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode())[:-10])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz"):
        read_questions(path)
