"""`retro verify` finds every damaged file of a datastore, and `--repair` and `retro index` restore its bytes."""

import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from indexing.corpus.readers import CorpusSettings
from indexing.dedup.near_duplicates import DedupSettings
from indexing.store.datastore import delete_documents
from indexing.verification.datastore import verify_datastore
from pipelines.cli import main
from pipelines.config import Config
from tests.conftest import build_local, contents, tiny_config, write_corpus

UNCHECKED = ("report.json", "report.html", ".lock", ".deleted.json.lock")  # no other file depends on these
TIME = 10**18  # nanoseconds; modification time of all files
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a finished datastore of two shards, with near copies removed and neighbors materialized."""
    folder = tmp_path_factory.mktemp("damage")
    corpus = write_corpus(folder / "corpus.jsonl", 36)
    corpus.write_text(corpus.read_text() + corpus.read_text().replace('"doc-', '"copy-'))
    evaluation = write_corpus(folder / "evaluation.jsonl", 4, seed=3)
    config = tiny_config(folder, corpus, dedup=DedupSettings(within=True, paths=(str(evaluation),)))
    reading = CorpusSettings(paths=(str(corpus),), shard_bytes=40_000, split=(800, 200, 0))
    config = replace(config, corpus=reading, neighbors=replace(config.neighbors, materialized=2))
    build_local(config)
    return config


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a finished datastore with deleted documents, to which two files were appended one by one."""
    folder = tmp_path_factory.mktemp("grown")
    files = tuple(str(write_corpus(folder / f"{seed}.jsonl", 12, seed)) for seed in range(3))
    config = tiny_config(folder, folder, corpus=CorpusSettings(paths=files[:1], split=(800, 200, 0)))
    build_local(config)
    for count in (2, 3):
        config = replace(config, corpus=replace(config.corpus, paths=files[:count]))
        build_local(config, append=True)
    delete_documents(config.datastore, ["doc-1", "doc-7"])
    return config


def found(folder: Path) -> list[str]:
    problems = verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None)).problems
    return [str(problem) for problem in problems]


@dataclass(frozen=True)
class Damage:
    """A damaged file: its bytes before and after the damage; None if deleted."""

    path: Path
    what: str
    before: bytes
    after: bytes | None

    def do(self) -> None:
        self.path.unlink() if self.after is None else self._write(self.after)

    def undo(self) -> None:
        self._write(self.before)

    def _write(self, data: bytes) -> None:
        """Write and keep the modification time, as a disk that loses a bit does."""
        self.path.write_bytes(data)
        os.utime(self.path, ns=(TIME, TIME))


def flipped(data: bytes) -> bytes:
    place = int(RNG.integers(len(data)))
    return data[:place] + bytes([data[place] ^ 1 << int(RNG.integers(8))]) + data[place + 1 :]


def damages(path: Path) -> list[Damage]:
    data = path.read_bytes()
    changed = [flipped(data) for _ in range(12 if path.name in ("manifest.json", "deleted.json") else 1)]
    changed += [data[:-1], data[: int(RNG.integers(len(data)))]]
    found = [Damage(path, f"{len(each)} bytes", data, each) for each in changed]
    # If deleted.json is missing, no documents are deleted, which is a valid state.
    return found if path.name == "deleted.json" else [*found, Damage(path, "deleted", data, None)]


def trials(folder: Path) -> Iterator[list[Damage]]:
    """Every kind of damage of every file, once. Different artifacts are damaged together to save time."""
    of_artifact: dict[Path, list[Damage]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in UNCHECKED:
            os.utime(path, ns=(TIME, TIME))
            artifact = next(parent for parent in path.parents if (parent / "manifest.json").exists())
            together = of_artifact.setdefault(artifact, [])
            for damage in damages(path):
                # Other manifests tell which artifact is missing, so those stay intact then, like the datastore's own.
                if artifact == folder or (damage.after is None and path.name == "manifest.json"):
                    yield [damage]
                else:
                    together.append(damage)
    for group in itertools.zip_longest(*of_artifact.values()):
        yield [damage for damage in group if damage]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["built", "grown"])
def test_flipped_truncated_and_deleted_files_are_found(request, kind: str) -> None:
    folder = request.getfixturevalue(kind).datastore
    assert found(folder) == []
    missed, done = [], 0
    for group in trials(folder):
        for damage in group:
            damage.do()
        lines = found(folder)
        missed += [damage for damage in group if not any(str(damage.path) in line for line in lines)]
        for damage in group:
            damage.undo()
        done += len(group)
    assert [(str(damage.path.relative_to(folder)), damage.what) for damage in missed] == []
    assert done > 300
    assert found(folder) == []


def break_all(folders: set[Path], victim: str) -> None:
    """Damage one file in each of these folders, which are artifacts or the datastore itself."""
    for folder in sorted(folders):
        path = folder / "manifest.json"
        if victim == "file":
            skipped = (*UNCHECKED, "deleted.json", path.name)
            names = [each.name for each in sorted(folder.iterdir()) if each.is_file() and each.name not in skipped]
            path = folder / (names[0] if names else path.name)
        data = path.read_bytes()
        path.write_bytes(data[:-1] if victim == "newline" else flipped(data))


@pytest.mark.parametrize("victim", ["file", "manifest", "newline"])
@pytest.mark.parametrize("kind", ["built", "grown", "appended"])
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
    assert contents(config.datastore) == whole
    assert found(config.datastore) == []


@pytest.mark.parametrize("victim", ["manifest", "newline"])
def test_index_rebuilds_artifacts_with_a_damaged_manifest(built: Config, caplog, victim: str) -> None:
    whole = contents(built.datastore)
    folders = {path.parent for path in built.datastore.rglob("manifest.json")}
    for group in ({built.datastore / "dedup" / "removed"}, {built.datastore / "neighbors" / "00000"}, folders):
        caplog.clear()
        break_all(group, victim)
        build_local(built)
        assert all(f"{folder}/manifest.json" in caplog.text for folder in group)
        assert contents(built.datastore) == whole
