"""Documents cut into chunks can be restored from the chunks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.corpus.chunks import ChunkSettings, to_chunks
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from tests.indexing.corpus.reading import to_tokens


@given(
    documents=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=200), min_size=1, max_size=5),
    m=st.integers(2, 70),
)
def test_tokens_survive_chunking(documents: list[list[int]], m: int) -> None:
    chunks, lengths = to_chunks([np.array(tokens, dtype=np.uint16) for tokens in documents], m, pad_id=0)
    counts = [-(-len(tokens) // m) for tokens in documents]
    assert chunks.shape == (sum(counts), m)
    stops = np.cumsum(counts)
    for tokens, first, stop in zip(documents, stops - counts, stops, strict=True):
        assert to_tokens(chunks[first:stop], lengths[first:stop]).tolist() == tokens
        assert (lengths[first : stop - 1] == m).all()


def test_documents_read_from_the_datastore_equal_the_corpus(tiny_datastore: Datastore, tiny_corpus) -> None:
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    texts = {}
    for split in (tiny_datastore.train, tiny_datastore.valid, tiny_datastore.test):
        ids = [row["id"] for row in split.metadata(range(split.num_documents))]
        for number, document_id in enumerate(ids):
            first, stop = split.chunk_range(number)
            tokens = to_tokens(split.tokens.read(first, stop), split.lengths.read(first, stop))
            assert tokens[0] == tokenizer.bos_id
            assert tokens[-1] == tokenizer.eos_id
            texts[document_id] = tokenizer.decode(tokens)
    corpus = [json.loads(line) for line in tiny_corpus.read_text().splitlines()]
    assert texts == {document["id"]: document["text"] for document in corpus}


def test_metadata_counts_match_the_chunks(tiny_datastore: Datastore) -> None:
    train = tiny_datastore.train
    for number, row in enumerate(train.metadata(range(train.num_documents))):
        first, stop = train.chunk_range(number)
        assert row["chunks"] == stop - first
        assert row["tokens"] == train.lengths.read(first, stop).sum()
        assert row["title"] == row["id"].replace("doc-", "Title ")


def test_invalid_chunk_length_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"chunks\.chunk_length = 1"):
        ChunkSettings(chunk_length=1)
