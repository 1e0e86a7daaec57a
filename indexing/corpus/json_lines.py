"""Read JSON Lines, plain or compressed (.gz, .zst), with errors that name file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.streams import DAMAGED, StoredReader, unpacked
from indexing.store.errors import InputError
from indexing.store.files import parse_json

_LINE_BYTES = CorpusSettings.max_line_bytes


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """Yield the 1-based number and the value of each non-empty line.

    Args:
        path: the file.
        what: what the file should be, for messages, such as "a question set".

    Raises:
        InputError: the file cannot be read, or a line is not JSON or has more than 64 MiB; the message names file and
            line.
    """
    try:
        with open(path, "rb") as stored:
            stream = unpacked(StoredReader(stored), path.name.lower())[0]
            for line_number, line in enumerate(iter(lambda: stream.readline(_LINE_BYTES + 1), b""), 1):
                if len(line) > _LINE_BYTES:
                    raise InputError(f"{path}:{line_number} has more than {_LINE_BYTES:,} bytes. Name {what}.")
                if line.strip():
                    yield line_number, _parsed(f"{path}:{line_number}", line)
    except (OSError, *DAMAGED) as error:
        raise InputError(f"{path} cannot be read: {error}. Name {what}, .jsonl, .jsonl.gz or .jsonl.zst.") from error


def _parsed(where: str, line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}.") from error
