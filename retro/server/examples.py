"""Passages to try: beginnings of held-out documents, ranked by how much retrieval helps to predict them.

held-out documents ─► mean distance of their first chunks' nearest neighbors ─► near to middling ─► `choose_passages`
their beginnings ─► scores with retrieval ON and OFF, one after the other ─► share of bits saved, and a prompt
"""

import asyncio
import math
import time

import numpy as np
from fastapi.concurrency import run_in_threadpool

from indexing.index.exact_search import stored_distances
from indexing.retrieval.passage_choice import Candidate, choose_passages
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Split
from indexing.store.deletions import inside, read_deletions
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.language_model import Scores
from retro.server import schemas
from retro.server.service import ScoreKey, Service

_MOST_DOCUMENTS = 1024  # examples come from the first held-out documents, whose neighbors are compared by embeddings
_QUANTILES = 0.1, 0.5  # of the documents' distances, between which they are chosen: the nearest ones are mostly copies
_FARTHEST = 4.0  # squared distance of unit vectors
_READ = 64  # passages that the candidates are chosen from
_CANDIDATES = 16  # passages that are scored, so that the best ones are known
_LEAST = 3  # passages, even if some are poor
_SCORING_SECONDS = 20.0  # after which no further passage is scored
_WAIT_SECONDS = 2.0  # until the answer; passages scored later are ranked in later answers
_K = 2  # neighbors of a chunk, the page's default
_PROMPT_GAIN_TOKENS = 16  # after a prompt, whose gain decides where the prompt ends
_MOST_ENDS = 16  # of a prompt that are tried


async def best_examples(service: Service, count: int, chunks: int) -> schemas.ExamplesResponse:
    """Return passages of at most `chunks` chunks: those with the largest measured gain first, then those not measured.

    The first call measures them in the background, one at a time, and waits two seconds at most.
    """
    if chunks not in service.examples:
        passages = await run_in_threadpool(held_out_passages, service.retriever, _CANDIDATES, chunks)
        if chunks not in service.examples:
            service.examples[chunks] = passages, asyncio.create_task(_measure(service, passages.examples))
    passages, task = service.examples[chunks]
    await asyncio.wait([task], timeout=_WAIT_SECONDS)
    if task.done() and (error := task.exception()):
        service.examples.pop(chunks, None)
        raise error
    deleted = read_deletions(service.retriever.datastore.folder).documents  # also those deleted after the first call
    examples = [example for example in passages.examples if example.document_id not in deleted]
    ranked = sorted(examples, key=lambda example: math.inf if example.gain is None else -example.gain)
    return passages.model_copy(update={"examples": ranked[:count]})


async def finish_measuring(service: Service) -> None:
    """Wait until no passage is being scored: a process must not end while a thread computes."""
    await asyncio.gather(*(task for _, task in service.examples.values()), return_exceptions=True)


async def _measure(service: Service, examples: list[schemas.Example]) -> None:
    """Set gain and prompt of examples. Each is scored alone, so that other requests can be scored in between."""
    if not service.retrieves:
        return
    tokenizer, k = service.retriever.tokenizer, min(_K, service.settings.max_model_k)
    async with service.measuring:
        until = time.monotonic() + _SCORING_SECONDS
        for example in examples:
            if time.monotonic() > until or service.admission.draining:
                break
            tokens = service.as_document(await asyncio.to_thread(tokenizer.encode, example.text))
            on, off = [(await service.scores([tokens], ScoreKey(neighbors, top=1)))[0] for neighbors in (k, 0)]
            example.gain = float(1 - on.log_probabilities.sum() / off.log_probabilities.sum())
            example.prompt = await asyncio.to_thread(differing_prompt, tokenizer, tokens, on, off) or example.prompt


