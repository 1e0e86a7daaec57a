"""What a user might try instead of copying from the whole datastore: kNN-LM (Khandelwal et al. 2020, arXiv 1911.00172).

    python -m benchmarks.quality.knn_lm base.safetensors DATASTORE ... --output FOLDER [--tokens 20000]
    python -m benchmarks.quality.knn_lm summary --output FOLDER

The key of a training token is what the last feed-forward block reads before it, as in the paper. For each held-out token the `--k`
nearest keys vote for their tokens, with the softmax of -distance / temperature. Temperature and weight of the mixture are fitted to
training text, without votes of the own document. The windows are those of `datastore_copying`, so both can be compared.
Keys are kept in FOLDER: two bytes for each of their dimensions.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from benchmarks.common import Budget, budget, markdown, model_parser, percent, placement, say, write
from benchmarks.quality.datastore_copying import OFF, WINDOW, result_of, with_head
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from pipelines.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.device import Placement
from retro.evaluation.bits_per_byte import compare
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.windows import ScoringWindow, document_windows, window_batches
from retro.model.loss import IGNORED_LABEL
from retro.model.retro import Retro

LISTS, NPROBE = 1024, 32
TEMPERATURES = (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 3)
"""In units of the mean squared distance to the nearest key."""
_BATCH = 4
_QUERIES = 1024


@dataclass(frozen=True)
class Tokens:
    """Scored tokens [n] of windows: keys [n, D] float32, the tokens, their documents, and the model's nats."""

    keys: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    nats: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Tokens"]) -> "Tokens":
        return cls(*(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


@torch.inference_mode()
def read_tokens(
    model: Retro, datastore: Datastore, split: Split, windows: Sequence[ScoringWindow], place: Placement, scored: bool
) -> Iterator[Tokens]:
    """Read windows in batches. Without `scored` the output layer is not computed, and the nats are 0."""
    retrieval, kept = RetrievalSet.of(datastore), []
    hook = model.layers[-1].feed_forward.norm.register_forward_hook(lambda _module, _input, output: kept.append(output))
    for batch_windows, batch in window_batches(split, retrieval, windows, _BATCH, NeighborUse(0)):
        inputs = place.put(as_tensors(batch))
        with place.autocast():
            hidden, _ = model.hidden(inputs)
            losses = model.token_losses(inputs, hidden) if scored else torch.zeros_like(inputs.labels)
        counted = batch.labels != IGNORED_LABEL
        texts = np.array([window.text for window in batch_windows])
        yield Tokens(
            kept.pop().float().cpu().numpy()[counted],
            batch.labels[counted],
            np.broadcast_to(texts[:, None], batch.labels.shape)[counted],
            losses.double().cpu().numpy()[counted],
        )
    hook.remove()


def write_keys(model: Retro, datastore: Datastore, folder: Path, place: Placement) -> None:
    """Write `keys.npy`, `labels.npy` and `documents.npy` of all training tokens."""
    split = datastore.train
    windows = list(document_windows(split, WINDOW // split.chunk_length, WINDOW // split.chunk_length))
    size = sum(datastore.manifest["splits"]["train"]["tokens"])
    keys = np.lib.format.open_memmap(folder / "keys.npy", "w+", np.float16, (size, model.settings.d_model))
    labels, documents = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    done, began, told = 0, time.monotonic(), time.monotonic()
    for part in read_tokens(model, datastore, split, windows, place, scored=False):
        rows = slice(done, done + len(part.labels))
        keys[rows], labels[rows], documents[rows] = part.keys, part.labels, part.documents
        done = rows.stop
        if time.monotonic() - told > 20:
            told = time.monotonic()
            say(f"keys: {done:,} of about {size:,} tokens, {done / (told - began):,.0f}/s")
    keys.flush()
    np.save(folder / "documents.npy", documents[:done])
    np.save(folder / "labels.npy", labels[:done])  # the last file: all is written


def build_index(keys: np.ndarray) -> faiss.Index:
    """An inverted file of keys in half precision."""
    index = faiss.index_factory(keys.shape[1], f"IVF{LISTS},SQfp16")
    step = max(1, len(keys) // (LISTS * 50))
    index.train(np.asarray(keys[::step], dtype=np.float32))
    for first in range(0, len(keys), 1 << 16):
        index.add(np.asarray(keys[first : first + (1 << 16)], dtype=np.float32))
    faiss.extract_index_ivf(index).nprobe = NPROBE
    return index


def hits(index: faiss.Index, stored: Tokens, queries: Tokens, k: int, own: bool) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances [n, k] of the nearest keys, +inf where there is none, and whether their tokens are the right ones.

    With `own`, keys of the query's document do not count.
    """
    distances, ids = index.search(queries.keys, k)
    missing = ids < 0
    if own:
        missing |= stored.documents[ids] == queries.documents[:, None]
    return np.where(missing, np.inf, distances), stored.labels[ids] == queries.labels[:, None]


def probabilities(distances: np.ndarray, right: np.ndarray, temperature: float) -> np.ndarray:
    """What the nearest keys give to the right token, [n]."""
    nearest = distances.min(axis=1, keepdims=True)
    weights = np.exp((np.where(np.isfinite(nearest), nearest, 0) - distances) / temperature)
    return (weights * right).sum(axis=1) / weights.sum(axis=1).clip(1e-30)


def weight_of(own: np.ndarray, copied: np.ndarray) -> float:
    """The weight of the votes that minimizes the loss, by expectation maximization."""
    weight = 0.2
    for _ in range(50):
        weight = float((weight * copied / ((1 - weight) * own + weight * copied).clip(1e-30)).mean())
    return weight


def chosen_windows(split: Split, tokens: int, stride: int) -> list[ScoringWindow]:
    """Windows in a fixed random order until they have this number of tokens, as `datastore_copying.held_out_windows` draws them."""
    m = split.chunk_length
    windows = list(document_windows(split, WINDOW // m, stride // m))
    order, chosen, total = np.random.default_rng(0).permutation(len(windows)), [], 0
    for number in order.tolist():
        if total >= tokens:
            break
        window = windows[number]
        chosen.append(window)
        lengths = split.lengths.gather(np.arange(window.scored, window.stop))
        total += int(lengths.sum()) - (window.scored == split.chunk_ranges(np.array([window.text]))[0, 0])
    return chosen


def run(base: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one datastore."""
    datastore, place = Datastore.open(folder), placement(options.precision)
    held_out, checkpoint = EvaluationSet(folder.name, datastore), open_checkpoint(base)
    model = with_head(load_model(checkpoint, place.device).eval(), ())
    place.cast(model)
    own = options.output / folder.name
    own.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if not (own / "labels.npy").exists():
        write_keys(model, datastore, own, place)
    labels, documents = (np.load(own / f"{name}.npy") for name in ("labels", "documents"))
    keys = np.load(own / "keys.npy", mmap_mode="r")[: len(labels)]
    say(f"{folder.name}: keys after {time.monotonic() - began:.0f} s")
    stored, index = Tokens(keys, labels, documents, labels), build_index(keys)
    say(f"{folder.name}: index after {time.monotonic() - began:.0f} s")

    def tokens_of(split: Split, count: int, stride: int) -> Tokens:
        windows = chosen_windows(split, count, stride)
        return Tokens.joined(list(read_tokens(model, datastore, split, windows, place, scored=True)))

    def found(queries: Tokens, of_training: bool) -> tuple[np.ndarray, np.ndarray]:
        blocks = [
            hits(
                index,
                stored,
                Tokens(*(column[first : first + _QUERIES] for column in vars(queries).values())),
                options.k,
                of_training,
            )
            for first in range(0, len(queries.labels), _QUERIES)
        ]
        distances, right = zip(*blocks, strict=True)
        return np.concatenate(distances), np.concatenate(right)

    fitted = tokens_of(datastore.train, options.fitted_tokens, WINDOW)
    distances, right = found(fitted, of_training=True)
    nearest = distances.min(axis=1)
    unit, probability = float(nearest[np.isfinite(nearest)].mean()), np.exp(-fitted.nats)
    trials = []
    for number in TEMPERATURES:
        copied = probabilities(distances, right, number * unit)
        weight = weight_of(probability, copied)
        trials.append((float(-np.log((1 - weight) * probability + weight * copied).mean()), number, weight))
        say(f"{folder.name}: temperature {number}, weight {weight:.3f}: {trials[-1][0]:.4f} nats on training text")
    _, number, weight = min(trials)
    held = tokens_of(held_out.split, options.tokens, WINDOW // 2)
    copied = probabilities(*found(held, of_training=False), number * unit)
    sizes = held_out.token_bytes[held.labels].astype(float)
    by_row = {OFF: held.nats, "kNN-LM": -np.log((1 - weight) * np.exp(-held.nats) + weight * copied)}
    results = {name: result_of(nats, held.documents, sizes) for name, nats in by_row.items()}
    return {
        "precision": str(place.dtype).removeprefix("torch."),
        "keys": len(labels),
        "key_bytes": 2 * keys.shape[1],
        "k": options.k,
        "temperature": number * unit,
        "weight": weight,
        "tokens": len(held.labels),
        "documents": len(np.unique(held.documents)),
        "off": results[OFF].bits_per_byte,
        "change": compare(results["kNN-LM"], results[OFF]),
    }


def summary(folder: Path) -> None:
    """Print a table of all measured datastores as Markdown."""
    measured = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    rows = [
        [name, f"{one['keys']:,}", f"{one['key_bytes']:,}", f"{one['tokens']:,} tokens, {one['documents']} documents"]
        for name, one in measured.items()
    ]
    for row, one in zip(rows, measured.values(), strict=True):
        row += [f"{one['off']:.4f}", percent(one["change"]), f"{one['weight']:.2f}"]
    header = ["datastore", "keys", "bytes of a key", "held out", "bits per byte, OFF", "kNN-LM", "weight"]
    say("\n" + markdown(Table(header, rows)))
    say(
        json.dumps(
            {name: {key: one[key] for key in ("machine", "commit", "precision")} for name, one in measured.items()}
        )
    )


def main() -> None:
    """Measure some datastores, or print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("datastores", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="held-out tokens of each datastore")
    parser.add_argument(
        "--fitted-tokens", type=int, default=10_000, help="tokens of training text for temperature and weight"
    )
    parser.add_argument("--k", type=int, default=1024, help="nearest keys that vote")
    parser.add_argument("--precision", default="auto", help="default: what this machine multiplies fast")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit: Budget = budget(options)
    for folder in limit.each(options.datastores, "datastore"):
        stored = options.output / f"{folder.name}.json"
        if not stored.exists():
            write(stored, run(Path(options.base), folder, options))
    summary(options.output)


if __name__ == "__main__":
    main()
