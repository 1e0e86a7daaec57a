"""Searches through the whole text of a datastore, with which those of sorted prefixes are compared."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from indexing.store.datastore import Datastore, Split
from indexing.suffixes.order import (
    LONGEST,
)
from indexing.suffixes.search import SuffixIndex
from indexing.verification.datastore import DatastoreProblem, verify_datastore
from tests.conftest import build_local, tiny_config, write_corpus


def documents_of(split: Split) -> list[list[int]]:
    """The tokens of every document that is not deleted."""
    tokens, lengths = split.tokens.read(0, split.num_chunks), split.lengths.read(0, split.num_chunks)
    kept = np.setdiff1d(np.arange(split.num_documents), split.deleted_documents)
    return [
        [token for chunk in range(first, stop) for token in tokens[chunk, : lengths[chunk]].tolist()]
        for first, stop in split.chunk_ranges(kept)
    ]


def expected(documents: list[list[int]], text: list[int]) -> tuple[int, int, Counter[int]]:
    """Length of the longest end of a text that is in the documents, its occurrences, and the tokens that follow it."""
    for length in range(len(text), 0, -1):
        ending, count, following = text[-length:], 0, Counter[int]()
        for document in documents:
            for first in range(len(document) - length + 1):
                if document[first : first + length] == ending:
                    count += 1
                    following.update(document[first + length : first + length + 1])
        if count:
            return length, count, following
    return 0, 0, Counter()


def texts(split: Split, documents: list[list[int]]) -> list[list[int]]:
    """Pieces of documents as they are, changed, across two documents, and of tokens that the datastore does not have."""
    random, pieces = np.random.default_rng(0), []
    for _ in range(12):
        document = documents[random.integers(len(documents))]
        first = int(random.integers(0, max(1, len(document) - 40)))
        pieces.append(document[first : first + int(random.integers(1, 40))])
    changed = [[*piece[:-3], 399, *piece[-2:]] for piece in pieces[:4]]
    across = [documents[0][-5:] + documents[1][:6], documents[2][-1:] + documents[3][:1]]
    return [*pieces, *changed, *across, documents[4], [399], [399, 399, documents[0][0]], []]


def assert_equal_to_a_search_through_the_text(split: Split, index: SuffixIndex | None = None) -> None:
    index, documents = index or SuffixIndex(split), documents_of(split)
    for text in texts(split, documents):
        length, count, following = expected(documents, text)
        match = index.longest_match(text)
        places = index.occurrences(match)
        assert (match.length, len(places)) == (length, count)
        assert not len(split.deleted) or not np.isin(split.documents_of(places[:, 0])[0], split.deleted_documents).any()
        for chunk, place in places.tolist():
            before = split.tokens.read(0, split.num_chunks)[: chunk + 1].reshape(-1)[
                : chunk * split.chunk_length + place + 1
            ]
            assert before[-length:].tolist() == text[-length:]
        tokens, counts = index.next_tokens(match)
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == following
        assert (np.diff(counts) <= 0).all()


def ordered_positions(split: Split) -> list[int]:
    """The positions of all prefixes in order: by their last 64 tokens, then by position."""
    tokens, m = split.tokens.read(0, split.num_chunks), split.chunk_length
    lengths, keys = split.lengths.read(0, split.num_chunks), list[tuple[list[int], int]]()
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)):
        text = [token for chunk in range(first, stop) for token in tokens[chunk, : lengths[chunk]].tolist()]
        keys += [(text[max(0, end + 1 - LONGEST) : end + 1][::-1], first * m + end) for end in range(len(text))]
    return [position for _, position in sorted(keys)]


def problems_of(folder: Path) -> tuple[DatastoreProblem, ...]:
    return verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None)).problems


def appended(folder: Path, documents: int) -> Datastore:
    """The datastore of a folder after a file with new documents was appended, with its sorted prefixes."""
    number = len(list(folder.glob("*.jsonl")))
    write_corpus(folder / f"{number}.jsonl", documents, seed=number)
    config = tiny_config(folder, folder / "*.jsonl")
    build_local(config, only="chunk", append=number > 0)
    return build_local(config, only="suffixes")
