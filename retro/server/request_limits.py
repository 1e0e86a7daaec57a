"""Limits of what one request asks for. Each error names the field, what was sent, and the limit with its option.

`limits.py` has the limits of requests as such: their bytes, number and time.
"""

from collections.abc import Iterable, Sequence, Sized

import numpy as np

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.retriever import Retriever
from indexing.retrieval.search import CANDIDATES
from indexing.store.remote import datastore_name
from indexing.tokenization.texts import as_texts
from retro.inference.language_model import LanguageModel
from retro.server.errors import InvalidRequest
from retro.server.settings import ServeSettings


class RequestLimits:
    """Every method raises InvalidRequest; `param` is the field of the request that the error names."""

    def __init__(self, settings: ServeSettings, retriever: Retriever, language_model: LanguageModel | None) -> None:
        self._settings, self._retriever, self._language_model = settings, retriever, language_model

    def within(self, setting: str, amount: int, param: str, unit: str = "") -> int:
        """Return an amount that must not exceed a setting."""
        limit = getattr(self._settings, setting)
        if amount > limit:
            sent = f"{param}: {amount:,} {unit};" if unit else f"{param} = {amount:,}:"
            option = f"retro serve --{setting.replace('_', '-')}"
            raise InvalidRequest(f"{sent} at most {limit:,} ({setting}, set with `{option}`).", param=param)
        return amount

    def characters(self, texts: Iterable[str], param: str) -> None:
        """Limit the characters of all texts."""
        self.within("max_characters", sum(map(len, as_texts(texts))), param, "characters")

    def tokens(self, rows: Iterable[Sized], param: str) -> None:
        """Limit the tokens of all rows."""
        self.within("max_input_tokens", sum(map(len, rows)), param, "tokens")

    def token_ids(self, ids: Sequence[int] | np.ndarray, name: str, param: str = "") -> None:
        """Require ids of the tokenizer."""
        size = self._retriever.tokenizer.vocab_size
        if len(ids) and (largest := max(ids)) >= size:
            message = f"{name} has the token id {largest}: accepted are 0 to {size - 1}."
            raise InvalidRequest(message, param=param or name)

    def datastore(self, name: str) -> str:
        """Return the name of the only datastore to search (empty = all), which must be served."""
        names = [datastore_name(split.folder) for split in self._retriever.retrieval.splits]
        if name and name not in names:
            raise InvalidRequest(f"datastore = {name!r}: served are {', '.join(names)}.", param="datastore")
        return name

    def search(self, queries: int, k: int, retrieval: Retrieval, param: str) -> None:
        """Limit the queries of a search, their hits, and the candidates that it ranks."""
        self.within("max_queries", queries, param)
        self.within("max_k", k, "k")
        candidates = (2 if retrieval == "hybrid" else 1) * queries * max(k, CANDIDATES)
        self.within("max_candidates", candidates, param, f"candidates with k = {k} and {retrieval} retrieval")

    def neighbors(self, lengths: Iterable[int], k: int, param: str) -> None:
        """Limit the tokens of the neighbors of texts of these lengths."""
        m = self._retriever.datastore.chunk_length
        tokens = sum(length // m for length in lengths) * k * 2 * m
        self.within("max_neighbor_tokens", tokens, param, f"neighbor tokens with k = {k}")

    def neighbors_of(self, length: int) -> int:
        """Return the largest number of neighbors of each chunk of a text of this length, when passages are its
        neighbors."""
        assert self._language_model is not None
        m = self._retriever.datastore.chunk_length
        chunks = max(1, min(length, self._language_model.context) // m)
        return max(1, min(self._settings.max_model_k, self._settings.max_neighbor_tokens // (chunks * 2 * m)))

    def generation(self, prompts: Sequence[np.ndarray], max_tokens: int, k: int, param: str) -> None:
        """Require prompts [t] that fit into the context; limit the neighbor tokens that they and their continuations
        read."""
        assert self._language_model is not None
        context, longest = self._language_model.context, max(map(len, prompts))
        if longest > context:
            # Clients search for these words of OpenAI's and vLLM's message.
            message = (
                f"This model's maximum context length is {context} tokens. However, {param} has {longest}. Shorten it."
            )
            raise InvalidRequest(message, param=param, code="context_length_exceeded")
        # A generation longer than the context drops the oldest tokens.
        self.neighbors([min(len(prompt) + max_tokens, context) for prompt in prompts], k, param)

    def continuations(self, n: int, prompts: int) -> int:
        """Return the number of continuations of each prompt, after limiting those of all prompts."""
        limit = self._settings.max_queries
        if n > 1 and n * prompts > limit:
            message = f"n = {n:,}: {n * prompts:,} continuations; at most {limit:,} (max_queries)."
            raise InvalidRequest(message, param="n")
        return n
