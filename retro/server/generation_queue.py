"""Generation for many clients: a few threads generate, and each client receives its tokens one by one.

    request ─► waits for a thread ─► LanguageModel.generate ─► tokens ─► event loop of the request

When a client disconnects, its generation stops at the next token or at the next window of its prompt.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.server.errors import ApiError, time_limit_error
from retro.server.metrics import Metrics


class _Stopped(Exception):
    """No client waits for the generation any longer."""


class GenerationQueue:
    """Runs one generation on each of its threads.

    Args:
        language_model: the model that generates.
        threads: number of generations at once; others wait.
        metrics: counts tokens and measures their latency.
    """

    def __init__(self, language_model: LanguageModel, threads: int, metrics: Metrics) -> None:
        self._language_model, self._metrics = language_model, metrics
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")
        self._waiting = set[object]()
        self._senders = set[Callable[[Exception], None]]()  # one for each request, waiting or running

    def __len__(self) -> int:
        """Number of requests that wait for a thread."""
        return len(self._waiting)

    def cut_off(self) -> None:
        """End every generation with an error, streams included, because the server stops."""
        for send in self._senders:
            send(ApiError(503, "the server was stopped before the generation was finished."))

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int,
        seconds: float,
        *,
        n: int = 1,
        sources: bool = False,
    ) -> AsyncIterator[list[GeneratedToken]]:
        """Yield the steps of `LanguageModel.generate`.

        Raises:
            ApiError: the generation takes longer than `seconds`.
            InputError: at the first step; see `LanguageModel.generate`.
        """
        loop, ticket, accepted = asyncio.get_running_loop(), object(), time.perf_counter()
        steps: asyncio.Queue[list[GeneratedToken] | Exception | None] = asyncio.Queue()
        stopped = threading.Event()

        def send(step: list[GeneratedToken] | Exception | None) -> None:
            if not stopped.is_set():
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def check() -> None:
            if stopped.is_set():
                raise _Stopped

        def work() -> None:
            self._waiting.discard(ticket)
            try:
                check()
                since, first = accepted, True
                for step in self._language_model.generate(prompts, settings, k, check=check, n=n, sources=sources):
                    check()
                    now = time.perf_counter()
                    self._metrics.count_step(len(step), now - since, first=first)
                    since, first = now, False
                    send(step)
                send(None)
            except _Stopped:
                pass
            except Exception as error:
                send(error)

        self._waiting.add(ticket)
        self._senders.add(send)
        job, until = self._pool.submit(work), loop.time() + seconds
        try:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        step = await steps.get()
                except TimeoutError as error:
                    raise time_limit_error(seconds) from error
                if step is None:
                    return
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            stopped.set()
            self._senders.discard(send)
            job.cancel()
            self._waiting.discard(ticket)
