"""What a verb has found: printed as text or as JSON, and written to a file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexing.store.errors import InputError
from indexing.store.files import write_json
from pipelines.terminal import echo

Format = Literal["text", "json"]


def print_result(result: Any, text: str, form: Format) -> None:
    """Print a result on standard output: `text`, or `result` as JSON."""
    echo(json.dumps(result, ensure_ascii=False, indent=1) if form == "json" else text)


@dataclass(frozen=True)
class ResultOptions:
    """Where results are printed and written."""

    output: str = ""
    """JSON file to write the results to, `NAME.json`; empty: none."""
    format: Format = "text"
    """Print the results as `text` or as `json`."""

    def __post_init__(self) -> None:
        if self.output and Path(self.output).suffix != ".json":
            raise InputError(f"output = {self.output!r}: must be a file name that ends in .json.")

    def deliver(
        self,
        results: dict[str, Any],
        text: str,
        write_page: Callable[[Path, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Print results, and write them to `output`.

        Args:
            results: plain values, which JSON can hold.
            text: the same for people.
            write_page: writes an HTML page of the results next to the JSON file, as `NAME.html`.
        """
        print_result(results, text, self.format)
        if not self.output:
            return
        write_json(Path(self.output), results)
        if write_page is not None:
            page = Path(self.output).with_suffix(".html")
            write_page(page, results)
            if self.format == "text":
                echo(f"report: {page}")
