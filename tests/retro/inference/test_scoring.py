"""Scores of sequences equal those of a plain forward pass, each token once, in any batch."""

import numpy as np
import pytest
import torch

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.copying.rows import RetrieveNeighbors
from retro.device import Placement, choose_placement
from retro.inference import scoring
from retro.inference.scoring import Scores, score_windows, to_score
from retro.model.retro import Retro
from tests.retro.inference.test_decoder import retriever, rows
from tests.retro.small_model import M, V, cached_model, every_scheme_and_reader

FLOAT32 = choose_placement("cpu", "float32")
CONTEXT = 4 * M


@torch.no_grad()
def plain_log_probabilities(model: Retro, tokens: np.ndarray, retrieve: RetrieveNeighbors | None) -> np.ndarray:
    """Log-probabilities of all tokens but the first, from one forward pass."""
    full, found = len(tokens) // M, {}
    if full and retrieve is not None:
        neighbors, lengths = retrieve(tokens[: full * M].reshape(-1, M))
        found = {"neighbors": torch.from_numpy(neighbors[None]), "neighbor_lengths": torch.from_numpy(lengths[None])}
    return model(Inputs(torch.from_numpy(tokens[None]), **found))[0, :-1].log_softmax(-1).numpy()


def score(model: Retro, sequences: list[np.ndarray], placement: Placement, context: int, **options) -> list[Scores]:
    begun = to_score(model, sequences, context=context, top=options.get("top", 0))
    score_windows(model, [window for sequence in begun for window in sequence.windows], placement, **options)
    return [sequence.scores for sequence in begun]


def score_with(model: Retro, sequences: list[np.ndarray], k: int = 2, **options) -> list[Scores]:
    return score(model, sequences, FLOAT32, context=CONTEXT, retrieve=retriever(k), **options)


@pytest.mark.parametrize("k", [0, 3])
@every_scheme_and_reader
def test_log_probabilities_equal_those_of_a_forward_pass(scheme: str, k: int) -> None:
    model, sequences = cached_model(scheme), rows(1, 2, M, M + 1, CONTEXT - 1, CONTEXT, 3, 2 * M)
    for tokens, scores in zip(sequences, score_with(model, sequences, k), strict=True):
        expected = plain_log_probabilities(model, tokens, retriever(k))
        expected = np.take_along_axis(expected, tokens[1:, None], 1)[:, 0]
        np.testing.assert_allclose(scores.log_probabilities, expected, atol=1e-4)


@every_scheme_and_reader
def test_long_sequences_are_scored_in_windows_that_overlap_by_half(scheme: str) -> None:
    model, stride = cached_model(scheme), CONTEXT // 2
    for length in (CONTEXT + 1, CONTEXT + stride, CONTEXT + stride + 1, 5 * CONTEXT - 1):
        (tokens,) = rows(length)
        (scores,) = score_with(model, [tokens])
        assert len(scores.log_probabilities) == length - 1
        for token in range(1, length):
            start = max(0, -(-(token + 1 - CONTEXT) // stride)) * stride  # of the first window with the token
            expected = plain_log_probabilities(model, tokens[start : start + CONTEXT], retriever(2))[
                token - start - 1, tokens[token]
            ]
            assert scores.log_probabilities[token - 1] == pytest.approx(expected, abs=1e-4)


def test_scores_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = cached_model("rope"), rows(3, 2 * M + 1, 3 * CONTEXT, M, CONTEXT, CONTEXT + 3)
    together = score_with(model, sequences)
    monkeypatch.setattr(scoring, "_BATCH_TOKENS", 1)
    for alone, scores in zip([score_with(model, [each])[0] for each in sequences], together, strict=True):
        np.testing.assert_allclose(alone.log_probabilities, scores.log_probabilities, atol=1e-5)


def test_chunks_are_searched_once_if_a_token_follows() -> None:
    asked: list[list[int]] = []
    long, whole, short = rows(3 * CONTEXT + 1, 2 * M, M - 1)
    score(cached_model("rope"), [long, whole, short], FLOAT32, context=CONTEXT, retrieve=retriever(2, asked))
    assert asked == [*long[:-1].reshape(-1, M).tolist(), whole[:M].tolist()]


def test_likeliest_tokens_are_the_top_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_BLOCK", 3)
    model, sequences = cached_model("rope"), rows(2 * M + 2, 1, 5)
    for tokens, scores in zip(sequences, score_with(model, sequences, top=4), strict=True):
        expected = torch.from_numpy(plain_log_probabilities(model, tokens, retriever(2))).topk(4)
        assert scores.likeliest.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(scores.likeliest_log_probabilities, expected.values.numpy(), atol=1e-4)
    (all_tokens,) = score_with(model, [sequences[0]], top=V + 1)
    assert np.exp(all_tokens.likeliest_log_probabilities).sum(1) == pytest.approx(1)


def test_a_context_of_one_chunk_cannot_be_windowed() -> None:
    with pytest.raises(InputError, match=f"a sequence has {M + 1} tokens"):
        score(cached_model("rope"), rows(M + 1), FLOAT32, context=M)
    assert score(cached_model("rope"), [], FLOAT32, context=M) == []


def test_neighbor_tokens_also_limit_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = cached_model("rope"), rows(*[CONTEXT] * 8)
    sizes: list[int] = []

    def batch(windows: list, *rest) -> tuple:
        sizes.append(len(windows))
        return made(windows, *rest)

    made = scoring._batch
    monkeypatch.setattr(scoring, "_batch", batch)
    few = score_with(model, sequences, k=1)
    assert sizes == [8]
    length = retriever(1)(sequences[0][:M][None])[0].shape[2]
    for k in (1, 2):
        monkeypatch.setattr(scoring, "_BATCH_NEIGHBOR_TOKENS", 4 * CONTEXT // M * length)  # four windows with k = 1
        sizes.clear()
        again = score_with(model, sequences, k=k)
        assert sizes == [4 // k] * 2 * k
        if k == 1:
            for one, other in zip(few, again, strict=True):
                np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)


def test_windows_in_any_order_and_in_several_calls_give_equal_scores() -> None:
    model, sequences, search = cached_model("copying"), rows(5 * CONTEXT, 3, CONTEXT + 1, 2 * M), retriever(2)
    expected = score(model, sequences, FLOAT32, context=CONTEXT, retrieve=search, top=2, sources=True)
    begun = to_score(model, sequences, context=CONTEXT, top=2)
    windows = [window for each in begun for window in each.windows]
    order = np.random.default_rng(0).permutation(len(windows))
    for part in np.array_split(order, 4):
        score_windows(model, [windows[place] for place in part], FLOAT32, retrieve=search, top=2, sources=True)
    for one, other in zip((each.scores for each in begun), expected, strict=True):
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-4)
        np.testing.assert_array_equal(one.likeliest, other.likeliest)
        assert [each.number for each in one.read] == [each.number for each in other.read]
        assert [each and each[1:] for each in one.copied] == [each and each[1:] for each in other.copied]
