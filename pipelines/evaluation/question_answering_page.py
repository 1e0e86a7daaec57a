"""The HTML page of `retro eval qa`: the tables of its JSON file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.evaluation.question_answering import answers_table
from pipelines.reports.html import Section, settings_table, write_report
from pipelines.results import Table

_ANSWERS_SHOWN = 40
_MODES = (
    "Closed book: the question alone, retrieval OFF. ON: each chunk of the prompt finds its own neighbors. Passages in the prompt: "
    "passages found for the question, as text before it. Passages as neighbors: the same, read through cross-attention. "
    "The paper's prompt holds only the question, as in `retro finetune`; compare it only with itself. "
    "In brackets: range of 95% of bootstraps over questions. Answer in passages: percentage of questions with a right answer in "
    "their passages."
)


def write_qa_page(path: Path, results: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        results: the content of the JSON file.
    """
    rows = results["results"]
    modes = [row["mode"] for row in rows]
    answers = [
        [each["question"], " | ".join(each["right"]), *(each[mode] for mode in modes)]
        for each in results["answers"][:_ANSWERS_SHOWN]
    ]
    write_report(
        path,
        title="Question answering",
        subtitle=results["settings"]["checkpoint"],
        figures=[
            (f"F1, {row['mode']}", f"{100 * row['f1']:.2f}", f"exact match {100 * row['exact_match']:.2f}")
            for row in (rows[0], max(rows, key=lambda row: row["f1"]))
        ],
        sections=[
            Section("Exact match and F1, percent", text=_MODES, table=answers_table(rows)),
            Section("The first answers", table=Table(["question", "right", *modes], answers)),
            Section("Fingerprints", table=settings_table(results["fingerprints"], "fingerprint of")),
            Section("Settings", table=settings_table(results["settings"])),
        ],
    )
