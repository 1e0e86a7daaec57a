"""`retro eval perplexity` with datastore fractions, and `retro eval qa`: output, files, errors."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import write_checked
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from retro.checkpoints.checkpoint import open_checkpoint
from retro.evaluation.question_answering import (
    Answered,
    QuestionMode,
    all_modes,
    answer_in_passages,
    found_passages,
    open_model,
    select,
)
from retro.evaluation.question_sets import Question
from retro.evaluation.settings import QaSettings
from retro.inference import language_model
from retro.inference.language_model import GivenNeighbors
from retro.inference.settings import GenerationSettings
from retro.model_settings import CopyHeadSettings, updated
from retro.training.run_folder import read_metrics
from tests.conftest import change_tokenizer, tiny_config, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    """A folder with a copy of the tiny datastore, a trained run and a baseline."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = tiny_config(folder, tiny_corpus)
    shutil.copytree(tiny_datastore.folder, config.datastore)
    runs = {
        "run": config,
        "baseline": replace(config, run=folder / "baseline", model=updated(config.model, {"retrieval.cca_layers": ()})),
    }
    for name, each in runs.items():
        (folder / f"{name}.toml").write_text(to_toml(each))
        assert main(["train", str(folder / f"{name}.toml")]) == 0
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [{"id": f"q{n}", "question": f"what is document {n}?", "answers": [f"Document {n}"]} for n in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_fractions_of_the_datastore_are_measured_and_printed(trained: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "results.json"
    arguments = ["--evaluation.datastore-fractions", "0.1", "1", "--k", "1", "2", "4", "--output", str(out)]
    assert main(["eval", "perplexity", str(trained / "run"), "--against", str(trained / "baseline"), *arguments]) == 0
    assert re.search(r"0\.1 +\d+ +\d+ +run ON k=1", capsys.readouterr().out)
    written = json.loads(out.read_text())
    small, whole = written["datastore_fractions"]
    train = Datastore.open(trained / "datastore").train
    assert (whole["datastore_documents"], whole["datastore_chunks"]) == (train.num_documents, train.num_chunks)
    assert 0 < small["datastore_chunks"] < whole["datastore_chunks"] / 4
    # Stored neighbors of this small datastore are exact, so searching all of it again gives the same figures.
    stored = [row["bits_per_byte"] for row in written["results"]]
    assert [row["bits_per_byte"] for row in whole["results"]] == pytest.approx(stored, rel=1e-3)
    rows = [(row["model"], row["k"]) for row in small["results"]]
    assert rows == [*(("run", k) for k in (0, 1, 2, 4)), ("baseline", 0)]
    assert small["results"][0] == whole["results"][0]
    assert small["results"][1]["bits_per_byte"] != whole["results"][1]["bits_per_byte"]


def test_evaluation_and_added_retrieval_keep_the_neighbor_rules_of_the_run(
    trained: Path, tmp_path: Path, capsys
) -> None:
    run, out, file = tmp_path / "run", tmp_path / "out.json", tmp_path / "added.safetensors"
    rules = ["--data.max-overlap", "0.3", "--data.seed", "5", "--train.eval-tokens", "0", "--train.eval-every", "8"]
    assert main(["train", str(trained / "run.toml"), "--run", str(run), *rules]) == 0
    assert main(["add-retrieval", str(run), "--output", str(file), "--k", "2", "--tokens", "1000"]) == 0
    assert "at most 0.3" in capsys.readouterr().out

    def measured(checkpoint: Path, *options: str) -> tuple[float, dict]:
        whole = ["--evaluation.leakage-tokens", *options, "--output", str(out)]
        assert main(["eval", "perplexity", str(checkpoint), *whole]) == 0
        written, path = json.loads(out.read_text()), open_checkpoint(checkpoint).path
        return written["results"][1]["bits_per_byte"], written["settings"]["neighbors"][str(path)]

    by_rule, rule = measured(run)
    assert "at most 0.3" in capsys.readouterr().out
    assert rule == {"neighbor_source": "nearest", "max_overlap": 0.3, "seed": 5}
    assert by_rule == pytest.approx(read_metrics(run)[-1]["valid_bits_per_byte_on"], rel=1e-6)
    with_copies, other = measured(run, "--max-overlap", "1")
    assert other == rule | {"max_overlap": 1}
    assert with_copies != by_rule
    assert measured(file)[1] == rule
    measured(run, "--evaluation.datastore-fractions", "1")
    (whole,) = json.loads(out.read_text())["datastore_fractions"]
    assert whole["results"][1]["bits_per_byte"] == pytest.approx(by_rule, rel=1e-3)  # stored neighbors are exact


def test_only_the_json_file_is_written_and_missing_measurements_have_no_table(
    trained: Path, tmp_path: Path, capsys
) -> None:
    few = ["eval", "perplexity", str(trained / "baseline"), "--evaluation.leakage-tokens"]
    assert main([*few, "--output", str(tmp_path / "results.json")]) == 0
    printed = capsys.readouterr().out
    assert "OFF only" in printed
    assert "Held-out documents" in printed
    assert not any(title in printed for title in ("By leakage", "By size of the datastore", "Changes"))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_datastore_fractions_are_refused_without_retrieval_and_for_a_control(
    trained: Path, tmp_path: Path, capsys
) -> None:
    fractions = ["--evaluation.datastore-fractions", "0.5"]
    assert main(["eval", "perplexity", str(trained / "baseline"), *fractions]) == 2
    assert "does not retrieve" in capsys.readouterr().err
    assert main(["eval", "perplexity", str(trained / "run"), *fractions, "--k"]) == 2
    assert "--k is empty" in capsys.readouterr().err
    control = ["--run", str(tmp_path / "control"), "--data.neighbor-source", "random", "--train.steps", "2"]
    assert main(["train", str(trained / "run.toml"), *control]) == 0
    assert main(["eval", "perplexity", str(tmp_path / "control"), *fractions]) == 2
    assert "data.neighbor_source = 'random'" in capsys.readouterr().err


def test_other_texts_are_scored_with_all_sources_next_to_held_out_documents(
    tmp_path: Path, tiny_corpus: Path, voting_datastore: Datastore, capsys
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, datastore=voting_datastore.folder)
    train = replace(config.train, steps=2, warmup_steps=1, eval_every=0)
    config = replace(config, model=replace(config.model, copy_head=CopyHeadSettings()), train=train)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["train", str(tmp_path / "config.toml")]) == 0
    paths, out = [tmp_path / "other.jsonl", tmp_path / "own.txt"], tmp_path / "out.json"
    write_corpus(paths[0], 6, seed=5)
    paths[1].write_text("the index of a chunk and the neighbor in memory")
    texts = ["--texts", *map(str, paths), "--evaluation.leakage-tokens", "--k", "1", "2", "--output", str(out)]
    assert main(["eval", "perplexity", str(config.run), *texts]) == 0
    printed, bits = capsys.readouterr().out, r" +\d\.\d{4}"
    change = r"[-+]\d+\.\d\d% \([-+].* to .*%\)"
    assert re.search(rf"other\.jsonl +6 +\d+ +ON k=2 \+ datastore{bits}{bits} +{change} +doc-\d: [-+]", printed)
    assert re.search(r"own\.txt +1 +.*\(no interval\) +own\.txt: [-+]\d+\.\d\d% \([-+]\d+\.\d bits\)", printed)
    written = json.loads(out.read_text())
    assert {row["set"] for row in written["results"]} == {"valid"}
    assert [row["set"] for row in written["texts"]] == ["other.jsonl", "own.txt"]
    assert written["settings"]["evaluation"]["texts"] == list(map(str, paths))


def test_texts_are_measured_alone_on_request_and_each_result_is_logged(trained: Path, tmp_path: Path, capsys) -> None:
    write_corpus(tmp_path / "other.jsonl", 6, seed=5)
    alone = ["eval", "perplexity", str(trained / "run"), "--no-held-out"]
    assert main(alone) == 2
    assert "Name texts with --texts" in capsys.readouterr().err
    alone += ["--texts", str(tmp_path / "other.jsonl"), "--output", str(tmp_path / "out.json")]
    for options, heading in (
        ([], "a random window of each"),
        (["--text-windows", "beginning"], "the beginning of each"),
    ):
        assert main([*alone, *options]) == 0
        printed = capsys.readouterr()
        assert f"Other texts: {heading} document" in printed.out
        assert "Held-out documents" not in printed.out
        for mode in ("OFF", "ON k=2"):
            assert re.search(rf"other\.jsonl {mode}: \d\.\d{{4}} bits per byte, \d+ tokens of 6 documents", printed.err)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["results"], written["texts"][0]["windows"]) == ([], "beginning")


