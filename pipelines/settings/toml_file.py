"""Settings as TOML: a file that remembers the lines of its keys, and a tree of settings as text."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.remote import url_of


def as_plain(settings: Any) -> dict[str, Any]:
    """The tree as values that JSON can hold: sections are dicts, paths are strings, tuples are lists."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return as_plain(value)
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return url_of(value) or str(value) if isinstance(value, Path) else value

    return {field.name: plain(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}


def to_toml(settings: Any) -> str:
    """The tree as TOML that `load` reads back equal.

    TOML has no null: None is written as the string "None", as on the command line.
    """
    return "\n".join(_toml_lines(as_plain(settings), ())).strip() + "\n"


def _toml_lines(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    leaves = {key: value for key, value in section.items() if not isinstance(value, dict)}
    if path and (leaves or not section):
        yield f"\n[{'.'.join(path)}]"
    for key, value in leaves.items():
        yield f"{key} = {toml_value(value)}"
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _toml_lines(value, (*path, key))


def toml_value(value: Any) -> str:
    """A plain value as TOML; one of another type, such as a date, as text."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are those of TOML, except for DEL, which TOML requires to be escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '"None"'
    return repr(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file that remembers the lines of its keys."""

    file: Path | None
    text: str
    values: dict[str, Any]

    @classmethod
    def read(cls, file: Path | None) -> "TomlFile":
        """Parse a file; without one there are no values.

        Raises:
            InputError: the file is missing or is not TOML.
        """
        if file is None:
            return cls(None, "", {})
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
            return cls(file, text, tomllib.loads(text))
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}; name a TOML file of settings.") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: not UTF-8 text (byte {error.start}); name a TOML file of settings.") from error
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"line (\d+)", str(error))
            at = f"{file}:{line[1] if line else text.count(chr(10)) + 1}"
            raise InputError(f"{at}: not valid TOML: {error}. Strings need quotes; see https://toml.io.") from error

    def at(self, path: Sequence[str]) -> str:
        """`file:line` of a key or section.

        The scan looks for `[section]` and `key =`. For a key inside a multi-line string or an inline table it returns the line
        of the key or section around it.
        """
        found: dict[tuple[str, ...], int] = {}
        section: tuple[str, ...] = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", line):
                section = _names(header[1])
                found.setdefault(section, number)
            elif key := re.match(r"""\s*([\w."'\- ]+?)\s*=""", line):
                whole = section + _names(key[1])
                for length in range(len(section) + 1, len(whole) + 1):
                    found.setdefault(whole[:length], number)
        lines = [found[tuple(path[:length])] for length in range(len(path) + 1) if tuple(path[:length]) in found]
        return f"{self.file}:{lines[-1]}" if lines else str(self.file)

    def sets(self, path: Sequence[str]) -> bool:
        """Whether the file sets this key."""
        values: Any = self.values
        for key in path:
            if not isinstance(values, dict) or key not in values:
                return False
            values = values[key]
        return True

    def locate(self, message: str, options: Sequence[str]) -> str:
        """Put the file before a message that begins with its key, and the line if the value comes from the file.

        Args:
            message: `section.key = value: …`.
            options: keys that the command line sets.
        """
        if self.file is None:
            return message
        key = re.match(r"[\w.]*", message)[0]  # type: ignore[index]  # `*` always matches
        at = self.at(_names(key)) if self.sets(_names(key)) and key not in options else self.file
        return f"{at}: {message}"


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
