"""Neighbors for a model that runs in transformers: from a `retro serve` at a URL, or from a datastore's folder.

chunks [n, m] ─► POST URL/neighbors/tokens, in as many requests as the server's limits want ─► tokens [n, K, R], lengths [n, K]
              ─► the installed package's Retriever                                          ─► the same
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np

from retro.model.datastore_fit import check_fits
from retro.model.settings import ModelSettings

TOKEN_VARIABLE = "RETRO_TOKEN"
_SECONDS = 120

Retrieve = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Chunks [n, m] → neighbors [n, K, R] int64 and their lengths [n, K] int64."""


def open_retrieval(source: str, k: int, model: ModelSettings, num_ids: int) -> Retrieve:
    """What finds k neighbors of chunks.

    Args:
        source: `http://…` or `https://…` of a `retro serve`, which is asked with the environment's RETRO_TOKEN if that is set;
            anything else is the folder or the URL of a datastore, which the installed package `retro` opens.
        k: neighbors of each chunk, 1 or more.
        model: settings of the model.
        num_ids: of the model's tokenizer.

    Raises:
        ValueError: the server or the datastore does not fit the model, or cannot be reached or opened.
        ImportError: a datastore is named and `retro` is not installed.
    """
    if k < 1:
        raise ValueError(f"k = {k}: must be 1 or more; retrieval OFF is `model.retrieve_from(None)`.")
    if source.startswith(("http://", "https://")):
        server = _Server(source.rstrip("/"), k)
        check_fits(model, server.facts, source, num_ids=num_ids)
        return server
    try:
        from indexing.retrieval.retriever import Retriever
    except ImportError as error:
        raise ImportError(
            f"{source} is taken for a datastore, which only the installed package `retro` can search ({error}). Install it, or "
            "name the URL of a server: `retro serve DATASTORE` answers at http://HOST:8080."
        ) from error
    retriever = Retriever.open(source)
    found = {"chunk_length": retriever.datastore.chunk_length, "vocab_size": retriever.tokenizer.vocab_size}
    check_fits(model, found, source, num_ids=num_ids)
    return lambda chunks: retriever.neighbors(chunks, k)


class _Server:
    """A `retro serve` that is asked for neighbors."""

    def __init__(self, url: str, k: int) -> None:
        self.url, self.k = url, k
        self.facts = self._ask("/datastore")
        limits = self.facts.get("limits", {})
        tokens = limits.get("max_input_tokens", 16_384) // self.facts.get("chunk_length", 64)
        candidates = limits.get("max_candidates", 16_384) // max(64, k)  # a search has 64 or more for each chunk
        self.most = max(1, min(limits.get("max_queries", 256), tokens, candidates))  # chunks in a request

    def __call__(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Retrieve`."""
        answers = [
            self._ask("/neighbors/tokens", {"chunks": chunks[start : start + self.most].tolist(), "k": self.k})
            for start in range(0, len(chunks), self.most)
        ]
        tokens, lengths = (
            np.concatenate([np.array(answer[key], dtype=np.int64) for answer in answers])
            for key in ("tokens", "lengths")
        )
        return tokens, lengths

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            ValueError: there is none, or it is an error.
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
            said = error.read().decode(errors="replace").strip()
            hint = f" Set the environment variable {TOKEN_VARIABLE} to the server's token." if error.code == 401 else ""
            raise ValueError(f"{self.url}{path} answered {error.code}: {said[:500]}{hint}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url}{path} does not answer as `retro serve` does: {error}") from error
