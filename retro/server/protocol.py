"""What uvicorn is told, and what it does not limit by itself: how long a request's headers may be, and how slowly they may come.

    bytes ─► Protocol: too many, or too late? 431, 408 ─► httptools ─► the app, whose `Limits` count exactly

httptools keeps a header of any length until it is whole. (h11 has a limit, but takes two to four times the processor time
for a request.)
"""

import asyncio
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from retro.server.errors import ApiError, error_json
from retro.server.limits import head_too_long, read_too_slowly
from retro.server.settings import ServeSettings


def uvicorn_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """How uvicorn runs an app of `make_app`; `options` are further ones of uvicorn's."""
    protocol: Any = partial(Protocol, settings=app.state.service.settings)
    return uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
        server_header=False,
        **options,
    )


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for what it reads before the app knows of a request."""

    def __init__(self, *args: Any, settings: ServeSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._unread_bytes = 0  # since headers were whole or a part of a body was read
        self._late: asyncio.TimerHandle | None = None  # runs while headers are awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > self._settings.max_head_bytes:
            self._refuse(head_too_long(self._settings.max_head_bytes))

    def on_message_begin(self) -> None:
        """See `httptools.HttpRequestParser`."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        self._unread_bytes = 0
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        self._unread_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        seconds = self._settings.read_seconds
        if self._late is None:
            self._late = self.loop.call_later(seconds, lambda: self._refuse(read_too_slowly(seconds)))

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless nothing was asked or an answer is under way, and hang up."""
        if self.transport.is_closing():
            return
        if self._unread_bytes and (self.cycle is None or self.cycle.response_complete):
            body = error_json(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
