"""Cost of the indexing stages relative to the bare libraries, and its growth: cases alternate within one run.

    python -m benchmarks.speed.index_stages stages CONFIG [--rounds 3]     # TOML file of a finished datastore
    python -m benchmarks.speed.index_stages neighbors CONFIG               # by the method of the stored neighbors
    python -m benchmarks.speed.index_stages growth [--sizes 25000 100000]  # random vectors
    python -m benchmarks.speed.index_stages executors CONFIG [--rounds 1]  # TOML file of any datastore; its corpus should be small

`stages` compares `chunk` with the bare tokenizer on the same texts, `embed` with the bare forward pass of the same
model (a lexical embedder has none), `add` with bare `faiss` on the same vectors, and `neighbors` (without the own
document, re-ranked) with bare `index.search`. Every search uses the smallest nprobe of 1, 2, 3, 4, 6, 8, 12 … with a
recall@2 of at least 0.95. The bare index is the faster one of an exhaustive index and an inverted-file index of
float16.

`neighbors` runs the stage for the first shard of the datastore by the method that found its neighbors, and compares
these with them.

`growth` prints the seconds per chunk of adding and of each kind of search, and the exponent of the whole stage's time
in the number of chunks. A sample of the chunks is searched. Each size runs in a separate process, so that its memory is
measured separately.

`executors` builds new datastores by `retro index`, in one process, on all cores and on Ray (`--executors`), and prints
the seconds of each stage. Without RAY_ADDRESS a cluster starts for each build.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, median_seconds, memory_bytes, say, seconds, write
from indexing.corpus.chunks import chunk_shard
from indexing.corpus.scan import read_slice
from indexing.embedding.embedder import open_embedder
from indexing.embedding.transformer import BATCH_TOKENS, TransformerEmbedder
from indexing.index import build as building
from indexing.index.exact_search import exact_search, recall
from indexing.index.faiss_files import ivf_of, read_index
from indexing.index.key import choose_key
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.machine import keep_freed_memory, usable_cores
from indexing.neighbors.index_search import QueryChunks, neighbors_of
from indexing.neighbors.settings import NeighborSettings, stored_settings
from indexing.store.datastore import SPLITS, Datastore, Split, shard_name
from indexing.store.files import NpyWriter, checksum, read_json
from indexing.store.sharded_array import ShardedArray
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.results import Table
from pipelines.cli.settings.load import load
from pipelines.config import Config
from pipelines.stages.generations import read_plan
from pipelines.stages.neighbors import SearchedShards, neighbor_task

_RECALL = 0.95
_CHECKED = 1000  # queries whose recall is measured
_NUM_QUERIES = 4096  # for `growth`
_NPROBES = sorted({1} | {each * 2**power for power in range(16) for each in (2, 3)})


# --- stages ----------------------------------------------------------------------------------------------------------


def stages(config: Config, rounds: int, num_queries: int, limit: Budget) -> dict[str, Any]:
    """Measure all stages, print the table and return its rows."""
    datastore = Datastore.open(config.datastore)
    rows = text_stages(config, datastore, rounds, limit.share(3))
    rows.append(add_stage(datastore, rounds, limit.share(2)))
    rows += neighbor_stage(config, datastore, rounds, num_queries, limit)
    print(f"{datastore.train.num_chunks:,} chunks, {torch.get_num_threads()} threads")
    for row in rows:
        bare = f"{row['of_bare']:.2f} × the bare library's rate ({row['bare']})" if row["of_bare"] else ""
        print(f"{row['stage']:18} {row['rate']:>12,.0f} {row['unit']:10} {bare}")
    return {"chunks": datastore.train.num_chunks, "rows": rows}


def text_stages(config: Config, datastore: Datastore, rounds: int, limit: Budget) -> list[dict[str, Any]]:
    """Measure chunking and embedding."""
    tokenizer, train = Tokenizer.open(datastore.folder / "tokenizer"), datastore.train
    pieces = read_plan(datastore.folder)[0]
    documents = [each for piece in pieces for each in read_slice(piece, config.corpus, on_problem=lambda _: None)]
    texts = ["".join(document.blocks()) for document in documents]
    embedder = open_embedder(datastore.folder / "embedder", tokenizer.decode, config.embedder)
    rows = min(512 if isinstance(embedder, TransformerEmbedder) else 32_768, train.num_chunks)
    tokens, lengths = np.asarray(train.tokens.read(0, rows)), np.asarray(train.lengths.read(0, rows))

    def chunk() -> None:
        with tempfile.TemporaryDirectory() as work:
            chunk_shard(
                Path(work), pieces, config.corpus, config.chunks, tokenizer,
                on_problem=lambda _: None, advance=lambda _: None,
            )  # fmt: skip

    work: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: tokenizer.encode_batch(texts),
        "chunk": chunk,
        "embed": lambda: embedder.embed(tokens, lengths),
    }
    if isinstance(embedder, TransformerEmbedder):
        work["forward"] = bare_forward(embedder, tokens, lengths)
    took = median_seconds(work, rounds, limit)
    text_bytes = sum(len(text.encode()) for text in texts)
    return [
        row("chunk", text_bytes / took["chunk"], "bytes/s", took["tokenizer"] / took["chunk"], "tokenizer"),
        row("embed", rows / took["embed"], "chunks/s", took.get("forward", 0) / took["embed"], "transformer's forward"),
    ]


def row(stage: str, rate: float, unit: str, of_bare: float, bare: str) -> dict[str, Any]:
    """Return a row of the table; `of_bare` is 0 if there is no bare library."""
    return {"stage": stage, "rate": rate, "unit": unit, "of_bare": of_bare or None, "bare": bare}


def bare_forward(embedder: TransformerEmbedder, tokens: np.ndarray, lengths: np.ndarray) -> Callable[[], None]:
    """Return the bare forward pass on the batches of the embedder, tokenized in advance."""
    texts = [embedder.decode(line[:length]) for line, length in zip(tokens, lengths, strict=True)]
    encoded = embedder.tokenizer(texts, truncation=True)
    order = sorted(range(len(texts)), key=lambda number: len(encoded["input_ids"][number]))
    batches = []
    while order:
        longest = len(encoded["input_ids"][order[-1]])
        taken, order = (
            order[-max(1, BATCH_TOKENS // longest) :],
            order[: -max(1, BATCH_TOKENS // longest)],
        )
        batch = {key: [values[number] for number in taken] for key, values in encoded.items()}
        batches.append(embedder.tokenizer.pad(batch, return_tensors="pt").to(embedder.device))

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches:
                embedder.model(**batch)

    return forward


def add_stage(datastore: Datastore, rounds: int, limit: Budget) -> dict[str, Any]:
    """Compare adding the first shard to the index with adding and writing the same vectors with Faiss."""
    import faiss

    trained = datastore.folder / "index" / "trained"
    vectors = datastore.train.embeddings.shard(0)
    floats, ids = np.asarray(vectors, dtype=np.float32), np.arange(len(vectors))

    def bare() -> None:
        index = faiss.read_index(str(trained / "trained.faiss"))
        index.add_with_ids(floats, ids)
        with tempfile.TemporaryDirectory() as work:
            faiss.write_index(index, f"{work}/vectors.faiss")

    def add() -> None:
        with tempfile.TemporaryDirectory() as work:
            building.add_shard(Path(work), trained, vectors, 0, advance=lambda _: None)

    took = median_seconds({"bare": bare, "add": add}, rounds, limit)
    return row("add", len(vectors) / took["add"], "chunks/s", took["bare"] / took["add"], "faiss add")


def neighbor_stage(
    config: Config, datastore: Datastore, rounds: int, num_queries: int, limit: Budget
) -> list[dict[str, Any]]:
    """Measure each kind of search, and the fastest bare search with the required recall."""
    keep_freed_memory()  # as the stage does
    train, settings = datastore.train, config.neighbors
    sample = np.sort(np.random.default_rng(0).choice(train.num_chunks, min(_CHECKED, train.num_chunks), replace=False))
    checked = train.embeddings.gather(sample).astype(np.float32), train.documents_of(sample)[1:]
    exact = exact_search(checked[0], train.embeddings, 2, checked[1])[0]
    searched: dict[str, Any] = {
        "neighbors, index": ShardedIndex.open(datastore.folder / "index", range(len(train.chunk_rows))),
        "neighbors, exact": ProductIndex(train.embeddings),
    }

    def recall_at_2(index: Any, nprobe: int) -> float:
        distances = neighbors_of(QueryChunks(checked[0], own=checked[1]), index, train, settings, nprobe)[1]
        return recall(distances[:, :2], exact)

    found, chosen = dict[str, float](), dict[str, int]()
    for name, searcher in searched.items():
        for nprobe in _NPROBES:
            found[name] = recall_at_2(searcher, nprobe)
            if found[name] >= _RECALL or nprobe >= searcher.max_nprobe:
                break
        chosen[name] = min(nprobe, searcher.max_nprobe)
        say(f"{name} with recall@2 of {found[name]:.3f}: nprobe {chosen[name]} of {searcher.max_nprobe}")
    bare_ones = bare_indexes(train, checked, exact)
    tried = {
        name: min(seconds(partial(index.search, checked[0], settings.candidates)) for _ in range(3))
        for name, index in bare_ones.items()
    }
    bare = min(tried, key=lambda name: tried[name])
    say(
        "bare searches with this recall, seconds for the same queries:", {name: round(tried[name], 3) for name in tried}
    )

    def searches(queries: np.ndarray, own: tuple[np.ndarray, np.ndarray]) -> dict[str, Callable[[], object]]:
        ours = {
            name: partial(neighbors_of, QueryChunks(queries, own=own), index, train, settings, chosen[name])
            for name, index in searched.items()
        }
        return {**ours, bare: partial(bare_ones[bare].search, queries, settings.candidates)}

    # An upper bound of the time, because an exhaustive search reads all embeddings in each call.
    once = sum(map(seconds, searches(*checked).values()))
    fitting = len(sample) * limit.left / (rounds + 1) / once
    count = int(min(num_queries, train.num_chunks, max(len(sample), fitting)))
    say(f"{count:,} queries in a round")
    first = (train.num_chunks - count) // 2
    ids = np.arange(first, first + count)
    queries = train.embeddings.gather(ids).astype(np.float32)
    took = median_seconds(searches(queries, train.documents_of(ids)[1:]), rounds, limit)
    return [
        row(f"{name} ({found[name]:.3f})", len(ids) / took[name], "chunks/s", took[bare] / took[name], bare)
        for name in searched
    ]


def bare_indexes(train: Split, checked: tuple[np.ndarray, Any], exact: np.ndarray) -> dict[str, Any]:
    """Return Faiss indexes that reach a recall@2 of 0.95 without re-ranking."""
    import faiss

    vectors = train.embeddings.read(0, train.num_chunks).astype(np.float32)
    flat = faiss.IndexFlatL2(vectors.shape[1])
    flat.add(vectors)
    found = {"IndexFlatL2": flat}
    whole = read_index(train.folder / "index" / "trained" / "trained.faiss")
    trained = ivf_of(whole)
    if trained is None:
        return found
    inverted: Any = faiss.IndexIVFScalarQuantizer(
        trained.quantizer, vectors.shape[1], trained.nlist, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_L2, False
    )
    inverted.train(vectors[:1000])
    inverted.add(vectors)
    inverted.referenced_objects = [whole]
    for nprobe in _NPROBES:
        inverted.nprobe = min(nprobe, trained.nlist)
        distances, ids = inverted.search(checked[0], 512)
        own = (ids >= checked[1][0][:, None]) & (ids < checked[1][1][:, None])
        nearest = np.sort(np.where(own, np.inf, distances), axis=1)[:, :2]
        if recall(nearest, exact) >= _RECALL or nprobe >= trained.nlist:
            break
    return found | {f"IVF{trained.nlist},SQfp16 nprobe {inverted.nprobe}": inverted}


# --- neighbors -------------------------------------------------------------------------------------------------------


def stored_neighbors(config: Config, rounds: int, limit: Budget) -> dict[str, Any]:
    """Measure the stage `neighbors` with the first shard of a datastore that was built at once, without others."""
    datastore = Datastore.open(config.datastore)
    found = stored_settings(datastore)
    assert found is not None, "the datastore has no neighbors"
    settings, method = found
    searched = (SearchedShards(datastore.folder, range(len(datastore.train.chunk_rows)), 0, ""),)
    splits, equal = [datastore.split(name) for name in SPLITS], set[bool]()

    def search() -> None:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            neighbor_task(work, datastore.folder, 0, settings, searched, method, None, advance=lambda _: None)
            ids = [np.load(work / split.name / "ids.npy") for split in splits]
        equal.add(all(map(np.array_equal, ids, [split.neighbor_ids.shard(0) for split in splits])))

    chunks = sum(split.chunk_rows[0] for split in splits)
    rate = chunks / median_seconds({"neighbors": search}, rounds, limit)["neighbors"]
    print(
        f"{method}: {rate:,.0f} chunks/s with {torch.get_num_threads()} threads; equal to the stored ones: {equal == {True}}"
    )
    return {"method": method, "chunks": chunks, "rate": rate, "equal": equal == {True}}


# --- growth ----------------------------------------------------------------------------------------------------------


def growth(sizes: list[int], dimension: int, shards: list[int], limit: Budget) -> dict[str, Any]:
    """Measure each size and number of shards in a separate process; fit the exponents over the sizes."""
    rows = []
    command = [sys.executable, "-m", "benchmarks.speed.index_stages", "one", "--dimension", str(dimension)]
    for size, count in limit.each(list(product(sizes, shards)), "size", lambda case: case[0]):
        say(f"{size:,} chunks in {count} shards …", file=sys.stderr)
        arguments = ["--sizes", str(size), "--shards", str(count)]
        out = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(out.stdout.splitlines()[-1]))
        say(rows[-1])
    fitted = {}
    for stage in ("add", "index", "exact"):
        of_stage = [line for line in rows if line["shards"] == shards[0] and stage in line]
        points = [(line["chunks"], line[stage] * line["chunks"]) for line in of_stage]
        if len(points) > 1:
            chunks, took = np.log(np.array(points).T)
            fitted[stage] = float(np.polyfit(chunks, took, 1)[0])
    print("exponents of the time for all chunks:", {stage: f"{value:.2f}" for stage, value in fitted.items()})
    return {"rows": rows, "exponents": fitted}


def one(size: int, dimension: int, num_shards: int) -> dict[str, Any]:
    """Return the seconds per chunk of each part at one size."""
    with tempfile.TemporaryDirectory() as folder:
        embeddings = draw(Path(folder), size, dimension, num_shards)
        train = Split(Path(folder), "train", tuple(np.diff(embeddings.starts)), (1,) * num_shards, 64, 0)
        settings = building.IndexSettings(recall_target=0.8)
        key = train_index(train, settings)
        took = {"add": seconds(lambda: add_shards(train)) / size}
        ids = np.sort(np.random.default_rng(1).choice(size, min(size, _NUM_QUERIES), replace=False))
        queries, own = embeddings.gather(ids).astype(np.float32), (ids, ids + 1)
        searched = {
            "index": ShardedIndex.open(Path(folder) / "index", range(num_shards)),
            "exact": ProductIndex(embeddings),
        }
        for name, index in searched.items():

            def search(index: Any = index) -> None:
                # Random vectors have no clusters, so nprobe is fixed instead of tuned.
                neighbors_of(QueryChunks(queries, own=own), index, train, NeighborSettings(rerank="embeddings"), 64)

            search()
            took[name] = seconds(search) / len(ids)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "chunks": size,
            "shards": num_shards,
            "key": key,
            **took,
            "anonymous_mb": memory_bytes("RssAnon") / 1e6,
            "peak_mb": peak / 1e3,
        }


def train_index(train: Split, settings: building.IndexSettings) -> str:
    """Train the index of some embeddings in folder / "index", and return its key."""
    index = train.folder / "index"
    key = choose_key(train.num_chunks, train.embeddings.row_shape[0], settings)
    for name in ("trained", "tuned", *map(shard_name, range(len(train.chunk_rows)))):
        (index / name).mkdir(parents=True)
    sample = building.training_sample(train, building.sample_size(train.num_chunks, key, 40), settings.seed)
    building.train(index / "trained", key, sample, settings.seed)
    return key


def add_shards(train: Split) -> None:
    """Add the embeddings to the trained index."""
    trained = train.folder / "index" / "trained"
    for shard, first in enumerate(train.embeddings.starts[:-1].tolist()):
        work = trained.with_name(shard_name(shard))
        building.add_shard(work, trained, train.embeddings.shard(shard), first, advance=lambda _: None)


def draw(folder: Path, size: int, dimension: int, num_shards: int) -> ShardedArray:
    """Write random float16 unit vectors around √size centers in shards of equal size."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((int(size**0.5), dimension), dtype=np.float32)
    rows = [len(part) for part in np.array_split(np.empty(size, dtype=bool), num_shards)]
    paths = [folder / "embeddings" / shard_name(shard) / "train.npy" for shard in range(num_shards)]
    for path, count in zip(paths, rows, strict=True):
        path.parent.mkdir(parents=True)
        with NpyWriter(path, np.float16, (dimension,)) as file:
            for start in range(0, count, 65_536):
                block = min(65_536, count - start)
                vectors = centers[rng.integers(0, len(centers), block)]
                vectors = vectors + rng.standard_normal(vectors.shape, dtype=np.float32)
                file.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return ShardedArray(paths, rows)


