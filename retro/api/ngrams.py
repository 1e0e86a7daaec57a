"""`retro.NGrams`: counts of n-grams of any length, over the sorted prefixes of a datastore.

The methods, arguments and keys of results are those of infini-gram's Python package (Liu et al. 2024, arXiv
2401.17377), and so is their meaning. docs/reference/python-api.md lists the differences.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from indexing.store.datastore import Datastore as StoredDatastore
from indexing.store.errors import InputError, NotFound, OutOfRange
from indexing.store.remote import datastore_name
from indexing.suffixes.order import LONGEST
from indexing.suffixes.search import Match, SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from retro.api.checks import Ids, checked_numbers, checked_tokens
from retro.api.rows import tokens_of

MAX_SUPPORT = 1000
"""Occurrences whose next tokens are read, unless told otherwise."""
MAX_DISPLAYED = 5000
"""Tokens of a document that are returned, unless told otherwise."""
_SPREAD = 4096
"""Occurrences whose documents are read for one document that is wanted."""


class Count(TypedDict):
    """How often an n-gram occurs. `approx` is always False: a count is exact."""

    count: int
    approx: bool


class Found(TypedDict):
    """Where an n-gram occurs: `cnt` times, and the ranks [first, stop) in each order of the datastore."""

    cnt: int
    segment_by_shard: list[tuple[int, int]]


class Prob(TypedDict):
    """Occurrences of a prompt, of the prompt with one more token, and their quotient; -1.0 if the prompt occurs
    nowhere."""

    prompt_cnt: int
    cont_cnt: int
    prob: float


class InfgramProb(Prob):
    """The same for the last `suffix_len` tokens of the prompt."""

    suffix_len: int


class TokenCount(TypedDict):
    """How often a token follows, and the fraction of the occurrences that it follows."""

    cont_cnt: int
    prob: float


class NextTokens(TypedDict):
    """Occurrences of a prompt, and the tokens that follow, most frequent first. `approx`: not all occurrences were
    read."""

    prompt_cnt: int
    result_by_token_id: dict[int, TokenCount]
    approx: bool


class InfgramNextTokens(NextTokens):
    """The same for the last `suffix_len` tokens of the prompt."""

    suffix_len: int


class LongestMatch(Found):
    """The longest end of a text that occurs: its last `suffix_len` tokens."""

    suffix_len: int


class DocumentPart(TypedDict):
    """A part of a document.

    Attributes:
        doc_ix: number of the document, as in `retro.Datastore.documents`.
        doc_len: its tokens.
        disp_len: tokens of the part.
        metadata: its row of `documents.parquet`.
        token_ids: the tokens of the part.
    """

    doc_ix: int
    doc_len: int
    disp_len: int
    metadata: Mapping[str, str | int | None]
    token_ids: list[int]


class FoundDocuments(TypedDict):
    """Occurrences of an n-gram, and a part of each of some documents with it."""

    cnt: int
    approx: bool
    documents: list[DocumentPart]


class NGrams:
    """Counts n-grams of the training documents of a datastore: `retro.NGrams("peps").count([5613, 4086, 9068])`.

    Token ids are those of the datastore's tokenizer (`tokenizer.encode(text)`). An n-gram never spans two documents.
    The tokens that begin and end a document count. Documents that were deleted do not occur, also if that happened
    after opening.

    Every method raises InputError for a token outside of the vocabulary, and DatastoreChanged if the datastore was
    built again.
    """

    def __init__(self, location: Path | str) -> None:
        """Open the sorted prefixes of a datastore.

        Args:
            location: the folder, or any fsspec URL, whose files are fetched on first use.

        Raises:
            InputError: there is no datastore, its stage `suffixes` is not finished, or a file is damaged.
        """
        self.location = location
        self._stored = StoredDatastore.open(location)
        self._split = self._stored.train
        self._index = SuffixIndex(self._split)

    def __reduce__(self) -> tuple[type["NGrams"], tuple[Path | str]]:
        """Pickle the location: another process opens the files itself."""
        return NGrams, (self.location,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text)` gives token ids without begin and end of document, `decode(ids)` text."""
        return Tokenizer.open(self._stored.folder / "tokenizer")

    # --- counts -------------------------------------------------------------------------------------------------------

    def count(self, input_ids: Ids) -> Count:
        """How often an n-gram [n] occurs; with no tokens, the number of all tokens."""
        match = self._index.match(self._checked(input_ids))
        return {"count": self._count(match), "approx": False}

    def find(self, input_ids: Ids) -> Found:
        """Where an n-gram of at most 64 tokens occurs: ranks for `get_doc_by_rank`.

        A datastore that grew has several orders, and ranks count in each. Ranks of deleted documents are among them,
        but not in `cnt`.

        Raises:
            InputError: it has more than 64 tokens.
        """
        ids = self._checked(input_ids)
        if len(ids) > LONGEST:
            raise InputError(
                f"{len(ids)} tokens: ranks are sorted by {LONGEST} tokens. `count` and `search_docs` take more."
            )
        match = self._index.match(ids)
        return {"cnt": self._count(match), "segment_by_shard": self._segments(match)}

    def prob(self, prompt_ids: Ids, cont_id: int) -> Prob:
        """The fraction of the occurrences of a prompt [n] that a token follows."""
        prompt, (token,) = self._checked(prompt_ids), self._checked([cont_id])
        return self._prob(self._index.match(prompt), np.append(prompt, token))

    def next_tokens(self, prompt_ids: Ids, max_support: int = MAX_SUPPORT) -> NextTokens:
        """The tokens that follow the occurrences of a prompt [n], and how often.

        The end of a document is a token too, and nothing follows it.

        Args:
            prompt_ids: the prompt; empty = the distribution of all tokens.
            max_support: if the prompt occurs more often, this many occurrences are read, spread evenly. Counts are then
                estimates.

        Raises:
            InputError: `max_support` is below 1.
        """
        return self._next_tokens(self._index.match(self._checked(prompt_ids)), max_support)

    ntd = next_tokens
    """infini-gram's name."""

    # --- the longest end that occurs ----------------------------------------------------------------------------------

    def longest_match(self, input_ids: Ids) -> LongestMatch:
        """The longest end of a text [n] that occurs. Ranks are those of its last 64 tokens."""
        match = self._longest(self._checked(input_ids))
        return {"suffix_len": match.length, "cnt": self._count(match), "segment_by_shard": self._segments(match)}

    def infgram_prob(self, prompt_ids: Ids, cont_id: int) -> InfgramProb:
        """`prob` for the longest end of a prompt [n] that occurs."""
        prompt, (token,) = self._checked(prompt_ids), self._checked([cont_id])
        match = self._longest(prompt)
        text = np.append(prompt[len(prompt) - match.length :], token)
        return {**self._prob(match, text), "suffix_len": match.length}

    def infgram_ntd(self, prompt_ids: Ids, max_support: int = MAX_SUPPORT) -> InfgramNextTokens:
        """`next_tokens` for the longest end of a prompt [n] that occurs."""
        match = self._longest(self._checked(prompt_ids))
        return {**self._next_tokens(match, max_support), "suffix_len": match.length}

    def votes(self, input_ids: Ids) -> NDArray[np.int64]:
        """What models with a copy head read of a new text [t], which begins a document: [t, 32], as `votes` of
        `retro.Dataset`.

        They are the tokens after the same text in the datastore, for seven lengths of match (`Inputs.votes`).
        """
        return self._index.votes(self._checked(input_ids))

    # --- documents ----------------------------------------------------------------------------------------------------

    def search_docs(self, input_ids: Ids, maxnum: int = 1, max_disp_len: int = MAX_DISPLAYED) -> FoundDocuments:
        """Documents with an n-gram [n], each once, and the tokens around one occurrence.

        If it is frequent, the documents are those of occurrences that are spread evenly.

        Args:
            input_ids: the n-gram.
            maxnum: documents.
            max_disp_len: tokens of each.

        Raises:
            InputError: `maxnum` or `max_disp_len` is below 1.
        """
        _check_positive(maxnum=maxnum, max_disp_len=max_disp_len)
        match = self._index.match(self._checked(input_ids))
        if match is None:
            return {"cnt": 0, "approx": False, "documents": []}
        places = self._index.occurrences(match, _SPREAD * maxnum)
        _, first = np.unique(self._split.documents_of(places[:, 0])[0], return_index=True)
        positions = places @ np.array([self._split.chunk_length, 1])
        parts = [self._around(position, max_disp_len) for position in positions[np.sort(first)[:maxnum]].tolist()]
        return {"cnt": self._count(match), "approx": False, "documents": parts}

    def get_doc_by_rank(self, s: int, rank: int, max_disp_len: int = MAX_DISPLAYED) -> DocumentPart:
        """The document of a rank of `find`, and the tokens around the occurrence.

        Args:
            s: number of the order, as in `segment_by_shard`.
            rank: in the order.
            max_disp_len: tokens that are returned.

        Raises:
            OutOfRange: there is no such order or rank.
            NotFound: the document has been deleted.
            InputError: `max_disp_len` is below 1.
        """
        _check_positive(max_disp_len=max_disp_len)
        ranks = self._index.everything.ranges
        if not 0 <= s < len(ranks):
            raise OutOfRange(f"s = {s}: {datastore_name(self._split.folder)} has the orders 0 to {len(ranks) - 1}.")
        if not 0 <= rank < ranks[s][1]:
            raise OutOfRange(f"rank = {rank}: order {s} has the ranks 0 to {ranks[s][1] - 1}.")
        return self._around(self._index.position(s, rank), max_disp_len)

    def get_doc_by_ix(self, doc_ix: int, max_disp_len: int = MAX_DISPLAYED) -> DocumentPart:
        """The first tokens of a document.

        Args:
            doc_ix: number of the document.
            max_disp_len: tokens that are returned.

        Raises:
            OutOfRange: there is no such document.
            NotFound: it has been deleted.
            InputError: `max_disp_len` is below 1.
        """
        _check_positive(max_disp_len=max_disp_len)
        checked_numbers([doc_ix], self._split.num_documents, "document", self._split)
        return self._around(self._split.chunk_range(doc_ix)[0] * self._split.chunk_length, max_disp_len)

    def get_total_doc_cnt(self) -> int:
        """Documents, without deleted ones."""
        return self._split.num_documents - len(self._split.deleted)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        return checked_tokens(ids, int(self._stored.manifest["vocab_size"]))

    def _longest(self, ids: NDArray[np.int64]) -> Match:
        match = self._index.longest_match(ids)
        return match if match.length else self._index.everything

    def _count(self, match: Match | None) -> int:
        if match is None:
            return 0
        if match.length:
            return self._index.count(match)
        deleted = (self._split.lengths.read(first, stop) for first, stop in self._split.deleted.tolist())
        return match.count - sum(int(lengths.sum(dtype=np.int64)) for lengths in deleted)

    def _segments(self, match: Match | None) -> list[tuple[int, int]]:
        return [(0, 0)] * len(self._index.everything.ranges) if match is None else list(match.ranges)

    def _prob(self, match: Match | None, text: NDArray[np.int64]) -> Prob:
        """The probability of the last token of a text whose other tokens have this match."""
        before, after = self._count(match), self._count(self._index.match(text))
        return {"prompt_cnt": before, "cont_cnt": after, "prob": after / before if before else -1.0}

    def _next_tokens(self, match: Match | None, max_support: int) -> NextTokens:
        _check_positive(max_support=max_support)
        if match is None:
            return {"prompt_cnt": 0, "result_by_token_id": {}, "approx": False}
        count = self._count(match)
        read = min(count, max_support)
        pairs = zip(*(column.tolist() for column in self._index.next_tokens(match, max_support)), strict=True)
        tokens: dict[int, TokenCount] = {
            token: {"cont_cnt": round(times * count / read), "prob": times / read} for token, times in pairs
        }
        return {"prompt_cnt": count, "result_by_token_id": tokens, "approx": count > max_support}

    def _around(self, position: int, most: int) -> DocumentPart:
        """At most `most` tokens around a position, which is in the middle unless the document begins or ends there."""
        split, m = self._split, self._split.chunk_length
        chunk = position // m
        if split.without_deleted(np.array([chunk]))[0] < 0:
            raise NotFound(f"the document of chunk {chunk} has been deleted.")
        (number,), (first,), (stop,) = (column.tolist() for column in split.documents_of(np.array([chunk])))
        length = (stop - 1 - first) * m + int(split.lengths.read(stop - 1, stop)[0])
        begin = max(0, min(position - first * m - (most - 1) // 2, length - most))
        end = min(length, begin + most)
        tokens = tokens_of(split, first + begin // m, first + -(-end // m))[begin % m :][: end - begin]
        return {
            "doc_ix": number,
            "doc_len": length,
            "disp_len": len(tokens),
            "metadata": split.metadata([number])[0],
            "token_ids": tokens.tolist(),
        }


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} = {value}: must be at least 1.")
