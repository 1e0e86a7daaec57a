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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from benchmarks.common import Budget, markdown, percent, placement, say
from benchmarks.quality.datastore_copying import (
    WINDOW,
    chosen_windows,
    datastore_parser,
    measure_datastores,
    mixture_weight,
    result_of,
    with_head,
)
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


@torch.inference_mode()
def read_tokens(
    model: Retro,
    datastore: Datastore,
    split: Split,
    windows: Sequence[ScoringWindow],
    place: Placement,
    scored: bool = False,
) -> Iterator[Tokens]:
    """Read windows in batches. Without `scored` the output layer is not computed, and the nats are 0."""
    kept: list[torch.Tensor] = []
    hook = model.layers[-1].feed_forward.norm.register_forward_hook(lambda _module, _input, output: kept.append(output))
    for batch_windows, batch in window_batches(split, RetrievalSet.of(datastore), windows, _BATCH, NeighborUse(0)):
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


def stored_tokens(model: Retro, datastore: Datastore, folder: Path, place: Placement, limit: Budget) -> Tokens:
    """The tokens of the training documents, with memory-mapped keys in half precision and without nats.

    They are read from FOLDER, or written there; then as many as half of the time allows.
    """
    split, m = datastore.train, datastore.chunk_length
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "labels.npy"  # written last, with all tokens
    if whole.exists():
        labels, documents = np.load(whole), np.load(folder / "documents.npy")
        return Tokens(
            np.load(folder / "keys.npy", mmap_mode="r")[: len(labels)], labels, documents, np.zeros(len(labels))
        )
    size = sum(datastore.manifest["splits"]["train"]["tokens"])
    keys = np.lib.format.open_memmap(folder / "keys.npy", "w+", np.float16, (size, model.settings.d_model))
    labels, documents = np.zeros((2, size), dtype=np.int64)
    half, done, told = Budget(limit.left / 2), 0, time.perf_counter()
    for part in read_tokens(model, datastore, split, list(document_windows(split, WINDOW // m, WINDOW // m)), place):
        if half.left < 0:
            say(f"stopped after {done:,} of about {size:,} keys. --minutes sets the limit; 0 removes it.")
            break
        rows = slice(done, done + len(part.labels))
        keys[rows], labels[rows], documents[rows] = part.keys, part.labels, part.documents
        done = rows.stop
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            say(f"keys: {done:,} of about {size:,} tokens, {done / (told - half.started):,.0f}/s")
    else:
        keys.flush()
        np.save(folder / "documents.npy", documents[:done])
        np.save(whole, labels[:done])
    return Tokens(keys[:done], labels[:done], documents[:done], np.zeros(done))


def build_index(keys: np.ndarray) -> faiss.Index:
    """An inverted file of keys in half precision."""
    index = faiss.index_factory(keys.shape[1], f"IVF{LISTS},SQfp16")
    step = max(1, len(keys) // (LISTS * 50))
    index.train(np.asarray(keys[::step], dtype=np.float32))
    for first in range(0, len(keys), 1 << 16):
        index.add(np.asarray(keys[first : first + (1 << 16)], dtype=np.float32))
    faiss.extract_index_ivf(index).nprobe = NPROBE
    return index


def probabilities(distances: np.ndarray, right: np.ndarray, temperature: float) -> np.ndarray:
    """What the nearest keys give to the right token, [n]."""
    nearest = distances.min(axis=1, keepdims=True)
    weights = np.exp((np.where(np.isfinite(nearest), nearest, 0) - distances) / temperature)
    return (weights * right).sum(axis=1) / weights.sum(axis=1).clip(1e-30)


def joined(parts: Iterable[Tokens]) -> Tokens:
    """One record of several."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Tokens(*map(np.concatenate, columns))


def nearest_keys(
    index: faiss.Index, stored: Tokens, queries: Tokens, k: int, *, others: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest keys of each query: squared distances [n, k], +inf where there is none, and whether their token is the right one.

    With `others`, only keys of other documents count.
    """
    distances, right = [], []
    for first in range(0, len(queries.labels), _QUERIES):
        rows = slice(first, first + _QUERIES)
        near, ids = index.search(queries.keys[rows], k)
        missing = ids < 0
        if others:
            missing |= stored.documents[ids] == queries.documents[rows, None]
        distances.append(np.where(missing, np.inf, near))
        right.append(stored.labels[ids] == queries.labels[rows, None])
    return np.concatenate(distances), np.concatenate(right)


def fit(probability: np.ndarray, distances: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """The temperature and the weight of the nearest keys with the lowest loss on tokens of these probabilities [n]."""
    nearest = distances.min(axis=1)
    trials = []
    for temperature in np.array(TEMPERATURES) * float(nearest[np.isfinite(nearest)].mean()):
        copied = probabilities(distances, right, temperature)
        weight = mixture_weight(probability, copied)
        trials.append((float(-np.log((1 - weight) * probability + weight * copied).mean()), float(temperature), weight))
        say(f"temperature {temperature:.3g}, weight {weight:.3f}: {trials[-1][0]:.4f} nats on training text")
    _, temperature, weight = min(trials)
    return temperature, weight


def run(base: Path, folder: Path, options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Measure one datastore."""
    datastore, place = Datastore.open(folder), placement(options.precision)
    held_out = EvaluationSet(folder.name, datastore)
    model = with_head(load_model(open_checkpoint(base), place.device).eval(), ())
    place.cast(model)
    stored = stored_tokens(model, datastore, options.output / folder.name, place, limit)
    index = build_index(stored.keys)
    say(f"{folder.name}: {len(stored.labels):,} keys in the index after {time.perf_counter() - limit.started:.0f} s")

    def tokens_of(split: Split, count: int, stride: int) -> Tokens:
        windows = chosen_windows(split, count, WINDOW, stride)
        return joined(read_tokens(model, datastore, split, windows, place, scored=True))

    fitted = tokens_of(datastore.train, options.fitted_tokens, WINDOW)
    near = nearest_keys(index, stored, fitted, options.k, others=True)
    temperature, weight = fit(np.exp(-fitted.nats), *near)
    held = tokens_of(held_out.split, options.tokens, WINDOW // 2)
    copied = probabilities(*nearest_keys(index, stored, held, options.k), temperature)
    sizes = held_out.token_bytes[held.labels].astype(float)
    off = result_of(held.nats, held.documents, sizes)
    mixed = result_of(-np.log((1 - weight) * np.exp(-held.nats) + weight * copied), held.documents, sizes)
    return {
        "precision": str(place.dtype).removeprefix("torch."),
        "keys": len(stored.labels),
        "key_bytes": 2 * stored.keys.shape[1],
        "k": options.k,
        "temperature": temperature,
        "weight": weight,
        "tokens": len(held.labels),
        "documents": len(np.unique(held.documents)),
        "off": off.bits_per_byte,
        "change": compare(mixed, off),
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
    parser = datastore_parser(__doc__)
    parser.add_argument(
        "--fitted-tokens", type=int, default=10_000, help="tokens of training text for temperature and weight"
    )
    parser.add_argument("--k", type=int, default=1024, help="nearest keys that vote")
    measure_datastores(parser.parse_args(), run, summary)


if __name__ == "__main__":
    main()
