"""Near-duplicate detection: precision and recall against ground truth, time against bare libraries.

    python -m benchmarks.quality.dedup DATA [--documents 500] [--no-quality] [--rounds 3]

DATA contains `neardup_en_history`, `msdocs_cpp` and `zh_laws`: documents, and pairs with their exact Jaccard similarity
over 5-grams of words, or of characters (Chinese). The benchmark computes the similarity of unlisted pairs in the same
way. It has four parts:

truth      n-grams of 5 units, thresholds of the ground truth: do units, bands and exact Jaccard find the pairs?
units      which unit should n-grams of 13 consist of?
sweep      n = 13, several thresholds, against pairs with a true Jaccard of 0.8: which pairs does the default find?
bands      n = 13, threshold 0.8: pairs found through bands, against a comparison of all pairs
"""

import argparse
import io
import itertools
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.common import Budget, add_minutes, budget, median_seconds, say, write
from indexing.dedup.near_duplicates import TRAIN, DedupSettings, Signatures, find_candidates
from indexing.dedup.ngrams import gram_set, grams_of, jaccard, units
from indexing.tokenization.tokenizer import Tokenizer, TokenizerSettings, train_sentencepiece

SETS = {  # files of documents and pairs, and the pattern of the ground truth's units
    "neardup_en_history": ("docs", "pairs", r"\w+"),
    "msdocs_cpp": ("docs", "neardup_pairs", r"\w+"),
    "zh_laws": ("laws", "neardup_pairs", r"\w"),
}
Pair = tuple[int, int]


def read(file: Path) -> list[dict[str, Any]]:
    """Read a compressed JSON Lines file."""
    with open(file, "rb") as stored:
        return [
            json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stored), "utf-8")
        ]


class Truth:
    """A data set: its texts, and the true Jaccard similarity of any two of them."""

    def __init__(self, data: Path, name: str, limit: int) -> None:
        documents, pairs, self.pattern = SETS[name]
        rows = read(data / name / f"{documents}.jsonl.zst")[:limit]
        self.name, self.texts = name, [row["text"] for row in rows]
        number = {row["id"]: n for n, row in enumerate(rows)}
        listed = read(data / name / f"{pairs}.jsonl.zst")
        self.listed: dict[Pair, float] = {
            (min(a, b), max(a, b)): row["jaccard"]
            for row in listed
            if (a := number.get(row["a"])) is not None and (b := number.get(row["b"])) is not None
        }
        self._sets: dict[int, set[tuple[str, ...]]] = {}

    def _set(self, document: int) -> set[tuple[str, ...]]:
        if document not in self._sets:
            found = re.findall(self.pattern, self.texts[document].lower())
            self._sets[document] = set(zip(*(found[n:] for n in range(5)), strict=False))
        return self._sets[document]

    def similarity(self, pair: Pair) -> float:
        """Return the listed Jaccard similarity of a pair, or compute it."""
        if pair not in self.listed:
            first, second = map(self._set, pair)
            self.listed[pair] = len(first & second) / max(1, len(first | second))
        return self.listed[pair]


def signatures_of(sets: list[np.ndarray], settings: DedupSettings, folder: Path) -> Signatures:
    """Write the files of the stage for a shard of training documents with these n-gram sets, and open them."""
    sketch = settings.sketch
    np.save(folder / "bands.npy", np.array([sketch(grams) for grams in sets]).T.copy())
    np.save(folder / "sizes.npy", np.array([len(grams) for grams in sets], np.int64))
    np.save(folder / "splits.npy", np.full(len(sets), TRAIN, np.uint8))
    return Signatures.open([folder])


def pairs_of(sets: list[np.ndarray], settings: DedupSettings) -> dict[Pair, float]:
    """Find near pairs of n-gram sets with the functions of the stage; return their Jaccard similarities."""
    with tempfile.TemporaryDirectory() as folder:
        signatures = signatures_of(sets, settings, Path(folder))
        meetings = find_candidates(signatures, settings, advance=lambda _: None)
    meetings = meetings[np.argsort(meetings[:, 1], kind="stable")]
    buckets = np.split(meetings[:, 0], np.flatnonzero(np.diff(meetings[:, 1])) + 1)
    met = {pair for bucket in buckets for pair in itertools.combinations(bucket.tolist(), 2)}
    return near(met, sets, settings.threshold)


