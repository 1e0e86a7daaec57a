"""Report of a datastore: sizes, problems and skipped files of the corpus; with neighbors also their recall, missing
ones, and the time of a search.

Written to `report.json` and `report.html`. These files contain times, so they differ between equal builds.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from indexing.index.exact_search import exact_search, recall, stored_distances
from indexing.index.faiss_files import ivf_of
from indexing.index.sharded import ShardedIndex, Trained, Tuned
from indexing.neighbors.settings import stored_settings
from indexing.retrieval.passage_choice import candidates_of, choose_passages
from indexing.retrieval.retriever import Retriever
from indexing.similarity.overlap import overlap
from indexing.store.artifact import MANIFEST, read_manifest, stored_json
from indexing.store.datastore import SPLITS, Datastore, Split, read_report, shard_name
from indexing.store.files import write_checked
from indexing.store.remote import publish_file
from indexing.store.retrieval_set import RetrievalSet
from pipelines.cli.reports import html as report
from pipelines.cli.reports.pictures import Picture, Plot, PlotLine, histogram, line_plots
from pipelines.cli.results import Table
from pipelines.stages.generations import corpus_folders, counts_of
from pipelines.stages.index import sample_queries
from pipelines.terminal.stages import Step, summary_rows
from pipelines.terminal.units import human_bytes

log = logging.getLogger("retro")

_STORED = ("chunks", "embeddings", "index", "sparse", "ngrams", "neighbors", "suffixes", "votes")
"""Folders whose bytes are reported."""
_SAMPLE = 500
_EXAMPLES = 3


def write_index_report(datastore: Datastore, steps: Sequence[Step] = (), others: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure a finished datastore and write both reports. What has not changed is read from them.

    Without stored neighbors there are only sizes, build steps, and problems of the corpus.

    Args:
        datastore: with finished chunks.
        steps: of the build that finished it.
        others: `neighbors.extra_datastores`.

    Returns:
        the content of `report.json`.
    """
    path = datastore.folder / "report.json"
    known, sizes = read_report(datastore.folder), {name: _bytes(datastore.folder / name) for name in _STORED}
    corpus = {folder.name: counts_of(folder) for folder in corpus_folders(datastore.folder)}
    if known and not (known["fingerprint"] == datastore.fingerprint and path.with_suffix(".html").exists()):
        known = None
    if known and known["bytes"] == sizes and known.get("corpus") == corpus:
        return known
    retriever = Retriever.open(datastore.folder, *others) if datastore.has("neighbors") else None
    measured = (known or measure(datastore, retriever) | {"build": [asdict(step) for step in steps]}) | {
        "bytes": sizes,
        "corpus": corpus,
    }
    write_html(datastore, retriever, measured)
    write_checked(path, measured)
    for file in (path.with_suffix(".html"), path):
        publish_file(file)
    return measured


def measure(datastore: Datastore, retriever: Retriever | None) -> dict[str, Any]:
    """Measure all figures of the report; those of neighbors only with a retriever."""
    totals = {"fingerprint": datastore.fingerprint, "splits": {name: _totals(datastore, name) for name in SPLITS}}
    return totals | (measure_neighbors(retriever) if retriever else {})


def measure_neighbors(retriever: Retriever) -> dict[str, Any]:
    """Measure index, stored neighbors, and the time of a search."""
    datastore, folder = retriever.datastore, retriever.datastore.folder
    ids, queries, split_name = sample_queries(datastore, _SAMPLE, seed=1)
    split = datastore.split(split_name)
    near = split.neighbor_ids.gather(ids)
    counts = [read_manifest(folder / "neighbors" / shard_name(s))["counts"] for s in range(len(split.chunk_rows))]
    index: dict[str, Any] = {**stored_json(folder / "index" / "trained" / "index.json", Trained)}
    index |= stored_json(folder / "index" / "tuned" / "tuned.json", Tuned)
    return {
        "index": index,
        "search": ", ".join(sorted({_way(count["search"], index) for count in counts})),
        "recall": _recalls_of_stored(retriever, split, ids, queries),
        "recall_queries": len(ids),
        "recall_split": split_name,
        "neighbors": {
            name: _neighbor_counts(counts, name, near.shape[1]) for name in SPLITS if datastore.split(name).num_chunks
        },
        "overlap_of_nearest": _quantiles(_overlaps(split, retriever.retrieval, ids, near[:, 0])),
        "latency_ms": _latency(retriever, queries),
        "largest_list_over_mean": _skew(retriever),
    }


def _recalls_of_stored(retriever: Retriever, split: Split, ids: np.ndarray, queries: np.ndarray) -> dict[str, float]:
    """Recall of the stored neighbors of some chunks, ids [n] and embeddings [n, d]; none if they are not the
    nearest."""
    found = stored_settings(retriever.datastore)
    if found is None or not found[0].by_distance:
        return {}
    stored = stored_distances(split, ids, retriever.retrieval, range(found[0].stored))
    excluded = split.documents_of(ids)[1:] if split.name == "train" else None
    exact = _exact_distances(queries, retriever.retrieval, stored.shape[1], excluded)
    numbers = sorted(k for k in {1, 2, 10, stored.shape[1]} if k <= stored.shape[1])
    return {f"recall_at_{k}": recall(stored[:, :k], exact[:, :k]) for k in numbers}


