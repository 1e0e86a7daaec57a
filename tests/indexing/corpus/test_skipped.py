"""Every file that a path leads to is read, or skipped and counted; settings add and exclude files; no tree hangs a scan."""

import fnmatch
import gzip
import itertools
import os
import random
import socket
import zipfile
from pathlib import Path

import fsspec
import pytest
import zstandard

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import list_corpus, list_files, scan_file
from indexing.corpus.skipped import counted, skipped_line, suffix_of
from indexing.corpus.walk import walk
from indexing.store.errors import InputError

TREE = (
    "Makefile", "arch/Kconfig", "arch/Kconfig.debug", "arch/boot/a.dts", "arch/boot/b.DTS", "arch/entry.S", "arch/main.c",
    "texts/a.json", "texts/readme.md", "texts/photo.png", "node_modules/x/index.js", ".git/objects/1", ".git/config", "texts/.hidden",
)  # fmt: skip
CONTENT = {"texts/photo.png": b"\x89PNG\r\n\0\0" + random.Random(0).randbytes(500)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT.get(name, name.encode()))
    return tmp_path / "tree"


def names(path: Path | str, **settings: tuple[str, ...]) -> list[str]:
    return [file.name for file in list_files(CorpusSettings(paths=(str(path),), **settings))]  # type: ignore[arg-type]


def test_what_is_skipped_is_counted_by_suffix(tree: Path) -> None:
    listing = list_corpus(CorpusSettings(paths=(str(tree), f"{tree}/**/*")))
    assert [file.name for file in listing.files] == ["arch/main.c", "node_modules/x/index.js", "texts/readme.md"]
    assert listing.skipped == {
        "hidden": {".git": 2, ".hidden": 1},
        "unknown suffix": {
            ".DTS": 1, ".S": 1, ".debug": 1, ".dts": 1, ".json": 1, ".png": 1, "Kconfig": 1, "Makefile": 1,
        },
    }  # fmt: skip
    assert len(listing.files) + sum(sum(counts.values()) for counts in listing.skipped.values()) == len(TREE)


@pytest.mark.parametrize(
    ("suffixes", "added"),
    [
        ((".dts",), ["arch/boot/a.dts", "arch/boot/b.DTS"]),
        (("makefile", "Kconfig*", ".s"), ["Makefile", "arch/Kconfig", "arch/Kconfig.debug", "arch/entry.S"]),
        (("*",), [name for name in TREE if "/." not in f"/{name}" and not name.endswith((".c", ".md", ".js"))]),
    ],
)
def test_suffixes_add_files_by_suffix_or_name_in_any_case(
    tree: Path, suffixes: tuple[str, ...], added: list[str]
) -> None:
    assert names(tree, suffixes=suffixes) == sorted([*names(tree), *added])


def test_binary_files_among_all_files_are_skipped_and_no_problem(tree: Path) -> None:
    (tree / "a.tgz").write_bytes(gzip.compress(b"text of an archive" * 100))
    (tree / "b.bytes").write_bytes(random.Random(1).randbytes(300).replace(b"\0", b""))
    (tree / "c.mixed").write_bytes(b"mostly text " * 100 + b"\0")
    (tree / "sixteen.strings").write_bytes("text".encode("utf-16"))
    (tree / "packed.dts.gz").write_bytes(gzip.compress(b"packed text"))
    files = list_files(CorpusSettings(paths=(str(tree),), suffixes=("*",)))
    scans = {file.name: scan_file(file, CorpusSettings()) for file in files}
    binary = {"texts/photo.png", "a.tgz", "b.bytes", "c.mixed"}
    assert {name for name, scan in scans.items() if scan.problems == {"binary file": 1}} == binary
    assert scans["sixteen.strings"].problems == {"not UTF-8": 1}  # text in another encoding is a problem
    assert all(scan.documents == (not scan.problems) for scan in scans.values())
    for file in files:
        if file.name in binary:
            scan_file(file, CorpusSettings(strict=True))


