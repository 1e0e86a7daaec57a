"""The service behind the endpoints: batched access to retriever and model, and the limits of a request.

endpoints ─► Service.search, embed ─► one thread each ─► Retriever
          ─► Service.score, generations ─► threads ─► LanguageModel
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from indexing.retrieval.results import Hit
from indexing.retrieval.retriever import CANDIDATES, Retriever
from indexing.sparse.candidates import Retrieval
from indexing.store.errors import DamagedFile, InputError
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet
from indexing.store.watch import Watch
from retro.inference.chat_template import ChatTemplate, read_template, stored_template
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel, Scores
from retro.inference.scoring import Window
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import SourceFinder, Sources
from retro.inference.spans import ChunkTexts
from retro.inference.verbatim_runs import GeneratedRuns, TracedDatastore, is_traced, traced_datastores
from retro.server import schemas
from retro.server.batching import Batcher
from retro.server.errors import ApiError, InvalidRequest
from retro.server.generation_queue import GenerationQueue
from retro.server.limits import Admission
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings
from retro.server.watched_files import WatchedFiles

Key = TypeVar("Key")
Item = TypeVar("Item")
Done = TypeVar("Done")

log = logging.getLogger("retro.server")

Query = str | np.ndarray
"""A text, token ids [t] int64, or a vector [d] float32."""

_COST_WITH_TERMS = 16  # of a query that is searched by its terms too; a query searched by its vector alone costs 1
_TICKS_TO_ANSWER = 20  # of 0.05 s each: time to answer requests that are cut off

QueryKind = Literal["texts", "tokens", "vectors"]


class SearchKey(NamedTuple):
    """Everything except the queries that the results of a search depend on."""

    kind: QueryKind
    k: int
    filters: str
    retrieval: Retrieval
    text: bool = True
    datastore: str = ""
    neighbors: bool = False
    """Queries are whole chunks; find and order their neighbors as the stored ones."""


class ScoreKey(NamedTuple):
    """Everything except the tokens that scores depend on."""

    k: int
    top: int = 0
    sources: bool = False


Sourced = tuple[GeneratedToken, Sources | None]
"""A token, and what is new in the sources of its continuation."""


class BareHit(NamedTuple):
    """A hit without text. Unlike `Hit`, it is cheap to create; the search thread is blocked meanwhile."""

    chunk_id: int
    score: float
    distance: float


class SearchResult(NamedTuple):
    """Hits of one query (`BareHit` if `SearchKey.text` is False), and the parts of the index that did not answer."""

    hits: Sequence[Hit | BareHit]
    missing: tuple[str, ...]


class Service:
    """A retriever and optionally a language model, ready for many clients.

    Args:
        retriever: an open retriever.
        language_model: an open model; None = only search and embedding.
        settings: the limits.

    Attributes:
        name: name of the model, or of the datastore without a model.
        search: (`SearchKey`, queries) → a result for each query.
        embed: ("texts" | "tokens", texts or token ids) → unit vectors [d].
        trace: (None, functions without arguments) → their results. Requests take turns function by function.
        score: (`ScoreKey`, windows of sequences) → their sequences have the scores; None without a model.
        generations: None without a model.
        chat_template: None without a model, or if it has no template.
        started: time of the start in seconds since 1970.
        files: those of the datastores; DamagedFile is answered 503.
        examples: by length in chunks: passages to try, and the task that measures their gains.
        measuring: held by the one of these tasks that runs.
    """

    score: Batcher[ScoreKey, Window, None] | None = None
    generations: GenerationQueue | None = None
    chat_template: ChatTemplate | None = None

    def __init__(self, retriever: Retriever, language_model: LanguageModel | None, settings: ServeSettings) -> None:
        self.retriever, self.language_model, self.settings = retriever, language_model, settings
        self.name, self.started = settings.name or _name_of(retriever, language_model), int(time.time())
        self.admission, self.metrics = Admission(), Metrics()
        self.files = WatchedFiles(split.folder for split in retriever.retrieval.splits)
        count, size = self.metrics.count_batch, settings.max_batch
        self.search: Batcher[SearchKey, Query, SearchResult] = Batcher(
            "search", _watched(self.files.watch, _search_with(retriever)), size, count("search"), _cost_of_search
        )
        self.embed: Batcher[str, Query, np.ndarray] = Batcher("embed", _embed_with(retriever), size, count("embed"))
        self.trace: Batcher[None, Callable[[], Any], Any] = Batcher(
            "trace", _watched(self.files.watch, lambda _, parts: [part() for part in parts]), 1
        )
        waiting, running = dict[str, Callable[[], int]](search=self.search.__len__, embed=self.embed.__len__), {}
        waiting["trace"] = self.trace.__len__
        self._traced: list[TracedDatastore] | None = None
        if language_model is not None:
            self.score = Batcher(
                "score",
                _watched(self.files.watch, _score_with(language_model)),
                settings.max_score_tokens,
                count("score"),
                lambda key, window: len(window) * (1 + 2 * key.k),
            )
            generations = self.generations = GenerationQueue(
                language_model, settings.max_num_seqs, self.metrics, self.files.watch.require
            )
            self.chat_template = _chat_template(language_model, settings.chat_template)
            waiting |= {"score": self.score.__len__, "generate": generations.__len__}
            running = {"generate": lambda: generations.num_running}
            if (cache := language_model.neighbor_cache) is not None:
                counts = {"hit": lambda: cache.hits, "miss": lambda: cache.misses}
                self.metrics.watch_neighbors(counts, lambda: cache.bytes)
        self.metrics.watch(waiting, running, lambda: self.admission.under_way)
        self.examples: dict[int, tuple[schemas.ExamplesResponse, asyncio.Task[None]]] = {}
        self.measuring = asyncio.Lock()

    def warm_up(self) -> None:
        """Run one search and one scoring, so that the first request does not wait for initialization."""
        retrieval: Retrieval = "hybrid" if self.retriever.has_terms else "dense"
        self.retriever.search(["warm up"], 1, retrieval=retrieval)
        if self.language_model is not None:
            self.language_model.score([np.array([self.retriever.tokenizer.bos_id] * 2)])

    async def cut_off(self) -> int:
        """Stop all requests under way when the time for shutdown is over.

        Each request is answered 503; a stream ends with the same error.

        Returns:
            the number of these requests.
        """
        under_way = self.admission.under_way
        if self.generations is not None:
            self.generations.cut_off()
        self.admission.cut_off()
        for _ in range(_TICKS_TO_ANSWER):
            if not self.admission.under_way:
                break
            await asyncio.sleep(0.05)
        return under_way

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def retrieves(self) -> bool:
        """True if there is a model and it reads neighbors."""
        return self.language_model is not None and self.language_model.retriever is not None

    @cached_property
    def traces(self) -> bool:
        """True if a datastore has the sorted prefixes that find verbatim runs."""
        return any(map(is_traced, self.retriever.retrieval.splits))

    def traced(self) -> list[TracedDatastore]:
        """Return the datastores in which verbatim runs are found; raise ApiError if there is none.

        Raises:
            DatastoreChanged: a datastore was built again.
        """
        self.retriever.retrieval.require_unchanged()
        if self._traced is None:
            opened = None if self.language_model is None else self.language_model.suffixes
            try:
                self._traced = traced_datastores(self.retriever.retrieval, opened)
            except DamagedFile:
                raise
            except InputError as error:
                raise ApiError(404, str(error)) from error
        return self._traced

    def model(self) -> LanguageModel:
        """Return the language model; raise ApiError if there is none."""
        if self.language_model is None:
            message = (
                "this server was started without --checkpoint, so it has no model. Only search and embedding work."
            )
            raise ApiError(404, message, code="model_not_found")
        return self.language_model

    async def scores(self, sequences: Sequence[np.ndarray], key: ScoreKey) -> list[Scores]:
        """See `LanguageModel.score_with_likeliest`. Requests take turns window by window."""
        begun = self.model().to_score(sequences, key.top)
        assert self.score is not None
        await self.score(key, [window for sequence in begun for window in sequence.windows])
        return [sequence.scores for sequence in begun]

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int,
        *,
        n: int = 1,
        sources: bool = False,
        starts: Sequence[int] = (),
    ) -> AsyncIterator[list[Sourced]]:
        """Yield the steps of `GenerationQueue.generate`; with `sources`, each token has what is new in those of its continuation.

        `starts` are the characters of each answer before its continuation; empty = 0.
        """
        self.model()
        assert self.generations is not None
        seconds = self.settings.request_seconds
        rows = [prompt for prompt in prompts for _ in range(n)]
        finders = await asyncio.to_thread(self._finders, rows, starts or [0] * len(rows)) if sources else []

        def of_step(step: list[GeneratedToken]) -> list[Sourced]:
            return [(token, finders[token.row].add_generated(token)) for token in step]

        async for step in self.generations.generate(prompts, settings, k, seconds, n=n, sources=sources):
            yield await asyncio.to_thread(of_step, step) if sources else [(token, None) for token in step]

    def _finders(self, prompts: Sequence[np.ndarray], starts: Sequence[int]) -> list[SourceFinder]:
        texts, traced = ChunkTexts(self.retriever), self.traced() if self.traces else []
        return [
            SourceFinder(self.retriever, texts, start, GeneratedRuns(traced, texts, prompt, start) if traced else None)
            for prompt, start in zip(prompts, starts, strict=True)
        ]

    # --- limits -----------------------------------------------------------------------------------------------------

    def check(self, setting: str, amount: int, param: str, unit: str = "") -> int:
        """Return an amount in a request; raise ApiError if it is above the limit of a setting."""
        limit = getattr(self.settings, setting)
        if amount > limit:
            sent = f"{param}: {amount:,} {unit};" if unit else f"{param} = {amount:,}:"
            option = f"retro serve --{setting.replace('_', '-')}"
            raise InvalidRequest(f"{sent} at most {limit:,} ({setting}, set with `{option}`).", param=param)
        return amount

    def check_datastore(self, name: str) -> str:
        """Return the name of the only datastore to search (empty = all); raise ApiError if it is not served."""
        names = [datastore_name(split.folder) for split in self.retriever.retrieval.splits]
        if name and name not in names:
            raise InvalidRequest(f"datastore = {name!r}: served are {', '.join(names)}.", param="datastore")
        return name

    def check_neighbors(self, lengths: Sequence[int], k: int, param: str) -> None:
        """Raise ApiError if the neighbors of texts of these lengths have more tokens than allowed for one request."""
        m = self.retriever.datastore.chunk_length
        tokens = sum(length // m for length in lengths) * k * 2 * m
        self.check("max_neighbor_tokens", tokens, param, f"neighbor tokens with k = {k}")

    def check_search(self, queries: int, k: int, retrieval: Retrieval, param: str) -> None:
        """Raise ApiError if a search has too many queries or neighbors, or would rank too many candidates."""
        self.check("max_queries", queries, param)
        self.check("max_k", k, "k")
        candidates = (2 if retrieval == "hybrid" else 1) * queries * max(k, CANDIDATES)
        self.check("max_candidates", candidates, param, f"candidates with k = {k} and {retrieval} retrieval")

    def check_generation(self, prompts: Sequence[np.ndarray], max_tokens: int, k: int, param: str) -> None:
        """Raise ApiError if a prompt [t] exceeds the context, or prompts and generated text would read too many neighbor tokens."""
        self.check_context(prompts, param)
        # A generation longer than the context drops the oldest tokens.
        context = self.model().context
        self.check_neighbors([min(len(prompt) + max_tokens, context) for prompt in prompts], k, param)

    def check_context(self, prompts: Sequence[np.ndarray], param: str) -> None:
        """Raise ApiError if a prompt [t], with the beginning-of-document token, is longer than the model's context."""
        context, longest = self.model().context, max(map(len, prompts))
        if longest > context:
            # Clients search for these words of OpenAI's and vLLM's message.
            message = (
                f"This model's maximum context length is {context} tokens. However, {param} has {longest}. Shorten it."
            )
            raise InvalidRequest(message, param=param, code="context_length_exceeded")

    def check_ids(self, ids: Sequence[int] | np.ndarray, name: str, param: str = "") -> None:
        """Raise ApiError if a token id is not in the tokenizer."""
        size = self.retriever.tokenizer.vocab_size
        if len(ids) and (largest := max(ids)) >= size:
            raise InvalidRequest(
                f"{name} has the token id {largest}: accepted are 0 to {size - 1}.", param=param or name
            )

    async def encoded(self, texts: Sequence[str], param: str) -> list[np.ndarray]:
        """Return the token ids [t] int64 of texts, without beginning and end of document.

        Raises:
            ApiError: the texts have more characters or tokens than allowed for one request.
        """
        self.check("max_characters", sum(map(len, texts)), param, "characters")
        rows = await asyncio.to_thread(self.retriever.tokenizer.encode_batch, list(texts))
        self.check("max_input_tokens", sum(map(len, rows)), param, "tokens")
        return [row.astype(np.int64) for row in rows]


