"""Results of a verb: tables, text or JSON on standard output, and files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from indexing.store.files import write_json
from indexing.store.settings import settings
from pipelines.terminal.output import aligned, echo

Format = Literal["text", "json"]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, for the terminal and for HTML pages."""

    header: list[str]
    rows: list[list[str]]

    @property
    def text(self) -> str:
        """Lines with aligned columns."""
        return "\n".join(aligned([self.header, *self.rows]))

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether most of its cells begin with a number; pages align these to the right."""
        columns = [[row[column] for row in self.rows if row[column:]] for column in range(len(self.header))]
        return [sum(bool(re.match(r"[-+−]?\.?\d", cell)) for cell in cells) * 2 > len(cells) for cells in columns]


def print_result(result: object, text: str, form: Format) -> None:
    """Print a result on standard output: `text`, or `result` as JSON."""
    echo(json.dumps(result, ensure_ascii=False, indent=1) if form == "json" else text)


def _json_file(name: str) -> str:
    if name and Path(name).suffix != ".json":
        raise ValueError("should be a file name that ends in .json")
    return name


JsonFile = Annotated[str, AfterValidator(_json_file)]


@settings
class ResultOptions:
    """Where results are printed and written."""

    output: JsonFile = ""
    """JSON file to write the results to, `NAME.json`; empty: none."""
    format: Format = "text"
    """Print the results as `text` or as `json`."""

    def deliver(self, results: dict[str, Any], text: str) -> None:
        """Print results, and write them to `output`.

        Args:
            results: plain values, which JSON can hold.
            text: the same for people.
        """
        print_result(results, text, self.format)
        if self.output:
            Path(self.output).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(self.output), results)
