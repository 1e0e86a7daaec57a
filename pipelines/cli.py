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
    retro verify DATASTORE            every checksum and cross-reference
    retro export CHECKPOINT --to FILE weights and settings in one safetensors file, or a folder for transformers
    retro import FOLDER --to FILE     a folder in Hugging Face's format as a CHECKPOINT
    retro extend-vocabulary CHECKPOINT|TOKENIZER --to FOLDER      pieces of a corpus, and rows for them
    retro delete DATASTORE --ids ID … documents that no result shall name any more
    retro doctor                      versions, devices, conflicts

CHECKPOINT is a checkpoint's folder, a RUN (its newest), RUN@best (lowest held-out bits per byte), or an exported file.

Settings come from the TOML file named first and from options (`--train.lr 1e-3`), which win.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from pipelines.doctor import DoctorOptions, doctor
from pipelines.progress import setup_logging
from pipelines.settings import load
from retro.stop import Stopped

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Verb:
    """A row of the table.

    Attributes:
        run: called with the positional arguments and the settings; returns the exit status.
        settings: the type of its settings.
        positional: names of the positional arguments. `CONFIG` is a TOML file and goes into the settings; `[CONFIG]` may be
            left out. One that ends in `…`, alone, stands for one or more, handed on as a list.
    """

    run: Callable[..., int]
    settings: type[Any]
    positional: tuple[str, ...] = ()


DOCTOR = Verb(doctor, DoctorOptions)


def table() -> dict[str, Verb]:
    """Every verb. What they import is imported here: `retro doctor` must run where torch or numpy does not."""
    from pipelines import datastore_verbs, evaluation_verbs, huggingface_verbs, model_verbs, question_verbs
    from pipelines.config import Config
    from pipelines.demo import DemoOptions, demo
    from pipelines.plan_train import PlanTrainOptions, plan_train
    from pipelines.serve_verb import ServeOptions, serve
    from pipelines.vocabulary_verb import ExtendVocabularyOptions, extend_vocabulary

    return {
        "demo": Verb(demo, DemoOptions),
        "plan": Verb(datastore_verbs.plan, datastore_verbs.PlanOptions, ("[CONFIG]",)),
        "plan train": Verb(plan_train, PlanTrainOptions, ("[CONFIG]",)),
        "index": Verb(datastore_verbs.index, datastore_verbs.IndexOptions, ("CONFIG",)),
        "train": Verb(model_verbs.train, Config, ("CONFIG",)),
        "finetune": Verb(model_verbs.finetune, Config, ("CONFIG",)),
        "eval": Verb(evaluation_verbs.evaluate, evaluation_verbs.EvalOptions, ("CHECKPOINT",)),
        "eval-qa": Verb(evaluation_verbs.evaluate_qa, evaluation_verbs.EvalQaOptions, ("CHECKPOINT", "QUESTIONS")),
        "eval-retrieval": Verb(
            question_verbs.evaluate_retrieval, question_verbs.EvalRetrievalOptions, ("DATASTORE", "QUESTIONS")
        ),
        "lm-eval": Verb(evaluation_verbs.lm_eval, evaluation_verbs.LmEvalOptions, ("CHECKPOINT",)),
        "report": Verb(model_verbs.report, model_verbs.ReportOptions, ("RUN…",)),
        "generate": Verb(model_verbs.generate, model_verbs.GenerateOptions, ("CHECKPOINT",)),
        "search": Verb(datastore_verbs.search, datastore_verbs.SearchOptions, ("DATASTORE", "TEXT")),
        "serve": Verb(serve, ServeOptions, ("DATASTORE",)),
        "delete": Verb(datastore_verbs.delete, datastore_verbs.DeleteOptions, ("DATASTORE",)),
        "inspect": Verb(model_verbs.inspect, model_verbs.InspectOptions, ("DATASTORE|CHECKPOINT",)),
        "verify": Verb(datastore_verbs.verify, datastore_verbs.VerifyOptions, ("DATASTORE",)),
        "export": Verb(model_verbs.export, model_verbs.ExportOptions, ("CHECKPOINT",)),
        "import": Verb(huggingface_verbs.import_, huggingface_verbs.ImportOptions, ("FOLDER",)),
        "extend-vocabulary": Verb(extend_vocabulary, ExtendVocabularyOptions, ("CHECKPOINT|TOKENIZER",)),
        "doctor": DOCTOR,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status.

    0 = done, 1 = `retro verify` found something broken, 2 = a user's mistake (told in one message), 130 = interrupted, 143 = training saved and stopped on SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    setup_logging()
    try:
        return run_verb(arguments[0], arguments[1:])
    except (InputError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        print(f"error: {error}", file=sys.stderr)  # a full disk, a folder that may not be written, …
        return 2
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_status
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what is finished", file=sys.stderr)
        return 130


def run_verb(name: str, arguments: list[str]) -> int:
    """Split the positional arguments off, load the settings, run the verb.

    Raises:
        InputError: an unknown verb, a missing argument, or settings that are refused.
    """
    import difflib

    if name == "serve":
        # Read when they are loaded: the threads of Faiss and of torch, which have pools of their own, sleep while they wait. Else
        # they spin, and take the cores from each other (docs/serving.md).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    verbs = {"doctor": DOCTOR} if name == "doctor" else table()
    if name not in verbs:
        close = difflib.get_close_matches(name, verbs, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown verb {name!r}.{hint} Verbs: {', '.join(verbs)}.")
    if arguments and f"{name} {arguments[0]}" in verbs:  # a verb of two words; a file of that name is ./train
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    verb = verbs[name]
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
    if optional or verb.positional == ("CONFIG",):
        return verb.run(load(verb.settings, Path(given[0]) if given else None, rest, verb=usage))
    values: list[Any] = [given] if several else given
    return verb.run(*values, load(verb.settings, None, rest, verb=usage))


if __name__ == "__main__":
    sys.exit(main())