class JsonRoute(APIRoute):
    """A route that reads bodies with pydantic's parser. Unlike Python's, it rejects halves of surrogate pairs, which have no UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        return from_json(await self.body())


async def service_of(request: Request) -> Service:
    """Return the service of a request's application. (`async`, because FastAPI runs other functions on another thread.)"""
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(service_of)]
"""Type of the parameter `service` of an endpoint."""


def _cost_of_search(search: SearchKey, query: Query) -> int:
    """Return the cost of one query; a query searched by its vector alone costs 1."""
    return 1 if search.retrieval == "dense" else _COST_WITH_TERMS


def _watched(watch: Watch, work: Callable[[Key, list[Item]], Done]) -> Callable[[Key, list[Item]], Done]:
    """Work that begins with a check of the files, because its requests may have waited."""

    def watched(key: Key, items: list[Item]) -> Done:
        watch.require()
        return work(key, items)

    return watched


def _search_with(retriever: Retriever) -> Callable[[SearchKey, list[Query]], list[SearchResult]]:
    alone = dict(_each_alone(retriever))

    def work(search: SearchKey, queries: list[Query]) -> list[SearchResult]:
        together: Any = np.stack(queries) if search.kind == "vectors" else queries
        filters = json.loads(search.filters)
        first_id, searched = alone[search.datastore] if search.datastore else (0, retriever)
        if search.text:
            results = searched.search(together, search.k, filters=filters, retrieval=search.retrieval)
            return [SearchResult(_moved(hits, first_id), results.missing) for hits in results.hits]
        if search.neighbors:
            ranked = searched.rank_neighbors(np.stack(together), search.k)
        else:
            ranked = searched.rank(together, search.k, filters=filters, retrieval=search.retrieval)
        ids = np.where(ranked.ids < 0, -1, first_id + ranked.ids)
        rows = zip(ids.tolist(), ranked.scores.tolist(), ranked.distances.tolist(), strict=True)
        return [
            SearchResult([BareHit(*hit) for hit in zip(*row, strict=True) if hit[0] >= 0], ranked.missing)
            for row in rows
        ]

    return work


