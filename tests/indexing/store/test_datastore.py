"""Reads across shards equal reads of the whole array, and continuations stay within their document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.store.datastore import Datastore, ShardedArray
from indexing.store.errors import InputError


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardedArray, np.ndarray]:
    folder, rows = tmp_path_factory.mktemp("sharded"), [3, 0, 5, 1]
    whole = np.arange(18).reshape(9, 2)
    for number, part in enumerate(np.split(whole, np.cumsum(rows)[:-1])):
        np.save(folder / f"{number}.npy", part)
    return ShardedArray([folder / f"{number}.npy" for number in range(4)], rows), whole


@given(ids=st.lists(st.integers(0, 8), max_size=20))
def test_gather_equals_indexing_the_whole(sharded, ids: list[int]) -> None:
    array, whole = sharded
    assert np.array_equal(array.gather(np.array(ids, dtype=np.int64)), whole[ids].reshape(-1, 2))


@given(bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_read_equals_slicing_the_whole(sharded, bounds: tuple[int, int]) -> None:
    array, whole = sharded
    start, stop = sorted(bounds)
    assert np.array_equal(array.read(start, stop), whole[start:stop])


def test_truncated_shard_is_named(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100))
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:200])
    with pytest.raises(InputError, match=r"x\.npy"):
        ShardedArray([tmp_path / "x.npy"], [100]).shard(0)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_continuation_is_the_next_chunk_of_the_same_document_or_padding(tiny_datastore: Datastore, data) -> None:
    train, m = tiny_datastore.train, tiny_datastore.chunk_length
    chunk_id = data.draw(st.integers(0, train.num_chunks - 1))
    tokens, lengths = train.with_continuation(np.array([chunk_id, -1]))
    document, first, stop = (array[0] for array in train.documents_of(np.array([chunk_id])))
    assert train.chunk_range(int(document)) == (first, stop)
    assert np.array_equal(tokens[0, :m], train.tokens.read(chunk_id, chunk_id + 1)[0])
    if chunk_id + 1 < stop:
        assert np.array_equal(tokens[0, m:], train.tokens.read(chunk_id + 1, chunk_id + 2)[0])
        assert lengths[0] == m + train.lengths.read(chunk_id + 1, chunk_id + 2)[0]
    else:
        assert (tokens[0, m:] == train.pad_id).all()
        assert lengths[0] == train.lengths.read(chunk_id, chunk_id + 1)[0]
    assert lengths[1] == 0
    assert (tokens[1] == train.pad_id).all()


def test_last_chunk_of_a_document_has_no_continuation(tiny_datastore: Datastore) -> None:
    train, m = tiny_datastore.train, tiny_datastore.chunk_length
    last = np.array([train.chunk_range(number)[1] - 1 for number in range(train.num_documents)])
    assert (train.with_continuation(last)[1] <= m).all()


def test_other_folder_is_refused_with_the_command_that_builds_a_datastore(tmp_path) -> None:
    with pytest.raises(InputError, match="retro index"):
        Datastore.open(tmp_path)
