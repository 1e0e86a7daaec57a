"""Limits and options of the server. Every limit has an error that names it (`errors.py`)."""

import re
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import settings

_PUBLISHED = (
    "max_body_bytes", "max_queries", "max_k", "max_model_k", "max_neighbor_tokens", "max_candidates", "max_characters",
    "max_input_tokens", "max_tokens", "request_seconds",
)  # fmt: skip

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@settings
class ServeSettings:
    """Limits of the server: size, number and duration of requests, and who may send them."""

    name: str = ""
    """Name of the model for clients of /v1. Empty = the name of the checkpoint's run, or of the datastore without a
    checkpoint."""
    max_head_bytes: PositiveInt = 2**16
    """Largest size of a request's URL and headers, in bytes. Larger requests are answered 431."""
    max_body_bytes: PositiveInt = 4 * 2**20
    """Largest size of a request's body, in bytes. Larger requests are answered 413."""
    max_queries: PositiveInt = 256
    """Largest number of texts, token lists or vectors in a request."""
    max_k: PositiveInt = 100
    """Largest number of neighbors of each query of a search."""
    max_model_k: PositiveInt = 16
    """Largest number of neighbors of each chunk that the model reads."""
    max_neighbor_tokens: PositiveInt = 2**16
    """Largest number of neighbor tokens for a request that the model or `/neighbors` reads: chunks × k × 2 chunk
    lengths."""
    max_candidates: PositiveInt = 2**14
    """Largest number of candidates that a search ranks for all queries of a request. A query has 64, or k if k is
    larger, and twice as many with `hybrid`."""
    max_characters: PositiveInt = 2**18
    """Largest number of characters in all texts of a request."""
    max_input_tokens: PositiveInt = 16384
    """Largest number of tokens in all texts of a request."""
    max_tokens: PositiveInt = 1024
    """Largest number of tokens that a request generates for each prompt."""
    read_seconds: _Seconds = 30.0
    """Time limit for receiving a request's headers, and for receiving its body. Later requests are answered 408."""
    request_seconds: _Seconds = 60.0
    """Time limit for answering a request. Then it is answered 504; a stream ends with an error."""
    max_requests: PositiveInt = 256
    """Largest number of requests being processed or waiting. Further requests are answered 429."""
    max_batch: PositiveInt = 1024
    """Largest number of queries that are searched at once."""
    max_score_tokens: PositiveInt = 2**15
    """Largest number of tokens that are scored at once, neighbors included."""
    max_num_seqs: PositiveInt = 32
    """Largest number of texts that are generated in one batch; others wait. A batch has a cache of keys and values for
    each."""
    neighbor_cache_bytes: NonNegativeInt = 2**30
    """Largest size of the keys and values of neighbors that are kept for later chunks and requests, if the decoder
    reads neighbors itself (`model.retrieval.reader`)."""
    shutdown_seconds: _Seconds = 30.0
    """Time after SIGTERM to finish accepted requests."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use this server from a browser. Empty = only the server's own page."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that a server without a token accepts, in addition to `localhost`, `--host` and IP addresses; `*` =
    any."""
    chat_template: str = ""
    """Jinja file, or folder of a tokenizer with a chat template, for `/v1/chat/completions`. Empty = that of the
    checkpoint."""
    strict_fields: bool = False
    """Refuse requests under /v1 with unknown fields. Otherwise they are ignored, and the answer's header `Warning`
    names them."""
    access_log: bool = False
    """Write one line for each request to standard error."""

    def __post_init__(self) -> None:
        # Browsers send both in exactly this form. Anything else would never match.
        for origin in self.cors_origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+|null|\*", origin):
                raise InputError(
                    f"cors_origins = {origin!r}: must be SCHEME://HOST or SCHEME://HOST:PORT without a path, or *."
                )
        for host in self.allowed_hosts:
            if "/" in host or re.fullmatch(r"[^:]+:\d+", host):
                raise InputError(f"allowed_hosts = {host!r}: must be a name without scheme, port and path, or *.")

    @property
    def limits(self) -> dict[str, int | float]:
        """Limits that `GET /datastore` returns to clients."""
        return {name: getattr(self, name) for name in _PUBLISHED}
