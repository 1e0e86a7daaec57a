"""What a server of a datastore allows. Every limit has an error that names it (`errors.py`)."""

from dataclasses import dataclass, fields

from indexing.store.errors import InputError

_TOLD = (
    "max_body_bytes", "max_queries", "max_k", "max_model_k", "max_neighbor_tokens", "max_candidates", "max_characters",
    "max_input_tokens", "max_tokens", "request_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class ServeSettings:
    """How much a request may ask for, and how many may be under way."""

    name: str = ""
    """Name of the model for clients of /v1; empty: that of the checkpoint's run, without a checkpoint the datastore's."""
    max_head_bytes: int = 2**16
    """Bytes of a request's address and headers; longer ones are answered 431."""
    max_body_bytes: int = 4 * 2**20
    """Bytes of a request's body; longer ones are answered 413."""
    max_queries: int = 256
    """Texts, token lists or vectors in one request."""
    max_k: int = 100
    """Neighbors of each query of a search."""
    max_model_k: int = 16
    """Neighbors of each chunk that the model reads."""
    max_neighbor_tokens: int = 2**16
    """Tokens of all neighbors that the model or `/neighbors` reads for a request: chunks × k × 2 chunk lengths."""
    max_candidates: int = 2**14
    """Candidates that a search puts in order for all queries of a request: 64 for each, 256 with `bm25` and `hybrid`, or k if that is more."""
    max_characters: int = 2**18
    """Characters of all texts of a request together."""
    max_input_tokens: int = 16384
    """Tokens of all texts of a request together."""
    max_tokens: int = 1024
    """Tokens that one request may generate for each prompt."""
    read_seconds: float = 30.0
    """Time for a request's headers to arrive, and for its body; then it is answered 408."""
    request_seconds: float = 60.0
    """Time for a request once it is there: it is then answered 504, and a stream ends with an error."""
    max_requests: int = 256
    """Requests in work and waiting; one more is answered 429."""
    max_batch: int = 1024
    """Queries of waiting requests that are searched at once."""
    max_score_tokens: int = 2**15
    """Tokens of waiting requests that are scored together, those of neighbors included."""
    max_generations: int = 2
    """Requests that generate side by side; others wait."""
    shutdown_seconds: float = 30.0
    """After SIGTERM, time to finish what was accepted."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask this server from a browser; none: only its own page."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which a server without a token may be called, besides `localhost`, `--host` and IP addresses; `*` = any."""
    access_log: bool = False
    """Write a line for each request to standard error."""

    def __post_init__(self) -> None:
        for field in fields(ServeSettings):
            value = getattr(self, field.name)
            if field.type in (int, float) and not 0 < value < float("inf"):
                raise InputError(f"{field.name} = {value:g}: must be above 0.")

    @property
    def limits(self) -> dict[str, int | float]:
        """What a client should know before it asks."""
        return {name: getattr(self, name) for name in _TOLD}
