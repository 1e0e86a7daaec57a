"""One tree of frozen dataclasses from defaults, a TOML file and the command line.

    file.toml ─► TomlFile ─► values ┐
    --section.key value ─► options ─┴─(options win)─► the tree, whose `__post_init__` run once

An option can therefore correct a value of the file. This folder knows no concrete setting.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from indexing.store.errors import InputError
from pipelines.settings.fields import Field, accepted, did_you_mean, fields_of, from_toml, leaf_types, nearest
from pipelines.settings.options import parse_options
from pipelines.settings.toml_file import TomlFile, toml_value
from pipelines.terminal import exit_if_closed

T = TypeVar("T")


def load(settings_type: type[T], file: Path | None, arguments: Sequence[str], *, verb: str) -> T:
    """Settings from their defaults, then a TOML file, then the command line; the later one wins.

    Leaves are int, float, bool, str, Path, Literal, tuples of these (`tuple[int, ...]`, or of one type and a fixed length),
    or one of these or None (written "None").

    Args:
        settings_type: a frozen dataclass of leaves and of further frozen dataclasses, which are sections.
        file: the TOML file, if any.
        arguments: options of the command line; see `parse_options`.
        verb: what follows `retro` in the usage line.

    Raises:
        InputError: an error in the file or an option, with file and line, the key, and what is accepted.
        SystemExit: status 0, after `--help`.
    """
    source = TomlFile.read(file)
    values = _values_of(source, settings_type)
    if {"-h", "--help"} & set(arguments):
        _print_help(settings_type, values, verb)
    options = parse_options(settings_type, arguments, verb)
    try:
        return _build(settings_type, values | options, verb=verb)
    except ValueError as error:  # from a __post_init__; InputError is a ValueError
        raise InputError(source.locate(str(error), list(options))) from error


def _values_of(source: TomlFile, settings_type: type) -> dict[str, Any]:
    """The values of a file by key, `section.key`, each checked and of its type."""
    values: dict[str, Any] = {}

    def read(section_type: type, section: dict[str, Any], path: tuple[str, ...]) -> None:
        fields = {field.name: field for field in fields_of(section_type)}
        for name, value in section.items():
            here = (*path, name)
            if name not in fields:
                raise InputError(
                    _unknown_key(source, here, list(fields.values()), isinstance(value, dict), settings_type)
                )
            if not fields[name].is_section:
                values[".".join(here)] = _leaf(source, here, value, fields[name].hint)
            elif isinstance(value, dict):
                read(fields[name].hint, value, here)
            else:
                raise InputError(
                    f"{source.at(here)}: {'.'.join(here)} = {value!r}: this is a section; write [{'.'.join(here)}]."
                )

    read(settings_type, source.values, ())
    return values


def _leaf(source: TomlFile, path: tuple[str, ...], value: Any, hint: Any) -> Any:
    try:
        return from_toml(value, hint)
    except ValueError as error:
        key = f"{'.'.join(path)} = {toml_value(value)}"
        raise InputError(f"{source.at(path)}: {key}: accepted is {accepted(hint)}.") from error


def _unknown_key(source: TomlFile, path: tuple[str, ...], fields: list[Field], is_section: bool, top: type) -> str:
    known = [field.name for field in fields if field.is_section == is_section]
    here = [".".join((*path[:-1], name)) for name in known]
    near = did_you_mean(nearest(".".join(path), here if is_section else [*here, *leaf_types(top)]))
    inside = f"of [{'.'.join(path[:-1])}]" if path[1:] else "outside sections"
    listed = f"{'Sections' if is_section else 'Keys'} {inside}: {', '.join(known) or 'none'}."
    return f"{source.at(path)}: unknown {'section' if is_section else 'key'} {'.'.join(path)}.{near} {listed}"


def _build(
    settings_type: type[T],
    values: dict[str, Any],
    *,
    verb: str,
    path: str = "",
    instance: Any = None,
    required: Any = MISSING,
) -> T:
    """Build the tree, innermost sections first.

    Args:
        settings_type: type of this section.
        values: of the whole tree, by `section.key`.
        verb: for messages.
        path: of this section, with a dot at its end.
        instance: the section's default.
        required: value of a key without a default that is not set; MISSING raises InputError.
    """
    made: dict[str, Any] = {}
    for name, hint, default in fields_of(settings_type, instance):
        key = path + name
        if hasattr(hint, "__dataclass_fields__"):
            nested = None if default is MISSING else default
            made[name] = _build(hint, values, verb=verb, path=f"{key}.", instance=nested, required=required)
            continue
        made[name] = values.get(key, required if default is MISSING else default)
        if made[name] is MISSING:
            option = "--" + key.replace("_", "-")
            raise InputError(f"{option} is required: {accepted(hint)}. `retro {verb} --help` lists every option.")
    return settings_type(**made)


def _print_help(settings_type: type, values: dict[str, Any], verb: str) -> None:
    """Print every option with its docstring and its default, which may come from the file, and exit."""
    import tyro

    defaults: Any = _build(settings_type, values, verb=verb, required=tyro.MISSING)
    with exit_if_closed(sys.stdout):
        tyro.cli(settings_type, prog=f"retro {verb}", default=defaults, args=["--help"])
