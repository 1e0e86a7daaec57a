"""Runs of a given text that occur verbatim in the training documents.

text ─► tokens ─► `trace`, datastore by datastore ─► runs ─► characters, number of occurrences, places in documents
"""

import numpy as np
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from indexing.suffixes.search import Run, trace
from retro.server import schemas
from retro.server.chunk_texts import ChunkTexts
from retro.server.errors import error_responses
from retro.server.service import JsonRoute, ServiceDependency
from retro.server.spans import characters, token_ends
from retro.server.verbatim_runs import PlaceFinder

router = APIRouter(route_class=JsonRoute)


@router.post("/trace", responses=error_responses(404, 413, 422), tags=["search"])
async def trace_text(request: schemas.TraceRequest, service: ServiceDependency) -> schemas.TraceResponse:
    """Find the parts of a text that occur verbatim in the training documents, how often, and where."""
    service.check("max_k", request.documents, "documents")
    tokens = (await service.encoded([request.text], "text"))[0]
    datastores, retriever = await run_in_threadpool(service.traced), service.retriever
    text, ends = await run_in_threadpool(token_ends, retriever.tokenizer.decode_batch, tokens)
    is_in_run, texts, found = np.zeros(len(tokens), dtype=bool), ChunkTexts(retriever), list[tuple[PlaceFinder, Run]]()
    for datastore in datastores:
        for run in await run_in_threadpool(trace, datastore.index, tokens, request.least):
            is_in_run[run.first : run.stop] = True
            found.append((PlaceFinder(datastore, texts), run))
    found.sort(key=lambda pair: (pair[1].first, pair[1].stop))
    # Run by run, so that the work stops when the client disconnects or the time is over.
    runs = [await run_in_threadpool(_traced, places, run, ends, request.documents) for places, run in found]
    return schemas.TraceResponse(
        text=text,
        runs=runs,
        tokens=len(tokens),
        tokens_in_runs=int(is_in_run.sum()),
        datastores=[datastore.name for datastore in datastores],
    )


def _traced(places: PlaceFinder, run: Run, ends: list[int], documents: int) -> schemas.TracedRun:
    """Return a run of a text whose tokens end at these characters."""
    return schemas.TracedRun(
        text=characters(ends, run.first, run.stop),
        tokens=run.stop - run.first,
        occurrences=places.datastore.index.count(run.match),
        datastore=places.datastore.name,
        places=places.of(run, documents),
    )
