"""Read conversations from files of instructions or messages.

    {"instruction": "…", "input": "…", "output": "…"}                                   a user's message and its answer
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}

A file may have lines of both kinds, in any language. Other lines raise an error that names file and line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexing.corpus.json_lines import read_json_lines
from indexing.store.errors import InputError
from retro.inference.chat_template import Conversation, Message

ROLES = ("system", "user", "assistant")


def read_conversations(path: Path) -> Iterator[tuple[int, Conversation]]:
    """Yield each conversation of a file with its line number, from 1.

    Raises:
        InputError: the file cannot be read, or a line is not a conversation; the message names file and line.
    """
    for number, row in read_json_lines(path, "a file of instructions or conversations"):
        where = f"{path}:{number}"
        if not isinstance(row, dict) or ("messages" in row) == ("instruction" in row):
            description = (
                f"has {', '.join(map(repr, row)) or 'no keys'}" if isinstance(row, dict) else "is not an object"
            )
            raise InputError(f'{where} {description}: a line has "messages", or "instruction" and "output".')
        yield number, _messages(where, row["messages"]) if "messages" in row else _instruction(where, row)


def _instruction(where: str, row: dict[str, Any]) -> Conversation:
    texts = {key: row.get(key) or "" for key in ("instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str) or (key != "input" and not text.strip()):
            raise InputError(f'{where}: "{key}" is {row.get(key)!r}: it must be a text.')
    request = "\n".join(text.strip() for text in (texts["instruction"], texts["input"]) if text.strip())
    return Message("user", request), Message("assistant", texts["output"].strip())


def _messages(where: str, rows: object) -> Conversation:
    if not isinstance(rows, list) or not rows:
        raise InputError(f'{where}: "messages" must be a list of objects with "role" and "content".')
    messages = tuple(_message(f"{where}: message {index}", row) for index, row in enumerate(rows, 1))
    if messages[-1].role != "assistant":
        raise InputError(f"{where}: the last message is of {messages[-1].role!r}: it must be the assistant's answer.")
    return messages


def _message(where: str, row: object) -> Message:
    role, content = (row.get("role"), row.get("content")) if isinstance(row, dict) else (None, None)
    if role not in ROLES:
        raise InputError(f'{where} has the "role" {role!r}: accepted are {", ".join(ROLES)}.')
    if not isinstance(content, str) or not content.strip():
        raise InputError(f'{where} has the "content" {content!r}: it must be a text.')
    return Message(role, content.strip())
