"""A scheme of positions is one class, which training and generation use in the same way."""

from typing import get_args

import numpy as np
import pytest
import torch

from retro.batch.inputs import Inputs
from retro.device import choose_placement
from retro.inference.decoder import Decoder
from retro.model.attention import Attention
from retro.model.positions import SCHEMES, AlibiPositions, Positions, positions_of
from retro.model_settings import PositionScheme
from tests.retro.small_model import M, T, V, build

METHODS = [name for name in vars(Positions) if not name.startswith("_")]


class Steeper(AlibiPositions):
    """A scheme of another package: ALiBi with scores that fall three times as fast."""

    @classmethod
    def of(cls, *arguments):
        return cls(*AlibiPositions.of(*arguments))

    def score_terms(self, q, heads, distance_keys):
        q, scores = super().score_terms(q, heads, distance_keys)
        return q, 3 * scores

    def in_text(self, *arguments):
        return type(self)(*super().in_text(*arguments))

    def in_window(self, *arguments):
        return type(self)(*super().in_window(*arguments))


def test_every_scheme_of_the_settings_has_a_class() -> None:
    assert list(SCHEMES) == list(get_args(PositionScheme))


@pytest.mark.parametrize("method", METHODS)
def test_a_scheme_without_a_method_is_an_error_when_the_model_is_built(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "alibi", type("Unfinished", (Steeper,), {method: None}))
    with pytest.raises(NotImplementedError, match=rf"positions 'alibi': Unfinished has no {method}, as `Positions`"):
        build(**{"attention.positions": "alibi", "retrieval.cca_layers": ()})
    with pytest.raises(NotImplementedError, match=rf"Unfinished has no {method}"):
        build(**{"retrieval.positions": "alibi"})


def test_a_scheme_without_a_class_is_an_error_when_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SCHEMES, "alibi")
    with pytest.raises(NotImplementedError, match=r"positions 'alibi' have no class: add it to `SCHEMES`"):
        build(**{"attention.positions": "alibi"})


@torch.no_grad()
def test_generation_uses_a_new_scheme_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file but that of the class knows the scheme: neither text nor neighbors get the positions of another one."""
    monkeypatch.setitem(SCHEMES, "alibi", Steeper)
    model = build(**{"attention.positions": "alibi"})
    rng = np.random.default_rng(0)
    tokens, neighbors = rng.integers(0, V, 3 * M + 2), rng.integers(0, V, (2, 2 * M))
    decoder = Decoder(model, choose_placement("cpu", "float32"), 4 * T)

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([neighbors] * len(chunks)), np.full((len(chunks), 2), 2 * M)

    row = decoder.add(tokens[:-2], retrieve)
    for token in tokens[-2:]:
        decoder.read([row])
        decoder.append(row, token)
    given = Inputs(torch.from_numpy(tokens[None]), neighbors=torch.from_numpy(np.stack([neighbors] * 3)[None]))
    expected = model(given)[0, -1]
    torch.testing.assert_close(decoder.read([row])[0], expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setitem(SCHEMES, "alibi", AlibiPositions)
    assert (model(given)[0, -1] - expected).abs().max() > 1e-3  # the scheme matters


@pytest.mark.parametrize("scheme", SCHEMES)
def test_positions_of_cached_text_and_windows_give_the_scores_of_whole_sequences(scheme: str) -> None:
    """Queries 3 and 4 of six, by all keys at once and by those of a cache."""
    torch.manual_seed(0)
    heads = attention(scheme)
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    whole = positions_of(scheme, 16, 8, range(6), range(6), q.device)
    at = torch.tensor([[3, 4]])
    text = positions_of(scheme, 16, 8, range(10), range(1), q.device).in_text(at, 6, q.dtype)
    window = positions_of(scheme, 16, 8, range(6), range(6), q.device, (1, 2)).in_window(at, 6)
    causal = torch.arange(6) <= at[0, :, None]
    keys = whole.finish_keys(k)
    expected = scores(whole, heads, q, keys)[:, :, 3:5]
    torch.testing.assert_close(scores(window, heads, q[:, 3:5], keys), expected)
    torch.testing.assert_close(scores(text, heads, q[:, 3:5], keys)[..., causal], expected[..., causal])


def attention(scheme: str) -> Attention:
    """Self-attention with two heads of 8 features and a width of 16."""
    heads = Attention(16, 16, 2, 8, scheme)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


@torch.no_grad()
def scores(at: Positions, heads: Attention, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores of queries [1, Q, H, C] and finished keys [1, S, H, C]: [1, H, Q, S]."""
    queries, added = at.score_terms(at.finish_queries(q).transpose(1, 2), heads, None)
    products = queries @ keys.transpose(1, 2).transpose(-1, -2) * 8**-0.5
    return products if added is None else products + added
