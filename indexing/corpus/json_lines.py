"""JSON Lines, plain or packed (.gz, .zst), whose mistakes are told by file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexing.corpus.streams import DAMAGED, StoredReader, unpacked
from indexing.store.errors import InputError


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not empty, from 1, and the value that stands in it.

    Args:
        path: the file.
        what: it should be, "a question set" for example; for messages.

    Raises:
        InputError: the file cannot be read, or a line is no JSON; the message names file and line.
    """
    try:
        with open(path, "rb") as stored:
            for number, line in enumerate(unpacked(StoredReader(stored), path.name.lower())[0], 1):
                if line.strip():
                    yield number, _parsed(f"{path}:{number}", line)
    except (OSError, *DAMAGED) as error:
        raise InputError(f"{path} cannot be read: {error}. Name {what}, .jsonl, .jsonl.gz or .jsonl.zst.") from error


def _parsed(where: str, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}.") from error
