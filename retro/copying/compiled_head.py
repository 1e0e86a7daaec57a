"""A copy head for the next tokens of rows: `CopyHead.mix` as compiled loops.

    log-probabilities of some tokens, evidence, trust ─► log-odds ─► shares ─┬─► log of what the vocabulary keeps
                                                       candidates of the sources ─┴─► their log-probabilities

A generated token needs about a thousand multiplications for each network. As operations of torch they would be a
hundred small ones, each of which takes several microseconds between two passes of a model. So the probabilities of the
vocabulary stay on the device, and the few numbers that decide what is copied are computed here. Letters of the shape
comments as in `head.py`; N are rows.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from indexing.machine import compiled
from retro.copying.head import ALL_AGREE, BEST_FEATURES, STEP, WIDTH, CopyHead, num_features
from retro.copying.matches import MATCH_LENGTHS


class LastShares(NamedTuple):
    """How the next tokens of rows are mixed.

    Attributes:
        log_kept: logs of what the vocabulary keeps, float32 [N].
        shares: of each source and length, float64 [N, C, L].
    """

    log_kept: np.ndarray
    shares: np.ndarray


class CompiledHead:
    """The networks of a copy head, as they are now."""

    def __init__(self, head: CopyHead) -> None:
        count = len(head.known)
        first = num_features(count)  # of the features of the best candidates
        inner = np.zeros((count, first + BEST_FEATURES * count, WIDTH), np.float32)
        inner_bias = np.zeros((count, WIDTH), np.float32)
        outer = np.zeros((count, len(MATCH_LENGTHS), WIDTH), np.float32)
        outer_bias = np.zeros((count, len(MATCH_LENGTHS)), np.float32)
        for number, network in enumerate(map(head.network, head.known)):
            if network is not None:
                read, read_best = _array(network.inner).T, _array(network.inner_best).T  # of the first sources
                inner[number, : len(read)], inner[number, first : first + len(read_best)] = read, read_best
                inner_bias[number] = _array(network.inner_bias)
                outer[number], outer_bias[number] = STEP * _array(network.outer), STEP * _array(network.outer_bias)
        self._networks, self._moves = (inner, inner_bias, outer, outer_bias), np.array(head.moves)
        self._of_retrieval = np.array([source.of_retrieval for source in head.known])
        self._switched = np.array([source.switched for source in head.known])
        self._copied = np.zeros(0)  # of each token id; zeros between calls

    def shares(
        self,
        log_top: np.ndarray,
        log_best: np.ndarray,
        votes: np.ndarray,
        trust: np.ndarray,
        copy_strength: np.ndarray,
    ) -> LastShares:
        """Compute the shares of the next tokens of N rows.

        Args:
            log_top: log-probability of the vocabulary's likeliest token, float32 [N].
            log_best: log-probability of the best candidate of each source, float32 [N, C].
            votes: of the sources, float32 [N, C, L, 4].
            trust: in each expert, float32 [N, S].
            copy_strength: factor of the odds of sources that retrieval OFF removes, float32 [N].
        """
        odds, shares, log_kept = np.empty(votes.shape[:3]), np.zeros(votes.shape[:3]), np.empty(len(votes))
        compiled(_find_odds)(
            *self._networks, ALL_AGREE, log_top, log_best, votes, copy_strength, self._of_retrieval, odds
        )
        compiled(_find_shares)(odds, self._moves, self._switched, trust, votes, shares, log_kept)
        return LastShares(log_kept.astype(np.float32), shares)

    def log_probabilities(
        self, before: np.ndarray, log_kept: np.ndarray, following: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """Compute the log-probabilities of candidates in the mixture, float32 [N, S].

        A token that occurs several times has the same value each time. One that has no probability, since it is
        forbidden, gets none.

        Args:
            before: log-probabilities of the vocabulary for them, float32 [N, S].
            log_kept: of `shares`.
            following: the candidates, int64 [N, S].
            weights: probabilities that are copied, float32 [N, S].
        """
        values, most = np.empty_like(before), int(following.max()) + 1
        if len(self._copied) < most:
            self._copied = np.zeros(most)
        compiled(_add_copied)(before, log_kept, following, weights, self._copied, values)
        return values


def _array(parameter: Tensor) -> np.ndarray:
    array: np.ndarray = parameter.detach().to("cpu", torch.float32).numpy()
    return array


def _find_odds(
    inner: np.ndarray,
    inner_bias: np.ndarray,
    outer: np.ndarray,
    outer_bias: np.ndarray,
    all_agree: float,
    log_top: np.ndarray,
    log_best: np.ndarray,
    votes: np.ndarray,
    copy_strength: np.ndarray,
    of_retrieval: np.ndarray,
    odds: np.ndarray,
) -> None:
    """Fill the log-odds [N, C, L] of `CopyHead.log_odds` with the copy strength; -inf where nothing votes."""
    num_rows, num_sources, num_lengths = odds.shape
    odds[:] = -np.inf
    features, hidden = np.empty(inner.shape[1]), np.empty(inner.shape[2])
    for row in range(num_rows):
        features[0], features[1] = 2 * math.exp(log_top[row]) - 1, max(log_top[row], -4.0) / 2 + 1
        for source in range(num_sources):
            at, log_p = 2 + 4 * num_sources * num_lengths + 3 * source, log_best[row, source]
            if votes[row, source, :, 0].max() > 0:
                features[at], features[at + 1] = math.exp(log_p), max(log_p, -16.0) / 8 + 1
                features[at + 2] = 1.0 if log_p >= log_top[row] else 0.0
            else:
                features[at : at + 3] = 0
            for length in range(num_lengths):
                at = 2 + 4 * (source * num_lengths + length)
                size, agree = votes[row, source, length, 0], votes[row, source, length, 1]
                features[at], features[at + 1] = min(size, 1.0), size / 4
                features[at + 2], features[at + 3] = agree, 1.0 if agree > all_agree else 0.0
        for source in range(num_sources):
            strength = copy_strength[row] if of_retrieval[source] else 1.0
            if strength == 0 or votes[row, source, :, 0].max() == 0:
                continue
            hidden[:] = inner_bias[source]
            for at in range(len(features)):
                if features[at] != 0:  # most are 0: few lengths have votes
                    for unit in range(len(hidden)):
                        hidden[unit] += inner[source, at, unit] * features[at]
            for unit in range(len(hidden)):
                hidden[unit] *= 0.5 * (1 + math.erf(hidden[unit] / math.sqrt(2.0)))
            for length in range(num_lengths):
                if votes[row, source, length, 0] > 0:
                    odds[row, source, length] = outer_bias[source, length] + math.log(strength)
                    for unit in range(len(hidden)):
                        odds[row, source, length] += outer[source, length, unit] * hidden[unit]


def _find_shares(
    odds: np.ndarray,
    moves: np.ndarray,
    switched: np.ndarray,
    trust: np.ndarray,
    votes: np.ndarray,
    shares: np.ndarray,
    log_kept: np.ndarray,
) -> None:
    """Add the shares of each expert, and find what is left for the vocabulary, with votes for unknown tokens."""
    num_rows, num_sources, num_lengths = odds.shape
    moved = np.empty((num_sources, num_lengths))
    for row in range(num_rows):
        kept, copies = 0.0, False
        for source in range(num_sources):
            if switched[source] and odds[row, source].max() > -np.inf:
                copies = True
        for number in range(moves.shape[1] if copies else 1):
            moved[:] = odds[row]
            for source in range(num_sources):
                if copies:
                    moved[source] += moves[source, number]
            highest = max(moved.max(), 0.0)  # the vocabulary's log-odds are 0
            moved[:] = np.exp(moved - highest)
            # A token that these sources have nothing for has the shares of the last expert.
            part = (trust[row, number] if copies else 1.0) / (math.exp(-highest) + moved.sum())
            kept += part * math.exp(-highest)
            shares[row] += part * moved
        for source in range(num_sources):
            for length in range(num_lengths):
                kept += shares[row, source, length] * (1 - votes[row, source, length, 3])
        log_kept[row] = math.log(kept)


def _add_copied(
    before: np.ndarray,
    log_kept: np.ndarray,
    following: np.ndarray,
    weights: np.ndarray,
    copied: np.ndarray,
    values: np.ndarray,
) -> None:
    """Fill the values of `CompiledHead.log_probabilities`. `copied` [token ids] are zeros, before and afterwards."""
    num_rows, count = following.shape
    for row in range(num_rows):
        for place in range(count):
            copied[following[row, place]] += weights[row, place]
        for place in range(count):
            value, weight = before[row, place] + log_kept[row], copied[following[row, place]]
            if value > -np.inf and weight > 0:
                added = math.log(weight)
                value = max(value, added) + math.log1p(math.exp(-abs(value - added)))
            values[row, place] = value
        for place in range(count):  # clearing these few is faster than a new array of all token ids
            copied[following[row, place]] = 0.0
