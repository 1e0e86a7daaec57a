"""Neighbors for a model in transformers: from a `retro serve` at a URL, or from a datastore's folder.

chunks [n, m] ─► POST URL/neighbors/tokens, in requests within the server's limits ─► tokens [n, K, R], lengths [n, K]
              ─► Retriever of the datastore                                        ─► the same
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np

from indexing.retrieval.retriever import Retriever
from indexing.store.retrieval_set import tokenizer_fingerprint
from retro.model.datastore_fit import check_fits
from retro.model_settings import ModelSettings

TOKEN_VARIABLE = "RETRO_TOKEN"
_SECONDS = 120

RetrieveNeighbors = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Chunks [n, m] → neighbors [n, K, R] int64 and their lengths [n, K] int64."""


def open_retrieval(source: str, k: int, model: ModelSettings, num_ids: int, tokenizer: str) -> RetrieveNeighbors:
    """Return a function that finds k neighbors of chunks.

    Args:
        source: `http://…` or `https://…` of a `retro serve`, which receives the token in the environment variable
            RETRO_TOKEN if set; otherwise folder or URL of a datastore.
        k: number of neighbors of each chunk, at least 1.
        model: settings of the model.
        num_ids: number of ids of the model's tokenizer.
        tokenizer: its fingerprint; empty = unknown.

    Raises:
        ValueError: the server or the datastore cannot be opened or does not fit the model.
    """
    if k < 1:
        raise ValueError(f"k = {k}: must be at least 1. Use `model.retrieve_from(None)` for retrieval OFF.")
    if source.startswith(("http://", "https://")):
        server = _Server(source.rstrip("/"), k)
        check_fits(model, server.metadata, source, num_ids=num_ids, tokenizer=tokenizer)
        return server
    retriever = Retriever.open(source)
    retriever.require_neighbors()
    actual = {**retriever.datastore.manifest, "tokenizer": tokenizer_fingerprint(retriever.datastore.folder)}
    check_fits(model, actual, source, num_ids=num_ids, tokenizer=tokenizer)
    return lambda chunks: retriever.neighbors.find(chunks, k)[:2]


class _Server:
    """Client of a `retro serve`."""

    def __init__(self, url: str, k: int) -> None:
        self.url, self.k = url, k
        self.metadata = self._request("/datastore")
        limits = self.metadata.get("limits", {})
        tokens = limits.get("max_input_tokens", 16_384) // self.metadata.get("chunk_length", 64)
        candidates = limits.get("max_candidates", 16_384) // max(64, k)  # a search has at least 64 for each chunk
        self.max_chunks = max(1, min(limits.get("max_queries", 256), tokens, candidates))  # chunks in a request

    def __call__(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `RetrieveNeighbors`."""
        answers = [
            self._request(
                "/neighbors/tokens", {"chunks": chunks[start : start + self.max_chunks].tolist(), "k": self.k}
            )
            for start in range(0, len(chunks), self.max_chunks)
        ]
        tokens, lengths = (
            np.concatenate([np.array(answer[key], dtype=np.int64) for answer in answers])
            for key in ("tokens", "lengths")
        )
        return tokens, lengths

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            ValueError: the server does not answer or answers with an error.
        """
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=_SECONDS
            ) as answer:
                answered: dict[str, Any] = json.load(answer)
                return answered
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace").strip()
            hint = f" Set the environment variable {TOKEN_VARIABLE} to the server's token." if error.code == 401 else ""
            raise ValueError(f"{self.url}{path} answered {error.code}: {reason[:500]}{hint}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url}{path} did not answer like a `retro serve`: {error}") from error
