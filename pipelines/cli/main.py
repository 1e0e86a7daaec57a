"""`retro VERB …`: one table of verbs, with the positional arguments, the settings and the function of each.

arguments ─► the verb's row ─► settings: defaults, then the TOML file, then options ─► the verb's function ─► exit status
"""

import contextlib
import difflib
import importlib
import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError, in_words
from indexing.store.remote import url_of
from pipelines.terminal.logger import setup_logging
from pipelines.terminal.output import echo
from pipelines.terminal.progress import running
from retro.training.signals import Stopped

log = logging.getLogger("retro")
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Verb:
    """A row of the table. It holds names instead of objects, so that a verb imports only its own module.

    Attributes:
        summary: one line for `retro --help`.
        module: module of `pipelines.cli` that holds `run` and `settings`.
        run: function that receives the positional arguments and the settings, and returns the exit status.
        settings: type of the settings.
        positional: names of the positional arguments. `CONFIG` is a TOML file and is read into the settings; `[CONFIG]`
            is optional, and `CORPUS` names text in its place. A single name that ends in `…` takes one or more
            arguments as a list.
        resumes: the same command continues the work of one that was stopped.
    """

    summary: str
    module: str
    run: str
    settings: str
    positional: tuple[str, ...] = ()
    resumes: bool = False

    def load(self) -> tuple[Callable[..., int], type[object]]:
        """Import the function and the type of its settings."""
        module = importlib.import_module(f"pipelines.cli.{self.module}")
        return getattr(module, self.run), getattr(module, self.settings)


