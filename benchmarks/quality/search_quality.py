"""Bits per byte against recall of the neighbor search: what does a trained model lose by a faster search?

    python -m benchmarks.quality.search_quality RUN... --output FOLDER [--max-tokens 0 --minutes 0]

Each RUN is a finished run with retrieval, for example of `benchmarks.quality.retrieval_gain`. Its datastore needs an
IVF index. The held-out chunks are searched again:

| search | |
|---|---|
| exact | all embeddings; defines recall |
| n lists | candidates by the codes of the index in n inverted lists, re-ranked by the embeddings (`neighbors.search = "index"`) |
| n lists, not re-ranked | the order of the codes (`neighbors.rerank = "none"`) |
| random | chunks drawn at random |

The numbers of lists are powers of two, those whose recall@2 is nearest to --recalls. The model reads the neighbors that
each search finds. Its training is not changed. The share of the gain that is kept is (OFF - ON) / (OFF - ON with exact
neighbors). Recall@k is the share of the first k found that are as near as the exact k nearest, over all held-out
chunks. So ties between identical chunks are no misses, as in `index.recall_target` (recall@10).

By default few held-out tokens are scored. Results are stored in FOLDER after every measurement, so the
benchmark resumes. It prints Markdown tables, and writes a plot to FOLDER/search_quality.html.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, measured_on, say
from indexing.index.exact_search import recall
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.index_search import Index, QueryChunks, neighbors_of
from indexing.neighbors.settings import NeighborSettings
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from pipelines.cli.reports.html import Section, write_report
from pipelines.cli.reports.pictures import Picture, Plot, PlotLine, line_plots
from pipelines.cli.results import Table
from pipelines.terminal.progress import progress
from retro.checkpoints.checkpoint import Checkpoint, load_model, open_checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.device import choose_inference_placement
from retro.evaluation.bits_per_byte import SetResult
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.sets import open_sets
from retro.evaluation.settings import EvaluationSettings

RECALL_AT = (2, 4, 10)
_OFF = NeighborUse(0)


@dataclass(frozen=True)
class Search:
    """Neighbors of the held-out chunks from one search.

    Attributes:
        name: as in the tables.
        recall: recall@k for each k of `RECALL_AT`.
        use: how a model reads them.
    """

    name: str
    recall: tuple[float, ...]
    use: NeighborUse


# --- searching -------------------------------------------------------------------------------------------------------


@cache
def searches(folder: Path, recalls: tuple[float, ...], not_reranked: tuple[int, ...]) -> list[Search]:
    """Search the held-out chunks of a datastore in all ways, from exact to random.

    Raises:
        InputError: its index has no inverted lists.
    """
    datastore = Datastore.open(folder)
    train, held_out = datastore.train, datastore.split("valid")
    index = ShardedIndex.open(datastore.folder / "index", range(len(train.embeddings.starts) - 1))
    if index.max_nprobe < 2:
        raise InputError(
            f"{folder}: its index has no inverted lists. Set index.factory or index.flat_below, and rebuild."
        )
    queries = to_float32(held_out.embeddings.read(0, held_out.num_chunks))

    def found(
        index: Index, nprobe: int | None = None, rerank: Literal["embeddings", "none"] = "embeddings"
    ) -> tuple[np.ndarray, np.ndarray]:
        return neighbors_of(QueryChunks(queries), index, train, NeighborSettings(rerank=rerank), nprobe)[:2]

    exact = found(ProductIndex(train.embeddings))

    def named(name: str, nearest: tuple[np.ndarray, np.ndarray]) -> Search:
        ids, distances = nearest
        recalls = tuple(recall(distances[:, :k], exact[1][:, :k]) for k in RECALL_AT)
        search = Search(name, recalls, NeighborUse(1, found=ids))
        say(f"{folder.parent.name}/{folder.name}: {name}: " + recalls_of(search))
        return search

    ladder: dict[int, Search] = {}
    nprobe = 1
    while not ladder or (nprobe <= index.max_nprobe and max(s.recall[0] for s in ladder.values()) < max(recalls)):
        ladder[nprobe] = named(_lists(nprobe), found(index, nprobe))
        nprobe *= 2
    chosen = {min(ladder.values(), key=lambda each: abs(each.recall[0] - target)).name for target in recalls}
    return [
        named("exact", exact),
        *(each for each in reversed(ladder.values()) if each.name in chosen),
        *(
            named(f"{_lists(n)}, not re-ranked", found(index, n, rerank="none"))
            for n in sorted(not_reranked, reverse=True)
        ),
        Search("random", (0.0,) * len(RECALL_AT), NeighborUse(1, "random")),
    ]


def _lists(number: int) -> str:
    return f"{number} list{'s' if number > 1 else ''}"


def recalls_of(search: Search) -> str:
    """Return the recalls of a search as text."""
    return ", ".join(f"recall@{k} {value:.3f}" for k, value in zip(RECALL_AT, search.recall, strict=True))


# --- measuring -------------------------------------------------------------------------------------------------------


class RunResults:
    """Measurements of one run, stored in a file after each: name of the search and k → bits by document.

    Args:
        folder: of the files.
        checkpoint: the run's.
        max_tokens: approximate number of tokens to score; 0 = all.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, max_tokens: int) -> None:
        self.checkpoint, self.max_tokens = checkpoint, max_tokens
        self.run = checkpoint.path.parent.parent
        self.file = folder / f"{checkpoint.fingerprint[:16]}-{max_tokens}.json"
        self.rows: dict[str, Any] = read_json(self.file)["rows"] if self.file.exists() else {}

    @property
    def name(self) -> str:
        """`tidb: copy` for the run `tidb/seed-0/run-copy`."""
        return f"{self.run.parent.parent.name}: {self.run.name.removeprefix('run-')}"

    def add(self, search: str, k: int, result: SetResult) -> None:
        """Store a measurement."""
        self.rows[_key(search, k)] = {
            "nats": result.nats_by_document.tolist(),
            "bytes": result.bytes_by_document.tolist(),
            "tokens": result.tokens,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"run": str(self.run), "step": self.checkpoint.step, "rows": self.rows})

    def get(self, search: str, k: int) -> SetResult | None:
        """Return a measurement, or None."""
        row = self.rows.get(_key(search, k))
        return row and SetResult("valid", k, row["tokens"], 0.0, np.array(row["nats"]), np.array(row["bytes"]))