# --- executors -------------------------------------------------------------------------------------------------------


EXECUTORS = {"one": ["--executor.workers", "1"], "cores": [], "ray": ["--executor.kind", "ray"]}
"""Where tasks run → options: in one process, on all cores, on Ray."""


def executors(config: Path, kinds: list[str], rounds: int, limit: Budget) -> dict[str, Any]:
    """Build the same datastore by each executor in turn; returns the median seconds of each stage and of the whole
    command, and the CPU seconds of the command.

    Raises:
        RuntimeError: their files differ.
    """
    taken: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for _ in limit.rounds(rounds):
        with tempfile.TemporaryDirectory() as work:
            for kind, stages_of_kind in taken.items():
                for stage, took in index_seconds(config, kind, Path(work) / kind).items():
                    stages_of_kind.setdefault(stage, []).append(took)
            first, *others = (checksums(Path(work) / kind) for kind in taken)
            if any(each != first for each in others):
                raise RuntimeError(f"{config}: the executors built different files")
    medians = {kind: {stage: statistics.median(took) for stage, took in of.items()} for kind, of in taken.items()}
    rows = [[stage, *(f"{medians[kind][stage]:.1f}" for kind in medians)] for stage in medians[kinds[0]]]
    say(markdown(Table(["seconds", *medians], rows)))
    return {"config": str(config), "rounds": rounds, "seconds": medians, "cores": usable_cores()}


