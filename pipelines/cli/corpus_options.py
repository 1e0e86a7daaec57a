"""`retro index CORPUS --tokenizer MODEL`: a datastore without a file of settings.

    CORPUS             ─► --corpus.paths CORPUS --datastore datastores/NAME
    --tokenizer MODEL  ─► --tokenizer.kind huggingface --tokenizer.path FOLDER --skip-stages neighbors

The words of the command line become options, so they are checked like all others.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from indexing.store.errors import InputError
from pipelines.cli.hub import TOKENIZER_FILES, local_folder
from pipelines.terminal.output import echo

SETTINGS_SUFFIX = ".toml"


def options_of_corpus(corpus: str, options: Sequence[str]) -> list[str]:
    """The options of `retro index` that stand for a corpus, with those that were given.

    A model of transformers copies from the whole datastore, which needs no neighbors; `--skip-stages` without a word
    makes them too.

    Args:
        corpus: file, folder, glob or URL of text.
        options: of the command line, after more such words: a shell writes them for a glob. `--tokenizer MODEL` names a
            local folder, or a model of the Hugging Face Hub.

    Raises:
        InputError: the corpus is named twice, or the tokenizer cannot be fetched.
    """
    more = list(takewhile(lambda word: not word.startswith("--"), options))
    options = options[len(more) :]
    given = {option.partition("=")[0].replace("_", "-") for option in options if option.startswith("--")}
    if "--corpus.paths" in given:
        raise InputError(
            f"{corpus} and --corpus.paths both name text: use one of them. --corpus.paths takes several words."
        )
    made = ["--corpus.paths", corpus, *more]
    datastore = Path("datastores") / _name(str(Path(corpus).absolute().parent) if more else corpus)
    if "--datastore" not in given:
        made += ["--datastore", str(datastore)]
        echo(f"datastore: {datastore}")
    if "--tokenizer" not in given:
        return [*made, *options]
    model, rest = _taken(list(options))
    file = Path(model).expanduser()
    path = file if file.is_file() else local_folder(model, TOKENIZER_FILES, "--tokenizer")
    made += ["--tokenizer.kind", "huggingface", "--tokenizer.path", str(path)]
    return [*made, *([] if "--skip-stages" in given else ["--skip-stages", "neighbors"]), *rest]


def _name(corpus: str) -> str:
    """A name for the datastore of a corpus: of the last part of its path that is no pattern, without endings."""
    parts = [
        part for part in re.split(r"[/\\]", corpus.partition("?")[0]) if part not in ("", ".", "..") and "*" not in part
    ]
    name = (parts or [Path.cwd().name])[-1]
    return name.strip(".").partition(".")[0] or "corpus"


def _taken(options: list[str]) -> tuple[str, list[str]]:
    """The value of `--tokenizer`, and the other options.

    Raises:
        InputError: it has no value.
    """
    at = max(number for number, option in enumerate(options) if option.partition("=")[0] == "--tokenizer")
    _, equals, value = options[at].partition("=")
    words = options[at + 1 : at + 2] if not equals else []
    value = value or next((word for word in words if not word.startswith("--")), "")
    if not value:
        raise InputError(
            "--tokenizer: a value is missing. It is the folder of a model, or its name on the Hugging Face Hub."
        )
    return value, [*options[:at], *options[at + 1 + len(words) :]]