def _key(search: str, k: int) -> str:
    return f"{search}, k = {k}" if k else "OFF"


def measure_run(results: RunResults, found: Sequence[Search], ks: Sequence[int], limit: Budget) -> None:
    """Measure a run with every search and k that is not yet stored, and OFF."""
    wanted = [("OFF", _OFF), *((each.name, replace(each.use, k=k)) for each in found for k in ks)]
    missing = [(name, use) for name, use in wanted if results.get(name, use.k) is None]
    if not missing:
        return
    checkpoint = results.checkpoint
    (evaluation_set,) = open_sets((), [Path(checkpoint.folders[0])], checkpoint.model, 0)
    placement = choose_inference_placement("auto", checkpoint.settings["train"]["precision"])
    window = checkpoint.settings["data"]["sequence_length"]
    settings = EvaluationSettings(window=window, max_tokens=results.max_tokens)
    evaluator = Evaluator(load_model(checkpoint, placement.device), placement, settings, progress=progress)
    for name, use in limit.each(missing, "measurement"):
        result = evaluator.score(evaluation_set, use, note=name)
        results.add(name, use.k, result)
        say(f"{results.name}, {_key(name, use.k)}: {result.bits_per_byte:.4f} bits per byte")


# --- tables and a plot -----------------------------------------------------------------------------------------------