def near(pairs: Iterable[Pair], sets: list[np.ndarray], threshold: float) -> dict[Pair, float]:
    """Return the pairs whose Jaccard similarity reaches the threshold, with their similarity."""
    found = {}
    for first, second in pairs:
        small, large = sorted((len(sets[first]), len(sets[second])))
        if large and small / large >= threshold and (similarity := jaccard(sets[first], sets[second])) >= threshold:
            found[first, second] = similarity
    return found


def all_pairs(sets: list[np.ndarray], threshold: float) -> dict[Pair, float]:
    """Find the same pairs as `pairs_of`, by comparing all sets whose sizes are close enough."""
    sizes = np.array([len(grams) for grams in sets])
    order = np.argsort(sizes, kind="stable")
    ends = np.searchsorted(sizes[order], sizes[order] / threshold, side="right")
    possible = (
        (min(a, b), max(a, b))
        for place, a in enumerate(order.tolist())
        if sizes[a]
        for b in order[place + 1 : ends[place]].tolist()
    )
    return near(possible, sets, threshold)


def scores(truth: Truth, found: Iterable[Pair], threshold: float) -> dict[str, Any]:
    """Return precision and recall against the pairs whose true Jaccard similarity is at least `threshold`."""
    found = set(found)
    similar = [truth.similarity(pair) for pair in found]
    wanted = {pair for pair, similarity in truth.listed.items() if similarity >= threshold}
    right = sum(similarity >= threshold for similarity in similar)
    most_alike = sum(similarity >= 0.9 for similarity in truth.listed.values())
    return {
        "pairs": len(wanted),
        "found": len(found),
        "precision": right / max(1, len(found)),
        "recall": right / max(1, len(wanted)),
        "recall_from_0.9": sum(similarity >= 0.9 for similarity in similar) / max(1, most_alike),
        "lowest": round(min(similar, default=1.0), 3),
    }