def test_texts_are_measured_if_the_datastore_has_no_held_out_documents(trained: Path, tmp_path: Path, capsys) -> None:
    folder, text = Path(shutil.copytree(trained / "datastore", tmp_path / "datastore")), tmp_path / "a.txt"
    held_out = Datastore.open(folder).valid
    delete_documents(folder, [row["id"] for row in held_out.metadata(range(held_out.num_documents))])
    text.write_text("The index of a model. " * 20)
    arguments = ["eval", "perplexity", str(trained / "run"), "--datastore", str(folder)]
    assert main(arguments) == 2
    assert "--texts" in capsys.readouterr().err
    assert main([*arguments, "--texts", str(text), "--output", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.count("Other texts") == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["results"] == []
    assert [row["datastore"] for row in written["texts"]] == [Datastore.open(folder).fingerprint]


@pytest.mark.parametrize(
    ("run", "options", "words"),
    [
        ("baseline", ["TEXT"], ["texts = ", "baseline", "OFF only"]),
        ("run", ["TEXT", "--k"], ["texts = ", "--k is empty"]),
        ("run", ["TEXT", "nowhere.jsonl"], ["texts: 'nowhere.jsonl' does not exist"]),
        ("run", ["EMPTY"], ["texts: ", "empty.txt' has no document with text"]),
        ("run", ["TEXT", "--no-held-out", "--against", "run"], ["--against is about held-out documents"]),
        ("run", ["TEXT", "--no-held-out", "--evaluation.sets", "valid"], ["--evaluation.sets is about held-out"]),
        ("run", ["TEXT", "--datastore", "OTHER"], ["other has another tokenizer than the model"]),
    ],
)
def test_texts_that_cannot_be_measured_are_refused_and_nothing_is_written(
    trained: Path, tmp_path: Path, capsys, run: str, options: list[str], words: list[str]
) -> None:
    change_tokenizer(Path(shutil.copytree(trained / "datastore", tmp_path / "other")))
    paths = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt", "OTHER": tmp_path / "other"}
    paths["TEXT"].write_text("The index of a model.")
    paths["EMPTY"].write_text("")
    named = [str(paths.get(each, each)) for each in options]
    out = tmp_path / "out.json"
    assert main(["eval", "perplexity", str(trained / run), "--texts", *named, "--output", str(out)]) == 2
    printed = capsys.readouterr()
    assert all(word in printed.err for word in words), printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not out.exists()


def test_qa_answers_questions_closed_book_and_with_passages(
    trained: Path, questions: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "qa.json"
    arguments = ["--passages", str(trained / "datastore"), "--shots", "1", "--max-questions", "5"]
    arguments += ["--max-tokens", "8", "--prompt-passages", "1", "--k", "1", "--output", str(out)]
    assert main(["eval", "qa", str(trained / "run"), str(questions), *arguments]) == 0
    assert re.search(r"passages in the prompt, ON k=1 +\d+\.\d\d \(", capsys.readouterr().out)
    written = json.loads(out.read_text())
    assert [row["mode"] for row in written["results"]] == [
        "closed book",
        "ON k=1",
        "passages in the prompt",
        "passages in the prompt, ON k=1",
    ]
    assert [each["id"] for each in written["answers"]] == [f"q{n}" for n in range(1, 6)]
    fingerprint = Datastore.open(trained / "datastore").fingerprint
    assert written["fingerprints"] == {
        "checkpoint": open_checkpoint(trained / "run").fingerprint,
        "passages": fingerprint,
        "datastore": fingerprint,
    }
    held = [row["answer_in_passages"] for row in written["results"]]
    assert held[:2] == [None, None]
    assert held[2] == held[3]
    assert 0 <= held[2] <= 1
    assert written["settings"]["language"] == "en"


def test_qa_reads_passages_as_neighbors_of_the_papers_prompt(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = Datastore.open(trained / "datastore").train
    rows = split.metadata(range(4))
    asked = [
        {
            "question": f"what is {row['title']}?",
            "answers": [f"Document {row['id'][4:]}\n"],
            "positive_ids": [row["id"]],
        }
        for row in rows
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    out = tmp_path / "qa.json"
    arguments = [
        "eval",
        "qa",
        str(trained / "run"),
        str(tmp_path / "q.jsonl"),
        "--neighbor-passages",
        "3",
        "--gold",
    ]
    few = ["--k", "0", "--prompt-passages", "0", "--max-tokens", "8", "--output", str(out)]
    assert main([*arguments, *few]) == 2
    assert "neighbor_passages = 3: name the datastore to search, --passages" in capsys.readouterr().err
    assert main([*arguments, *few, "--passages", str(trained / "datastore")]) == 0
    written = json.loads(out.read_text())
    assert [row["mode"] for row in written["results"]] == [
        "closed book",
        "paper's prompt, closed book",
        "paper's prompt, 3 passages as neighbors",
        "paper's prompt, 3 passages as neighbors, gold first",
    ]
    gold = written["results"][-1]
    assert gold["answer_in_passages"] == 1  # a document's text begins with its number


def test_neighbors_contain_the_text_of_the_passages_and_change_the_answers(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With bfloat16, packed weights round differently in passes of few tokens and of many.
    monkeypatch.setattr(language_model, "pack", lambda model, placement: None)
    settings = QaSettings(k=0, prompt_passages=0, neighbor_passages=2, max_tokens=4)
    model, retriever = open_model(trained / "run", trained / "datastore", settings, "cpu")
    assert retriever is not None
    asked = [Question(f"q{n}", f"is it chunk {n}?", ("yes",)) for n in range(3)]
    found = found_passages(retriever, asked, settings)
    *_, closed, read = all_modes(model, asked, settings, language="en", found=found)
    assert closed.given is None
    assert read.given is not None
    assert read.texts is not None
    for (tokens, lengths), texts, passages in zip(read.given, read.texts, found.neighbors[False], strict=True):
        assert tokens.shape == (2, 2 * model.model.settings.chunk_length)
        assert (lengths > 0).all()
        for text, passage in zip(texts, passages, strict=True):
            assert f"title: {passage.title}, source: {passage.text}".startswith(text.rstrip("\ufffd"))
    # The model reads them: other passages change the next token's probability, and empty passages equal OFF.
    none = [(tokens, np.zeros_like(lengths)) for tokens, lengths in read.given]
    others = [*read.given[1:], *read.given[:1]]

    def log_probabilities(given: GivenNeighbors | None) -> list[float]:
        first = next(model.generate(read.prompts, GenerationSettings(max_tokens=1, temperature=0), given=given))
        return [piece.log_probability for piece in first]

    assert log_probabilities(none) == pytest.approx(log_probabilities(None), abs=1e-6)
    assert all(
        one != other for one, other in zip(log_probabilities(read.given), log_probabilities(others), strict=True)
    )


@pytest.mark.parametrize(
    ("run", "options", "modes"),
    [
        ("baseline", [], ["closed book"]),
        ("run", ["--k", "0"], ["closed book"]),
        ("baseline", ["--neighbor-passages", "2"], ["closed book", "paper's prompt, closed book"]),
    ],
)
def test_a_baseline_or_k_0_answers_closed_book(
    trained: Path, questions: Path, tmp_path: Path, run: str, options: list[str], modes: list[str]
) -> None:
    out = tmp_path / "qa.json"
    short = ["--max-questions", "2", "--max-tokens", "4", "--output", str(out)]
    assert main(["eval", "qa", str(trained / run), str(questions), *options, *short]) == 0
    written = json.loads(out.read_text())
    assert [row["mode"] for row in written["results"]] == modes
    assert "datastore" not in written["fingerprints"]


def test_scores_are_means_over_questions_with_confidence_intervals() -> None:
    no = np.zeros(4, dtype=bool)
    answers, right = ["a", "b", "c", "d"], np.array([1.0, 0, 0, 0])
    closed = Answered(QuestionMode(), answers, right, np.array([1.0, 0.25, 0, 0]), right, no, no)
    row = Answered(QuestionMode(k=2), answers, right, np.array([1.0, 0.5, 0, 0]), right, no, no).as_json(0, closed)
    assert (row["mode"], row["exact_match"], row["f1"], row["questions"]) == ("ON k=2", 0.25, 0.375, 4)
    assert row["f1_low"] <= row["f1"] <= row["f1_high"]
    # The gain is paired: three questions have the same score in both modes.
    assert (row["f1_gain"], row["f1_gain_low"]) == (0.0625, 0)
    assert row["f1_gain_high"] <= 0.25
    asked = [Question("a", "?", ("Paris", "the Seine")), Question("b", "?", ("42",))]
    assert answer_in_passages(asked, [["along THE SEINE"], ["41", "43"]]) == 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "qa", "RUN"], ["usage: retro eval qa CHECKPOINT QUESTIONS"]),
        (["eval", "qa", "RUN", "nowhere.jsonl"], ["nowhere.jsonl", "QUESTIONS"]),
        (["eval", "qa", "RUN", "QUESTIONS", "--shots", "7"], ["7 questions", "shots = 7"]),
        (["eval", "qa", "RUN", "QUESTIONS", "--max-tokens", "60"], ["max_tokens = 60"]),
        (["eval", "qa", "RUN", "QUESTIONS", "--k", "-1"], ["k = -1"]),
        (["eval", "qa", "RUN", "QUESTIONS", "--gold"], ["gold", "--passages"]),
        (
            ["eval", "qa", "RUN", "QUESTIONS", "--passages", "DATASTORE", "--neighbor-passages", "2", "--gold"],
            ["'q0'", '"positive_ids"'],
        ),
        (["eval", "qa", "RUN", "QUESTIONS", "--passages", "nowhere"], ["nowhere"]),
        (["eval", "qa", "nowhere", "QUESTIONS"], ["nowhere", "CHECKPOINT"]),
        (
            ["eval", "perplexity", "RUN", "--evaluation.datastore-fractions", "2"],
            ["evaluation.datastore-fractions[0] = 2"],
        ),
        (["eval", "harness", "RUN"], ["--tasks is empty"]),
        (["eval", "qa", "RUN", "QUESTIONS", "--output", "qa.html"], ["output = qa.html", ".json"]),
        (["eval", "perplexity", "RUN", "--output", "results"], ["output = results", ".json"]),
    ],
)
def test_user_mistake_prints_one_message_and_exits_with_status_2(
    trained: Path, questions: Path, capsys, arguments, words
) -> None:
    places = {"RUN": str(trained / "run"), "QUESTIONS": str(questions), "DATASTORE": str(trained / "datastore")}
    assert main([places.get(each, each) for each in arguments]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert all(word in message for word in words), message


def test_passages_unreadable_by_the_model_are_refused_unless_used_only_in_prompts(
    trained: Path, questions: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained / "datastore", tmp_path / "other"))
    manifest = json.loads((folder / "manifest.json").read_text())
    write_checked(folder / "manifest.json", manifest | {"chunk_length": 999})
    with pytest.raises(InputError, match=r"--passages .*chunk_length = 999.*--k 0"):
        open_model(trained / "run", folder, QaSettings(), "cpu")
    model, retriever = open_model(trained / "run", folder, QaSettings(k=0), "cpu")
    assert model.retriever is None
    assert retriever is not None


def test_a_datastore_with_another_tokenizer_of_the_same_size_is_refused(
    trained: Path, questions: Path, tmp_path: Path, capsys
) -> None:
    folder = Path(shutil.copytree(trained / "datastore", tmp_path / "other"))
    change_tokenizer(folder)
    run = str(trained / "run")
    for verb in (
        ["eval", "perplexity", run, "--datastore", str(folder)],
        ["eval", "qa", run, str(questions), "--passages", str(folder)],
        ["serve", str(folder), "--checkpoint", run],
    ):
        assert main(verb) == 2
        assert f"{folder} has another tokenizer than the model" in capsys.readouterr().err
    out = tmp_path / "exported"
    assert main(["export", run, "--output", str(out), "--datastore", str(folder)]) == 2
    assert f"{folder / 'tokenizer'} is another tokenizer than that of {run}" in capsys.readouterr().err
    assert not out.exists()


def test_question_without_answers_is_refused_with_its_id(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"q\.jsonl.*'x'"):
        select([Question("x", "?", ())], QaSettings(), tmp_path / "q.jsonl")
