"""Configuration of uvicorn, with limits that it lacks: size of the headers and time until they arrive.

    bytes ─► Protocol: too many? 431; too late? 408 ─► httptools ─► the application, whose `Limits` count exactly

httptools buffers headers of any length. (h11 has a limit, but needs two to four times the CPU time for a request.)
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
    """Return the configuration of uvicorn for an application of `make_app`; `options` are further options of
    uvicorn."""
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
    """uvicorn's protocol with limits for the bytes that it reads before it calls the application."""

    def __init__(self, *args: Any, settings: ServeSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._unread_bytes = 0  # since the headers were complete or a part of a body was read
        self._late: asyncio.TimerHandle | None = None  # runs while headers arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > self._settings.max_head_bytes:
            self._refuse(head_too_long(self._settings.max_head_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._head_is_complete()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP."""
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        seconds = self._settings.read_seconds
        if self._late is None:
            self._late = self.loop.call_later(seconds, lambda: self._refuse(read_too_slowly(seconds)))

    def _head_is_complete(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer if a request has begun and no other answer is being sent."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            answers = self._unread_bytes > 0
        else:  # while a body arrives, the error is of this request; later, of the next one
            answers = cycle.more_body and not cycle.response_started
        if answers:
            if cycle is not None:
                cycle.disconnected = True  # the application's own answer is dropped
            body = error_json(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
