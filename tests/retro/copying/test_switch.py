"""Trust is the posterior of the strengths of copying: text that retrieval does not predict costs little, whatever it votes for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, TokenLosses
from retro.copying.head import STEP, CopyHead
from retro.copying.sources import sources_of
from retro.copying.switch import (
    ALL_SOURCES,
    CHANGES,
    ENTERS,
    LEAVES,
    PRIOR,
    REMOVED,
    RETRIEVAL,
    RETRIEVES,
    STAYS,
    Switch,
    faded,
    trust_in_retrieval,
    trust_of,
)
from retro.model.retro import Retro
from retro.model_settings import CopyHeadSettings
from tests.retro.copying.test_head import FEW, few_tokens
from tests.retro.small_model import B, M, T, agreed_votes, batch, build, few

ALL = {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True}
SWITCHES = {"retrieval": RETRIEVAL, "all sources": ALL_SOURCES}
every_switch = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)


def step_by_step(log_p: Tensor, switch: Switch, starts: Tensor) -> Tensor:
    """Trust in one row, from the definition, in float64."""
    start, transitions = (torch.tensor(values, dtype=torch.float64) for values in (switch.start, switch.transitions))
    trust, rows = start, []
    for row, begins in zip(log_p.double(), starts, strict=True):
        trust = start if begins else trust
        rows.append(trust)
        after = trust * row.exp()
        trust = after / after.sum() @ transitions
    return torch.stack(rows)


@every_switch
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.1, 30))
def test_trust_is_the_posterior_step_by_step(switch: Switch, seed: int, num_tokens: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_p = -torch.rand(2, num_tokens, len(switch.start), generator=generator) * spread
    starts = torch.rand(2, num_tokens, generator=generator) < 0.1
    found = trust_of(log_p, switch, starts)
    expected = torch.stack([step_by_step(row, switch, begins) for row, begins in zip(log_p, starts, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


@every_switch
def test_rows_of_changes_are_distributions(switch: Switch) -> None:
    for row in (switch.start, *switch.transitions):
        assert sum(row) == pytest.approx(1)
        assert min(row) > 0
        assert len(row) == len(switch.of_retrieval) == len(switch.of_context)
    assert len(switch.transitions) == len(switch.start)


@every_switch
def test_the_last_expert_copies_nothing_and_the_bound_is_that_of_every_switch(switch: Switch) -> None:
    assert (switch.of_retrieval[-1], switch.of_context[-1]) == (REMOVED, REMOVED)
    assert switch.start[-1] == 1 - PRIOR
    assert switch.transitions[-1][-1] == 1 - ENTERS
    assert [row[-1] for row in switch.transitions[:-1]] == [LEAVES] * (len(switch.start) - 1)
    retrieves = [move > REMOVED for move in switch.of_retrieval]
    assert retrieves == sorted(retrieves, reverse=True)
    trust = tuple(range(len(switch.start)))
    assert trust_in_retrieval(trust) == sum(one for one, copies in zip(trust, retrieves, strict=True) if copies)


def strengths_of_context() -> list[list[int]]:
    """The experts of `ALL_SOURCES` with each strength of the context."""
    moves = ALL_SOURCES.of_context
    return [[number for number, move in enumerate(moves) if move == strength] for strength in dict.fromkeys(moves)]


def test_without_retrieval_the_switch_of_all_sources_is_one_of_the_context_alone() -> None:
    groups = strengths_of_context()
    sums = np.array([[sum(row[number] for number in group) for group in groups] for row in ALL_SOURCES.transitions])
    for group in groups:
        np.testing.assert_allclose(sums[group], sums[group[:1]].repeat(len(group), 0), rtol=1e-12)


def test_experts_of_off_keep_their_chances_with_retrieval_but_for_small_parts() -> None:
    groups, transitions = strengths_of_context(), np.array(ALL_SOURCES.transitions)
    off = [group[-1] for group in groups]
    of_context = np.array([[transitions[row, group].sum() for group in groups] for row in off])
    kept = transitions[np.ix_(off, off)] / of_context
    expected = np.full((3, 3), 1 - CHANGES)
    expected[:, -1], expected[-1, :2] = 1, 1 - RETRIEVES
    np.testing.assert_allclose(kept, expected, rtol=1e-12)
    begins = np.array(ALL_SOURCES.start)
    np.testing.assert_allclose(
        begins[off] / [begins[group].sum() for group in groups], [1 - RETRIEVES] * 2 + [1], rtol=1e-12
    )


def test_a_document_earns_the_trust_that_it_earns_alone_to_the_bit() -> None:
    log_p, starts = -5 * torch.rand(1, 37, 4), torch.zeros(1, 37, dtype=torch.bool)
    starts[0, 21] = True
    before = trust_of(log_p, RETRIEVAL, starts)
    log_p[0, :21] = -5 * torch.rand(21, 4)
    assert torch.equal(trust_of(log_p, RETRIEVAL, starts)[:, 21:], before[:, 21:])
    torch.testing.assert_close(trust_of(log_p[:, 21:], RETRIEVAL), before[:, 21:])


def test_trust_depends_on_earlier_tokens_only() -> None:
    log_p = -5 * torch.rand(1, 33, 4)
    changed = log_p.clone()
    changed[0, 20:] = -5 * torch.rand(13, 4)
    assert torch.equal(trust_of(log_p, RETRIEVAL)[0, :21], trust_of(changed, RETRIEVAL)[0, :21])
    assert not torch.equal(trust_of(log_p, RETRIEVAL)[0, 21:], trust_of(changed, RETRIEVAL)[0, 21:])


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


# --- the own context -------------------------------------------------------------------------------------------------


def head_of(context_added: bool, log_odds: float) -> CopyHead:
    """A head whose networks trust every match, of the context and of the datastore, with these log-odds."""
    settings = CopyHeadSettings(context=True, datastore=True, context_added=context_added)
    head = CopyHead(settings.names, M, sources_of(settings)).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(log_odds / STEP if name.endswith("outer_bias") else 0.0)
    return head


def text_losses(head: CopyHead, nats: Tensor, inputs: Inputs) -> Tensor:
    """Losses [B, T - 1] of a text with the switch; `nats` [B, T] are those of the model alone."""
    evidence = head.evidence(head.sources(inputs), inputs.following())
    vocabulary = TokenLosses(nats, -nats.clamp(max=0.5), -nats[..., None].expand(evidence.best.shape))
    if head.learns_trust(inputs):
        return head.trusted_losses(vocabulary, evidence, inputs)[0][:, :-1]
    return head.losses(vocabulary, inputs.following(), evidence)[:, :-1]


def wrong_votes(tokens: Tensor) -> Tensor:
    """Votes after long matches that agree, for tokens that do not follow."""
    return agreed_votes((tokens.roll(-1, 1) + 1) % 9)


@few
@given(
    seed=st.integers(0, 2**31),
    ids=st.integers(2, 9),
    num_tokens=st.sampled_from([2, 64, 300]),
    log_odds=st.floats(-4, 12),
    on=st.booleans(),
)
def test_no_match_in_a_text_itself_can_make_it_much_less_likely(
    seed: int, ids: int, num_tokens: int, log_odds: float, on: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ids, (2, num_tokens), generator=generator)  # few ids: matches are long, and mostly wrong
    alone = 3 * torch.rand(2, num_tokens, generator=generator)
    inputs = Inputs(tokens, votes=wrong_votes(tokens) if on else None)
    harm = text_losses(head_of(True, log_odds), alone, inputs).sum(1) - alone[:, :-1].sum(1)
    assert (harm <= bound(num_tokens) + 1e-3).all()


def test_without_the_switch_a_text_of_wrong_matches_is_harmed() -> None:
    tokens, alone = few_tokens(2, 300), torch.full((2, 300), 0.1)
    trained, added = (text_losses(head_of(context, 6.0), alone, Inputs(tokens)).sum(1) for context in (False, True))
    assert (trained - alone[:, :-1].sum(1) > 20 * bound(300)).all()
    assert (added - alone[:, :-1].sum(1) < bound(300)).all()


@pytest.mark.parametrize("on", [False, True])
def test_a_text_that_repeats_itself_gains_nearly_all_that_it_gains_without_the_switch(on: bool) -> None:
    once = torch.randperm(200, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    tokens, alone = once.repeat(1, 2), torch.full((2, 400), 4.0)
    inputs = Inputs(tokens, votes=wrong_votes(tokens) if on else None)
    gain = alone[:, :-1].sum(1) - text_losses(head_of(True, 1.0), alone, inputs).sum(1)
    without = alone[:, :-1].sum(1) - text_losses(head_of(False, 1.0), alone, Inputs(tokens)).sum(1)
    assert (without > 400).all()
    assert (gain > 0.97 * without).all()


@few
@given(seed=st.integers(0, 2**31), log_odds=st.floats(-2, 8), period=st.integers(8, 200))
def test_wrong_votes_cost_a_text_that_repeats_itself_a_few_bits_against_off(
    seed: int, log_odds: float, period: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(9, (2, period), generator=generator)
    tokens = once.repeat(1, -(-400 // period))[:, :400]
    alone, head = 4 * torch.rand(2, 400, generator=generator), head_of(True, log_odds)
    off, on = (text_losses(head, alone, Inputs(tokens, votes=votes)) for votes in (None, wrong_votes(tokens)))
    # Two times a text begins to be copied from itself, and it can change with each of its tokens.
    bits = -2 * math.log2(1 - RETRIEVES) - 400 * math.log2(1 - CHANGES)
    assert ((on - off).sum(1) / math.log(2) <= bits).all()


def test_off_of_a_model_that_was_trained_with_a_context_has_no_switch_to_the_bit() -> None:
    tokens, alone = few_tokens(2, 64), 3 * torch.rand(2, 64)
    head = head_of(False, 2.0)
    evidence = head.evidence(head.sources(Inputs(tokens)), Inputs(tokens).following())
    vocabulary = TokenLosses(alone, -alone.clamp(max=0.5), -alone[..., None].expand(evidence.best.shape))
    plain = head.train().losses(vocabulary, Inputs(tokens).following(), evidence)
    assert torch.equal(text_losses(head.eval(), alone, Inputs(tokens)), plain[:, :-1])
    assert not head.learns_trust(Inputs(tokens))
    assert head_of(True, 2.0).learns_trust(Inputs(tokens))


@pytest.mark.parametrize("added", [False, True])
def test_training_reads_the_shares_as_they_are(added: bool) -> None:
    tokens, alone = few_tokens(2, 64), 3 * torch.rand(2, 64)
    assert torch.equal(
        text_losses(head_of(added, 2.0).train(), alone, Inputs(tokens)),
        text_losses(head_of(False, 2.0), alone, Inputs(tokens)),
    )


@every_switch
def test_generated_tokens_take_trust_from_retrieval_and_nothing_from_the_sum(switch: Switch) -> None:
    trust = np.array([switch.start] * 3, np.float32)
    left = faded(trust, np.array([0, 1, 1000]))
    np.testing.assert_allclose(left.sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(left[0], trust[0])
    np.testing.assert_allclose(left[1, :3], STAYS * trust[1, :3], rtol=1e-6)
    assert left[2, :3].max() < 1e-6
    np.testing.assert_array_equal(left[:, 4:], trust[:, 4:])
