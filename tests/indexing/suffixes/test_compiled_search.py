"""Compiled searches find what a comparison with every prefix finds, with token ids of two and of four bytes."""

from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore, Split
from indexing.suffixes.mapped_files import MappedFiles
from indexing.suffixes.order import LONGEST, Prefixes, stored_orders
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import LENGTHS
from indexing.suffixes.votes_build import occurrences_of
from tests.conftest import build_local, tiny_config, write_corpus
from tests.indexing.suffixes.whole_search import assert_equal_to_a_search_through_the_text


@pytest.fixture(params=[4000, 1 << 16])
def datastore(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Datastore:
    """A datastore whose sorted prefixes are those of a vocabulary of this size."""
    monkeypatch.setattr(Split, "vocab_size", request.param)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes"):
        built = build_local(config, only=stage)
    rows = np.load(next((built.folder / "suffixes").glob("*/rows.npy")), mmap_mode="r")
    assert rows.shape[1] == (2 if request.param < 1 << 16 else 3)
    return built


def test_matches_are_those_of_a_search_through_the_text(datastore: Datastore) -> None:
    assert_equal_to_a_search_through_the_text(datastore.train)


def test_occurrences_are_those_of_a_comparison_with_every_prefix(datastore: Datastore) -> None:
    texts, held_out = Texts(datastore.train), Texts(datastore.valid)
    ((_, parts),) = stored_orders(datastore.train)
    order = Prefixes(texts, parts)
    rows = np.append(held_out.shard(0).positions()[:150], held_out.shard(0).positions()[-50:])
    window = held_out.windows(rows, LONGEST)
    window = window[np.lexsort(window.T[::-1])]
    wanted = np.arange(0, len(window), 2)
    (found,) = occurrences_of(MappedFiles(texts, [order]), window, wanted)
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
