"""Pages of the site for settings and commands, made from the dataclasses. MkDocs calls `on_files` when it builds the
site.

    Config, section by section ─► reference/settings.md, settings/*.md
    VERBS, verb by verb        ─► reference/commands.md, commands/*.md

An entry is a field's name, type, default and docstring, so a new field needs no edit here. A new section needs a row in
`SETTINGS_PAGES`.
"""

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from indexing.store.settings import key_fields
from pipelines.cli.main import VERBS, Verb
from pipelines.cli.settings.load import field_docstrings, literals
from pipelines.config import Config

SETTINGS_PAGES = {
    "corpus": ("corpus", "dedup", "tokenizer", "chunks"),
    "neighbors": ("embedder", "index", "neighbors"),
    "executor": ("executor",),
    "data": ("data",),
    "model": ("model",),
    "train": ("train",),
    "fine-tuning": ("lora", "finetune"),
    "parallel": ("parallel",),
    "evaluation": ("evaluation",),
}
"""Sections of the TOML file by page."""
_SETTINGS_INTRO = """\
Settings come from a TOML file and from the command line, which wins. `train.lr` is `lr` in the section `[train]` of the file
and `--train.lr 1e-3` on the command line. A switch is `--data.materialized` or `--data.no-materialized`. A list is
`--data.weights 1 2`."""
_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "string", Path: "path", types.NoneType: '"None"'}


def on_files(files: Any, config: Any) -> None:
    """Add the pages to those of the site (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))


def pages() -> dict[str, str]:
    """Every page: its path in `docs/` and its text.

    No page is called `index`: MkDocs would write it to the address of its folder, where the list of pages is.
    """
    settings = {f"settings/{page}": _settings_page(sections) for page, sections in SETTINGS_PAGES.items()}
    by_word: dict[str, dict[str, Verb]] = {}
    for name, verb in VERBS.items():
        by_word.setdefault(name.split()[0], {})[name] = verb
    commands = {f"commands/retro-{word}": _command_page(word, verbs) for word, verbs in by_word.items()}
    texts = {"settings": _settings_index(), "commands": _command_index()} | settings | commands
    return {f"reference/{name}.md": "\n\n".join(text) + "\n" for name, text in texts.items()}


def _settings_index() -> list[str]:
    rows = ["| section | |", "|---|---|"]
    for page, sections in SETTINGS_PAGES.items():
        for section in sections:
            rows.append(f"| [{section}](settings/{page}.md) | {_first_sentence(get_type_hints(Config)[section])} |")
    return [
        "# Settings",
        _SETTINGS_INTRO,
        "\n".join(rows),
        "## Outside sections",
        *_entries(Config, "", "../"),
    ]


def _settings_page(sections: tuple[str, ...]) -> list[str]:
    text = [f"# Settings: {', '.join(sections)}"]
    for section in sections:
        text += _section(getattr(Config(), section), section)
    return text


def _section(settings: Any, path: str) -> list[str]:
    """A section's heading, its own keys, then the sections in it; `settings` has the defaults."""
    text = [f"## [{path}]", _docstring(type(settings)), *_entries(type(settings), f"{path}.", "../../", settings)]
    for name, value in vars(settings).items():
        text += _section(value, f"{path}.{name}") if dataclasses.is_dataclass(value) else []
    for table, names, section in _tables(type(settings)):
        text += [
            f"## [{path}.{table}]",
            f"Keys of each of {', '.join(f'`{name}`' for name in names)}. {_docstring(section)}",
            *_entries(section, f"{path}.{table}.….", "../../"),
        ]
    return text


def _tables(settings: type) -> list[tuple[str, list[str], type]]:
    """Tables of settings by name: their field, the names, and the class of a value."""
    hints = get_type_hints(settings, include_extras=True)
    tables = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Mapping}
    return [(field, literals(names), section) for field, (names, section) in tables.items()]


