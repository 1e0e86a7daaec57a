"""Read the text and the document of chunks by their ids."""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from indexing.retrieval.candidates import Ranked
from indexing.retrieval.results import (
    Hit,
    Results,
    StoredChunk,
    StoredDocument,
    document_fields,
    known_distances,
)
from indexing.store.errors import InputError, NotFound
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, neighbor_ids
from indexing.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Lookup:
    """The chunks and documents of a retrieval set, as text."""

    tokenizer: Tokenizer
    retrieval: RetrievalSet

    def results(self, ranked: Ranked) -> Results:
        """The hits of each query."""
        hits = iter(self.hits(ranked.ids.ravel(), ranked.distances.ravel(), ranked.scores.ravel()))
        counts = (ranked.ids >= 0).sum(axis=1).tolist()
        return Results([list(islice(hits, count)) for count in counts], ranked.missing)

    def hits(self, ids: np.ndarray, distances: np.ndarray, scores: np.ndarray | None = None) -> list[Hit]:
        """Hits for chunk ids, distances and scores, all [h], without ids of -1. A repeated chunk is read once.

        Scores are cosines if they are not given, and 0 where the distance is unknown (NaN).
        """
        present = ids >= 0
        ids, distances = ids[present], distances[present]
        scores = np.nan_to_num(1 - distances / 2) if scores is None else scores[present]
        different, rows = np.unique(ids, return_inverse=True)
        texts, continuations = self._texts(*self.retrieval.with_continuation(different))
        documents = self.retrieval.metadata(different)
        return [
            Hit(chunk_id, score, distance, texts[row], continuations[row], **document_fields(documents[row]))
            for chunk_id, score, distance, row in zip(
                ids.tolist(), scores.tolist(), known_distances(distances), rows.ravel().tolist(), strict=True
            )
        ]

    def chunk(self, chunk_id: int) -> StoredChunk:
        """Look up the chunk with this id of the retrieval set.

        Raises:
            NotFound: there is none, or its document has been deleted.
        """
        datastore, local = chunk_id >> CHUNK_ID_BITS, chunk_id & ((1 << CHUNK_ID_BITS) - 1)
        splits = self.retrieval.splits
        if not 0 <= datastore < len(splits) or local >= splits[datastore].num_chunks:
            raise NotFound(f"there is no chunk {chunk_id}; the first datastore's are 0 to {splits[0].num_chunks - 1}.")
        if splits[datastore].without_deleted(np.array([local]))[0] < 0:
            raise NotFound(f"the document of chunk {chunk_id} has been deleted.")
        document, first, stop = splits[datastore].documents_of(np.array([local]))
        return self._chunks(datastore, local, 1, (int(document[0]), int(first[0]), int(stop[0])))[0]

    def document(self, document_id: str, first: int = 0, count: int = 8) -> StoredDocument:
        """Look up the document with this id (the first if several share it), with its chunks [first, first + count).

        Raises:
            NotFound: there is none, or it has been deleted.
            InputError: `first` or `count` is below 0.
        """
        if first < 0 or count < 0:
            raise InputError(f"first = {first}, count = {count}: must be 0 or more.")
        self.retrieval.require_unchanged()
        for datastore, split in enumerate(self.retrieval.splits):
            for document in split.documents.find(document_id):
                start, stop = split.chunk_range(document)
                if split.without_deleted(np.array([start]))[0] < 0:
                    continue
                count = max(0, min(count, stop - start - first))
                chunks = self._chunks(datastore, start + first, count, (document, start, stop))
                fields = document_fields(split.metadata([document])[0])
                return StoredDocument(**fields, num_chunks=stop - start, first=first, chunks=chunks)
        raise NotFound(f"there is no document {document_id!r} in the datastores that are searched.")

    def _chunks(self, datastore: int, start: int, count: int, document: tuple[int, int, int]) -> list[StoredChunk]:
        """Consecutive chunks of one document (its index, first chunk, last chunk + 1) of a datastore."""
        split = self.retrieval.splits[datastore]
        local = np.arange(start, start + count, dtype=np.int64)
        texts, continuations = self._texts(*split.with_continuation(local))
        fields = document_fields(split.metadata([document[0]])[0])
        ids = neighbor_ids(datastore, local).tolist()
        return [
            StoredChunk(
                chunk_id=chunk_id,
                text=text,
                continuation=continuation,
                previous_chunk_id=chunk_id - 1 if chunk > document[1] else None,
                next_chunk_id=chunk_id + 1 if chunk + 1 < document[2] else None,
                **fields,
            )
            for chunk_id, chunk, text, continuation in zip(ids, local, texts, continuations, strict=True)
        ]

    def _texts(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[list[str], list[str]]:
        """Chunks with their continuations [n, 2m] → the texts of both."""
        m = self.retrieval.own.chunk_length
        chunks = [row[: min(m, length)] for row, length in zip(tokens, lengths, strict=True)]
        continuations = [row[m : max(m, length)] for row, length in zip(tokens, lengths, strict=True)]
        texts = self.tokenizer.decode_batch([*chunks, *continuations])
        return texts[: len(chunks)], texts[len(chunks) :]
