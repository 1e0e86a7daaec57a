"""Instruction data: both formats may be mixed in a file; invalid lines are rejected with file and line."""

import json
from pathlib import Path

import pytest
import zstandard

from indexing.store.errors import InputError
from retro.finetuning.conversations import read_conversations
from retro.inference.chat_template import Message

ROWS = [
    {"instruction": "Add.", "input": "1 2", "output": " 3 "},
    {"instruction": "用中文问好。", "output": "你好！"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]  # fmt: skip


def test_lines_are_parsed_into_conversations(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl.zst"
    path.write_bytes(zstandard.compress("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()))
    assert list(read_conversations(path)) == [
        (1, (Message("user", "Add.\n1 2"), Message("assistant", "3"))),
        (3, (Message("user", "用中文问好。"), Message("assistant", "你好！"))),
        (5, (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello"))),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", r"is not JSON"),
        ("[]", r"is not an object: a line has \"messages\", or \"instruction\" and \"output\""),
        ('{"text": "a"}', r"has 'text': a line has \"messages\""),
        ('{"instruction": "a", "messages": []}', r"has 'instruction', 'messages': a line has"),
        ('{"instruction": "a", "output": ""}', r"\"output\" is '': it must be a text"),
        ('{"instruction": 1, "output": "b"}', r"\"instruction\" is 1: it must be a text"),
        ('{"messages": []}', r"\"messages\" must be a list"),
        ('{"messages": ["a"]}', r"message 1 has the \"role\" None: accepted are system, user, assistant"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', r"message 1 has the \"role\" 'tool'"),
        ('{"messages": [{"role": "user", "content": " "}]}', r"message 1 has the \"content\" ' '"),
        ('{"messages": [{"role": "user", "content": "a"}]}', r"the last message is of 'user'"),
    ],
)
def test_invalid_lines_are_rejected_with_their_number(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + row)
    with pytest.raises(InputError, match=rf"examples\.jsonl:2:? {words}"):
        list(read_conversations(path))


def test_an_unreadable_file_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl cannot be read"):
        list(read_conversations(tmp_path / "nowhere.jsonl"))
