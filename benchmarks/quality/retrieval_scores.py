"""Held-out scores of the runs of `retrieval_gain`, each run once, by chunk.

OUT/seed-N/run-NAME → bits of every held-out chunk, OFF and ON, and its leakage → OUT/seed-N/score-NAME.npz
                                              with the neighbors in OUT/larger → OUT/seed-N/score-larger-NAME.npz

Comparisons between models, seeds and levels of leakage need no other figures, so they are made from these files
(`benchmarks/quality/retrieval_summary.py`).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Budget, say
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_bytes
from pipelines.evaluation.bits_per_byte import leakage_by_chunk, measure_checkpoints
from pipelines.evaluation.settings import PerplexitySettings
from retro.checkpoints.checkpoint import Checkpoint, finished, open_checkpoint, step_folder
from retro.evaluation.bits_per_byte import ChunkScores, SetResult
from retro.evaluation.leakage import by_leakage
from retro.evaluation.sets import open_sets

NEIGHBORS = (1, 2, 4, 8, 16)
"""Numbers of neighbors that models with retrieval are scored with."""


@dataclass(frozen=True)
class Scores:
    """Scores of one run.

    Attributes:
        results: k → measurement with scores by chunk; k = 0 is retrieval OFF.
        leakage: [n] r of each scored chunk.
        chunk_length: m.
    """

    results: dict[int, SetResult]
    leakage: np.ndarray
    chunk_length: int

    def at_most(self, k: int, shared_tokens: int) -> SetResult | None:
        """Measurement over the chunks that share at most this number of tokens with a neighbor; None if there are none."""
        (level,) = by_leakage(self.results[k], self.leakage, (shared_tokens,), self.chunk_length)
        return level.result

    def share(self, shared_tokens: int) -> float:
        """Fraction of these chunks."""
        return float((self.leakage <= shared_tokens / self.chunk_length).mean())


def score_runs(out: Path, limit: Budget, max_tokens: int, larger: bool = False) -> None:
    """Score all finished runs of all seeds, except those with a score of the same checkpoint.

    Args:
        out: folder with the datastores and `seed-N`.
        limit: time limit.
        max_tokens: approximate number of tokens to score; 0 = all held-out documents.
        larger: read neighbors, and define leakage, by OUT/larger instead of the datastore of training.
    """
    runs = finished_runs(out)
    marks = {run: f"{checkpoint.fingerprint} {max_tokens}" for run, checkpoint in runs.items()}
    open_ones = [run for run in runs if _mark(score_file(run, larger)) != marks[run]]
    leakage_from = Datastore.open(out / ("larger" if larger else "lexical"))
    say(f"{len(runs)} finished runs, {len(open_ones)} to score")
    for run in limit.each(open_ones, "model"):
        say(str(run.relative_to(out)))
        scores = score(
            runs[run], leakage_from, max_tokens, leakage_from.folder if larger else Path(runs[run].folders[0])
        )
        save(score_file(run, larger), scores, marks[run])


def finished_runs(out: Path) -> dict[Path, Checkpoint]:
    """Folders of the runs with a checkpoint of the last step, by seed and name, and this checkpoint."""
    runs = [file.parent for file in sorted(out.glob("seed-*/run-*/settings.json"))]
    steps = {run: read_json(run / "settings.json")["train"]["steps"] for run in runs}
    return {run: open_checkpoint(last) for run in runs if (last := step_folder(run, steps[run])) in finished(run)}


def score_file(run: Path, larger: bool = False) -> Path:
    """The file with the scores of a run."""
    return run.with_name(f"{run.name.replace('run-', file_prefix(larger), 1)}.npz")


def file_prefix(larger: bool) -> str:
    """How the names of files with scores begin."""
    return "score-larger-" if larger else "score-"


def score(checkpoint: Checkpoint, leakage_from: Datastore, max_tokens: int, folder: Path) -> Scores:
    """Score the held-out documents of a datastore, with retrieval OFF and, if the model retrieves, ON for each k.

    Args:
        checkpoint: the run's last one.
        leakage_from: datastore of the same chunks whose neighbors define leakage.
        max_tokens: approximate number of tokens to score; 0 = all.
        folder: of the datastore.
    """
    k = NEIGHBORS if checkpoint.model.retrieves else ()
    settings = PerplexitySettings(k=k, max_tokens=max_tokens)
    sets = open_sets((), [folder], checkpoint.model, max(k, default=0))
    (measured,) = measure_checkpoints([checkpoint], sets, settings, "auto", leakage_from)
    leakage = leakage_by_chunk(sets[0], measured, leakage_from)
    assert leakage is not None
    return Scores({each.result.k: each.result for each in measured}, leakage, checkpoint.model.chunk_length)


def save(file: Path, scores: Scores, mark: str) -> None:
    """Write scores by chunk; `mark` identifies what was scored."""
    chunks = {k: result.chunks for k, result in scores.results.items()}
    first = chunks[0]
    assert first is not None
    data = io.BytesIO()
    np.savez(
        data,
        mark=np.array(mark),
        chunk_length=scores.chunk_length,
        leakage=scores.leakage,
        ids=first.ids,
        documents=first.documents,
        tokens=first.tokens,
        bytes=first.bytes,
        k=np.array(list(chunks)),
        nats=np.array([each.nats for each in chunks.values() if each is not None]),
    )
    write_bytes(file, data.getvalue())


def load(file: Path) -> Scores:
    """Read scores that `save` wrote."""
    with np.load(file) as data:
        results = {}
        documents, sizes, tokens = data["documents"], data["bytes"], data["tokens"]
        for k, nats in zip(data["k"].tolist(), data["nats"], strict=True):
            results[k] = SetResult(
                set="valid",
                k=k,
                tokens=int(tokens.sum()),
                tokens_per_second=0.0,
                nats_by_document=np.bincount(documents, nats),
                bytes_by_document=np.bincount(documents, sizes),
                chunks=ChunkScores(data["ids"], documents, nats, tokens, sizes),
            )
        return Scores(results, data["leakage"], int(data["chunk_length"]))


def load_all(out: Path, order: Sequence[str], larger: bool = False) -> dict[str, dict[int, Scores]]:
    """Read all scores: model → seed → scores.

    Args:
        out: folder with `seed-N`.
        order: names of the models in order.
        larger: read the scores with the neighbors of OUT/larger.

    Raises:
        InputError: there are none, or two runs were scored on different chunks.
    """
    found: dict[str, dict[int, Scores]] = {}
    for name in order:
        for file in sorted(out.glob(f"seed-*/{file_prefix(larger)}{name}.npz")):
            found.setdefault(name, {})[int(file.parent.name.removeprefix("seed-"))] = load(file)
    everything = [scores for seeds in found.values() for scores in seeds.values()]
    if not everything:
        raise InputError(f"{out} has no seed-*/{file_prefix(larger)}*.npz. The part `score` writes them.")
    if len({scores.results[0].bytes for scores in everything}) > 1:
        raise InputError(
            f"{out}: the runs were not scored on the same chunks. Run the part `score` again with one --minutes."
        )
    return found


def _mark(file: Path) -> str:
    """What a file scored, or an empty text."""
    if not file.exists():
        return ""
    with np.load(file) as data:
        return str(data["mark"])
