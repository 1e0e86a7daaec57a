"""`retro eval retrieval` and the options of `retro search`: output, files and errors."""

import json
import re
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, tiny_datastore: Datastore) -> Path:
    """Questions made from titles, which are stored with the documents and not in their text. Only words find them."""
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    split = tiny_datastore.train
    rows = split.metadata(range(0, split.num_documents, 5))
    lines = [
        {"id": f"q{n}", "question": row["title"], "answers": [], "positive_ids": [row["id"]]}
        for n, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_question_set_is_measured_with_every_way_of_retrieval(
    tiny_datastore: Datastore, questions: Path, tmp_path, capsys
) -> None:
    out = tmp_path / "found.json"
    folder = str(tiny_datastore.folder)
    assert main(["eval", "retrieval", folder, str(questions), "--k", "1", "10", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"retrieval +hit@1 +hit@10 +recall@1 +recall@10 +MRR +questions", printed)
    written = json.loads(out.read_text())
    assert written["fingerprints"] == {"datastore": tiny_datastore.fingerprint}
    assert (written["settings"]["questions"], written["settings"]["chunks"]) == (str(questions), 100)
    figures = {each["retrieval"]: each for each in written["results"]}
    assert list(figures) == ["dense", "sparse", "hybrid"]
    num_questions = len(questions.read_text().splitlines())
    for way, each in figures.items():
        assert re.search(rf"{way} +{each['hit']['1']:.3f} +{each['hit']['10']:.3f}", printed)
        assert each["num_questions"] == num_questions
    assert figures["sparse"]["hit"]["10"] > figures["dense"]["hit"]["10"]  # numbers in titles are words
    few = ["--retrieval", "sparse", "--max-questions", "7"]
    assert main(["eval", "retrieval", folder, str(questions), *few]) == 0
    assert re.fullmatch(r"retrieval .*\nsparse .* 7\n", capsys.readouterr().out)


def test_search_applies_filters_and_retrieval(tiny_datastore: Datastore, capsys) -> None:
    folder = str(tiny_datastore.folder)
    filters = ["--filters", "title=Title 42", "title=Title 41", "file=corpus.jsonl"]
    assert main(["search", folder, "title 42", "--retrieval", "hybrid", "--k", "2", *filters, "--format", "json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert len(hits) == 2
    assert hits[0]["document"]["title"] == "Title 42"
    assert {hit["document"]["title"] for hit in hits} <= {"Title 41", "Title 42"}
    assert main(["search", folder, "title 42", "--retrieval", "sparse", "--k", "1"]) == 0
    assert re.match(
        r"1\. score \d+\.\d+  distance \d\.\d+  ", capsys.readouterr().out
    )  # the same labels as in the API and on the page
    assert main(["search", folder, "title 42", "--extra-datastores", folder, "--k", "1"]) == 0
    assert capsys.readouterr().out.startswith("1. score 0.")


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ("title", "'title'.*COLUMN=VALUE"),
        ("=x", "COLUMN=VALUE"),
        ("lang=en", "'lang'.* id"),
    ],
)
def test_invalid_filters_are_refused(tiny_datastore: Datastore, filters: str, words: str, capsys) -> None:
    assert main(["search", str(tiny_datastore.folder), "text", "--filters", filters]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_questions_without_document_ids_are_refused_with_the_missing_key(
    tiny_datastore: Datastore, tmp_path, capsys
) -> None:
    path = tmp_path / "questions.jsonl"
    told = []
    for line in (
        {"answers": ["a"]},
        {"question": "why?", "answers": ["a"]},
        {"question": "why?", "positive_ids": ["none"]},
    ):
        path.write_text(json.dumps(line))
        assert main(["eval", "retrieval", str(tiny_datastore.folder), str(path)]) == 2
        told.append(capsys.readouterr().err)
    assert f"{path}:1" in told[0]
    assert all('"positive_ids"' in each for each in told)
    assert "datastore" not in told[1]  # another datastore would not help
    assert "corpus.split = [1, 0, 0]" in told[2]
