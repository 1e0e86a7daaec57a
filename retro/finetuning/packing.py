"""Pack examples into rows of equal length. Each example starts at a chunk."""

import numpy as np


def pack(lengths: np.ndarray, row_length: int, chunk_length: int, seed: int) -> list[list[int]]:
    """The examples of each row, in order: the longest first, each into the fullest row that has room for it (best fit).

    Args:
        lengths: [n] tokens of each example; longer ones are cut to a row.
        row_length: tokens of a row.
        chunk_length: m; an example begins at a multiple of it.
        seed: of the order of examples of equal length.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # number of occupied chunks → rows
    for example, length in zip(order.tolist(), np.minimum(lengths[order], row_length).tolist(), strict=True):
        most = (row_length - length) // chunk_length
        taken = next((taken for taken in range(most, 0, -1) if open_rows.get(taken)), 0)
        if taken:
            row = open_rows[taken].pop()
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(example)
        open_rows.setdefault(taken - -length // chunk_length, []).append(row)
    return rows


def alone(lengths: np.ndarray) -> list[list[int]]:
    """One row for each example, in order."""
    return [[number] for number in range(len(lengths))]
