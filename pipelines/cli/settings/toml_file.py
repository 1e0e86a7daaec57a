"""Settings as TOML: a file that remembers the lines of its keys, and a tree of settings as text."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import check_depth
from indexing.store.remote import url_of
from indexing.store.settings import key_fields


def as_plain(settings: Any) -> dict[str, Any]:
    """The tree as values that JSON can hold: sections are dicts, paths are strings, tuples are lists."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return as_plain(value)
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {name: plain(item) for name, item in value.items()}
        return url_of(value) or str(value) if isinstance(value, Path) else value

    return {field.name: plain(getattr(settings, field.name)) for field in key_fields(settings)}


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


def toml_value(value: object) -> str:
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
    """A parsed TOML file.

    Attributes:
        file: its path, if there is one.
        values: of sections and keys.
        lines: the line of each section and key, by `section.key`.
    """

    file: Path | None
    values: dict[str, Any]
    lines: dict[str, int]

    @classmethod
    def read(cls, file: Path | None) -> "TomlFile":
        """Parse a file; without one there are no values.

        Raises:
            InputError: the file is missing or is not TOML.
        """
        if file is None:
            return cls(None, {}, {})
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
            values = tomllib.loads(text)
            check_depth(values)  # before `_lines`, which takes long for names with very many dots
            return cls(file, values, _lines(text))
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}; name a TOML file of settings.") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: not UTF-8 text (byte {error.start}); name a TOML file of settings.") from error
        except RecursionError as error:
            raise InputError(f"{file}: lists or tables are nested too deeply; name a TOML file of settings.") from error
        except ValueError as error:
            line = re.search(r"line (\d+)", str(error))
            at = f"{file}:{line[1] if line else text.count(chr(10)) + 1}"
            raise InputError(f"{at}: not valid TOML: {error}. Strings need quotes; see https://toml.io.") from error

    def at(self, key: str) -> str:
        """`file:line` of a key; for one in a multi-line string or an inline table, the line of what is around it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.file}:{self.lines[key]}" if key else str(self.file)


def _lines(text: str) -> dict[str, int]:
    """The line of each `[section]` and `key =`, by `section.key`; the first one of a section that has several."""
    lines: dict[str, int] = {}
    section: list[str] = []
    for line, content in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", content):
            section = _names(header[1])
            lines.setdefault(".".join(section), line)
        elif key := re.match(r"""\s*([\w."'\- ]+?)\s*=""", content):
            names = section + _names(key[1])
            for length in range(len(section) + 1, len(names) + 1):
                lines.setdefault(".".join(names[:length]), line)
    return lines


def _names(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
