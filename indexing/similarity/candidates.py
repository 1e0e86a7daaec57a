"""Candidates of a search: the first that are present, and that a condition allows."""

from collections.abc import Callable

import numpy as np

Condition = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Rows of queries [r] and their candidates [r, c] → the candidates, with -1 instead of excluded ones."""


def present_first(ids: np.ndarray, count: int) -> np.ndarray:
    """Columns [n, min(count, c)] of the first candidates [n, c] of each query that are not -1, then of others."""
    return np.argsort(ids < 0, axis=1, kind="stable")[:, :count]


def allowed_first(
    condition: Condition, rows: np.ndarray, ids: np.ndarray, scores: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first candidates of the queries `rows` that a condition allows, of ids and scores [r, c].

    Returns:
        ids [r, min(count, c)], -1 = none, and their scores, 0 for none.
    """
    ids = condition(rows, ids)
    order = present_first(ids, count)
    ids = np.take_along_axis(ids, order, 1)
    return ids, np.where(ids >= 0, np.take_along_axis(scores, order, 1), 0)
