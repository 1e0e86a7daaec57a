"""Read JSON Lines, plain or compressed (.gz, .zst), with errors that name file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexing.corpus.streams import DAMAGED, StoredReader, unpacked
from indexing.store.errors import InputError
from indexing.store.files import parse_json


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """Yield the 1-based number and the value of each non-empty line.

    Args:
        path: the file.
        what: what the file should be, for messages, such as "a question set".

    Raises:
        InputError: the file cannot be read, or a line is not JSON; the message names file and line.
    """
    try:
        with open(path, "rb") as stored:
            for line_number, line in enumerate(unpacked(StoredReader(stored), path.name.lower())[0], 1):
                if line.strip():
                    yield line_number, _parsed(f"{path}:{line_number}", line)
    except (OSError, *DAMAGED) as error:
        raise InputError(f"{path} cannot be read: {error}. Name {what}, .jsonl, .jsonl.gz or .jsonl.zst.") from error


def _parsed(where: str, line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}.") from error
