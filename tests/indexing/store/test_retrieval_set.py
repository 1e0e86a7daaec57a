"""Ids that identify chunks of several datastores."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.store import remote
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids


@given(number=st.integers(0, 2**20), chunk_id=st.integers(0, 2**40 - 1))
def test_id_stores_the_datastore_above_40_bits_and_the_chunk_below(number: int, chunk_id: int) -> None:
    assert neighbor_ids(number, np.array([chunk_id, -1])).tolist() == [number * 2**40 + chunk_id, -1]


def test_ids_of_the_first_datastore_are_its_chunk_ids(tiny_datastore: Datastore) -> None:
    retrieval, train = RetrievalSet.of(tiny_datastore), tiny_datastore.train
    ids = np.array([5, -1, 0, train.num_chunks - 1])
    for ours, theirs in zip(retrieval.with_continuation(ids), train.with_continuation(ids), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(retrieval.ids_at(np.arange(train.num_chunks)), np.arange(train.num_chunks))


def test_rows_are_returned_in_the_requested_order(tiny_datastore: Datastore) -> None:
    """Two splits act as two datastores: reading mixed ids gives the rows of each split."""
    train, valid = tiny_datastore.train, tiny_datastore.valid
    retrieval = RetrievalSet((train, replace(valid)))
    places = np.array([train.num_chunks + 3, 2, train.num_chunks, 0])
    ids = np.insert(retrieval.ids_at(places), 1, -1)
    assert ids.tolist() == [2**40 + 3, -1, 2, 2**40, 0]
    tokens, lengths = retrieval.with_continuation(ids)
    for row, (split, chunk) in {0: (valid, 3), 2: (train, 2), 3: (valid, 0), 4: (train, 0)}.items():
        expected, length = split.with_continuation(np.array([chunk]))
        assert np.array_equal(tokens[row], expected[0])
        assert lengths[row] == length[0]
    assert lengths[1] == 0
    found = retrieval.metadata(ids)
    assert found[1] == {}
    assert found[0] == valid.metadata([int(valid.documents_of(np.array([3]))[0][0])])[0]


ELSEWHERE = ["../books", "../../other.org/books", "../../../s3:/bucket/books", "/etc", "../../../../../../../etc"]


@pytest.mark.parametrize("named", [*ELSEWHERE, "inside/books"])
def test_datastore_at_a_url_does_not_choose_what_else_is_read(
    tiny_datastore: Datastore, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    requests: list[str] = []

    def asking(url: str) -> None:
        requests.append(url)
        raise InputError(f"{url} is requested")

    monkeypatch.setattr(remote, "_asking", asking)
    folder = remote.local_folder("https://host.org/wiki")
    entries = [{"folder": named, "chunks": "0" * 16}]
    datastore = replace(
        tiny_datastore, folder=folder, manifest={**tiny_datastore.manifest, "extra_datastores": entries}
    )
    place = (folder / named).resolve()
    location = remote.url_of(place) or str(place)
    if named not in ELSEWHERE:
        with pytest.raises(InputError, match=r"https://host\.org/wiki/inside/books.* is requested"):
            RetrievalSet.of(datastore)
        return
    with pytest.raises(
        InputError, match=rf"https://host\.org/wiki/manifest\.json: .*`export RETRO_EXTRA_DATASTORES={location}`"
    ):
        RetrievalSet.of(datastore)
    assert requests == []
    monkeypatch.setenv("RETRO_EXTRA_DATASTORES", f"s3://another {location}")
    with pytest.raises(InputError, match=r"is requested|is not a datastore"):
        RetrievalSet.of(datastore)
    monkeypatch.delenv("RETRO_EXTRA_DATASTORES")
    with pytest.raises(InputError, match=r"is requested|is not a datastore"):
        RetrievalSet.of(datastore, [Path(location)])
