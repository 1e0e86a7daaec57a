"""What each source of the copy head brings to a trained model, alone and together: context, neighbors, the whole
datastore.

    retro import MODEL --output base.safetensors
    retro index CONFIG
    python -m benchmarks.quality.datastore_copying base.safetensors DATASTORE ... --output FOLDER [--tokens 20000]
    python -m benchmarks.quality.datastore_copying summary --output FOLDER

Every combination of sources is fitted to training text (`retro add-retrieval`), all its networks together, and scored
on the same windows, drawn uniformly from all windows of all held-out documents. The decoder reads each window once.
With `--reader decoder` it also reads the neighbors, in all rows but OFF. With `--texts FILE ...` a second table has
text of other kinds, OFF and with all three sources. One more row is infini-gram's interpolation (Liu et al. 2024, arXiv
2401.17377) of the same votes: one weight if all votes agree, and one if they do not.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, budget, markdown, model_parser, percent, placement, say, write
from benchmarks.quality.other_text import WINDOWS, add_texts, scored_texts, texts_table
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.order import LONGEST
from pipelines.cli.results import Table
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.copying.datastore import DatastoreVotes
from retro.copying.head import CopyHead
from retro.copying.sources import sources_of
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.data.windows import ScoringWindow, document_windows, window_batches
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.leakage import LongestMatches
from retro.evaluation.sets import EvaluationSet
from retro.inference.language_model import LanguageModel
from retro.inference.verbatim_runs import open_sorted_prefixes
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.training.fitted_copy_head import SPAN, fit_copy_head, read_batches

WINDOW = 1024
ALL = ("context", "neighbors", "datastore")
SOURCES: dict[str, tuple[str, ...]] = {
    "own context": ("context",),
    "neighbors": ("neighbors",),
    "datastore": ("datastore",),
    "neighbors, datastore": ("neighbors", "datastore"),
    "own context, neighbors": ("context", "neighbors"),
    "own context, datastore": ("context", "datastore"),
    "all three": ALL,
}
OFF, READS, INFINIGRAM = "OFF", "reads neighbors", "the longest length, infini-gram's interpolation"
NOT_FITTED = "all three, not fitted"
TOKEN_BANDS = (0, 2, 4, 8, 16, 32)
"""Lengths of the longest match in the datastore before a token at which a band begins."""
DOCUMENT_BANDS = (0, 16, 32, LONGEST)
"""The same for the longest match of a whole document."""


@dataclass(frozen=True)
class Window:
    """A batch of one window, its hidden states [1, T, D], those with retrieval OFF, and which labels are scored."""

    inputs: Inputs
    hidden: torch.Tensor
    off: torch.Tensor
    document: int
    bytes: np.ndarray  # [T] bytes of the labels
    matches: np.ndarray  # [T] tokens of the longest match before the label

    @property
    def scored(self) -> np.ndarray:
        return (self.inputs.labels[0] != IGNORED_LABEL).numpy()


def chosen_windows(split: Split, tokens: int, length: int, stride: int) -> list[ScoringWindow]:
    """Draw windows of all documents in a fixed random order, until they score this number of tokens."""
    m = split.chunk_length
    windows = list(document_windows(split, length // m, stride // m))
    order, chosen, total = np.random.default_rng(0).permutation(len(windows)), list[ScoringWindow](), 0
    for number in order.tolist():
        if total >= tokens:
            break
        window = windows[number]
        chosen.append(window)
        begins = window.scored == split.chunk_range(window.text)[0]  # nothing predicts the first token of a document
        total += int(split.lengths.gather(np.arange(window.scored, window.stop)).sum()) - begins
    return chosen


def held_out_windows(
    model: Retro,
    held_out: EvaluationSet,
    options: argparse.Namespace,
    place: Placement,
    limit: Budget,
    length: int,
) -> Iterator[Window]:
    """Read windows of held-out documents with `options.tokens` tokens."""
    split, retrieval, sizes = held_out.split, RetrievalSet.of(held_out.datastore), held_out.token_bytes
    for window in limit.each(chosen_windows(split, options.tokens, length, length // 2), "window"):
        ((_, batch),) = window_batches(split, retrieval, [window], 1, NeighborUse(options.k, votes=True))
        inputs = place.put(as_tensors(batch))
        with place.autocast():
            hidden, _ = model.hidden(inputs)
            off = model.hidden(inputs.off())[0] if model.settings.activations_read else hidden
        labels = batch.labels[0]
        of_labels = np.where(labels != IGNORED_LABEL, sizes[labels.clip(0)], 0)
        yield Window(inputs, hidden, off, window.text, of_labels, batch.votes[0, :, 0])


def with_head(model: Retro, names: Sequence[str], trained: CopyHead | None = None) -> Retro:
    """The model with these sources. They have the weights of a trained copy head as far as it has them, otherwise the
    initial ones; a context that it has not is added to the model."""
    sources = {f"copy_head.{name}": name in names for name in ALL}
    added = {"copy_head.context_added": "context" in names and getattr(trained, "context", None) is None}
    settings = updated(model.settings, sources | added)
    head = CopyHead(names, settings.chunk_length, sources_of(settings.copy_head))
    head.initialize()
    for name in names:
        if (own := getattr(trained, name, None)) is not None:
            getattr(head, name).load_state_dict(own.state_dict())
    model.settings, model.copy_head = settings, head if names else None
    return model


def mixture_weight(own: np.ndarray, copied: np.ndarray) -> float:
    """The weight of what is copied that minimizes the loss, by expectation maximization.

    Arguments are probabilities of the right tokens, [n]: the model's and those of what is copied. Without tokens it
    is 0.
    """
    weight = 0.2
    for _ in range(100 if len(own) else 0):
        weight = float((weight * copied / ((1 - weight) * own + weight * copied).clip(1e-30)).mean())
    return weight if len(own) else 0.0


def infini_gram(fitted: Sequence[tuple[np.ndarray, ...]], scored: tuple[np.ndarray, ...]) -> np.ndarray:
    """Nats [n] of the interpolation with two weights, fitted to other tokens.

    Each argument has the model's probability of the label, that of the votes, whether they agree, and whether there are
    any.
    """
    p, copied, agree, has = (np.concatenate(parts) for parts in zip(*fitted, strict=True))
    out, (q, votes, same, there) = scored[0].copy(), scored
    for value in (True, False):
        rows = has & (agree == value)
        weight = mixture_weight(p[rows], copied[rows])
        own = there & (same == value)
        out[own] = (1 - weight) * q[own] + weight * votes[own]
    return -np.log(out.clip(1e-30))


def interpolated(inputs: Inputs, losses: torch.Tensor) -> tuple[np.ndarray, ...]:
    """What `infini_gram` needs of one batch, for the labels that are not ignored: of the longest match."""
    votes, _ = DatastoreVotes.of(inputs.votes).evidence(inputs.labels)
    size, agree, right, _ = votes[:, :, 1:].unbind(-1)  # [B, T, L - 1]
    longest = ((size > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    agree, right = (values.gather(-1, longest)[..., 0] for values in (agree, right))
    values = (-losses).exp(), right, agree == 1, size[..., 0] > 0
    return tuple(value[inputs.labels != IGNORED_LABEL].numpy() for value in values)


def run(base: Path, folder: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Measure one datastore."""
    datastore, place = Datastore.open(folder), placement(options.precision)
    held_out = EvaluationSet(folder.name, datastore)
    checkpoint = open_checkpoint(base)
    changes = {"chunk_length": datastore.chunk_length, "retrieval.reader": options.reader}
    model = load_model(replace(checkpoint, model=updated(checkpoint.model, changes)), place.device).eval()
    place.cast(model)
    data = DataSettings(datastores=(folder,), sequence_length=SPAN, k=options.k)
    source = TrainingData(data.datastores, data, retrieval=True, votes=True)
    with_head(model, ())
    with torch.inference_mode():
        windows = list(held_out_windows(model, held_out, options, place, limit, options.window))
    batches = list(read_batches(source, options.fitted_tokens // SPAN, place))
    with torch.inference_mode(), place.autocast():
        hidden = [model.hidden(batch)[0] for batch in batches]

    scored = np.concatenate([window.scored for window in windows])
    document = np.concatenate([np.full(len(window.bytes), window.document) for window in windows])[scored]
    sizes, lengths = (
        np.concatenate([getattr(window, name) for window in windows])[scored] for name in ("bytes", "matches")
    )

    documents, rows = np.unique(document, return_inverse=True)
    longest = LongestMatches.of(held_out.split, DOCUMENT_BANDS).of_documents(documents)

    def losses_of(inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), place.autocast():
            return model.token_losses(inputs, hidden)

    def nats(name: str = "hidden") -> np.ndarray:
        losses = [losses_of(window.inputs, getattr(window, name))[0] for window in windows]
        return torch.cat(losses).double().numpy()[scored]

    by_row = {OFF: nats("off")} | ({READS: nats()} if options.reader else {})
    pairs = list(zip(batches, hidden, strict=True))
    fitted = [interpolated(batch, losses_of(batch, states)) for batch, states in pairs]
    parts = [interpolated(w.inputs, losses_of(w.inputs, w.hidden)) for w in windows]
    by_row[INFINIGRAM] = infini_gram(fitted, tuple(np.concatenate(each) for each in zip(*parts, strict=True)))
    for name, sources in SOURCES.items():
        began = time.monotonic()
        with_head(model, sources)
        if sources == ALL:
            by_row[NOT_FITTED] = nats()
        fit_copy_head(model, batches, place, sources, hidden)
        by_row[name] = nats()
        say(f"{folder.name}: {name}: {time.monotonic() - began:.0f} s")
    results = {name: result_of(values, document, sizes) for name, values in by_row.items()}
    retriever, suffixes = Retriever.open(folder), open_sorted_prefixes(folder)
    generator = LanguageModel(checkpoint, model, retriever.tokenizer, retriever, place, max(WINDOWS), suffixes)
    totals = datastore.manifest["splits"]["train"]
    return {
        "datastore": {key: int(sum(totals[key])) for key in ("tokens", "documents", "chunks")},
        "precision": str(place.dtype).removeprefix("torch."),
        "tokens": len(document),
        "documents": len(np.unique(document)),
        "rows": [
            {"row": name, "bits_per_byte": one.bits_per_byte}
            | {"off": compare(one, results[OFF]), "context": compare(one, results["own context"])}
            for name, one in results.items()
        ],
        "bands": {
            "token": list(bands_of(by_row, document, sizes, lengths, TOKEN_BANDS)),
            "document": list(bands_of(by_row, document, sizes, longest[rows], DOCUMENT_BANDS)),
        },
        "texts": scored_texts(generator, options.k, options),
    }


def bands_of(
    by_row: dict[str, np.ndarray],
    document: np.ndarray,
    sizes: np.ndarray,
    lengths: np.ndarray,
    starts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """For each band of lengths of a match: changes against OFF over its tokens. `lengths` [n] has the length for each
    token."""
    band = np.searchsorted(starts, lengths, side="right") - 1
    for number in np.unique(band).tolist():
        own = band == number
        results = {name: result_of(values[own], document[own], sizes[own]) for name, values in by_row.items()}
        changes = {name: compare(results[name], results[OFF]) for name in ("neighbors", "datastore", "all three")}
        yield {
            "first": starts[number],
            "documents": len(np.unique(document[own])),
            "share": float(own.mean()),
            "nats": float(by_row[OFF][own].mean()),
            "rows": changes,
        }


def result_of(nats: np.ndarray, document: np.ndarray, sizes: np.ndarray) -> SetResult:
    """Nats of tokens [n] as the measurement of documents, for intervals."""
    numbers = np.unique(document, return_inverse=True)[1]
    return SetResult("valid", 0, len(nats), 0.0, np.bincount(numbers, nats), np.bincount(numbers, sizes).astype(float))


def summary(folder: Path) -> None:
    """Print the tables of all measured datastores as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    first = next(iter(found.values()))
    for title, key in (("against the model alone", "off"), ("against copying from its own context", "context")):
        body = []
        for number, row in enumerate(first["rows"]):
            cells = [one["rows"][number] for one in found.values()]
            body.append(
                [
                    row["row"],
                    *(
                        percent(cell[key])
                        if number or key == "context"
                        else f"{cell['bits_per_byte']:.4f} bits per byte"
                        for cell in cells
                    ),
                ]
            )
        body.append(
            ["held out", *(f"{one['tokens']:,} tokens, {one['documents']} documents" for one in found.values())]
        )
        body.append(["datastore", *(f"{one['datastore']['tokens']:,} tokens" for one in found.values())])
        say(f"\n{title}\n\n" + markdown(Table(["sources", *found], body)))
    for name, one in found.items():
        for kind, bands in one["bands"].items():
            rows = [
                [str(band["first"]), f"{band['documents']}", f"{band['share']:.1%}", f"{band['nats']:.2f}"]
                + [percent(change) for change in band["rows"].values()]
                for band in bands
            ]
            columns = [f"longest match of the {kind} from", "documents", "tokens", "nats, OFF", *bands[0]["rows"]]
            say(f"\n{name}\n\n" + markdown(Table(columns, rows)))
    say("\ntext of other kinds\n\n" + markdown(texts_table(found)))
    say(
        json.dumps({name: {key: one[key] for key in ("machine", "commit", "precision")} for name, one in found.items()})
    )


def datastore_parser(about: str) -> argparse.ArgumentParser:
    """A parser for measurements of a trained model with some datastores."""
    parser = model_parser(about)
    parser.add_argument("datastores", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="held-out tokens of each datastore")
    parser.add_argument("--precision", default="auto", help="default: what this machine multiplies fast")
    return parser


def measure_datastores(
    options: argparse.Namespace,
    run: Callable[[Path, Path, argparse.Namespace, Budget], dict[str, Any]],
    summary: Callable[[Path], None],
) -> None:
    """Measure the datastores that have no file in the folder of figures, and print the tables of all that have one."""
    options.output.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    for number, folder in enumerate(options.datastores):
        stored = options.output / f"{folder.name}.json"
        if not stored.exists():
            write(stored, run(Path(options.base), folder, options, limit.share(len(options.datastores) - number)))
    summary(options.output)


def main() -> None:
    """Measure some datastores, or print the tables."""
    parser = datastore_parser(__doc__)
    parser.add_argument(
        "--fitted-tokens", type=int, default=20_000, help="tokens of training text that gates are fitted to"
    )
    parser.add_argument("--k", type=int, default=4, help="neighbors of each chunk")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window; half of them are scored")
    parser.add_argument(
        "--reader", default="", help="`decoder`: the decoder reads the neighbors too (model.retrieval.reader)"
    )
    add_texts(parser)
    measure_datastores(parser.parse_args(), run, summary)


if __name__ == "__main__":
    main()
