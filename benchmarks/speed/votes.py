"""Votes: bytes of a token, time of a training batch, and what an append costs and leaves out.

    python -m benchmarks.speed.votes DATA/msdocs_cpp/docs.jsonl.zst --output FOLDER [--appended 0.1]

Documents of a file of JSON Lines are drawn in a random order. All but the last ones (a share --appended) become a
datastore, the last ones are appended, and the votes of the grown datastore are made again. It prints CPU seconds of the
stages (with the start of each process), bytes of a token, and for the tokens that keep their votes: how many have other
votes when all documents vote, and the mean bits of the next token, before and after.

The bits are those of a fixed mixture without a model: p begins uniform over the vocabulary, and becomes (1 - w) p + w ·
share from the shortest length of match to the longest, with the w of 0.1, 0.2, … 0.9 that is best for the votes that
were kept.

The time of a batch of eight sequences of 512 tokens is that of `read_sequences` with votes and without neighbors: next
to it, the time to read its votes, and to read the same from an uncompressed array, which is written to FOLDER.
"""

import argparse
import io
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.common import Budget, add_minutes, budget, markdown, measured_on, say, write
from benchmarks.speed.scale import artifact_bytes, measured, scale_config
from indexing.store.datastore import Datastore, Split
from indexing.store.files import save_array
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.sharded_array import ShardedArray
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import KEPT, LENGTHS, SHARES, as_columns, read_votes
from pipelines.cli.results import Table
from pipelines.cli.settings.toml_file import to_toml
from retro.data.batches import read_sequences
from retro.data.neighbor_choice import NeighborUse

STAGES = ("chunk", "suffixes", "votes")
_BLOCK = 4096  # chunks that are compared at a time


def write_parts(corpus: Path, folder: Path, share: float) -> list[Path]:
    """Write the documents of a corpus in a random order, the last ones to a second file."""
    with open(corpus, "rb") as file:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        documents = list(text)
    random.Random(0).shuffle(documents)
    cut, paths = round(len(documents) * (1 - share)), [folder / "first.jsonl", folder / "appended.jsonl"]
    for path, part in zip(paths, (documents[:cut], documents[cut:]), strict=True):
        path.write_text("".join(part), encoding="utf-8")
    return paths


def run(folder: Path, stages: tuple[str, ...], *options: str) -> dict[str, dict[str, float]]:
    """CPU seconds and memory of some stages; the options are those of the first one."""
    costs = {}
    for name in stages:
        costs[name] = measured("index", str(folder / "config.toml"), "--stage", name, *options)
        options = ()
        say(f"{name}: {costs[name]['cpu_seconds']:.1f} CPU s")
    return costs