def _command_index() -> list[str]:
    rows = ["| command | arguments | |", "|---|---|---|"]
    for name, verb in VERBS.items():
        arguments = " ".join(verb.positional).replace("|", r"\|")
        rows.append(f"| [retro {name}](commands/retro-{name.split()[0]}.md) | {arguments} | {verb.summary} |")
    return ["# Commands", "\n".join(rows)]


def _command_page(word: str, verbs: dict[str, Verb]) -> list[str]:
    text = [f"# retro {word}"]
    for name, verb in verbs.items():
        heading = [f"## retro {name}"] if len(verbs) > 1 else []
        usage = " ".join(("retro", name, *verb.positional, "[--options]"))
        text += [*heading, f"```\n{usage}\n```", *_options(verb)]
    return text


def _options(verb: Verb) -> list[str]:
    """What a verb does and its options; sections of the TOML file by a link."""
    settings = verb.load()[1]
    text = [f"{verb.summary}."] if settings is Config else [_docstring(settings)]
    text += _entries(settings, "--", "../../")
    if issubclass(settings, Config):
        return [*text, "Every key of the [settings](../settings.md) is an option too."]
    for name, field in settings.__pydantic_fields__.items():
        hint: Any = field.annotation
        page = next((page for page, sections in SETTINGS_PAGES.items() if name in sections), None)
        if dataclasses.is_dataclass(hint) and page:
            text.append(f"Further options: [`--{name}.…`](../settings/{page}.md).")
        elif dataclasses.is_dataclass(hint):
            text += [f"## Options `--{name}.…`", *_entries(hint, f"--{name}.", "../../")]
    return text


def _entries(settings: Any, prefix: str, root: str, instance: Any = None) -> list[str]:
    """Heading, type, default and docstring of each key that is no section; of a command, without the keys of `Config`.

    Defaults are those of the type, or the values of `instance`.
    """
    docs, entries = field_docstrings(settings), []
    keys = {one.name for one in key_fields(settings)}
    keys -= set(Config.__pydantic_fields__) if prefix == "--" and issubclass(settings, Config) else set()
    for name, field in settings.__pydantic_fields__.items():
        if name not in keys or dataclasses.is_dataclass(field.annotation):
            continue
        key = prefix + (name.replace("_", "-") if prefix.startswith("--") else name)
        value = getattr(instance, name) if instance else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else f"default `{_shown(value)}`"
        kind = _type_name(field.annotation, field.metadata)
        text = re.sub(
            r"docs/([\w/-]+)\.md", lambda page: f"[{page[1].rpartition('/')[2]}]({root}{page[1]}.md)", docs[name]
        )
        entries.append(f"### `{key}`\n\n{kind}, {default}\n\n{text}")
    return entries


# --- dataclasses ---------------------------------------------------------------------------------------------------


def _docstring(settings: type) -> str:
    return inspect.cleandoc(settings.__doc__ or "")


def _first_sentence(settings: type) -> str:
    return re.split(r"[.:;](?:\s|$)", _docstring(settings))[0].replace("\n", " ")


def _type_name(hint: Any, constraints: Sequence[Any] = ()) -> str:
    """The type in words, with its bounds: `integer ≥ 1`."""
    arms = get_args(hint)
    if get_origin(hint) is Annotated:
        return _type_name(arms[0], [bound for field in arms[1:] for bound in getattr(field, "metadata", [field])])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f"`{_shown(arm)}`" for arm in arms)
    if get_origin(hint) is tuple:
        if arms[-1] is ...:
            return f"list of {_type_name(arms[0])}"
        return f"list of {len(arms)}: {', '.join(map(_type_name, arms))}"
    if get_origin(hint) is Mapping:
        return "table"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_type_name, arms))
    bounds = [f"{sign} {getattr(bound, key):,}" for bound in constraints for key, sign in _SIGNS if hasattr(bound, key)]
    return " ".join([_TYPES[hint], ", ".join(bounds)]).strip()


def _shown(value: Any) -> str:
    return '"None"' if value is None else json.dumps(value, default=str, ensure_ascii=False)
