"""Metrics for Prometheus. Each application has its own registry, so one process can hold several."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = {"registry": self._registry}
        self._requests = Counter("retro_requests", "Requests answered.", ["method", "path", "status"], **registry)
        self._seconds = Histogram(
            "retro_request_seconds", "Time from a request's first byte to the last byte of its answer.", ["path"],
            buckets=_SECONDS, **registry,
        )  # fmt: skip
        self._batches = Histogram(
            "retro_batch_size",
            "Items processed at once; tokens of a generation step.",
            ["work"],
            buckets=_SIZES,
            **registry,
        )
        self._tokens = Counter("retro_generated_tokens", "Tokens generated.", **registry)
        self._drafts = Counter("retro_draft_tokens", "Tokens of drafts that were verified.", ["result"], **registry)
        self._first_token = Histogram(
            "retro_first_token_seconds", "Time to a request's first generated token.", buckets=_SECONDS, **registry
        )
        self._next_token = Histogram(
            "retro_next_token_seconds",
            "Time between two steps of a request, which generate a token each, or several with drafts.",
            buckets=_SECONDS,
            **registry,
        )
        ProcessCollector(registry=self._registry)

    def gauge(
        self, name: str, text: str, read: Callable[[], int] | Mapping[str, Callable[[], int]], label: str = "work"
    ) -> None:
        """Add a gauge that is read when the metrics are requested; a mapping reads the value of each value of the
        label."""
        if callable(read):
            Gauge(name, text, registry=self._registry).set_function(read)
            return
        gauge = Gauge(name, text, [label], registry=self._registry)
        for value, function in read.items():
            gauge.labels(value).set_function(function)

    def count_request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an answer. `path` is the route's template, so that there are few label values."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_batch(self, work: str) -> Callable[[int], None]:
        """Return a function that records the sizes of batches of one kind of work."""
        observe: Callable[[int], None] = self._batches.labels(work).observe
        return observe

    def count_step(self, tokens: int, accepted: int, rejected: int, seconds: float, *, first: bool) -> None:
        """Count the tokens of one generation step of a request.

        Args:
            tokens: number of generated tokens.
            accepted: those of them that were in drafts.
            rejected: tokens of drafts that were wrong.
            seconds: time since the request was accepted for the first step, else since the previous step.
            first: True for the request's first step.
        """
        self._tokens.inc(tokens)
        self._drafts.labels("accepted").inc(accepted)
        self._drafts.labels("rejected").inc(rejected)
        (self._first_token if first else self._next_token).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        exposition: bytes = generate_latest(self._registry)
        return exposition
