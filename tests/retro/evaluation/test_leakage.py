"""Leakage of a chunk, and bits per byte over the chunks below a leakage threshold."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import SetResult
from retro.evaluation.leakage import by_leakage, leakage_of
from retro.evaluation.sets import EvaluationSet
from retro.model.retro import Retro
from tests.retro.evaluation.test_bits_per_byte import evaluator_of

SHARED_TOKENS = (0, 4, 8, 12, 16)


@pytest.fixture(scope="module")
def held_out(tiny_datastore: Datastore) -> EvaluationSet:
    return EvaluationSet("valid", tiny_datastore)


def measure(model: Retro, held_out: EvaluationSet, **settings) -> SetResult:
    return evaluator_of(model, **settings).score(held_out, NeighborUse(0))


def longest_run(chunk: list[int], neighbor: list[int]) -> int:
    """The textbook algorithm."""
    best = 0
    for first in range(len(chunk)):
        for second in range(len(neighbor)):
            length = 0
            while chunk[first + length : first + length + 1] == neighbor[second + length : second + length + 1] != []:
                length += 1
            best = max(best, length)
    return best


def test_leakage_is_the_longest_run_shared_with_a_neighbor_or_its_continuation(
    held_out: EvaluationSet,
) -> None:
    split, train = held_out.split, held_out.datastore.train
    ids = np.array([0, 5, split.num_chunks - 1])
    for number, found in zip(ids, leakage_of(held_out, ids, 3), strict=True):
        length = int(split.lengths.read(number, number + 1)[0])
        chunk = split.tokens.read(number, number + 1)[0, :length].tolist()
        tokens, lengths = train.with_continuation(split.neighbor_ids.read(number, number + 1)[0, :3])
        rows = [row[:size].tolist() for row, size in zip(tokens, lengths, strict=True)]
        assert found == pytest.approx(max(longest_run(chunk, row) for row in rows) / length)


@pytest.mark.usefixtures("not_compared")
def test_a_chunk_copied_from_training_has_leakage_1(tiny_datastore: Datastore, tmp_path: Path) -> None:
    copy = EvaluationSet("copy", Datastore.open(shutil.copytree(tiny_datastore.folder, tmp_path / "copy")))
    rows = copy.datastore.folder / "chunks" / "00000" / "valid"
    tokens, lengths = np.load(rows / "tokens.npy"), np.load(rows / "lengths.npy")
    full = int(np.flatnonzero(lengths == copy.split.chunk_length)[0])
    nearest = copy.split.neighbor_ids.read(full, full + 1)[0]
    source = copy.datastore.train.tokens.read(int(nearest[2]), int(nearest[2]) + 1)[0]
    assert int(copy.datastore.train.lengths.read(int(nearest[2]), int(nearest[2]) + 1)[0]) == copy.split.chunk_length
    tokens[full] = source
    np.save(rows / "tokens.npy", tokens)
    ids = np.array([full])
    assert leakage_of(EvaluationSet("copy", copy.datastore), ids, 10)[0] == 1
    assert leakage_of(EvaluationSet("copy", copy.datastore), ids, 2)[0] < 1  # the third neighbor is not read


def test_the_chunk_length_as_shared_tokens_includes_all_chunks(held_out: EvaluationSet) -> None:
    leakage = leakage_of(held_out, np.arange(held_out.split.num_chunks), 10)
    *_, (tokens, chunks) = by_leakage(leakage, SHARED_TOKENS, held_out.split.chunk_length)
    assert tokens == held_out.split.chunk_length
    assert chunks.all()


def test_more_shared_tokens_include_more_chunks_and_sum_their_bits_and_bytes(
    tiny_model: Retro, held_out: EvaluationSet
) -> None:
    result, m = measure(tiny_model, held_out), held_out.split.chunk_length
    scores = result.token_scores
    leakage = leakage_of(held_out, scores.chunks, 10)
    levels = list(by_leakage(leakage, SHARED_TOKENS, m))
    shares = [chunks.mean() for _, chunks in levels]
    assert shares == sorted(shares)
    assert 0 < shares[2] < 1
    for tokens, chunks in levels:
        inside = leakage <= tokens / m
        part = result.part(chunks)
        if part is None:
            assert not inside.any()
            continue
        bits = scores.chunk_nats[inside].sum() / math.log(2)
        assert part.bits_per_byte == pytest.approx(bits / (scores.bytes * scores.scored)[inside].sum())


def test_a_level_holds_full_chunks_by_the_length_of_the_run_and_short_ones_by_their_share(
    tiny_model: Retro, held_out: EvaluationSet
) -> None:
    result, m = measure(tiny_model, held_out), held_out.split.chunk_length
    lengths = held_out.split.lengths.gather(result.token_scores.chunks).astype(int)
    assert set(lengths) != {m}
    generator = np.random.default_rng(0)
    runs = generator.integers(0, lengths + 1)
    levels = list(by_leakage(runs / lengths, (32, 8, 4, 64), m))
    assert [tokens for tokens, _ in levels] == [4, 8, m]
    for tokens, chunks in levels:
        expected = np.where(lengths == m, runs <= tokens, runs * m <= tokens * lengths)
        assert np.array_equal(chunks[:, 0], expected)
        part = result.part(chunks)
        assert part is not None
        assert part.tokens == result.token_scores.scored[expected].sum()


def test_a_token_is_counted_for_its_chunk(tiny_model: Retro, held_out: EvaluationSet) -> None:
    split, sizes = held_out.split, held_out.token_bytes
    scores = measure(tiny_model, held_out, stride=16).token_scores
    assert np.array_equal(scores.chunks, np.arange(split.num_chunks))
    lengths = split.lengths.gather(scores.chunks).astype(int)
    expected = np.arange(split.chunk_length) < lengths[:, None]
    expected[split.documents_of(scores.chunks)[1] == scores.chunks, 0] = False  # not predicted
    assert np.array_equal(scores.scored, expected)
    assert np.array_equal(scores.bytes, sizes[split.tokens.gather(scores.chunks)])
    wide = measure(tiny_model, held_out, stride=48, batch_size=3).token_scores
    assert np.array_equal(wide.scored, scores.scored)


def test_chunks_are_measured_if_only_some_documents_are(tiny_model: Retro, held_out: EvaluationSet) -> None:
    result = measure(tiny_model, held_out, max_tokens=200)
    scores = result.token_scores
    assert scores.scored.sum() == result.tokens
    assert (scores.bytes * scores.scored).sum() == result.bytes
    by_document = np.bincount(scores.documents, scores.chunk_nats, minlength=held_out.split.num_documents)
    assert np.allclose(by_document, result.nats_by_document)


@pytest.mark.usefixtures("not_compared")
def test_leakage_can_use_another_datastore_of_the_same_chunks_only(held_out: EvaluationSet, tmp_path: Path) -> None:
    other = Datastore.open(shutil.copytree(held_out.datastore.folder, tmp_path / "other"))
    ids = np.arange(20)
    assert np.array_equal(leakage_of(held_out, ids, 4, source=other), leakage_of(held_out, ids, 4))
    path = other.folder / "neighbors" / "00000" / "valid" / "ids.npy"
    np.save(path, np.full_like(np.load(path), -1))
    blind = leakage_of(held_out, np.arange(4), 4, source=Datastore.open(other.folder))
    assert blind.tolist() == [0] * 4
    path = other.folder / "chunks" / "00000" / "valid" / "tokens.npy"
    np.save(path, np.load(path)[::-1])
    with pytest.raises(InputError, match="'valid'"):
        leakage_of(held_out, ids, 4, source=Datastore.open(other.folder))


def test_a_datastore_that_excludes_near_copies_causes_a_warning(
    held_out: EvaluationSet, tmp_path: Path, caplog
) -> None:
    other = Datastore.open(shutil.copytree(held_out.datastore.folder, tmp_path / "other"))
    path = other.folder / "neighbors" / "00000" / "manifest.json"
    manifest = read_json(path)
    manifest["recipe"]["settings"]["neighbors.max_overlap"] = 0.5
    write_checked(path, manifest | {"fingerprint": fingerprint(manifest["recipe"])})
    leakage_of(held_out, np.arange(2), 4, source=other)
    assert "neighbors.max_overlap = 0.5" in caplog.text
