"""Fields of a tree of settings: their types, the values that they accept, and how a value is converted."""

import contextlib
import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Field(NamedTuple):
    """A field that can be set; `default` is MISSING where there is none."""

    name: str
    hint: Any
    default: Any

    @property
    def is_section(self) -> bool:
        """Whether the field is a dataclass with fields of its own."""
        return dataclasses.is_dataclass(self.hint)


def fields_of(settings_type: type, instance: Any = None) -> list[Field]:
    """The fields that can be set. Defaults come from `instance`, the default of a section, where there is one."""
    hints = get_type_hints(settings_type)
    out = []
    for field in dataclasses.fields(settings_type):
        default = field.default
        if instance is not None:
            default = getattr(instance, field.name)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init:
            out.append(Field(field.name, hints[field.name], default))
    return out


def leaf_types(settings_type: type, above: str = "") -> dict[str, Any]:
    """Every leaf of the tree, `section.key`, with its type."""
    out = {}
    for field in fields_of(settings_type):
        key = above + field.name
        out.update(leaf_types(field.hint, f"{key}.") if field.is_section else {key: field.hint})
    return out


# --- values --------------------------------------------------------------------------------------------------------

_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    types.NoneType: '"None"',
}


def accepted(hint: Any) -> str:
    """The values that a leaf of this type accepts, in words."""
    if get_origin(hint) is Literal:
        return " or ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        arms = get_args(hint)
        return f"a list{'' if arms[-1] is ... else f' of {len(arms)}'}, each item {accepted(arms[0])}"
    if _is_union(hint):
        return " or ".join(accepted(arm) for arm in get_args(hint))
    return _NAMES[hint]


def from_toml(value: Any, hint: Any) -> Any:
    """Convert a value of a TOML file to the type `hint`.

    Raises:
        ValueError: the type does not accept it.
    """
    if get_origin(hint) is Literal:
        same = [choice for choice in get_args(hint) if choice == value and type(choice) is type(value)]
        if same:
            return same[0]
    elif get_origin(hint) is tuple:
        if isinstance(value, list) and _fits(value, hint):
            return tuple(from_toml(item, get_args(hint)[0]) for item in value)
    elif _is_union(hint):
        return _first_that_converts(value, hint, from_toml)
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


def from_words(words: Sequence[str], hint: Any) -> Any:
    """Convert the words after an option to the type `hint`, which is not bool.

    Raises:
        ValueError: the type does not accept them.
    """
    if get_origin(hint) is tuple:
        if not _fits(words, hint):
            raise ValueError(words)
        return tuple(from_words([word], get_args(hint)[0]) for word in words)
    if _is_union(hint):
        return _first_that_converts(words, hint, from_words)
    (word,) = words
    if get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in get_args(hint)}
        if word not in choices:
            raise ValueError(word)
        return choices[word]
    return from_toml(word, hint) if hint is types.NoneType else hint(word)


def is_switch(hint: Any) -> bool:
    """Whether a leaf of this type is true or false, or undecided (None)."""
    return hint is bool or (_is_union(hint) and bool in get_args(hint))


def takes_several(hint: Any) -> bool:
    """Whether a leaf of this type is a list."""
    return get_origin(hint) is tuple or (_is_union(hint) and any(map(takes_several, get_args(hint))))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _fits(items: Sequence[Any], hint: Any) -> bool:
    arms = get_args(hint)
    return arms[-1] is ... or len(items) == len(arms)


def _first_that_converts(value: Any, hint: Any, convert: Any) -> Any:
    # None first: "None" means None also where text is accepted.
    for arm in sorted(get_args(hint), key=lambda arm: arm is not types.NoneType):
        with contextlib.suppress(ValueError):
            return convert(value, arm)
    raise ValueError(value)


# --- near names ----------------------------------------------------------------------------------------------------


def nearest(key: str, known: Sequence[str]) -> list[str]:
    """Keys that a user probably meant: the same key of a subsection, else a similar key of the same section, else the same key of
    another section, else any similar key."""
    section, _, name = key.rpartition(".")
    siblings = {leaf.rpartition(".")[2]: leaf for leaf in known if leaf.rpartition(".")[0] == section}
    near = [leaf for leaf in known if section and leaf.startswith(f"{section}.") and leaf.endswith(f".{name}")]
    near = near or [siblings[close] for close in difflib.get_close_matches(name, siblings)]
    near = near or [leaf for leaf in dict.fromkeys(known) if leaf.rpartition(".")[2] == name]
    if section and siblings:
        return near  # the section alone would make any two of its keys similar
    return near or difflib.get_close_matches(key, known)


def did_you_mean(near: Sequence[str]) -> str:
    """A sentence to append to a message, or nothing."""
    return f" Did you mean {' or '.join(near)}?" if near else ""