def checksums(datastore: Path) -> dict[str, str]:
    """The checksum of every file but the reports, which contain times."""
    files = (path for path in datastore.rglob("*") if path.is_file() and path.stem != "report")
    return {str(path.relative_to(datastore)): checksum(path) for path in files}


def index_seconds(config: Path, kind: str, datastore: Path) -> dict[str, float]:
    """Build a datastore in a separate process; returns the seconds of each stage, and of the whole command."""
    command = [
        sys.executable,
        "-m",
        "pipelines.cli",
        "index",
        str(config),
        "--datastore",
        str(datastore),
        *EXECUTORS[kind],
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took: dict[str, float] = {}
    for step in read_json(datastore / "report.json")["build"]:
        took[step["stage"]] = took.get(step["stage"], 0.0) + step["seconds"]
    return took | {"whole command": whole, "whole command, CPU": cpu}


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["stages", "neighbors", "growth", "executors", "one"])
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--queries",
        type=int,
        default=65_536,
        help="most queries of a search; fewer if a round does not fit into --minutes",
    )
    parser.add_argument("--sizes", nargs="*", type=int, default=[25_000, 100_000, 400_000])
    parser.add_argument("--shards", nargs="*", type=int, default=[4])
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--executors", nargs="+", choices=[*EXECUTORS], default=[*EXECUTORS])
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-indexing.json"))
    options = parser.parse_args()
    limit = budget(options)
    if options.part == "one":
        print(json.dumps(one(options.sizes[0], options.dimension, options.shards[0])))
    elif options.part == "growth":
        write(options.output, growth(options.sizes, options.dimension, options.shards, limit))
    elif options.part == "executors":
        write(options.output, executors(options.config, options.executors, options.rounds, limit))
    else:
        config = load(Config, options.config, [], verb="index")
        measured = partial(stages, num_queries=options.queries) if options.part == "stages" else stored_neighbors
        write(options.output, measured(config, options.rounds, limit=limit))


if __name__ == "__main__":
    main()
