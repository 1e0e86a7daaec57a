"""Cost of the sparse index: rate of the build, bytes of a chunk, peak memory, time of a query.

    python -m benchmarks.speed.sparse_index DATA/msdocs_cpp/docs.jsonl.zst DATA/zh_laws/laws.jsonl.zst … --length 32

The corpora become one datastore in `--work`, with all documents in the training split. Its chunks are made first and reused. The
sparse index is built again in each run. Queries are beginnings of chunks, 10 tokens as a question has, spread evenly over the
datastore. They are searched one by one for 10 chunks, once to read the files and once measured, until --minutes are over.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, say, write
from indexing.corpus.readers import CorpusSettings
from indexing.sparse.index import FOLDER, SparseIndex
from indexing.sparse.terms import query_terms
from indexing.store.datastore import Datastore, Split
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import ChunkSettings, Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import build
from pipelines.terminal import setup_logging

_QUERY_TOKENS = 10


def main() -> None:
    """Build, search, print the figures, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+")
    parser.add_argument("--length", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("benchmark-sparse"))
    parser.add_argument("--output", type=Path, default=Path("benchmark-sparse.json"))
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    setup_logging()
    config = Config(
        datastore=options.work,
        corpus=CorpusSettings(paths=tuple(options.corpora), split=(1, 0, 0)),
        chunks=ChunkSettings(chunk_length=options.length),
    )
    build(config, make_executor(config.executor), only="chunk")
    before, start = _peak_bytes(), time.perf_counter()
    build(config, make_executor(config.executor), only="sparse", rebuild=True)
    seconds, peak = time.perf_counter() - start, _peak_bytes()
    train = Datastore.open(options.work).train
    size = sum(file.stat().st_size for file in (options.work / FOLDER).glob("*/*"))
    times = _query_times(train, Tokenizer.open(options.work / "tokenizer"), options.queries, limit)
    figures = {
        "chunks": train.num_chunks,
        "chunks_per_second": train.num_chunks / seconds,
        "bytes_per_chunk": size / train.num_chunks,
        "peak_bytes_before": before,
        "peak_bytes": peak,
        "query_ms_p50": 1e3 * statistics.median(times),
        "query_ms_p95": 1e3 * float(np.quantile(times, 0.95)),
    }
    for name, value in figures.items():
        say(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value:,}")
    write(options.output, figures)


def _query_times(train: Split, tokenizer: Tokenizer, number: int, limit: Budget) -> list[float]:
    """Return the seconds of each query, fewer if the time is over."""
    rows = np.linspace(0, train.num_chunks - 1, number, dtype=np.int64)
    tokens = train.tokens.gather(rows)[:, :_QUERY_TOKENS]
    queries = [query_terms(text) for text in tokenizer.decode_batch(list(tokens))]
    index, times = SparseIndex.open([train]), []
    for is_measured, part in ((False, limit.share(2)), (True, limit)):
        for asked, query in enumerate(queries):
            if asked and part.left <= 0:
                break
            start = time.perf_counter()
            index.search([query], 10)
            if is_measured:
                times.append(time.perf_counter() - start)
    return times


def _peak_bytes() -> int:
    """Return the peak memory of this process and its largest child so far."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main()
