"""`retro serve DATASTORE`: the query API and its page, run by uvicorn on one machine, or by Ray Serve on a cluster.

options ─► bind the port ─► open datastores and checkpoint ─► make_app ─► uvicorn, until SIGTERM or Ctrl-C
        │                                     new requests get 503, others finish ◄─┘
        │                       after --shutdown-seconds or a second signal: 503 ◄─┘
        └─► executor.kind = "ray": the same application in the front ends of `ray_serve.py`
"""

import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import field, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import uvicorn
from pydantic import Field

from indexing.machine import on_ending_thread
from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.executors.settings import ClusterSettings, ExecutorChoice
from pipelines.terminal.output import echo
from retro.server.settings import ServeSettings

if TYPE_CHECKING:
    from indexing.retrieval.retriever import Retriever
    from retro.inference.language_model import LanguageModel
    from retro.server.service import Service

log = logging.getLogger("retro")


@settings
class ServeOptions(ServeSettings):
    """Serve a datastore over HTTP, and with a checkpoint also a language model that retrieves from it."""

    checkpoint: str = ""
    """Checkpoint for scoring and generation; empty: only search, embeddings and the page."""
    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = all addresses of this machine."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8080
    """Port to listen on; 0 = any free port."""
    token_env: str = "RETRO_TOKEN"
    """Environment variable with the bearer token of requests. If it is not set, requests need no token."""
    device: str = "auto"
    """Device of the model: `auto`, `cpu`, `cuda` …"""
    executor: ExecutorChoice = field(default_factory=ExecutorChoice)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value, default in (("chat_template", self.chat_template, ""), ("device", self.device, "auto")):
            if value != default and not self.checkpoint:
                raise InputError(f"{key} = {value!r}: it needs a model. Add --checkpoint, or remove it.")


def serve(datastore: str, options: ServeOptions) -> int:
    """`retro serve DATASTORE`."""
    from indexing.retrieval.retriever import Retriever
    from retro.server.app import make_app
    from retro.server.protocol import uvicorn_config

    token = _token(options)
    options = replace(options, allowed_hosts=(*options.allowed_hosts, options.host))
    if options.executor.kind == "ray":
        return _serve_on_ray((datastore, *options.extra_datastores), options, token)
    with _bound(options.host, options.port) as listening:
        retriever = Retriever.open(datastore, *options.extra_datastores)
        language_model = None
        if options.checkpoint:
            language_model = on_ending_thread(partial(_open_model, retriever, options))
        app = make_app(retriever, language_model, options, token=token)
        host, port = listening.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        service = app.state.service
        _settle()
        server = _Server(
            uvicorn_config(app), service, "\n".join([*_lines(service, bool(token), options), f"ready: {url}"])
        )
        server.run(sockets=[listening])
    if not server.started:
        log.error("the server did not start")
        return 1
    answered = "all accepted requests were answered"
    echo(f"stopped; {f'{server.cut_off:,} requests were cut off' if server.cut_off else answered}")
    return 0


def _open_model(retriever: "Retriever", options: ServeOptions) -> "LanguageModel":
    from retro.inference.language_model import LanguageModel

    size = options.neighbor_cache_bytes
    return LanguageModel.open(options.checkpoint, retriever, options.device, neighbor_cache_bytes=size)


def _serve_on_ray(datastores: tuple[str, ...], options: ServeOptions, token: str) -> int:
    """Serve until SIGTERM or Ctrl-C. Ray drains the front ends, so accepted requests are answered."""
    from pipelines.launch.ray_serve import Served, serve_on_ray

    served = Served(datastores, options.checkpoint, options.device, token, options)
    with serve_on_ray(served, options.cluster, options.executor.ray_address, options.host, options.port) as url:
        # Only now: Ray installs its own handler, which aborts the process after three seconds.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        echo(f"ready: {url}")
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            echo("stopping")
    return 0


class _Server(uvicorn.Server):
    """Prints a line when it is ready. After a signal it finishes accepted requests and answers new ones with 503.

    After `shutdown_seconds`, or a second signal, it answers unfinished requests with 503 and exits.
    """

    def __init__(self, config: uvicorn.Config, service: "Service", ready: str) -> None:
        super().__init__(config)
        self._service, self._ready, self._stop_at = service, ready, 0.0
        self.cut_off = 0  # requests that were unfinished when the time was over

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            echo(self._ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        admission = self._service.admission
        # The second signal stops at once.
        seconds = 0.0 if admission.draining else self._service.settings.shutdown_seconds
        self._stop_at, admission.draining = time.monotonic() + seconds, True

    async def on_tick(self, counter: int) -> bool:
        admission = self._service.admission
        if admission.draining and (not admission.under_way or time.monotonic() >= self._stop_at):
            self.cut_off = await self._service.cut_off()
            self.should_exit = True
        return await super().on_tick(counter)


def _settle() -> None:
    """Tune the process for serving."""
    # Objects made so far stay. Without freeze, a garbage collection of them stops all requests for 0.2 s.
    gc.collect()
    gc.freeze()
    # The searching thread yields to the one that reads requests after this time, not after the default 5 ms.
    sys.setswitchinterval(5e-4)


def _token(options: ServeOptions) -> str:
    """The bearer token, or ""; logs a warning if other machines can send requests without one."""
    token = os.environ.get(options.token_env)
    if token is None and options.token_env != ServeOptions.token_env:
        raise InputError(f"token_env = {options.token_env!r}: the environment variable {options.token_env} is not set.")
    if token == "":
        raise InputError(f"{options.token_env} is set but empty: set it to a token, or unset it to serve without one.")
    token = token or ""
    if not token.isascii() or token != token.strip():
        raise InputError(
            f"{options.token_env}: a token must be ASCII without leading or trailing blanks, because it is sent in an HTTP header."
        )
    if not token and not _is_loopback(options.host):
        log.warning(
            "listening on %s without a token: anyone who can reach this machine can send requests. Set %s to require one.",
            options.host, options.token_env,
        )  # fmt: skip
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int) -> socket.socket:
    """Bind the port before datastores are opened, so that a port in use is an error at once."""
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise InputError(
                f"{host}:{port}: {error.strerror}. Name another --host or --port; --port 0 takes any free port."
            ) from error
        undo.pop_all()
    return bound


def _lines(service: "Service", token: bool, options: ServeOptions) -> list[str]:
    """Lines for the terminal about the datastores and the model."""
    from retro.server.search_api import datastore_info

    metadata = datastore_info(service)
    lines = [f"datastore: {row['name']}, {row['chunks']:,} chunks" for row in metadata["datastores"]]
    model = metadata["model"]
    if model:
        lines.append(
            f"model: {model['name']}, step {model['step']:,}" + ("" if model["retrieval"] else ", no retrieval")
        )
    else:
        lines.append("model: none (--checkpoint adds one)")
    return [*lines, f"token: from {options.token_env}" if token else "token: none"]