def differing_prompt(tokenizer: Tokenizer, tokens: np.ndarray, on: Scores, off: Scores) -> str:
    """Return the beginning of a text [t] up to a token that is the likeliest one with retrieval, but not without.

    Of these tokens, the one is taken at which retrieval saves most bits from there on. Empty if there is none.

    Args:
        tokenizer: of the model.
        tokens: the text, the beginning-of-document token first.
        on: scores with retrieval, with the likeliest token.
        off: scores without.
    """
    saved = on.log_probabilities - off.log_probabilities
    gains = np.concatenate([[0.0], np.cumsum(saved)])  # [t]: of all tokens before
    ends = np.arange(len(gains) - 1)
    later = gains[np.minimum(ends + _PROMPT_GAIN_TOKENS, len(ends))] - gains[:-1]
    chosen = (on.likeliest[:, 0] == tokens[1:]) & (off.likeliest[:, 0] != tokens[1:])
    for end in sorted(ends[chosen].tolist(), key=lambda end: -later[end])[:_MOST_ENDS]:
        prompt = tokenizer.decode(tokens[: end + 1])
        following = tokenizer.decode(tokens[end + 1 : end + 2])
        in_word = prompt[-1:].isalnum() and following[:1].isalnum()
        # Tokens of the text and of its beginning differ where both are cut in another way.
        if following.strip() and not in_word and np.array_equal(tokenizer.encode(prompt), tokens[1 : end + 1]):
            return prompt
    return ""


def held_out_passages(retriever: Retriever, count: int, chunks: int) -> schemas.ExamplesResponse:
    """Return the beginnings of documents with near to middling neighbors, those first that copy the most distinctive
    words.

    Without held-out documents, the documents are from the datastore itself and find themselves.
    """
    datastore = retriever.datastore
    held_out = (split for split in (datastore.valid, datastore.test) if split.num_documents > len(split.deleted))
    split = next(held_out, datastore.train)
    ranges = split.chunk_ranges(np.arange(min(split.num_documents, _MOST_DOCUMENTS)))  # [n, 2]
    ranges[inside(ranges[:, 0], split.deleted)] = 0
    is_long = np.diff(ranges)[:, 0] >= chunks
    documents = np.flatnonzero(is_long if is_long.any() else np.diff(ranges)[:, 0] > 0)
    documents = documents[np.argsort(_distances(retriever, split, ranges[documents], chunks), kind="stable")]
    ranks = np.linspace(*_QUANTILES, num=max(count, _READ)) * len(documents)
    documents = documents[np.unique(ranks.astype(int))] if len(documents) else documents
    candidates = [_candidate(retriever, split, document, chunks) for document in documents.tolist()]
    chosen = choose_passages(candidates, count, retriever.tokenizer, least=min(count, _LEAST))
    return schemas.ExamplesResponse(
        held_out=split.name != "train",
        examples=[_example(retriever, split, candidates[row]) for row in chosen],
    )


def _distances(retriever: Retriever, split: Split, ranges: np.ndarray, chunks: int) -> np.ndarray:
    """Mean squared distance [n] of the nearest stored neighbors of the first chunks of documents with these ranges [n,
    2]."""
    if not retriever.datastore.has("neighbors") or not len(ranges):
        return np.zeros(len(ranges))
    ids = np.minimum(ranges[:, :1] + np.arange(chunks), ranges[:, 1:] - 1)  # [n, chunks]
    nearest = stored_distances(split, ids.ravel(), retriever.retrieval, [0]).reshape(ids.shape)
    means: np.ndarray = np.minimum(nearest, _FARTHEST).mean(axis=1)
    return means


def _candidate(retriever: Retriever, split: Split, document: int, chunks: int) -> Candidate:
    """The beginning of a document, with the neighbors of its chunks."""
    first, stop = split.chunk_range(document)
    stop = min(stop, first + chunks)
    rows = zip(split.tokens.read(first, stop), split.lengths.read(first, stop), strict=True)
    tokens = np.concatenate([row[:length] for row, length in rows]).astype(np.int64)
    if not retriever.datastore.has("neighbors"):
        return Candidate(tokens, document)
    retrieval, ids = retriever.retrieval, split.neighbor_ids.read(first, stop)[:, :_K].ravel()
    neighbors = zip(*retrieval.with_continuation(retrieval.without_deleted(ids)), strict=True)
    return Candidate(tokens, document, [row[:length] for row, length in neighbors])


def _example(retriever: Retriever, split: Split, passage: Candidate) -> schemas.Example:
    metadata = split.metadata([passage.document])[0]
    decode = retriever.tokenizer.decode
    return schemas.Example(
        document_id=str(metadata.get("id") or ""),
        title=str(metadata.get("title") or ""),
        text=decode(passage.tokens).rstrip("\ufffd"),  # a character may continue in the next chunk
        prompt=decode(passage.tokens[: len(passage.tokens) // 2]).rstrip("\ufffd"),
        gain=None,
    )
