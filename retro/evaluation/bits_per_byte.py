"""Bits per byte of held-out documents, and its difference between two models or two ways to read, with intervals.

    nats of every token ─┬─► sums over documents ─► bits per byte, perplexity ─► intervals from draws of documents
                         └─► sums over a part of the tokens (a band of matches, a limit of leakage) ─► the same for the part

Bits per byte does not depend on the tokenizer: it is the sum of nats / (ln 2 · bytes of the text).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Documents, or questions, drawn together in a bootstrap.
_BUFFERED_DRAWS = 1 << 20


@dataclass(frozen=True)
class TokenScores:
    """Scores of tokens, by the chunk of each token, not by that of the position that predicts it.

    Attributes:
        chunks: [n] int64 chunk ids, ascending.
        documents: [n] int64 document numbers.
        nats: [n, m] float32; NaN for tokens that are not scored.
        bytes: [n, m] uint16, UTF-8 bytes of the text of each token.
    """

    chunks: np.ndarray
    documents: np.ndarray
    nats: np.ndarray
    bytes: np.ndarray

    @classmethod
    def joined(cls, parts: "Sequence[TokenScores]") -> "TokenScores":
        """Scores of different chunks, in the order of these."""
        order = np.argsort(np.concatenate([part.chunks for part in parts]))
        columns = zip(*((part.chunks, part.documents, part.nats, part.bytes) for part in parts), strict=True)
        return cls(*(np.concatenate(column)[order] for column in columns))

    @property
    def scored(self) -> np.ndarray:
        """Whether each token is scored: [n, m] bool."""
        return ~np.isnan(self.nats)

    @property
    def chunk_nats(self) -> np.ndarray:
        """Sums over the scored tokens of each chunk: [n] float64."""
        sums: np.ndarray = np.nansum(self.nats, axis=1, dtype=np.float64)
        return sums


@dataclass(frozen=True)
class SetResult:
    """One measurement.

    Attributes:
        set: name of the evaluation set.
        k: neighbors of each chunk.
        tokens: number of scored tokens.
        tokens_per_second: speed of this measurement.
        nats_by_document, bytes_by_document: [documents] float64 over the scored tokens, for paired comparisons.
        votes: whether the model copied from the whole datastore. Without neighbors and votes: retrieval OFF.
        model: name of the model, if there are several.
        scores: of the tokens; None if only the sums are known.
    """

    set: str
    k: int
    tokens: int
    tokens_per_second: float
    nats_by_document: np.ndarray
    bytes_by_document: np.ndarray
    votes: bool = False
    model: str = ""
    scores: TokenScores | None = None

    @property
    def retrieval(self) -> str:
        """`OFF` or `ON`."""
        return "ON" if self.k or self.votes else "OFF"

    @property
    def mode(self) -> str:
        """What is read, see `mode_of`."""
        return mode_of(self.k, self.votes)

    @property
    def label(self) -> str:
        """The model and what it reads: `OFF`, `ON k=2`, `baseline OFF`."""
        return f"{self.model} {self.mode}".strip()

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text of the scored tokens."""
        return int(self.bytes_by_document.sum())

    @property
    def documents(self) -> int:
        """Number of documents with scored tokens."""
        return int(np.count_nonzero(self.bytes_by_document))

    @property
    def bits_per_byte(self) -> float:
        """Total bits divided by the bytes of the scored tokens."""
        return float(self.nats_by_document.sum() / math.log(2) / self.bytes_by_document.sum())

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return float(math.exp(self.nats_by_document.sum() / self.tokens))

    @property
    def token_scores(self) -> TokenScores:
        """The scores of the tokens, of a result that has them."""
        assert self.scores is not None, "no scores of tokens"
        return self.scores

    def as_json(self) -> dict[str, Any]:
        """All values except the arrays and the name of the model."""
        figures = ("bits_per_byte", "perplexity", "documents", "tokens", "bytes", "tokens_per_second")
        return {name: getattr(self, name) for name in ("set", "retrieval", "k", "votes", *figures)}

    def part(self, tokens: np.ndarray) -> "SetResult | None":
        """The measurement over a part of its tokens; None if they have no text.

        Args:
            tokens: bool [n, m], or [n, 1] for whole chunks: those in the part.
        """
        scores, count = self.token_scores, len(self.nats_by_document)
        inside = scores.scored & tokens
        columns = (np.where(inside, scores.nats, 0.0), inside, np.where(inside, scores.bytes, 0))
        nats, numbers, sizes = (
            np.bincount(scores.documents, column.sum(1, dtype=np.float64), minlength=count) for column in columns
        )
        if not sizes.any():
            return None
        return replace(self, tokens=int(numbers.sum()), nats_by_document=nats, bytes_by_document=sizes, scores=None)


