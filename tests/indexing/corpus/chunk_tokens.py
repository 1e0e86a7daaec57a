"""The inverse of cutting documents into chunks."""

import numpy as np


def to_tokens(chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The tokens of a document from its chunks: chunks [n, m] and lengths [n] → tokens [t]."""
    return np.asarray(chunks)[np.arange(chunks.shape[1]) < np.asarray(lengths)[:, None]]
