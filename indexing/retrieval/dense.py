"""What a search by embeddings needs. A datastore of fewer stages has none of it, and is opened without."""

from collections.abc import Sequence
from dataclasses import dataclass

from indexing.embedding.embedder import open_embedder
from indexing.embedding.settings import Embedder
from indexing.index.sharded import ShardedIndex
from indexing.retrieval.candidates import SearchableIndex
from indexing.store.datastore import Split
from indexing.store.errors import DatastoreChanged
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer

STAGE = "add"
"""The last stage that a search by embeddings reads."""


@dataclass(frozen=True)
class Dense:
    """The embedder of queries, and the indexes that are searched with their vectors.

    Attributes:
        embedder: of the first datastore.
        indexes: one for every datastore in the retrieval set, the first datastore's first.
    """

    embedder: Embedder
    indexes: tuple[SearchableIndex, ...]

    @classmethod
    def open(
        cls, retrieval: RetrievalSet, tokenizer: Tokenizer, indexes: Sequence[SearchableIndex] | None = None
    ) -> "Dense | None":
        """Open the embedder and the stored indexes, or take the given ones; None if a datastore has no finished index.

        Raises:
            InputError: a file is missing or damaged.
        """
        if not retrieval.has(STAGE):
            return None
        for split in retrieval.splits:
            split.require_shards("embeddings", *(["index"] if indexes is None else []))
        embedder = open_embedder(retrieval.own.folder / "embedder", tokenizer.decode)
        return cls(embedder, tuple(map(_stored_index, retrieval.splits) if indexes is None else indexes))


def required(dense: Dense | None, retrieval: RetrievalSet) -> Dense:
    """Return what a search by embeddings needs.

    Raises:
        InputError: it is missing; the message names the datastore and the stage.
        DatastoreChanged: the stage was finished after the datastore was opened.
    """
    if dense is None:
        retrieval.require(STAGE)
        name = datastore_name(retrieval.own.folder)
        raise DatastoreChanged(f"{name} was opened before its stage '{STAGE}' was finished. Restart the process.")
    return dense


def _stored_index(split: Split) -> ShardedIndex:
    return ShardedIndex.open(split.folder / "index", range(len(split.chunk_rows)))
