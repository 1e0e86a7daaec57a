"""Tokens of a document from its chunks."""

import numpy as np


def to_tokens(chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Join the chunks of a document: chunks [n, m] and lengths [n] → tokens [t]."""
    return np.asarray(chunks)[np.arange(chunks.shape[1]) < np.asarray(lengths)[:, None]]
