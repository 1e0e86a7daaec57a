"""Bits per byte by the longest match of held-out documents and before their tokens."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore, Split, delete_documents
from indexing.store.errors import InputError
from indexing.suffixes.votes import read_votes
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.leakage import LongestMatches, longest_matches
from retro.evaluation.sets import EvaluationSet
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.model_settings import updated
from tests.conftest import tiny_config
from tests.retro.evaluation.test_bits_per_byte import evaluator_of

STARTS, OFF = (4, 16, 64), NeighborUse(0)


@pytest.fixture(scope="module")
def held_out(planted_datastore: Datastore) -> EvaluationSet:
    return EvaluationSet("valid", planted_datastore)


def texts_of(split: Split) -> list[list[int]]:
    lengths = split.lengths.read(0, split.num_chunks)
    real, tokens = np.arange(split.chunk_length) < lengths[:, None], split.tokens.read(0, split.num_chunks)
    ranges = split.chunk_ranges(np.arange(split.num_documents)).tolist()
    return [tokens[first:stop][real[first:stop]].tolist() for first, stop in ranges]


def measure(model: Retro, held_out: EvaluationSet, use: NeighborUse = OFF, **settings: int) -> SetResult:
    return evaluator_of(model, **settings).score(held_out, use)


def by_document(result: SetResult, bands: np.ndarray) -> list[SetResult | None]:
    """The parts of a result by the band of each document [documents]."""
    return [result.part(bands[result.token_scores.documents, None] == band) for band in range(len(STARTS) + 1)]


def by_token(result: SetResult, split: Split) -> list[SetResult | None]:
    """The parts of a result by the longest match before each token."""
    matches = LongestMatches.of(split, STARTS)
    bands = matches.bands(matches.before_tokens(result.token_scores.chunks))
    return [result.part(bands == band) for band in range(len(STARTS) + 1)]


def test_matches_of_tokens_and_documents_are_those_of_a_search_through_all_texts(held_out: EvaluationSet) -> None:
    split, matches = held_out.split, LongestMatches.of(held_out.split, ())
    trained = ["".join(map(chr, text)) for text in texts_of(held_out.datastore.train)]

    def longest(text: str, end: int) -> int:
        lengths = range(min(end, 64), 0, -1)
        return next((n for n in lengths if any(text[end - n : end] in other[:-1] for other in trained)), 0)

    documents = matches.of_documents(np.arange(split.num_documents))
    for number in (0, 1):
        text = "".join(map(chr, texts_of(split)[number]))
        expected = [longest(text, end) for end in range(1, len(text) + 1)]
        first, stop = split.chunk_range(number)
        assert matches.of_tokens(np.arange(first, stop)).ravel()[: len(text)].tolist() == expected
        assert documents[number] == max(expected)
    names = [row["id"] for row in split.metadata(range(split.num_documents))]
    assert [name.startswith("planted") for name in names] == (documents == 64).tolist()
    assert documents.min() > 0


def test_bands_begin_at_0_and_at_each_length_in_any_order(held_out: EvaluationSet) -> None:
    matches = LongestMatches.of(held_out.split, (100, 8, 4, 8))
    assert matches.starts == (0, 4, 8, 64)
    assert matches.bands(np.array([0, 3, 4, 7, 8, 63, 64])).tolist() == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 500}, {"stride": 16, "batch_size": 3}])
def test_bands_split_all_scored_tokens_and_their_bits(
    tiny_model: Retro, held_out: EvaluationSet, settings: dict[str, int]
) -> None:
    result, split = measure(tiny_model, held_out, **settings), held_out.split
    matches = LongestMatches.of(split, STARTS)
    documents = matches.bands(matches.of_documents(np.arange(split.num_documents)))
    for parts in (by_document(result, documents), by_token(result, split)):
        there = [part for part in parts if part is not None]
        assert len(there) > 1
        assert sum(part.tokens for part in there) == result.tokens
        assert sum(part.bytes for part in there) == result.bytes
        assert np.allclose(sum(part.nats_by_document for part in there), result.nats_by_document)


def test_a_token_counts_for_the_match_before_it(tiny_model: Retro, held_out: EvaluationSet) -> None:
    split = held_out.split
    expected = np.zeros(4, dtype=np.int64)
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)).tolist():
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        before = read_votes(split, np.arange(first, stop))["length"][real][:-1]
        starts = [0, *STARTS, 65]
        expected += [((before >= low) & (before < high)).sum() for low, high in pairwise(starts)]
    parts = by_token(measure(tiny_model, held_out), split)
    assert [0 if part is None else part.tokens for part in parts] == expected.tolist()


def test_documents_of_a_band_are_scored_as_alone(tiny_model: Retro, held_out: EvaluationSet) -> None:
    result = measure(tiny_model, held_out)
    chosen = np.arange(held_out.split.num_documents) % 2
    odd = by_document(result, chosen)[1]
    assert odd is not None
    np.testing.assert_allclose(odd.nats_by_document[1::2], result.nats_by_document[1::2], rtol=1e-12)
    assert odd.documents == chosen.sum()


def test_planted_copies_gain_and_a_limit_on_near_copies_ends_their_gain(held_out: EvaluationSet) -> None:
    settings = updated(tiny_config(Path(), Path()).model, {"copy_head.datastore": True, "retrieval.cca_layers": ()})
    torch.manual_seed(0)
    model = Retro(fit_to(settings, held_out.datastore.manifest, held_out.datastore.folder))
    matches = LongestMatches.of(held_out.split, STARTS)
    documents = matches.bands(matches.of_documents(np.arange(held_out.split.num_documents)))

    def changes(parts: Callable[[SetResult], Iterable[SetResult | None]], max_overlap: float) -> list[float]:
        uses = (NeighborUse(0), NeighborUse(0, votes=True, max_overlap=max_overlap))
        off, on = (parts(measure(model, held_out, use)) for use in uses)
        return [compare(two, one)[0] for one, two in zip(off, on, strict=True) if one and two]

    fresh, planted = changes(partial(by_document, bands=documents), 1)
    assert abs(fresh) < 5
    assert planted < -20
    short, middle, long, longest = changes(partial(by_token, split=held_out.split), 1)
    assert max(middle, long, longest) < -20
    # No votes after matches of more than three tokens.
    limited = changes(partial(by_token, split=held_out.split), 0.2)
    assert limited == [pytest.approx(short, abs=0.1), 0, 0, 0]  # the longer ones earned trust, too


def test_without_up_to_date_votes_or_with_other_datastores_there_are_no_longest_matches(
    held_out: EvaluationSet, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    assert longest_matches(held_out, STARTS) == LongestMatches.of(held_out.split, STARTS)
    assert longest_matches(EvaluationSet("valid", tiny_datastore), STARTS) is None
    datastore = held_out.datastore
    others = replace(datastore, manifest=datastore.manifest | {"extra_datastores": [{}]})
    assert longest_matches(EvaluationSet("valid", others), STARTS) is None
    changed = Path(shutil.copytree(datastore.folder, tmp_path / "changed"))
    delete_documents(changed, [str(datastore.train.metadata([0])[0]["id"])])
    assert longest_matches(EvaluationSet("valid", Datastore.open(changed)), STARTS) is None


@pytest.mark.usefixtures("not_compared")
def test_another_datastore_must_have_the_same_chunks(held_out: EvaluationSet, tmp_path: Path) -> None:
    other = Path(shutil.copytree(held_out.datastore.folder, tmp_path / "other"))
    assert longest_matches(held_out, STARTS, Datastore.open(other)) is not None
    path = other / "chunks" / "00000" / "valid" / "tokens.npy"
    np.save(path, np.load(path)[::-1])
    with pytest.raises(InputError, match="its chunks differ"):
        longest_matches(held_out, STARTS, Datastore.open(other))