GROUPS: dict[str, dict[str, Verb]] = {
    "Start here": {
        "demo": Verb(
            "Build a datastore, train three small models and compare them, in minutes",
            "verbs.demo_model", "run_demo", "DemoOptions", resumes=True,
        ),
        "doctor": Verb(
            "Check installed packages, devices and memory",
            "verbs.doctor", "doctor", "DoctorOptions",
        ),
    },
    "Datastore": {
        "plan datastore": Verb(
            "Estimate size, time and memory of a datastore",
            "verbs.datastore", "plan", "PlanOptions", ("[CONFIG]",),
        ),
        "plan gain": Verb(
            "Estimate what more text would bring to a model, from a sample of a corpus",
            "planning.gain", "plan_gain", "PlanGainOptions", ("[CONFIG]",),
        ),
        "index": Verb(
            "Build a datastore from a corpus, or update it",
            "verbs.datastore", "index", "IndexOptions", ("CONFIG|CORPUS",), resumes=True,
        ),
        "search": Verb(
            "Print the chunks nearest to a text",
            "verbs.datastore", "search", "SearchOptions", ("DATASTORE", "TEXT"),
        ),
        "trace": Verb(
            "Show which parts of a text occur verbatim in a datastore",
            "verbs.trace", "trace_text", "TraceOptions", ("DATASTORE", "TEXT"),
        ),
        "delete": Verb(
            "Remove documents from search, training and evaluation",
            "verbs.datastore", "delete", "DeleteOptions", ("DATASTORE",),
        ),
    },
    "Model": {
        "plan train": Verb(
            "Estimate memory and time of a training run",
            "planning.training", "plan_train", "PlanTrainOptions", ("[CONFIG]",),
        ),
        "train": Verb(
            "Train a model, or continue a run",
            "verbs.model", "train", "Config", ("CONFIG",), resumes=True,
        ),
        "finetune": Verb(
            "Fine-tune on instructions, conversations or questions",
            "verbs.model", "finetune", "Config", ("CONFIG",), resumes=True,
        ),
        "add-retrieval": Verb(
            "Add retrieval to a trained model in about a minute, without training",
            "verbs.model", "add_retrieval", "AddRetrievalOptions", ("CHECKPOINT|MODEL",),
        ),
        "report": Verb(
            "Plot the curves of one or more training runs",
            "verbs.model", "report", "ReportOptions", ("RUN…",),
        ),
        "generate": Verb(
            "Continue a prompt, or answer it",
            "verbs.generate", "generate", "GenerateOptions", ("CHECKPOINT",),
        ),
        "chat": Verb(
            "Ask questions; answers are from passages of a datastore",
            "verbs.chat", "chat", "ChatOptions", ("DATASTORE",),
        ),
        "serve": Verb(
            "Serve search and a model over HTTP, with a web page",
            "verbs.serve", "serve", "ServeOptions", ("DATASTORE",),
        ),
        "mcp": Verb(
            "Let assistants search a datastore, over the Model Context Protocol (MCP)",
            "verbs.mcp", "mcp", "McpOptions", ("DATASTORE",),
        ),
    },
    "Evaluation": {
        "eval perplexity": Verb(
            "Measure bits per byte and perplexity of held-out documents, retrieval OFF and ON",
            "verbs.evaluation", "evaluate", "EvalOptions", ("CHECKPOINT|MODEL",),
        ),
        "eval qa": Verb(
            "Measure exact match and F1 of answers to questions",
            "verbs.evaluation", "evaluate_qa", "EvalQaOptions", ("CHECKPOINT", "QUESTIONS"), resumes=True,
        ),
        "eval retrieval": Verb(
            "Measure hit@k, recall@k and MRR of searches",
            "verbs.evaluation", "evaluate_retrieval", "EvalRetrievalOptions", ("DATASTORE", "QUESTIONS"),
        ),
        "eval harness": Verb(
            "Run tasks of EleutherAI's lm-evaluation-harness",
            "verbs.evaluation", "evaluate_harness", "EvalHarnessOptions", ("CHECKPOINT",),
        ),
    },
    "Files": {
        "inspect": Verb(
            "Print what a datastore or a checkpoint contains",
            "verbs.model", "inspect", "InspectOptions", ("DATASTORE|CHECKPOINT",),
        ),
        "verify": Verb(
            "Compare every file with its checksum",
            "verbs.model", "verify", "VerifyOptions", ("DATASTORE|CHECKPOINT",),
        ),
        "export": Verb(
            "Write a checkpoint as one file, or as a folder for Hugging Face transformers",
            "verbs.model", "export", "ExportOptions", ("CHECKPOINT",),
        ),
        "import": Verb(
            "Read a decoder in Hugging Face format or from a .gguf file, and write it as a checkpoint",
            "verbs.huggingface", "import_", "ImportOptions", ("MODEL",),
        ),
        "extend-vocabulary": Verb(
            "Add tokens learned from a corpus to a tokenizer and a model",
            "verbs.vocabulary", "extend_vocabulary", "ExtendVocabularyOptions", ("CHECKPOINT|TOKENIZER",),
        ),
    },
}  # fmt: skip
"""The verbs by subject, in the order of `retro --help`."""

VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}

_MADE_BY = {
    "DATASTORE": "`retro index CONFIG` builds a datastore.",
    "CHECKPOINT": "`retro train CONFIG` trains a model.",
    "RUN": "`retro train CONFIG` starts a run.",
}
_HELP_FLAGS = {"-h", "--help"}
_ENDLESS = {"serve", "mcp", "chat"}  # verbs that wait for requests, in silence
_HELP = """{version}

retro trains and serves language models that retrieve text from a datastore (RETRO).

usage: retro VERB ARGUMENTS [--options]        `retro VERB --help` lists the options of a verb.
       retro --version

{verbs}

CONFIG is a TOML file of settings. An option such as `--train.lr 1e-3` overrides the key `lr` of its section [train].
CORPUS is a file, folder, glob or URL of text.
CHECKPOINT is a run's folder (its newest checkpoint), RUN@best (lowest bits per byte on held-out documents), the folder of
one checkpoint, or an exported file. DATASTORE is a folder or a URL such as s3://bucket/name."""


