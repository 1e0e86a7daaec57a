"""Metrics for Prometheus. Each application has its own registry, so one process can hold several."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self._requests = Counter("retro_requests", "Requests answered.", ["method", "path", "status"], **own)
        self._seconds = Histogram(
            "retro_request_seconds", "Time from a request's first byte to the last byte of its answer.", ["path"],
            buckets=_SECONDS, **own,
        )  # fmt: skip
        self._batches = Histogram(
            "retro_batch_size", "Items processed at once; tokens of a generation step.", ["work"], buckets=_SIZES, **own
        )
        self._tokens = Counter("retro_generated_tokens", "Tokens generated.", **own)
        self._drafts = Counter("retro_draft_tokens", "Tokens of drafts that were verified.", ["result"], **own)
        self._first_token = Histogram(
            "retro_first_token_seconds", "Time to a request's first generated token.", buckets=_SECONDS, **own
        )
        self._next_token = Histogram(
            "retro_next_token_seconds",
            "Time between two steps of a request, which generate a token each, or several with drafts.",
            buckets=_SECONDS,
            **own,
        )
        ProcessCollector(registry=self._registry)

    def watch(
        self,
        waiting: Mapping[str, Callable[[], int]],
        running: Mapping[str, Callable[[], int]],
        under_way: Callable[[], int],
    ) -> None:
        """Add gauges that are read when the metrics are requested.

        Args:
            waiting: for each kind of work, a function that returns the number of waiting requests; of texts for `generate`.
            running: the same for work that is in progress.
            under_way: returns the number of requests that were accepted and not answered yet.
        """
        for name, text, counts in (
            ("retro_waiting", "Requests that wait for a worker; texts that wait for a place in the batch.", waiting),
            ("retro_running", "Texts in the batch.", running),
        ):
            gauge = Gauge(name, text, ["work"], registry=self._registry)
            for work, count in counts.items():
                gauge.labels(work).set_function(count)
        accepted = Gauge("retro_requests_under_way", "Requests accepted and not yet answered.", registry=self._registry)
        accepted.set_function(under_way)

    def watch_neighbors(self, counts: Mapping[str, Callable[[], int]], size: Callable[[], int]) -> None:
        """Add gauges of the cache of encoded neighbors.

        Args:
            counts: for `hit` and `miss`, a function that returns the number of neighbors so far.
            size: returns the bytes of the cache.
        """
        own = {"registry": self._registry}
        read = Gauge("retro_neighbors_read", "Neighbors found in the cache, or encoded.", ["cache"], **own)
        for name, count in counts.items():
            read.labels(name).set_function(count)
        kept = Gauge("retro_neighbor_cache_bytes", "Size of the encoded neighbors that are kept.", **own)
        kept.set_function(size)

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
