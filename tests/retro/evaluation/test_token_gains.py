"""Gains of tokens sum to those of their chunk, and chunks are ordered by their gain."""

from dataclasses import replace

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import TokenScores
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.token_gains import chunks_by_gain, score_passage
from retro.model.retro import Retro
from retro.model_settings import updated
from tests.retro.evaluation.test_bits_per_byte import FLOAT32, evaluator_of


@pytest.fixture(scope="module")
def model(tiny_model: Retro) -> Retro:
    heads = {"copy_head.context": True, "copy_head.neighbors": True}
    return Retro(updated(tiny_model.settings, heads)).eval()


def scores(model: Retro, held_out: EvaluationSet, k: int) -> TokenScores:
    evaluator = evaluator_of(model, window=1024, stride=512)  # whole documents
    return evaluator.score(held_out, NeighborUse(k)).token_scores


def test_gains_of_tokens_sum_to_those_of_the_chosen_chunk(model: Retro, tiny_datastore: Datastore) -> None:
    held_out = EvaluationSet("valid", tiny_datastore)
    off, on = scores(model, held_out, 0), scores(model, held_out, 2)
    chunks = chunks_by_gain(off, on, held_out.split)
    assert 1 < len(chunks) < held_out.split.num_chunks
    chunk = int(chunks[-1])
    passage = score_passage(model, held_out, chunk, FLOAT32, k=2, window=64)
    row = int(np.flatnonzero(off.chunks == chunk)[0])
    assert len(passage.tokens) == off.scored[row].sum() == held_out.split.chunk_length
    for ours, theirs in ((passage.off, off), (passage.on, on)):
        assert -ours.sum() * np.log(2) == pytest.approx(theirs.chunk_nats[row], rel=1e-4)
    assert np.array_equal(passage.tokens, held_out.split.tokens.read(chunk, chunk + 1)[0])
    assert np.array_equal(passage.neighbor_ids, held_out.split.neighbor_ids.read(chunk - 1, chunk)[0][:2])
    for at in np.flatnonzero(passage.neighbors >= 0):
        assert passage.neighbor_tokens[passage.neighbors[at]][passage.positions[at]] == passage.tokens[at]


def test_nothing_is_copied_without_a_copy_head(tiny_model: Retro, tiny_datastore: Datastore) -> None:
    held_out = EvaluationSet("valid", tiny_datastore)
    passage = score_passage(tiny_model.eval(), held_out, 1, FLOAT32, k=2, window=64)
    assert not passage.copied.any()
    assert not passage.from_datastore.any()
    assert (passage.neighbors == -1).all()
    assert passage.gains.any()


def test_chunks_are_in_the_order_of_their_gains(model: Retro, tiny_datastore: Datastore) -> None:
    split = tiny_datastore.valid
    full = np.flatnonzero(np.asarray(split.lengths.read(0, split.num_chunks)) == split.chunk_length)
    later = [chunk for chunk in full if split.documents_of(np.array([chunk]))[1][0] < chunk][:3]
    ids, gains = np.array(later), [0.5, -2.0, 3.0]
    nats = np.full((3, split.chunk_length), 10.0, dtype=np.float32)
    off = TokenScores(ids, split.documents_of(ids)[0], nats, np.zeros_like(nats))
    on = replace(off, nats=nats - np.array(gains, dtype=np.float32)[:, None])
    assert chunks_by_gain(off, on, split).tolist() == [later[n] for n in (1, 0, 2)]
