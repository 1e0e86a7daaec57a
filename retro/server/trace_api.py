"""Runs of a given text that occur verbatim in the training documents.

text ─► tokens ─► `Tracer`, datastore by datastore ─► runs ─► characters, number of occurrences, places in documents
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from indexing.suffixes.search import Match, Run, Tracer
from retro.inference.spans import ChunkTexts, characters, token_ends
from retro.inference.verbatim_runs import Place, PlaceFinder, TracedDatastore, TracedRun, in_order, tokens_in
from retro.server import schemas
from retro.server.errors import error_responses
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.service import Service

router = APIRouter(route_class=JsonRoute)

_TOKENS = 64  # that are searched before another request has its turn
_PLACES = 64  # that are found before another request has its turn
_PLACED = 1024  # different runs of a text whose places are found

_Key = tuple[TracedDatastore, Match]


class _Occurrences(NamedTuple):
    """How often a match occurs, and some of the places."""

    occurrences: int
    places: list[Place]


@router.post("/trace", responses=error_responses(404, 413, 422), tags=["search"])
async def trace_text(request: schemas.TraceRequest, service: ServiceDependency) -> schemas.TraceResponse:
    """Find the parts of a text that occur verbatim in the training documents, how often, and where."""
    service.limits.within("max_k", request.documents, "documents")
    tokens = (await service.encoded([request.text], "text"))[0]
    datastores, retriever = await run_in_threadpool(service.traced), service.retriever
    text, ends = await run_in_threadpool(token_ends, retriever.tokenizer.decode_batch, tokens)
    of_datastores = [await _runs(service, datastore, tokens.tolist(), request.least) for datastore in datastores]
    runs = in_order(datastores, of_datastores)
    matches = await _matches(service, {(datastore, run.match) for datastore, run in runs}, request.documents)
    # Its documents may have been deleted since a run was found.
    runs = [(datastore, run) for datastore, run in runs if matches[datastore, run.match].occurrences]
    return schemas.TraceResponse(
        text=text,
        runs=[_traced(datastore, run, ends, matches[datastore, run.match]) for datastore, run in runs],
        tokens=len(tokens),
        tokens_in_runs=tokens_in(run for _, run in runs),
        datastores=[datastore.name for datastore in datastores],
    )


# Work is divided into short parts: requests take turns part by part, and a request that is cancelled has no further one.


async def _runs(service: Service, datastore: TracedDatastore, tokens: list[int], least: int) -> list[Run]:
    """Return the runs of a text in a datastore, in order."""
    tracer = Tracer(datastore.index, least)

    def add(part: Iterable[int]) -> list[Run]:
        return [run for token in part for run in tracer.add(token)]

    parts = [partial(add, tokens[first : first + _TOKENS]) for first in range(0, len(tokens), _TOKENS)]
    return [*chain.from_iterable(await service.trace(None, [*parts, tracer.rest]))]


async def _matches(service: Service, keys: set[_Key], documents: int) -> dict[_Key, _Occurrences]:
    """Return occurrences of all matches, and places of the longest ones in up to `documents` documents."""
    texts = ChunkTexts(service.retriever)
    longest = sorted(keys, key=lambda key: (-key[1].length, key[0].number, key[1].ranges))
    placed = set(longest[:_PLACED])

    def find(part: Sequence[_Key]) -> list[_Occurrences]:
        places = [PlaceFinder(key[0], texts).of(key[1], documents) if key in placed else [] for key in part]
        return [
            _Occurrences(datastore.index.count(match), rows)
            for (datastore, match), rows in zip(part, places, strict=True)
        ]

    size = max(1, _PLACES // documents)
    parts = [partial(find, longest[first : first + size]) for first in range(0, len(longest), size)]
    return dict(zip(longest, chain.from_iterable(await service.trace(None, parts)), strict=True))


def _traced(datastore: TracedDatastore, run: Run, ends: list[int], found: _Occurrences) -> TracedRun:
    """Return a run of a text whose tokens end at these characters."""
    return TracedRun(
        text=characters(ends, run.first, run.stop),
        tokens=run.stop - run.first,
        occurrences=found.occurrences,
        datastore=datastore.name,
        places=found.places,
    )
