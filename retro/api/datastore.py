"""`retro.Datastore`: the rows of a datastore, search, and neighbors.

folder or URL ─┬─► documents, chunks, tokens of a split (`rows.py`)
               ├─► search by texts, token ids or vectors (`indexing/retrieval`)
               └─► neighbors: stored ones of its own chunks, found ones of a new text
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, get_args, overload

import numpy as np
from numpy.typing import NDArray

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import PASSAGE_TOKENS, PASSAGES, Hit, Passage
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import SPLITS
from indexing.store.datastore import Datastore as StoredDatastore
from indexing.store.errors import InputError
from indexing.store.ranged_reads import Reading
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer
from retro.api.checks import Ids, checked_numbers, checked_tokens
from retro.api.rows import Chunks, Documents, Tokens
from retro.data.neighbor_choice import first_present

SplitName: TypeAlias = Literal["train", "valid", "test"]
Value: TypeAlias = str | int
Filters: TypeAlias = Mapping[str, Value | Sequence[Value]]
"""Column of the documents' metadata → the required value, or accepted values."""


@dataclass(frozen=True)
class Neighbors:
    """The neighbors of n chunks, best first. Each is a chunk with its continuation.

    Attributes:
        ids: [n, k] int64 chunk ids of the split `train`, -1 = none. Chunks of another
            datastore (`neighbors.extra_datastores`) have the number of the datastore in the bits from 40 on.
        tokens: [n, k, 2m] int64, padded at the end.
        lengths: [n, k] int64, tokens without padding; 0 = no neighbor.
    """

    ids: NDArray[np.int64]
    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Datastore:
    """A datastore opened for reading: `retro.Datastore("peps").chunks[0].text`.

    Attributes:
        location: folder or URL.
        split: name of the split whose rows are read.
    """

    def __init__(self, location: Path | str, split: SplitName = "train", reading: Reading = "mmap") -> None:
        """Open a datastore.

        Args:
            location: the folder, or any fsspec URL.
            split: `train`, `valid` or `test`. Search and neighbors are always in `train`.
            reading: `mmap` maps files into memory and fetches those of a URL on first use; `pread` requests ranges of
                bytes.

        Raises:
            InputError: there is no datastore, it is damaged, or an argument has another value.
        """
        for name, value, accepted in (("split", split, SPLITS), ("reading", reading, get_args(Reading))):
            if value not in accepted:
                raise InputError(f"{name} = {value!r}: accepted are {', '.join(accepted)}.")
        self.location, self.split, self._reading = location, split, reading
        self._stored = StoredDatastore.open(location, reading)
        if split not in self._stored.manifest["splits"]:
            raise InputError(f"{datastore_name(self._stored.folder)} has no split '{split}'.")
        self._rows = self._stored.split(split)

    def __reduce__(self) -> tuple[type["Datastore"], tuple[Path | str, str, str]]:
        """Pickle the arguments: another process opens the files itself."""
        return Datastore, (self.location, self.split, self._reading)

    def __repr__(self) -> str:
        return f"retro.Datastore({str(self.location)!r}, {self.split!r})"

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def chunk_length(self) -> int:
        """m, tokens in a chunk."""
        return self._stored.chunk_length

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return int(self._stored.manifest["vocab_size"])

    @property
    def stages(self) -> tuple[str, ...]:
        """The finished stages of `retro index`: `chunk`, `embed`, `add` …"""
        return tuple(self._stored.manifest["fingerprints"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text)` gives token ids without begin and end of document, `decode(ids)` text."""
        return Tokenizer.open(self._stored.folder / "tokenizer")

    @cached_property
    def documents(self) -> Documents:
        """The documents of the split, by number."""
        return Documents(self._rows, self._decode)

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of the split, by id."""
        return Chunks(self._rows, self._decode)

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the split in one row, without padding."""
        return Tokens(self._rows)

    def embeddings(self, chunks: Ids) -> NDArray[np.float16]:
        """The stored embeddings of chunks of the split: ids [n] → [n, d], of unit length.

        Raises:
            InputError: the stage `embed` is not finished.
            OutOfRange: there is no such chunk.
        """
        self._stored.require("embed")
        return self._rows.embeddings.gather(self._ids(chunks))

    # --- search -------------------------------------------------------------------------------------------------------

    @cached_property
    def _retriever(self) -> Retriever:
        return Retriever.open(self.location)

    @overload
    def search(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too; the first signature that fits holds
        self, queries: str, k: int = 5, *, filters: Filters | None = None, retrieval: Retrieval = "dense"
    ) -> list[Hit]: ...

    @overload
    def search(
        self,
        queries: Sequence[str] | Sequence[NDArray[np.integer]] | NDArray[np.floating],
        k: int = 5,
        *,
        filters: Filters | None = None,
        retrieval: Retrieval = "dense",
    ) -> list[list[Hit]]: ...

    def search(
        self,
        queries: str | Sequence[str] | Sequence[NDArray[np.integer]] | NDArray[np.floating],
        k: int = 5,
        *,
        filters: Filters | None = None,
        retrieval: Retrieval = "dense",
    ) -> list[Hit] | list[list[Hit]]:
        """Find the k best chunks of the split `train`, best first.

        Args:
            queries: a text; or texts, token ids [t] of each, or vectors [n, d] float, as `embed` gives them.
            k: hits of a query. `sparse` gives fewer if fewer chunks have a term of the query.
            filters: column of the documents' metadata → the required value, or a list of accepted values.
            retrieval: `dense` searches by embeddings, `sparse` by terms (BM25), `hybrid` by both.

        Returns:
            the hits of a text, or a list of hits for each query.

        Raises:
            InputError: a query is empty or has tokens outside the vocabulary, vectors have another width, k is below 1,
                a filter names an unknown column, or the stage `add` (or `sparse`) is not finished.
            DatastoreChanged: the datastore was built again since it was opened.
        """
        alone = isinstance(queries, str)
        several = [queries] if isinstance(queries, str) else queries
        hits = self._retriever.search(several, k, filters=filters, retrieval=retrieval).hits
        return hits[0] if alone else hits

    def passages(
        self,
        question: str,
        k: int = PASSAGES,
        *,
        tokens: int = PASSAGE_TOKENS,
        retrieval: Retrieval | None = None,
        filters: Filters | None = None,
        least_match: float | None = None,
    ) -> list[Passage]:
        """Find up to k passages of the split `train` to answer a question from, best first, for any model's prompt.

        A passage is a run of whole chunks of a document around the best hits.

        Args:
            question: a text.
            k: largest number of passages.
            tokens: largest number of tokens of all passages, in tokens of the datastore.
            retrieval: `dense`, `sparse` or `hybrid`; None = `hybrid`, or `sparse` for datastores without vectors.
            filters: column of the documents' metadata → the required value, or a list of accepted values.
            least_match: how much of the question the best chunk must say, by terms, 0 to 1; if it says less, there are no
                passages. None = 0.25 (Chinese: 0.13); 0 = passages for every question. Datastores with embeddings of a
                transformer have passages for every question.

        Returns:
            passages with `text`, `document_id`, `title`, `source`, `score` and their chunks.

        Raises:
            InputError: the question is empty, k or `tokens` is below 1, `least_match` is not 0 to 1, a filter names an unknown column, or the stage
                of the search is not finished.
            DatastoreChanged: the datastore was built again since it was opened.
        """
        return self._retriever.passages(
            question, k, tokens=tokens, retrieval=retrieval, filters=filters, least_match=least_match
        )

    def embed(self, texts: Sequence[str] | Sequence[NDArray[np.integer]]) -> NDArray[np.float32]:
        """The vectors of texts, or of token ids [t] of each: [n, d], of unit length.

        Raises:
            InputError: a text is empty, or a token is outside of the vocabulary; the stage `add` is not finished.
        """
        return self._retriever.queries.vectors(texts)

    # --- neighbors ----------------------------------------------------------------------------------------------------

    def neighbors(self, chunks: Ids, k: int = 2) -> Neighbors:
        """The first k stored neighbors of chunks of the split: ids [n] → `Neighbors`.

        They are of other documents than the chunk. Training also leaves out the other documents of a sequence
        (`retro.Dataset`).

        Raises:
            InputError: the stage `neighbors` is not finished, or fewer than k neighbors are stored.
            OutOfRange: there is no such chunk.
        """
        self._stored.require("neighbors")
        (stored,) = self._rows.neighbor_ids.row_shape
        if not 1 <= k <= stored:
            raise InputError(
                f"k = {k}: {datastore_name(self._stored.folder)} stores {stored} neighbors of each chunk. Use 1 to {stored}, or store "
                f"more: `retro index CONFIG --neighbors.stored {max(k, 1)} --stage neighbors --rebuild`."
            )
        found = self._retrieval.without_deleted(self._rows.neighbor_ids.gather(self._ids(chunks)))
        ids = first_present(found, k)
        tokens, lengths = self._retrieval.with_continuation(ids.ravel())
        return Neighbors(ids, tokens.reshape(*ids.shape, -1), lengths.reshape(ids.shape))

    def find_neighbors(self, text: str | Ids, k: int = 2) -> Neighbors:
        """Search the neighbors of a new text's complete chunks, by the rules of the stored neighbors; without
        embeddings, in the sorted prefixes.

        Args:
            text: a text, which begins a document; or token ids [t], which are cut into chunks as they are.
            k: neighbors of each chunk.

        Returns:
            neighbors of n = t // m chunks; the last tokens are no complete chunk.

        Raises:
            InputError: the text has no complete chunk or tokens outside of the vocabulary, k is below 1, or neither the
                stage `add` nor `suffixes` is finished.
        """
        if k < 1:
            raise InputError(f"k = {k}: must be at least 1.")
        m, tokens = self.chunk_length, self._checked_tokens(text)
        if len(tokens) < m:
            raise InputError(
                f"the text has {len(tokens)} tokens, and a chunk {m}: neighbors are those of complete chunks. `search` takes any length."
            )
        found, lengths, ids, _ = self._retriever.neighbors.find(tokens[: len(tokens) // m * m].reshape(-1, m), k)
        return Neighbors(ids, found, lengths)

    @cached_property
    def _retrieval(self) -> RetrievalSet:
        return RetrievalSet.of(self._stored)

    def _decode(self, rows: Sequence[NDArray[np.integer]]) -> list[str]:
        return self.tokenizer.decode_batch(rows)

    def _ids(self, chunks: Ids) -> NDArray[np.int64]:
        return checked_numbers(chunks, self._rows.num_chunks, "chunk", self._rows)

    def _checked_tokens(self, text: str | Ids) -> NDArray[np.int64]:
        if isinstance(text, str):
            return np.append(self.tokenizer.bos_id, self.tokenizer.encode(text)).astype(np.int64)
        return checked_tokens(text, self.vocab_size)
