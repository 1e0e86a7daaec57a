"""What stands before every endpoint: who may come in, how much may be sent, how long it may take.

    request ─► token? 401 ─► shutting down? 503 ─► too many? 429 ─► body too long? 413 ─► the app, until it has answered,
                                                          the client is gone, or the time is over (504)

What the app raises is answered as `errors.py` says.
"""

import asyncio
import hmac
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retro.server.errors import ApiError, as_api_error, error_response, took_too_long
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings

_WHATEVER_HAPPENS = "/metrics"  # needs the token, but is answered under any load and while shutting down
_SECURITY_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
_CLIENT_GONE = 499  # what nginx writes into its log for a client that did not wait for the answer


@dataclass
class Admission:
    """How many requests are under way, and whether more are taken.

    Attributes:
        draining: set once the server is told to stop: what was accepted is finished, new requests are answered 503.
    """

    under_way: int = 0
    draining: bool = False


class Limits:
    """The ASGI middleware; see the module.

    Args:
        app: what it stands before.
        settings: the limits.
        admission: shared with who asks whether the server is ready.
        metrics: where answers are counted.
        token: that requests must bear; empty = none.
        public: paths that are always answered, and need no token: health, readiness, the page, the description of the API.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServeSettings,
        admission: Admission,
        metrics: Metrics,
        token: str,
        public: frozenset[str],
    ) -> None:
        self._app, self._settings, self._admission, self._metrics = app, settings, admission, metrics
        self._token, self._public = token.encode(), public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = time.perf_counter(), _CLIENT_GONE

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(each for each in _SECURITY_HEADERS if each[0] not in named),
                ]
            await send(message)

        try:
            if scope["path"] in self._public:
                await self._answered(scope, receive, send_noting)
                return
            self._check_token(scope)
            if scope["path"] == _WHATEVER_HAPPENS:
                await self._answered(scope, receive, send_noting)
                return
            self._check_load()
            self._admission.under_way += 1
            try:
                await self._answered(scope, receive, send_noting)
            finally:
                self._admission.under_way -= 1
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_request(scope["method"], route, status, time.perf_counter() - started)

    def _check_token(self, scope: Scope) -> None:
        if not self._token:
            return
        given = _header(scope, b"authorization")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            said = "the bearer token is wrong" if given else "a bearer token is needed"
            message = f"{said}: send the header `Authorization: Bearer TOKEN` with the one the server was started with."
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _check_load(self) -> None:
        if self._admission.draining:
            raise ApiError(503, "the server is shutting down.", headers={"Retry-After": "5", "Connection": "close"})
        if self._admission.under_way >= self._settings.max_requests:
            message = f"{self._admission.under_way:,} requests are under way, as many as are taken (max_requests)."
            raise ApiError(429, message, headers={"Retry-After": "1"})

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app answer; raises ApiError where a limit is passed before the answer begins."""
        begun, gone = False, False
        body = await self._read(scope, receive)
        if body is None:
            return  # the client is gone
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        async def send_begun(message: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                deadline.reschedule(None)  # a stream looks at the time itself
            await send(message)

        watcher = asyncio.ensure_future(watch())
        try:
            async with asyncio.timeout(self._settings.request_seconds) as deadline:
                await self._app(scope, _replay(body), send_begun)
        except TimeoutError as error:
            if begun or not deadline.expired():
                raise
            raise took_too_long(self._settings.request_seconds) from error
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
        except ApiError:
            raise
        except Exception as error:
            answer = as_api_error(error)
            if begun:
                raise
            raise answer from error
        finally:
            watcher.cancel()

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client went away meanwhile."""
        limit = self._settings.max_body_bytes
        message = f"the request is longer than {limit:,} bytes (max_body_bytes)."
        if int(_header(scope, b"content-length") or 0) > limit:
            raise ApiError(413, message, headers={"Connection": "close"})
        parts, size = [], 0
        while True:
            received = await receive()
            if received["type"] == "http.disconnect":
                return None
            parts.append(received.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise ApiError(413, message, headers={"Connection": "close"})
            if not received.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes) -> Receive:
    """A body that was read, for the app; after it nothing comes, as who watches for the client's going cancels the app."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
