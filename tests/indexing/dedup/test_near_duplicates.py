"""Near duplicates: of two similar documents the later one is removed. Held-out documents are never removed."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from indexing.dedup.near_duplicates import (
    KINDS,
    DedupSettings,
    GramSets,
    Signatures,
    decide,
    find_candidates,
    write_removed,
)
from indexing.dedup.ngrams import gram_set, jaccard
from indexing.store.errors import InputError
from tests.conftest import SHARED_DATA

TRAIN, VALID, TEST, EVALUATION = map(KINDS.index, ("train", "valid", "test", "evaluation"))
WITHIN = DedupSettings(within=True, ngram=3)


def text_of(seed: int, length: int = 120) -> list[str]:
    """`length` words. Texts of different seeds share no n-gram."""
    return [f"w{number}" for number in np.random.default_rng(seed).integers(0, 10**9, length)]


def like(words: list[str], changed: int, seed: int = 99) -> list[str]:
    """A copy with other words at its end. If c of n words change, the 3-gram Jaccard is (n - 2 - c) / (n - 2 + c)."""
    return words[: len(words) - changed] + text_of(seed, changed)


def removed(
    folder: Path, shards: list[list[tuple[int, list[str]]]], settings: DedupSettings
) -> list[tuple[int, int, float]]:
    """Removed documents as (document, near document, similarity), numbered over all shards of (kind, words)."""
    import pyarrow
    import pyarrow.parquet

    sketch, folders = settings.sketch, []
    for number, documents in enumerate(shards):
        sets = [gram_set(" ".join(words), settings.ngram) for _, words in documents]
        folders.append(folder / f"{number}")
        folders[-1].mkdir(parents=True)
        bands = np.array([sketch(grams) for grams in sets], np.uint64).reshape(-1, sketch.bands)
        np.save(folders[-1] / "bands.npy", bands.T.copy())
        np.save(folders[-1] / "sizes.npy", np.array([len(grams) for grams in sets], np.int64))
        np.save(folders[-1] / "splits.npy", np.array([kind for kind, _ in documents], np.uint8))
    signatures = Signatures.open(folders)
    meetings = find_candidates(signatures, settings, advance=lambda _: None)
    candidates = np.unique(meetings[:, 0])
    every = [words for documents in shards for _, words in documents]
    for number, shard in enumerate(folders):
        own = [c for c in candidates.tolist() if signatures.starts[number] <= c < signatures.starts[number + 1]]
        grams = [gram_set(" ".join(every[c]), settings.ngram) for c in own]
        np.save(shard / "grams.npy", np.concatenate([np.zeros(0, np.uint64), *grams]))
        names = pyarrow.table({"id": [f"d{c}" for c in own], "file": ["f"] * len(own), "line": [c + 1 for c in own]})
        pyarrow.parquet.write_table(names, shard / "documents.parquet")
    sets = GramSets(folders, candidates, signatures)
    found = list(decide(meetings, signatures, sets, settings, advance=lambda _: None))
    (folder / "list").mkdir()
    write_removed(folder / "list", iter(found), signatures, sets, [shard.name for shard in folders])
    return found


def test_first_document_of_a_cluster_is_kept_and_named_by_the_others(tmp_path) -> None:
    first = text_of(0)
    documents = [(TRAIN, words) for words in (text_of(1), first, text_of(2), like(first, 5), first, text_of(3))]
    found = removed(tmp_path, [documents[:3], documents[3:]], WITHIN)
    assert [(document, near) for document, near, _ in found] == [(3, 1), (4, 1)]
    assert found[0][2] == pytest.approx((118 - 5) / (118 + 5))
    assert found[1][2] == 1


def test_document_near_only_a_removed_one_is_kept(tmp_path) -> None:
    """A ~ B ~ C, but not A ~ C: B is removed. C stays, because no remaining document is near it."""
    first = text_of(0)
    second = like(first, 10)
    third = text_of(8, 9) + second[9:]
    pairs = itertools.combinations([gram_set(" ".join(words), 3) for words in (first, second, third)], 2)
    similar = [jaccard(*pair) >= 0.8 for pair in pairs]
    assert similar == [True, False, True]  # AB, AC, BC
    found = removed(tmp_path, [[(TRAIN, first), (TRAIN, second), (TRAIN, third)]], WITHIN)
    assert [(document, near) for document, near, _ in found] == [(1, 0)]


@pytest.mark.parametrize(
    ("length", "changed", "threshold", "is_near"),
    [
        (120, 14, 0.79, False),
        (120, 14, 0.78, True),
        (12, 1, 9 / 11, True),
    ],  # 104 / 132 = 0.788; exactly at the threshold
)
def test_pair_is_near_from_the_threshold_on_even_if_it_shares_bands(
    tmp_path, length, changed, threshold, is_near
) -> None:
    first = text_of(0, length)
    pair = [(TRAIN, first), (TRAIN, like(first, changed))]
    assert len(removed(tmp_path, [pair], replace(WITHIN, threshold=threshold))) == is_near


@pytest.mark.parametrize("kind", [VALID, TEST, EVALUATION])
def test_only_training_documents_near_held_out_ones_are_removed(tmp_path, kind: int) -> None:
    secret = text_of(0)
    documents = [(TRAIN, secret), (TRAIN, text_of(1)), (kind, secret), (TRAIN, like(secret, 4)), (kind, secret)]
    found = removed(tmp_path, [documents], DedupSettings(held_out=True, ngram=3))
    assert [(document, near) for document, near, _ in found] == [(0, 2), (3, 2)]


def test_held_out_documents_are_compared_only_on_request_and_never_with_each_other(tmp_path) -> None:
    secret = text_of(0)
    documents = [(VALID, secret), (TEST, secret), (TRAIN, secret), (VALID, secret)]
    assert removed(tmp_path / "a", [documents], WITHIN) == []
    found = removed(tmp_path / "b", [documents], replace(WITHIN, held_out=True))
    assert [document for document, _, _ in found] == [2]


def test_copies_of_an_evaluation_document_are_listed_with_that_reason(tmp_path) -> None:
    """The reported reason is the held-out document, not the other copy."""
    secret = text_of(0)
    documents = [(TRAIN, secret), (TRAIN, secret), (EVALUATION, secret)]
    found = removed(tmp_path, [documents], WITHIN)
    assert [(document, near) for document, near, _ in found] == [(0, 2), (1, 2)]
    lines = [json.loads(line) for line in (tmp_path / "list" / "removed.jsonl").read_text().splitlines()]
    expected = {"file": "f", "id": "d0", "jaccard": 1.0, "line": 1, "near_file": "f", "near_id": "d2", "near_line": 3}
    assert lines[0] == expected | {"reason": "near evaluation"}
    assert np.load(tmp_path / "list" / "0.npy").tolist() == [0, 1]


@pytest.mark.parametrize(
    "shards", [[[(TRAIN, ["…"]), (TRAIN, ["…"]), (EVALUATION, ["…"])]], [[(TRAIN, text_of(0))], []]]
)
def test_texts_without_words_single_documents_and_empty_shards_remove_nothing(tmp_path, shards) -> None:
    assert removed(tmp_path, shards, WITHIN) == []


def test_a_thousand_copies_take_a_thousand_comparisons(tmp_path, monkeypatch) -> None:
    """Each copy is compared only with the kept document, not with all other copies."""
    calls = 0

    def counted(first: np.ndarray, second: np.ndarray) -> float:
        nonlocal calls
        calls += 1
        return jaccard(first, second)

    monkeypatch.setattr("indexing.dedup.near_duplicates.jaccard", counted)
    assert len(removed(tmp_path, [[(TRAIN, text_of(0, 30))] * 1000], WITHIN)) == 999
    assert calls == 999


def test_chinese_documents_are_compared_by_characters(tmp_path) -> None:
    characters = [chr(0x4E00 + n) for n in np.random.default_rng(0).integers(0, 3000, 300)]
    first = "".join(characters)
    second = "".join(characters[:150]) + "，\n" + "".join(characters[150:296])
    other = "".join(characters[150:] + characters[:150][::-1])
    settings = DedupSettings(within=True)
    found = removed(tmp_path, [[(TRAIN, [first]), (TRAIN, [other]), (TRAIN, [second])]], settings)
    assert [(document, near) for document, near, _ in found] == [(2, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ngram": 0}, "ngram = 0"),
        ({"threshold": 0.0}, r"threshold = 0\.0"),
        ({"threshold": 1.5}, r"threshold = 1\.5"),
        ({"permutations": 0}, "permutations = 0"),
        ({"permutations": 4, "threshold": 0.3}, r"dedup\.permutations = 4: too few"),
        ({"paths": ("",)}, r"paths\[0\]"),
    ],
)
def test_invalid_settings_are_refused_by_name(change, message) -> None:
    with pytest.raises(InputError, match=message):
        DedupSettings(**change)


def read(name: str) -> list[dict]:
    with open(SHARED_DATA / f"{name}.jsonl.zst", "rb") as file:
        return [
            json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")
        ]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the ground truth is not there")
@pytest.mark.parametrize(
    ("documents", "pairs", "limit"),
    [
        ("neardup_en_history/docs", "neardup_en_history/pairs", 300),
        ("zh_laws/laws", "zh_laws/neardup_pairs", 400),
    ],
)
def test_removed_documents_agree_with_the_ground_truth(tmp_path, documents: str, pairs: str, limit: int) -> None:
    """The lists use 5-grams and 0.8. They split digits differently, so pairs within 0.01 of 0.8 may go either way."""
    rows = read(documents)
    listed = read(pairs)
    in_pairs = {row[key] for row in listed for key in "ab"}
    rows = [row for row in rows if row["id"] in in_pairs][:limit]
    number = {row["id"]: n for n, row in enumerate(rows)}
    truth = {
        (min(number[row["a"]], number[row["b"]]), max(number[row["a"]], number[row["b"]])): row["jaccard"]
        for row in listed
        if row["a"] in number and row["b"] in number
    }
    found = removed(tmp_path, [[(TRAIN, [row["text"]]) for row in rows]], DedupSettings(within=True, ngram=5))
    assert len(found) >= 5
    for document, near, similarity in found:
        assert truth.get((near, document), similarity) >= 0.79
    gone = {document for document, _, _ in found}
    for (first, second), similarity in truth.items():
        if similarity >= 0.81 and first not in gone:
            assert second in gone, (rows[first]["id"], rows[second]["id"], similarity)