def unit_kinds(truths: list[Truth]) -> dict[str, Callable[[str], np.ndarray]]:
    """Functions text → units [n] uint64, by name. Tokens are those of a BPE with 8,192 ids, trained on all texts."""
    with tempfile.TemporaryDirectory() as folder:
        texts = (text for truth in truths for text in truth.texts)
        settings = TokenizerSettings(vocab_size=8192)
        train_sentencepiece(texts, settings, Path(folder))
        tokenizer = Tokenizer.open(Path(folder))
    mix = np.uint64(0x9E3779B97F4A7C15)
    return {
        "words, or characters of unspaced scripts": units,
        "characters": lambda text: np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64) * mix,
        "tokens": lambda text: tokenizer.encode_batch([text])[0].astype(np.uint64) * mix,
        "words between blanks": lambda text: np.array([zlib.crc32(word.encode()) for word in text.split()], np.uint64),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows."""
    for row in rows:
        cells = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        say("  ".join(cells))


def quality(truths: list[Truth], limit: Budget) -> dict[str, Any]:
    """Run the four parts; return rows by part."""
    out: dict[str, Any] = {"truth": [], "units": [], "sweep": [], "bands": []}
    kinds = unit_kinds(truths)
    for truth in limit.each(truths, "set", lambda truth: len(truth.texts)):
        fives = [gram_set(text, 5) for text in truth.texts]
        for threshold in (0.5, 0.6, 0.7, 0.8, 0.9):
            if truth.name == "neardup_en_history" and threshold < 0.8:
                continue  # its list has only pairs within a group, and pages of different groups are similar below 0.8
            found = pairs_of(fives, DedupSettings(within=True, ngram=5, threshold=threshold))
            out["truth"].append({"set": truth.name, "threshold": threshold} | scores(truth, found, threshold))
        show(out["truth"][-3:])
        for kind, cut in kinds.items():
            for n in (5, 13):
                found = pairs_of([grams_of(cut(text), n) for text in truth.texts], DedupSettings(within=True, ngram=n))
                out["units"].append({"set": truth.name, "unit": kind, "n": n} | scores(truth, found, 0.8))
                show(out["units"][-1:])
        thirteens = [gram_set(text, 13) for text in truth.texts]
        for threshold in (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9):
            found = pairs_of(thirteens, DedupSettings(within=True, threshold=threshold))
            out["sweep"].append({"set": truth.name, "threshold": threshold} | scores(truth, found, 0.8))
        show(out["sweep"][-7:])
        every = all_pairs(thirteens, 0.8)
        for permutations in (64, 128, 256):
            found = pairs_of(thirteens, DedupSettings(within=True, permutations=permutations))
            row = {"set": truth.name, "permutations": permutations, "pairs": len(every), "found": len(found)}
            out["bands"].append(row | {"recall": len(found.keys() & every.keys()) / max(1, len(every))})
        show(out["bands"][-3:])
    return out


def speed(texts: list[str], pattern: str, rounds: int, limit: Budget) -> list[dict[str, Any]]:
    """Measure documents per second of the signatures, and of MinHash in the bare libraries."""
    from datasketch import MinHash, MinHashLSH

    settings = DedupSettings(within=True)
    sketch = settings.sketch
    shape = (sketch.bands, sketch.rows)
    sets = [gram_set(text, settings.ngram) for text in texts]
    found = [re.findall(pattern, text.lower()) for text in texts]
    words = [[" ".join(gram).encode() for gram in zip(*(each[n:] for n in range(13)), strict=False)] for each in found]
    empty = MinHash(sketch.bands * sketch.rows)

    def bare() -> None:
        for grams in words:
            empty.copy().update_batch(grams)

    sketches = [empty.copy() for _ in texts]
    for minhash, grams in zip(sketches, words, strict=True):
        minhash.update_batch(grams)

    def bare_buckets() -> None:
        index = MinHashLSH(num_perm=len(empty), params=shape)
        for number, minhash in enumerate(sketches):
            index.insert(number, minhash)
        for minhash in sketches:
            index.query(minhash)

    folder = tempfile.TemporaryDirectory()
    signatures = signatures_of(sets, settings, Path(folder.name))
    work: dict[str, Callable[[], object]] = {
        "datasketch, grams given as bytes": bare,
        "datasketch MinHashLSH, insert and query": bare_buckets,
        "buckets, by sorting bands": lambda: find_candidates(signatures, settings, advance=lambda _: None),
        "signatures, from text": lambda: [sketch(gram_set(text, settings.ngram)) for text in texts],
        "units": lambda: [units(text) for text in texts],
        "units and grams": lambda: [gram_set(text, settings.ngram) for text in texts],
        "sketch": lambda: [sketch(grams) for grams in sets],
    }
    try:
        from rensa import RMinHash

        flat = np.concatenate(sets)
        offsets = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes
        work["rensa, grams given as hashes"] = lambda: matrix(flat, offsets, sketch.bands * sketch.rows, 1)
    except ImportError:
        say("rensa is not installed; its row is omitted")
    median = median_seconds(work, rounds, limit)
    folder.cleanup()
    size = sum(len(text.encode()) for text in texts)
    return [
        {
            "what": name,
            "documents_per_second": round(len(texts) / took),
            "MB_per_second": round(size / took / 1e6, 1),
            "time_over_bare": took / median["datasketch, grams given as bytes"],
        }
        for name, took in median.items()
    ]


def main() -> None:
    """Print the tables and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument(
        "--documents", type=int, default=500, help="number of documents of each set, from its beginning"
    )
    parser.add_argument("--no-quality", action="store_true", help="measure speed only")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the speed measurement; 0: skip it")
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-dedup.json"))
    options = parser.parse_args()
    limit = budget(options)
    truths = [Truth(options.data, name, options.documents) for name in SETS]
    results: dict[str, Any] = {"documents": {truth.name: len(truth.texts) for truth in truths}}
    if not options.no_quality:
        results |= quality(truths, limit.share(1.5))
    if options.rounds:
        results["speed"] = [
            {"set": truth.name} | row
            for number, truth in enumerate(truths)
            for row in speed(truth.texts[:1000], truth.pattern, options.rounds, limit.share(len(truths) - number))
        ]
        show(results["speed"])
    write(options.output, results)


if __name__ == "__main__":
    main()
