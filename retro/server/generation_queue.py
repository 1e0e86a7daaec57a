"""Generation for many clients: a few threads draw tokens, and each client gets its own piece by piece.

    a request ─► waits for a thread ─► LanguageModel.generate ─► pieces ─► the event loop that asked

A client that goes away stops its generation at the next token, or at the next window of its prompt.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from retro.inference.generation import Piece
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.server.errors import ApiError, took_too_long
from retro.server.metrics import Metrics


class _Stopped(Exception):
    """Nobody waits for the generation any more."""


class Generations:
    """Runs generations side by side, as many as there are threads.

    Args:
        language_model: what generates.
        threads: generations at once; others wait.
        metrics: where tokens and the time that they take are counted.
    """

    def __init__(self, language_model: LanguageModel, threads: int, metrics: Metrics) -> None:
        self._language_model, self._metrics = language_model, metrics
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")
        self._waiting = set[object]()
        self._tell = set[Callable[[Exception], None]]()  # of each request, waiting or not

    def __len__(self) -> int:
        """Requests that wait for a thread."""
        return len(self._waiting)

    def cut_off(self) -> None:
        """Let every generation end with an error, streams too: the server stops."""
        for tell in self._tell:
            tell(ApiError(503, "the server was stopped before the generation was finished."))

    async def pieces(
        self, prompts: Sequence[np.ndarray], settings: GenerationSettings, k: int, seconds: float
    ) -> AsyncIterator[list[Piece]]:
        """What `LanguageModel.generate` yields, step by step.

        Raises:
            ApiError: it is not done after so many seconds.
            InputError: at the first step; see `LanguageModel.generate`.
        """
        loop, ticket, asked = asyncio.get_running_loop(), object(), time.perf_counter()
        steps: asyncio.Queue[list[Piece] | Exception | None] = asyncio.Queue()
        stopped = threading.Event()

        def tell(step: list[Piece] | Exception | None) -> None:
            if not stopped.is_set():
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def check() -> None:
            if stopped.is_set():
                raise _Stopped

        def work() -> None:
            self._waiting.discard(ticket)
            try:
                check()
                since, first = asked, True
                for step in self._language_model.generate(prompts, settings, k, check=check):
                    check()
                    now = time.perf_counter()
                    self._metrics.count_step(len(step), now - since, first=first)
                    since, first = now, False
                    tell(step)
                tell(None)
            except _Stopped:
                pass
            except Exception as error:
                tell(error)

        self._waiting.add(ticket)
        self._tell.add(tell)
        job, until = self._pool.submit(work), loop.time() + seconds
        try:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        step = await steps.get()
                except TimeoutError as error:
                    raise took_too_long(seconds) from error
                if step is None:
                    return
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            stopped.set()
            self._tell.discard(tell)
            job.cancel()
            self._waiting.discard(ticket)
