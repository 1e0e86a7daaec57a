"""`retro verify` names every damaged part of a datastore and no intact one; `--repair` and `retro index` restore its bytes."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing import machine
from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked, write_json
from indexing.verification.datastore import Verified, repair, verify_datastore
from pipelines.cli.main import main
from pipelines.config import Config
from tests.conftest import build_local, contents, tiny_config
from tests.indexing.verification.contents import check_contents
from tests.indexing.verification.datastores import build_complete, build_grown

UNCHECKED = ("report.json", "report.html", ".lock", ".deleted.json.lock")  # no other file depends on these


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return build_complete(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return build_grown(tmp_path_factory.mktemp("grown"))


@pytest.fixture(params=["built", "grown"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Settings of a copy of one of these datastores, with its times, to damage."""
    config = request.getfixturevalue(request.param)
    return replace(config, datastore=shutil.copytree(config.datastore, tmp_path / "copy"))


@pytest.fixture
def folder(tmp_path: Path, tiny_datastore: Datastore) -> Path:
    """A copy of the tiny datastore, with its times, to damage."""
    return shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")


def verify(folder: Path) -> Verified:
    return verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None))


def lines(folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in verify(folder).problems]


def files_of(folder: Path, manifests: bool) -> list[str]:
    """The checked files of a datastore: its manifests with `deleted.json`, or all others."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    is_manifest = {name: name.endswith(("manifest.json", "deleted.json")) for name in names}
    return [name for name in names if is_manifest[name] == manifests and os.path.basename(name) not in UNCHECKED]


def write(path: Path, data: bytes) -> None:
    """Write and keep the modification time, as a disk that loses a bit does."""
    times = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest and its own checksum, as a faulty program would."""
    value = read_json(path)
    change(value)
    write_checked(path, value)


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = int(place * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return flip


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": flipped(0),
    "middle byte flipped": flipped(0.5),
    "last byte flipped": flipped(1),
    "cut": lambda data: data[: len(data) // 2],
    "last byte lost": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "extended": lambda data: data + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("manifests", [False, True])
def test_every_damaged_file_is_named(config: Config, damage: Callable[[bytes], bytes], manifests: bool) -> None:
    folder, damaged = config.datastore, []
    for name in files_of(folder, manifests):
        before = (folder / name).read_bytes()
        if before and (after := damage(before)) != before:
            write(folder / name, after)
            damaged.append(name)
    assert len(damaged) > 20
    found = lines(folder)
    assert [name for name in damaged if not any(line.startswith(name) for line in found)] == []


def test_problems_and_progress_do_not_depend_on_the_number_of_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files_of(folder, manifests=False)[::3]:
        write(folder / name, flipped(0.5)((folder / name).read_bytes()))
    (folder / "chunks/00000/train/tokens.npy").unlink()

    def found(cores: int) -> tuple[Verified, int]:
        units = list[int]()
        monkeypatch.setattr(machine, "usable_cores", lambda: cores)
        return verify_datastore(folder, lambda name, *, total, unit: nullcontext(units.append)), sum(units)

    one, checked = found(1)
    assert len(one.problems) > 5
    assert checked == one.bytes
    assert found(4) == (one, checked)


def test_every_removed_file_is_named(config: Config) -> None:
    folder = config.datastore
    for name in files_of(folder, manifests=True):
        if name != "deleted.json":  # without it no documents are deleted, which is a valid state
            (folder / name).rename(folder / "aside")  # one by one: other manifests name the missing artifact
            assert any(name in line for line in lines(folder)), name
            (folder / "aside").rename(folder / name)
    names = files_of(folder, manifests=False)
    for name in names:
        (folder / name).unlink()
    found = lines(folder)
    assert [name for name in names if not any(line.startswith(f"{name} is missing") for line in found)] == []


def test_every_file_of_another_shard_is_named(config: Config) -> None:
    folder, swapped = config.datastore, []
    for name in files_of(folder, manifests=False):
        other = folder / name.replace("/00000/", "/00001/")
        if other.exists() and other.read_bytes() != (folder / name).read_bytes():
            write(folder / name, other.read_bytes())
            swapped.append(name)
    assert len(swapped) > 15
    found = lines(folder)
    assert [name for name in swapped if not any(line.startswith(name) for line in found)] == []


def renamed(manifest: dict) -> None:
    manifest["renamed"] = manifest.pop(min(manifest))


def other_checksum(manifest: dict) -> None:
    file = min(manifest["files"].values(), key=str) if "files" in manifest else manifest
    file["checksum"] = file["checksum"][::-1]


def other_count(manifest: dict) -> None:
    manifest["counts" if "counts" in manifest else "pad_id"] = 7


@pytest.mark.parametrize("change", [renamed, other_checksum, other_count])
def test_every_edited_manifest_is_named(config: Config, change: Callable[[dict], None]) -> None:
    names = [name for name in files_of(config.datastore, manifests=True) if name != "deleted.json"]
    for name in names:
        value = read_json(config.datastore / name)
        change(value)
        write_json(config.datastore / name, value)
    found = lines(config.datastore)
    assert [name for name in names if not any(line.startswith(name) for line in found)] == []


@pytest.mark.parametrize("paths", ["chunks/00000..999999999", "../../chunks", "/etc", 7, ["chunks/00000", None]])
@pytest.mark.parametrize("name", ["", "embedder"])
def test_a_path_that_cannot_be_an_artifact_is_reported_with_its_manifest(
    folder: Path, name: str, paths: object
) -> None:
    key, outside = "paths" if name else "artifacts", folder.parent / "chunks"
    outside.mkdir()
    edit(folder / name / "manifest.json", lambda manifest: manifest[key].update(chunks=paths))
    named = f"{name}/manifest.json".strip("/")
    assert any(line.startswith(named) and "cannot be an artifact" in line for line in lines(folder))
    repair(folder, verify(folder))
    assert outside.exists()


def test_intact_datastore_has_no_problems_and_is_not_changed(config: Config) -> None:
    folder = config.datastore
    check_contents(Datastore.open(folder))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    verified = verify(folder)
    assert verified.problems == ()
    assert verified.artifacts == len(list(folder.rglob("manifest.json"))) - 1
    assert {*verified.stages} >= {"chunk", "embed", "train-index", "add", "sparse", "neighbors"}
    assert verified.bytes == sum((folder / name).stat().st_size for name in files_of(folder, manifests=False))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# --- artifacts of others ---------------------------------------------------------------------------------------------


def test_missing_short_and_unfinished_files_are_distinguished_with_their_repair(folder: Path) -> None:
    (folder / "chunks/00001/train/lengths.npy").unlink()
    (folder / "index/tuned/tuned.json").write_text("{")
    shutil.rmtree(folder / "embeddings/00002")
    (folder / "neighbors/00003/manifest.json").unlink()
    chunks, embeddings, tuned, neighbors = lines(folder)
    assert chunks.startswith("chunks/00001/train/lengths.npy is missing: remove chunks/00001 (--repair does)")
    assert embeddings.startswith(
        "embeddings/00002 is not finished: embeddings/00002/manifest.json is missing: `retro index"
    )
    assert tuned.startswith("index/tuned/tuned.json has 1 bytes instead of ")
    assert neighbors.startswith("neighbors/00003 is not finished: neighbors/00003/manifest.json is missing: remove ")


@pytest.mark.parametrize(
    "artifact", ["chunks", "embeddings", "sparse", "neighbors", "materialized", "dedup/signatures"]
)
def test_artifact_of_another_shard_or_beyond_the_last_is_named(built: Config, tmp_path: Path, artifact: str) -> None:
    folder = shutil.copytree(built.datastore, tmp_path / "copy")
    shutil.copytree(folder / artifact / "00000", folder / artifact / "00099")
    if not artifact.startswith("dedup"):
        assert any(line.startswith(f"{artifact}/00099 does not belong") for line in lines(folder))
    assert any(line.startswith(f"{artifact}/00099 ") for line in lines(folder))
    shutil.rmtree(folder / artifact / "00001")
    (folder / artifact / "00099").rename(folder / artifact / "00001")
    assert any(line.startswith(f"{artifact}/00001 ") for line in lines(folder))


def test_artifact_of_another_build_is_found_by_its_fingerprint(tmp_path, folder, tiny_corpus) -> None:
    config = tiny_config(tmp_path / "other", tiny_corpus)
    other = build_local(replace(config, embedder=replace(config.embedder, dimension=16))).folder
    shutil.rmtree(folder / "embeddings/00001")
    shutil.copytree(other / "embeddings/00001", folder / "embeddings/00001")
    shutil.rmtree(folder / "chunks/00002")
    shutil.copytree(other / "chunks/00003", folder / "chunks/00002")
    assert [line.partition(":")[0] for line in lines(folder)] == [
        "chunks/00002 does not belong here",
        "embeddings/00001 was made from another 'embedder' than the existing one",
    ]


def test_manifest_of_the_datastore_is_compared_with_the_shards(folder: Path) -> None:
    def change(manifest: dict) -> None:
        manifest["splits"]["valid"]["chunks"][2] += 1
        manifest["fingerprints"]["embed"] = "0" * 16

    edit(folder / "manifest.json", change)
    found = lines(folder)
    assert len(found) == 2
    assert all(line.startswith("manifest.json ") and line.endswith("writes it again.") for line in found)
    assert repair(folder, verify(folder)) == []


def test_neighbors_of_another_datastore_are_named_until_it_is_back(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    other = shutil.copytree(tiny_datastore.folder, tmp_path / "other")
    embedder = replace(config.embedder, path=str(other))
    tokenizer = replace(config.tokenizer, kind="sentencepiece", path=str(other / "tokenizer" / "sentencepiece.model"))
    extra = replace(config.neighbors, extra_datastores=(other,))
    datastore = build_local(replace(config, embedder=embedder, tokenizer=tokenizer, neighbors=extra))
    check_contents(datastore)
    assert verify(datastore.folder).problems == ()
    other.rename(tmp_path / "moved")
    (problem,) = verify(datastore.folder).problems
    assert "cannot be opened" in str(problem)
    assert repair(datastore.folder, verify(datastore.folder)) == []


@pytest.mark.parametrize("location", ["s3://bucket/wiki", ""])
def test_url_and_other_folder_are_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(InputError, match=location or str(tmp_path)):
        verify(Path(location) if location else tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- repair ----------------------------------------------------------------------------------------------------------


def break_all(folders: set[Path], victim: str) -> None:
    """Damage one file in each of these folders, which are artifacts or the datastore itself."""
    for folder in sorted(folders):
        path = folder / "manifest.json"
        if victim == "file":
            skipped = (*UNCHECKED, "deleted.json", path.name)
            names = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file.name not in skipped]
            path = folder / (names[0] if names else path.name)
        data = path.read_bytes()
        path.write_bytes(data[:-1] if victim == "newline" else flipped(0.3)(data))


@pytest.mark.parametrize(
    ("kind", "victim"),
    [("built", "file"), ("built", "newline"), ("grown", "manifest"), ("appended", "file"), ("appended", "manifest")],
)
def test_repair_and_index_restore_the_bytes_of_all_damaged_artifacts(request, capsys, kind: str, victim: str) -> None:
    config = request.getfixturevalue("built" if kind == "built" else "grown")
    whole = contents(config.datastore)
    folders = {path.parent for path in config.datastore.rglob("manifest.json")}
    # If all of these but one are intact, verification knows that files belong to different generations.
    kept = {"grown": ("appended/00001", "appended/00002"), "appended": ("corpus", "appended/00002")}.get(kind, ())
    folders -= {config.datastore / name for name in kept}
    break_all(folders, victim)
    assert main(["verify", str(config.datastore), "--repair"]) == 1
    printed = capsys.readouterr().out
    assert f": {len(folders)} errors" in printed
    assert printed.splitlines()[-1].endswith(
        f"`retro index CONFIG{' --append' * (kind == 'appended')}` builds them again"
    )
    build_local(config, append=kind == "appended")
    if kind == "built":
        build_local(config, only="merge")
        build_local(config, only="suffixes")
    assert contents(config.datastore) == whole
    assert lines(config.datastore) == []


def test_index_rebuilds_artifacts_with_a_damaged_manifest(built: Config, caplog) -> None:
    whole = contents(built.datastore)
    folders = {path.parent for path in built.datastore.rglob("manifest.json")}
    folders -= {built.datastore / "index" / "merged", *built.datastore.glob("suffixes/*")}  # built by name only
    for group in ({built.datastore / "dedup" / "removed"}, {built.datastore / "neighbors" / "00000"}, folders):
        caplog.clear()
        break_all(group, "manifest")
        build_local(built)
        assert all(f"{folder}/manifest.json" in caplog.text for folder in group)
        build_local(built, only="merge")
        build_local(built, only="suffixes")
        assert contents(built.datastore) == whole


@pytest.mark.usefixtures("not_compared")
def test_repair_also_removes_artifacts_built_from_changed_data(tmp_path, tiny_corpus, tiny_datastore) -> None:
    """A byte changes between two stages. The second stage has correct checksums, but wrong data, if it did not compare its input."""
    config = tiny_config(tmp_path, tiny_corpus)
    build_local(config, only="chunk")
    victim = config.datastore / "chunks/00001/train/tokens.npy"
    rewritten = np.load(victim)
    rewritten[3:30] = rewritten[50:77]
    with open(victim, "r+b") as file:
        file.seek(128)
        file.write(rewritten.tobytes())
    build_local(config)
    assert contents(config.datastore) != contents(tiny_datastore.folder)
    verified = verify(config.datastore)
    assert str(verified.problems[0]).startswith(f"{victim} has changed")
    affected = {"chunks/00001", "embedder", "embeddings/00001", "index/tuned"}
    assert {problem.artifact for problem in verified.problems} >= affected
    assert not {"corpus", "chunks/00000"} & {*repair(config.datastore, verified)}
    build_local(config)
    assert contents(config.datastore) == contents(tiny_datastore.folder)
    assert verify(config.datastore).problems == ()


def test_repair_removes_materialized_neighbors_of_others(built: Config, tmp_path: Path) -> None:
    folder = shutil.copytree(built.datastore, tmp_path / "copy")

    def change(manifest: dict) -> None:
        manifest["recipe"]["inputs"]["neighbors"] = "0" * 16
        manifest["fingerprint"] = fingerprint(manifest["recipe"])

    edit(folder / "materialized" / "00001" / "manifest.json", change)
    assert "materialized/00001 was made from another 'neighbors'" in lines(folder)[0]
    assert repair(folder, verify(folder)) == ["materialized/00001"]


def nested(manifest: Path) -> None:
    manifest.write_bytes(b'{"files":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize("name", ["", "tokenizer", "chunks/00000", "index/tuned"])
def test_repair_and_index_replace_a_manifest_that_is_nested_too_deeply(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore, name: str
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tmp_path / "datastore")
    shutil.copytree(tiny_datastore.folder, config.datastore)
    whole = contents(config.datastore)
    nested(config.datastore / name / "manifest.json")
    assert any("nested more than" in line for line in lines(config.datastore))
    assert main(["verify", str(config.datastore), "--repair"]) == 1
    build_local(config)
    assert contents(config.datastore) == whole
    assert lines(config.datastore) == []


def test_deletions_beyond_the_datastore_are_a_problem(folder: Path) -> None:
    write_checked(folder / "deleted.json", {"documents": {"a": 1}, "chunks": {"train": [[0, 10**15]]}})
    assert any("deletes chunks of train up to" in line for line in lines(folder))
    write_checked(folder / "deleted.json", {"documents": {"a": 1}, "chunks": {"train": [[4, 8], [0, 2]]}})
    assert any("the ranges are not in order" in line for line in lines(folder))
