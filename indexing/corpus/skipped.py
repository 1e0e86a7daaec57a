"""Which files of a folder are read, and the numbers of those that are skipped.

{"unknown suffix": {".dts": 3412, "Makefile": 2901, "others": 87}, "hidden": {".git": 5120}, "binary": {".png": 12}}
"""

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from indexing.corpus.readers import is_known
from indexing.corpus.streams import compression_suffix, uncompressed

SkippedReason = Literal[
    "unknown suffix", "hidden", "excluded", "binary", "not part of its saved dataset", "folder that cannot be read"
]
Skipped = dict[str, dict[str, int]]
"""Number of skipped files by reason, then by suffix, or by name if there is none."""

_SUFFIX = re.compile(r"\.[A-Za-z0-9_+~-]{1,16}")
_MOST_SUFFIXES, _OTHERS = 100, "others"  # names without a suffix may all differ
_NAMED = 8  # in a line


def name_filter(suffixes: Sequence[str]) -> Callable[[str], bool]:
    """Whether a file is read, by its name: a known suffix, or one of `corpus.suffixes`."""
    globs = (f"*{one}" if one.startswith(".") else one for one in suffixes)
    added = re.compile("|".join(fnmatch.translate(one.lower()) for one in globs) or r"(?!)").match
    return lambda name: is_known(name) or added(uncompressed(posixpath.basename(name.lower()))) is not None


def path_filter(globs: Sequence[str]) -> Callable[[str, str], bool]:
    """Whether a file is excluded, by its name and its path: one of the globs of `corpus.exclude` matches it or a folder
    above it."""
    from fsspec.utils import glob_translate

    def pattern(one: str) -> str:
        one = one.rstrip("/")
        below = one if "/" in one else f"**/{one}"
        return glob_translate(below).removesuffix(r"\Z") + r"(?:/.*)?\Z"

    of_path = [one for one in globs if one.startswith("/") or "://" in one]
    of_name = [one for one in globs if one not in of_path]
    in_name, in_path = (re.compile("|".join(map(pattern, some)) or r"(?!)").match for some in (of_name, of_path))
    return lambda name, path: in_name(name) is not None or in_path(path) is not None


def suffix_of(path: str) -> str:
    """The suffix of a file as it is written, with that of its compression; its name if it has none."""
    name = posixpath.basename(path)
    compression = compression_suffix(name)
    stem, suffix = posixpath.splitext(uncompressed(name))
    return suffix + compression if stem and _SUFFIX.fullmatch(suffix) else name


def counted(files: Mapping[tuple[SkippedReason, str], int]) -> Skipped:
    """Numbers by reason, then suffix, the most frequent first. Suffixes after the first hundred are counted
    together."""
    by_reason: dict[str, Counter[str]] = {}
    for (reason, suffix), count in files.items():
        by_reason.setdefault(reason, Counter())[suffix] += count
    return {reason: _ranked(counts) for reason, counts in sorted(by_reason.items())}


def _ranked(counts: Mapping[str, int]) -> dict[str, int]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ranked[_MOST_SUFFIXES:])
    return dict(ranked[:_MOST_SUFFIXES]) | ({_OTHERS: rest} if rest else {})


def with_binary(skipped: Skipped, files: Sequence[str]) -> Skipped:
    """Add binary files, by name: those that `corpus.suffixes` admits and a scan has found."""
    return {"binary": _ranked(Counter(map(suffix_of, files)))} | skipped if files else skipped


def skipped_line(skipped: Skipped) -> str:
    """The numbers in one line, with the most frequent suffixes of each reason."""
    parts = []
    for reason, counts in sorted(skipped.items(), key=lambda item: -sum(item[1].values())):
        ranked = sorted(counts.items(), key=lambda item: (item[0] == _OTHERS, -item[1], item[0]))
        rest = sum(count for _, count in ranked[_NAMED:])
        named = [f"{suffix} {count:,}" for suffix, count in ranked[:_NAMED]] + ([f"{_OTHERS} {rest:,}"] if rest else [])
        parts.append(f"{reason} {sum(counts.values()):,} ({', '.join(named)})")
    return "; ".join(parts)
