"""Verbs on a datastore with any damaged file work, or name a file. The reference lists every file of a datastore."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.errors import InputError
from pipelines.cli.main import main, run_verb
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from tests.indexing.verification.datastores import build_complete, build_grown

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "file-formats.md"
RNG = np.random.default_rng(0)


def _finish(config: Config) -> Path:
    """Write the reports of a datastore; returns its settings as a file."""
    path = config.datastore.with_name("config.toml")
    path.write_text(to_toml(config))
    assert main(["index", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _finish(build_complete(tmp_path_factory.mktemp("complete"), search="ngrams"))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _finish(build_grown(tmp_path_factory.mktemp("grown")))


def stored_files(folder: Path) -> list[Path]:
    """All files, without locks."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def keys_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value; of a list only the first."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*path, key)
        yield from keys_of(item, (*path, key))


def changed_keys(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The JSON with a random key renamed, and with a random value of another type."""
    places = list(keys_of(json.loads(data)))
    for kind in ("renamed", "retyped"):
        value = json.loads(data)
        *above, key = places[int(RNG.integers(len(places)))] if places else ("",)
        if not places:
            continue
        at = value
        for step in above:
            at = at[step]
        if kind == "renamed" and isinstance(at, dict):
            at[f"{key}x"] = at.pop(key)
        else:
            at[key] = 7 if isinstance(at[key], str) else "7"
        yield f"{kind} {key}", json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def damages(path: Path) -> list[tuple[str, bytes | None]]:
    """Contents of the damaged file, each with the kind of damage; None = removed."""
    data = path.read_bytes()
    found: list[tuple[str, bytes | None]] = [("removed", None), ("emptied", b""), ("cut", data[: len(data) // 2])]
    for limit in (len(data), 200) if data else ():  # headers fail in more ways than contents
        place = int(RNG.integers(min(limit, len(data))))
        flipped = data[:place] + bytes([data[place] ^ 1 << int(RNG.integers(8))]) + data[place + 1 :]
        found.append((f"byte {place} flipped", flipped))
    return [*found, *(changed_keys(data) if path.suffix == ".json" else ())]


def outcome(arguments: list[str], folder: Path) -> str:
    """What is wrong with the way a verb ends: an empty text if it works, or if an InputError names a file of the datastore."""
    try:
        run_verb(arguments)
    except InputError as error:
        return "" if str(folder) in str(error) else f"names no file: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES = {"search": 2, "inspect": 2, "index": 1}
"""Damages of each file."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", CASES)
@pytest.mark.parametrize("kind", ["complete", "grown"])
def test_verbs_work_or_name_a_file_whatever_file_is_damaged(request, kind: str, verb: str) -> None:
    settings: Path = request.getfixturevalue(kind)
    folder = settings.with_name("datastore")
    arguments = [verb, str(settings if verb == "index" else folder), *(["index chunk"] if verb == "search" else [])]
    assert outcome(arguments, folder) == ""
    wrong = []
    for path in stored_files(folder):
        before = path.read_bytes()
        cases = damages(path)
        for number in RNG.permutation(len(cases))[: CASES[verb]]:
            what, after = cases[number]
            path.unlink() if after is None else path.write_bytes(after)
            problem = outcome(arguments, folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(before)
            wrong += [(str(path.relative_to(folder)), what, problem)] if problem else []
    assert wrong == []


def names_on_the_page() -> list[re.Pattern[str]]:
    """A pattern for each file of a datastore that the reference names: of folders in the first column, files in the second."""
    text = PAGE.read_text().partition("```\ndatastore/\n")[2].partition("```")[0]
    patterns, folders = list[str](), [""]
    for line in text.splitlines():
        first, rest = line[:35].strip(), line[35:]
        if first.endswith("/"):
            folders = first.split()
        names = re.findall(r"[\w.-]*\.\w+", rest if first.endswith("/") or not first else first)
        if first and not first.endswith("/"):
            folders = [""]
        patterns += [re.escape(f"{folder}{name}") for folder in folders for name in names]
    meanings = {
        "SPLIT": "(train|valid|test)",
        "signatures/0": "signatures/(evaluation\\-)?0",
        "00000": "\\d{5}",
        "00001": "\\d{5}",
        "00007": "\\d{5}",
        "\\-0": "\\-\\d+",
    }
    for written, meaning in meanings.items():
        patterns = [pattern.replace(written, meaning) for pattern in patterns]
    return [re.compile(pattern) for pattern in patterns]


@pytest.mark.parametrize("kind", ["complete", "grown"])
def test_reference_names_every_file_of_a_datastore(request, kind: str) -> None:
    folder = request.getfixturevalue(kind).with_name("datastore")
    patterns = names_on_the_page()
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    artifacts = [name for name in files if os.path.basename(name) != "manifest.json" or name == "manifest.json"]
    assert [name for name in artifacts if not any(pattern.fullmatch(name) for pattern in patterns)] == []