def _way(search: str, index: dict[str, Any]) -> str:
    """The method that found the neighbors, with its number of visited lists."""
    if search == "ngrams":
        return "rare n-grams"
    return "exhaustive search" if search == "exact" else f"index, nprobe {index['nprobe']}"


def _totals(datastore: Datastore, name: str) -> dict[str, int]:
    return {key: int(sum(rows)) for key, rows in datastore.manifest["splits"][name].items()}


def _bytes(artifacts: Path) -> int:
    folders = [path.parent for path in artifacts.glob(f"*/{MANIFEST}")]
    return sum(file["bytes"] for folder in folders for file in read_manifest(folder)["files"].values())


def _neighbor_counts(counts: list[dict[str, Any]], name: str, k: int) -> dict[str, float]:
    total = {key: sum(count[name][key] for count in counts) for key in counts[0][name]}
    wanted = max(1, total["queries"] * k)
    return total | {"missing_share": 1 - total["neighbors"] / wanted}


def _exact_distances(
    queries: np.ndarray, retrieval: RetrievalSet, k: int, excluded: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
    """Distances [n, k] of the true nearest in the whole retrieval set; `excluded` are ids of the datastore itself."""
    distances = [
        exact_search(queries, split.embeddings, k, excluded if index == 0 else None)[0]
        for index, split in enumerate(retrieval.splits)
    ]
    return np.sort(np.concatenate(distances, axis=1), axis=1)[:, :k]


def _overlaps(split: Split, retrieval: RetrievalSet, ids: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Overlap r (paper, section 2.7) of sampled chunks with their nearest neighbors and continuations."""
    present = near >= 0
    tokens, lengths = retrieval.with_continuation(near[present])
    own, own_lengths = split.tokens.gather(ids[present]), split.lengths.gather(ids[present])
    return overlap(own, own_lengths, tokens, lengths)


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {name: float(np.quantile(values, q)) for name, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))}


def _latency(retriever: Retriever, queries: np.ndarray) -> dict[str, float]:
    """Milliseconds of search and reranking, without embedding, for a single query and for a query in a batch."""
    single = []
    for row in range(min(50, len(queries))):
        started = time.perf_counter()
        retriever.chunks.nearest(queries[row : row + 1], 10)
        single.append(1000 * (time.perf_counter() - started))
    started = time.perf_counter()
    retriever.chunks.nearest(queries, 10)
    batched = 1000 * (time.perf_counter() - started) / len(queries)
    return {"single_p50": float(np.median(single)), "single_p99": float(np.quantile(single, 0.99)), "batched": batched}


def _skew(retriever: Retriever) -> float | None:
    """Size of the largest inverted list over the mean, for all shards of the datastore's own index; None without
    lists."""
    index = retriever.indexes[0]
    assert isinstance(index, ShardedIndex)  # opened from its folder
    parts = [ivf for shard in index.indexes() if (ivf := ivf_of(shard)) is not None]
    if not parts:
        return None
    sizes = np.sum([[ivf.get_list_size(inverted_list) for inverted_list in range(ivf.nlist)] for ivf in parts], axis=0)
    return float(sizes.max() / max(1e-9, sizes.mean()))


def _examples(retriever: Retriever) -> list[report.NeighborExample]:
    """A few full held-out chunks with two of their neighbors: of 200 drawn ones, those that `choose_passages`
    chooses."""
    ids, _, name = sample_queries(retriever.datastore, 200, seed=2)
    split = retriever.datastore.split(name)
    ids = ids[split.without_deleted(ids) >= 0]
    full = ids[split.lengths.gather(ids) == split.chunk_length]
    ids = full if len(full) else ids
    near = retriever.retrieval.without_deleted(split.neighbor_ids.gather(ids)[:, :2])
    candidates = candidates_of(split, retriever.retrieval, ids, near)
    drawn = ids[choose_passages(candidates, _EXAMPLES, retriever.tokenizer)]
    near = split.neighbor_ids.gather(drawn)[:, :2]
    distances = stored_distances(split, drawn, retriever.retrieval, range(near.shape[1]))
    tokens, lengths = split.tokens.gather(drawn), split.lengths.gather(drawn)
    following, _ = split.with_continuation(drawn)
    documents = split.metadata(split.documents_of(drawn)[0].tolist())
    examples = []
    for row in range(len(drawn)):
        ids = retriever.retrieval.without_deleted(near[row])
        hits = zip(retriever.lookup.hits(ids, distances[row]), distances[row][ids >= 0].tolist(), strict=True)
        neighbors = [report.NeighborText(far, hit.document_id, hit.text, hit.continuation) for hit, far in hits]
        text = retriever.tokenizer.decode(tokens[row, : lengths[row]])
        continuation = retriever.tokenizer.decode(following[row, split.chunk_length :])
        examples.append(report.NeighborExample(str(documents[row]["id"]), text, continuation, neighbors))
    return examples


def plots_of(retriever: Retriever, measured: dict[str, Any]) -> list[Picture]:
    """A histogram of distances, and the recall curve of an index with nprobe."""
    split = retriever.datastore.split(measured["recall_split"])
    ids = np.sort(np.random.default_rng(3).choice(split.num_chunks, min(20_000, split.num_chunks), replace=False))
    (stored,) = split.neighbor_ids.row_shape
    ranks = [rank for rank in sorted({0, 1, stored - 1}) if rank < stored]
    distances = stored_distances(split, ids, retriever.retrieval, ranks).T
    finite = {f"neighbor {rank + 1}": row[np.isfinite(row)] for rank, row in zip(ranks, distances, strict=True)}
    plots = [histogram(finite, "squared L2 distance", "Distance to the neighbors")]
    curve = measured["index"]["curve"]
    if len(curve) > 1:
        lines = {"recall@10 after re-ranking": PlotLine([probe for probe, _ in curve], [value for _, value in curve])}
        plots.append(line_plots(Plot(lines, "nprobe", "recall@10", "Recall against exact search", log_x=True)))
    return plots


def recalls(measured: dict[str, Any]) -> list[tuple[int, float]]:
    """(k, recall at k) by rising k."""
    return sorted((int(name.rpartition("_")[2]), value) for name, value in measured["recall"].items())


def summary_table(measured: dict[str, Any]) -> Table:
    """The most important figures."""
    rows = []
    for name in SPLITS:
        totals = measured["splits"].get(name)
        if totals and totals["documents"]:
            rows.append([f"{name}: documents", f"{totals['documents']:,}"])
            rows.append([f"{name}: chunks", f"{totals['chunks']:,}"])
    rows += _neighbor_rows(measured) if "neighbors" in measured else []
    rows += [[f"{name} on disk", human_bytes(size)] for name, size in measured["bytes"].items() if size]
    return Table(["", "measured"], rows)


def _neighbor_rows(measured: dict[str, Any]) -> list[list[str]]:
    rows = [
        ["index", f"{measured['index']['key']}, nprobe {measured['index']['nprobe']}"],
        ["index: recall at 10", f"{measured['index']['recall_at_10']:.3f}"],
        ["stored neighbors: found by", measured["search"]],
    ]
    rows += [[f"stored neighbors: recall at {k}", f"{value:.3f}"] for k, value in recalls(measured)]
    for name in SPLITS:
        if name in measured["neighbors"]:
            rows.append([f"{name}: neighbors missing", f"{100 * measured['neighbors'][name]['missing_share']:.2f}%"])
    rows.append(["search, one query (p50)", f"{measured['latency_ms']['single_p50']:.2f} ms"])
    rows.append(["search, in a batch", f"{measured['latency_ms']['batched']:.3f} ms"])
    return rows


def corpus_table(measured: dict[str, Any]) -> Table:
    """Problems in the files of every generation, and files that were skipped, by suffix."""
    rows = []
    for name, counts in measured["corpus"].items():
        rows += [[name, kind, f"{count:,}"] for kind, count in sorted(counts["problems"].items())]
        for reason, suffixes in sorted(counts["skipped"].items()):
            ranked = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
            rows += [[name, f"skipped, {reason}: {suffix}", f"{count:,}"] for suffix, count in ranked]
    return Table(["files", "problem", "number"], rows)


def write_html(datastore: Datastore, retriever: Retriever | None, measured: dict[str, Any]) -> None:
    """Write `report.html` of a datastore."""
    totals = measured["splits"]["train"]
    steps = [Step(**step) for step in measured["build"]]
    header, *rows = summary_rows(steps)
    files = corpus_table(measured)
    figures = [("chunks", f"{totals['chunks']:,}", f"{totals['documents']:,} documents")]
    if retriever:
        figures += [
            ("recall@10", f"{measured['index']['recall_at_10']:.3f}", f"nprobe {measured['index']['nprobe']}"),
            ("one search", f"{measured['latency_ms']['single_p50']:.1f} ms", "index and re-ranking"),
        ]
    else:
        figures.append(("tokens", f"{totals['tokens']:,}", "without neighbors"))
    plots = plots_of(retriever, measured) if retriever else []
    report.write_report(
        datastore.folder / "report.html",
        title="Datastore",
        subtitle=f"fingerprint {measured['fingerprint']}",
        figures=figures,
        sections=[
            report.Section("Measured", table=summary_table(measured), plots=plots),
            *([report.Section("Build steps", table=Table(header, rows))] if steps else []),
            *([report.Section("Problems and skipped files", table=files)] if files.rows else []),
            *([report.Section("Chunks and their neighbors", examples=_examples(retriever))] if retriever else []),
        ],
    )
