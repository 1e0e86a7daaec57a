"""Encoded neighbors come from the cache as they were encoded, and the cache stays within its bytes."""

import numpy as np
import pytest
import torch

from retro.device import choose_placement
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.scoring import score_windows, to_score
from tests.retro.inference.test_decoder import LENGTHS, retriever, rows, uncached
from tests.retro.small_model import R, T, Together, V, cached_model

FLOAT32 = choose_placement("cpu", "float32")


def neighbors_of(seed: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (n, k, R)), rng.integers(0, R + 1, (n, k))


@torch.no_grad()
def test_cached_neighbors_equal_encoded_ones() -> None:
    model = cached_model("reading")
    cache, (tokens, lengths) = NeighborCache(model, 2**20), neighbors_of(0, 3, 2)
    tokens[2], lengths[2] = tokens[0], lengths[0]  # retrieved again
    distinct = len({(length, row[:length].tobytes()) for row, length in zip(tokens.reshape(-1, R), lengths.ravel())})  # noqa: B905
    expected = model.encode_neighbors(torch.from_numpy(tokens))
    real = torch.from_numpy(np.arange(R) < lengths[..., None]).flatten(1)[:, None, None, :, None]
    for again in range(3):
        if again == 2:  # padding is not part of the text
            tokens = np.where(np.arange(R) < lengths[..., None], tokens, 0)
        for found, wanted in zip(cache.encode(tokens, lengths), expected, strict=True):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found * real, wanted * real, rtol=1e-5, atol=1e-5)
        assert (cache.hits, cache.misses) == (6 * (again + 1) - distinct, distinct)


def test_the_least_recently_read_leave_first() -> None:
    model = cached_model("reading")
    size = sum(part.nbytes for part in model.encode_neighbors(torch.zeros(1, 1, R, dtype=torch.int64)))
    cache, full = NeighborCache(model, 2 * size), np.array([[R]])
    first, second, third = (np.full((1, 1, R), token) for token in range(3))
    with torch.no_grad():
        for neighbor, hits, misses in (
            (first, 0, 1),
            (second, 0, 2),
            (first, 1, 2),
            (third, 1, 3),
            (first, 2, 3),
            (second, 2, 4),
        ):
            cache.encode(neighbor, full)
            assert (cache.hits, cache.misses) == (hits, misses)
            assert cache.bytes <= 2 * size
        empty = NeighborCache(model, 0)
        for misses in (1, 2):
            empty.encode(first, full)
            assert (empty.hits, empty.misses, empty.bytes) == (0, misses, 0)


@pytest.mark.parametrize("max_bytes", [0, 5000, 2**20])
def test_a_decoder_with_a_cache_gives_the_logits_of_a_full_forward_pass(max_bytes: int) -> None:
    model, retrieve = cached_model("reading"), retriever(2)
    decoder = Together(model, FLOAT32, 4 * T, retrieve)
    decoder.decoder.layers.neighbor_cache = cache = NeighborCache(model, max_bytes)
    prompts = rows(*LENGTHS)
    for _ in range(2):
        found = decoder.read(prompts)
        expected = torch.stack([uncached(model, row, retrieve) for row in prompts])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        decoder.keep([])
    assert (cache.hits > cache.misses) == (max_bytes == 2**20)


def test_scores_with_a_cache_are_those_without() -> None:
    model, texts, scores = cached_model("reading"), rows(*LENGTHS, 5 * T), []
    cache = NeighborCache(model, 2**22)
    for own in (None, cache, cache):
        begun = to_score(model, texts, context=2 * T)
        windows = [window for each in begun for window in each.windows]
        score_windows(model, windows, FLOAT32, retrieve=retriever(2), neighbor_cache=own)
        scores.append(np.concatenate([each.scores.log_probabilities for each in begun]))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scores[2], scores[0], rtol=1e-4, atol=1e-4)
    assert cache.hits > cache.misses > 0
