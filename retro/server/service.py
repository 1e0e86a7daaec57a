"""The service behind the endpoints: batched access to retriever and model.

endpoints ─► Service.search, embed ─► one thread each ─► Retriever
          ─► Service.score, generations ─► threads ─► LanguageModel
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from indexing.retrieval.results import Passage
from indexing.retrieval.retriever import Retriever
from indexing.store.errors import DamagedFile, InputError
from retro.inference.chat_template import ChatTemplate, chosen_template
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import GivenNeighbors, LanguageModel, Scores
from retro.inference.scoring import Window
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import SourceFinder, Sources
from retro.inference.spans import ChunkTexts
from retro.inference.verbatim_runs import GeneratedRuns, TracedDatastore, is_traced, traced_datastores
from retro.server import schemas
from retro.server.batched_search import Query, SearchKey, SearchResult, cost_of_search, search_with
from retro.server.batching import Batcher
from retro.server.errors import ApiError
from retro.server.generation_queue import GenerationQueue
from retro.server.limits import Admission
from retro.server.metrics import Metrics
from retro.server.request_limits import RequestLimits
from retro.server.settings import ServeSettings
from retro.server.watched_files import WatchedFiles

log = logging.getLogger("retro.server")

_TICKS_TO_ANSWER = 20  # of 0.05 s each: time to answer requests that are cut off


class ScoreKey(NamedTuple):
    """Everything except the tokens that scores depend on."""

    k: int
    top: int = 0
    sources: bool = False


class PassageKey(NamedTuple):
    """Everything except the conversation that its passages depend on: see `find_passages`."""

    k: int
    tokens: int
    least_match: float | None


Sourced = tuple[GeneratedToken, Sources | None]
"""A token, and what is new in the sources of its continuation."""


class Service:
    """A retriever and optionally a language model, ready for many clients.

    Args:
        retriever: an open retriever.
        language_model: an open model; None = only search and embedding.
        settings: the limits.

    Attributes:
        limits: of what a request asks for.
        name: name of the model, or of the datastore without a model.
        search: (`SearchKey`, queries) → a result for each query.
        passages: (`PassageKey`, the queries of conversations) → passages for each conversation.
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
        self.limits = RequestLimits(settings, retriever, language_model)
        self.admission, self.metrics = Admission(), Metrics()
        self.files = WatchedFiles(split.folder for split in retriever.retrieval.splits)
        count, size, watch = self.metrics.count_batch, settings.max_batch, self.files.watch.require
        self.search: Batcher[SearchKey, Query, SearchResult] = Batcher(
            "search", search_with(retriever), size, count("search"), cost_of_search, watch
        )
        self.passages: Batcher[PassageKey, tuple[str, ...], list[Passage]] = Batcher(
            "passages", _passages_with(retriever), 1, count("passages"), before=watch
        )
        self.embed: Batcher[str, Query, np.ndarray] = Batcher("embed", _embed_with(retriever), size, count("embed"))
        self.trace: Batcher[None, Callable[[], Any], Any] = Batcher(
            "trace", lambda _, parts: [part() for part in parts], 1, before=watch
        )
        self._traced: list[TracedDatastore] | None = None
        if language_model is not None:
            self.score = Batcher(
                "score",
                _score_with(language_model),
                settings.max_score_tokens,
                count("score"),
                lambda key, window: len(window) * (1 + 2 * key.k),
                watch,
            )
            self.generations = GenerationQueue(language_model, settings.max_num_seqs, self.metrics, watch)
            self.chat_template = _chat_template(language_model, settings.chat_template)
        self._watch_queues()
        self.examples: dict[int, tuple[schemas.ExamplesResponse, asyncio.Task[None]]] = {}
        self.measuring = asyncio.Lock()

    def _watch_queues(self) -> None:
        """Add what is waiting and running to the metrics."""
        queues: dict[str, Sized] = {"search": self.search, "embed": self.embed, "trace": self.trace}
        queues["passages"] = self.passages
        running: dict[str, Callable[[], int]] = {}
        if self.score is not None and (generations := self.generations) is not None:
            queues |= {"score": self.score, "generate": generations}
            running["generate"] = lambda: generations.num_running
        waiting = {work: queue.__len__ for work, queue in queues.items()}
        gauge = self.metrics.gauge
        gauge("retro_waiting", "Requests that wait for a worker; texts that wait for a place in the batch.", waiting)
        gauge("retro_running", "Texts in the batch.", running)
        accepted = "Requests accepted and not yet answered."
        gauge("retro_requests_under_way", accepted, lambda: self.admission.under_way)
        if self.language_model is not None and (cache := self.language_model.neighbor_cache) is not None:
            read = {"hit": lambda: cache.hits, "miss": lambda: cache.misses}
            gauge("retro_neighbors_read", "Neighbors found in the cache, or encoded.", read, "cache")
            gauge("retro_neighbor_cache_bytes", "Size of the encoded neighbors in the cache.", lambda: cache.bytes)

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
        shares: bool = False,
        given: GivenNeighbors | None = None,
        inserted: Sequence[tuple[int, int]] | None = None,
    ) -> AsyncIterator[Sourced]:
        """Yield the tokens of `GenerationQueue.generate`; with `sources`, each has what is new in those of its
        continuation.

        `starts` are the characters of each answer before its continuation; empty = 0. With `shares`, tokens have copied
        shares and trust without sources, too.
        """
        self.model()
        assert self.generations is not None
        seconds = self.settings.request_seconds
        rows = [prompt for prompt in prompts for _ in range(n)]
        finders = await asyncio.to_thread(self._finders, rows, starts or [0] * len(rows)) if sources else []

        def of_step(step: list[GeneratedToken]) -> list[Sourced]:
            return [(token, finders[token.row].add_generated(token)) for token in step]

        steps = self.generations.generate(
            prompts, settings, k, seconds, n=n, sources=sources or shares, given=given, inserted=inserted
        )
        async for step in steps:
            for sourced in await asyncio.to_thread(of_step, step) if sources else [(token, None) for token in step]:
                yield sourced

    def _finders(self, prompts: Sequence[np.ndarray], starts: Sequence[int]) -> list[SourceFinder]:
        texts, traced = ChunkTexts(self.retriever), self.traced() if self.traces else []
        return [
            SourceFinder(self.retriever, texts, start, GeneratedRuns(traced, texts, prompt, start) if traced else None)
            for prompt, start in zip(prompts, starts, strict=True)
        ]

    # --- tokens -----------------------------------------------------------------------------------------------------

    async def encoded(self, texts: Sequence[str], param: str) -> list[np.ndarray]:
        """Return the token ids [t] int64 of texts (a string is one), without beginning and end of document.

        Raises:
            ApiError: the texts have more characters or tokens than allowed for one request.
        """
        self.limits.characters(texts, param)
        rows = await asyncio.to_thread(self.retriever.tokenizer.encode_batch, texts)
        self.limits.tokens(rows, param)
        return [row.astype(np.int64) for row in rows]

    def as_document(self, tokens: np.ndarray) -> np.ndarray:
        """Put the beginning-of-document token in front of tokens [t], unless it is there: the model was trained on
        whole documents."""
        bos, eos = self.retriever.tokenizer.bos_id, self.retriever.tokenizer.eos_id
        # lm-eval's client begins a document with the end-of-document token if the beginning-of-document token has the
        # id 0.
        begun = {bos, eos} if bos == 0 else {bos}
        rest = tokens[1:] if len(tokens) and int(tokens[0]) in begun else tokens
        return np.concatenate([[bos], rest]).astype(np.int64)


