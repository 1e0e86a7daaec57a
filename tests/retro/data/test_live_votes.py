"""Votes that are searched for chunks do not depend on which chunks are searched together, or on the number of threads."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore, delete_documents
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.votes import COLUMNS
from retro.data.live_votes import live_votes


@pytest.mark.parametrize("threads", [1, 3])
def test_live_votes_of_chunks_are_those_of_their_documents(voting_datastore: Datastore, threads: int) -> None:
    split, index = voting_datastore.valid, SuffixIndex.open(voting_datastore.folder)
    whole = np.zeros((split.num_chunks, split.chunk_length, COLUMNS), np.int64)
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)).tolist():
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        whole[first:stop][real] = index.votes(split.tokens.read(first, stop)[real])
    assert whole.any()
    before, chunks = torch.get_num_threads(), np.arange(split.num_chunks)
    torch.set_num_threads(threads)
    try:
        for ids in (chunks, chunks[1::3], chunks[3:6][[0, 2, 1]]):
            np.testing.assert_array_equal(live_votes(index, split, ids), whole[ids])
    finally:
        torch.set_num_threads(before)


def test_a_training_document_has_the_votes_that_it_has_once_it_is_deleted(
    voting_datastore: Datastore, tmp_path: Path
) -> None:
    """So it does not vote for itself."""
    folder = tmp_path / "datastore"
    shutil.copytree(voting_datastore.folder, folder)
    split, index = voting_datastore.train, SuffixIndex.open(voting_datastore.folder)
    for document in (0, split.num_documents // 2, split.num_documents - 1):
        first, stop = split.chunk_range(document)
        is_text = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        found = live_votes(index, split, np.arange(first, stop))
        delete_documents(folder, [split.metadata([document])[0]["id"]])
        left = SuffixIndex.open(folder).votes(split.tokens.read(first, stop)[is_text])
        shutil.rmtree(folder)
        shutil.copytree(voting_datastore.folder, folder)
        np.testing.assert_array_equal(found[is_text], left)
        assert (found[is_text] != index.votes(split.tokens.read(first, stop)[is_text])).any()