@pytest.mark.parametrize(
    ("glob", "excluded"),
    [
        ("*.c", ["arch/main.c"]),
        ("node_modules", ["node_modules/x/index.js"]),
        ("node_modules/", ["node_modules/x/index.js"]),
        ("x", ["node_modules/x/index.js"]),
        ("node_modules/**", ["node_modules/x/index.js"]),
        ("*/x", ["node_modules/x/index.js"]),
        ("texts/*.md", ["texts/readme.md"]),
        ("**/readme.*", ["texts/readme.md"]),
        ("adme.md", []),
        ("*.C", []),
        ("boot/main.c", []),
    ],
)
def test_excluded_files_are_skipped_and_counted(tree: Path, glob: str, excluded: list[str]) -> None:
    listing = list_corpus(CorpusSettings(paths=(str(tree),), exclude=(glob,)))
    assert [file.name for file in listing.files] == [name for name in names(tree) if name not in excluded]
    assert sum(listing.skipped.get("excluded", {}).values()) == len(excluded)
    assert names(tree, exclude=(f"{tree}/arch",)) == ["node_modules/x/index.js", "texts/readme.md"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suffixes": (".gz",)}, r"corpus\.suffixes has '\.gz'"),
        ({"suffixes": ("a/b",)}, r"corpus\.suffixes has 'a/b'"),
        ({"suffixes": ("",)}, r"suffixes\[0\]"),
        ({"exclude": ("a**/b",)}, r"corpus\.exclude has 'a\*\*/b'"),
    ],
)
def test_settings_that_match_nothing_are_refused(settings: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CorpusSettings(**settings)  # type: ignore[arg-type]


def test_a_folder_without_known_files_says_what_it_has(tree: Path) -> None:
    with pytest.raises(InputError, match=r"unknown suffix 2 \(\.DTS 1, \.dts 1\).*corpus\.suffixes adds"):
        list_files(CorpusSettings(paths=(f"{tree}/arch/boot",)))


def test_suffixes_of_names() -> None:
    expected = {
        "a/b.Tar.gz": ".Tar.gz", "x.d/Makefile": "Makefile", ".config": ".config", "a.long suffix": "a.long suffix",
        "b.zst": "b.zst", "v1.2.3": ".3", "x.": "x.",
    }  # fmt: skip
    assert {name: suffix_of(name) for name in expected} == expected


def test_many_different_names_are_counted_together() -> None:
    skipped = counted({("unknown suffix", f"name{number:03}"): 1 + (number == 5) for number in range(250)})
    assert (len(skipped["unknown suffix"]), skipped["unknown suffix"]["others"]) == (101, 150)
    assert skipped_line(skipped).startswith("unknown suffix 251 (name005 2, name000 1")
    assert skipped_line(skipped).endswith("others 242)")


# --- links


def test_links_between_many_folders_do_not_multiply(tmp_path: Path) -> None:
    """Two links in each of 40 folders to the next: 2^40 paths."""
    for number in range(40):
        folder = tmp_path / "all" / str(number)
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(str(number))
        for link in ("x", "y"):
            (folder / link).symlink_to(tmp_path / "all" / str(number + 1))
    expected = sorted(f"{number}/a.txt" for number in range(40))
    assert names(tmp_path / "all") == names(tmp_path / "all/**/*.txt") == expected
    assert names(tmp_path / "all/0") == sorted("x/" * number + "a.txt" for number in range(40))


def test_a_glob_of_a_link_finds_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.txt").write_text("a")
    (tmp_path / "link").symlink_to("real")
    assert names(f"{tmp_path}/li*/*.txt") == ["link/a.txt"]
    assert names(f"{tmp_path}/*/*.txt") == ["real/a.txt"]


def matches(path: str, pattern: str) -> bool:
    """A glob by definition."""
    if not pattern or not path:
        return not pattern and not path
    (first, _, rest), (name, _, below) = pattern.partition("/"), path.partition("/")
    if first == "**":
        return (
            not rest or matches(path, rest) or (bool(below) and matches(below, pattern))
        )  # at least one name at the end
    return fnmatch.fnmatchcase(name, first) and matches(below, rest)


def test_a_walk_finds_the_paths_that_a_glob_matches(tmp_path: Path) -> None:
    paths = ["/".join(parts) for size in (1, 2, 3) for parts in itertools.product(("a", "b"), repeat=size)]
    for path in paths:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "f").touch()
    files = [f"{path}/f" for path in paths]
    for size in (1, 2, 3, 4):
        for parts in itertools.product(("a", "*", "**", "f", "[!a]"), repeat=size):
            pattern = "/".join(parts)
            found = [file.path.removeprefix(f"{tmp_path}/") for file in walk(str(tmp_path), pattern).files]
            assert sorted(found) == sorted(path for path in files if matches(path, pattern)), pattern


