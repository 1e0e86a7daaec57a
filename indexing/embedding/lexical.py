"""Embed chunks by the tokens that they contain. It needs no model.

Damped TF-IDF of token unigrams and hashed bigrams, projected by a fixed Gaussian matrix. RETRO gains most from lexical
overlap (Norlund et al. 2023; Doostmohammadi et al. 2023).
"""

from pathlib import Path

import numpy as np

from indexing.embedding.settings import EmbedderSettings, unit, write_settings
from indexing.store.artifact import intact
from indexing.store.files import save_array
from indexing.store.sharded_array import open_array

_BLOCK_ROWS = 8192
_BIGRAM_WEIGHT = 0.5


def _ngrams(tokens: np.ndarray, lengths: np.ndarray, is_special: np.ndarray, buckets: int) -> np.ndarray:
    """Feature ids [n, 2t-1] int64 of unigrams (token id) and bigrams (vocabulary size + hash); -1 where there is
    none."""
    vocab_size = len(is_special)
    ids = tokens.astype(np.int64)  # [n, t]
    ids[(np.arange(tokens.shape[1]) >= lengths[:, None]) | is_special[ids]] = -1
    first, second = ids[:, :-1], ids[:, 1:]
    mixed = (first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        second.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    mixed ^= mixed >> np.uint64(29)
    bigrams = vocab_size + (mixed % np.uint64(buckets)).astype(np.int64)
    bigrams[(first < 0) | (second < 0)] = -1
    return np.concatenate([ids, bigrams], axis=1)


def _term_frequencies(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, f] → (row, feature, count) of every distinct feature of every row, without -1."""
    ordered = np.sort(features, axis=1)
    starts = np.ones(ordered.shape, dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    flat = np.flatnonzero(starts)
    counts = np.diff(np.append(flat, ordered.size))
    values = ordered.ravel()[flat]
    present = values >= 0
    return (flat // ordered.shape[1])[present], values[present], counts[present]


class LexicalEmbedder:
    """Sublinear TF-IDF of token unigrams and hashed bigrams times a Gaussian matrix.

    Args:
        weights: [vocabulary + buckets] float32 weights of the n-grams, 0 for special tokens.
        is_special: [vocabulary] bool, tokens that are not text.
        dimension: width of the embeddings.
        seed: seed of the projection.
    """

    def __init__(self, weights: np.ndarray, is_special: np.ndarray, dimension: int, seed: int) -> None:
        import torch

        self.weights, self.is_special, self.dimension = weights, is_special, dimension
        generator = np.random.default_rng(seed)
        projection = generator.standard_normal((len(weights), dimension), dtype=np.float32)
        self.projection = torch.from_numpy(projection)

    def embed(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Embedder.embed`."""
        import torch

        features = _ngrams(tokens, lengths, self.is_special, len(self.weights) - len(self.is_special))
        rows, values, counts = _term_frequencies(features)
        weights = (1 + np.log(counts, dtype=np.float32)) * self.weights[values]
        offsets = np.searchsorted(rows, np.arange(len(tokens)))
        vectors = torch.nn.functional.embedding_bag(
            torch.from_numpy(values),
            self.projection,
            torch.from_numpy(offsets),
            mode="sum",
            per_sample_weights=torch.from_numpy(weights.astype(np.float32)),
        ).numpy()
        return unit(vectors)


def fit_lexical(
    folder: Path, settings: EmbedderSettings, tokens: np.ndarray, lengths: np.ndarray, is_special: np.ndarray
) -> None:
    """Write a lexical embedder into `folder`: n-gram weights from document frequencies in a sample of chunks.

    Args:
        folder: work folder of the datastore's `embedder/`.
        settings: dimension, buckets and seed.
        tokens: [n, m] the sample.
        lengths: [n] real tokens in each.
        is_special: [vocabulary] bool, tokens that are not text (padding, beginning, end).
    """
    frequency = np.zeros(len(is_special) + settings.bigram_buckets, dtype=np.int64)
    for start in range(0, len(tokens), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        _, values, _ = _term_frequencies(_ngrams(tokens[block], lengths[block], is_special, settings.bigram_buckets))
        frequency += np.bincount(values, minlength=len(frequency))
    # Damped twice. With plain TF-IDF the rarest bigrams dominate, and chunks that share only common words form no
    # clusters. That lowers the index's recall and the value of the neighbors (docs/results/which-neighbors.md).
    weights = np.sqrt(np.log((1 + len(tokens)) / (1 + frequency))).astype(np.float32)
    weights[: len(is_special)][is_special] = 0
    weights[len(is_special) :] *= _BIGRAM_WEIGHT
    save_array(folder / "weights.npy", weights)
    save_array(folder / "is_special.npy", is_special)
    write_settings(folder, settings)


def token_weights(folder: Path) -> np.ndarray:
    """Inverse document frequency of each token, [vocabulary] float32, from the lexical embedder in a datastore's
    `embedder/`.

    Special tokens have 0. The weights of the embedder are its square roots, see `fit_lexical`.
    """
    weights, is_special = (open_array(intact(folder / f"{name}.npy")) for name in ("weights", "is_special"))
    return weights[: len(is_special)] ** 2
