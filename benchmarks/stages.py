"""What the chunk, embed and neighbor stages cost beyond the bare libraries: one run, alternating.

    python benchmarks/stages.py CONFIG [--rounds 3]     # a finished datastore's TOML file

chunk against bare SentencePiece over the same texts; neighbors against bare `faiss.search` with the same queries, nprobe and
number of candidates. The embedder's rate stands alone: its floor is memory bandwidth, 2·127 rows of 1 KB for each chunk.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import seconds, write

from indexing.chunks import chunk_shard
from indexing.corpus import read_piece
from indexing.embedders import open_embedder
from indexing.neighbors import neighbors_of
from indexing.sharded_index import ShardedIndex
from indexing.store.datastore import Datastore
from indexing.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.corpus_stage import read_plan
from pipelines.settings import load


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmark-stages.json"))
    options = parser.parse_args()
    config = load(Config, options.config, [], verb="index")
    datastore = Datastore.open(config.datastore)
    train = datastore.train
    pieces = read_plan(config.datastore)[0]
    tokenizer = Tokenizer.open(config.datastore / "tokenizer")
    texts = [
        document.text for piece in pieces for document in read_piece(piece, config.corpus, on_problem=lambda _: None)
    ]
    index = ShardedIndex.open(config.datastore / "index", range(len(train.chunk_rows)))
    embedder = open_embedder(config.datastore / "embedder", tokenizer.decode)
    rows = min(20_000, train.num_chunks)
    queries = train.embeddings.read(0, rows).astype(np.float32)
    own = train.documents_of(np.arange(rows))[1:]
    tokens, lengths = np.asarray(train.tokens.read(0, rows)), np.asarray(train.lengths.read(0, rows))

    def chunk() -> None:
        with tempfile.TemporaryDirectory() as work:
            chunk_shard(
                Path(work), pieces, config.corpus, config.chunks, config.datastore / "tokenizer",
                on_problem=lambda _: None, advance=lambda _: None,
            )  # fmt: skip

    work: dict[str, Callable[[], object]] = {
        "bare tokenizer": lambda: tokenizer.encode_batch(texts),
        "chunk": chunk,
        "embed": lambda: [embedder.embed(tokens[b : b + 8192], lengths[b : b + 8192]) for b in range(0, rows, 8192)],
        "bare search": lambda: index.search(queries, config.neighbors.candidates),
        "neighbors": lambda: neighbors_of(queries, index, train, config.neighbors, excluded=own),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(options.rounds + 1):
        for name, call in work.items():
            took = seconds(call)
            if number:  # the first round warms up
                times[name].append(took)
    median = {name: statistics.median(values) for name, values in times.items()}
    text_bytes = sum(len(text.encode()) for text in texts)
    table = [
        {"stage": "chunk", "rate": f"{text_bytes / median['chunk'] / 1e6:.1f} MB/s", "time_over_bare": median["chunk"] / median["bare tokenizer"]},
        {"stage": "embed", "rate": f"{rows / median['embed']:,.0f} chunks/s", "time_over_bare": None},
        {"stage": "neighbors", "rate": f"{rows / median['neighbors']:,.0f} chunks/s", "time_over_bare": median["neighbors"] / median["bare search"]},
    ]  # fmt: skip
    print(f"{train.num_chunks:,} chunks, nprobe {index.nprobe}, {config.neighbors.candidates} candidates")
    for row in table:
        ratio = f"{row['time_over_bare']:.2f} × the bare library's time" if row["time_over_bare"] else ""
        print(f"{row['stage']:10} {row['rate']:>18}  {ratio}")
    write(options.out, {"chunks": train.num_chunks, "rows": table})


if __name__ == "__main__":
    main()
