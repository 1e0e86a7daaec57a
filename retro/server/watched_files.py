"""The files of the served datastores, checked on a thread of their own: other threads may be busy for long, and
checksums take time.

request ─► `require`: all files as when they were opened? ─► answer
exception that no request explains ─► `explained`: a damaged file? ─► 503 with its name, and `/ready` answers 503 from then on
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from indexing.store.errors import DamagedFile
from indexing.store.watch import Watch
from retro.server.errors import is_expected

T = TypeVar("T")


class WatchedFiles:
    """A `Watch` for coroutines.

    Args:
        datastores: folders of the served datastores.
    """

    def __init__(self, datastores: Iterable[Path] = ()) -> None:
        self.watch = Watch(datastores)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")

    async def require(self) -> None:
        """Raise DamagedFile if a file is damaged."""
        await self._run(self.watch.require)

    async def require_all(self) -> None:
        """As `require`, also for files whose damage a request has found."""
        await self._run(self.watch.require_unreported)

    async def explained(self, error: Exception) -> Exception:
        """The error of a damaged file that made a request fail, or the error itself."""
        if not is_expected(error):
            damage = await self._run(self.watch.explain)
            error = damage or error
        if isinstance(error, DamagedFile):
            self.watch.report(error)
        return error

    async def _run(self, check: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, check)
