"""One tree of frozen dataclasses from a TOML file and the command line, and back to TOML.

    file.toml ──tomllib──> checked values ──> defaults of a mirror of the tree ──tyro──> (arguments win) ──> the tree

The mirror has the same fields and help texts but runs no `__post_init__`: what is impossible is judged once, over file
and command line together, so an option can mend a file. Nothing here knows a concrete setting.
"""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from indexing.store.errors import InputError
from indexing.store.remote import url_of

T = TypeVar("T")


def load(settings_type: type[T], file: Path | None, arguments: Sequence[str], *, verb: str) -> T:
    """Settings from their defaults, then a TOML file, then the command line; the later one wins.

    Leaves are int, float, bool, str, Path, Literal, tuples of these (`tuple[int, ...]` or of one type and fixed length),
    or one of these or None (written "None").
    A bool is a pair of switches: `--train.compile`, `--train.no-compile`.

    Args:
        settings_type: a frozen dataclass of leaves and of further frozen dataclasses, which are sections.
        file: the TOML file, if any.
        arguments: the command line after the verb, `--section.key value`; hyphens and underscores are the same.
        verb: what stands after `retro` in the usage line.

    Raises:
        InputError: anything wrong in either place, with file and line, the key, and what is accepted.
        SystemExit: status 0, after `--help`.
    """
    source = Source.read(file)
    mirror = _mirror(settings_type, source, source.values, (), None)
    parsed = _parse(settings_type, mirror, arguments, verb)
    try:
        return _rebuilt(settings_type, parsed)
    except ValueError as error:  # what a __post_init__ raises; InputError is one
        raise InputError(source.locate(str(error), arguments)) from error


def as_plain(settings: Any) -> dict[str, Any]:
    """The tree as what JSON can hold: sections are dicts, paths are strings, tuples are lists."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return as_plain(value)
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return url_of(value) or str(value) if isinstance(value, Path) else value

    return {field.name: plain(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}


def to_toml(settings: Any) -> str:
    """The tree as TOML that `load` reads back equal; to be left beside results.

    TOML has no null: None is written as the string "None", as on the command line.
    """
    return "\n".join(_toml_lines(as_plain(settings), ())).strip() + "\n"


def _toml_lines(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    leaves = {key: value for key, value in section.items() if not isinstance(value, dict)}
    if path and (leaves or not section):
        yield f"\n[{'.'.join(path)}]"
    for key, value in leaves.items():
        yield f"{key} = {_toml_value(value)}"
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _toml_lines(value, (*path, key))


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return '"None"' if value is None else repr(value)


# --- the file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A parsed TOML file that remembers where its keys stand."""

    file: Path | None
    text: str
    values: dict[str, Any]

    @classmethod
    def read(cls, file: Path | None) -> "Source":
        """Parse a file; without one there are no values."""
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

        A scan for `[section]` and `key =`, good for what people write: keys inside a multi-line string or an inline
        table are not seen as such, and then the line of what holds them is given.
        """
        found: dict[tuple[str, ...], int] = {}
        section: tuple[str, ...] = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", line):
                section = _parts(header[1])
                found.setdefault(section, number)
            elif key := re.match(r"""\s*([\w."'\- ]+?)\s*=""", line):
                whole = section + _parts(key[1])
                for length in range(len(section) + 1, len(whole) + 1):
                    found.setdefault(whole[:length], number)
        lines = [found[tuple(path[:length])] for length in range(len(path) + 1) if tuple(path[:length]) in found]
        return f"{self.file}:{lines[-1]}" if lines else str(self.file)

    def holds(self, path: Sequence[str]) -> bool:
        """Whether the file sets this key."""
        values: Any = self.values
        for key in path:
            if not isinstance(values, dict) or key not in values:
                return False
            values = values[key]
        return True

    def locate(self, message: str, arguments: Sequence[str]) -> str:
        """A message that begins with its key, with the file in front, and the line if the value comes from there."""
        if self.file is None:
            return message
        path = _parts(re.match(r"[\w.]*", message)[0])  # type: ignore[index]  # `*` always matches
        options = {argument.lstrip("-").partition("=")[0].replace("-", "_") for argument in arguments}
        at = self.at(path) if self.holds(path) and ".".join(path) not in options else self.file
        return f"{at}: {message}"


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


# --- the tree ------------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    name: str
    hint: Any
    default: Any  # MISSING where there is none

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.hint)


