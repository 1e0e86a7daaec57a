"""Generation for many clients: a few threads draw tokens, and each client gets its own piece by piece.

    a request ─► waits for a thread ─► LanguageModel.generate ─► pieces ─► the event loop that asked

A client that goes away stops its generation at the next token.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from retro.generation import Piece
from retro.generation_settings import GenerationSettings
from retro.language_model import LanguageModel
from retro.server.errors import took_too_long


class Generations:
    """Runs generations side by side, as many as there are threads.

    Args:
        language_model: what generates.
        threads: generations at once; others wait.
        count_tokens: called with the number of tokens of every step.
    """

    def __init__(self, language_model: LanguageModel, threads: int, count_tokens: Callable[[int], None]) -> None:
        self._language_model, self._count_tokens = language_model, count_tokens
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")
        self._waiting = set[object]()

    def __len__(self) -> int:
        """Requests that wait for a thread."""
        return len(self._waiting)

    async def pieces(
        self, prompts: Sequence[np.ndarray], settings: GenerationSettings, k: int, seconds: float
    ) -> AsyncIterator[list[Piece]]:
        """What `LanguageModel.generate` yields, step by step.

        Raises:
            ApiError: it is not done after so many seconds.
            InputError: at the first step; see `LanguageModel.generate`.
        """
        loop, ticket = asyncio.get_running_loop(), object()
        steps: asyncio.Queue[list[Piece] | Exception | None] = asyncio.Queue()
        stopped = threading.Event()

        def tell(step: list[Piece] | Exception | None) -> None:
            if not stopped.is_set():
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def work() -> None:
            self._waiting.discard(ticket)
            try:
                for step in self._language_model.generate(prompts, settings, k):
                    if stopped.is_set():
                        return
                    self._count_tokens(len(step))
                    tell(step)
                tell(None)
            except Exception as error:
                tell(error)

        self._waiting.add(ticket)
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
            job.cancel()
            self._waiting.discard(ticket)
