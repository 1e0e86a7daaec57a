"""Runs of texts that occur verbatim in the training documents: of a given text, and of a text while it is generated.

text ─► tokens ─► `trace` ─► runs ─► characters, number of occurrences, places in documents
prompt, then each generated token ─► `Tracer` ─► runs that reach into the answer
"""

import numpy as np
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from indexing.retrieval.retriever import Retriever
from indexing.suffixes.search import SHORTEST_RUN, Place, Run, SuffixIndex, Tracer, trace
from retro.inference.generation import GeneratedToken
from retro.server import schemas
from retro.server.chunk_texts import ChunkTexts
from retro.server.errors import error_responses
from retro.server.service import JsonRoute, ServiceDependency
from retro.server.spans import characters, token_ends

router = APIRouter(route_class=JsonRoute)

_PLACES = 3  # of a run of a generated text


@router.post("/trace", responses=error_responses(404, 413, 422), tags=["search"])
async def trace_text(request: schemas.TraceRequest, service: ServiceDependency) -> schemas.TraceResponse:
    """Find the parts of a text that occur verbatim in the training documents, how often, and where."""
    service.check("max_k", request.documents, "documents")
    tokens = (await service.encoded([request.text], "text"))[0]
    index, retriever = await run_in_threadpool(service.suffixes), service.retriever
    text, ends = await run_in_threadpool(token_ends, retriever.tokenizer.decode_batch, tokens)
    runs, is_in_run = await run_in_threadpool(trace, index, tokens, request.least), np.zeros(len(tokens), dtype=bool)
    for run in runs:
        is_in_run[run.first : run.stop] = True
    # Run by run, so that the work stops when the client disconnects or the time is over.
    places = PlaceFinder(index, retriever, ChunkTexts(retriever))
    found = [await run_in_threadpool(_traced, places, run, ends, request.documents) for run in runs]
    return schemas.TraceResponse(text=text, runs=found, tokens=len(tokens), tokens_in_runs=int(is_in_run.sum()))


def _traced(places: "PlaceFinder", run: Run, ends: list[int], documents: int) -> schemas.TracedRun:
    """Return a run of a text whose tokens end at these characters."""
    return schemas.TracedRun(
        text=characters(ends, run.first, run.stop),
        tokens=run.stop - run.first,
        occurrences=places.index.count(run.match),
        places=places.of(run, documents),
    )


class PlaceFinder:
    """Finds the places of runs for one request.

    Args:
        index: of the retriever's first datastore, whose chunk ids are those of the retriever.
        retriever: an open retriever.
        texts: of the request.
    """

    def __init__(self, index: SuffixIndex, retriever: Retriever, texts: ChunkTexts) -> None:
        self.index, self._retriever, self._texts = index, retriever, texts

    def of(self, run: Run, most: int) -> list[schemas.Place]:
        """Return one place of a run in each of up to `most` documents."""
        return [self._of_document(place) for place in self.index.places(run.match, most)]

    def _of_document(self, place: Place) -> schemas.Place:
        (first, start), (last, end) = place.first, place.last
        return schemas.Place(
            document_id=str(place.document["id"]),
            title=str(place.document.get("title") or ""),
            source=str(place.document.get("source") or ""),
            start=(first, characters(self._ends(first), start, start + 1)[0]),
            stop=(last, characters(self._ends(last), end, end + 1)[1]),
        )

    def _ends(self, chunk_id: int) -> list[int]:
        split = self.index.split
        tokens, lengths = split.tokens.read(chunk_id, chunk_id + 1)[0], split.lengths.read(chunk_id, chunk_id + 1)
        return self._texts.ends(chunk_id, tokens[: lengths[0]].astype(np.int64))


class GeneratedRuns:
    """Finds the runs of one generated text, from its first token to its last."""

    def __init__(self, places: PlaceFinder, prompt: np.ndarray, start: int) -> None:
        """Begin after a prompt [t]; `start`: characters of the answer before the generated text."""
        self._places, self._prompt = places, len(prompt)
        self._tracer = Tracer(places.index, SHORTEST_RUN, prompt)
        self._ends = [start]  # characters of the answer up to each generated token

    def add(self, token: GeneratedToken) -> list[schemas.GeneratedRun]:
        """Return the runs that end before the next token; after the last token, also the run at the end."""
        runs = self._tracer.add(token.token)
        self._ends.append(self._ends[-1] + len(token.text))
        if token.finish_reason is not None:
            runs = runs + self._tracer.rest()
        found = [self._generated(run) for run in runs if run.stop > self._prompt]
        return [run for run in found if run.text[0] < run.text[1]]

    def _generated(self, run: Run) -> schemas.GeneratedRun:
        first = max(0, run.first - self._prompt)
        return schemas.GeneratedRun(
            text=(self._ends[first], self._ends[run.stop - self._prompt]),
            tokens=run.stop - run.first,
            prompt_tokens=max(0, self._prompt - run.first),
            occurrences=self._places.index.count(run.match),
            places=self._places.of(run, _PLACES),
        )