def _moved(hits: list[Hit], first_id: int) -> list[Hit]:
    """Add the id of a datastore's first chunk to the ids of hits."""
    return [replace(hit, chunk_id=first_id + hit.chunk_id) for hit in hits] if first_id else hits


def _each_alone(retriever: Retriever) -> Iterator[tuple[str, tuple[int, Retriever]]]:
    """Yield the name of each datastore with the id of its first chunk and a retriever that searches only this datastore."""
    for place, split in enumerate(retriever.retrieval.splits):
        own = replace(retriever, indexes=retriever.indexes[place : place + 1], retrieval=RetrievalSet((split,)))
        yield datastore_name(split.folder), (place << CHUNK_ID_BITS, own)


def _embed_with(retriever: Retriever) -> Callable[[str, list[Query]], Sequence[np.ndarray]]:
    return lambda _, queries: list(retriever.vectors_of(queries))  # type: ignore[arg-type]


def _score_with(language_model: LanguageModel) -> Callable[[ScoreKey, list[Window]], list[None]]:
    def work(key: ScoreKey, windows: list[Window]) -> list[None]:
        language_model.score_windows(windows, key.k, key.top, key.sources)
        return [None] * len(windows)

    return work


def _chat_template(language_model: LanguageModel, path: str) -> ChatTemplate | None:
    """Return the template in a file or folder, or the checkpoint's; None if there is none.

    Raises:
        InputError: there is no template at the path, or it cannot write conversations. If the checkpoint's cannot, a warning is
            logged: the model still works for completions.
    """
    if path:
        template = ChatTemplate(
            language_model.tokenizer, read_template(path, "chat_template"), option=f"chat_template = {path!r}"
        )
        template.check()
        return template
    try:
        stored = stored_template(language_model.tokenizer, language_model.checkpoint.settings)
        if stored is not None:
            stored.check()
        return stored
    except InputError as error:
        log.warning(
            "/v1/chat/completions is not available: %s Another template can be given with --chat-template.", error
        )
        return None


def _name_of(retriever: Retriever, language_model: LanguageModel | None) -> str:
    """Return the folder name of the checkpoint's run or the name of an exported file; without a model, the datastore's folder."""
    if language_model is None:
        return retriever.datastore.folder.resolve().name
    path = language_model.checkpoint.path.resolve()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.stem
