"""Candidates of a search under a condition; the searches by terms and by n-grams share this."""

from collections.abc import Callable

import numpy as np

Condition = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Rows of queries [r] and their candidates [r, c] → the candidates, with -1 instead of excluded ones."""


def present_first(ids: np.ndarray, count: int) -> np.ndarray:
    """Columns [n, min(count, c)] of the first candidates [n, c] of each query that are not -1, then of others."""
    return np.argsort(ids < 0, axis=1, kind="stable")[:, :count]
