"""The command line from a user's point of view: what works, and the messages when something is wrong."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli import main as cli
from pipelines.cli.main import VERBS, main
from pipelines.cli.results import Format
from pipelines.cli.settings.load import leaf_types
from pipelines.cli.settings.toml_file import to_toml
from pipelines.terminal.silence import silence
from retro.checkpoints.checkpoint import open_checkpoint
from retro.model_settings import CopyHeadSettings, RetrievalSettings
from tests.conftest import tiny_config, write_corpus

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """A folder with `config.toml`, a datastore and a trained run, all made with the command line."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "config.toml").write_text(to_toml(tiny_config(folder, tiny_corpus)))
    assert main(["index", str(folder / "config.toml")]) == 0
    assert main(["train", str(folder / "config.toml")]) == 0
    return folder


def test_index_writes_reports_and_prints_the_same_when_run_again(trained: Path, capsys) -> None:
    report = (trained / "datastore" / "report.json").read_bytes()
    assert main(["index", str(trained / "config.toml")]) == 0
    assert "recall at 2" in capsys.readouterr().out
    assert (trained / "datastore" / "report.json").read_bytes() == report
    html = (trained / "datastore" / "report.html").read_text()
    assert "data:image/svg+xml" in html
    assert "http://" not in html


def test_the_report_has_the_bytes_of_stages_that_run_later(tmp_path: Path, tiny_corpus: Path, capsys) -> None:
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(tmp_path, tiny_corpus)))
    assert main(["index", str(tmp_path / "config.toml")]) == 0
    assert "votes on disk" not in capsys.readouterr().out
    before = json.loads((tmp_path / "datastore" / "report.json").read_text())
    for stage in ("suffixes", "votes"):
        assert main(["index", str(tmp_path / "config.toml"), "--stage", stage]) == 0
        assert f"{stage} on disk" in capsys.readouterr().out
    after = json.loads((tmp_path / "datastore" / "report.json").read_text())
    assert after["bytes"]["votes"] > 0
    assert {name for name in after if after[name] != before[name]} == {"bytes", "checksum"}
    assert "votes on disk" in (tmp_path / "datastore" / "report.html").read_text()


def test_a_default_datastore_is_traced_and_trains_a_model_that_copies_from_all_of_it(
    tmp_path: Path, tiny_corpus: Path, voting_datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, datastore=voting_datastore.folder)
    train = replace(config.train, steps=2, eval_every=0)
    config = replace(config, train=train, model=replace(config.model, copy_head=CopyHeadSettings()))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["trace", str(config.datastore), "the"]) == 0
    assert main(["train", str(tmp_path / "config.toml")]) == 0
    assert open_checkpoint(config.run).model.copy_head == CopyHeadSettings(context=True, neighbors=True, datastore=True)
    prompt = ["--prompt", "the index", "--max-tokens", "2"]
    assert main(["generate", str(config.run), *prompt]) == 0


def test_a_model_with_the_default_copy_head_names_the_stage_that_its_datastore_lacks(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, tiny_corpus, datastore=tiny_datastore.folder)
    config = replace(config, model=replace(config.model, copy_head=CopyHeadSettings()))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["train", str(tmp_path / "config.toml")]) == 2
    refused = capsys.readouterr().err
    assert all(
        words in refused for words in (str(config.datastore), "--stage votes", "model.copy_head.datastore = false")
    )
    assert not config.run.exists()


def test_a_run_without_an_evaluation_ends_with_its_loss_on_a_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 20))
    model = replace(config.model, retrieval=RetrievalSettings(cca_layers=()))
    config = replace(config, model=model, train=replace(config.train, steps=2))
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["index", str(tmp_path / "config.toml"), "--stage", "chunk"]) == 0
    capsys.readouterr()
    assert main(["train", str(tmp_path / "config.toml")]) == 0  # the monitor looks at step 2
    printed = capsys.readouterr()
    assert re.match(r"step 2  tokens 256  loss \d", printed.out)
    assert "monitor/" not in printed.out + printed.err
    assert max(map(len, printed.out.splitlines())) < 200


@pytest.mark.parametrize(
    ("documents", "split", "warns"), [(3, (980, 20, 0), True), (3, (1, 0, 0), False), (60, (500, 500, 0), False)]
)
def test_index_warns_if_fewer_than_a_handful_of_documents_are_held_out(
    tmp_path: Path, capsys, documents: int, split: tuple[float, float, float], warns: bool
) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", documents))
    config = replace(config, corpus=replace(config.corpus, split=split))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert main(["index", str(tmp_path / "config.toml"), "--stage", "chunk"]) == 0
    assert ("corpus.split = " in capsys.readouterr().err) == warns


