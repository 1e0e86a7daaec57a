"""Generation for many clients: one thread continues all texts in one batch, and each client receives its tokens one by
one.

    request ─► waits for places in the batch ─► Batch.step, again and again ─► tokens ─► event loop of the request

Requests join and leave between any two steps. A free place goes to the first request that waits and has less than an
eighth of the places, or else to that with the fewest. So a request with many prompts does not delay one that arrives
later, and no request waits forever. When a client disconnects, its texts leave before the next step. A text that fails
ends its own request only.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from indexing.store.damage_found import require_whole
from retro.copying.rows import RetrieveNeighbors
from retro.inference.generation import Continuation, GeneratedToken
from retro.inference.language_model import GivenNeighbors, LanguageModel
from retro.inference.settings import GenerationSettings
from retro.server.batching import call_on_loops
from retro.server.errors import ApiError, time_limit_error
from retro.server.metrics import Metrics

Message = list[GeneratedToken] | Exception | None
"""Tokens of a step, or the end of the generation, with or without an error."""


@dataclass(eq=False)
class _Request:
    """A request that was not answered yet.

    Attributes:
        prompts, settings, retrieve, n, sources, inserted: as in `generation.generate`.
        waiting: numbers of the continuations that wait for a place in the batch.
        since: time of acceptance, later of the last step, in seconds of `time.perf_counter`.
        running: its texts in the batch.
        begun: True if it has received a token.
        gone: True if no client waits for it any longer.
    """

    prompts: Sequence[np.ndarray]
    settings: GenerationSettings
    retrieve: Sequence[RetrieveNeighbors | None]
    n: int
    sources: bool
    inserted: Sequence[tuple[int, int]]
    waiting: deque[int]
    since: float
    loop: asyncio.AbstractEventLoop
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    running: set[Continuation] = field(default_factory=set)
    begun: bool = False
    gone: bool = False

    @property
    def joined(self) -> bool:
        """True if a text of the request is or was in the batch."""
        return len(self.waiting) < len(self.prompts) * self.n

    def prompt_of(self, continuation: int) -> int:
        """The number of the prompt of a continuation."""
        return continuation // self.n


class GenerationQueue:
    """Continues texts of all requests in one batch, on one thread that runs as long as there are requests.

    Args:
        language_model: the model that generates.
        max_num_seqs: largest number of texts in the batch; others wait.
        metrics: counts tokens and measures their latency.
        before_step: called before each step; an exception ends all requests.

    Attributes:
        num_running: texts in the batch.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        max_num_seqs: int,
        metrics: Metrics,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_step = before_step
        self._language_model, self._max_num_seqs, self._metrics = language_model, max_num_seqs, metrics
        self._count_batch = metrics.count_batch("generate")
        self._thread, self._running = ThreadPoolExecutor(1, thread_name_prefix="generate"), False
        # Only the thread uses the batch. It makes it too: see `machine.on_background_thread`.
        self._batch, self.num_running = self._thread.submit(language_model.batch).result(), 0
        self._requests: list[_Request] = []
        self._lock = threading.Lock()  # guards `_requests` and `_running`

    def __len__(self) -> int:
        """Number of texts that wait for a place in the batch."""
        with self._lock:
            return sum(len(request.waiting) for request in self._requests)

    def cut_off(self) -> None:
        """End every generation with an error, streams included, because the server stops."""
        with self._lock:
            requests = [*self._requests]
        error = ApiError(503, "the server was stopped before the generation was finished.")
        _send([(request, error) for request in requests])

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int,
        seconds: float,
        *,
        n: int = 1,
        sources: bool = False,
        given: GivenNeighbors | None = None,
        inserted: Sequence[tuple[int, int]] | None = None,
    ) -> AsyncIterator[list[GeneratedToken]]:
        """Yield the steps of `LanguageModel.generate`.

        Raises:
            ApiError: the generation takes longer than `seconds`.
            InputError: at the first step; see `LanguageModel.generate`.
        """
        checked, retrieve = self._language_model.checked(prompts, settings, k, given)
        loop, waiting = asyncio.get_running_loop(), deque(range(len(prompts) * n))
        passages = inserted or [(0, 0)] * len(prompts)
        request = _Request(checked, settings, retrieve, n, sources, passages, waiting, time.perf_counter(), loop)
        until = loop.time() + seconds
        self._accept(request)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        message = await request.messages.get()
                except TimeoutError as error:
                    raise time_limit_error(seconds) from error
                if message is None:
                    return
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            request.gone = True

    def _accept(self, request: _Request) -> None:
        with self._lock:
            self._requests.append(request)
            if not self._running:
                self._running = True
                self._thread.submit(self._run)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while requests := self._present():
            try:
                self._before_step()
            except Exception as error:
                self._batch = self._language_model.batch()
                self._end(requests, error)
                continue
            try:
                self._admit(requests)
                step = self._batch.step()
                require_whole()
                self._deliver(step, requests)
            except Exception as error:  # of no single text, so the state of the batch is unknown
                self._batch = self._language_model.batch()
                self._end([request for request in requests if request.joined], error)

    def _present(self) -> list[_Request]:
        """Return the requests that clients wait for; the texts of others leave the batch. Without any, the thread
        ends."""
        with self._lock:
            gone = [request for request in self._requests if request.gone]
            self._requests = [request for request in self._requests if request not in gone]
            present = [*self._requests]
            self._running = bool(present)
        self._batch.remove(text for request in gone for text in request.running)
        self.num_running = len(self._batch)
        return present

    def _admit(self, requests: Sequence[_Request]) -> None:
        """Give free places of the batch to texts that wait. Continuations of a prompt that join together read it
        once."""
        joining, share = dict[_Request, list[int]](), max(1, self._max_num_seqs // 8)
        for _ in range(self._max_num_seqs - len(self._batch)):
            waiting = [request for request in requests if request.waiting]
            if not waiting:
                break
            texts = {request: len(request.running) + len(joining.get(request, ())) for request in waiting}
            chosen = min(waiting, key=lambda request: texts[request] if texts[request] >= share else 0)
            joining.setdefault(chosen, []).append(chosen.waiting.popleft())
        for request, rows in joining.items():
            for prompt, group in groupby(rows, key=request.prompt_of):
                copies = [(row, row % request.n) for row in group]
                try:
                    added = self._batch.add(
                        request.prompts[prompt],
                        request.settings,
                        request.retrieve[prompt],
                        copies=copies,
                        sources=request.sources,
                        inserted=request.inserted[prompt],
                    )
                    request.running |= set(added)
                except Exception as error:
                    self._fail(request, error)
                    break
        self.num_running = len(self._batch)

    def _deliver(
        self, new: Sequence[tuple[Continuation, GeneratedToken | Exception]], requests: Sequence[_Request]
    ) -> None:
        """Send the tokens of a step to their requests. Each event loop is woken once."""
        if not new:
            return
        self._count_batch(len(new))
        messages, now = list[tuple[_Request, Message]](), time.perf_counter()
        owner = {text: request for request in requests for text in request.running}
        tokens: dict[_Request, list[GeneratedToken]] = {}
        failures: dict[_Request, Exception] = {}
        for text, token in new:
            request = owner[text]
            if isinstance(token, Exception):
                failures[request] = token
                continue
            tokens.setdefault(request, []).append(token)
            if token.finish_reason is not None:
                request.running.discard(text)
        for request, error in failures.items():
            tokens.pop(request, None)
            self._fail(request, error)
        for request, step in tokens.items():
            drafts = sum(token.accepted for token in step), sum(token.rejected for token in step)
            self._metrics.count_step(len(step), *drafts, now - request.since, first=not request.begun)
            request.since, request.begun = now, True
            messages.append((request, sorted(step, key=lambda token: token.row)))
        _send(messages)
        self._end([request for request in tokens if not request.running and not request.waiting])

    def _fail(self, request: _Request, error: Exception) -> None:
        """End a request with an error, after one of its texts has failed. Its other texts leave the batch."""
        self._batch.remove(request.running)
        self._end([request], error)

    def _end(self, requests: Sequence[_Request], error: Exception | None = None) -> None:
        """Forget requests that are finished or have failed."""
        with self._lock:
            self._requests = [request for request in self._requests if request not in requests]
        _send([(request, error) for request in requests])


def _send(messages: Iterable[tuple[_Request, Message]]) -> None:
    """Send messages to requests, on the event loop of each."""
    call_on_loops((request.loop, partial(request.messages.put_nowait, message)) for request, message in messages)
