"""`retro demo`: from text to trained models and what retrieval brings, with all real stages.

Python's own documentation and sources (or --corpus) → datastore → two baselines and a RETRO of the same size, trained
on the same tokens → held-out bits per byte → a sentence, a chart, a passage colored by token gain; report.html,
bits_per_byte.svg

One deadline holds for all of it. The models are trained on the same tokens until a time:

    trial ─► steps for half of the time left, again while that is most of it ─► steps for the rest, the learning rate falls

The number of steps of each round follows from the speed of the round before. All models finish a round before the next
one begins, so a slower machine means fewer steps, the same for all models. The round is stored, so that a stopped demo
resumes. Held-out tokens are as many as fit.
"""

import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from indexing.progress import Advance, during
from indexing.store.artifact import remove
from indexing.store.datastore import Datastore
from indexing.store.files import read_json, write_bytes, write_json
from pipelines.cli.reports.html import Section
from pipelines.cli.reports.pictures import Picture, Plot, PlotLine, line_plots
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml
from pipelines.cli.verbs.comparison import Comparison, difference, passages_by_gain
from pipelines.cli.verbs.demo import DemoOptions, K, build_datastore, claim_folder, corpus_of, identity
from pipelines.config import Config
from pipelines.launch.in_process import run_training, train_quietly
from pipelines.terminal.output import echo
from pipelines.terminal.progress import progress
from pipelines.terminal.units import counted
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.settings import EvaluationSettings
from retro.model_settings import AttentionSettings, CopyHeadSettings, EncoderSettings, RetrievalSettings, updated

if TYPE_CHECKING:
    from retro.evaluation.bits_per_byte import SetResult
    from retro.evaluation.evaluator import Evaluator
    from retro.evaluation.sets import EvaluationSet
    from retro.training.trainer import Outcome

_EVALUATION = 0.2
"""Part of the minutes that training leaves for the evaluation."""
_LEAST_TOKENS = 4_000
_OFF, _NEAR, _ON = "RETRO, retrieval OFF", "RETRO, neighbors", "RETRO, retrieval ON"
NAMES = {"plain": "plain baseline", "baseline": "copying baseline", "retro": "RETRO"}
_TRIAL_STEPS = 3
_LEAST_STEPS = 2
_GROWTH = 5
"""A round has at most this many times the steps before it: the speed of a few steps says little about that of many."""
_FILLED = 0.8
"""Part of the time left that the last round takes. The rest is for evaluations, checkpoints and a machine that becomes
slower."""


def demo(options: DemoOptions) -> int:
    """`retro demo`."""
    deadline = time.monotonic() + 60 * options.minutes
    config = _config(options)
    datastore = build_datastore(config)

    echo("\n2. three models")
    trained = train_models(config, options.output, deadline - _EVALUATION * 60 * options.minutes)
    echo(f"   each read {trained.tokens:,} tokens in {trained.config.train.steps} steps")
    for name, outcome in trained.outcomes.items():
        echo(f"   {NAMES[name]}: {outcome.parameters:,} parameters without embeddings")

    comparison = _compare(trained, options.output, deadline)
    comparison.print()
    comparison.write(
        options.output, f"{trained.tokens:,} training tokens for each model", _sections(trained, datastore)
    )
    _print_next(options, config.datastore, trained.outcomes["retro"].checkpoint)
    return 0


# --- settings ------------------------------------------------------------------------------------------------------


def _config(options: DemoOptions) -> Config:
    """The demo's settings. With other minutes than those of an earlier demo in the folder, its models are trained
    again."""
    from indexing.corpus.chunks import ChunkSettings
    from indexing.corpus.documents import CorpusSettings
    from indexing.neighbors.settings import NeighborSettings
    from indexing.tokenization.settings import TokenizerSettings
    from retro.data.settings import DataSettings
    from retro.model_settings import ModelSettings
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
            optimizer="muon",  # docs/results/recipe.md
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
        write_json(out / "demo.json", identity(options) | {"minutes": options.minutes})
    return config


