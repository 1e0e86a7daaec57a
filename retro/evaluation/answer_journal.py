"""Answers of an unfinished measurement, so that the same command continues after the last one.

identity of the measurement      first line
mode, answers of a batch         one line each, in the order of the questions
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class AnswerJournal:
    """The answers of each mode that were given so far.

    Attributes:
        file: None = nothing is kept.
        identity: everything that answers depend on, as plain values; answers of another identity are not used.
        answers: mode → its answers, from the first question on.
    """

    file: Path | None
    identity: dict[str, Any]
    answers: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file, or begin it."""
        if self.file is None:
            return
        lines = list(_lines(self.file)) if self.file.is_file() else []
        known = json.loads(json.dumps(self.identity))
        if lines[:1] == [known]:
            for line in lines[1:]:
                self.answers.setdefault(line["mode"], []).extend(line["answers"])
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Written again: the last line may be a part of one.
        rows = [{"mode": mode, "answers": answers} for mode, answers in self.answers.items()]
        self.file.write_text("".join(json.dumps(row) + "\n" for row in [known, *rows]), encoding="utf-8")

    def add(self, mode: str, answers: Sequence[str]) -> None:
        """Keep the next answers of a mode."""
        self.answers.setdefault(mode, []).extend(answers)
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"mode": mode, "answers": list(answers)}) + "\n")

    def remove(self) -> None:
        """Remove the file: the measurement is finished."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _lines(file: Path) -> list[Any]:
    """The lines of a journal up to the first one that was not finished."""
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
