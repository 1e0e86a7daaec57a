"""`retro plan gain`: three measured sizes, a line beyond them, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.corpus.documents import Document
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.cli.planning.gain import PlanGainOptions, divided, estimate, text_of
from pipelines.cli.planning.sample import CorpusSample
from retro.evaluation.datastore_size import Part, WindowScores
from tests.conftest import write_corpus

PARTS = [Part(fraction, np.ones(10, bool), tokens) for fraction, tokens in ((0.01, 10**4), (0.1, 10**5), (1.0, 10**6))]


def scores(windows: int = 12) -> list[WindowScores]:
    """Changes of -1, -3 and -5% with three sizes; half of the windows have a long match."""
    nats = np.outer([1, 0.99, 0.97, 0.95], np.linspace(1, 2, 64)).astype(np.float32)
    return [
        WindowScores(nats, nats > 1, np.full((3, 64), 40 if number % 2 else 8, np.uint8)) for number in range(windows)
    ]


def test_ten_times_more_text_is_one_decade_on_the_line() -> None:
    found = estimate(PARTS, scores(), 3e6, 10)
    assert [row["tokens"] for row in found["measured"]] == [10**4, 10**5, 10**6]
    assert [row["change"][0] for row in found["measured"]] == pytest.approx([-1, -3, -5], abs=1e-4)
    assert found["more_text"] == pytest.approx((-2, -2, -2), abs=1e-4)
    sizes = {row["size"]: (row["tokens"], row["change"][0]) for row in found["extrapolated"]}
    assert sizes["10 times the sample"] == pytest.approx((1e7, -7), abs=1e-3)
    assert sizes["corpus"] == pytest.approx((3e6, -5 - 2 * np.log10(3)), abs=1e-3)
    assert sizes["10 times the corpus"] == pytest.approx((3e7, -7 - 2 * np.log10(3)), abs=1e-3)
    assert found["without_long_matches"]["documents"] == 6
    assert estimate(PARTS, scores(), 3e6, 100)["more_text"][0] == pytest.approx(-4, abs=1e-4)


def test_a_corpus_that_is_the_sample_is_not_extrapolated_to_itself() -> None:
    assert [row["size"] for row in estimate(PARTS, scores(), 1e6, 10)["extrapolated"]] == ["10 times the sample"]


def test_the_text_says_what_is_measured_and_what_the_estimate_is_not() -> None:
    text = text_of(estimate(PARTS, scores(), 3e6, 10))
    rows = text.splitlines()
    assert sum(row.endswith("measured") for row in rows) == 3
    assert any(row.startswith("30,000,000") and row.endswith("10 times the corpus") for row in rows)
    assert "10 times more text: -2.00 (-2.00 to -2.00) points" in text
    assert "extrapolated" in text
    assert "The corpus itself was not measured. Text of another kind" in text


def test_sizes_that_are_not_on_a_line_are_no_promise() -> None:
    crooked = scores()
    for window in crooked:
        window.nats[2] = window.nats[1] * 0.92  # -9% between -1% and -5%
    text = text_of(estimate(PARTS, crooked, 3e6, 10))
    assert "The rows beyond the sample are a guess" in text
    assert "--sample-bytes" in text
    assert "a guess" not in text_of(estimate(PARTS, scores(), 3e6, 10))


def test_held_out_documents_are_not_in_the_sample_under_another_name() -> None:
    documents = [Document(str(number), f"{number} text " * 300, {}, number) for number in range(40)]
    copies = [replace(document, id=f"copy of {document.id}") for document in documents[:10]]
    options = PlanGainOptions(documents=6, window=64)
    held_out, others = divided(CorpusSample([*documents, *copies], [], 0.0), options)
    assert len(held_out) == 6
    assert not {document.text for document in held_out} & {document.text for document in others}
    assert {document.text for document in (*held_out, *others)} == {document.text for document in documents}
    whole = sum(document.size for document in (*documents, *copies))
    assert sum(document.size for document in held_out) <= 0.2 * whole


def test_a_sample_of_short_documents_is_refused() -> None:
    documents = [Document(str(number), f"{number} text", {}, number) for number in range(40)]
    with pytest.raises(InputError, match=r"0 of 40 documents of the sample can be held out: at least 5 .* 1,536 bytes"):
        divided(CorpusSample(documents, [], 0.0), PlanGainOptions())


def test_the_gain_of_a_corpus_is_planned_from_the_command_line(tmp_path: Path, copying_run: Path, capsys) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 150, seed=3)
    (tmp_path / "config.toml").write_text(f'corpus.paths = ["{corpus}"]\n')
    arguments = ["--checkpoint", str(copying_run), "--window", "40", "--documents", "8"]
    status = main(["plan", "gain", str(tmp_path / "config.toml"), *arguments, "--output", str(tmp_path / "gain.json")])
    assert status == 0
    found = json.loads((tmp_path / "gain.json").read_text())
    assert 5 <= found["documents"] <= 8
    assert found["tokens"] == 40 * found["documents"]
    tokens = [row["tokens"] for row in found["measured"]]
    assert tokens == sorted(tokens)
    assert found["measured"][-1]["change"][0] < 0
    assert "10 times the sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "checkpoint is empty"),
        (["--checkpoint", "nothing"], "corpus.paths is empty"),
        (["--checkpoint", "nothing", "--corpus.paths", "CORPUS"], "nothing is neither"),
        (["--checkpoint", "x", "--times", "1"], "times"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, capsys, arguments: list[str], said: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 30)
    assert main(["plan", "gain", *(str(corpus) if word == "CORPUS" else word for word in arguments)]) == 2
    assert said in capsys.readouterr().err
