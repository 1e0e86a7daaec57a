"""`retro demo`: from text to two trained models and their comparison, with all real stages.

Python's own documentation and sources (or --corpus) → datastore → baseline and RETRO of the same size, trained on the
same tokens → held-out bits-per-byte → neighbors, a generated paragraph, report.html
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from indexing.corpus.python_library import write_python_corpus
from indexing.store.artifact import remove
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes, write_json
from pipelines.commands.datastore import indented
from pipelines.commands.model import GenerateOptions, generate_texts
from pipelines.config import Config
from pipelines.launch.in_process import run_training
from pipelines.reports import html as report
from pipelines.results import Table
from pipelines.settings.load import load
from pipelines.settings.toml_file import to_toml
from pipelines.terminal import echo, one_line
from retro.evaluation.settings import EvaluationSettings
from retro.model.settings import AttentionSettings, EncoderSettings, RetrievalSettings

if TYPE_CHECKING:
    from retro.evaluation.bits_per_byte import SetResult

log = logging.getLogger("retro")


@dataclass(frozen=True)
class DemoOptions:
    """Build a datastore, train two small models and compare them, in minutes."""

    corpus: tuple[str, ...] = ()
    """Files, folders, globs or URLs of text; empty: Python's own documentation and sources."""
    minutes: float = 2.5
    """Minutes of training for both models together. The rest of the demo takes one or two minutes."""
    output: Path = Path("retro-demo")
    """Folder for all files of the demo."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise InputError(f"minutes = {self.minutes}: must be above 0.")


def demo(options: DemoOptions) -> int:
    """`retro demo`."""
    from indexing.retrieval.retriever import Retriever
    from pipelines.executors.factory import make_executor
    from pipelines.reports.datastore import plots_of, sample_examples, summary_table, write_index_report
    from pipelines.stages.table import build

    config = _config(options)
    echo(f"1. datastore: {config.datastore}")
    measured = write_index_report(build(config, make_executor(config.executor)))
    _print_datastore(measured)

    config = _with_steps(config, options)
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    echo(f"\n2. two models, {tokens:,} tokens each ({config.train.steps} steps)")
    outcomes = {name: run_training(run, name) for name, run in runs_of(config).items()}
    for name, outcome in outcomes.items():
        echo(f"   {name}: {outcome.parameters:,} parameters without embeddings")

    echo("\n3. held-out documents")
    table, verdict = _compare(config, outcomes, options.output / "results.json")
    echo("\n".join([indented(table.text), *(f"   {line}" for line in verdict)]))

    retriever = Retriever.open(config.datastore)
    examples = sample_examples(retriever, 3)
    echo("\n4. three held-out chunks and their neighbors")
    _print_examples(examples)

    prompt = _first_words(retriever)
    text = _continued(prompt, retriever, config, outcomes["retro"].checkpoint)
    echo(f"\n5. a paragraph with retrieval (prompt: {prompt!r})\n{indented(text)}")

    report.write_report(
        options.output / "report.html",
        title="RETRO demo",
        subtitle=f"{tokens:,} training tokens for each model",
        figures=[(row[0], row[1], f"{row[2]} against the baseline") for row in table.rows],
        sections=[
            report.Section("Does retrieval help?", text=" ".join(f"{line}." for line in verdict), table=table),
            report.Section("Training", plots=_training_plots(outcomes)),
            report.Section("Datastore", table=summary_table(measured), plots=plots_of(retriever, measured)),
            report.Section("Three held-out chunks and their neighbors", examples=examples),
            report.Section("A paragraph with retrieval", text=text),
        ],
    )
    _print_next(options.output, config.datastore, outcomes["retro"].checkpoint)
    return 0


def _compare(config: Config, outcomes: dict[str, Any], file: Path) -> tuple[Table, list[str]]:
    """Score both models on the held-out documents; writes the results to a file.

    Returns:
        a table, and the comparisons in words.
    """
    from pipelines.evaluation.bits_per_byte import in_words, measure_all
    from retro.checkpoints.checkpoint import load_model, open_checkpoint
    from retro.device import choose_placement
    from retro.evaluation.bits_per_byte import compare
    from retro.evaluation.sets import EvaluationSet

    placement = choose_placement(config.train.device, config.train.precision)
    held_out = EvaluationSet("valid", Datastore.open(config.datastore))
    results = {}
    for name, outcome in outcomes.items():
        model = load_model(open_checkpoint(outcome.checkpoint), placement.device)
        length = config.data.sequence_length
        results[name] = measure_all(model, held_out, config.evaluation, placement, sequence_length=length)
    baseline, off, *on = results["baseline"] + results["retro"]
    verdict = [
        f"RETRO ON (k={on[0].k}) against OFF, the same weights: {in_words(*compare(on[0], off))}",
        f"RETRO ON (k={on[0].k}) against the baseline: {in_words(*compare(on[0], baseline))}; "
        "one training run each, and another seed can move a small model by more than that",
    ]
    rows = {name: [result.as_json() for result in of_model] for name, of_model in results.items()}
    write_json(file, {"results": rows, "verdict": verdict})
    return _results_table(baseline, off, on), verdict


def _continued(prompt: str, retriever: Any, config: Config, checkpoint: Path) -> str:
    """The prompt and its continuation with retrieval."""
    from retro.inference.language_model import LanguageModel

    language_model = LanguageModel.open(checkpoint, retriever, config.train.device)
    (text,) = generate_texts(language_model, GenerateOptions(prompt=(prompt,), k=config.data.k, max_tokens=150))
    return prompt + text


def _print_next(folder: Path, datastore: Path, checkpoint: Path) -> None:
    """Print the files, and commands to try next."""
    echo(
        f'\nreport:     {folder / "report.html"}\ndatastore:  {datastore}   try: retro search {datastore} "open a file"'
    )
    echo(f"checkpoint: {checkpoint}")
    echo(f"page:       retro serve {datastore} --checkpoint {folder / 'retro'}")
    echo(f"settings:   {folder / 'demo.toml'}   change them and run: retro train {folder / 'demo.toml'} --run NEW")


# --- settings ------------------------------------------------------------------------------------------------------


def _config(options: DemoOptions) -> Config:
    """The demo's settings. An earlier demo in the same folder must have the same corpus and seed."""
    from indexing.corpus.readers import CorpusSettings
    from indexing.tokenization.tokenizer import TokenizerSettings
    from retro.data.settings import DataSettings
    from retro.model.settings import ModelSettings
    from retro.training.settings import TrainSettings

    out = options.output
    wanted = {"corpus": list(options.corpus), "seed": options.seed}
    stored = out / "demo.json"
    if stored.exists() and {key: read_json(stored).get(key) for key in wanted} != wanted:
        raise InputError(
            f"{out} contains a demo with another corpus or seed ({stored}). Name another folder: --output NEW."
        )
    out.mkdir(parents=True, exist_ok=True)
    paths = options.corpus or (str(write_python_corpus(out / "corpus")),)
    write_json(stored, (read_json(stored) if stored.exists() else {}) | wanted)
    return Config(
        datastore=out / "datastore",
        run=out / "retro",
        corpus=CorpusSettings(paths=paths),
        tokenizer=TokenizerSettings(vocab_size=4096, sample_bytes=8 * 2**20, seed=options.seed),
        data=DataSettings(sequence_length=512, k=2, seed=options.seed),
        model=ModelSettings(
            d_model=192,
            d_ffw=768,
            attention=AttentionSettings(num_heads=3, smeared_keys=True, smeared_tokens=3),
            num_layers=4,
            retrieval=RetrievalSettings(cca_layers=(2, 4)),
            encoder=EncoderSettings(d_model=96, d_ffw=384, num_heads=2, head_dim=48, num_layers=1),
            shared_embeddings=True,  # with these and smeared keys, copying starts earlier: docs/results/copying.md
            copying_init=True,
        ),
        train=TrainSettings(batch_size=4, lr=3e-3, warmup_steps=20, eval_every=0, log_every=5, seed=options.seed),
        evaluation=EvaluationSettings(k=(2,), max_tokens=60_000),
    )


