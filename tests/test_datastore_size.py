"""`benchmarks.quality.datastore_size`: from a folder of text to a table and a picture, with leaks, odd files and stops."""

import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import datastore_size
from benchmarks.quality.held_out_folders import MOST_BYTES, choose_folders, files_by_folder
from indexing.corpus.documents import CorpusFile
from indexing.store.errors import InputError
from tests.conftest import _WORDS

TOKENS, FOLDERS, FILES = 80, 8, 9


def write_tree(folder: Path) -> Path:
    """Eight folders of nine files of random sentences; many share paragraphs."""
    rng = np.random.default_rng(0)
    paragraphs = [" ".join(rng.choice(_WORDS[:40], 40)) + ".\n" for _ in range(30)]
    for number in range(FOLDERS * FILES):
        file = folder / f"part{number % FOLDERS}" / "inner" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        own = [" ".join(rng.choice(_WORDS[:40], 40)) + ".\n" for _ in range(4)]
        file.write_text("".join([own[0], *(paragraphs[n] for n in rng.integers(0, 30, 3)), *own[1:]]))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, copying_run: Path) -> tuple[Path, Path]:
    """A tree with odd files, and the folder of a finished measurement of it with six held-out folders. Read-only."""
    folder = tmp_path_factory.mktemp("size")
    tree = write_tree(folder / "tree")
    held_out = tree / "part1" / "inner"
    shutil.copy(held_out / "1.txt", tree / "part6" / "renamed.txt")  # a leak by content
    (tree / "part7" / "linked.txt").symlink_to(held_out / "9.txt")  # none: the link leads to a held-out file
    (tree / "part7" / "latin.txt").write_bytes("größer als zuvor\n".encode("latin-1") * 3 + b"plain text\n" * 50)
    (tree / "part7" / "binary.c").write_bytes(bytes(range(256)) * 20)
    (tree / "part7" / "empty.h").write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tree / "part7" / "s.txt"))
    (tree / "part7" / "generated.h").write_text("#define REGISTER 0x1234\n" * 1000)
    run(tree, folder / "out", copying_run)
    return tree, folder / "out"


def run(tree: Path, out: Path, model: Path, *more: str) -> None:
    """Run the benchmark with six named folders in this process."""
    held_out = [f"part{number}" for number in range(6)]
    arguments = [str(tree), "--model", str(model), "--output", str(out), "--tokens", str(TOKENS), "--minutes", "0"]
    arguments += ["--fractions", "1/3", "1", "--precision", "float32", "--held-out", *held_out, *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["datastore_size", *arguments])
        patch.setattr(datastore_size, "LARGE_BYTES", 20_000)
        datastore_size.main()


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def test_a_larger_part_has_more_tokens_and_matches(finished: tuple[Path, Path]) -> None:
    found = results(finished[1])
    assert (found["windows"], found["chosen"], found["tokens"]) == (6, 6, 6 * TOKENS)
    small, large = found["sizes"]
    assert small["documents"] < large["documents"]
    assert small["tokens"] < large["tokens"]
    assert large["bits_per_byte"] < small["bits_per_byte"] < found["off"]["bits_per_byte"]
    assert large["changes"]["all windows"][0] == pytest.approx(
        100 * (large["bits_per_byte"] / found["off"]["bits_per_byte"] - 1)
    )
    assert found["lines"]["all windows"]["per_decade"][0] < 0
    assert {row["name"].split("/")[0] for row in found["per_window"]} == {f"part{number}" for number in range(6)}


def test_the_datastore_has_no_file_of_a_held_out_folder(finished: tuple[Path, Path]) -> None:
    files = json.loads((finished[1] / "datastore" / "corpus" / "files.json").read_text())
    names = {file["name"] for file in files}
    assert not [name for name in names if name.split("/")[0] in {f"part{number}" for number in range(6)}]
    assert "part6/renamed.txt" in names
    assert "part7/linked.txt" not in names


def test_a_held_out_file_whose_content_is_in_the_datastore_is_named_and_left_out(finished: tuple[Path, Path]) -> None:
    found = results(finished[1])
    assert found["leaks"] == {"part1/inner/1.txt": "part6/renamed.txt"}
    assert "part1/inner/1.txt" not in [row["name"] for row in found["per_window"]]


def test_odd_files_are_counted(finished: tuple[Path, Path]) -> None:
    corpus = results(finished[1])["corpus"]
    assert corpus["problems"].keys() == {"undecodable bytes", "not UTF-8", "empty document", "unreadable file"}
    assert (corpus["large_files"], corpus["large_bytes"]) == (1, 24_000)


def test_the_picture_has_points_intervals_and_the_line(finished: tuple[Path, Path]) -> None:
    for name in ("gain.svg", "gain-dark.svg"):
        picture = (finished[1] / name).read_text()
        assert "points a decade" in picture
        assert "tokens of the datastore" in picture
        assert "LineCollection" in picture  # intervals


