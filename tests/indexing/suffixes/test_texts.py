"""The texts of a split, by position."""

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.suffixes.order import (
    LONGEST,
)
from indexing.suffixes.texts import Texts


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_words_compare_like_the_tokens_of_prefixes(datastore: Datastore, dtype: type) -> None:
    """Also in the first chunks of a shard, where eight bytes begin before the file does, and with larger token ids."""
    texts = Texts(datastore.train)
    texts.__dict__["dtype"], width = np.dtype(dtype), 8 // np.dtype(dtype).itemsize
    for shard in range(len(texts.starts) - 1):
        positions = texts.shard(shard).positions() + texts.starts[shard]
        available, windows = texts.available(positions), texts.windows(positions, LONGEST).astype(object)
        assert windows[0].tolist()[1:] == [0] * (LONGEST - 1)
        for skip in (0, width, LONGEST - width):
            expected = [0] * len(positions)
            for token in range(skip, skip + width):
                expected = [
                    number << 64 // width | int(row[token]) for number, row in zip(expected, windows, strict=True)
                ]
            assert texts.words(positions, available, skip).tolist() == expected


def test_some_positions_of_a_shard_are_every_nth_of_all(datastore: Datastore) -> None:
    text = Texts(datastore.train).shard(1)
    for step in (1, 2, 7, 1000, 10**6):
        assert text.positions(step).tolist() == text.positions()[::step].tolist()
