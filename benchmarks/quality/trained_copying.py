"""What sources of the copy head, cross-attention and the options for copying bring to small models, alone and together.

    python -m benchmarks.quality.retrieval_gain build CORPUS... --output FOLDER --chunk-length 32 --embedders lexical --rerank tokens
    python -m benchmarks.quality.retrieval_gain train --output FOLDER --models context context-plain all all-plain \\
        --chunk-length 32 --k 4 --retrieval-dropout 0.5 --cca-layers 2 4 --narrow-encoder --seed 1 [--steps 400]
    python -m benchmarks.quality.trained_copying score --output FOLDER
    python -m benchmarks.quality.trained_copying summary --output FOLDER [FOLDER ...]

    context    a decoder as large as `all`, which copies from its own context
    all        a RETRO with cross-attention, which copies from its own context, neighbors and datastore
    all-reads  its decoder, which reads neighbors with its own self-attention, and copies as `all` does; without options for copying.
               With --k 1 a step takes 1.05 times the FLOPs of `all` with --k 4
    -plain     without `attention.smeared_keys`, `attention.smeared_tokens` and `copying_init`
    -smeared   without `copying_init`; context only
    -init      with `copying_init` alone; context only

`score` reads random windows of held-out documents with the finished models of all seeds. It scores every combination of sources,
without neighbors to read (OFF) and with them (ON), if the model reads any. Sources that a model was trained with keep their weights; the
others are fitted to training text, as `retro add-retrieval` does. `summary` compares them, all seeds together, with intervals over
documents. Models that have scores are not scored again.
"""

import argparse
import io
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Budget, add_minutes, budget, markdown, measured_on, percent, placement, say
from benchmarks.quality.datastore_copying import ALL, SOURCES, held_out_windows, result_of, with_head
from benchmarks.quality.retrieval_scores import finished_runs
from indexing.store.datastore import Datastore
from indexing.store.files import write_bytes
from pipelines.results import Table
from retro.checkpoints.checkpoint import Checkpoint, load_model
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.sets import EvaluationSet
from retro.model.copy_head import CopyHead
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro
from retro.training.fitted_copy_head import Fitted, MatchesOfTokens, VotesOfTokens, fit_sources, found_by, with_copying
from retro.training.fitted_retrieval import read_batches

COMBINATIONS: dict[str, tuple[str, ...]] = {"none": ()} | SOURCES
MODELS = ("context", "context-smeared", "context-init", "context-plain", "all", "all-plain", "all-reads")
READERS = ("OFF", "ON")
"""Without and with neighbors to read, by cross-attention or by the decoder. Copying is apart from it."""
Key = tuple[str, str, str]
"""Model, reader, sources."""
Scores = dict[Key, SetResult]
"""Bits per byte, all seeds together."""


# --- scores ----------------------------------------------------------------------------------------------------------


def score_runs(out: Path, options: Namespace, limit: Budget) -> None:
    """Score the finished runs of all seeds that have no scores yet, each in OUT/seed-N/copying-NAME.npz."""
    runs = {
        run.with_name(run.name.replace("run", "copying", 1) + ".npz"): one for run, one in finished_runs(out).items()
    }
    for file in limit.each([file for file in runs if not file.exists()], "model"):
        say(str(file))
        data = io.BytesIO()
        np.savez(data, **score(runs[file], options))
        write_bytes(file, data.getvalue())


class Tokens(NamedTuple):
    """n tokens of text.

    Attributes:
        hidden: reader → activations, float32 [n, D].
        vocabulary: reader → nats without copying, float32 [n].
        found: source → what it has for the tokens.
    """

    hidden: dict[str, Tensor]
    vocabulary: dict[str, Tensor]
    found: dict[str, MatchesOfTokens | VotesOfTokens]

    def of(self, reader: str, names: Sequence[str]) -> Fitted:
        """What a reader and some sources have for the tokens."""
        nats = self.vocabulary[reader]
        return Fitted(nats, torch.zeros_like(nats), self.hidden[reader], [self.found[name] for name in names])


