"""The commands, settings and figures of `docs/how-to/pretrain-1b.md`, with a tiny model and a tiny corpus of Megatron tokens."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from indexing.tokenization.training import train_sentencepiece
from pipelines.cli.main import VERBS, main, split_positional
from tests.conftest import PATIENCE, contents, wait_until
from tests.indexing.corpus.test_megatron import write_megatron
from tests.test_docs import DOCS, code_blocks

PAGE = DOCS / "how-to" / "pretrain-1b.md"
COMMANDS = [shlex.split(line, comments=True) for line in "".join(code_blocks(PAGE, "bash")).splitlines()]
SETTINGS, OF_TEXT = code_blocks(PAGE, "toml")
SHARED = "/shared"

_DATA = """--corpus.split 800 100 100 --embedder.dimension 32 --embedder.bigram-buckets 1024
    --executor.workers 1 --executor.num-threads 1 --executor.resources.neighbors.cpus 1"""
_MODEL = """--model.d-model 32 --model.d-ffw 64 --model.num-layers 2 --model.attention.num-heads 2 --model.attention.head-dim 16
    --model.retrieval.cca-layers 2 --model.encoder.d-model 16 --model.encoder.d-ffw 32 --model.encoder.num-heads 1
    --model.encoder.head-dim 16 --data.sequence-length 128 --train.steps 8 --train.batch-size 8
    --train.gradient-accumulation-steps 2 --train.checkpoint-every 4 --train.eval-every 4 --train.eval-tokens 500 --train.device cpu"""
SMALL = {
    "index": _DATA,
    "plan datastore": f"{_DATA} --sample-bytes 1000000",
    "plan train": f"{_DATA} {_MODEL}",
    "train": f"{_DATA} {_MODEL}",
    "generate": "--device cpu",
}
"""Options that make the commands of a verb small. They precede those of the page, which so keep their effect."""


def arguments(command: list[str], folder: Path) -> list[str]:
    """The verb and arguments of a command of the page, small and in a test's folder in place of `/shared`."""
    words = [word.replace(SHARED, str(folder)) for word in command]
    if "-m" in words:  # torchrun … -m -- pipelines.train …, python -m pipelines.index …
        start = next(number for number, word in enumerate(words) if word.startswith("pipelines."))
        words = [words[start].partition(".")[2], *words[start + 1 :]]
    else:
        words = words[1:]
    verb = " ".join(words[:2]) if " ".join(words[:2]) in VERBS else words[0]
    given, options = split_positional(VERBS[verb], words[len(verb.split()) :])
    return [*verb.split(), *given, *SMALL.get(verb, "").split(), *options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """What the page starts with: a tokenizer, its tokens in Megatron's format, texts and the settings."""
    folder = tmp_path_factory.mktemp("shared")
    home = folder / "1b"
    home.mkdir()
    texts = [json.loads(line)["text"] for line in tiny_corpus.read_text().splitlines()]
    train_sentencepiece(texts, TokenizerSettings(vocab_size=400), home / "trained")
    tokenizer = Tokenizer.open(home / "trained")
    shutil.copy(home / "trained" / "sentencepiece.model", home / "tokenizer.model")
    documents = [[[*tokenizer.encode(text).tolist(), tokenizer.eos_id]] for text in texts]
    write_megatron(home / "tokens" / "text_document.bin", documents)
    (home / "1b.toml").write_text(SETTINGS.replace(SHARED, str(folder)))
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Datastore:
    """The datastore that the page's command for one machine builds."""
    assert main(arguments(next(words for words in COMMANDS if words[:2] == ["retro", "index"]), folder)) == 0
    return Datastore.open(folder / "1b" / "datastore")


def without_copies(datastore: Path) -> dict[str, bytes]:
    """Files of a datastore but those that the stage `materialize`, which only one of two may have, writes or changes."""
    files = contents(datastore).items()
    return {name: data for name, data in files if not name.startswith(("materialized/", "manifest.json"))}


@pytest.mark.slow
def test_all_commands_run_in_the_order_of_the_page(
    folder: Path, built: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ray` has a test of its own. torchrun starts two processes for the longest run, and one for the others."""
    printed = ""
    for command in COMMANDS:
        if command[0] == "ray":
            continue
        words = arguments(command, folder)
        if "--max-restarts" in command:
            launch = [word.replace("8", "2") for word in command[1 : command.index("-m")]]
            torchrun = [str(Path(sysconfig.get_path("scripts")) / "torchrun"), *launch, "-m", "--", "pipelines.train"]
            done = subprocess.run([*torchrun, *words[1:]], capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert main(words) == 0, words
        printed += capsys.readouterr().out
    assert re.search(r"ON k=4", printed)
    assert "By longest match of the document" in printed
    assert built.has("votes")
    home = folder / "1b"
    assert (home / "model" / "curves.svg").exists()
    assert {"config.json", "README.md"} <= {file.name for file in (home / "release").iterdir()}
    rows = json.loads((home / "eval.json").read_text())["results"]
    assert {row["model"].partition("@")[0] for row in rows} == {"model", "baseline"}


@pytest.mark.slow
def test_the_sections_for_text_build_a_datastore_with_its_own_tokenizer(folder: Path, tiny_corpus: Path) -> None:
    (folder / "1b" / "text").mkdir()
    shutil.copy(tiny_corpus, folder / "1b" / "text" / "documents.jsonl")
    sections = rf"^\[(?:{'|'.join(tomllib.loads(OF_TEXT))})\]\n.*?(?=^\[)"
    kept = re.sub(sections, "", SETTINGS, flags=re.DOTALL | re.MULTILINE)
    text = (kept + OF_TEXT).replace(SHARED, str(folder)).replace(".jsonl.zst", ".jsonl")
    file = folder / "1b" / "of_text.toml"
    file.write_text(text)
    words = ["index", str(file), *_DATA.split(), "--tokenizer.vocab-size", "400", "--stage", "chunk"]
    assert main([*words, "--datastore", str(folder / "1b" / "of_text")]) == 0
    assert Datastore.open(folder / "1b" / "of_text").train.num_documents > 100


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of Ray itself
def test_ray_job_submit_builds_the_same_datastore(cluster, folder: Path, built: Datastore) -> None:
    (command,) = [words for words in COMMANDS if words[0] == "ray"]
    other = folder / "1b" / "on_ray"
    verb, *rest = arguments(command, folder)
    address = [f"http://{cluster.webui_url}" if word == "http://HEAD:8265" else word for word in command]
    ray = [
        str(Path(sysconfig.get_path("scripts")) / "ray"),
        *address[1 : address.index("--") + 1],
        sys.executable,
        "-m",
    ]
    no_memory = ["--datastore", str(other), "--executor.resources.neighbors.memory", ""]

    def submitted() -> subprocess.CompletedProcess[str] | None:
        """None until the head's agent has started."""
        words = [*ray, f"pipelines.{verb}", *rest, *no_memory]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        return None if "No available agent" in done.stdout + done.stderr else done

    done = wait_until(submitted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert without_copies(other) == without_copies(built.folder)


def test_the_page_shows_what_the_plan_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "1b.toml"
    file.write_text(SETTINGS)
    (command,) = [words for words in COMMANDS if words[:3] == ["retro", "plan", "train"] and "--mfu" in words]
    assert main([word.replace(f"{SHARED}/1b/1b.toml", str(file)) for word in command[1:]]) == 0
    assert capsys.readouterr().out in code_blocks(PAGE, "")
