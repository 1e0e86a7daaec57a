"""Configuration of uvicorn: its parser h11 limits the size of headers; this protocol adds a time limit and JSON errors.

bytes ─► h11: headers too long? 431; Protocol: too late? 408 ─► the application, whose `Limits` count exactly
"""

import asyncio
import sys
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from retro.server.errors import ApiError, error_json
from retro.server.limits import head_too_long, read_too_slowly
from retro.server.settings import ServeSettings


def uvicorn_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application of `make_app`; `options` are further options of uvicorn."""
    settings: ServeSettings = app.state.service.settings
    protocol: Any = partial(Protocol, settings=settings)
    return uvicorn.Config(
        app,
        http=protocol,
        h11_max_incomplete_event_size=settings.max_head_bytes,
        log_config=None,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
        server_header=False,
        **options,
    )


class Protocol(H11Protocol):
    """uvicorn's protocol with a time limit for the headers of a request, and errors as JSON."""

    def __init__(self, *args: Any, settings: ServeSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._late: asyncio.TimerHandle | None = None  # runs while headers arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._limit_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """See `H11Protocol`."""
        super().handle_events()
        self._limit_time()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 rejects."""
        rejected = sys.exception()
        too_long = isinstance(rejected, h11.RemoteProtocolError) and rejected.error_status_hint == 431
        self._refuse(head_too_long(self._settings.max_head_bytes) if too_long else ApiError(400, msg))

    def _limit_time(self) -> None:
        """Start the timer if the headers of a request are expected, and stop it when they are complete."""
        seconds = self._settings.read_seconds
        if self.conn.their_state is not h11.IDLE and self._late is not None:
            self._late.cancel()
            self._late = None
        elif self.conn.their_state is h11.IDLE and self._late is None:
            self._late = self.loop.call_later(seconds, lambda: self._refuse(read_too_slowly(seconds)))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer if a part of a request has arrived and no other answer is being sent."""
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is h11.ERROR or self.conn.trailing_data[0]
        if begun and self.conn.our_state is h11.IDLE:
            body = error_json(error)
            headers = {"content-type": "application/json", "connection": "close", "content-length": str(len(body))}
            for event in (
                h11.Response(status_code=error.status, headers=[*headers.items()]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