def test_a_stopped_measurement_resumes_where_it_was(
    finished: tuple[Path, Path], copying_run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    tree, out = finished[0], tmp_path / "out"
    shutil.copytree(finished[1], out)
    (out / "results.json").unlink()
    shutil.rmtree(out / "scores")
    scored, score = list[str](), datastore_size.score_window

    def stopping(model, head, window, *rest):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(window.name)
        return score(model, head, window, *rest)

    monkeypatch.setattr(datastore_size, "score_window", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tree, out, copying_run)
    assert len(list((out / "scores").glob("*.npz"))) == 2
    assert not (out / "parts").exists()
    monkeypatch.setattr(datastore_size, "score_window", lambda *a: (scored.append(a[2].name), score(*a))[1])
    monkeypatch.setattr(datastore_size, "retro", None)  # the datastore is not built again
    run(tree, out, copying_run)
    assert len(scored) == len(set(scored)) == 6
    assert results(out) == results(finished[1])
    capsys.readouterr()


def test_the_time_limit_leaves_a_table_of_the_windows_so_far(
    finished: tuple[Path, Path], copying_run: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[1], out)
    for file in sorted((out / "scores").glob("*.npz"))[1:]:
        file.unlink()
    run(finished[0], out, copying_run, "--minutes", "1e-9")
    assert (results(out)["windows"], results(out)["chosen"]) == (2, 6)
    said = capsys.readouterr()
    assert "2 of 6 windows" in said.out
    assert "stopped after 1 of 5 windows" in said.err


def test_other_options_in_the_same_folder_are_refused(finished: tuple[Path, Path], copying_run: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run(finished[0], finished[1], copying_run, "--seed", "1")
    assert ended.value.code == 2
    assert "settings.json: seed was 0, and is 1 now" in capsys.readouterr().err


def test_an_existing_datastore_with_the_held_out_folders_is_a_leak(
    finished: tuple[Path, Path], copying_run: Path, tmp_path: Path, capsys
) -> None:
    with pytest.raises(SystemExit):  # part6 and part7 are in this datastore, so their files are leaks
        run(
            finished[0], tmp_path, copying_run,
            "--datastore", str(finished[1] / "datastore"), "--held-out", "part6", "part7",
        )  # fmt: skip
    said = capsys.readouterr()
    assert "leak, left out: part6/inner/6.txt is in the datastore as part6/inner/6.txt" in said.out
    assert "0 of 2 held-out folders have a window" in said.err


@pytest.mark.parametrize("words", ["0", "2", "1/0", "x", "-1/3", "nan"])
def test_a_fraction_is_above_0_and_at_most_1(words: str) -> None:
    assert datastore_size.fraction("1/81") == 1 / 81
    assert datastore_size.fraction("1") == 1
    with pytest.raises(ValueError):
        datastore_size.fraction(words)


# --- held-out folders -------------------------------------------------------------------------------------------------


def files_of(sizes: dict[str, int]) -> list[CorpusFile]:
    return [CorpusFile(f"/tree/{name}", name, size) for name, size in sizes.items()]


def test_chosen_folders_are_apart_and_hold_a_part_of_the_text() -> None:
    files = files_of(
        {f"a{n}/b/{m}.c": 1000 for n in range(30) for m in range(3)} | {f"a{n}/x.c": 1000 for n in range(30)}
    )
    for seed in range(5):
        chosen = choose_folders(files, 48, 50, seed)
        assert chosen
        inside = files_by_folder(files, chosen)  # raises if one is inside of another
        assert sum(file.size for some in inside.values() for file in some) <= MOST_BYTES * 120_000
    assert choose_folders(files, 3, 50, 0) == choose_folders(files[::-1], 3, 50, 0)
    assert len(choose_folders(files, 3, 50, 0)) == 3
    assert choose_folders(files, 3, 50, 0) != choose_folders(files, 3, 50, 1)


def test_without_a_folder_that_fits_the_error_says_what_there_is() -> None:
    with pytest.raises(InputError, match="no folder can be held out: 2 files, 0 folders"):
        choose_folders(files_of({"a.c": 9000, "b.c": 9000}), 4, 50, 0)
    with pytest.raises(InputError, match=r"1 folders with a file of 300 bytes, none of them with at most 20%"):
        choose_folders(files_of({"a/a.c": 9000, "b.c": 90}), 4, 50, 0)


def test_named_folders_must_hold_files_and_be_apart() -> None:
    files = files_of({"drivers/net/a.c": 10, "kernel/b.c": 10})
    with pytest.raises(InputError, match=r"--held-out driver: no file .* first folders: drivers, kernel"):
        files_by_folder(files, ["driver"])
    with pytest.raises(InputError, match="--held-out drivers/net: it is inside of drivers"):
        files_by_folder(files, ["drivers", "drivers/net"])
    assert {name: len(some) for name, some in files_by_folder(files, ["drivers", "kernel"]).items()} == {
        "drivers": 1,
        "kernel": 1,
    }
