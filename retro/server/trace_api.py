"""Runs of a given text that occur verbatim in the training documents.

text ─► tokens ─► `trace`, datastore by datastore ─► runs ─► characters, number of occurrences, places in documents
"""

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from indexing.suffixes.search import Run, trace
from retro.server import schemas
from retro.server.chunk_texts import ChunkTexts
from retro.server.errors import error_responses
from retro.server.service import JsonRoute, ServiceDependency
from retro.server.spans import characters, token_ends
from retro.server.verbatim_runs import PlaceFinder, in_order, tokens_in

router = APIRouter(route_class=JsonRoute)


@router.post("/trace", responses=error_responses(404, 413, 422), tags=["search"])
async def trace_text(request: schemas.TraceRequest, service: ServiceDependency) -> schemas.TraceResponse:
    """Find the parts of a text that occur verbatim in the training documents, how often, and where."""
    service.check("max_k", request.documents, "documents")
    tokens = (await service.encoded([request.text], "text"))[0]
    datastores, retriever = await run_in_threadpool(service.traced), service.retriever
    text, ends = await run_in_threadpool(token_ends, retriever.tokenizer.decode_batch, tokens)
    # Datastore by datastore and run by run, so that the work stops when the client disconnects or the time is over.
    found = [await run_in_threadpool(trace, datastore.index, tokens, request.least) for datastore in datastores]
    runs, texts = in_order(datastores, found), ChunkTexts(retriever)
    traced = [
        await run_in_threadpool(_traced, PlaceFinder(datastore, texts), run, ends, request.documents)
        for datastore, run in runs
    ]
    return schemas.TraceResponse(
        text=text,
        runs=traced,
        tokens=len(tokens),
        tokens_in_runs=tokens_in(run for _, run in runs),
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
