"""Votes of the datastore open a gate by length, number and agreement; without votes nothing changes."""

import pytest
import torch
from torch import Tensor

from retro.model.copy_datastore import COUNTS, LENGTHS, DatastoreSource, DatastoreVotes
from retro.model.inputs import Inputs
from retro.model.retro import Retro
from tests.retro.small_model import B, T, V, batch, build, votes


def one_vote(length: int, *counts: int) -> Tensor:
    """Votes of one position [1, 1, 7] for the tokens 0, 1, 2."""
    return torch.tensor([length, 0, 1, 2, *counts, *[0] * (3 - len(counts))])[None, None]


def source() -> DatastoreSource:
    made = DatastoreSource(8)
    made.initialize()
    return made


@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize("column", range(len(COUNTS)))
def test_the_gate_is_a_table_by_length_count_and_agreement(row: int, column: int) -> None:
    gate = source()
    agreed, disagreed = gate.tables
    count = COUNTS[column]
    odds = gate.log_odds(DatastoreVotes.of(gate, one_vote(LENGTHS[row], count)))
    assert odds.item() == pytest.approx(agreed[row, column].item())
    if count > 1:
        odds = gate.log_odds(DatastoreVotes.of(gate, one_vote(LENGTHS[row], count - 1, 1)))
        assert odds.item() == pytest.approx(disagreed[row, column].item())


def test_lengths_and_counts_between_the_bounds_share_a_cell() -> None:
    gate = source()
    one, other = (gate.log_odds(DatastoreVotes.of(gate, one_vote(*vote))) for vote in ((24, 8), (31, 32)))
    assert torch.equal(one, other)
    assert gate.log_odds(DatastoreVotes.of(gate, one_vote(0))).item() == -torch.inf


def test_probabilities_are_shares_of_the_votes() -> None:
    gate = source()
    found = DatastoreVotes.of(gate, one_vote(5, 3, 1))
    assert [found.probability(torch.tensor([[label]])).item() for label in range(4)] == [0.75, 0.25, 0, 0]
    assert DatastoreVotes.of(gate, one_vote(0)).probability(torch.tensor([[0]])).item() == 0


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
    silent = of_votes[..., 4:].sum(-1) == 0
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
    model.copy_head.datastore.initialize()  # type: ignore[union-attr]
    tokens, _, _ = batch()
    of_votes = torch.zeros(B, T, 7, dtype=torch.int64)
    of_votes[..., 0], of_votes[..., 1], of_votes[..., 4] = 32, tokens.roll(-1, 1), 8
    on, off = with_and_without(model, of_votes)
    assert on.mean() < 0.1 * off.mean()
    of_votes[..., 1] = (tokens.roll(-1, 1) + 1) % V
    assert with_and_without(model, of_votes)[0].mean() > off.mean()


def test_compiled_log_odds_are_equal() -> None:
    gate, of_votes = source(), votes()
    traced = {"fullgraph": True, "backend": "aot_eager"}  # without generating code, which takes half a minute
    compiled = torch.compile(lambda values: gate.log_odds(DatastoreVotes.of(gate, values)), **traced)
    torch.testing.assert_close(compiled(of_votes), gate.log_odds(DatastoreVotes.of(gate, of_votes)))