def batch_times(split: Split, folder: Path) -> dict[str, float]:
    """CPU microseconds of a batch of eight sequences of 512 tokens, and of reading its votes, compressed and not."""
    random, chunks = np.random.default_rng(0), 512 // split.chunk_length
    path = folder / "uncompressed.npy"
    save_array(path, read_votes(split, np.arange(split.chunk_rows[0])))
    plain, retrieval = ShardedArray([path], split.chunk_rows[:1]), RetrievalSet((split,))
    firsts = [random.integers(0, split.chunk_rows[0] // chunks, 8) * chunks for _ in range(50)]
    ids = [(first[:, None] + np.arange(chunks)).ravel() for first in firsts]
    ranges = [[(row, row + chunks) for row in first.tolist()] for first in firsts]

    def best(read: Callable[[int], object]) -> float:
        times = []
        for _ in range(9):
            started = time.process_time()
            for number in range(len(firsts)):
                read(number)
            times.append(1e6 * (time.process_time() - started) / len(firsts))
        return min(times)

    return {
        "batch": best(
            lambda number: read_sequences(split, retrieval, ranges[number], chunks, NeighborUse(0, votes=True))
        ),
        "compressed": best(lambda number: read_votes(split, ids[number])),
        "uncompressed": best(lambda number: plain.gather(ids[number])),
    }


def columns_of(split: Split, shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The votes [n, 32] of the tokens of the first shards that another one follows, and that token [n]."""
    texts = Texts(split)
    for shard in range(shards):
        positions = texts.shard(shard).positions() + texts.starts[shard]
        for first in range(0, split.chunk_rows[shard], _BLOCK):
            chunks = np.arange(first, min(first + _BLOCK, split.chunk_rows[shard])) + split.tokens.starts[shard]
            low, high = np.searchsorted(
                positions, [chunks[0] * split.chunk_length, (chunks[-1] + 1) * split.chunk_length]
            )
            own, following = positions[low:high], texts.following(positions[low:high])
            votes = as_columns(read_votes(split, chunks)).reshape(-1, 1 + KEPT + len(LENGTHS) * (1 + KEPT))
            known = following >= 0
            yield votes[own[known] - chunks[0] * split.chunk_length], following[known]


def bits(votes: np.ndarray, following: np.ndarray, vocabulary: int) -> np.ndarray:
    """Bits of each token in the mixtures of w = 0.1, 0.2, … 0.9: [n, 9]."""
    weight = np.arange(1, 10) / 10
    levels = votes[:, 1 + KEPT :].reshape(-1, len(LENGTHS), 1 + KEPT)
    hits = votes[:, 1 : 1 + KEPT] == following[:, None]
    p = np.full((len(votes), len(weight)), 1 / vocabulary)
    for level in range(len(LENGTHS)):
        share = (levels[:, level, 1:] / SHARES * hits).max(axis=1)
        p = np.where(levels[:, level, :1] > 0, (1 - weight) * p + weight * share[:, None], p)
    return -np.log2(p)


def kept_against_rebuilt(kept: Datastore, rebuilt: Datastore) -> dict[str, float]:
    """Compare the votes of the tokens that were there before an append."""
    shards, different, longer, count, total = len(kept.train.chunk_rows), 0, 0, 0, np.zeros((2, 9))
    for (old, following), (new, _) in zip(
        columns_of(kept.train, shards), columns_of(rebuilt.train, shards), strict=True
    ):
        count += len(old)
        different += int((old != new).any(axis=1).sum())
        longer += int((old[:, 0] < new[:, 0]).sum())
        total += [bits(votes, following, kept.manifest["vocab_size"]).sum(axis=0) for votes in (old, new)]
    best = int(total[0].argmin())
    return {
        "tokens": count,
        "different": different / count,
        "longer_match": longer / count,
        "weight": (1 + best) / 10,
        "bits_kept": total[0, best] / count,
        "bits_rebuilt": total[1, best] / count,
    }


def main() -> None:
    """Measure, print a table and write FOLDER/votes.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="documents, .jsonl.zst")
    parser.add_argument("--output", type=Path, required=True, help="empty folder for the datastores and results")
    parser.add_argument("--appended", type=float, default=0.1, help="share of the documents that is appended")
    add_minutes(parser, 0)
    options = parser.parse_args()
    results = measure(options.corpus, options.output, options.appended, budget(options))
    write(options.output / "votes.json", results)
    print(markdown(table(results)))


def measure(corpus: Path, folder: Path, share: float, limit: Budget) -> dict[str, Any]:
    """Run all steps, as far as the time limit allows."""
    folder.mkdir(parents=True, exist_ok=True)
    first, appended = write_parts(corpus, folder, share)
    config, results = scale_config(folder, [first]), measured_on()
    (folder / "config.toml").write_text(to_toml(config))
    before = folder / "before"

    def grow() -> dict[str, dict[str, float]]:
        shutil.copytree(config.datastore, before)
        return run(folder, STAGES, "--append", "--corpus.paths", str(appended))

    def size() -> dict[str, float]:
        datastore = Datastore.open(config.datastore)
        sizes, splits = artifact_bytes(config.datastore), datastore.manifest["splits"]
        trained, everything = sum(splits["train"]["tokens"]), sum(sum(split["tokens"]) for split in splits.values())
        return {
            "suffixes": sizes["suffixes"] / trained,
            "votes": sizes["votes"] / everything,
            "tokens": everything,
        }

    steps: dict[str, Callable[[], Any]] = {
        "fresh": lambda: run(folder, STAGES),
        "bytes": size,
        "batch": lambda: batch_times(Datastore.open(config.datastore).train, folder),
        "append": grow,
        "rebuild": lambda: run(folder, ("votes",), "--rebuild"),
        "difference": lambda: kept_against_rebuilt(Datastore.open(before), Datastore.open(config.datastore)),
    }
    for name in limit.each(list(steps), "step"):
        results[name] = steps[name]()
        say(f"{name}: {results[name]}")
    return results


def table(results: dict[str, Any]) -> Table:
    """A line for each figure that was measured."""
    rows = []
    for name in ("fresh", "append", "rebuild"):
        rows += [
            [f"{name}, {stage}: CPU s", f"{cost['cpu_seconds']:.1f}"] for stage, cost in results.get(name, {}).items()
        ]
    rows += [
        [f"{name}: bytes a token", f"{value:.2f}"]
        for name, value in results.get("bytes", {}).items()
        if name != "tokens"
    ]
    rows += [[f"batch, {name}: CPU µs", f"{value:.0f}"] for name, value in results.get("batch", {}).items()]
    rows += [[f"kept votes, {name}", f"{value:.4g}"] for name, value in results.get("difference", {}).items()]
    return Table(["measured", "value"], rows)


if __name__ == "__main__":
    main()