# --- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A part of the training.

    Attributes:
        steps: that each model has done at its end.
        falls_from: step from which the learning rate falls; 0 = it is constant, and another round follows.
    """

    steps: int = _TRIAL_STEPS
    falls_from: int = 0


@dataclass(frozen=True)
class Trained:
    """The trained models by name.

    Attributes:
        config: settings of the RETRO.
        outcomes: of `plain`, `baseline` and `retro`.
        tokens: that each of them was trained on.
    """

    config: Config
    outcomes: "dict[str, Outcome]"
    tokens: int


def runs_of(config: Config) -> dict[str, Config]:
    """A plain decoder, one that copies from its own context, and the RETRO: the same number of parameters."""
    from retro.model.presets import baseline_of

    baseline = baseline_of(config.model)
    models = {"plain": updated(baseline, {"copy_head.context": False}), "baseline": baseline, "retro": config.model}
    return {name: replace(config, run=config.run.with_name(name), model=model) for name, model in models.items()}


def train_models(config: Config, folder: Path, until: float) -> Trained:
    """Train all models, or resume.

    Args:
        config: settings of the RETRO.
        folder: of the demo; `demo.json` there stores the round, `demo.toml` the final settings.
        until: end of the training, in seconds of `time.monotonic`.
    """
    stored, begun = folder / "demo.json", time.monotonic()
    now = Round(**read_json(stored).get("round", {}))
    while True:
        write_json(stored, read_json(stored) | {"round": asdict(now)})
        planned = _with_steps(config, now)
        echo(f"   training to step {now.steps}" + (", the learning rate falls" if now.falls_from else ""))
        outcomes = {name: run_training(run, f"train {name}", train_silently) for name, run in runs_of(planned).items()}
        if now.falls_from:
            break
        left = max(0.0, until - time.monotonic())
        fitting = left / sum(map(_seconds_per_step, outcomes.values()))
        if left > max(0.0, until - begun) / 2:
            now = Round(now.steps + max(_LEAST_STEPS, int(min(fitting / 2, _GROWTH * now.steps))))
        else:
            now = Round(now.steps + max(_LEAST_STEPS, int(fitting * _FILLED)), falls_from=now.steps)
    write_bytes(folder / "demo.toml", to_toml(planned).encode())
    tokens = planned.train.steps * planned.train.batch_size * planned.data.sequence_length
    return Trained(load(Config, folder / "demo.toml", [], verb="train"), outcomes, tokens)


def train_silently(config: Config, advance: Advance = lambda _: None) -> "Outcome":
    """Train without the messages of a run except warnings: every round resumes it."""
    log = logging.getLogger("retro")

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno != logging.INFO

    log.addFilter(is_wanted)
    try:
        return train_quietly(config, advance)
    finally:
        log.removeFilter(is_wanted)


def _with_steps(config: Config, now: Round) -> Config:
    """Settings to train to the end of a round."""
    train = replace(config.train, steps=now.steps, checkpoint_every=20, lr_schedule="constant")
    if now.falls_from:
        falling = (now.steps - now.falls_from) / (now.steps - train.warmup)
        train = replace(train, lr_schedule="wsd", decay_ratio=falling)
    return replace(config, train=train)


def _seconds_per_step(outcome: "Outcome") -> float:
    """Time of a step, as logged last."""
    lines = [line for line in outcome.metrics if "tokens_per_second" in line][-3:]
    tokens = lines[-1]["tokens"] / lines[-1]["step"]
    return tokens / float(np.median([line["tokens_per_second"] for line in lines]))


# --- measurement ---------------------------------------------------------------------------------------------------


def _compare(trained: Trained, folder: Path, deadline: float) -> Comparison:
    """Score all models on held-out documents until the deadline; writes `results.json`."""
    from retro.checkpoints.checkpoint import load_model, open_checkpoint
    from retro.device import choose_placement
    from retro.evaluation.evaluator import Evaluator, uses_of
    from retro.evaluation.sets import EvaluationSet

    config = trained.config
    placement = choose_placement(config.train.device, config.train.precision)
    held_out = EvaluationSet("valid", Datastore.open(config.datastore))
    settings = config.evaluation.in_windows_of(config.data.sequence_length)

    def open_evaluator(name: str) -> Evaluator:
        model = load_model(open_checkpoint(trained.outcomes[name].checkpoint), placement.device)
        return Evaluator(model, placement, settings, NAMES[name])

    evaluators = {name: open_evaluator(name) for name in trained.outcomes}
    with during("a trial of the evaluation"):
        tokens = tokens_until(deadline, list(evaluators.values()), held_out, folder / "demo.json")
    echo(
        f"   measured next: {tokens:,} of {held_out.tokens:,} held-out tokens, by each model in all its ways to read\n"
    )
    limited = replace(settings, max_tokens=tokens)
    results = {
        name: replace(one, settings=limited, progress=progress).score_each(
            held_out, uses_of(one.model.settings, config.data.neighbor_use, (K,))
        )
        for name, one in evaluators.items()
    }
    comparison = compared(results["plain"][0], results["baseline"][0], results["retro"])
    rows = {NAMES[name]: [result.as_json() for result in of_model] for name, of_model in results.items()}
    write_json(folder / "results.json", {"results": rows, "verdict": comparison.verdict})
    off, on = comparison.results[_OFF], comparison.results[_ON]
    return replace(comparison, passages=passages_by_gain(evaluators["retro"], off, on, held_out))


def compared(plain: "SetResult", copying: "SetResult", retro: "list[SetResult]") -> Comparison:
    """The two baselines, and the RETRO without retrieval, with neighbors only, and with neighbors and the whole
    datastore."""
    from retro.evaluation.bits_per_byte import compare, mode_of

    modes = {result.mode: result for result in retro}
    off, near, on = (modes[mode_of(*read)] for read in ((0, False), (K, False), (K, True)))
    rows = {NAMES["plain"]: plain, NAMES["baseline"]: copying, _OFF: off, _NEAR: near, _ON: on}
    changes = {name: compare(on, row) for name, row in rows.items() if row is not on}
    gained = changes[NAMES["baseline"]]
    verdict = difference("RETRO", "a baseline that copies from its own context", gained, on.documents)
    return Comparison(rows, "retrieval ON against it", changes, verdict, _words(on), {})


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


def tokens_until(deadline: float, evaluators: "list[Evaluator]", held_out: "EvaluationSet", stored: Path) -> int:
    """The number of held-out tokens that all models can score until the deadline, from a trial. It is stored for a
    rerun."""
    from retro.evaluation.evaluator import uses_of

    demo = read_json(stored)
    if "held_out_tokens" not in demo:
        started, scored = time.monotonic(), 1
        for evaluator in evaluators:
            trial = replace(evaluator, settings=replace(evaluator.settings, max_tokens=evaluator.settings.window))
            scored = trial.score_each(held_out, uses_of(evaluator.model.settings, NeighborUse(0), (K,)))[0].tokens
        per_token = (time.monotonic() - started) / scored
        fitting = int(0.8 * (deadline - time.monotonic()) / per_token)
        demo |= {"held_out_tokens": min(held_out.tokens, max(_LEAST_TOKENS, fitting))}
        write_json(stored, demo)
    return int(demo["held_out_tokens"])


# --- output --------------------------------------------------------------------------------------------------------


def _sections(trained: Trained, datastore: dict[str, Any]) -> list[Section]:
    """Parts of the report: training and datastore."""
    from indexing.retrieval.retriever import Retriever
    from pipelines.cli.reports.datastore import plots_of, summary_table

    plots = plots_of(Retriever.open(trained.config.datastore), datastore)
    return [
        Section("Training", plots=[_training_plot(trained.outcomes)]),
        Section("Datastore", table=summary_table(datastore), plots=plots),
    ]


def _training_plot(outcomes: "dict[str, Outcome]") -> Picture:
    """Training loss of all models, on the same batches."""
    losses, colors = {}, {"retro": 0, "baseline": 1, "plain": 1}
    for name, outcome in outcomes.items():
        lines = [line for line in outcome.metrics if "loss" in line]
        tokens, values = ([line[key] for line in lines] for key in ("tokens", "loss"))
        losses[NAMES[name]] = PlotLine(tokens, values, colors[name], dashed=name == "plain")
    return line_plots(Plot(losses, "tokens", "nats per token", "Training loss"))


def _print_next(options: DemoOptions, datastore: Path, checkpoint: Path) -> None:
    """Print the files, and commands to try next."""
    folder, words = options.output, "some words" if options.corpus else "open a file"
    echo(f'\nreport:     {folder / "report.html"}\ndatastore:  {datastore}   try: retro search {datastore} "{words}"')
    echo(f"checkpoint: {checkpoint}")
    echo(f"page:       retro serve {datastore} --checkpoint {folder / 'retro'}")
    echo(f"settings:   {folder / 'demo.toml'}   change them and run: retro train {folder / 'demo.toml'} --run NEW")