def _fields(settings_type: type, instance: Any = None) -> list[_Field]:
    """The fields that can be set. Defaults come from `instance`, a section's own default, where there is one."""
    hints = get_type_hints(settings_type)
    out = []
    for field in dataclasses.fields(settings_type):
        default = field.default
        if instance is not None:
            default = getattr(instance, field.name)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init:
            out.append(_Field(field.name, hints[field.name], default))
    return out


def _leaves(settings_type: type, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every leaf of the tree as `section.key`, with its type."""
    out = {}
    for field in _fields(settings_type):
        below = (*path, field.name)
        out.update(_leaves(field.hint, below) if field.is_section else {".".join(below): field.hint})
    return out


def _mirror(
    settings_type: type, source: Source, values: dict[str, Any], path: tuple[str, ...], instance: Any, top: Any = None
) -> type:
    """A dataclass like `settings_type` whose defaults are the file's values and which accepts any combination.

    A subclass, because that is how tyro finds the help texts.
    """
    top = top or settings_type
    fields = _fields(settings_type, instance)
    for key in values:
        if key not in {field.name for field in fields}:
            raise InputError(_unknown_key(source, (*path, key), fields, isinstance(values[key], dict), top))
    specs: list[Any] = []
    for name, hint, default in fields:
        here = (*path, name)
        if dataclasses.is_dataclass(hint):
            section = values.get(name, {})
            if not isinstance(section, dict):
                raise InputError(
                    f"{source.at(here)}: {name} = {section!r}: this is a section; write [{'.'.join(here)}]."
                )
            nested = None if default is MISSING else default
            specs.append((name, _mirror(hint, source, section, here, nested, top)))  # type: ignore[arg-type]
            continue
        if name in values:
            try:
                default = _converted(values[name], hint)
            except ValueError as error:
                key = ".".join(here)
                raise InputError(
                    f"{source.at(here)}: {key} = {_shown(values[name])}: accepted is {_accepted(hint)}."
                ) from error
        specs.append((name, hint) if default is MISSING else (name, hint, dataclasses.field(default=default)))
    # tyro reads source code for the help text of every field. In "builtins" it looks for none, and takes the base class's.
    namespace = {"__doc__": settings_type.__doc__, "__module__": "builtins", "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(
        settings_type.__name__, specs, bases=(settings_type,), namespace=namespace, frozen=True, kw_only=True
    )


def _rebuilt(settings_type: type[T], mirrored: Any) -> T:
    """The real tree, whose `__post_init__` now run, innermost first."""
    values = {}
    for name, hint, _ in _fields(settings_type, mirrored):
        value = getattr(mirrored, name)
        values[name] = _rebuilt(hint, value) if dataclasses.is_dataclass(hint) else value  # type: ignore[arg-type]
    return settings_type(**values)


def _unknown_key(source: Source, path: tuple[str, ...], fields: list[_Field], is_section: bool, top: type) -> str:
    known = [field.name for field in fields if field.is_section == is_section]
    here = [".".join((*path[:-1], name)) for name in known]
    near = _nearest(".".join(path), here if is_section else [*here, *_leaves(top)])
    inside = f"of [{'.'.join(path[:-1])}]" if path[1:] else "outside sections"
    listed = f"{'Sections' if is_section else 'Keys'} {inside}: {', '.join(known) or 'none'}."
    return f"{source.at(path)}: unknown {'section' if is_section else 'key'} {'.'.join(path)}.{_hint(near)} {listed}"


def _nearest(key: str, known: Sequence[str]) -> list[str]:
    """What was probably meant: a similar key of the same section, else the same key of another, else anything similar."""
    section, _, name = key.rpartition(".")
    siblings = {leaf.rpartition(".")[2]: leaf for leaf in known if leaf.rpartition(".")[0] == section}
    near = [siblings[close] for close in difflib.get_close_matches(name, siblings)]
    near = near or [leaf for leaf in dict.fromkeys(known) if leaf.rpartition(".")[2] == name]
    if section and siblings:
        return near  # the section alone would make any two of its keys similar
    return near or difflib.get_close_matches(key, known)


def _hint(near: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""


# --- values --------------------------------------------------------------------------------------------------------

_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    Path: "a path in quotes",
    types.NoneType: '"None"',
}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _accepted(hint: Any) -> str:
    """What a leaf of this type takes, in words."""
    if get_origin(hint) is Literal:
        return " or ".join(_shown(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        arms = get_args(hint)
        return f"a list{'' if arms[-1] is ... else f' of {len(arms)}'}, each item {_accepted(arms[0])}"
    if _is_union(hint):
        return " or ".join(_accepted(arm) for arm in get_args(hint))
    return _NAMES[hint]


def _shown(value: Any) -> str:
    return _toml_value(value) if isinstance(value, bool | int | float | str | list) else str(value)


def _converted(value: Any, hint: Any) -> Any:
    """A value of the file as one of the type `hint`.

    Raises:
        ValueError: it is none.
    """
    if get_origin(hint) is Literal:
        same = [choice for choice in get_args(hint) if choice == value and type(choice) is type(value)]
        if same:
            return same[0]
    elif get_origin(hint) is tuple:
        arms = get_args(hint)
        if isinstance(value, list) and (arms[-1] is ... or len(value) == len(arms)):
            return tuple(_converted(item, arms[0]) for item in value)
    elif _is_union(hint):
        # None first: "None" means None also where text is accepted, as on the command line.
        for arm in sorted(get_args(hint), key=lambda arm: arm is not types.NoneType):
            with contextlib.suppress(ValueError):
                return _converted(value, arm)
    elif hint is types.NoneType:
        if value == "None":
            return None
    elif hint is float and type(value) is int:
        return float(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif type(value) is hint:  # exact, as True is also an int
        return value
    raise ValueError(value)


# --- the command line ----------------------------------------------------------------------------------------------


def _parse(settings_type: type, mirror: type, arguments: Sequence[str], verb: str) -> Any:
    """Let tyro parse, and tell what it refuses in our own way.

    tyro prints a box and exits, and its hook for errors is private: the box is caught and its reason kept.
    """
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: Any
            parsed, unknown = tyro.cli(mirror, prog=f"retro {verb}", args=list(arguments), return_unknown_args=True)
    except SystemExit as error:
        if error.code in (0, None):
            raise  # --help
        raise InputError(_bad_value(settings_type, said.getvalue(), verb)) from error
    if unknown:
        raise InputError(_unknown_option(settings_type, unknown[0], verb))
    return parsed


def _bad_value(settings_type: type, box: str, verb: str) -> str:
    lines = re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()
    reason = []
    for line in lines[1:]:  # the first is the upper edge with a title
        inside = line.strip("│╰╯─ ").strip()
        if not inside:
            break  # the rule below the reason
        reason.append(inside)
    message = " ".join(reason).removeprefix("Error parsing ").rstrip(".") or box.strip()
    named = re.search(r"--([\w.-]+\w)", message)
    hint = _leaves(settings_type).get(named[1].replace("-", "_")) if named else None
    accepted = f" Accepted is {_accepted(hint)}." if hint is not None else ""
    return f"{message}.{accepted} `retro {verb} --help` lists every option."


def _unknown_option(settings_type: type, token: str, verb: str) -> str:
    more = f"`retro {verb} --help` lists every option."
    if not token.startswith("-"):
        return f"unexpected argument {token!r}. A switch takes no value: --key for true, --no-key for false. {more}"
    key = token.lstrip("-").partition("=")[0].replace("-", "_")
    leaves = list(_leaves(settings_type))
    section = key.rpartition(".")[0]
    options, siblings = (
        ["--" + leaf.replace("_", "-") for leaf in some]
        for some in (_nearest(key, leaves), [leaf for leaf in leaves if section and leaf.rpartition(".")[0] == section])
    )
    hint = _hint(options) or (f" Options of {section}: {', '.join(siblings)}." if siblings else "")
    return f"unknown option {token.partition('=')[0]}.{hint} {more}"
