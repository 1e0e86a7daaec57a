"""`retro verify` finds every damaged file of a datastore, and `--mend` and `retro index` restore its bytes."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.dedup import DedupSettings
from indexing.readers import CorpusSettings
from indexing.store.files import read_json, write_json
from indexing.verify import mend, verify_datastore
from pipelines.cli import main
from pipelines.config import Config
from tests.conftest import build_local, contents, tiny_config, write_corpus

# Not checked: `retro delete` writes deleted.npy, and the reports and the lock hold nothing that is read again.
UNCHECKED = ("deleted.npy", "report.json", "report.html", ".lock")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a finished datastore of two shards, with near copies removed and neighbors materialized."""
    folder = tmp_path_factory.mktemp("damage")
    corpus = write_corpus(folder / "corpus.jsonl", 36)
    corpus.write_text(corpus.read_text() + corpus.read_text().replace('"doc-', '"copy-'))
    evaluation = write_corpus(folder / "evaluation.jsonl", 4, seed=3)
    config = tiny_config(folder, corpus, dedup=DedupSettings(within=True, paths=(str(evaluation),)))
    reading = CorpusSettings(paths=(str(corpus),), shard_bytes=40_000, split=(800, 200, 0))
    config = replace(config, corpus=reading, neighbors=replace(config.neighbors, materialised=2))
    build_local(config)
    return config


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a finished datastore to which two files were appended, one by one."""
    folder = tmp_path_factory.mktemp("grown")
    files = tuple(str(write_corpus(folder / f"{seed}.jsonl", 12, seed)) for seed in range(3))
    config = tiny_config(folder, folder, corpus=CorpusSettings(paths=files[:1], split=(800, 200, 0)))
    build_local(config)
    for count in (2, 3):
        config = replace(config, corpus=replace(config.corpus, paths=files[:count]))
        build_local(config, append=True)
    return config


def found(folder: Path) -> list[str]:
    problems = verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None)).problems
    return [str(problem) for problem in problems]


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNCHECKED]


def flipped(data: bytes, place: int) -> bytes:
    """The data with another bit in one byte."""
    return data[:place] + bytes([data[place] ^ 1 << int(RNG.integers(8))]) + data[place + 1 :]


def damages(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Ways to damage a file: what is done, and its bytes afterwards, None = it is deleted."""
    data = path.read_bytes()
    yield "deleted", None
    yield "last byte cut", data[:-1]
    yield "cut", data[: int(RNG.integers(len(data)))]
    for place in RNG.integers(len(data), size=5 if path.name == "manifest.json" else 1):
        yield f"byte {place} flipped", flipped(data, int(place))


@pytest.mark.parametrize("kind", ["config", "grown"])
def test_a_flip_a_cut_and_a_deletion_of_any_file_is_found(request, kind: str) -> None:
    folder = request.getfixturevalue(kind).datastore
    assert found(folder) == []
    missed = []
    for path in files_of(folder):
        whole, stat = path.read_bytes(), path.stat()
        for what, data in damages(path):
            path.unlink() if data is None else path.write_bytes(data)
            if data is not None:  # a disk that loses a bit changes no time
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            name = path.relative_to(folder).as_posix()
            if not any(str(path) in line for line in found(folder)):
                missed.append(f"{name}: {what}")
            path.write_bytes(whole)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert missed == []
    assert found(folder) == []