def score(checkpoint: Checkpoint, options: Namespace) -> dict[str, np.ndarray]:
    """Nats of the scored tokens for every reader and combination: `READER/SOURCES` → [n], and their `documents` and `bytes`."""
    place, length = placement(), checkpoint.settings["data"]["sequence_length"]
    folder, k = Path(checkpoint.folders[0]), options.k or checkpoint.settings["data"]["k"]
    data = DataSettings(datastores=(folder,), sequence_length=length, k=k)
    training = TrainingData(data.datastores, data, retrieval=True, votes=True)
    model = load_model(checkpoint, place.device).eval()
    trained = model.copy_head
    with_head(model, ALL, trained)
    held_out, reading = EvaluationSet("valid", Datastore.open(folder)), Namespace(**vars(options) | {"k": k})
    with torch.no_grad(), place.autocast():
        windows = list(held_out_windows(model, held_out, reading, place, Budget(np.inf), length))
        scored = read_tokens(model, ((one.inputs, one.off, one.hidden) for one in windows))
        batches = read_batches(training, options.fitted_tokens // length, place)
        fitting = read_tokens(
            model, ((batch, model.hidden(batch.off())[0], model.hidden(batch)[0]) for batch in batches)
        )
    counted = [window.scored for window in windows]
    documents = [np.full(own.sum(), window.document) for window, own in zip(windows, counted, strict=True)]
    sizes = [window.bytes[own] for window, own in zip(windows, counted, strict=True)]
    rows = {"documents": np.concatenate(documents), "bytes": np.concatenate(sizes)}
    for reader in READERS if model.settings.activations_read else READERS[:1]:
        for name, names in COMBINATIONS.items():
            sources = fitted_sources(model, names, trained, fitting, reader)
            with torch.no_grad():
                rows[f"{reader}/{name}"] = (
                    with_copying(list(sources.values()), scored.of(reader, names))[0].double().numpy()
                )
            say(f"{reader}, {name}: {rows[f'{reader}/{name}'].mean():.4f} nats")
    return rows


def read_tokens(model: Retro, texts: Iterable[tuple[Inputs, Tensor, Tensor]]) -> Tokens:
    """Read the tokens with a label in batches of text, each with its activations [B, T, D] without and with neighbors."""
    hidden: dict[str, list[Tensor]] = {reader: [] for reader in READERS}
    nats: dict[str, list[Tensor]] = {reader: [] for reader in READERS}
    found: dict[str, list[list[Tensor]]] = {name: [] for name in ALL}
    assert model.copy_head is not None
    for inputs, *states in texts:
        counted = inputs.labels != IGNORED_LABEL
        for reader, own in zip(READERS, states, strict=True):
            hidden[reader].append(own[counted].float())
            nats[reader].append(token_losses(own, model.output_weight, inputs.labels)[counted])
        for name, source in zip(ALL, model.copy_head.sources(inputs), strict=True):
            found[name].append([values[counted] for values in found_by(source, inputs.labels)])
    joined: dict[str, MatchesOfTokens | VotesOfTokens] = {}
    for name, parts in found.items():
        kind = VotesOfTokens if name == "datastore" else MatchesOfTokens
        joined[name] = kind(*map(torch.cat, zip(*parts, strict=True)))
    of_readers = [{reader: torch.cat(parts) for reader, parts in each.items()} for each in (hidden, nats)]
    return Tokens(of_readers[0], of_readers[1], joined)


def fitted_sources(
    model: Retro, names: Sequence[str], trained: CopyHead | None, tokens: Tokens, reader: str
) -> dict[str, Any]:
    """Sources with their trained weights; those that were not trained are fitted to these tokens, next to the trained ones."""
    head = with_head(model, names, trained).copy_head
    sources = {name: getattr(head, name) for name in names}
    new = [name for name in names if getattr(trained, name, None) is None]
    if new:
        others = [name for name in names if name not in new]
        with torch.no_grad():
            nats, kept = with_copying([sources[name] for name in others], tokens.of(reader, others))
        fit_sources([sources[name] for name in new], tokens.of(reader, new)._replace(nats=nats, kept=kept))
    return sources


# --- summary ---------------------------------------------------------------------------------------------------------


def load(out: Path) -> tuple[Scores, int]:
    """The scores of a corpus, and the number of seeds."""
    scores, seeds = Scores(), 0
    for name in MODELS:
        files = sorted(out.glob(f"seed-*/copying-{name}.npz"))
        seeds = max(seeds, len(files))
        for data in map(np.load, files):
            for row in (row for row in data.files if "/" in row):
                key = (name, *row.split("/"))
                one = result_of(data[row], data["documents"], data["bytes"])
                scores[key] = pooled(scores[key], one) if key in scores else one
    return scores, seeds


def pooled(first: SetResult, second: SetResult) -> SetResult:
    """Two seeds together."""
    return replace(
        first,
        tokens=first.tokens + second.tokens,
        nats_by_document=first.nats_by_document + second.nats_by_document,
        bytes_by_document=first.bytes_by_document + second.bytes_by_document,
    )


def summarize(folders: Sequence[Path]) -> None:
    """Print the tables as Markdown: a column for each folder, empty where a model was not trained with the same seeds."""
    found = {folder.name: load(folder) for folder in folders}
    corpora = {name: scores for name, (scores, _) in found.items()}

    def table(title: str, rows: dict[str, Callable[[Scores], str]]) -> None:
        body = [[row, *(cell(scores) for scores in corpora.values())] for row, cell in rows.items()]
        say(f"\n{title}\n\n" + markdown(Table(["", *corpora], [row for row in body if any(row[1:])])))

    def bits(key: Key) -> Callable[[Scores], str]:
        return lambda scores: f"{scores[key].bits_per_byte:.4f}" if key in scores else ""

    def change(key: Key, base: Key) -> Callable[[Scores], str]:
        def cell(scores: Scores) -> str:
            one, other = scores.get(key), scores.get(base)
            return percent(compare(one, other)) if one and other and one.bytes == other.bytes else ""

        return cell

    own = ("context", "OFF", "own context")
    keys = [(m, r, s) for m in MODELS for r in READERS for s in COMBINATIONS]
    table("bits per byte", {", ".join(key): bits(key) for key in keys})
    table("against `context`, OFF, own context", {", ".join(key): change(key, own) for key in keys})
    crossed = [(m, s) for m in MODELS for s in COMBINATIONS]
    table("ON against OFF", {f"{m}, {s}": change((m, "ON", s), (m, "OFF", s)) for m, s in crossed})
    all_keys = [key for key in keys if key[0] == "all"]
    table("`all` against `context`, OFF", {", ".join(k): change(k, ("context", "OFF", k[2])) for k in all_keys})
    with_options = [key for key in keys if not key[0].endswith("-plain")]
    plain = {key: (f"{key[0].partition('-')[0]}-plain", *key[1:]) for key in with_options}
    table("against -plain", {", ".join(key): change(key, plain[key]) for key in with_options})
    for name, (scores, seeds) in found.items():
        first = next(iter(scores.values()))
        say(f"{name}: {first.tokens // seeds:,} held-out tokens, {first.documents} documents, {seeds} seeds")


def main() -> None:
    """Score the models of a folder, or print the tables of several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["score", "summary"])
    parser.add_argument("--output", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="held-out tokens of each corpus")
    parser.add_argument(
        "--fitted-tokens", type=int, default=20_480, help="tokens of training text that new gates are fitted to"
    )
    parser.add_argument("--k", type=int, default=0, help="neighbors of each chunk; default: as trained")
    add_minutes(parser)
    options = parser.parse_args()
    say(measured_on())
    if options.part == "summary":
        summarize(options.output)
        return
    limit = budget(options)
    for number, out in enumerate(options.output):
        score_runs(out, options, limit.share(len(options.output) - number))


if __name__ == "__main__":
    main()