def verb_list(groups: Mapping[str, Mapping[str, Verb]]) -> str:
    """Usage and summary of every verb, a line each, under the groups' names."""
    usages = {name: " ".join((name, *verb.positional)) for group in groups.values() for name, verb in group.items()}
    width = max(map(len, usages.values()))
    blocks = [
        "\n".join([title, *(f"  {usages[name].ljust(width)}  {verb.summary}" for name, verb in group.items())])
        for title, group in groups.items()
    ]
    return "\n\n".join(blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        the exit status: 0 = done, 1 = `retro verify` or `retro doctor` found an error, 2 = a user's mistake (printed as
            one
        message), 130 = interrupted, 143 = training saved a checkpoint and stopped on SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in (*_HELP_FLAGS, "help"):
        echo(_HELP.format(version=version_line(), verbs=verb_list(GROUPS)))
        return 0
    if arguments[0] == "--version":
        echo(version_line())
        return 0
    setup_logging()
    try:
        return run_verb(arguments)
    except (InputError, FloatingPointError) as error:
        echo(f"error: {error}", sys.stderr)
        return 2
    except ImportError as error:
        if (error.name or "").split(".")[0] in {"retro", "indexing", "pipelines"}:
            raise
        echo(f"error: a package does not import: {error}. `retro doctor` gives the command that helps.", sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        echo(f"error: {in_words(error)}", sys.stderr)  # a full disk, a folder without write permission, …
        return 2
    except Stopped as stopped:
        echo(stopped, sys.stderr)
        return stopped.exit_status
    except KeyboardInterrupt:
        verb = VERBS.get(find_verb(arguments)[0])
        echo("Stopped." + (" Run the same command again to resume." if verb and verb.resumes else ""), sys.stderr)
        return 130


def run_verb(arguments: Sequence[str]) -> int:
    """Find the verb, split off its positional arguments, load its settings and run it.

    Raises:
        InputError: an unknown verb, a missing argument, or invalid settings.
    """
    name, rest = find_verb(arguments)
    # Faiss and torch read these when they are loaded, and each has its own pool of threads. Threads that spin while they
    # wait take cores from the other pool and from other processes. If they sleep at once, training and generation take
    # half as long again, because their operations are short. So verbs that train or generate let threads spin for some
    # hundredths of a millisecond (docs/results/speed.md).
    if name in ("chat", "demo", "finetune", "generate", "serve", "train"):
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name not in VERBS:  # `retro eval --help`
        echo(verb_list({f"Verbs of retro {name}": words_after(name)}))
        return 0
    verb = VERBS[name]
    usage = " ".join((name, *verb.positional))
    given, options = split_positional(verb, rest)
    optional = verb.positional == ("[CONFIG]",)
    if len(given) < len(verb.positional) and not optional and not _HELP_FLAGS & set(rest):
        raise InputError(f"usage: retro {usage} [--options]; `retro {name} --help` lists the options.")
    from pipelines.cli.corpus_options import SETTINGS_SUFFIX, options_of_corpus
    from pipelines.cli.settings.load import load  # `retro --help` needs no pydantic

    run, settings = verb.load()
    kinds = verb.positional[0].strip("[]").split("|") if verb.positional else []
    if "CONFIG" in kinds:
        file = Path(given[0]) if given else None
        if file is not None and "CORPUS" in kinds and file.suffix != SETTINGS_SUFFIX:
            options, file = options_of_corpus(given[0], options), None
        loaded = load(settings, file, options, verb=usage)
        with _named_while_running(name):
            return run(loaded)
    words = list(takewhile(lambda word: not word.startswith("--"), options))
    if words and verb.positional[-1:] == ("TEXT",):
        text = " ".join([given[-1], *words])
        raise InputError(
            f"the text has several words: put it in quotes, `retro {name} {given[0]} {shlex.quote(text)}`."
        )
    loaded = load(settings, None, options, verb=usage)
    require_paths(verb, given)
    values: list[Any] = [given] if _takes_several(verb) else given
    with _named_while_running(name):
        return run(*values, loaded)


def _named_while_running(name: str) -> contextlib.AbstractContextManager[object]:
    """Context that logs what a verb does after ten silent seconds; only in the first process of torchrun or Slurm."""
    is_silent = name in _ENDLESS or int(os.environ.get("RANK", "0")) > 0
    return contextlib.nullcontext() if is_silent else running(name)


def require_paths(verb: Verb, given: Sequence[str]) -> None:
    """Check that the named files and folders exist, before anything heavy is imported.

    Raises:
        InputError: one does not exist.
    """
    names = verb.positional * len(given) if _takes_several(verb) else verb.positional
    for name, value in zip((name.rstrip("…") for name in names), given, strict=False):
        kinds = name.split("|")
        may_be_elsewhere = "TEXT" in kinds or ("MODEL" in kinds and "/" in value) or kinds == ["MODEL"]  # on a hub
        if not may_be_elsewhere and not url_of(value) and not Path(value.removesuffix("@best")).exists():
            hints = [f" {_MADE_BY[kind]}" for kind in kinds if kind in _MADE_BY]
            raise InputError(
                f"{value} does not exist; {name} must be a file or folder that exists, or a URL.{''.join(hints)}"
            )


def find_verb(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Split arguments into the verb, of one or two words, and the rest; `eval --help` has the verb `eval`.

    Raises:
        InputError: no verb has this name. The message lists the verbs.
    """
    first, *rest = arguments
    if first in VERBS:
        return first, rest
    seconds = list(words_after(first))
    if not seconds:
        close = difflib.get_close_matches(first, dict.fromkeys(name.split()[0] for name in VERBS), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown verb {first!r}.{hint} Verbs: {', '.join(VERBS)}.")
    if rest and rest[0] in seconds:
        return f"{first} {rest[0]}", rest[1:]
    if rest and rest[0] in _HELP_FLAGS:
        return first, rest
    second = f", found {rest[0]!r}" if rest else ""
    close = difflib.get_close_matches(rest[0], seconds, n=1) if rest else []
    hint = f" Did you mean `retro {first} {close[0]}`?" if close else ""
    raise InputError(
        f"`retro {first}` needs a second word{second}.{hint} Accepted: {', '.join(seconds)}; `retro {first} --help` explains them."
    )


def words_after(first: str) -> dict[str, Verb]:
    """The verbs of two words that begin with `first`, by their second word."""
    return {name.partition(" ")[2]: verb for name, verb in VERBS.items() if name.startswith(f"{first} ")}


def split_positional(verb: Verb, arguments: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Split arguments into the positional ones, which come first, and the options."""
    leading = list(takewhile(lambda argument: argument == "-" or not argument.startswith("-"), arguments))
    given = leading if _takes_several(verb) else leading[: len(verb.positional)]
    return given, arguments[len(given) :]


def _takes_several(verb: Verb) -> bool:
    return len(verb.positional) == 1 and verb.positional[0].endswith("…")


def version_line() -> str:
    """`retro 0.9.0 (commit 4a7be5a), Python 3.12.3, torch 2.13.0, faiss-cpu 1.14.1`, without importing anything
    heavy."""
    commit = commit_of_checkout()
    packages = [_named("torch"), next(filter(None, map(_named, ("faiss-gpu", "faiss-cpu", "faiss"))), "")]
    first = (_named("retro") or "retro") + (f" (commit {commit})" if commit else "")
    return ", ".join(filter(None, [first, f"Python {platform.python_version()}", *packages]))


def commit_of_checkout() -> str:
    """The commit, with `-dirty` if files were changed since; "" for an installed package."""
    if not (_CHECKOUT / ".git").exists():  # site-packages may be inside the checkout of another project
        return ""
    git = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _named(package: str) -> str:
    """A package with its version; "" if it is not installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
