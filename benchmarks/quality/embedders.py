"""Compare weights for the n-grams of the lexical embedder, and hash buckets for its bigrams: usefulness of the neighbors,
and recall of an IVF index.

    python -m benchmarks.quality.embedders DATASTORE [--output results.json]

For every variant, `gain` is the fraction of the next chunk's token bigrams that occur in the two nearest neighbors with
their continuations (exact search), which is the text that RETRO can copy. recall@10 is that of an IVF-PQ index which
searches 1/8 of its lists, after re-ranking. Document frequencies are those of the compared chunks.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np

from benchmarks.common import add_minutes, budget, write
from indexing.embedders import EmbedderSettings, LexicalEmbedder, fit_lexical
from indexing.index.sharded import ShardedIndex
from indexing.store.datastore import Datastore, Split
from indexing.store.sharded_array import ShardedArray
from indexing.tokenization.tokenizer import read_token_bytes
from indexing.vectors.exact_search import exact_search, recall, rerank

BUCKETS = EmbedderSettings().bigram_buckets
WEIGHTS = ((1, 1), (1, 0.5), (1, 0), (0.5, 1), (0.5, 0.5), (0.25, 0.5))
"""Pairs of (power of the idf, weight of bigrams)."""
VARIANTS = (*((*pair, BUCKETS) for pair in WEIGHTS), *((0.5, 0.5, 2**bits) for bits in (12, 14, 16, 20)))


def gain(train: Split, valid: Split, queries: np.ndarray, ids: np.ndarray) -> float:
    """Return the mean fraction of the bigrams in each query's next chunk that occur in its neighbors."""
    fractions = []
    following = valid.tokens.gather(queries + 1)
    lengths = valid.lengths.gather(queries + 1)
    for row, near in enumerate(ids):
        target = following[row][: lengths[row]].tolist()
        wanted = set(pairwise(target))
        held: set[tuple[int, int]] = set()
        for tokens, length in zip(*train.with_continuation(near), strict=True):
            text = tokens[:length].tolist()
            held |= set(pairwise(text))
        if wanted:
            fractions.append(len(wanted & held) / len(wanted))
    return float(np.mean(fractions))


def idf_of(train: Split, count: int, is_special: np.ndarray, buckets: int) -> np.ndarray:
    """Return the idf of every token and bigram bucket in the first chunks of a split."""
    with tempfile.TemporaryDirectory() as folder:
        settings = EmbedderSettings(bigram_buckets=buckets)
        fit_lexical(Path(folder), settings, train.tokens.read(0, count), train.lengths.read(0, count), is_special)
        weights = np.load(Path(folder) / "weights.npy")
    weights[len(is_special) :] *= 2  # undo the weight of bigrams and the square root
    return np.asarray(weights**2)


def embeddings_of(embedder: LexicalEmbedder, split: Split, count: int, path: Path) -> ShardedArray:
    """Embed the first chunks of a split into a file."""
    blocks = [(start, min(start + 8192, count)) for start in range(0, count, 8192)]
    parts = [embedder.embed(split.tokens.read(*block), split.lengths.read(*block)) for block in blocks]
    np.save(path, np.concatenate(parts).astype(np.float16))
    return ShardedArray([path], [count])


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument(
        "--chunks", type=int, default=100_000, help="number of chunks of the training split, from its beginning; 0: all"
    )
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-embedders.json"))
    options = parser.parse_args()
    limit = budget(options)
    datastore = Datastore.open(options.datastore)
    train, valid = datastore.train, datastore.valid
    is_special = read_token_bytes(datastore.folder / "tokenizer") == 0
    vocabulary = len(is_special)
    numbers = np.arange(valid.num_chunks - 1, dtype=np.int64)
    _, _, stop = valid.documents_of(numbers)
    queries = numbers[numbers + 1 < stop][:2000]
    count = min(options.chunks or train.num_chunks, train.num_chunks)
    rows = []
    for power, bigram, buckets in limit.each(VARIANTS, "variant"):
        weights = idf_of(train, count, is_special, buckets) ** power
        weights[:vocabulary][is_special] = 0
        weights[vocabulary:] *= bigram
        embedder = LexicalEmbedder(weights.astype(np.float32), is_special, 256, 0)
        array = embeddings_of(embedder, train, count, options.output.with_suffix(".vectors.npy"))
        vectors = embedder.embed(valid.tokens.gather(queries), valid.lengths.gather(queries))
        exact_distances, exact_ids = exact_search(vectors, array, 10)
        index = faiss.index_factory(256, "IVF1024,PQ128x4fs")
        every = array.read(0, len(array)).astype(np.float32)
        index.train(every[:: max(1, len(every) // 65_536)])
        index.add(every)
        found, _ = rerank(vectors, ShardedIndex([index], 128).search(vectors, 64), array)
        row = {
            "idf_power": power,
            "bigram_weight": bigram,
            "bigram_buckets": buckets,
            "gain": gain(train, valid, queries, exact_ids[:, :2]),
            "recall_at_10": recall(found[:, :10], exact_distances),
            "nearest_distance": float(exact_distances[:, 0].mean()),
        }
        rows.append(row)
        print("  ".join(f"{key} {value:.6g}" for key, value in row.items()), flush=True)
    options.output.with_suffix(".vectors.npy").unlink()
    write(options.output, {"chunks": count, "rows": rows})


if __name__ == "__main__":
    main()
