"""The texts of a split, by position."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.suffixes.order import LONGEST
from indexing.suffixes.texts import Texts


def rows_one_by_one(texts: Texts, positions: np.ndarray, count: int) -> list[list[int]]:
    """What `Texts.rows` reads, from the documents' tokens."""
    split, rows = texts.split, []
    for position in positions.tolist():
        chunk = position // split.chunk_length
        document = int(split.documents_of(np.array([chunk]))[0][0])
        first, stop = split.chunk_range(document)
        lengths = split.lengths.read(first, stop)
        tokens = np.concatenate([row[:n] for row, n in zip(split.tokens.read(first, stop), lengths, strict=True)])
        end = position - first * split.chunk_length
        before = [int(token) + 1 for token in tokens[: end + 1][::-1][:count]]
        after = int(tokens[end + 1]) + 1 if end + 1 < len(tokens) else 0
        rows.append([after, *before, *[0] * (count - len(before))])
    return rows


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_and_heads_are_the_tokens_of_the_document(datastore: Datastore, dtype: type) -> None:
    """Also at the beginnings and ends of chunks, documents and shards, in any order."""
    texts = Texts(datastore.train)
    texts.__dict__["dtype"] = np.dtype(dtype)
    shards = range(len(texts.starts) - 1)
    positions = np.concatenate([texts.shard(shard).positions() + texts.starts[shard] for shard in shards])
    np.random.default_rng(0).shuffle(positions)
    expected = rows_one_by_one(texts, positions, LONGEST)
    assert texts.rows(positions, LONGEST).tolist() == expected
    assert texts.rows(positions, 3).tolist() == [row[:4] for row in expected]
    assert texts.windows(positions, 5).tolist() == [row[1:6] for row in expected]
    assert texts.following(positions).tolist() == [row[0] - 1 for row in expected]
    bits = 64 // texts.head_tokens
    heads = [
        sum(token << bits * place for place, token in enumerate(reversed(row[1 : 1 + texts.head_tokens])))
        for row in expected
    ]
    assert texts.heads(positions).tolist() == heads


def test_positions_outside_of_the_text_are_refused(datastore: Datastore) -> None:
    text = Texts(datastore.train).shard(0)
    for wrong in (-1, len(text.tokens)):
        with pytest.raises(IndexError):
            text.heads(np.array([0, wrong]), 4)


def test_damaged_lengths_and_offsets_are_not_followed_out_of_the_text(datastore: Datastore) -> None:
    text = Texts(datastore.train).shard(0)
    positions, count = np.arange(len(text.tokens)), len(text.lengths)
    damages: list[dict[str, Any]] = [
        {"lengths": text.lengths[:1]},
        {"lengths": np.full(count, 65_535, np.uint16)},
        {"offsets": np.array([0, 2**40])},
    ]
    for damage in damages:
        out = np.empty((len(positions), 9), np.uint16)
        replace(text, **damage).read_rows(positions, slice(None), out)
        assert out[:, 1].tolist() == (text.tokens.astype(int) + 1).tolist()


def test_some_positions_of_a_shard_are_every_nth_of_all(datastore: Datastore) -> None:
    text = Texts(datastore.train).shard(1)
    for step in (1, 2, 7, 1000, 10**6):
        assert text.positions(step).tolist() == text.positions()[::step].tolist()
