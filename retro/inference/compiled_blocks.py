"""Compiled loops of a decoder's blocks over few tokens, in float32; `few_tokens.py` calls them.

Sums are added in the order that is the fastest on a processor. It does not depend on the number of tokens, so a token
gets the same bits alone and among others. Letters of the shape comments as in `few_tokens.py`.
"""

import math
from functools import partial

import numpy as np

from indexing.machine import compiled

_loop = partial(compiled, free_sums=True)


@_loop
def normalize(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, centers: bool, out: np.ndarray) -> None:
    """RMSNorm, or LayerNorm if it `centers`, of rows [n, D]."""
    width = x.shape[1]
    for row in range(len(x)):
        mean = np.float32(0)
        if centers:
            for d in range(width):
                mean += x[row, d]
            mean /= np.float32(width)
        factor = _factor(x[row], mean, eps)
        for d in range(width):
            out[row, d] = (x[row, d] - mean) * factor * weight[d]
        for d in range(len(bias)):
            out[row, d] += bias[d]


@_loop
def gated(joined: np.ndarray, out: np.ndarray) -> None:
    """SiLU(gate) · up of rows [n, 2·F]: [n, F]."""
    width = out.shape[1]
    for row in range(len(out)):
        for f in range(width):
            gate = joined[row, f]
            out[row, f] = gate * joined[row, width + f] / (np.float32(1) + math.exp(-gate))


@_loop
def attend(
    projected: np.ndarray,
    rotation: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    norm_eps: float,
    keys: np.ndarray,
    values: np.ndarray,
    layer: int,
    slots: np.ndarray,
    starts: np.ndarray,
    window: int,
    scale: float,
    out: np.ndarray,
) -> None:
    """Keep the keys and values of new tokens, and let each token attend to those up to itself.

    Args:
        projected: queries, keys and values of the tokens, row by row, [N·n, (H + 2·G)·C].
        rotation: cosines and sines of their positions, [2, N·n, P].
        q_norm: weights of the norm of queries [C]; none = no norm.
        k_norm: of keys.
        norm_eps: of both.
        keys: of the cache, [B, L, G, S, C].
        values: the same shape.
        layer: which one.
        slots: of the rows, [N].
        starts: position of each row's first token, [N].
        window: tokens that a token sees, with itself; 0 = all.
        scale: of the products of queries and keys.
        out: sums of values, [N·n, H·C].
    """
    num_groups, width = keys.shape[2], keys.shape[4]
    num_tokens, num_heads = len(projected) // len(slots), out.shape[1] // width
    shared, longest = num_heads // num_groups, 0
    for token in range(len(projected)):
        row, one = token // num_tokens, projected[token]
        at = starts[row] + token % num_tokens
        longest = max(longest, at + 1)
        for group in range(num_groups):
            key, value = keys[slots[row], layer, group, at], values[slots[row], layer, group, at]
            first = (num_heads + group) * width
            key[:] = one[first : first + width]
            _finish(key, k_norm, norm_eps, rotation[0, token], rotation[1, token])
            first += num_groups * width
            value[:] = one[first : first + width]
    query, weights = np.empty((shared, width), np.float32), np.empty((shared, longest), np.float32)
    for token in range(len(projected)):
        row = token // num_tokens
        stop = starts[row] + token % num_tokens + 1
        start = max(0, stop - window) if window else 0
        for group in range(num_groups):
            first = group * shared * width
            for head in range(shared):
                query[head] = projected[token, first + head * width : first + (head + 1) * width]
                _finish(query[head], q_norm, norm_eps, rotation[0, token], rotation[1, token])
            key, value = keys[slots[row], layer, group], values[slots[row], layer, group]
            for s in range(start, stop):
                for head in range(shared):
                    product = np.float32(0)
                    for c in range(width):
                        product += query[head, c] * key[s, c]
                    weights[head, s - start] = product * np.float32(scale)
            _softmax(weights, stop - start)
            sums = out[token, first : first + shared * width]
            sums[:] = 0
            for s in range(start, stop):
                for head in range(shared):
                    weight = weights[head, s - start]
                    for c in range(width):
                        sums[head * width + c] += weight * value[s, c]


@_loop
def _finish(x: np.ndarray, norm: np.ndarray, eps: float, cos: np.ndarray, sin: np.ndarray) -> None:
    """Normalize and rotate a query or a key [C]."""
    width, pairs = len(x), len(cos)
    if len(norm):
        factor = _factor(x, np.float32(0), eps)
        for c in range(width):
            x[c] *= factor * norm[c]
    for c in range(pairs):
        left, right = x[c], x[pairs + c]
        x[c], x[pairs + c] = left * cos[c] - right * sin[c], right * cos[c] + left * sin[c]


@_loop
def _softmax(scores: np.ndarray, count: int) -> None:
    """Softmax over the first `count` scores of each row."""
    for row in range(len(scores)):
        largest = scores[row, 0]
        for s in range(1, count):
            largest = max(largest, scores[row, s])
        total = np.float32(0)
        for s in range(count):
            scores[row, s] = math.exp(scores[row, s] - largest)
            total += scores[row, s]
        for s in range(count):
            scores[row, s] /= total


@_loop
def _factor(x: np.ndarray, mean: float | np.float32, eps: float) -> np.float32:
    """What a norm multiplies the deviations of x from a mean with."""
    squares = np.float32(0)
    for number in x:
        squares += (number - mean) * (number - mean)
    return np.float32(1 / math.sqrt(squares / np.float32(len(x)) + eps))
