"""Text of the benchmark of growth: trigrams of the corpora, the same bytes for the same seed, near copies."""

import json

import numpy as np
import pytest
import zstandard

from benchmarks.speed import scale_text
from benchmarks.speed.scale_text import Trigrams, documents, part

TEXTS = ["the cat sat on the mat, and the cat slept.", "the dog sat on the log. 检索模型，检索文档。"] * 3


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Trigrams:
    monkeypatch.setattr(scale_text, "_LANES", 8)
    monkeypatch.setattr(scale_text, "_STEPS", 200)
    return Trigrams.fit(TEXTS)


def trigrams(words: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row) for row in np.lib.stride_tricks.sliding_window_view(words, 3).tolist()}


def test_a_part_is_json_lines_of_the_corpora_s_words_and_the_same_for_the_same_seed(model: Trigrams) -> None:
    made = part(model, 3, 0.05, 0)
    rows = [json.loads(line) for line in zstandard.ZstdDecompressor().decompress(made, 1 << 20).decode().splitlines()]
    assert made == part(model, 3, 0.05, 0)
    assert made != part(model, 4, 0.05, 0) != part(model, 4, 0.05, 1)
    assert len({row["id"] for row in rows}) == len(rows) > 10
    assert any("检索" in row["text"] for row in rows)
    assert any("the cat sat on the" in row["text"] for row in rows)


def test_documents_have_lengths_of_the_corpora_and_a_share_are_near_copies(model: Trigrams) -> None:
    made = documents(model, 0.5, np.random.default_rng(0))
    assert {len(each) for each in made[:-1]} <= set(model.lengths.tolist())
    words = sum(map(len, made))
    assert 0.4 < (words - 8 * 200) / words < 0.6  # the chains have 8 * 200 words, the rest are copies
    assert sum(map(len, documents(model, 0, np.random.default_rng(0)))) == 8 * 200
