"""Part C of three on one NVIDIA GPU, in twelve minutes: does cross-attention bring something next to copying, at 135
million parameters?

    python -m benchmarks.speed.gpu_cross_attention CORPUS ... --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--minutes 12] [--tiny]

SmolLM2-135M is trained on equal tokens three times, all weights: with cross-attention in four layers that reads real
neighbors, with the same that reads random ones, and without. None learns a copy head. Then the gates of copying from
context, neighbors and the whole datastore are fitted to each, as `retro add-retrieval` does; the copied neighbors are
real in all rows. The verdict is the change of the model with real neighbors against that with random ones, both with
copying. OUTPUT has the figures, WORK the datastore and the runs. `--tiny` trains two steps with little text, of a small
model unless `--gguf` is given.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import budget, percent, placement
from benchmarks.deadline import Case, Figures, run_cases, selected
from benchmarks.quality.datastore_copying import ALL, chosen_windows, result_of, with_head
from benchmarks.speed.gpu_run import build_stages, config_of, part_parser, train_within
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.settings import TokenizerSettings
from pipelines.config import Config
from pipelines.terminal.logger import setup_logging
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.data.windows import ScoringWindow, window_batches
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.sets import EvaluationSet
from retro.model.presets import resolve
from retro.model.retro import Retro
from retro.model_settings import NO_COPY_HEAD, CopyHeadSettings, ModelSettings, RetrievalSettings, updated
from retro.training.fitted_copy_head import fit_copy_head, read_batches
from retro.training.settings import TrainSettings
from retro.training.trainer import train

MINUTES = 12.0
K = 2
LAYERS = (8, 15, 22, 29)
KINDS = ("real", "random", "without")
"""What a model is trained with: real neighbors, random ones, none."""


def base_of(gguf: Path | None, config: Config, base: Path) -> Iterator[Figures]:
    """Import the model; without a file, train a small one for two steps."""
    setup_logging()
    if gguf is None:
        plain = updated(resolve(ModelSettings(preset="tiny", copy_head=NO_COPY_HEAD)), {"retrieval.cca_layers": ()})
        run = replace(config, run=base.with_suffix(""), model=plain, train=replace(config.train, steps=2))
        yield {"base": str(train(run.run, run.run_settings).checkpoint)}
        return
    from pipelines.cli.main import main as retro

    if status := retro(["import", str(gguf), "--output", str(base), "--overwrite"]):
        raise InputError(f"retro import ended with status {status}.")
    yield {"base": f"{base.stat().st_size / 1e6:.0f} MB"}


def run_of(kind: str, config: Config, base: Path, layers: tuple[int, ...]) -> Config:
    """Settings of one of the three runs."""
    reads = () if kind == "without" else layers
    model = ModelSettings(
        preset="base", retrieval=RetrievalSettings(cca_layers=reads), shared_embeddings=True, copy_head=NO_COPY_HEAD
    )
    data = replace(config.data, neighbor_source="random" if kind == "random" else "nearest", k=K if reads else 0)
    return replace(config, run=config.run.with_name(kind), model=model, data=data)


# --- scores ----------------------------------------------------------------------------------------------------------


def scores(config: Config, runs: dict[str, Path], tokens: int, fitted_tokens: int) -> Iterator[Figures]:
    """Bits per byte of each model with what it reads, without and with copying; then the verdict."""
    place, datastore = placement(), Datastore.open(config.datastore)
    held_out, length = EvaluationSet("valid", datastore), config.data.sequence_length
    windows = chosen_windows(held_out.split, tokens, length, length // 2)
    found: dict[str, SetResult] = {}
    for kind, run in runs.items():
        model = load_model(open_checkpoint(run), place.device)
        for read in ("OFF", kind) if kind in ("real", "random") else ("OFF",):
            for row, result in scored(model, read, held_out, windows, config.data, place, fitted_tokens).items():
                name = f"{kind}, {read}, {row}" if read == "OFF" else f"{kind}, {row}"
                found[name] = result
                without = found.get(f"without, OFF, {row}")
                yield {
                    name: f"{result.bits_per_byte:.4f}" + (f"  {percent(compare(result, without))}" if without else "")
                }
    one = next(iter(found.values()))
    yield {"scored": f"{one.tokens:,} tokens, {one.documents} documents"}
    for row in ("alone", "copying"):
        real, random = found[f"real, {row}"], found[f"random, {row}"]
        yield {f"real against random, {row}": percent(compare(real, random))}


def scored(
    model: Retro,
    read: str,
    held_out: EvaluationSet,
    windows: Sequence[ScoringWindow],
    data: DataSettings,
    place: Placement,
    fitted_tokens: int,
) -> dict[str, SetResult]:
    """Results of windows without copying (`alone`) and with it, for a model that reads real or random neighbors, or
    none (OFF)."""
    source: Any = "random" if read == "random" else "nearest"
    with_head(model, ())
    texts = list(pairs(held_out, windows, source, place))
    data = replace(data, datastores=(held_out.datastore.folder,), k=K)
    training = [
        TrainingData(data.datastores, replace(data, neighbor_source=one), retrieval=True, votes=True)
        for one in ("nearest", source)
    ]
    count = -(-fitted_tokens // data.sequence_length)
    fitting = list(zip(*(read_batches(one, count, place) for one in training), strict=True))

    def hidden(batches: list[Any]) -> list[torch.Tensor]:
        with torch.no_grad(), place.autocast():
            return [model.hidden(other.off() if read == "OFF" else other)[0] for _, other, *_ in batches]

    states, fitted_states = hidden(texts), hidden(fitting)
    results = {"alone": measured(model, texts, states, held_out, place)}
    with_head(model, ALL)
    assert model.copy_head is not None
    model.copy_head.to(place.device)
    fit_copy_head(model, [real for real, _ in fitting], place, ALL, fitted_states)
    return results | {"copying": measured(model, texts, states, held_out, place)}


def pairs(
    held_out: EvaluationSet, windows: Sequence[ScoringWindow], source: Any, place: Placement
) -> Iterator[tuple[Inputs, Inputs, list[ScoringWindow]]]:
    """Batches of windows with their real neighbors and votes, the same with those that the model reads, and the
    windows."""
    retrieval = RetrievalSet.of(held_out.datastore)
    uses = [NeighborUse(K, one, votes=True) for one in ("nearest", source)]
    for (own, real), (_, read) in zip(
        *(window_batches(held_out.split, retrieval, windows, 4, use) for use in uses), strict=True
    ):
        yield place.put(as_tensors(real)), place.put(as_tensors(read)), own


def measured(
    model: Retro,
    texts: Sequence[tuple[Inputs, Inputs, list[ScoringWindow]]],
    states: Sequence[torch.Tensor],
    held_out: EvaluationSet,
    place: Placement,
) -> SetResult:
    """Nats of the scored tokens by document, from hidden states. Copying reads the real neighbors."""
    sizes, nats, documents, of_labels = held_out.token_bytes, list[Any](), list[Any](), list[Any]()
    for (real, _, own), hidden in zip(texts, states, strict=True):
        with torch.no_grad(), place.autocast():
            losses = model.token_losses(real, hidden).double().cpu().numpy()
        labels = real.labels.cpu().numpy()
        counted = labels != IGNORED_LABEL
        nats.append(losses[counted])
        of_labels.append(sizes[labels[counted]])
        documents.append(np.repeat([window.text for window in own], counted.sum(1)))
    return result_of(*map(np.concatenate, (nats, documents, of_labels)))


# --- the part --------------------------------------------------------------------------------------------------------


def cases_of(paths: Sequence[Path], gguf: Path | None, work: Path, tiny: bool) -> dict[str, Case]:
    """All cases in order."""
    small, base = gguf is None, work / "base.safetensors"
    config = replace(config_of(work, tiny), model=ModelSettings(copy_head=CopyHeadSettings(datastore=True)))
    if not small:
        config = replace(config, tokenizer=TokenizerSettings("huggingface", str(base.with_suffix(""))))
    trained = TrainSettings(
        batch_size=2 if tiny else 32,
        lr=3e-4,
        warmup_steps=50,
        init_from=str(base.with_suffix("") if small else base),
        compile="no" if tiny else "auto",
        eval_every=0,
        eval_tokens=1_000 if tiny else 10_000,
        monitor_every=0,
    )
    data = replace(config.data, sequence_length=64 if tiny else 1024, retrieval_dropout=0.0)
    runs = {
        kind: run_of(kind, replace(config, train=trained, data=data), base, (1, 2) if small else LAYERS)
        for kind in KINDS
    }
    train_one = partial(train_within, steps_file=work / "steps.txt", seconds=205.0, most_steps=920, tiny=tiny)
    of_base = Case(partial(base_of, gguf, replace(config, data=data), base), 90)
    build = Case(partial(build_stages, config, paths, tiny), 150)
    # A small base needs the tokenizer of the datastore, and the datastore of a model its tokenizer.
    cases = {"datastore": build, "base": of_base} if small else {"base": of_base, "datastore": build}
    for kind, run in runs.items():
        cases[f"train, {kind}"] = Case(partial(train_one, run), 230)
    sizes = (2_000, 640) if tiny else (40_000, 20_480)
    folders = {
        kind: runs[kind].run for kind in reversed(KINDS)
    }  # the model without neighbors first: others are compared with it
    cases["scores"] = Case(partial(scores, replace(config, data=data), folders, *sizes), 110)
    return cases


def main() -> int:
    """Print the figures and write them. Return 1 if a case failed."""
    parser = part_parser(__doc__, MINUTES, "gpu-cross-attention")
    parser.add_argument("--gguf", type=Path, help="the model")
    options = parser.parse_args()
    if options.gguf is None and not options.tiny:
        parser.error("--gguf names the file of SmolLM2-135M.")
    for folder in (options.output, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [path.resolve() for path in options.corpora]
    cases = cases_of(paths, options.gguf, options.work, options.tiny)
    return run_cases(
        selected(cases, options.cases),
        options.output / "gpu-cross-attention.json",
        budget(options),
        {"tiny": options.tiny},
    )


if __name__ == "__main__":
    sys.exit(main())
