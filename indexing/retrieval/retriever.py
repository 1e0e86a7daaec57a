"""A retriever: datastores opened for search; used by training, generation, evaluation and serving.

texts, token ids, vectors ──► chunks (ChunkSearch) ──► ids and scores ──► lookup ──► hits with text and document
question ──► passages ──► consecutive chunks around the best hits, within a budget of tokens
full chunks ──► neighbors (LiveNeighbors; without embeddings PrefixNeighbors) ──► ids, or tokens with continuations

A retriever is read-only, so several threads can search at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from indexing.embedding.settings import Embedder
from indexing.progress import during
from indexing.retrieval.candidates import SearchableIndex
from indexing.retrieval.dense import Dense, required
from indexing.retrieval.filters import DocumentFilters, Filters
from indexing.retrieval.live_neighbors import LiveNeighbors
from indexing.retrieval.lookup import Lookup
from indexing.retrieval.passages import find_passages
from indexing.retrieval.prefix_neighbors import PrefixNeighbors, searches_prefixes
from indexing.retrieval.queries import Queries, QueryEmbedder, Retrieval
from indexing.retrieval.results import PASSAGE_TOKENS, PASSAGES, Passage, Results
from indexing.retrieval.search import ChunkSearch
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet, check_searchable
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Retriever:
    """Datastores opened for search: `Retriever.open(folder).search(["a text"])`.

    Attributes:
        datastore: the first datastore.
        tokenizer: that of the first datastore.
        retrieval: the chunks that ids name.
        dense: what a search by embeddings needs; None if the stage `add` is not finished.
    """

    datastore: Datastore
    tokenizer: Tokenizer
    retrieval: RetrievalSet
    dense: Dense | None

    @classmethod
    def open(cls, *locations: Path | str, indexes: Sequence[SearchableIndex] | None = None) -> "Retriever":
        """Open datastores to search them as one.

        The stage `chunk` is enough. A search, an embedding or neighbors of a chunk require their stages when they are
        asked for.

        Args:
            locations: folders or URLs. Ids are those of the first datastore's stored neighbors
                (`store/retrieval_set.py`): the datastores of its `neighbors.extra_datastores` are searched too, then
                those of the other locations.
            indexes: one index for each datastore of the retrieval set; None opens the stored indexes.

        Raises:
            InputError: a location is not a datastore, the datastores do not fit together, or one of
                `neighbors.extra_datastores` is missing or has changed, or a file is damaged.
        """
        with during("opening %s", ", ".join(map(str, locations))):
            datastores = [Datastore.open(location) for location in locations]
            retrieval = _retrieval_set(datastores)
            for split in retrieval.splits:
                split.require_shards("chunks")
            tokenizer = Tokenizer.open(datastores[0].folder / "tokenizer")
            return cls(datastores[0], tokenizer, retrieval, Dense.open(retrieval, tokenizer, indexes))

    def search(
        self, queries: Queries, k: int = 5, *, filters: Filters | None = None, retrieval: Retrieval = "dense"
    ) -> Results:
        """Find the k nearest chunks of each query, nearest first.

        Args:
            queries: texts (a string is one query), token ids [t] of each, or vectors [n, d] float, which are scaled to
                unit length.
            k: hits per query; fewer with `sparse` if fewer chunks contain a term of the query.
            filters: column of the documents' metadata → the required value, or a list of accepted values.
            retrieval: `dense` searches by embeddings, `sparse` by terms (BM25), `hybrid` by both.

        Raises:
            InputError: a query is empty or invalid, k is below 1, a filter names an unknown column, or the stage
                `sparse` (`sparse`, `hybrid`) or `add` (`dense`, `hybrid`) is not finished.
            DatastoreChanged: a datastore was built again since it was opened.
        """
        return self.lookup.results(self.chunks.rank(queries, k, filters=filters, retrieval=retrieval))

    def passages(
        self,
        question: str | Sequence[str],
        k: int = PASSAGES,
        *,
        tokens: int = PASSAGE_TOKENS,
        retrieval: Retrieval | None = None,
        filters: Filters | None = None,
        least_match: float | None = None,
    ) -> list[Passage]:
        """Find passages to answer a question from, best first: chunks with their continuations, widened to consecutive
        chunks of their documents.

        Args:
            question: a text; or several, whose results take turns, such as a question and the one before it.
            k: largest number of passages; fewer if others touch or if fewer chunks are found.
            tokens: largest number of tokens of all passages, in tokens of the datastore. Passages are whole chunks.
            retrieval: how chunks are found; None = `hybrid`, or `sparse` for datastores without vectors.
            filters: column of the documents' metadata → the required value, or a list of accepted values.
            least_match: how much of the question the best chunk must say, by terms, 0 to 1; if it says less, there are no
                passages. None = 0.25 (Chinese: 0.13); 0 = passages for every question. Datastores with embeddings of a
                transformer have passages for every question.

        Raises:
            InputError: a text is empty, k or `tokens` is below 1, `least_match` is not 0 to 1, or see `search`.
            DatastoreChanged: a datastore was built again since it was opened.
        """
        return find_passages(
            self.chunks, question, k, tokens, retrieval=retrieval, filters=filters, least_match=least_match
        )

    @property
    def embedder(self) -> Embedder:
        """The embedder of the first datastore; InputError if the stage `add` is not finished."""
        return required(self.dense, self.retrieval).embedder

    @property
    def indexes(self) -> tuple[SearchableIndex, ...]:
        """One index for every datastore in the retrieval set; InputError if the stage `add` is not finished."""
        return required(self.dense, self.retrieval).indexes

    @cached_property
    def queries(self) -> QueryEmbedder:
        """Embeds queries; InputError if the stage `add` is not finished."""
        return QueryEmbedder(self.tokenizer, self.embedder)

    @cached_property
    def filters(self) -> DocumentFilters:
        """Filters by the metadata of documents."""
        return DocumentFilters(self.retrieval.splits)

    @cached_property
    def chunks(self) -> ChunkSearch:
        """The search by queries, for ids and scores without text."""
        return ChunkSearch(self.tokenizer, self.filters, self.dense, self.retrieval)

    @property
    def finds_neighbors(self) -> bool:
        """Whether neighbors of new chunks can be searched."""
        return self.dense is not None or searches_prefixes(self.datastore)

    def require_neighbors(self) -> None:
        """Raise InputError, which names the stage, unless neighbors of new chunks can be searched. Callers that load a
        model check this first. A search in the sorted prefixes is opened, and says so before text is printed."""
        if not self.finds_neighbors:
            self.chunks.require("dense")
        if self.dense is None:
            _ = self.neighbors

    @cached_property
    def neighbors(self) -> LiveNeighbors | PrefixNeighbors:
        """The search of neighbors for new chunks, by the rules of the stored neighbors; without embeddings, in the
        sorted prefixes of the first datastore. InputError if neither the stage `add` nor `suffixes` is finished."""
        if self.dense is None and self.finds_neighbors:
            return PrefixNeighbors.of(SuffixIndex(self.datastore.train))
        return LiveNeighbors.open(self.datastore, self.embedder, self.indexes, self.retrieval)

    @cached_property
    def lookup(self) -> Lookup:
        """Text and document of chunks by id."""
        return Lookup(self.tokenizer, self.retrieval)


def _retrieval_set(datastores: Sequence[Datastore]) -> RetrievalSet:
    """The retrieval set of the first datastore, followed by the other datastores."""
    first, *others = datastores
    retrieval = RetrievalSet.of(first, [other.folder for other in others])
    for other in others:
        check_searchable(first, other, "searching several datastores")
        if other.folder.resolve() not in {split.folder.resolve() for split in retrieval.splits}:
            retrieval = RetrievalSet((*retrieval.splits, other.train))
    return retrieval
