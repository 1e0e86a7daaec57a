"""The model reads a text once for all ways to retrieve that do not change its activations, and every score stays the same."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from retro.copying.head import CopyHead
from retro.data.neighbor_choice import NeighborUse
from retro.data.windows import sampled_windows, scored_tokens
from retro.evaluation.bits_per_byte import SetResult
from retro.evaluation.evaluator import uses_of
from retro.evaluation.sets import EvaluationSet
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.model_settings import CopyHeadSettings, RetrievalSettings
from tests.retro.evaluation.test_bits_per_byte import evaluator_of

USES = [NeighborUse(0), NeighborUse(1), NeighborUse(2), NeighborUse(0, votes=True), NeighborUse(2, votes=True)]


def copying(tiny_model: Retro, datastore: Datastore, *, cross_attention: bool) -> Retro:
    """A model with random weights that copies from all sources; without cross-attention neighbors change no activation."""
    copies = CopyHeadSettings(context=True, neighbors=True, datastore=True)
    settings = replace(tiny_model.settings, copy_head=copies)
    if not cross_attention:
        settings = replace(settings, retrieval=RetrievalSettings(cca_layers=()))
    torch.manual_seed(0)
    model = Retro(fit_to(settings, datastore.manifest, datastore.folder))
    assert isinstance(model.copy_head, CopyHead)
    return model


def assert_equal(one: SetResult, other: SetResult) -> None:
    np.testing.assert_array_equal(one.nats_by_document, other.nats_by_document)
    np.testing.assert_array_equal(one.token_scores.nats, other.token_scores.nats)
    assert (one.mode, one.tokens, one.bits_per_byte) == (other.mode, other.tokens, other.bits_per_byte)


@pytest.mark.parametrize(("cross_attention", "readings"), [(False, 1), (True, 3)])
def test_scores_of_one_reading_equal_those_of_a_reading_for_each_use(
    tiny_model: Retro,
    voting_datastore: Datastore,
    monkeypatch: pytest.MonkeyPatch,
    cross_attention: bool,
    readings: int,
) -> None:
    model = copying(tiny_model, voting_datastore, cross_attention=cross_attention)
    held_out, evaluator = EvaluationSet("valid", voting_datastore), evaluator_of(model, stride=32)
    alone = [evaluator.score(held_out, use) for use in USES]
    read, hidden = list[torch.Tensor](), Retro.hidden
    monkeypatch.setattr(Retro, "hidden", lambda self, inputs: read.append(inputs.tokens) or hidden(self, inputs))
    evaluator.score(held_out, USES[0])
    once, seen = len(read), list[SetResult]()
    read.clear()
    together = replace(evaluator, on_result=seen.append).score_each(held_out, USES)
    assert len(read) == readings * once
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)
        assert other.tokens_per_second > 0
    assert sorted(result.mode for result in seen) == sorted(result.mode for result in together)
    assert len({result.bits_per_byte for result in together}) == len(USES)


def test_neighbors_of_another_search_are_read_again(tiny_model: Retro, voting_datastore: Datastore) -> None:
    evaluator = evaluator_of(copying(tiny_model, voting_datastore, cross_attention=True))
    found: Sequence[np.ndarray] = [np.zeros((voting_datastore.valid.num_chunks, 2), np.int64) for _ in range(2)]
    uses = [NeighborUse(2), *(NeighborUse(2, found=each) for each in found), NeighborUse(2, votes=True)]
    assert evaluator.readings(uses) == [[0, 3], [1], [2]]
    assert replace(evaluator, token_losses_of=lambda _: torch.zeros(0)).readings(uses) == [[0], [1], [2], [3]]
    plain = evaluator_of(copying(tiny_model, voting_datastore, cross_attention=False))
    assert plain.readings(uses) == [[0, 1, 2, 3]]
    assert plain.readings(uses_of(plain.model.settings, NeighborUse(0), (1, 2))) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("most", [1, 50, 200, 700, 10**6])
def test_a_limit_of_tokens_is_kept_and_reaches_as_many_documents_as_an_interval_needs(
    tiny_model: Retro, voting_datastore: Datastore, most: int
) -> None:
    held_out, m = EvaluationSet("valid", voting_datastore), voting_datastore.chunk_length
    result = evaluator_of(tiny_model, max_tokens=most, stride=32).score(held_out, NeighborUse(0))
    assert result.tokens <= max(most, m)
    if most >= 5 * m:
        assert result.documents >= 5
    whole = evaluator_of(tiny_model, stride=32).score(held_out, NeighborUse(0))
    if most > held_out.tokens:
        assert_equal(result, whole)
    other = evaluator_of(tiny_model, max_tokens=most, stride=32, seed=1).score(held_out, NeighborUse(0))
    assert (other.tokens, other.nats_by_document.tolist()) != (result.tokens, result.nats_by_document.tolist()) or (
        most > held_out.tokens
    )


def test_sampled_windows_score_no_token_twice_and_reach_into_documents(voting_datastore: Datastore) -> None:
    split, scored = voting_datastore.valid, set[int]()
    drawn = list(sampled_windows(split, 4, 2, 10**6, 5, seed=0))
    for window in drawn:
        chunks = set(range(window.scored, window.stop))
        assert not chunks & scored
        scored |= chunks
    assert scored == set(range(split.num_chunks))
    few = list(sampled_windows(split, 4, 2, 300, 5, seed=0))
    assert len({window.text for window in few}) == len(few) >= 5
    assert any(window.start > split.chunk_range(window.text)[0] for window in few)
    assert 300 - split.chunk_length < sum(int(scored_tokens(split, window)[-1]) for window in few) <= 300
