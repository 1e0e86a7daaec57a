"""Seconds of every step of a build: a weighted sum of its drivers, with coefficients fitted to observations (docs/explanation/plan.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.planning.bytes import Workload


@dataclass(frozen=True)
class Observation:
    """Times of a build.

    Attributes:
        workload: size of the build.
        seconds: of each step, by its name in `step_models`; only `neighbors` if only the search was repeated.
        crossing: interpolated nprobe at which recall reached the target.
        parquet_bytes: of `documents.parquet` in all shards and splits.
        sparse_bytes: of the inverted lists in all shards.
    """

    workload: Workload
    seconds: Mapping[str, float]
    crossing: float
    parquet_bytes: int
    sparse_bytes: int


@dataclass(frozen=True)
class StepModel:
    """Model of the seconds of a step.

    Attributes:
        drivers: workload → amounts; the seconds are their weighted sum, and grow with the first.
        shared: whether all machines work on it, or only one.
    """

    drivers: Callable[[Workload], tuple[float, ...]]
    shared: bool = True


def step_models(sample_bytes: int, fit_chunks: int) -> dict[str, StepModel]:
    """The model of every step by name; `sample_bytes` of the tokenizer and `fit_chunks` of the embedder bound two of them."""

    def of_queries(size: Workload) -> tuple[float, ...]:
        codes = size.train_chunks * min(
            1.0, size.nprobe / size.lists
        )  # of the last nprobe, half of the codes that all compare
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
        "sparse": StepModel(lambda size: (size.train_chunks, 1.0)),
        "neighbors": StepModel(of_neighbors),
    }


UNKNOWN = StepModel(lambda size: (size.chunks,))


def coefficients(drivers: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Fit non-negative coefficients [d] of drivers [n, d] to the seconds [n] by least relative error.

    Measurements are noisy, so a driver with a negative coefficient is dropped. The first driver always stays: the step is known to
    grow with it, and a plan should rather be too high. There are at most as many coefficients as different sizes.
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
    """Predicted seconds of each step on one machine like the calibrated one."""
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
    """Seconds to draw the tokenizer's sample: every text is read, as in the scan."""
    return scan_seconds * max(0.0, 1 - sample_bytes / size.text_bytes)
