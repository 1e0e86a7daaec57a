"""Characters of the tokens of stored chunks: ranges of tokens ─► ranges of characters in the texts that an answer has."""

import numpy as np

from indexing.retrieval.retriever import Retriever
from retro.server.spans import token_ends


class ChunkTexts:
    """Character positions of the tokens of chunks for one request: decodes each chunk once, even if it is used several times."""

    def __init__(self, retriever: Retriever) -> None:
        self._decode, self._m = retriever.tokenizer.decode_batch, retriever.datastore.chunk_length
        self._chunks: dict[int, tuple[str, list[int]]] = {}

    def ends(self, chunk_id: int, tokens: np.ndarray) -> list[int]:
        """Return `token_ends` of a chunk, or of a chunk and its continuation, decoded separately like the two texts of a hit.

        Args:
            chunk_id: id of the chunk; that of its continuation is the next one.
            tokens: [≤ 2m] of both, without padding.
        """
        text, ends = self._of_chunk(chunk_id, tokens[: self._m])
        if len(tokens) <= self._m:
            return ends
        _, later = self._of_chunk(chunk_id + 1, tokens[self._m :])
        return ends + [len(text) + end for end in later]

    def _of_chunk(self, chunk_id: int, tokens: np.ndarray) -> tuple[str, list[int]]:
        if chunk_id not in self._chunks:
            self._chunks[chunk_id] = token_ends(self._decode, tokens)
        return self._chunks[chunk_id]
