"""Scores by content are 0 at the start, find answers where no token matches, and read the querying chunk and no later token."""

import torch

from retro.model.copy_content import _counts
from retro.model.inputs import Inputs
from retro.model.retro import Retro
from retro.model.settings import updated
from tests.retro.small_model import SETTINGS, B, K, M, R, U, batch, build, loss_of
from tests.retro.small_model import one_thread as one_thread  # an autouse fixture

COPYING = {"copy_head.neighbors": True, "retrieval.cca_layers": ()}
CONTENT = COPYING | {"copy_head.content_width": 8}


def test_a_new_head_computes_what_it_does_without_content() -> None:
    torch.manual_seed(0)
    model, without = (Retro(updated(SETTINGS, each)) for each in (CONTENT, COPYING))
    missing = without.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    tokens, neighbors, lengths = batch()
    inputs = tokens % 3, None, neighbors % 3, lengths
    with torch.no_grad():
        assert torch.equal(model(Inputs(*inputs)), without(Inputs(*inputs)))
        torch.testing.assert_close(loss_of(model, tokens % 3, *inputs), loss_of(without, tokens % 3, *inputs))


def test_keys_read_the_querying_chunk_only() -> None:
    model = build(**CONTENT)
    assert model.copy_head is not None
    tokens, neighbors, lengths = batch()
    tokens, neighbors = tokens % 3, neighbors % 3
    changed = tokens.clone()
    changed[:, 2 * M :] = 7  # chunks 2 and 3
    with torch.no_grad():
        keys, others = (
            model.copy_sources(Inputs(each, None, neighbors, lengths))[0].keys for each in (tokens, changed)
        )
    assert keys is not None
    assert others is not None
    same = (keys == others).view(B, U, -1).all(2)
    assert same.tolist() == [[True, True, False, False]] * B
    assert keys.shape == (B * U, K * R, 8)


def test_shared_tokens_are_counted_around_each_position() -> None:
    is_shared = torch.zeros(1, 200, 1)
    is_shared[0, [50, 60]] = 1.0
    one = torch.full((1, 200, 4), 0.541324855)  # softplus(x) = 1
    phrase, sentence, passage = _counts(one, is_shared)[0].expm1().unflatten(1, (3, 4))[:, :, 0].unbind(1)
    for counts, reach in ((phrase, 4), (sentence, 16), (passage, 64)):
        expected = [float(abs(at - 50) <= reach) + float(abs(at - 60) <= reach) for at in range(200)]
        torch.testing.assert_close(counts, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_it_learns_to_answer_with_the_token_next_to_a_shared_one() -> None:
    """A question is a rare token among others, and its last token is in no passage: match lengths are 0."""

    def train(content_width: int) -> float:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = Retro(updated(SETTINGS, CONTENT | {"copy_head.content_width": content_width, "num_layers": 1}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        value = torch.zeros(())
        for _ in range(80):
            passages = torch.randint(2, 40, (32, 1, 2, 8), generator=generator)
            asked = torch.randint(1, 7, (32,), generator=generator)
            rows = torch.arange(32)
            questions = torch.ones(32, M, dtype=torch.int64)
            questions[:, 0], answers = passages[rows, 0, 0, asked - 1], passages[rows, 0, 0, asked]
            labels = torch.full((32, M), -100)
            labels[:, -1] = answers
            value = loss_of(model, labels, questions, None, passages, None)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return value.item()

    assert train(16) < 0.5 * train(0)
