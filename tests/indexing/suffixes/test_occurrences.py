"""The ends of many texts are found at once where a comparison with every prefix finds them, with token ids of two and of four bytes."""

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.suffixes.occurrences import occurrences_of
from indexing.suffixes.order import LONGEST, Prefixes, stored_orders
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import LENGTHS


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_occurrences_are_those_of_a_comparison_with_every_prefix(voting_datastore: Datastore, dtype: type) -> None:
    texts, held_out = Texts(voting_datastore.train), Texts(voting_datastore.valid)
    for each in (texts, held_out):
        each.__dict__["dtype"] = np.dtype(dtype)  # the one of a larger vocabulary
    ((_, parts),) = stored_orders(voting_datastore.train)
    order = Prefixes(texts, parts)
    rows = np.append(held_out.shard(0).positions()[:150], held_out.shard(0).positions()[-50:])
    window = held_out.windows(rows, LONGEST)
    window = window[np.lexsort(window.T[::-1])]
    wanted = np.arange(0, len(window), 2)
    found = occurrences_of(order, window, wanted)
    prefixes = texts.windows(order.positions(0, len(order)), LONGEST)
    following = texts.following(order.positions(0, len(order)))
    for text in wanted.tolist():
        same = np.cumprod((prefixes == window[text]) & (prefixes != 0), axis=1).sum(axis=1)
        assert found.shared[text] == same.max()
        assert found.following[text] in following[same == same.max()]
        for level, length in enumerate(LENGTHS):
            if window[text, length - 1]:
                first, stop = found.bounds[level, :, text]
                assert np.array_equal(np.arange(first, stop), np.flatnonzero(same >= length))
    assert not found.shared[1::2].any()
    assert not found.bounds[:, :, 1::2].any()
