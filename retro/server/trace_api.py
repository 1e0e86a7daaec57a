"""Runs of a given text that occur verbatim in the training documents.

text ─► tokens ─► `Tracer`, datastore by datastore ─► runs ─► `grouped` ─► characters, number of occurrences, places in documents
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from indexing.suffixes.search import Match, Run, Tracer
from retro.inference.spans import ChunkTexts, characters, token_ends
from retro.inference.verbatim_runs import (
    Place,
    PlaceFinder,
    Span,
    TracedDatastore,
    TracedRun,
    grouped,
    in_order,
    ranges_of,
    tokens_in,
)
from retro.server import schemas
from retro.server.errors import error_responses
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.service import Service

router = APIRouter(route_class=JsonRoute)

_TOKENS = 64  # that are searched before another request has its turn
_PLACES = 64  # that are found before another request has its turn
_PLACED = 1024  # different runs of a text whose places are found

_Key = tuple[TracedDatastore, Match]
_Traced = tuple[TracedDatastore, Run]


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
    everything = in_order(datastores, of_datastores)
    spans = await run_in_threadpool(_spans, everything, tokens, text, ends)
    groups = await run_in_threadpool(grouped, spans)
    runs = [everything[index] for index, _ in groups]
    matches = await _matches(service, {(datastore, run.match) for datastore, run in runs}, request.documents)
    # Its documents may have been deleted since a run was found.
    living = [
        group for (datastore, run), group in zip(runs, groups, strict=True) if matches[datastore, run.match].occurrences
    ]
    of_living = [everything[index][1] for group, others in living for index in (group, *others)]
    return schemas.TraceResponse(
        text=text,
        runs=[_traced(everything, spans, group, ends, matches) for group in living],
        tokens=len(tokens),
        tokens_in_runs=tokens_in(of_living),
        datastores=[datastore.name for datastore in datastores],
    )


# Work is divided into short parts: requests take turns part by part, and a request that is cancelled has no further
# one.


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


def _spans(runs: Sequence[_Traced], tokens: np.ndarray, text: str, ends: list[int]) -> list[Span]:
    """The runs of a text as `grouped` compares them."""
    texts = [text[slice(*characters(ends, run.first, run.stop))] for _, run in runs]
    return [Span.of(datastore.name, run, tokens, own) for (datastore, run), own in zip(runs, texts, strict=True)]


def _traced(
    runs: Sequence[_Traced],
    spans: Sequence[Span],
    group: tuple[int, list[int]],
    ends: list[int],
    matches: Mapping[_Key, _Occurrences],
) -> TracedRun:
    """Return a run of a text, whose tokens end at these characters, with those that it stands for."""
    index, others = group
    datastore, run = runs[index]
    found = matches[datastore, run.match]
    return TracedRun(
        text=characters(ends, run.first, run.stop),
        first_token=run.first,
        tokens=run.stop - run.first,
        occurrences=found.occurrences,
        datastore=datastore.name,
        places=found.places,
        distinctive=spans[index].distinctive,
        count=1 + len(others),
        others=ranges_of(characters(ends, spans[other].first, spans[other].stop) for other in others),
    )
