"""Seconds of every step of a build: sums of what drives it, each times a coefficient that fits what was observed (docs/explanation/plan.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.planning.bytes import Workload


@dataclass(frozen=True)
class Observation:
    """What a build took.

    Attributes:
        workload: what was built.
        seconds: of each step, by its name in `step_models`; of `neighbors` alone where only the search was another one.
        crossing: the nprobe, between powers of two, at which the recall target was reached.
        parquet_bytes: of `documents.parquet` in all shards and splits.
    """

    workload: Workload
    seconds: Mapping[str, float]
    crossing: float
    parquet_bytes: int


@dataclass(frozen=True)
class StepModel:
    """How the seconds of a step grow.

    Attributes:
        drivers: of a workload: amounts whose weighted sum the seconds are, first the one that they grow with.
        shared: whether all machines work on it; otherwise one does.
    """

    drivers: Callable[[Workload], tuple[float, ...]]
    shared: bool = True


def step_models(sample_bytes: int, fit_chunks: int) -> dict[str, StepModel]:
    """The model of every step, by its name; `tokenizer.sample_bytes` and `embedder.fit_chunks` bound two of them."""

    def of_queries(size: Workload) -> tuple[float, ...]:
        codes = size.train_chunks * min(1.0, size.nprobe / size.lists)  # with the last nprobe: half of what all look at
        return size.tune_queries * codes, size.tune_queries

    def of_neighbors(size: Workload) -> tuple[float, ...]:
        return size.chunks * size.compared, size.chunks, size.chunks * (size.shards - 1)

    return {
        "scan": StepModel(lambda size: (size.text_bytes, 1.0)),
        "tokenizer": StepModel(lambda size: (min(size.text_bytes, sample_bytes), 1.0), shared=False),
        "chunk": StepModel(lambda size: (size.text_bytes, 1.0)),
        "embed: count n-grams": StepModel(lambda size: (min(size.train_chunks, fit_chunks), 1.0), shared=False),
        "embed": StepModel(lambda size: (size.chunks, 1.0)),
        "train-index": StepModel(lambda size: (float(size.trained_on) * size.lists, 1.0), shared=False),
        "add": StepModel(lambda size: (size.train_chunks, size.train_chunks * size.coarse)),
        "tune nprobe": StepModel(of_queries, shared=False),
        "neighbors": StepModel(of_neighbors),
    }


UNKNOWN = StepModel(lambda size: (size.chunks,))


def coefficients(drivers: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients [d], none negative, of drivers [n, d] that fit the seconds [n] with the least relative error.

    Measurements are noisy, and differences between them noisier: a driver whose coefficient would be negative is left out. The first
    one never is: it is what the step is known to grow with, and a plan errs on the side of more. There are no more coefficients
    than different sizes.
    """
    kept = [column for column in range(drivers.shape[1]) if drivers[:, column].any()][: len(np.unique(drivers, axis=0))]
    found = np.zeros(drivers.shape[1])
    scale = np.maximum(seconds, 1e-9)[:, None]
    while kept:
        columns = drivers[:, kept]
        units = columns.max(axis=0)  # drivers differ by many orders of magnitude
        solved = np.linalg.lstsq(columns / units / scale, seconds / scale[:, 0], rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / units
            break
        kept.pop(1 + int(np.argmin(solved[1:])))  # the only coefficient of one driver is never negative
    return found


def step_seconds(
    size: Workload, observations: Sequence[Observation], models: Mapping[str, StepModel]
) -> dict[str, float]:
    """Seconds that one machine like the calibrated one would work on each step."""
    out = {}
    for name in observations[-1].seconds:
        model = models.get(name, UNKNOWN)
        seen = [each for each in observations if name in each.seconds]
        if name == "neighbors":
            seen = [each for each in seen if each.workload.search == size.search]
        drivers = np.array([model.drivers(each.workload) for each in seen], dtype=np.float64)
        fitted = coefficients(drivers, np.array([each.seconds[name] for each in seen]))
        out[name] = float(fitted @ np.array(model.drivers(size)))
    return out


def reading_seconds(size: Workload, scan_seconds: float, sample_bytes: int) -> float:
    """What drawing the tokenizer's sample takes beyond training on it: every text is read, as in the scan."""
    return scan_seconds * max(0.0, 1 - sample_bytes / size.text_bytes)
