"""Faults on disk: damaged artifacts are named and rebuilt, a full disk loses no finished work, bytes are the same."""

import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.artifact import Recipe, create, reading
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import LocalExecutor
from pipelines.stages.shards import Shard, run_shards
from tests.conftest import ARTIFACTS, build_local, contents, tiny_config


@pytest.fixture
def config(tmp_path, tiny_corpus, tiny_datastore: Datastore) -> Config:
    """Settings of a finished datastore to damage: a copy that keeps the original times."""
    config = tiny_config(tmp_path, tiny_corpus)
    shutil.copytree(tiny_datastore.folder, config.datastore)
    return config


def largest_file(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return max(files, key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def times(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()
    }


# --- damaged artifacts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("artifact", "damage"),
    [*((artifact, "cut short") for artifact in ARTIFACTS), ("chunks/00001", "missing"), ("index/tuned", "manifest")],
)
def test_only_the_damaged_artifact_is_named_and_rebuilt(
    config, tiny_datastore, caplog, artifact: str, damage: str
) -> None:
    folder = config.datastore / artifact
    victim = folder / "manifest.json" if damage == "manifest" else largest_file(folder)
    victim.unlink() if damage == "missing" else truncate(victim)
    before = times(config.datastore)
    build_local(config)
    (warning,) = [record.message for record in caplog.records if "is made again" in record.message]
    assert str(victim) in warning
    assert contents(config.datastore) == contents(tiny_datastore.folder)
    changed = {name for name, time in times(config.datastore).items() if before.get(name) != time} - {".lock"}
    assert changed == {f"{artifact}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}


def test_damaged_datastore_manifest_is_refused_by_readers_and_rewritten_by_index(config, tiny_datastore) -> None:
    truncate(config.datastore / "manifest.json")
    with pytest.raises(InputError, match=r"manifest\.json.*retro index CONFIG"):
        Datastore.open(config.datastore)
    with pytest.raises(InputError, match=r"manifest\.json"):
        build_local(config, only="neighbors")
    before = times(config.datastore)
    build_local(config)
    assert {name for name, time in times(config.datastore).items() if before[name] != time} - {".lock"} == {
        "manifest.json"
    }
    assert contents(config.datastore) == contents(tiny_datastore.folder)


def test_changed_settings_are_refused_even_if_a_file_is_damaged(config) -> None:
    truncate(config.datastore / "embeddings/00003/train.npy")
    with pytest.raises(InputError, match=r"embedder\.dimension was 32, now 16"):
        build_local(replace(config, embedder=replace(config.embedder, dimension=16)))


DAMAGES = {
    "chunks/00000/train/tokens.npy": ("train", b""),
    "sparse/00000/chunks-0.pos": ("search", None),
    "tokenizer/meta.json": ("search", 5),
    "index/tuned/tuned.json": ("search", b"nprobe"),
    "index/00000/vectors.faiss": ("search", 0),
    "chunks/00000/manifest.json": ("search", None),
}
"""File → verb that reads it, and its damage: the byte that changes, or the text in which it is; empty = cut, None = removed."""


@pytest.mark.parametrize("file", DAMAGES)
def test_verbs_name_the_damaged_file_and_its_repair(config, capsys, file: str) -> None:
    path, (verb, place) = config.datastore / file, DAMAGES[file]
    if place is None:
        path.unlink()
    elif place == b"":
        truncate(path)
    else:
        data = bytearray(path.read_bytes())
        data[data.index(place) if isinstance(place, bytes) else place] ^= 1
        path.write_bytes(data)
    settings = config.datastore.with_name("config.toml")
    settings.write_text(to_toml(config))
    arguments = {"train": [str(settings)], "search": [str(config.datastore), "index chunk"]}
    assert main([verb, *arguments[verb]]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "retro verify DATASTORE --repair" in said


def test_error_in_the_code_that_reads_an_intact_file_is_not_hidden(config) -> None:
    with pytest.raises(ZeroDivisionError), reading(config.datastore / "tokenizer" / "meta.json"):
        raise ZeroDivisionError


def test_inspect_ignores_a_temporary_folder_that_vanishes(config, capsys) -> None:
    temporary = config.datastore / "chunks" / ".00009.01234567.tmp"
    temporary.mkdir()

    def vanish(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.scandir" and str(arguments[0]) == str(temporary) and temporary.exists():
            temporary.rmdir()

    sys.addaudithook(vanish)
    assert main(["inspect", str(config.datastore)]) == 0
    assert not temporary.exists()


# --- shards ----------------------------------------------------------------------------------------------------------


def test_failing_shard_is_named_and_finished_shards_are_kept(config) -> None:
    shutil.rmtree(config.datastore / "embeddings")
    victim = config.datastore / "chunks/00002/train/tokens.npy"
    victim.write_bytes(b"\0" * victim.stat().st_size)  # the size is correct
    with pytest.raises(InputError, match=r"00002/train/tokens\.npy has changed"):
        build_local(config)
    assert sorted(path.name for path in (config.datastore / "embeddings").iterdir()) == ["00000", "00001"]


def test_shard_finished_by_a_dead_worker_is_not_built_again(tmp_path) -> None:
    """A worker can die after the rename and before it reports. Its task is then given to another worker."""
    out, shard = tmp_path / "chunks/00000", Shard("chunks/00000", Recipe("chunk", 1), (), size=1)

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    def finish(unfinished: Sequence[Shard]) -> None:
        assert len(unfinished) == 1
        with create(out, shard.recipe) as (work, _):
            (work / "file").write_bytes(b"1")

    executor = LocalExecutor(ExecutorSettings())
    run_shards(tmp_path, "chunk", "chunks", never, [shard], executor, before=finish)
    assert (out / "file").read_bytes() == b"1"


def test_shard_written_to_a_disk_of_another_machine_is_refused(tmp_path) -> None:
    class Elsewhere(LocalExecutor):
        def map(self, stage, function, tasks, advance):
            moved = [replace(task, arguments=(tmp_path / "other machine", *task.arguments[1:])) for task in tasks]
            return super().map(stage, function, moved, advance)

    shard = Shard("chunks/00000", Recipe("chunk", 1), (), size=1)
    with pytest.raises(InputError, match=r"chunks/00000.*not visible"):
        run_shards(tmp_path, "chunk", "chunks", lambda work, advance: None, [shard], Elsewhere(ExecutorSettings()))
    assert (tmp_path / "other machine" / "manifest.json").exists()


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A 64 kB disk that `mount -o remount,size=…` can enlarge."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights that this machine does not give")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def nothing_half_written(folder: Path) -> bool:
    """True if every artifact is finished and there are no temporary files."""
    artifacts = {path.parent for path in folder.rglob("manifest.json")}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return all(artifacts & {path.parent, path.parent.parent} for path in files) and not list(folder.rglob("*.tmp"))


def first_failure(config: Config) -> str:
    try:
        build_local(config)
    except OSError as error:
        return str(error)
    return ""


def test_build_resumes_after_the_disk_was_full_at_every_stage(
    tmp_path, tiny_corpus, tiny_datastore, small_disk
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=small_disk / "datastore")
    stages, message = set(), first_failure(config)
    for size in range(160, 8000, 96):
        if not message:
            break
        file = re.search(r"No space left on device.*'(.+)'$", message)[1]
        stages.add(Path(file).relative_to(config.datastore).parts[0])
        assert nothing_half_written(config.datastore)
        subprocess.run(["mount", "-o", f"remount,size={size}k", small_disk], check=True)
        message = first_failure(config)
    assert stages >= {"chunks", "embeddings", "index", "sparse", "neighbors"}
    assert contents(config.datastore) == contents(tiny_datastore.folder)


@pytest.mark.slow
def test_build_resumes_after_a_file_reached_its_size_limit(tmp_path, tiny_corpus, tiny_datastore) -> None:
    """The same test with the kernel's limit on file sizes, which needs no root privileges."""
    config = tiny_config(tmp_path, tiny_corpus)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, "-m", "pipelines.index", str(file)]
    limit = largest_file(tiny_datastore.folder / "embeddings").stat().st_size - 1000
    assert limit > largest_file(tiny_datastore.folder / "chunks").stat().st_size
    failed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert failed.returncode == 2
    last = failed.stderr.splitlines()[-1]
    assert re.search(
        r"^error: .*embeddings/\d{5}/train\.npy: File too large; free some space and run the same command again", last
    )
    assert failed.stderr.count("File too large") == 1
    assert nothing_half_written(config.datastore)
    finished = times(config.datastore)
    subprocess.run(command, check=True, capture_output=True)
    after = times(config.datastore)
    assert {name for name in finished if finished[name] != after[name]} <= {"manifest.json", ".lock"}
    assert contents(config.datastore) == contents(tiny_datastore.folder)


# --- the command -----------------------------------------------------------------------------------------------------


def test_verify_checks_the_finished_stages_of_an_unfinished_datastore(tmp_path, tiny_corpus, capsys) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    build_local(config, only="chunk")
    build_local(config, only="embed")
    assert main(["verify", str(config.datastore)]) == 0
    assert "finished stages chunk, embed:" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 2
    assert "is not a datastore" in capsys.readouterr().err


def test_repair_is_refused_while_another_process_builds(config, capsys) -> None:
    import fcntl

    truncate(config.datastore / "index/tuned/tuned.json")
    with open(config.datastore / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["verify", str(config.datastore), "--repair"]) == 2
        assert "another process" in capsys.readouterr().err
        assert main(["verify", str(config.datastore)]) == 1
    assert read_json(config.datastore / "index/tuned/manifest.json")