def mode_of(k: int, votes: bool) -> str:
    """What is read, in words: `OFF`, `ON k=2`, `ON datastore` or `ON k=2 + datastore`."""
    read = [f"k={k}"] * bool(k) + ["datastore"] * votes
    return f"ON {' + '.join(read)}" if read else "OFF"


def joined(parts: Sequence[SetResult]) -> SetResult:
    """One measurement from several of different windows, with the same model and the same reading."""
    tokens = sum(part.tokens for part in parts)
    return replace(
        parts[0],
        tokens=tokens,
        tokens_per_second=tokens / sum(part.tokens / part.tokens_per_second for part in parts),
        nats_by_document=np.sum([part.nats_by_document for part in parts], axis=0),
        bytes_by_document=np.sum([part.bytes_by_document for part in parts], axis=0),
        scores=TokenScores.joined([part.token_scores for part in parts]),
    )


# --- comparisons -----------------------------------------------------------------------------------------------------


def compare(measured: SetResult, reference: SetResult, seed: int = 0, rounds: int = 1000) -> tuple[float, float, float]:
    """Compare two measurements of the same documents: difference in percent of the reference's bits-per-byte.

    Args:
        measured: for example, retrieval ON.
        reference: for example, the baseline.
        seed: seed of the bootstrap.
        rounds: samples of the bootstrap.

    Returns:
        the difference (negative = fewer bits), and its 2.5% and 97.5% quantiles in a bootstrap over documents. With a
        single document both quantiles equal the difference: there is no interval.
    """
    assert measured.bytes == reference.bytes, "not the same tokens"
    ratio, low, high = _bootstrap(measured, reference.nats_by_document, seed, rounds)
    return 100 * (ratio - 1), 100 * (low - 1), 100 * (high - 1)


def interval(measured: SetResult, seed: int = 0, rounds: int = 1000) -> tuple[float, float] | None:
    """The 2.5% and 97.5% quantiles of bits-per-byte in a bootstrap over documents; None with a single document."""
    if measured.documents == 1:
        return None
    _, low, high = _bootstrap(measured, measured.bytes_by_document * math.log(2), seed, rounds)
    return low, high


def _bootstrap(measured: SetResult, parts: np.ndarray, seed: int, rounds: int) -> tuple[float, float, float]:
    """The nats over a sum of `parts` [documents], and its 2.5% and 97.5% quantiles over draws of documents."""
    scored = np.flatnonzero(measured.bytes_by_document)
    return ratio_with_interval(measured.nats_by_document[scored], parts[scored], seed, rounds)


def ratio_with_interval(
    values: np.ndarray, parts: np.ndarray, seed: int = 0, rounds: int = 1000
) -> tuple[float, float, float]:
    """The sum of values [n] over that of parts [n], and its 2.5% and 97.5% quantiles in a bootstrap over the n."""
    generator, ratios = np.random.default_rng(seed), []
    at_once = max(1, _BUFFERED_DRAWS // len(values))
    for start in range(0, rounds, at_once):
        drawn = generator.integers(0, len(values), (min(at_once, rounds - start), len(values)))
        ratios.append(values[drawn].sum(1) / parts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(values.sum() / parts.sum()), float(low), float(high)
