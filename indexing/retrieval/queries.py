"""Queries of a search: checked, then embedded as unit vectors, or decoded to texts for their terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from indexing.embedding.settings import Embedder
from indexing.store.errors import InputError
from indexing.tokenization.texts import as_texts
from indexing.tokenization.tokenizer import Tokenizer

Queries = str | Sequence[str] | Sequence[np.ndarray] | np.ndarray
"""Texts (a string is one), token ids [t] of each, or vectors [n, d] float."""

Retrieval = Literal["dense", "sparse", "hybrid"]
"""How chunks are found: by embeddings, by terms (BM25), or by both."""

_PADDED_TOKENS = 2**22  # tokens of texts embedded together, including padding


@dataclass(frozen=True)
class QueryEmbedder:
    """Embeds queries of any kind as the chunks of a datastore are embedded."""

    tokenizer: Tokenizer
    embedder: Embedder

    def vectors(self, queries: Queries) -> np.ndarray:
        """Queries → unit vectors [n, d] float32. Texts and token ids may have any length.

        Raises:
            InputError: a text is empty, a token id is not in the vocabulary, or vectors have another width, are zero or
                not finite.
        """
        if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            return self._unit(queries)
        texts, rows = _checked(queries, self.tokenizer)
        if not texts and not rows:
            return np.empty((0, self.embedder.dimension), dtype=np.float32)
        return self._embed(self.tokenizer.encode_batch(texts) if texts else rows)

    def _embed(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Token ids [t] of each query → unit vectors [n, d] float32."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        if len(rows) > 1 and len(rows) * lengths.max() > _PADDED_TOKENS:
            # Batches of similar length: one long text must not pad a thousand short ones to its length.
            vectors = np.empty((len(rows), self.embedder.dimension), dtype=np.float32)
            for half in np.array_split(np.argsort(lengths, kind="stable"), 2):
                vectors[half] = self._embed([rows[row] for row in half])
            return vectors
        tokens = np.full((len(rows), max(1, *lengths)), self.tokenizer.pad_id, dtype=np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return self.embedder.embed(tokens, lengths)

    def _unit(self, vectors: np.ndarray) -> np.ndarray:
        if vectors.ndim != 2 or vectors.shape[1] != self.embedder.dimension:
            raise InputError(
                f"vectors of shape {list(vectors.shape)}: must be [queries, {self.embedder.dimension}], as embedded here."
            )
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        if not np.isfinite(norms).all() or (norms == 0).any():
            raise InputError("a vector to search for is zero or holds numbers that are not finite.")
        return (vectors / norms).astype(np.float32)


def query_texts(queries: Queries, tokenizer: Tokenizer) -> list[str]:
    """Queries → texts, for a search by terms.

    Raises:
        InputError: queries are vectors, a text is empty, or a token id is not in the vocabulary.
    """
    if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
        raise InputError("sparse and hybrid retrieval need texts or token ids: vectors have no terms.")
    texts, rows = _checked(queries, tokenizer)
    return texts or [tokenizer.decode(row) for row in rows]


def _checked(queries: Queries, tokenizer: Tokenizer) -> tuple[list[str], list[np.ndarray]]:
    """The texts, or the token ids [t] int64, of queries that are not vectors. One of both is empty.

    Raises:
        InputError: a text or a list of token ids is empty, or an id is not in the vocabulary.
    """
    queries = as_texts(queries)
    texts = [query for query in queries if isinstance(query, str)]
    if not texts:
        return [], [_in_vocabulary(np.asarray(row, dtype=np.int64), tokenizer) for row in queries]
    if len(texts) < len(queries):
        raise InputError("queries must be all texts, all token ids or all vectors.")
    if not all(text.strip() for text in texts):
        raise InputError("the text to search for is empty.")
    return texts, []


def _in_vocabulary(row: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The token ids [t] of a query, if all are in the vocabulary."""
    if row.ndim != 1:
        raise InputError("token ids to search for are a list for each query, for example [[5, 6, 7]].")
    if not len(row):
        raise InputError("a list of token ids to search for is empty.")
    outside = row[(row < 0) | (row >= tokenizer.vocab_size)]
    if len(outside):
        raise InputError(f"token id {outside[0]}: the tokenizer's are 0 to {tokenizer.vocab_size - 1}.")
    return row
