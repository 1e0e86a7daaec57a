"""Votes of the datastore are shares of lengths; without votes nothing changes; they lower the loss of what they vote for."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from indexing.suffixes.votes import LENGTHS, SHARES
from retro.batch.inputs import Inputs
from retro.copying.datastore import DatastoreVotes
from retro.copying.matches import MATCH_LENGTHS
from retro.copying.votes import LengthVotes
from retro.model.retro import Retro
from tests.retro.small_model import T, V, agreed_votes, batch, build, votes


def one_vote(length: int, size: int, *shares: int) -> Tensor:
    """Votes of one position [1, 1, 32] for the tokens 0, 1, 2, the same for all lengths up to `length`."""
    of_length = [size, *shares, *[0] * (3 - len(shares))]
    of_lengths = [of_length if reached <= length else [0] * 4 for reached in LENGTHS]
    return torch.tensor([length, 0, 1, 2, *chain.from_iterable(of_lengths)])[None, None]


def test_evidence_says_size_agreement_and_the_share_of_the_label_for_every_length_that_votes() -> None:
    found = DatastoreVotes.of(one_vote(5, 3, 9, 3))
    for label, right in enumerate((9, 3, 0, 0)):
        size, agree, of_label, known = LengthVotes(*found.evidence(torch.tensor([[label]]))[0][0, 0].unbind(-1))
        reached = torch.tensor([float(0 < length <= 5) for length in MATCH_LENGTHS])
        assert torch.equal(size, 3 * reached)
        torch.testing.assert_close(agree, 9 / SHARES * reached)
        torch.testing.assert_close(of_label, right / SHARES * reached)
        torch.testing.assert_close(known, 12 / SHARES * reached)


def test_candidates_have_a_part_of_the_share_of_every_length() -> None:
    found, shares = DatastoreVotes.of(one_vote(2, 3, 9, 3)), torch.zeros(1, 1, len(MATCH_LENGTHS))
    shares[..., 1:3] = torch.tensor([0.2, 0.1])
    tokens, weights = found.candidates(shares, torch.zeros_like(shares))
    assert tokens[0, 0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights[0, 0], 0.3 * torch.tensor([9, 3, 0]) / SHARES)


def with_and_without(model: Retro, of_votes: Tensor | None) -> tuple[Tensor, Tensor]:
    tokens, neighbors, lengths = batch()
    whole = Inputs(tokens, None, neighbors, lengths, votes=of_votes, labels=tokens.roll(-1, 1))
    with torch.no_grad():
        return model.token_losses(whole), model.token_losses(whole._replace(votes=None))


@pytest.mark.parametrize("head", [{}, {"copy_head.context": True, "copy_head.neighbors": True}], ids=str)
def test_positions_without_votes_have_the_loss_of_a_model_without_the_source(head: dict[str, object]) -> None:
    of_votes = votes()
    model, plain = build(**{"copy_head.datastore": True}, **head), build(**head)
    plain.load_state_dict(model.state_dict(), strict=False)
    on, off = with_and_without(model.train(), of_votes)  # otherwise votes change how far neighbors are trusted
    torch.testing.assert_close(off, with_and_without(plain.train(), None)[0], rtol=0, atol=0)
    silent = of_votes[..., 0] == 0
    assert torch.equal(on[silent], off[silent])
    assert (on[~silent] != off[~silent]).all()


def test_votes_of_later_tokens_change_no_earlier_loss() -> None:
    model, of_votes = build(**{"copy_head.datastore": True, "copy_head.context": True}), votes()
    changed = of_votes.clone()
    changed[:, T // 2 :] = votes(seed=1)[:, T // 2 :]
    before, after = (with_and_without(model, each)[0] for each in (of_votes, changed))
    assert torch.equal(before[:, : T // 2], after[:, : T // 2])
    assert not torch.equal(before[:, T // 2 :], after[:, T // 2 :])


def test_votes_for_the_label_lower_the_loss() -> None:
    model = build(**{"copy_head.datastore": True})
    assert model.copy_head is not None
    model.copy_head.initialize()
    tokens, _, _ = batch()
    on, off = with_and_without(model, agreed_votes(tokens.roll(-1, 1)))
    assert on.mean() < 0.1 * off.mean()
    assert with_and_without(model, agreed_votes((tokens.roll(-1, 1) + 1) % V))[0].mean() > off.mean()
