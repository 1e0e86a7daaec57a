"""Options of the command line, `--section.key value`, as values by key."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from indexing.store.errors import InputError
from pipelines.settings.fields import accepted, did_you_mean, from_words, is_switch, leaf_types, nearest, takes_several

_OPTIONAL_SWITCH = {"true": True, "false": False, "none": None}


def parse_options(settings_type: type, arguments: Sequence[str], verb: str) -> dict[str, Any]:
    """Read options; the last one of a key wins.

    Hyphens and underscores are the same. A bool is a pair of switches, `--train.compile` and `--train.no-compile`. One that can be
    None also takes true, false or none, in any case. A list takes all words up to the next option. `--key=value` passes a value that
    begins with two hyphens.

    Args:
        settings_type: the tree of settings.
        arguments: the command line after the positional arguments.
        verb: what follows `retro` in messages.

    Raises:
        InputError: an unknown option, or a value that its type does not accept.
    """
    leaves, rest = leaf_types(settings_type), list(arguments)
    values: dict[str, Any] = {}
    more = f"`retro {verb} --help` lists every option."
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        switch = key if key in leaves else re.sub(r"(^|\.)no_(\w+)$", r"\1\2", key)
        if not option.startswith("--") or (equals and is_switch(leaves.get(switch))):
            several = " For more than one datastore use --extra-datastores." if "extra_datastores" in leaves else ""
            raise InputError(
                f"unexpected argument {argument!r}. A switch takes no value: --key for true, --no-key for false.{several} {more}"
            )
        if is_switch(leaves.get(switch)):
            is_value = leaves[switch] is not bool and key == switch and _words(rest, 1)
            word = rest.pop(0) if is_value else str(key == switch)
            if word.lower() not in _OPTIONAL_SWITCH:
                raise InputError(f"{option} {word}: accepted is true, false or none. {more}")
            values[switch] = _OPTIONAL_SWITCH[word.lower()]
            continue
        if key not in leaves:
            raise InputError(f"unknown option {option}.{_hint(key, leaves)} {more}")
        words = [value] if equals else _words(rest, None if takes_several(leaves[key]) else 1)
        rest = rest if equals else rest[len(words) :]
        try:
            values[key] = from_words(words, leaves[key])
        except ValueError as error:
            found = f"{option} {' '.join(words)}" if words else f"{option}: a value is missing"
            raise InputError(f"{found}: accepted is {accepted(leaves[key])}. {more}") from error
    return values


def _words(rest: Sequence[str], limit: int | None) -> list[str]:
    """The words up to the next option. One that begins with a single hyphen is a word: a negative number."""
    return list(takewhile(lambda word: not word.startswith("--"), rest[:limit]))


def _hint(key: str, leaves: dict[str, Any]) -> str:
    section = key.rpartition(".")[0]
    near = did_you_mean([_option(leaf) for leaf in nearest(key, list(leaves))])
    siblings = [_option(leaf) for leaf in leaves if section and leaf.rpartition(".")[0] == section]
    return near or (f" Options of {section}: {', '.join(siblings)}." if siblings else "")


def _option(leaf: str) -> str:
    return "--" + leaf.replace("_", "-")
