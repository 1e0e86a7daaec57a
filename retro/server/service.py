"""What the endpoints share: the retriever and the model, each behind what gathers requests for it, and the limits.

endpoints ─► Service.search, embed ─► one thread each ─► Retriever
          ─► Service.score, generations ─► threads ─► LanguageModel
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import Depends, Request

from indexing.retrieval.results import Hit
from indexing.retrieval.retriever import CANDIDATES, Rerank, Retriever
from retro.inference.generation import Piece
from retro.inference.language_model import LanguageModel, Scores
from retro.inference.settings import GenerationSettings
from retro.server.batching import Batcher, Wanted
from retro.server.errors import ApiError, Refused
from retro.server.generation_queue import Generations
from retro.server.limits import Admission
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings

Query = str | np.ndarray
"""A text, token ids [t] int64, or a vector [d] float32."""

_COST_BY_WORDS = 16  # of a query that is ranked by words, in queries by vectors alone
_TICKS_TO_ANSWER = 20  # of 0.05 s each, in which requests that are cut off are answered

Kind = Literal["texts", "tokens", "vectors"]


class Search(NamedTuple):
    """All but the queries that an answer depends on."""

    kind: Kind
    k: int
    filters: str
    rerank: Rerank
    text: bool = True


class BareHit(NamedTuple):
    """A hit without text. `Hit` would do, but takes longer to make, and meanwhile no search runs."""

    chunk_id: int
    score: float
    distance: float


class Found(NamedTuple):
    """What a search has found for one query, bare where `text` was not asked for, and the parts of the index that did not answer."""

    hits: Sequence[Hit | BareHit]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Service:
    """A retriever and perhaps a language model, ready for many clients.

    Attributes:
        name: of the model, or of the datastore where there is none.
        search: queries of one `Search` → what was found for each.
        embed: texts or token ids → unit vectors.
        score: (k, likeliest tokens at each place) and token ids → their scores; None without a model.
        generations: None without a model.
        started: seconds since 1970.
    """

    retriever: Retriever
    language_model: LanguageModel | None
    settings: ServeSettings
    name: str
    admission: Admission
    metrics: Metrics
    search: Batcher[Search, Query, Found]
    embed: Batcher[str, Query, np.ndarray]
    score: Batcher[tuple[int, int], np.ndarray, Scores] | None
    generations: Generations | None
    started: int

    @classmethod
    def of(cls, retriever: Retriever, language_model: LanguageModel | None, settings: ServeSettings) -> "Service":
        """A service of what is open."""
        admission, metrics = Admission(), Metrics()
        search = Batcher(
            "search", _search_with(retriever), settings.max_batch, metrics.count_batch("search"), _cost_of_search
        )
        embed = Batcher("embed", _embed_with(retriever), settings.max_batch, metrics.count_batch("embed"))
        score = generations = None
        if language_model is not None:
            score = Batcher(
                "score",
                _score_with(language_model),
                settings.max_score_tokens,
                metrics.count_batch("score"),
                lambda key, sequence: len(sequence) * (1 + 2 * key[0]),
            )
            generations = Generations(language_model, settings.max_generations, metrics)
        queues: dict[str, Sized | None] = {"search": search, "embed": embed, "score": score, "generate": generations}
        metrics.watch(
            {work: each.__len__ for work, each in queues.items() if each is not None}, lambda: admission.under_way
        )
        name = settings.name or _name_of(retriever, language_model)
        return cls(
            retriever,
            language_model,
            settings,
            name,
            admission,
            metrics,
            search,
            embed,
            score,
            generations,
            int(time.time()),
        )

    def warm_up(self) -> None:
        """Ask once for everything that the first request would otherwise wait for."""
        self.retriever.search(["warm up"], 1, rerank="hybrid")
        if self.language_model is not None:
            self.language_model.score([np.array([self.retriever.tokenizer.bos_id] * 2)])

    async def cut_off(self) -> int:
        """Stop what is under way, at the end of the time for shutting down: each request is answered 503, a stream ends with that error.

        Returns:
            How many requests that were.
        """
        number = self.admission.under_way
        if self.generations is not None:
            self.generations.cut_off()
        self.admission.cut_off()
        for _ in range(_TICKS_TO_ANSWER):
            if not self.admission.under_way:
                break
            await asyncio.sleep(0.05)
        return number

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def retrieves(self) -> bool:
        """Whether there is a model and it reads neighbors."""
        return self.language_model is not None and self.language_model.retriever is not None

    def model(self) -> LanguageModel:
        """The language model; raises ApiError where there is none."""
        if self.language_model is None:
            message = "this server has no model: it was started without --checkpoint. Searching and embedding work."
            raise ApiError(404, message, type="no_model", code="model_not_found")
        return self.language_model

    async def scores(self, sequences: Sequence[np.ndarray], k: int, top: int = 0) -> list[Scores]:
        """See `LanguageModel.score_with_likeliest`."""
        self.model()
        assert self.score is not None
        return await self.score((k, top), sequences)

    def generate(
        self, prompts: Sequence[np.ndarray], settings: GenerationSettings, k: int
    ) -> AsyncIterator[list[Piece]]:
        """See `Generations.pieces`."""
        self.model()
        assert self.generations is not None
        return self.generations.pieces(prompts, settings, k, self.settings.request_seconds)

    # --- limits -----------------------------------------------------------------------------------------------------

    def check_k(self, k: int) -> int:
        """k of a search; raises ApiError where it is too large."""
        return self._checked(k, "max_k", "k")

    def check_model_k(self, k: int) -> int:
        """k of the model; raises ApiError where it is too large."""
        return self._checked(k, "max_model_k", "k")

    def check_neighbors(self, lengths: Sequence[int], k: int, param: str) -> None:
        """Raise ApiError where the neighbors of texts of these lengths are more tokens than may be read for one request."""
        m = self.retriever.datastore.chunk_length
        number, limit = sum(length // m for length in lengths) * k * 2 * m, self.settings.max_neighbor_tokens
        if number > limit:
            message = (
                f"{param}: with k = {k} the neighbors are {number:,} tokens, at most {limit:,} (max_neighbor_tokens)."
            )
            raise Refused(f"{message} Ask for fewer neighbors or less text.", param=param)

    def check_candidates(self, queries: int, k: int, rerank: Rerank) -> None:
        """Raise ApiError where a search would put more candidates in order than one request may."""
        number, limit = queries * max(k, CANDIDATES[rerank]), self.settings.max_candidates
        if number > limit:
            message = f"{queries:,} queries with k = {k} and {rerank} have {number:,} candidates, at most {limit:,} (max_candidates)."
            raise Refused(f"{message} Send fewer queries in a request.")

    def check_characters(self, texts: Sequence[str], param: str) -> None:
        """Raise ApiError where texts are longer than one request may bring."""
        number, limit = sum(map(len, texts)), self.settings.max_characters
        if number > limit:
            raise Refused(f"{param}: {number:,} characters, at most {limit:,} (max_characters).", param=param)

    def check_generation(self, prompts: Sequence[np.ndarray], max_tokens: int, k: int, param: str) -> None:
        """Raise ApiError where prompts [t], or they and what is generated, need more than the model sees or may read."""
        self.check_context(prompts, param)
        # Of more than the context, what is generated drops the oldest.
        context = self.model().context
        self.check_neighbors([min(len(prompt) + max_tokens, context) for prompt in prompts], k, param)

    def check_context(self, prompts: Sequence[np.ndarray], param: str) -> None:
        """Raise ApiError where the model does not see a whole prompt [t], with the token that begins a document."""
        context, longest = self.model().context, max(map(len, prompts))
        if longest > context:
            # The words of OpenAI's and vLLM's, which clients look for.
            message = (
                f"This model's maximum context length is {context} tokens. However, {param} has {longest}. Shorten it."
            )
            raise Refused(message, param=param, code="context_length_exceeded")

    def check_queries(self, number: int, param: str) -> None:
        """Raise ApiError where a request holds too many texts, token lists or vectors."""
        self._checked(number, "max_queries", param)

    def check_max_tokens(self, number: int) -> int:
        """How many tokens to generate; raises ApiError where they are too many."""
        return self._checked(number, "max_tokens", "max_tokens")

    def _checked(self, number: int, setting: str, param: str) -> int:
        limit = getattr(self.settings, setting)
        if number > limit:
            raise Refused(f"{param} = {number:,}: at most {limit:,} ({setting}).", param=param)
        return number

    async def encoded(self, texts: Sequence[str], param: str) -> list[np.ndarray]:
        """Token ids [t] int64 of texts, without begin and end of document.

        Raises:
            ApiError: they are more than one request may bring.
        """
        self.check_characters(texts, param)
        rows = await asyncio.to_thread(self.retriever.tokenizer.encode_batch, list(texts))
        self.check_input([len(row) for row in rows], param)
        return [row.astype(np.int64) for row in rows]

    def check_input(self, lengths: Sequence[int], param: str) -> None:
        """Raise ApiError where token lists of these lengths are more than one request may bring."""
        limit = self.settings.max_input_tokens
        if sum(lengths) > limit:
            raise Refused(f"{param}: {sum(lengths):,} tokens, at most {limit:,} (max_input_tokens).", param=param)


async def service_of(request: Request) -> Service:
    """The service of the app that a request came to. (`async`: FastAPI takes what is not to another thread.)"""
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(service_of)]
"""A parameter of an endpoint."""


def _cost_of_search(search: Search, query: Query) -> int:
    """Of one query, in queries by vectors alone."""
    return 1 if search.rerank == "embeddings" else _COST_BY_WORDS


def _search_with(retriever: Retriever) -> Callable[[Search, list[Query], Wanted], list[Found]]:
    def work(search: Search, queries: list[Query], wanted: Wanted) -> list[Found]:
        asked: Any = np.stack(queries) if search.kind == "vectors" else queries
        filters = json.loads(search.filters)
        if search.text:
            results = retriever.search(asked, search.k, filters=filters, rerank=search.rerank)
            return [Found(hits, results.missing) for hits in results.hits]
        ranked = retriever.rank(asked, search.k, filters=filters, rerank=search.rerank)
        rows = zip(ranked.ids.tolist(), ranked.scores.tolist(), ranked.distances.tolist(), strict=True)
        return [
            Found([BareHit(*each) for each in zip(*row, strict=True) if each[0] >= 0], ranked.missing) for row in rows
        ]

    return work


def _embed_with(retriever: Retriever) -> Callable[[str, list[Query], Wanted], Sequence[np.ndarray]]:
    return lambda _, queries, wanted: list(retriever.vectors_of(queries))  # type: ignore[arg-type]


def _score_with(language_model: LanguageModel) -> Callable[[tuple[int, int], list[np.ndarray], Wanted], list[Scores]]:
    return lambda key, sequences, wanted: language_model.score_with_likeliest(sequences, *key, wanted)


def _name_of(retriever: Retriever, language_model: LanguageModel | None) -> str:
    """The folder of the checkpoint's run, or an exported file's name; without a model the datastore's folder."""
    if language_model is None:
        return retriever.datastore.folder.resolve().name
    path = language_model.checkpoint.path.resolve()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.stem
