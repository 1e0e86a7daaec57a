"""Chunks and documents are found by their ids, with text and position."""

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import NotFound
from indexing.store.retrieval_set import CHUNK_ID_BITS


def test_chunks_and_documents_by_id_return_the_text_in_order(retriever: Retriever) -> None:
    split = retriever.retrieval.own
    number = int(np.argmax([row["chunks"] for row in split.metadata(range(split.num_documents))]))
    row = split.metadata([number])[0]
    whole = retriever.lookup.document(row["id"], 0, 1000)
    assert whole.num_chunks == len(whole.chunks) == row["chunks"]
    assert [chunk.chunk_id for chunk in whole.chunks] == list(range(*split.chunk_range(number)))
    assert retriever.lookup.document(row["id"], 1, 2).chunks == whole.chunks[1:3]
    assert retriever.lookup.document(row["id"], row["chunks"], 2).chunks == []
    for before, after in zip(whole.chunks, whole.chunks[1:], strict=False):
        assert (before.next_chunk_id, after.previous_chunk_id) == (after.chunk_id, before.chunk_id)
        assert before.continuation == after.text
    assert (whole.chunks[0].previous_chunk_id, whole.chunks[-1].next_chunk_id) == (None, None)
    assert retriever.lookup.chunk(whole.chunks[1].chunk_id) == whole.chunks[1]
    assert (whole.document_id, whole.title) == (row["id"], row["title"])


@pytest.mark.parametrize("chunk_id", [-1, 10**6, 1 << CHUNK_ID_BITS, 1 << 62])
def test_unknown_chunk_id_is_not_found(retriever: Retriever, chunk_id: int) -> None:
    with pytest.raises(NotFound, match=f"no chunk {chunk_id}"):
        retriever.lookup.chunk(chunk_id)
