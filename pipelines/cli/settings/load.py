"""One tree of frozen dataclasses from defaults, a TOML file and the command line. pydantic checks all three, tyro
prints `--help`.

    file.toml ─► TomlFile ─► values ┐
    --section.key value ─► options ─┴─(options win)─► the tree, whose `__post_init__` run once

An option can therefore correct a value of the file. A table of settings by name, such as [executor.resources], has a
key for each name and setting. This folder knows no concrete setting.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from indexing.store.errors import InputError
from indexing.store.settings import key_fields, mistake
from pipelines.cli.settings.toml_file import TomlFile
from pipelines.terminal.output import exit_if_closed

T = TypeVar("T")

_TYPING_ERROR = 0.85  # similarity of two keys that differ in a letter


def load(settings_type: type[T], file: Path | None, arguments: Sequence[str], *, verb: str) -> T:
    """Settings from their defaults, then a TOML file, then the command line; the later one wins.

    Args:
        settings_type: class of settings (`indexing.store.settings`); fields that are such classes are sections. Its
            class attribute `removed` has a message for each former key, section or value (`key = value`). A field
            `given` receives the keys that were set.
        file: the TOML file, if any. None is written "None", as TOML has no null.
        arguments: options of the command line; see `_options`.
        verb: what follows `retro` in the usage line.

    Raises:
        InputError: an error in the file or an option, with file and line, the key, and what is accepted.
        SystemExit: status 0, after `--help`.
    """
    if {"-h", "--help"} & set(arguments):
        _print_help(settings_type, file, verb)
    leaves, source = leaf_types(settings_type), TomlFile.read(file)
    removed = getattr(settings_type, "removed", {})
    options = _options(leaves, arguments, verb, removed)
    tree: dict[str, Any] = {}
    values = dict(_file_values(leaves, source, removed, skipped=options)) | options
    for key, value in values.items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    try:
        has_given = "given" in {one.name for one in dataclasses.fields(settings_type)}  # type: ignore[arg-type]
        return settings_type(**tree, **({"given": frozenset(values)} if has_given else {}))
    except InputError as error:  # a relation between settings, or one that must be set
        key, *_ = re.split(r"[^\w.]", str(error), maxsplit=1)
        where = f"{file if key in options or key not in source.lines else source.at(key)}: " if file else ""
        raise InputError(f"{where}{error}") from error


def leaf_types(settings_type: type, above: str = "") -> dict[str, Any]:
    """Every leaf of the tree, `section.key`, with its type."""
    leaves: dict[str, Any] = {}
    hints: dict[str, Any] = get_type_hints(settings_type, include_extras=True)
    for field in key_fields(settings_type):
        key, hint = above + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            leaves |= leaf_types(hint, f"{key}.")  # type: ignore[arg-type]
        elif get_origin(hint) is Mapping:
            names, section = get_args(hint)
            for name in literals(names):
                leaves |= leaf_types(section, f"{key}.{name}.")
        else:
            leaves[key] = hint
    return leaves


def literals(hint: Any) -> list[str]:
    """The values of a Literal, or of a union of some."""
    return [value for arm in get_args(hint) for value in (literals(arm) if get_args(arm) else [arm])]


def _checked(hint: Any, value: Any, name: str, former: str = "", *, strict: bool) -> Any:
    """A value of the file (strict, as TOML has types) or words of an option, converted to a type; `former` follows a
    mistake."""
    if isinstance(value, str) and value.lower() == "none" and type(None) in get_args(hint):
        return None
    adapter = TypeAdapter(hint)
    try:
        if strict:  # as JSON, where a list is accepted for a tuple and a string for a path
            return adapter.validate_json(json.dumps(value, default=str), strict=True)
        return adapter.validate_python(value)
    except ValidationError as error:
        raise InputError(f"{mistake(error, name)} {former}".rstrip()) from error


# --- the file ------------------------------------------------------------------------------------------------------


def _file_values(
    leaves: Mapping[str, Any], source: TomlFile, removed: Mapping[str, str], *, skipped: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The values of a file by key, each checked unless an option replaces it."""
    known = dict.fromkeys(section for key in leaves for section in _above(key))

    def walk(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
        for name, value in section.items():
            key = above + name
            if key in leaves:
                if key not in skipped:
                    former = removed.get(f"{key} = {value}", "")
                    yield key, _checked(leaves[key], value, f"{source.at(key)}: {key}", former, strict=True)
            elif key not in known:
                kind, others = ("section", known) if isinstance(value, dict) else ("key", leaves)
                raise InputError(f"{source.at(key)}: unknown {kind} {key}.{_hint(key, others, removed)}")
            elif isinstance(value, dict):
                yield from walk(value, f"{key}.")
            else:
                raise InputError(
                    f"{source.at(key)}: {key} = {json.dumps(value, default=str)}: this is a section; write [{key}]."
                )

    return walk(source.values, "")


# --- the command line ----------------------------------------------------------------------------------------------


def _options(
    leaves: Mapping[str, Any], arguments: Sequence[str], verb: str, removed: Mapping[str, str]
) -> dict[str, Any]:
    """Read `--section.key value`; the last one of a key wins.

    Hyphens and underscores are the same. A switch is `--data.materialized`, `--data.no-materialized` or
    `--data.materialized true`. A list takes all words up to the next option. `--key=value` passes a value that begins
    with two hyphens.
    """
    values: dict[str, Any] = {}
    rest = list(arguments)
    # Without names of arguments: a shell would take the `|` of some for a pipe.
    more = f"`retro {' '.join(takewhile(str.islower, verb.split()))} --help` lists every option."
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        # One that begins with a single hyphen is a word: a negative number.
        words = [value] if equals else list(takewhile(lambda word: not word.startswith("--"), rest))
        rest = rest if equals else rest[len(words) :]
        key = option.removeprefix("--").replace("-", "_")
        switch = re.sub(r"(^|\.)no_(\w+)$", r"\1\2", key)
        if key not in leaves and _is_switch(leaves.get(switch)):
            key, words = switch, ["false", *words]
        if not option.startswith("--"):
            raise InputError(f"unexpected argument {option!r}. {more}")
        if key not in leaves:
            raise InputError(f"unknown option {option}.{_hint(key, leaves, removed, _option)} {more}")
        if _is_list(leaves[key]):
            values[key] = _checked(leaves[key], words, option, strict=False)
            continue
        words = words or ["true"] * _is_switch(leaves[key])
        if len(words) != 1:
            raise InputError(
                f"unexpected argument {words[1]!r}. {more}" if words else f"{option}: a value is missing. {more}"
            )
        values[key] = _checked(leaves[key], words[0], option, removed.get(f"{key} = {words[0]}", ""), strict=False)
    return values


def _is_switch(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def _is_list(hint: Any) -> bool:
    return get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple


def _hint(key: str, known: Iterable[str], removed: Mapping[str, str], shown: Callable[[str], str] = str) -> str:
    """The message of a removed key, else the keys that a user probably meant, else all keys of the section.

    Probable keys are, in this order: keys of the section that differ in a letter, the same name in other sections, keys
    of the section that are similar or end with the same word, and, for an unknown section, keys that are similar as a
    whole.
    """
    if former := next((part for part in (key, *_above(key)) if part in removed), None):
        return f" {removed[former]}"
    section, _, name = key.rpartition(".")
    names = {leaf: leaf.rpartition(".")[2] for leaf in known}
    siblings = {names[leaf]: leaf for leaf in names if leaf.rpartition(".")[0] == section}
    near = [siblings[close] for close in difflib.get_close_matches(name, siblings, cutoff=_TYPING_ERROR)]
    elsewhere = [leaf for leaf in names if names[leaf] == name]
    near = near or difflib.get_close_matches(key, elsewhere, n=1, cutoff=_TYPING_ERROR) or elsewhere
    similar = [*difflib.get_close_matches(name, siblings), *_with_last_word(name, siblings)]
    near = near or [siblings[close] for close in dict.fromkeys(similar)]
    if not near and not (section and siblings):  # the section alone makes any two of its keys similar
        near = difflib.get_close_matches(key, names)
    if near:
        return f" Did you mean {' or '.join(map(shown, near))}?"
    if not siblings:
        sections = dict.fromkeys(leaf.partition(".")[0] for leaf in names if "." in leaf)
        return f" Accepted sections: {', '.join(sections)}."
    return (
        f" Accepted {f'in {section}' if section else 'outside sections'}: {', '.join(map(shown, siblings.values()))}."
    )


def _above(key: str) -> list[str]:
    """The sections of a key, the innermost first."""
    return [key[: dot.start()] for dot in re.finditer(r"\.", key)][::-1]


def _with_last_word(name: str, others: Iterable[str]) -> list[str]:
    _, underscore, word = name.rpartition("_")
    return [other for other in others if underscore and other.endswith(f"_{word}")]


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _print_help(settings_type: type, file: Path | None, verb: str) -> None:
    """Print every option with its docstring and its default, which may come from the file, and exit."""
    import tyro

    default: dict[str, Any] = {} if file is None else {"default": load(settings_type, file, [], verb=verb)}
    with exit_if_closed(sys.stdout), ExitStack() as stack:
        _annotate(settings_type, stack)
        tyro.cli(settings_type, prog=f"retro {verb}", args=["--help"], **default)


def _annotate(settings_type: Any, stack: ExitStack) -> None:
    """Annotate fields for tyro until the stack closes: keys with their docstring in one line, since tyro keeps line
    breaks; others hidden."""
    from tyro.conf import Suppress, arg

    hints, texts = get_type_hints(settings_type, include_extras=True), field_docstrings(settings_type)
    stack.callback(setattr, settings_type, "__annotations__", dict(settings_type.__annotations__))
    for field in dataclasses.fields(settings_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            _annotate(hint, stack)
        else:
            seen = arg(help=" ".join(texts[field.name].split())) if field in key_fields(settings_type) else Suppress
            settings_type.__annotations__[field.name] = Annotated[hint, seen]


def field_docstrings(settings_type: type) -> dict[str, str]:
    """The string below each field, also of base classes."""
    docstrings = {}
    for owner in reversed(settings_type.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings[name] = inspect.cleandoc(text)
    return docstrings