# --- trees that must not hang or stop a scan


def test_no_kind_of_file_hangs_or_stops_the_scan(tree: Path) -> None:
    os.mkfifo(tree / "pipe.c")
    os.mkfifo(tree / "pipe.unknown")
    os.mkfifo(tree / "half.idx")
    (tree / "half.bin").write_bytes(b"\1\0")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tree / "socket.c"))
    (tree / "link.c").symlink_to("arch/main.c")
    (tree / "gone.c").symlink_to("nowhere")
    (tree / "null.c").symlink_to("/dev/zero")
    (tree / "up").symlink_to("..")
    (tree / "empty.c").touch()
    (tree / "latin.c").write_bytes("/* Grüße */".encode("latin-1") * 20)
    (tree / "binary.c").write_bytes(random.Random(2).randbytes(4000))
    (tree / "generated.c").write_bytes(b"0x1234, " * (20 << 17))  # 20 MiB in one line
    listing = list_corpus(CorpusSettings(paths=(str(tree),)))
    problems = {file.name: list(scan_file(file, CorpusSettings()).problems) for file in listing.files}
    expected = dict.fromkeys(("pipe.c", "half.bin", "socket.c", "gone.c", "null.c"), "unreadable file")
    expected |= {"empty.c": "empty document", "latin.c": "undecodable bytes", "binary.c": "not UTF-8"}
    assert {name: kinds[0] for name, kinds in problems.items() if kinds} == expected
    assert "link.c" not in problems
    assert listing.skipped["unknown suffix"][".unknown"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_counted(tree: Path) -> None:
    (tree / "arch").chmod(0)
    listing = list_corpus(CorpusSettings(paths=(str(tree),)))
    (tree / "arch").chmod(0o700)
    assert listing.skipped["folder that cannot be read"] == {"arch": 1}


def test_text_that_expands_without_a_blank_is_left_out(tmp_path: Path) -> None:
    for size, documents in ((1 << 20, 1), (4 << 20, 0)):
        (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"x" * size))
        (file,) = list_files(CorpusSettings(paths=(str(tmp_path),)))
        scan = scan_file(file, CorpusSettings(max_line_bytes=2 << 20))
        assert (scan.documents, scan.problems) == (documents, {} if documents else {"long line": 1})


# --- listings that a file system remembers


def test_a_file_that_another_process_added_is_listed(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote file systems cache listings; the one of an archive is its table of contents."""
    invalidated = list[object]()
    kind = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(kind, "invalidate_cache", lambda self, path=None: invalidated.append(self))
    for number in (1, 2):
        with fsspec.open(f"{memory_url}/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for member in range(number):
                archive.writestr(f"{member}.txt", "text")
        with fsspec.open(f"{memory_url}/{number}.txt", "wb") as file:
            file.write(b"text")
        assert len(list_files(CorpusSettings(paths=(f"zip://*.txt::{memory_url}/all.zip",)))) == number
        assert len(list_files(CorpusSettings(paths=(memory_url,)))) == number
    assert len(invalidated) == 2
