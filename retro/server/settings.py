"""What a server of a datastore allows. Every limit has an error that names it (`errors.py`)."""

from dataclasses import dataclass, fields

from indexing.store.errors import InputError


@dataclass(frozen=True)
class ServeSettings:
    """How much a request may ask for, and how many may be under way."""

    name: str = ""
    """Name of the model for clients of /v1; empty: that of the checkpoint's run, without a checkpoint the datastore's."""
    max_body_bytes: int = 4 * 2**20
    """Bytes of a request; longer ones are answered 413."""
    max_queries: int = 256
    """Texts, token lists or vectors in one request."""
    max_k: int = 100
    """Neighbors of each query."""
    max_input_tokens: int = 16384
    """Tokens of all texts of a request together."""
    max_tokens: int = 1024
    """Tokens that one request may generate for each prompt."""
    request_seconds: float = 60.0
    """Time for a request: it is then answered 504, and a stream ends with an error."""
    max_requests: int = 256
    """Requests in work and waiting; one more is answered 429."""
    max_batch: int = 1024
    """Queries of waiting requests that are searched at once."""
    max_score_batch: int = 16
    """Sequences of waiting requests that the model reads at once."""
    max_generations: int = 2
    """Requests that generate side by side; others wait."""
    shutdown_seconds: float = 30.0
    """After SIGTERM, time to finish what was accepted."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask this server from a browser; none: only its own page."""

    def __post_init__(self) -> None:
        for field in fields(ServeSettings):
            value = getattr(self, field.name)
            if field.type in (int, float) and not 0 < value < float("inf"):
                raise InputError(f"{field.name} = {value:g}: must be above 0.")

    @property
    def limits(self) -> dict[str, int | float]:
        """What a client should know before it asks."""
        names = ("max_body_bytes", "max_queries", "max_k", "max_input_tokens", "max_tokens", "request_seconds")
        return {name: getattr(self, name) for name in names}
