"""`retro VERB …`: every verb is a row of one table, with its positional arguments, its settings and what it does.

    retro demo                        the whole thing, from no data to a measured answer
    retro plan [CONFIG] --tokens 2e12 bytes, hours, memory and cost of a datastore
    retro plan train [CONFIG]         memory by mode, and time of a training run
    retro index CONFIG                corpus → datastore          retro search DATASTORE "text"
    retro train CONFIG                datastore → checkpoint      retro inspect DATASTORE|CHECKPOINT
    retro finetune CONFIG             instructions, conversations, or questions with passages as neighbors
    retro eval CHECKPOINT             bits-per-byte, ON and OFF   retro generate CHECKPOINT
    retro eval-qa CHECKPOINT QUESTIONS exact match and F1         retro lm-eval CHECKPOINT --tasks TASK …
    retro eval-retrieval DATASTORE QUESTIONS                      hit@k, recall@k and MRR of searches
    retro report RUN [RUN2 …]         curves of training runs     retro serve DATASTORE  search and model over HTTP
    retro verify DATASTORE|CHECKPOINT every checksum, and the cross-references of a datastore
    retro export CHECKPOINT --to FILE weights and settings in one safetensors file, or a folder for transformers
    retro import FOLDER --to FILE     a folder in Hugging Face's format as a CHECKPOINT
    retro extend-vocabulary CHECKPOINT|TOKENIZER --to FOLDER      pieces of a corpus, and rows for them
    retro delete DATASTORE --ids ID … documents that no result shall name any more
    retro doctor                      versions, devices, conflicts

CHECKPOINT is a checkpoint's folder, a RUN (its newest), RUN@best (lowest held-out bits per byte), or an exported file.

Settings come from the TOML file named first and from options (`--train.lr 1e-3`), which win.
"""

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from pipelines.config_files import load
from pipelines.terminal import echo, setup_logging
from retro.training.signals import Stopped

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Verb:
    """A row of the table. Names in place of objects: a verb imports its own module only, and a mistyped one none.

    Attributes:
        module: of `pipelines`, which holds the next two.
        run: function called with the positional arguments and the settings; returns the exit status.
        settings: type of its settings.
        positional: names of the positional arguments. `CONFIG` is a TOML file and goes into the settings; `[CONFIG]` may be
            left out. One that ends in `…`, alone, stands for one or more, handed on as a list.
    """

    module: str
    run: str
    settings: str
    positional: tuple[str, ...] = ()

    def load(self) -> tuple[Callable[..., int], type[Any]]:
        """The function and the type of its settings."""
        module = importlib.import_module(f"pipelines.{self.module}")
        return getattr(module, self.run), getattr(module, self.settings)


VERBS = {
    "demo": Verb("commands.demo", "demo", "DemoOptions"),
    "plan": Verb("commands.datastore", "plan", "PlanOptions", ("[CONFIG]",)),
    "plan train": Verb("planning.training", "plan_train", "PlanTrainOptions", ("[CONFIG]",)),
    "index": Verb("commands.datastore", "index", "IndexOptions", ("CONFIG",)),
    "train": Verb("commands.model", "train", "Config", ("CONFIG",)),
    "finetune": Verb("commands.model", "finetune", "Config", ("CONFIG",)),
    "eval": Verb("commands.evaluation", "evaluate", "EvalOptions", ("CHECKPOINT",)),
    "eval-qa": Verb("commands.evaluation", "evaluate_qa", "EvalQaOptions", ("CHECKPOINT", "QUESTIONS")),
    "eval-retrieval": Verb(
        "commands.retrieval_evaluation", "evaluate_retrieval", "EvalRetrievalOptions", ("DATASTORE", "QUESTIONS")
    ),
    "lm-eval": Verb("commands.evaluation", "lm_eval", "LmEvalOptions", ("CHECKPOINT",)),
    "report": Verb("commands.model", "report", "ReportOptions", ("RUN…",)),
    "generate": Verb("commands.model", "generate", "GenerateOptions", ("CHECKPOINT",)),
    "search": Verb("commands.datastore", "search", "SearchOptions", ("DATASTORE", "TEXT")),
    "serve": Verb("commands.serve", "serve", "ServeOptions", ("DATASTORE",)),
    "delete": Verb("commands.datastore", "delete", "DeleteOptions", ("DATASTORE",)),
    "inspect": Verb("commands.model", "inspect", "InspectOptions", ("DATASTORE|CHECKPOINT",)),
    "verify": Verb("commands.model", "verify", "VerifyOptions", ("DATASTORE|CHECKPOINT",)),
    "export": Verb("commands.model", "export", "ExportOptions", ("CHECKPOINT",)),
    "import": Verb("commands.huggingface", "import_", "ImportOptions", ("FOLDER",)),
    "extend-vocabulary": Verb(
        "commands.vocabulary", "extend_vocabulary", "ExtendVocabularyOptions", ("CHECKPOINT|TOKENIZER",)
    ),
    "doctor": Verb("commands.doctor", "doctor", "DoctorOptions"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status.

    0 = done, 1 = `retro verify` found something broken, 2 = a user's mistake (told in one message), 130 = interrupted, 143 = training saved and stopped on SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(__doc__)
        return 0
    setup_logging()
    try:
        return run_verb(arguments[0], arguments[1:])
    except (InputError, FloatingPointError) as error:
        echo(f"error: {error}", sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        echo(f"error: {error}", sys.stderr)  # a full disk, a folder that may not be written, …
        return 2
    except Stopped as stopped:
        echo(stopped, sys.stderr)
        return stopped.exit_status
    except KeyboardInterrupt:
        echo("stopped; the same command goes on from what is finished", sys.stderr)
        return 130


def run_verb(name: str, arguments: list[str]) -> int:
    """Split the positional arguments off, load the settings, run the verb.

    Raises:
        InputError: an unknown verb, a missing argument, or settings that are refused.
    """
    if name == "serve":
        # Read when they are loaded: the threads of Faiss and of torch, which have pools of their own, sleep while they wait. Else
        # they spin, and take the cores from each other (docs/results/serving-speed.md).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown verb {name!r}.{hint} Verbs: {', '.join(VERBS)}.")
    if arguments and f"{name} {arguments[0]}" in VERBS:  # a verb of two words; a file of that name is ./train
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    verb = VERBS[name]
    wanted = len(verb.positional)
    several = wanted == 1 and verb.positional[0].endswith("…")
    leading = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    given = leading if several else leading[:wanted]
    optional = verb.positional == ("[CONFIG]",)
    if len(given) < wanted and not optional and not {"-h", "--help"} & set(arguments):
        raise InputError(
            f"usage: retro {name} {' '.join(verb.positional)} [--options]; `retro {name} --help` lists them."
        )
    rest = arguments[len(given) :]
    usage = " ".join((name, *verb.positional))
    run, settings = verb.load()
    if optional or verb.positional == ("CONFIG",):
        return run(load(settings, Path(given[0]) if given else None, rest, verb=usage))
    values: list[Any] = [given] if several else given
    return run(*values, load(settings, None, rest, verb=usage))


if __name__ == "__main__":
    sys.exit(main())
