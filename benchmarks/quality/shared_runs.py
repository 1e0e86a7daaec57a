"""Would exact shared runs find the near copies that `dedup` finds? Pairs of documents with a common run of tokens, against the truth.

    python -m benchmarks.quality.shared_runs DATA --output FOLDER

DATA has docs.jsonl.zst, and pairs.jsonl.zst with the exact Jaccard similarity of pairs (`a`, `b`, `jaccard`; 5-grams of words). The
documents are indexed up to the stage `suffixes`. Two documents share a run of L tokens if both have a prefix that ends in it; such
prefixes are next to each other in the sorted order. Pairs that the list lacks are judged by the same similarity.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.common import add_minutes, budget, markdown, say, write
from indexing.dedup.ngrams import gram_set, jaccard
from indexing.store.datastore import Datastore
from indexing.suffixes.votes import Source, sources_of, window_dtype
from pipelines.cli import main as retro
from pipelines.results import Table

LENGTHS = (32, 64, 128, 256, 512)
SIMILAR, NGRAM = 0.8, 5
_BLOCK = 1 << 13


def documents_of_runs(source: Source, length: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """For each run of this many tokens that several documents have: their numbers."""
    assert source.sorted_positions is not None
    positions = np.asarray(source.sorted_positions).astype(np.int64)
    same = np.zeros(len(positions) + 1, bool)  # with the row before
    for first in range(0, len(positions), _BLOCK):
        window = source.windows(positions[max(0, first - 1) : first + _BLOCK], length, dtype)
        equal = (window[1:] == window[:-1]).all(1) & (window[1:] > 0).all(1)
        same[first + (first == 0) : first + (first == 0) + len(equal)] = equal
    documents, borders = source.document(positions), np.flatnonzero(~same)
    for first, stop in itertools.pairwise(borders.tolist()):
        if stop > first + 1 and len(members := np.unique(documents[first:stop])) > 1:
            yield members


def pairs_with_run(source: Source, length: int, dtype: np.dtype) -> np.ndarray:
    """The pairs of documents that share a run of this many tokens: [pairs, 2] int64, smaller number first."""
    groups = {members.tobytes(): members for members in documents_of_runs(source, length, dtype)}
    pairs: set[tuple[int, int]] = set()
    for members in groups.values():
        pairs.update(itertools.combinations(members.tolist(), 2))
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def similarities(texts: list[str], pairs: np.ndarray) -> np.ndarray:
    """Jaccard similarity of the n-grams of pairs, [pairs]; 0 if their sizes already exclude `SIMILAR`."""
    grams = [gram_set(text, NGRAM) for text in texts]
    sizes = np.array([len(each) for each in grams])[pairs]
    possible, values = sizes.min(1) >= SIMILAR * sizes.max(1), np.zeros(len(pairs))
    values[possible] = [jaccard(grams[one], grams[other]) for one, other in pairs[possible].tolist()]
    return values


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a compressed JSON Lines file."""
    with zstandard.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def built(data: Path, output: Path) -> Datastore:
    """Index all documents of a folder as training documents, up to the stage `suffixes`."""
    config, folder = output / "shared_runs.toml", output / data.name
    config.write_text(
        f'datastore = "{folder}"\n[corpus]\npaths = ["{data / "docs.jsonl.zst"}"]\nsplit = [1, 0, 0]\n[tokenizer]\nvocab_size = 8192\n'
    )
    for stage in ("chunk", "suffixes"):
        assert retro(["index", str(config), "--stage", stage]) == 0
    return Datastore.open(folder)


def main() -> None:
    """Print precision and recall of pairs that share a run, by its length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with docs.jsonl.zst and pairs.jsonl.zst")
    parser.add_argument("--output", type=Path, required=True, help="folder of the datastore and the figures")
    add_minutes(parser)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    datastore = built(options.data, options.output)
    texts = {row["id"]: row["text"] for row in rows_of(options.data / "docs.jsonl.zst")}
    names = [row["id"] for row in datastore.train.metadata(range(datastore.train.num_documents))]
    numbers = {name: number for number, name in enumerate(names)}
    listed = {
        tuple(sorted((numbers[row["a"]], numbers[row["b"]]))): row["jaccard"]
        for row in rows_of(options.data / "pairs.jsonl.zst")
    }
    truth = {pair for pair, similarity in listed.items() if similarity >= SIMILAR}
    (source,) = (one for one in sources_of(datastore) if one.split.name == "train")
    results: list[dict[str, Any]] = []
    for length in limit.each(LENGTHS, "length"):
        pairs = pairs_with_run(source, length, window_dtype(datastore))
        if not results:  # the shortest runs give all other pairs too
            values = similarities([texts[name] for name in names], pairs)
            truth |= set(map(tuple, pairs[values >= SIMILAR].tolist()))
        right = len(truth.intersection(map(tuple, pairs.tolist())))
        figures = {"length": length, "pairs": len(pairs), "right": right, "true_pairs": len(truth)}
        results.append(figures | {"precision": right / len(pairs), "recall": right / len(truth)})
    cells = [
        [
            f"{row['length']}",
            f"{row['pairs']:,}",
            f"{row['right']:,}",
            f"{row['precision']:.3f}",
            f"{row['recall']:.3f}",
        ]
        for row in results
    ]
    say(markdown(Table(["run of at least", "pairs", "true", "precision", "recall"], cells)))
    write(options.output / "shared_runs.json", {"documents": len(names), "rows": results})


if __name__ == "__main__":
    main()