def _embed_with(retriever: Retriever) -> Callable[[str, list[Query]], Sequence[np.ndarray]]:
    return lambda _, queries: list(retriever.queries.vectors(queries))  # type: ignore[arg-type]


def _passages_with(
    retriever: Retriever,
) -> Callable[[PassageKey, list[tuple[str, ...]]], list[list[Passage]]]:
    return lambda key, conversations: [
        retriever.passages(queries, key.k, tokens=key.tokens, least_match=key.least_match) for queries in conversations
    ]


def _score_with(language_model: LanguageModel) -> Callable[[ScoreKey, list[Window]], list[None]]:
    def work(key: ScoreKey, windows: list[Window]) -> list[None]:
        language_model.score_windows(windows, key.k, key.top, key.sources)
        return [None] * len(windows)

    return work


def _chat_template(language_model: LanguageModel, path: str) -> ChatTemplate | None:
    """Return the template in a file or folder, or the checkpoint's; None if there is none.

    Raises:
        InputError: there is no template at the path, or it cannot write conversations. If the checkpoint's cannot, a
            warning is logged: the model still works for completions.
    """
    try:
        return chosen_template(language_model.tokenizer, language_model.checkpoint.settings, path)
    except InputError as error:
        if path:
            raise
        log.warning(
            "/v1/chat/completions is not available: %s Another template can be given with --chat-template.", error
        )
        return None


def _name_of(retriever: Retriever, language_model: LanguageModel | None) -> str:
    """Return the folder name of the checkpoint's run or the name of an exported file; without a model, the datastore's
    folder."""
    if language_model is None:
        return retriever.datastore.folder.resolve().name
    path = language_model.checkpoint.path.resolve()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.stem
