"""What retrieval brings to a model, until a deadline, and as a notebook shows it."""

import itertools
import time

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.verbs.retrieval_gain import measured, one_window_each
from retro.evaluation.sets import EvaluationSet
from retro.model.retro import Retro
from tests.retro.evaluation.test_bits_per_byte import evaluator_of


def test_every_held_out_document_has_one_window_inside_it(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.valid
    windows = one_window_each(split, 2 * split.chunk_length, seed=0)
    assert sorted(window.text for window in windows) == list(range(split.num_documents))
    for window in windows:
        first, stop = split.chunk_range(window.text)
        assert first <= window.start == window.scored < window.stop <= stop
        assert window.stop - window.start == min(2, stop - first)


@pytest.mark.parametrize(("seconds", "documents"), [(-1.0, 5), (600.0, 17)])
def test_held_out_documents_are_announced_and_measured_until_the_deadline(
    tiny_model: Retro, voting_datastore: Datastore, capsys, seconds: float, documents: int
) -> None:
    held_out = EvaluationSet("valid", voting_datastore)
    evaluator = evaluator_of(tiny_model)
    first = measured(evaluator, held_out, 0, time.monotonic() + seconds)
    assert [result.documents for result in first] == [documents] * 3
    assert [result.mode for result in first] == ["OFF", "ON k=4", "ON k=4 + datastore"]
    tokens = first[0].tokens + documents  # the first token of a window is not scored
    said = capsys.readouterr().out
    assert f"measured next: {tokens:,} tokens of {documents} of {voting_datastore.valid.num_documents} held-out" in said
    again = measured(evaluator, held_out, 0, time.monotonic() + 600 - seconds, documents)
    assert np.array_equal(again[2].nats_by_document, first[2].nats_by_document)


def test_measuring_stops_at_the_deadline_although_more_was_planned(
    tiny_model: Retro, voting_datastore: Datastore, capsys
) -> None:
    held_out = EvaluationSet("valid", voting_datastore)
    begun = time.monotonic()
    clock = itertools.chain(
        [begun, begun + 1e-9, begun], itertools.repeat(begun + 1000)
    )  # other work slows the machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.cli.verbs.retrieval_gain.time.monotonic", clock.__next__)
        results = measured(evaluator_of(tiny_model), held_out, 0, begun + 900)
    assert [result.documents for result in results] == [5, 5, 5]
    assert "the time is up after 5 documents" in capsys.readouterr().out
