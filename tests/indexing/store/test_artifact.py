"""Artifacts are complete or absent, and refused with the reason if their recipe differs."""

import pickle
import re

import pytest

from indexing.store.artifact import (
    Recipe,
    create,
    damaged,
    is_finished,
    made_by,
    read_manifest,
    remove,
    stored_record,
    verify,
)
from indexing.store.errors import DamagedFile, InputError
from indexing.store.files import write_json


def recipe(**settings) -> Recipe:
    return Recipe("chunk", 1, {"chunks.chunk_length": 64, **settings}, {"corpus": "0123"})


def make(folder, made_of: Recipe) -> None:
    with create(folder, made_of) as (work, counts):
        (work / "data.bin").write_bytes(b"12345")
        counts["rows"] = 5


def test_artifact_is_finished_until_it_is_removed_and_verify_names_a_changed_file(tmp_path) -> None:
    folder = tmp_path / "a"
    assert not is_finished(folder, recipe())
    make(folder, recipe())
    assert is_finished(folder, recipe())
    assert read_manifest(folder)["counts"] == {"rows": 5}
    assert verify(folder) == []
    (folder / "data.bin").write_bytes(b"12346")
    assert "data.bin" in verify(folder)[0]
    remove(folder)
    assert not is_finished(folder, recipe())


def test_differences_of_recipes_are_named_with_the_command_that_rebuilds(tmp_path) -> None:
    make(tmp_path / "a", recipe())
    with pytest.raises(InputError, match=r"chunks\.chunk_length .*64.*32(.|\n)*'corpus'(.|\n)*--stage chunk --rebuild"):
        is_finished(tmp_path / "a", Recipe("chunk", 1, {"chunks.chunk_length": 32}, {"corpus": "4567"}))


def test_artifact_is_made_by_one_of_some_recipes_unless_it_is_damaged(tmp_path) -> None:
    recipes = [Recipe("chunk", version) for version in (1, 2, 3)]
    assert made_by(tmp_path / "a", recipes) == 0
    with create(tmp_path / "a", recipes[1]) as (work, _):
        (work / "file").write_text("text")
    assert [made_by(tmp_path / "a", some) for some in (recipes, recipes[1:], recipes[2:])] == [2, 1, 0]
    (tmp_path / "a" / "file").unlink()
    assert made_by(tmp_path / "a", recipes) == 0


def test_failed_artifact_leaves_no_files(tmp_path) -> None:
    def fail() -> None:
        with create(tmp_path / "a", recipe()) as (work, _):
            (work / "data.bin").write_bytes(b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_files_left_by_a_kill_are_replaced(tmp_path) -> None:
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp" / "half").write_bytes(b"1")
    (tmp_path / "a").mkdir()  # a removal that was interrupted after it deleted the manifest
    (tmp_path / "a" / "old").write_bytes(b"1")
    make(tmp_path / "a", recipe())
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["data.bin", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


DAMAGE = {
    "cut short": lambda folder: (folder / "data.bin").write_bytes(b"123"),
    "missing": lambda folder: (folder / "data.bin").unlink(),
    "manifest cut short": lambda folder: (folder / "manifest.json").write_text('{"fingerprint": "0'),
    "manifest edited": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace("64", "32")
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_artifact_is_refused_by_readers_and_built_again(tmp_path, caplog, damage) -> None:
    folder = tmp_path / "a"
    make(folder, recipe())
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    with pytest.raises(InputError, match=r"(data\.bin|manifest\.json) (is missing|has)"):
        read_manifest(folder)
    assert not is_finished(folder, recipe())
    assert re.search(r"a/(data\.bin|manifest\.json) (is missing|has).* is made again", caplog.text)
    make(folder, recipe())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_replaced_worker_cannot_change_the_files_of_its_successor(tmp_path) -> None:
    """A worker on a disconnected node continues to write while another worker builds its shard."""
    folder = tmp_path / "a"

    def ghost() -> None:
        with create(folder, recipe()) as (work, _):
            (work / "data.bin").write_bytes(b"12")
            make(folder, recipe())  # the next worker starts and finishes

    with pytest.raises(FileNotFoundError):
        ghost()
    assert verify(folder) == []
    assert (folder / "data.bin").read_bytes() == b"12345"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_first_finished_artifact_of_two_builders_is_kept(tmp_path) -> None:
    folder = tmp_path / "a"
    with create(folder, recipe()) as (work, counts):
        (work / "data.bin").write_bytes(b"12345")
        counts["rows"] = 5
        other = tmp_path / "elsewhere"  # another process's folder appears between our check and our rename
        make(other, recipe())
        other.rename(folder)
    assert verify(folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_fingerprint_depends_on_every_part_but_not_on_order() -> None:
    one = Recipe("embed", 1, {"a": 1, "b": (2, 3)}, {"x": "1"})
    assert one.fingerprint == Recipe("embed", 1, {"b": [2, 3], "a": 1}, {"x": "1"}).fingerprint
    others = [
        Recipe("embed", 2, one.settings, one.inputs),
        Recipe("embed", 1, {"a": 1}, one.inputs),
        Recipe("add", 1, one.settings, one.inputs),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_stored_record_with_other_keys_names_its_file(tmp_path) -> None:
    for content in ({"stage": "chunk"}, [1], {"stage": "chunk", "version": 1, "other": 2}):
        write_json(tmp_path / "recipe.json", content)
        with pytest.raises(DamagedFile, match=r"recipe\.json does not fit this version"):
            stored_record(tmp_path / "recipe.json", Recipe)


def test_error_of_a_damaged_file_survives_pickling_between_processes(tmp_path) -> None:
    error = damaged(tmp_path / "a.npy", f"{tmp_path / 'a.npy'} is missing")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.problem, again.shown) == (
        str(error),
        error.file,
        error.problem,
        "a.npy is missing",
    )
