"""First uses of everything that requests need: files are opened and loops are compiled before the server is ready.

    Service ─► `first_uses`: a search, neighbors of a chunk, verbatim runs, scores, generated tokens ─► `before_ready`

Compiling takes a busy machine minutes, if numba's cache has nothing: the first requests would end with 504.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from indexing.machine import on_ending_thread
from indexing.progress import during
from indexing.store.errors import DamagedFile
from indexing.store.remote import url_of
from indexing.suffixes.order import LONGEST
from indexing.suffixes.search import Tracer
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import SourceFinder
from retro.inference.spans import ChunkTexts
from retro.inference.verbatim_runs import GeneratedRuns, PlaceFinder

if TYPE_CHECKING:
    from retro.server.service import Service

log = logging.getLogger("retro")

_K = 2
_DOCUMENTS = 64  # the longest one is read


@dataclass(frozen=True)
class FirstUse:
    """Something that requests need.

    Attributes:
        name: in words, for the log.
        run: uses it once.
    """

    name: str
    run: Callable[[], object]


async def before_ready(service: "Service") -> None:
    """Run the first uses of a service on another thread.

    A damaged file is reported: the server starts, and answers 503 with its name. Any other error ends the start.
    """
    try:
        await asyncio.to_thread(on_ending_thread, partial(run_all, list(first_uses(service))))
    except Exception as error:
        explained = await service.files.explained(error)
        if not isinstance(explained, DamagedFile):
            raise
        log.warning("%s Requests are answered 503.", explained)


def run_all(uses: Sequence[FirstUse]) -> None:
    """Run first uses in order, and log what the server waits for."""
    log.info("before it is ready, the server waits for: %s", ", ".join(use.name for use in uses))
    for use in uses:
        with during("waiting for %s", use.name):
            use.run()


def first_uses(service: "Service") -> Iterator[FirstUse]:
    """Yield what the datastores and the model can do, in the order in which a request needs it."""
    retriever, model = service.retriever, service.language_model
    yield FirstUse("checksums of files that came from elsewhere", service.files.watch.compare)
    m = retriever.datastore.chunk_length
    ways = retriever.chunks.ways
    for way in dict.fromkeys((*ways[:1], *ways[-1:])):  # the last one uses terms, if there are any
        yield FirstUse(f"a {way} search", lambda way=way: retriever.search(["warm up"], 1, retrieval=way))  # type: ignore[misc]
    chunk = _stored_text(service)[None, :m]
    if retriever.finds_neighbors and chunk.shape[1] == m:
        yield FirstUse("neighbors of a chunk", lambda: retriever.neighbors.rank(chunk, _K))
    if _traces(service):
        yield FirstUse("verbatim runs", lambda: _trace(service))
    if model is not None:
        text = _prompt(service, model.context)
        k = _K if service.retrieves else 0
        yield FirstUse("scores", lambda: model.score_with_likeliest([text], 0))
        if k:
            yield FirstUse(f"scores with {_K} neighbors", lambda: model.score_with_likeliest([text], k, sources=True))
        yield FirstUse("generated tokens with all sources" if k else "generated tokens", lambda: _generate(service, k))


def _traces(service: "Service") -> bool:
    """Whether verbatim runs are found without a download: of a datastore at a URL, sorted prefixes are fetched
    first."""
    return service.traces and not any(url_of(split.folder) for split in service.retriever.retrieval.splits)


def _stored_text(service: "Service") -> np.ndarray:
    """The beginning of a document, int64 [t], with more tokens than the longest match if a document has as many."""
    split = service.retriever.retrieval.own
    deleted = set(split.deleted_documents.tolist())
    documents = [number for number in range(min(_DOCUMENTS, split.num_documents)) if number not in deleted]
    first, stop = max(map(split.chunk_range, documents or [0]), key=lambda chunks: chunks[1] - chunks[0])
    stop = min(stop, first + LONGEST // split.chunk_length + 2)
    rows = zip(split.tokens.read(first, stop), split.lengths.read(first, stop), strict=True)
    return np.concatenate([row[:length] for row, length in rows]).astype(np.int64)


def _prompt(service: "Service", context: int) -> np.ndarray:
    """A text with a complete chunk, and a token after it if the model reads as many."""
    m = service.retriever.datastore.chunk_length
    return service.as_document(_stored_text(service))[: min(m + 1, context)]


def _trace(service: "Service") -> None:
    texts, tokens = ChunkTexts(service.retriever), _stored_text(service).tolist()
    for datastore in service.traced():
        tracer = Tracer(datastore.index, least=1)
        runs = [run for token in tokens for run in tracer.add(token)] + tracer.rest()
        for run in runs[:1]:
            datastore.index.count(run.match)
            PlaceFinder(datastore, texts).of(run.match, 1)


def _generate(service: "Service", k: int) -> None:
    """Generate tokens as a request with `sources` does: from a prompt with a complete chunk, and find their sources."""
    model = service.model()
    prompt, texts = _prompt(service, model.context), ChunkTexts(service.retriever)
    runs = GeneratedRuns(service.traced(), texts, prompt) if _traces(service) else None
    finder = SourceFinder(service.retriever, texts, 0, runs)
    for step in model.generate([prompt], GenerationSettings(max_tokens=2, temperature=0.0), k, sources=True):
        for token in step:
            finder.add_generated(token)
