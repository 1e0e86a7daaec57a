"""Folders of a corpus that no datastore has, and a window from the middle of one file of each.

    files ─ folders, by a seed or by name ─► held-out folders ─ files that the datastore does not have ─► windows

A file of a held-out folder whose content the datastore has, under whatever name, is a leak: it is named and left out.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from indexing.corpus.documents import CorpusFile, CorpusSettings, Document
from indexing.corpus.scan import scan_file
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.datastore_size import Window, middle_window, point_of

MOST_BYTES = 0.2
"""Share of the bytes of the corpus that folders chosen by a seed have together, at most."""
LEAST_BYTES = 6
"""Bytes of a file for each token of a window, at least: about two windows of text."""


def folders_above(name: str) -> list[str]:
    """The folders that a file is in, from the innermost one, without the root of the corpus."""
    return [str(folder) for folder in PurePosixPath(name).parents][:-1]


def choose_folders(files: Sequence[CorpusFile], count: int, tokens: int, seed: int) -> list[str]:
    """Choose folders at random, none inside of another, with `MOST_BYTES` of the corpus at most.

    Args:
        files: of the corpus.
        count: number of folders; fewer if there are fewer.
        tokens: of a window: a folder has a file that is large enough, directly in it.
        seed: of the choice.

    Raises:
        InputError: there is no such folder.
    """
    sizes, wanted = Counter[str](), set[str]()
    for file in files:
        above = folders_above(file.name)
        sizes.update(dict.fromkeys(above, file.size))
        if above and file.size >= LEAST_BYTES * tokens:
            wanted.add(above[0])
    left, chosen = MOST_BYTES * sum(file.size for file in files), list[str]()
    for folder in sorted(wanted, key=lambda name: point_of(name, seed)):
        is_apart = not any(one in folders_above(f"{folder}/x") or folder in folders_above(one) for one in chosen)
        if len(chosen) < count and is_apart and sizes[folder] <= left:
            chosen.append(folder)
            left -= sizes[folder]
    if not chosen:
        raise InputError(
            f"no folder can be held out: {len(files):,} files, {len(wanted):,} folders with a file of {LEAST_BYTES * tokens:,} bytes, none of "
            f"them with at most {MOST_BYTES:.0%} of all bytes. Name folders (--held-out), or take shorter windows (--tokens)."
        )
    return sorted(chosen)


def files_by_folder(files: Sequence[CorpusFile], folders: Sequence[str]) -> dict[str, list[CorpusFile]]:
    """The files of each folder, with its subfolders.

    Raises:
        InputError: a folder has no file of the corpus, or is in another one.
    """
    inside: dict[str, list[CorpusFile]] = {folder: [] for folder in folders}
    for folder in folders:
        if outer := [other for other in folders_above(folder) if other in inside]:
            raise InputError(
                f"--held-out {folder}: it is inside of {outer[0]}, which is held out too. Name one of both."
            )
    for file in files:
        for folder in folders_above(file.name):
            if folder in inside:
                inside[folder].append(file)
    if empty := [folder for folder, found in inside.items() if not found]:
        known = ", ".join(sorted({folders_above(file.name)[-1] for file in files if "/" in file.name})[:8])
        raise InputError(
            f"--held-out {empty[0]}: no file that is read is in this folder. Accepted are paths below the corpus, without / at the end; "
            f"its first folders: {known or 'none'}."
        )
    return inside


@dataclass
class Windows:
    """Windows, and what was found on the way.

    Attributes:
        windows: of the folders that have one.
        leaks: name of a held-out file → name of the file with the same content in the datastore.
        without: folder without a window → the reason.
        problems: number of the files that were looked at with each kind of problem; no window is of them.
    """

    windows: list[Window] = field(default_factory=list)
    leaks: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)

    def about(self) -> dict[str, Any]:
        """All but the windows, as plain values."""
        return {"leaks": self.leaks, "without_window": self.without, "problems": dict(self.problems)}


def windows_of(
    folders: Mapping[str, Sequence[CorpusFile]],
    stored: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tokens: int,
    seed: int,
    settings: CorpusSettings,
) -> Windows:
    """Take a window from the middle of one file of each folder, in an order that does not depend on names.

    Args:
        folders: the files of each.
        stored: `name`, `size` and `checksum` of the files that the datastore was built from.
        tokenizer: of the datastore.
        tokens: of a window.
        seed: of the choice of files.
        settings: how files are read.
    """
    by_size: dict[int, dict[str, str]] = defaultdict(dict)
    for known in stored:
        by_size[known["size"]][known["checksum"]] = known["name"]
    found, least = Windows(), LEAST_BYTES * tokens
    for folder in sorted(folders, key=lambda name: point_of(name, seed)):
        window, leaks, tried = None, 0, 0
        for file in sorted(folders[folder], key=lambda file: point_of(file.name, seed)):
            is_long = file.size >= least
            if not file.size or not (file.size in by_size or (is_long and window is None)):
                continue
            documents, problems, checksum = _read(file, settings, least)
            found.problems.update(set(problems))
            if same := by_size.get(file.size, {}).get(checksum):
                found.leaks[file.name] = same
                leaks += 1
            elif window is None and documents and not problems:
                tried += 1
                window = middle_window(documents[0], tokenizer, tokens)
        if window is not None:
            found.windows.append(window)
        else:
            found.without[folder] = (
                f"{len(folders[folder]):,} files, {leaks:,} of them in the datastore, {tried:,} others tried, none with "
                f"{tokens:,} tokens after its middle"
            )
    return found


def _read(file: CorpusFile, settings: CorpusSettings, least: int) -> tuple[list[Document], dict[str, int], str]:
    """The first document of a file with at least `least` bytes, problems, and the checksum as a datastore's corpus has
    it."""
    documents = list[Document]()

    def keep(document: Document) -> None:
        if not documents and document.size >= least and document.tokens is None:
            documents.append(document)

    scan = scan_file(file, settings, keep)
    return documents, scan.problems, scan.checksum
