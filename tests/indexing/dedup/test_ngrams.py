"""Units of text, n-gram sets, exact similarities, and MinHash bands that find similar sets."""

import numpy as np
import pytest

from indexing.dedup.ngrams import Sketch, banding, gram_set, jaccard, units

CHINESE = "人民法院审理民事案件，适用本法。当事人应当遵守诉讼秩序，履行发生法律效力的判决书。"


def words(number: int, seed: int) -> list[str]:
    return [f"w{n}" for n in np.random.default_rng(seed).integers(0, 10**9, number)]


def test_units_are_words_or_characters_of_scripts_without_spaces() -> None:
    text = "Don't retrain: 2024年 中华、カナ ภา 한국어 naïve_x"
    expected = ["don", "t", "retrain", "2024", "年", "中", "华", "カ", "ナ", "ภ", "า", "한국어", "naïve_x"]
    assert np.array_equal(units(text), np.concatenate([units(word) for word in expected]))


def test_punctuation_spaces_and_case_are_ignored() -> None:
    assert np.array_equal(units("The END — (of) it.\n"), units("the end of IT"))
    assert np.array_equal(units(CHINESE), units(CHINESE.replace("，", "\n").replace("。", "")))
    assert len(units(" ,.。—\n")) == 0


def test_gram_sets_follow_the_definition() -> None:
    text = "a b c a b c d"
    assert len(gram_set(text, 3)) == 4  # abc bca cab bcd
    assert len(gram_set(text, 1)) == 4
    assert jaccard(gram_set(text, 3), gram_set("b c a b", 3)) == pytest.approx(2 / 4)
    assert (np.diff(gram_set(" ".join(words(500, 0)), 13).astype(object)) > 0).all()


def test_short_text_is_one_gram_and_equals_only_itself() -> None:
    assert len(gram_set("just four words here", 13)) == 1
    assert jaccard(gram_set("four words", 13), gram_set("Four words!", 13)) == 1
    assert jaccard(gram_set("four words", 13), gram_set("words four", 13)) == 0
    assert jaccard(gram_set("a b c", 2), gram_set("c b a", 2)) == 0
    assert len(gram_set("…", 13)) == 0
    assert jaccard(gram_set("…", 13), gram_set("…", 13)) == 0


def test_hashes_are_the_same_in_every_process() -> None:
    grams = gram_set("检索 the index", 2)
    assert grams.tolist() == [609009514030521503, 8277413729272502648, 10592869214665461515]
    assert Sketch(2, 2)(grams).tolist() == [3740833589125260691, 8079831319405397548]


@pytest.mark.parametrize(("threshold", "permutations"), [(0.5, 64), (0.8, 64), (0.8, 128), (0.8, 256), (0.95, 128)])
def test_bands_miss_at_most_one_percent_of_pairs_at_the_threshold(threshold, permutations) -> None:
    shape = banding(threshold, permutations)
    assert shape is not None
    bands, rows = shape
    assert bands * rows <= permutations
    assert (1 - threshold**rows) ** bands <= 0.01
    assert (1 - threshold ** (rows + 1)) ** (permutations // (rows + 1)) > 0.01
    assert banding(0.1, 16) is None  # too few permutations


def test_similar_sets_share_a_band_and_dissimilar_ones_do_not() -> None:
    bands, rows = banding(0.8, 128) or (0, 0)
    sketch = Sketch(bands, rows)
    rng = np.random.default_rng(0)
    met = {0.8: 0, 0.2: 0}
    for similarity in met:
        for _ in range(100):
            grams = np.unique(rng.integers(0, 2**64, 1000, dtype=np.uint64))
            shared = round(len(grams) * 2 * similarity / (1 + similarity))
            other = np.unique(np.append(grams[-shared:], rng.integers(0, 2**64, 1000 - shared, dtype=np.uint64)))
            assert jaccard(grams, other) == pytest.approx(similarity, abs=0.01)
            met[similarity] += bool((sketch(grams) == sketch(other)).any())
    assert met[0.8] >= 97
    assert met[0.2] <= 3


def test_bands_do_not_depend_on_the_block_size_of_permutation(monkeypatch) -> None:
    grams = np.unique(np.random.default_rng(0).integers(0, 2**64, 10_000, dtype=np.uint64))
    whole = Sketch(4, 3)(grams)
    monkeypatch.setattr("indexing.dedup.ngrams._BLOCK_GRAMS", 7)
    assert np.array_equal(Sketch(4, 3)(grams), whole)