def _with_steps(config: Config, options: DemoOptions) -> Config:
    """Set the number of steps that fit into the minutes, from a short trial of both models. It is stored, so that a rerun resumes."""
    stored = options.output / "demo.json"
    remembered = read_json(stored)
    if remembered.get("minutes") != options.minutes:
        for run in runs_of(config).values():
            if run.run.exists():
                remove(run.run)
        seconds = sum(_seconds_per_step(run) for run in runs_of(config).values())
        steps = max(20, int(60 * options.minutes / seconds))
        write_json(stored, remembered | {"minutes": options.minutes, "steps": steps})
    steps = read_json(stored)["steps"]
    train = replace(config.train, steps=steps, checkpoint_every=max(1, steps // 4), warmup_steps=max(1, steps // 20))
    config = replace(config, train=replace(train, eval_every=-(-steps // 5), eval_tokens=20_000))
    write_bytes(options.output / "demo.toml", to_toml(config).encode())
    return load(Config, options.output / "demo.toml", [], verb="train")


def _seconds_per_step(config: Config) -> float:
    """Median time of a few steps of a trial run."""
    from retro.training.trainer import train

    trial = replace(
        config.train, steps=6, warmup_steps=1, log_every=1, eval_every=0, monitor_every=0, eval_tokens=1, report_to=()
    )
    run = config.run.with_name(f".trial-{config.run.name}")
    logging.getLogger("retro").setLevel(logging.WARNING)
    outcome = train(run, replace(config, train=trial).run_settings)
    logging.getLogger("retro").setLevel(logging.INFO)
    remove(run)
    rates = [line["tokens_per_second"] for line in outcome.metrics if "tokens_per_second" in line]
    return trial.batch_size * config.data.sequence_length / float(np.median(rates[1:]))


def runs_of(config: Config) -> dict[str, Config]:
    """The baseline, a plain decoder with as many parameters, and the RETRO model."""
    from retro.model.presets import baseline_of

    baseline = replace(config, run=config.run.with_name("baseline"), model=baseline_of(config.model))
    return {"baseline": baseline, "retro": config}


# --- output --------------------------------------------------------------------------------------------------------


def _print_datastore(measured: dict[str, Any]) -> None:
    from pipelines.reports.datastore import recalls

    totals, held_out = measured["splits"]["train"], measured["splits"]["valid"]
    echo(
        f"   {totals['documents']:,} documents, {totals['chunks']:,} chunks, {totals['tokens']:,} tokens; "
        f"held out: {held_out['documents']:,} documents, {held_out['tokens']:,} tokens"
    )
    echo(
        f"   index {measured['index']['key']}, nprobe {measured['index']['nprobe']}; neighbors by {measured['search']}, against exact search: "
        + ", ".join(f"recall@{k} {value:.3f}" for k, value in recalls(measured))
        + f"; missing {100 * measured['neighbors']['train']['missing_share']:.2f}%"
    )


def _results_table(baseline: "SetResult", off: "SetResult", on: "list[SetResult]") -> Table:
    names = ["baseline (no retrieval)", "RETRO, retrieval OFF", *(f"RETRO, retrieval ON, k={r.k}" for r in on)]
    rows = [
        [
            name,
            f"{r.bits_per_byte:.4f}",
            f"{100 * (r.bits_per_byte / baseline.bits_per_byte - 1):+.2f}%",
            f"{r.perplexity:.2f}",
        ]
        for name, r in zip(names, [baseline, off, *on], strict=True)
    ]
    return Table(["held-out text", "bits per byte", "against baseline", "perplexity"], rows)


def _print_examples(examples: list[report.NeighborExample]) -> None:
    for example in examples:
        echo(f"   ─── chunk\n{indented(_shortened(example.chunk))}")
        for neighbor in example.neighbors:
            echo(f"   ─── neighbor from {one_line(neighbor.document)}, squared distance {neighbor.score:.3f}")
            echo(indented(_shortened(neighbor.text) + " ⋯ " + _shortened(neighbor.continuation)))
        echo()


def _shortened(text: str, limit: int = 220) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _first_words(retriever: Any) -> str:
    """The beginning of a held-out document, at most two chunks long, so that retrieval starts soon."""
    datastore = retriever.datastore
    split = datastore.valid if datastore.valid.num_chunks else datastore.train
    number = int(np.random.default_rng(5).integers(split.num_documents))
    first, stop = split.chunk_range(number)
    tokens = split.tokens.read(first, min(first + 1, stop)).ravel()[: int(split.lengths.read(first, first + 1)[0])]
    return retriever.tokenizer.decode(tokens[:60])


def _training_plots(outcomes: dict[str, Any]) -> list[str]:
    """Training loss and held-out bits per byte of both models."""
    losses, held_out = {}, {}
    for name, outcome in outcomes.items():
        lines = [line for line in outcome.metrics if "loss" in line]
        losses[name] = ([line["tokens"] for line in lines], [line["loss"] for line in lines])
        for mode in ("off", "on"):
            key = f"valid_bits_per_byte_{mode}"
            scored = [line for line in outcome.metrics if key in line]
            if scored:
                label = name if name == "baseline" else f"{name} {mode.upper()}"
                held_out[label] = ([line["tokens"] for line in scored], [line[key] for line in scored])
    return [
        report.line_plot(losses, "tokens", "nats per token", "Training loss"),
        report.line_plot(held_out, "tokens", "bits per byte", "Held-out bits per byte"),
    ]