def kept(off: SetResult, on: SetResult, exact: SetResult, rounds: int = 1000) -> tuple[float, float, float]:
    """Return the share of the gain with exact neighbors that is kept, and its 95% interval of bootstraps over
    documents."""
    nats = np.stack([each.nats_by_document for each in (off, on, exact)])[:, off.bytes_by_document > 0]
    drawn = np.random.default_rng(0).integers(0, nats.shape[1], (rounds, nats.shape[1]))
    share, shares = ((each[0] - each[1]) / (each[0] - each[2]) for each in (nats.sum(1), nats[:, drawn].sum(2)))
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(share), float(low), float(high)


def table_of(results: RunResults, found: Sequence[Search], ks: Sequence[int]) -> Table:
    """Return a row for each search: recall, and for each k bits per byte, change against OFF, and share of the gain
    kept."""
    header = ["search", *(f"recall@{k}" for k in RECALL_AT)]
    header += [text for k in ks for text in (f"bits per byte, k = {k}", "against OFF", "gain kept")]
    off, rows = results.get("OFF", 0), []
    for each in found:
        row = [each.name, *(f"{value:.2f}" for value in each.recall)]
        for k in ks:
            on, exact = results.get(each.name, k), results.get("exact", k)
            if off is None or on is None or exact is None:
                row += ["", "", ""]
                continue
            share, low, high = kept(off, on, exact)
            change = 100 * (on.bits_per_byte / off.bits_per_byte - 1)
            row += [f"{on.bits_per_byte:.4f}", f"{change:+.1f}%", f"{share:.1%} ({low:.1%} to {high:.1%})"]
        rows.append(row)
    return Table(header, rows)


def plot_of(measured: Sequence[tuple[RunResults, list[Search]]], k: int) -> Picture:
    """Plot the share of the gain kept against recall@2, a line for each run."""
    lines = {}
    for results, found in measured:
        off, exact = results.get("OFF", 0), results.get("exact", k)
        points = sorted(
            (each.recall[0], kept(off, on, exact)[0])
            for each in found
            if off and exact and (on := results.get(each.name, k)) is not None
        )
        lines[results.name] = PlotLine([x for x, _ in points], [y for _, y in points])
    return line_plots(Plot(lines, "recall@2 of the search", "share of the gain kept", f"k = {k}"))


def main() -> None:
    """Measure all runs, print tables, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/search-quality"))
    parser.add_argument("--k", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--recalls", nargs="+", type=float, default=[0.95, 0.8, 0.5, 0.3])
    parser.add_argument("--not-reranked", nargs="*", type=int, default=[32, 1], help="lists of the searches without it")
    parser.add_argument("--max-tokens", type=int, default=4_000, help="held-out tokens to score; 0: all")
    parser.add_argument("--threads", type=int, default=0)
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    say(measured_on())
    measured = []
    for number, run in enumerate(options.runs):
        results = RunResults(options.output, open_checkpoint(run), options.max_tokens)
        folder = Path(results.checkpoint.folders[0])
        try:
            found = searches(folder, tuple(options.recalls), tuple(options.not_reranked))
        except InputError as error:
            parser.error(str(error))
        measure_run(results, found, options.k, limit.share(len(options.runs) - number))
        measured.append((results, found))
    sections = [Section(results.name, table=table_of(results, found, options.k)) for results, found in measured]
    for section, (results, _) in zip(sections, measured, strict=True):
        assert section.table is not None
        off = results.get("OFF", 0)
        note = f"{off.tokens:,} held-out tokens, OFF {off.bits_per_byte:.4f}" if off else ""
        say(f"\n## {section.title}\n\n{note}\n\n{markdown(section.table)}")
    sections.append(Section("Gain kept", plots=[plot_of(measured, k) for k in options.k]))
    write_report(options.output / "search_quality.html", title="Search quality", subtitle="", sections=sections)


if __name__ == "__main__":
    main()
