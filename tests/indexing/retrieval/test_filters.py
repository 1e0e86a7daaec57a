"""Filters select exactly the chunks of the matching documents."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from indexing.retrieval.filters import check_filters, matching_chunks
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError


def documents_in(datastore: Datastore, ranges: np.ndarray) -> list[str]:
    chunks = np.concatenate([np.arange(*each) for each in ranges] or [np.empty(0, dtype=np.int64)])
    numbers = np.unique(datastore.train.documents_of(chunks)[0]) if len(chunks) else []
    return [row["id"] for row in datastore.train.metadata(numbers)]


def test_filters_match_values_lists_and_several_columns(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.train
    rows = split.metadata(range(split.num_documents))
    size = rows[20]["chunks"]
    for filters, expected in (
        ({"id": [rows[3]["id"]]}, [rows[3]]),
        ({"title": [rows[150]["title"], rows[7]["title"], "no such"]}, [rows[7], rows[150]]),
        ({"chunks": [size]}, [row for row in rows if row["chunks"] == size]),
        (
            {"chunks": [str(size)], "id": [rows[20]["id"], rows[21]["id"]]},
            [rows[20]] + [rows[21]] * (rows[21]["chunks"] == size),
        ),
        ({"file": ["corpus.jsonl"]}, rows),
        ({"source": ["wiki"]}, []),
    ):
        ranges = matching_chunks(split, filters)
        assert documents_in(tiny_datastore, ranges) == [row["id"] for row in expected]
        assert (ranges[1:, 0] > ranges[:-1, 1]).all()  # adjacent documents form one range
    assert matching_chunks(split, {"file": ["corpus.jsonl"]}).tolist() == [[0, split.num_chunks]]


def test_deleted_documents_match_no_filter(tiny_datastore: Datastore, tmp_path: Path) -> None:
    datastore = Datastore.open(shutil.copytree(tiny_datastore.folder, tmp_path / "copy"))
    split = datastore.train
    delete_documents(datastore.folder, [row["id"] for row in split.metadata([5, 6])])
    start, stop = split.chunk_range(5)[0], split.chunk_range(6)[1]
    assert matching_chunks(split, {"file": ["corpus.jsonl"]}).tolist() == [[0, start], [stop, split.num_chunks]]


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"lang": "en"}, "no column 'lang'; accepted are id, title"),
        ({"title": []}, r"filters\.title = \[\]"),
        ({"title": {"a": 1}}, r"filters\.title = .* must be a text"),
        ({"title": None}, r"filters\.title = None"),
    ],
)
def test_invalid_filters_are_refused(filters: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_filters(filters, ["id", "title"])


def test_value_of_another_type_is_refused_with_its_column(tiny_datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"filters\.chunks = \['many'\].*int64"):
        matching_chunks(tiny_datastore.train, {"chunks": ["many"]})
