"""Generation and scoring name the neighbors that the model read, and the tokens that it copied from them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from retro.copying.provenance import ChunkWithNeighbors
from retro.device import choose_placement
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import Copy, Sources, joined

K, M = 3, 16


@pytest.fixture(scope="module")
def language_model(tiny_run: Path, tiny_datastore: Datastore) -> LanguageModel:
    return LanguageModel.open(tiny_run, tiny_datastore.folder, "cpu")


@pytest.fixture(scope="module")
def prompts(tiny_datastore: Datastore) -> list[np.ndarray]:
    """Prompts with two complete chunks, with one, and with none."""
    tokens = tiny_datastore.train.tokens.read(0, 3).ravel().astype(np.int64)
    return [tokens[:35], tokens[:16], tokens[:3]]


def generated(
    language_model: LanguageModel, prompts: list[np.ndarray], k: int = K, n: int = 1, **settings
) -> list[list[GeneratedToken]]:
    rows: list[list[GeneratedToken]] = [[] for _ in range(len(prompts) * n)]
    sampling = GenerationSettings(**{"max_tokens": 40, "seed": 2, "ignore_eos": True, **settings})
    for step in language_model.generate(prompts, sampling, k, n=n, sources=True):
        for token in step:
            rows[token.row].append(token)
    return rows


def check_chunks(language_model: LanguageModel, tokens: list[int], read: list[ChunkWithNeighbors]) -> None:
    """All complete chunks in order, each with the neighbors that a search finds."""
    retriever = language_model.retriever
    assert retriever is not None
    chunks = np.array(tokens[: len(tokens) // M * M]).reshape(-1, M)
    assert [each.number for each in read] == list(range(len(chunks)))
    for chunk, each in zip(chunks, read, strict=True):
        assert each.tokens.tolist() == chunk.tolist()
        expected = retriever.neighbors.find(chunk[None], K)
        for table, wanted in zip(each.neighbors, expected, strict=True):
            np.testing.assert_allclose(table, wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_is_named_once_with_its_neighbors_and_tokens_stay_the_same(
    language_model: LanguageModel, prompts: list[np.ndarray], n: int
) -> None:
    rows = generated(language_model, prompts, n=n, max_tokens=20)
    settings = GenerationSettings(max_tokens=20, seed=2, ignore_eos=True)
    plain: list[list[GeneratedToken]] = [[] for _ in rows]
    for step in language_model.generate(prompts, settings, K, n=n):
        for token in step:
            plain[token.row].append(token)
    for number, row in enumerate(rows):
        tokens = [*prompts[number // n].tolist(), *(token.token for token in row)]
        assert [token.token for token in row] == [token.token for token in plain[number]]
        assert all(not token.read and token.copied is None for token in plain[number])
        check_chunks(language_model, tokens[:-1], [each for token in row for each in token.read])
        for place, token in enumerate(row, start=len(tokens) - len(row)):
            assert all((each.number + 1) * M <= place for each in token.read)


def test_a_copied_token_is_in_the_neighbor_that_is_named(
    language_model: LanguageModel, prompts: list[np.ndarray]
) -> None:
    copied = 0
    for prompt, row in zip(prompts, generated(language_model, prompts, temperature=0, max_tokens=28), strict=True):
        read = {each.number: each.neighbors for token in row for each in token.read}
        for place, token in enumerate(row, start=len(prompt)):
            if token.copied is None:
                continue
            share, chunk, neighbor, position = token.copied
            assert chunk == place // M - 1
            assert read[chunk].tokens[neighbor, position] == token.token
            assert 0 < position < read[chunk].lengths[neighbor]
            assert 0 < share <= 1
            copied += 1
    assert copied > 20


def test_scores_name_the_same_sources_as_generation(language_model: LanguageModel, prompts: list[np.ndarray]) -> None:
    rows = generated(language_model, prompts, max_tokens=28)
    sequences = [
        np.array([*prompt, *(token.token for token in row)]) for prompt, row in zip(prompts, rows, strict=True)
    ]
    scores = language_model.score_with_likeliest(sequences, K, 0, sources=True)
    for prompt, row, sequence, scored in zip(prompts, rows, sequences, scores, strict=True):
        assert len(scored.copied) == len(sequence) - 1
        check_chunks(language_model, sequence[:-1].tolist(), scored.read)
        for number, (token, other) in enumerate(zip(row, scored.copied[len(prompt) - 1 :], strict=True)):
            assert (token.copied is None) == (other is None)
            if token.copied is not None and other is not None:
                assert token.copied[1:] == other[1:]
                # After the first token scores trust more or less, since they take generated tokens for text.
                assert token.copied.share == pytest.approx(other.share, abs=1 if number else 0.02)


def test_continuations_of_one_prompt_name_their_own_sources(
    language_model: LanguageModel, prompts: list[np.ndarray]
) -> None:
    """The prompts are read once, in rows that are then copied."""
    precise = replace(language_model, placement=choose_placement("cpu", "float32"))
    rows = generated(precise, prompts[:2], n=2, max_tokens=20)
    alone = [generated(precise, prompts[:2], max_tokens=20, seed=seed) for seed in (2, 3)]
    for number, row in enumerate(rows):
        expected = alone[number % 2][number // 2]
        assert [(token.token, token.copied and token.copied[1:]) for token in row] == [
            (token.token, token.copied and token.copied[1:]) for token in expected
        ]
        assert any(token.copied for token in row)


def test_numbers_of_chunks_count_from_the_beginning_beyond_the_context(
    language_model: LanguageModel, prompts: list[np.ndarray]
) -> None:
    (row,), prompt = generated(language_model, prompts[:1], max_tokens=70), prompts[0]
    tokens = [*prompt.tolist(), *(token.token for token in row)]
    assert len(tokens) > language_model.context + 2 * M
    check_chunks(language_model, tokens[:-1], [each for token in row for each in token.read])
    for place, token in enumerate(row, start=len(prompt)):
        assert token.copied is None or token.copied.chunk == place // M - 1


def test_retrieval_off_has_no_sources(language_model: LanguageModel, prompts: list[np.ndarray]) -> None:
    for row in generated(language_model, prompts, k=0, max_tokens=4):
        assert all(not token.read and token.copied is None for token in row)
    for scored in language_model.score_with_likeliest(prompts, 0, 0, sources=True):
        assert scored.read == []
        assert set(scored.copied) == {None}
    assert language_model.score_with_likeliest(prompts, K, 0)[0].copied == []


def test_only_adjacent_copies_of_one_neighbor_are_joined() -> None:
    def copy(text: tuple[int, int], neighbor_text: tuple[int, int], neighbor: int = 0, share: float = 0.5) -> Sources:
        one = Copy(text=text, chunk=1, neighbor=neighbor, neighbor_text=neighbor_text, tokens=1, share=share)
        return Sources(chunks=[], copies=[one])

    parts = [
        copy((0, 2), (5, 7)), copy((2, 3), (7, 8), share=0.9),
        copy((3, 5), (8, 10), neighbor=1), copy((6, 7), (10, 11), neighbor=1), copy((7, 8), (13, 14), neighbor=1),
    ]  # fmt: skip
    runs = joined([None, *parts])
    assert runs is not None
    assert [run.text for run in runs.copies] == [(0, 3), (3, 5), (6, 7), (7, 8)]
    assert runs.copies[0].neighbor_text == (5, 8)
    assert (runs.copies[0].tokens, runs.copies[0].share) == (2, pytest.approx(0.7))
    assert joined([None, None]) is None