def test_finished_run_trains_again_without_error_and_a_changed_setting_is_refused(trained: Path, capsys) -> None:
    assert main(["train", str(trained / "config.toml")]) == 0
    assert main(["train", str(trained / "config.toml"), "--train.lr", "5e-4"]) == 2
    assert "train.lr was 0.001, now 0.0005" in capsys.readouterr().err


def test_eval_prints_off_and_on_results_and_writes_fingerprints(trained: Path, tmp_path, capsys) -> None:
    out = tmp_path / "results.json"
    assert main(["eval", "perplexity", str(trained / "run"), "--k", "1", "2", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "OFF" in printed
    assert re.search(r"valid +ON k=2 +OFF +[-+]\d+\.\d\d%", printed)
    results = json.loads(out.read_text())
    assert [printed.strip().split("\n")[-1]] == results["gains"]
    assert [row["k"] for row in results["results"]] == [0, 1, 2]
    assert results["fingerprints"]["datastores"]["valid"] == Datastore.open(trained / "datastore").fingerprint


def test_eval_compares_two_checkpoints_by_evaluation_set_and_by_leakage(trained: Path, tmp_path, capsys) -> None:
    out, earlier = tmp_path / "results.json", trained / "run" / "checkpoints" / "00000004"
    sets = ["valid", f"copy={trained / 'datastore'}"]
    arguments = ["--evaluation.sets", *sets, "--evaluation.leakage-tokens", "0", "8", "64", "--output", str(out)]
    assert main(["eval", "perplexity", str(trained / "run"), "--against", str(earlier), *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"copy +00000008 ON k=2 +00000004 ON k=2 ", printed)
    assert "shared tokens at most" in printed
    written = json.loads(out.read_text())
    assert {(row["set"], row["model"], row["k"]) for row in written["results"]} == {
        (name, step, k) for name in ("valid", "copy") for step in ("00000008", "00000004") for k in (0, 2)
    }
    assert len(written["changes"]) == 2 * 3
    assert [level["shared_tokens_at_most"] for level in written["leakage"]] == [0, 8, 16] * 2
    assert [level["leakage_at_most"] for level in written["leakage"]] == [0, 0.5, 1] * 2
    first, _, last = written["leakage"][:3]
    assert first["results"] == first["changes"] == []  # every chunk shares a token with a neighbor
    assert last["share_of_chunks"] == 1
    whole = [row["bits_per_byte"] for row in written["results"][:4]]
    assert [row["bits_per_byte"] for row in last["results"]] == pytest.approx(whole)
    assert last["changes"][0]["percent"] == pytest.approx(written["changes"][0]["percent"])


def test_eval_without_leakage_tokens_measures_no_leakage(trained: Path, capsys) -> None:
    assert main(["eval", "perplexity", str(trained / "run"), "--evaluation.leakage-tokens"]) == 0
    assert "leakage" not in capsys.readouterr().out


def test_train_plots_its_curves_and_the_report_verb_compares_runs(trained: Path, tmp_path, capsys) -> None:
    assert "<svg" in (trained / "run" / "curves.svg").read_text()
    assert main(["report", str(trained / "run"), "--output", str(tmp_path / "one.svg")]) == 0
    assert "8 of 8" in capsys.readouterr().out
    other = Path(shutil.copytree(trained / "run", tmp_path / "other"))
    assert main(["report", str(other), str(trained / "run")]) == 0
    assert f"curves: {other / 'comparison.svg'}" in capsys.readouterr().out
    assert "other ON" in (other / "comparison.svg").read_text()


def test_generate_continues_the_prompt_with_and_without_retrieval(trained: Path, capsys) -> None:
    arguments = ["generate", str(trained / "run"), "--prompt", "# Document 检索", "--max-tokens", "40"]
    for extra in ([], ["--no-retrieval"]):
        assert main(arguments + extra) == 0
        text = capsys.readouterr().out
        assert text.startswith("# Document 检索")
        assert len(text) > 20


def test_search_finds_the_chunk_that_contains_the_text(trained: Path, capsys) -> None:
    train = Datastore.open(trained / "datastore").train
    text = Tokenizer.open(trained / "datastore" / "tokenizer").decode(train.tokens.read(100, 101)[0])
    assert main(["search", str(trained / "datastore"), text, "--k", "3", "--format", "json"]) == 0
    hits = json.loads(capsys.readouterr().out)
    assert len(hits) == 3
    assert text in [hit["text"] for hit in hits]
    assert hits[0]["document"]["title"].startswith("Title ")
    assert [hit["distance"] for hit in hits] == sorted(hit["distance"] for hit in hits)


@pytest.mark.parametrize("path", ["run", "datastore"])
def test_inspect_prints_json_with_plain_values(trained: Path, path: str, capsys) -> None:
    assert main(["inspect", str(trained / path), "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    opened = open_checkpoint(trained / path) if path == "run" else Datastore.open(trained / path)
    assert facts["fingerprint"] == opened.fingerprint
    if path == "run":
        assert facts["step"] == 8
        assert facts["settings"]["model"]["d_model"] == 32
    else:
        assert facts["splits"]["train"]["chunks"] == Datastore.open(trained / path).train.num_chunks
        assert facts["report"]["index"]["recall_at_10"] > 0


def test_json_on_standard_output_equals_the_output_file(trained: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "results.json"
    arguments = ["--evaluation.max-tokens", "100", "--evaluation.leakage-tokens", "--output", str(out)]
    assert main(["eval", "perplexity", str(trained / "run"), *arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_verify_checks_every_byte_of_checkpoints_and_exported_files(trained: Path, tmp_path, capsys) -> None:
    run, file = Path(shutil.copytree(trained / "run", tmp_path / "run")), tmp_path / "model.safetensors"
    assert main(["export", str(run), "--output", str(file)]) == 0
    paths = [run, f"{run}@best", run / "checkpoints" / "00000008", file]
    for path in paths:
        capsys.readouterr()
        assert main(["verify", str(path)]) == 0
        assert "no errors" in capsys.readouterr().out
    for broken in (run / "checkpoints" / "00000008" / "model.safetensors", file):
        changed = bytearray(broken.read_bytes())
        changed[-1] ^= 1
        broken.write_bytes(changed)
    for path in (run, run / "checkpoints" / "00000008", file):
        assert main(["verify", str(path)]) == 1
        printed = capsys.readouterr().out
        assert f"{broken if path == file else 'model.safetensors'} has changed" in printed
    assert main(["verify", str(run), "--repair"]) == 2
    assert "--repair" in capsys.readouterr().err


def test_export_and_import_replace_an_existing_file_only_with_overwrite(trained: Path, tmp_path, capsys) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"precious")
    for verb, source in (("export", trained / "run"), ("import", tmp_path)):
        assert main([verb, str(source), "--output", str(file)]) == 2
        assert "--overwrite" in capsys.readouterr().err
        assert file.read_bytes() == b"precious"
    assert main(["export", str(trained / "run"), "--output", str(file), "--overwrite"]) == 0
    assert main(["verify", str(file)]) == 0


def test_verbs_accept_an_exported_file_and_the_best_checkpoint_as_checkpoint(trained: Path, tmp_path, capsys) -> None:
    file = tmp_path / "model.safetensors"
    assert main(["export", f"{trained / 'run'}@best", "--output", str(file)]) == 0
    assert "step" in capsys.readouterr().out
    printed = []
    for checkpoint in (str(file), f"{trained / 'run'}@best"):
        for arguments in (["inspect", checkpoint], ["generate", checkpoint, "--max-tokens", "5"]):
            assert main(arguments) == 0
        printed.append(capsys.readouterr().out.splitlines()[1:])
        assert main(["eval", "perplexity", checkpoint, "--output", str(tmp_path / "out.json")]) == 0
        printed[-1].append(json.loads((tmp_path / "out.json").read_text())["fingerprints"])
        capsys.readouterr()
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("indx x", ["'indx'", "'index'"]),
        ("evl", ["'evl'", "'eval'?"]),
        ("eval", ["perplexity, qa, retrieval, harness"]),
        ("eval RUN", ["perplexity, qa"]),
        ("plan traim", ["'traim'", "`retro plan train`?"]),
        ("index", ["usage: retro index CONFIG"]),
        ("report", ["usage: retro report RUN"]),
        ("index missing.toml", ["missing.toml"]),
        ("index CONFIG --corpus.pathz x", ["--corpus.pathz", "--corpus.paths"]),
        ("train CONFIG --model.attention.smeared-keys true", ["smeared-keys", "was removed", "smeared_tokens = 3"]),
        ("index CONFIG --chunks.chunk-length 1", ["--chunks.chunk-length = 1", "2"]),
        ("index CONFIG --neighbors.stored 5", ["neighbors.stored was 6, now 5", "--rebuild"]),
        ("index CONFIG --index.seed 2147483648", ["index.seed = 2147483648"]),  # Faiss counts in 32 bits
        ("index CONFIG --index.factory IDMap,Flat", ["index.factory = 'IDMap,Flat'"]),
        ("index CONFIG --corpus.metadata-keys title id", ["corpus.metadata_keys", "'id'"]),
        ("index CONFIG --neighbors.stored 99999999999999999999", ["neighbors.stored = 9", "4096"]),
        ("index CONFIG --neighbors.candidates 99999999999999999999", ["neighbors.candidates = 9", "65536"]),
        ("search nowhere text", ["nowhere", "DATASTORE", "`retro index CONFIG`"]),
        ("search RUN text", ["is not a datastore but the folder of a run", "settings.json", "data.datastores"]),
        ("search DATASTORE BLANK", ["empty"]),
        ("search DATASTORE how do I open a file --k 3", ["quotes", "'how do I open a file'"]),
        ("trace DATASTORE how do I open", ["quotes", "'how do I open'"]),
        ("index CONFIG --corpus.path x", ["--corpus.path.", "Did you mean --corpus.paths?"]),
        ("generate RUN --prompt", ["--prompt", "no text"]),
        ("eval perplexity nowhere", ["nowhere", "CHECKPOINT", "`retro train CONFIG`"]),
        ("eval perplexity DATASTORE", ["is neither a checkpoint"]),
        ("eval perplexity RUN --k 7", ["k = 7", "stores 6"]),
        ("eval perplexity RUN --evaluation.window 50", ["evaluation.window = 50"]),
        ("eval perplexity RUN --evaluation.sets test9", ["evaluation.sets", "'test9'", "NAME=DATASTORE:SPLIT"]),
        ("eval perplexity RUN --evaluation.sets a=nowhere", ["evaluation.sets", "'a=nowhere'"]),
        ("eval perplexity RUN --evaluation.leakage-tokens -1", ["evaluation.leakage-tokens[0] = -1"]),
        ("eval perplexity RUN --against RUN", ["--against", "same checkpoint"]),
        ("eval perplexity RUN --leakage-from nowhere", ["nowhere is not a datastore"]),
        ("export RUN", ["--output", "required"]),
        ("export RUN --output model.pt", ["model.pt", ".safetensors"]),
        ("report RUN nowhere", ["nowhere", "RUN", "`retro train CONFIG`"]),
        ("report RUN DATASTORE", ["is not the folder of a run"]),
        ("inspect nowhere", ["`retro train CONFIG`", "`retro index CONFIG`"]),
        ("inspect EMPTY", ["`retro train CONFIG`", "`retro index CONFIG`"]),
        ("index CONFIG --datastore CONFIG", ["config.toml is a file"]),
        ("train CONFIG --run CONFIG", ["config.toml is a file"]),
        ("train CONFIG --run new --train.init-from nowhere", ["nowhere is neither a checkpoint"]),
        (
            "train CONFIG --data.k 9",
            ["data.k = 9", "data.k = 6 or less", "--neighbors.stored 9 --stage neighbors --rebuild"],
        ),
        ("train CONFIG --train.device cuda", ["no CUDA device"]),
        (
            "train CONFIG --data.datastores nowhere --model.preset huge",
            ["--model.preset = huge", "tiny"],
        ),  # before any file
        ("report RUN --output page.html", ["output = ", ".svg"]),
    ],
)
def test_user_mistake_prints_one_message_and_exits_with_status_2(trained: Path, capsys, arguments, words) -> None:
    names = {"CONFIG": "config.toml", "DATASTORE": "datastore", "RUN": "run", "EMPTY": "empty"}
    paths = {word: str(trained / name) for word, name in names.items()} | {"BLANK": " "}
    (trained / "empty").mkdir(exist_ok=True)
    assert main([paths.get(word, word) for word in arguments.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") or "\nerror: " in message
    assert message.count("error: ") == 1
    assert not any(word in message for word in ("Traceback", "Errno"))
    assert all(word in message for word in words), message


def test_ray_executor_is_refused_under_torchrun(trained: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(trained / "config.toml"), "--executor.kind", "ray"]) == 2
    assert "executor.kind = 'ray': torchrun or Slurm" in capsys.readouterr().err


def test_version_names_the_program_its_commit_python_torch_and_faiss(capsys) -> None:
    assert main(["--version"]) == 0
    line = capsys.readouterr().out.strip()
    versions = dict(part.split(" ", 1) for part in line.split(", "))
    assert versions["Python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert next(name for name in versions if name.startswith("faiss"))
    assert (" (commit " in versions["retro"]) == (ROOT / ".git").exists()
    assert main(["--help"]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "resumes"),
    [(["train", "{config}"], True), (["index", "{config}"], True), (["inspect", "{run}"], False)],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_ctrl_c_promises_a_resume_only_where_there_is_one(trained, arguments, resumes, monkeypatch, capsys) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    verb, path = arguments
    monkeypatch.setattr(f"pipelines.cli.{VERBS[verb].module}.{VERBS[verb].run}", interrupted)
    names = {"config": trained / "config.toml", "run": trained / "run"}
    assert main([verb, path.format(**names)]) == 130
    assert ("same command again" in capsys.readouterr().err) == resumes


@pytest.mark.parametrize(
    ("verb", "rank", "names"), [("inspect", "0", ["inspect"]), ("inspect", "1", []), ("serve", "0", [])]
)
def test_a_verb_breaks_its_silence_in_the_first_process_unless_it_waits_for_requests(
    trained: Path, monkeypatch, verb: str, rank: str, names: list[str]
) -> None:
    running = []

    def run(*_: object) -> int:
        running.extend(work.name for work in silence.works)
        return 0

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(f"pipelines.cli.{VERBS[verb].module}.{VERBS[verb].run}", run)
    assert main([verb, str(trained / "datastore")]) == 0
    assert running == names


def test_program_without_a_verb_lists_all_verbs(capsys) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {verb} " in printed for verb in VERBS)


OTHER_SPELLINGS = {"to", "out", "json", "html", "also", "mend", "on"}
"""Names that other programs use for the same options: `--output`, `--format`, `--repair`, `--extra-datastores`, `--k`."""


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_use_the_same_name_for_the_same_option(verb: str) -> None:
    options = leaf_types(VERBS[verb].load()[1])
    assert not OTHER_SPELLINGS & {option.rpartition(".")[2] for option in options}
    assert options.get("format", Format) is Format
    if verb.split()[0] in ("eval", "plan"):
        assert {"output", "format"} <= set(options)


@pytest.mark.parametrize("first", ["eval", "plan"])
def test_help_of_the_first_word_of_a_verb_lists_the_second_words(first: str, capsys) -> None:
    assert main([first, "--help"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [f"{first} {row}" for row in rows] == [verb for verb in VERBS if verb.startswith(f"{first} ")]


def test_doctor_runs_when_torch_cannot_be_imported() -> None:
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "pyarrow"}:
            raise ImportError(f"{name} is broken")
sys.meta_path.insert(0, Blocked())
from pipelines.cli.main import main
sys.exit(main(["doctor"]))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "torch is broken" in process.stdout


def test_a_package_that_does_not_import_is_one_message_and_our_own_mistake_is_not(monkeypatch, capsys) -> None:
    def without_numpy_2(arguments: list[str]) -> int:
        raise ImportError("pyarrow requires NumPy 2.0 or newer, found 1.26.4")

    monkeypatch.setattr(cli, "run_verb", without_numpy_2)
    assert cli.main(["index", "a.toml"]) == 2
    message = capsys.readouterr().err
    assert "found 1.26.4" in message
    assert "retro doctor" in message

    def misnamed(arguments: list[str]) -> int:
        from indexing.store.errors import NoSuchError  # noqa: F401

        return 0

    monkeypatch.setattr(cli, "run_verb", misnamed)
    with pytest.raises(ImportError):
        cli.main(["index", "a.toml"])


@pytest.mark.parametrize(
    ("command", "policy", "spins"),
    [
        (["search", "nowhere", "text"], "PASSIVE", None),
        (["inspect", "nowhere"], "PASSIVE", None),
        (["serve", "nowhere"], None, "10000"),
        (["eval", "qa", "nowhere", "nothing"], "PASSIVE", None),
        (["train", "nowhere"], None, "10000"),
    ],
)
def test_waiting_threads_sleep_at_once_or_soon(
    monkeypatch: pytest.MonkeyPatch, command: list[str], policy: str | None, spins: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "recorded, so that it is restored")
        monkeypatch.delenv(name)
    assert main(command) == 2
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    assert os.environ.get("GOMP_SPINCOUNT") == spins
