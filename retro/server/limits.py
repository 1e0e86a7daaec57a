"""Checks and limits in front of every endpoint: access, size of a request, number of requests, time.

    request ─► headers too long? 431 ─► not allowed? 401, 403 ─► shutting down? 503 ─► too many requests? 429
            ─► body too long? 413; too slow? 408 ─► counted as under way
            ─► the application, until it has answered, the client disconnects, the time is over (504) or the server stops (503)

These checks need the state of the server or must precede the reading of a body, so no middleware of Starlette has them.
`errors.py` converts the application's exceptions to answers.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexing.store.damage_found import require_whole
from retro.server.errors import ApiError, as_api_error, error_response, time_limit_error
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings
from retro.server.watched_files import WatchedFiles

access_log = logging.getLogger("retro.access")

_ALWAYS_ANSWERED = "/metrics"  # requires the token, but is answered under any load and during shutdown
_SECURITY_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
_CLIENT_GONE = 499  # nginx logs this status for a client that disconnected before the answer
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # a name, an IPv4 address or an IPv6 address in brackets, and a port
_UNREAD_BODIES = 64  # number of incomplete bodies of maximum length that may be in memory
_CLOSE = {"Connection": "close"}


@dataclass
class Admission:
    """Number of requests under way, and whether the server accepts more.

    Attributes:
        under_way: requests that have arrived completely and have not been answered.
        draining: True once the server stops: accepted requests are finished, new ones are answered 503.
        unread_bytes: bytes in memory of bodies that have not arrived completely.
        unanswered: tasks of requests whose answers have not begun.
    """

    under_way: int = 0
    draining: bool = False
    unread_bytes: int = 0
    unanswered: set[asyncio.Task[object]] = field(default_factory=set)

    def cut_off(self) -> None:
        """Cancel requests under way; they are answered 503. Streams continue; see `GenerationQueue.cut_off`."""
        self.draining = True
        for task in self.unanswered:
            task.cancel()


class _Answer:
    """Sends an answer with the common headers, and records its status, whether it has begun, and a lost client.

    Attributes:
        reads: whether the answer may be made from files of a datastore. Then one of a file that ended too early is not
            sent.
    """

    def __init__(self, scope: Scope, send: Send, request_id: bytes) -> None:
        self._scope, self._send, self._headers = scope, send, [*_SECURITY_HEADERS, (b"x-request-id", request_id)]
        self.status, self.begun, self.client_gone = _CLIENT_GONE, False, False
        self.reads = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.reads and message["status"] < 400:
                require_whole()
            self.status, self.begun = message["status"], True
            present = {name.lower() for name, _ in message["headers"]}
            headers = [*self._headers, *self._scope.get("state", {}).get("headers", ())]
            message["headers"] = [*message["headers"], *(header for header in headers if header[0] not in present)]
        await self._send(message)


class Limits:
    """ASGI middleware that applies the limits; see the module.

    Args:
        app: the next ASGI application. It can set further headers of an answer in `scope["state"]["headers"]`.
        settings: the limits.
        admission: shared with the endpoint `/ready` and the metrics.
        metrics: counts the answers.
        token: bearer token that requests must send; empty = none.
        public: paths that need no token and are always answered: health, readiness, the page, the description of the
            API.
        files: those of the datastores. No request is answered while one is damaged.
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
        files: WatchedFiles,
    ) -> None:
        self._files = files
        self._app, self._settings, self._admission, self._metrics = app, settings, admission, metrics
        self._token, self._public = token.encode(), public
        self._hosts = {"", "localhost", *(name.lower() for name in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, request_id = time.perf_counter(), _request_id(scope)
        answer, task = _Answer(scope, send, request_id), asyncio.current_task()
        assert task is not None
        self._admission.unanswered.add(task)
        try:
            try:
                await self._admit(scope, receive, answer)
            except asyncio.CancelledError:
                if not answer.client_gone and not self._admission.draining:
                    raise
                task.uncancel()
                if not answer.client_gone and not answer.begun:
                    message = "the server was stopped before it could answer."
                    raise ApiError(503, message, headers=_CLOSE) from None
        except Exception as error:
            if answer.begun:
                raise
            error = await self._files.explained(error)
            await error_response(as_api_error(error, scope), scope["path"])(scope, receive, answer.send)
        finally:
            self._admission.unanswered.discard(task)
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_request(scope["method"], route, answer.status, seconds)
            if self._settings.access_log:
                client = (scope.get("client") or ("-",))[0]
                access_log.info(
                    "%s %s %s %d %.1f ms %s",
                    client, scope["method"], quote(scope["path"]), answer.status, 1e3 * seconds, request_id.decode(),
                )  # fmt: skip

    async def _admit(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Check a request, read its body and let the application answer.

        Raises:
            ApiError: the request exceeds a limit or is not allowed.
        """
        head_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        if head_bytes > self._settings.max_head_bytes:
            raise head_too_long(self._settings.max_head_bytes)
        public = scope["path"] in self._public
        if not public:
            self._check_access(scope)
        if public or scope["path"] == _ALWAYS_ANSWERED:
            if (body := await self._read(scope, receive, 0)) is not None:
                await self._answer(scope, receive, answer, body)
            return
        self._check_load()
        body = await self._read(scope, receive, self._settings.max_body_bytes)
        if body is None:
            return
        self._check_load()  # other requests may have arrived meanwhile
        self._admission.under_way += 1
        try:
            await self._files.require()
            answer.reads = True
            await self._answer(scope, receive, answer, body)
        finally:
            self._admission.under_way -= 1

    def _check_access(self, scope: Scope) -> None:
        """Check the bearer token, or, on a server without a token, the `Host` header.

        The `Host` check prevents DNS rebinding: a web page of another site points a host name of that site to this
        machine. The browser then treats the server as part of that site, so neither CORS nor the content type protects
        the answers. But the browser sends the site's name as `Host`.
        """
        if self._token:
            given = _header(scope, b"authorization")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
                problem = "the bearer token is wrong" if given else "a bearer token is required"
                message = f"{problem}: send the header `Authorization: Bearer TOKEN` with the server's token."
                raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"} | _CLOSE)
        elif "*" not in self._hosts:
            for host in (value.decode("latin-1") for name, value in scope["headers"] if name == b"host"):
                matched = _HOST.fullmatch(host.strip().lower())
                name = matched[1].removesuffix(".") if matched else host
                if name not in self._hosts and not _is_address(name.strip("[]")):
                    message = (
                        f"Host = {name!r}: a server without a token accepts localhost, IP addresses and the names in "
                        "--allowed-hosts. Start the server with that option or with a token."
                    )
                    raise ApiError(403, message, headers=_CLOSE)

    def _check_load(self) -> None:
        if self._admission.draining:
            raise ApiError(503, "the server is shutting down.", headers={"Retry-After": "5"} | _CLOSE)
        if self._admission.under_way >= self._settings.max_requests:
            message = f"{self._admission.under_way:,} requests are under way, which is the limit (max_requests)."
            raise ApiError(429, message, headers={"Retry-After": "1"})

    async def _read(self, scope: Scope, receive: Receive, limit: int) -> bytes | None:
        """Return the body; None if the client disconnects.

        Raises:
            ApiError: the body has more bytes than the limit, or does not arrive in time.
        """
        too_long = f"the request is longer than {limit:,} bytes (max_body_bytes)."
        too_long = too_long if limit else "this endpoint accepts no body."
        if int(_header(scope, b"content-length") or 0) > limit:
            raise ApiError(413, too_long, headers=_CLOSE)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._settings.read_seconds):
                while True:
                    received = await receive()
                    if received["type"] == "http.disconnect":
                        return None
                    parts.append(received.get("body", b""))
                    size += len(parts[-1])
                    self._admission.unread_bytes += len(parts[-1])
                    if size > limit:
                        raise ApiError(413, too_long, headers=_CLOSE)
                    if not received.get("more_body", False):
                        return b"".join(parts)
                    if self._admission.unread_bytes > _UNREAD_BODIES * self._settings.max_body_bytes:
                        raise ApiError(429, "too many bodies are arriving.", headers={"Retry-After": "1"} | _CLOSE)
        except TimeoutError as error:
            raise read_too_slowly(self._settings.read_seconds) from error
        finally:
            self._admission.unread_bytes -= size

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer, body: bytes) -> None:
        """Let the application answer a request that has arrived; cancel it if the client disconnects.

        Raises:
            ApiError: the time limit passed before the answer began.
        """
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            answer.client_gone = True
            task.cancel()

        async def send(message: Message) -> None:
            if not answer.begun:
                deadline.reschedule(None)  # a stream checks the time itself
                self._admission.unanswered.discard(task)
            await answer.send(message)

        watcher = asyncio.ensure_future(watch())
        try:
            async with asyncio.timeout(self._settings.request_seconds) as deadline:
                await self._app(scope, _replay(body), send)
        except TimeoutError as error:
            if answer.begun or not deadline.expired():
                raise
            raise time_limit_error(self._settings.request_seconds) from error
        finally:
            watcher.cancel()


def head_too_long(limit: int) -> ApiError:
    """Return the error of a request whose URL and headers exceed the limit."""
    message = f"the request's URL and headers are longer than {limit:,} bytes (max_head_bytes)."
    return ApiError(431, message, headers=_CLOSE)


def read_too_slowly(seconds: float) -> ApiError:
    """Return the error of a request that does not arrive in time."""
    return ApiError(408, f"the request did not arrive within {seconds:g} s (read_seconds).", headers=_CLOSE)


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the first value of a request header; empty if the header is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _request_id(scope: Scope) -> bytes:
    """Return the client's request id if it is valid, else a new one."""
    given = _header(scope, b"x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _replay(body: bytes) -> Receive:
    """Return a `receive` that yields the body once and then waits: the watcher cancels the application on a
    disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive
