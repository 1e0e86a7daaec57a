"""Trust is the posterior of the strengths of copying: text that retrieval does not predict costs little, whatever it votes for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.copying.switch import ENTERS, PRIOR, START, STRENGTHS, TRANSITIONS, trust_of
from retro.model.retro import Retro
from tests.retro.copying.test_head import FEW, few_tokens
from tests.retro.small_model import B, M, T, agreed_votes, batch, build

ALL = {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True}


def step_by_step(log_p: Tensor, starts: Tensor) -> Tensor:
    """Trust in one row, from the definition, in float64."""
    trust, rows = torch.tensor(START, dtype=torch.float64), []
    for row, begins in zip(log_p.double(), starts, strict=True):
        trust = torch.tensor(START, dtype=torch.float64) if begins else trust
        rows.append(trust)
        after = trust * row.exp()
        trust = after / after.sum() @ torch.tensor(TRANSITIONS, dtype=torch.float64)
    return torch.stack(rows)


@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.1, 30))
def test_trust_is_the_posterior_step_by_step(seed: int, num_tokens: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_p = -torch.rand(2, num_tokens, 4, generator=generator) * spread
    starts = torch.rand(2, num_tokens, generator=generator) < 0.1
    found = trust_of(log_p, starts)
    expected = torch.stack([step_by_step(*row) for row in zip(log_p, starts, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_rows_of_changes_are_distributions() -> None:
    for row in (START, *TRANSITIONS):
        assert sum(row) == pytest.approx(1)
        assert min(row) > 0
    assert len(STRENGTHS) == len(START) == len(TRANSITIONS)


def test_a_document_earns_the_trust_that_it_earns_alone_to_the_bit() -> None:
    log_p, starts = -5 * torch.rand(1, 37, 4), torch.zeros(1, 37, dtype=torch.bool)
    starts[0, 21] = True
    before = trust_of(log_p, starts)
    log_p[0, :21] = -5 * torch.rand(21, 4)
    assert torch.equal(trust_of(log_p, starts)[:, 21:], before[:, 21:])
    torch.testing.assert_close(trust_of(log_p[:, 21:]), before[:, 21:])


def test_trust_depends_on_earlier_tokens_only() -> None:
    log_p = -5 * torch.rand(1, 33, 4)
    changed = log_p.clone()
    changed[0, 20:] = -5 * torch.rand(13, 4)
    assert torch.equal(trust_of(log_p)[0, :21], trust_of(changed)[0, :21])
    assert not torch.equal(trust_of(log_p)[0, 21:], trust_of(changed)[0, 21:])


def bound(num_tokens: int) -> float:
    """Nats that a text can cost more than with retrieval OFF."""
    return -math.log(1 - PRIOR) - num_tokens * math.log(1 - ENTERS)


def losses(model: Retro, tokens: Tensor, of_votes: Tensor) -> tuple[Tensor, Tensor]:
    """Losses OFF and ON [B, T - 1]."""
    _, neighbors, lengths = batch()
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
    inputs = Inputs(tokens, None, neighbors % FEW, lengths, votes=of_votes, labels=labels)
    with torch.no_grad():
        return model.token_losses(inputs.off())[:, :-1], model.token_losses(inputs)[:, :-1]


@pytest.mark.parametrize("seed", range(5))
def test_no_votes_can_make_a_text_much_less_likely(seed: int) -> None:
    model, tokens = build(**ALL, **{"retrieval.cca_layers": ()}), few_tokens(B, T)
    generator = torch.Generator().manual_seed(seed)
    other = torch.randint(1, FEW, (B, T), generator=generator)
    wrong = agreed_votes((tokens.roll(-1, 1) + other) % FEW)  # long matches that agree, for tokens that do not follow
    off, on = losses(model, tokens, wrong)
    assert (on.sum(1) - off.sum(1) <= bound(T)).all()
    with torch.no_grad():
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
        without_switch = model.train().token_losses(Inputs(tokens, votes=wrong, labels=labels))[:, :-1]
    assert (without_switch.sum(1) - off.sum(1) > 10 * bound(T)).all()


def test_right_votes_gain_and_tokens_after_them_trust_retrieval_more() -> None:
    model, tokens = build(**ALL, **{"retrieval.cca_layers": ()}), few_tokens(B, T)
    off, on = losses(model, tokens, agreed_votes(tokens.roll(-1, 1)))
    assert (on[:, T // 2 :] < 0.5 * off[:, T // 2 :]).all()
    assert (on[:, -M:].mean() < on[:, :M].mean()).all()
