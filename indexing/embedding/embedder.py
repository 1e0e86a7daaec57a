"""Open the embedder of a datastore, and embed its chunks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from indexing.embedding.lexical import LexicalEmbedder
from indexing.embedding.settings import Embedder, EmbedderSettings, NotFinite, from_json
from indexing.embedding.transformer import TransformerEmbedder
from indexing.progress import Advance
from indexing.store.artifact import intact, stored_record
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter
from indexing.store.sharded_array import open_array

_BLOCK_ROWS = 8192


def open_embedder(
    folder: Path, decode: Callable[[np.ndarray], str], settings: EmbedderSettings | None = None
) -> Embedder:
    """Open a datastore's `embedder/` folder; `settings` may choose another device.

    Raises:
        InputError: a file is damaged.
    """
    stored = stored_record(folder / "embedder.json", from_json)
    if stored.kind == "lexical":
        weights, is_special = (
            np.array(open_array(intact(folder / f"{name}.npy"))) for name in ("weights", "is_special")
        )
        return LexicalEmbedder(weights, is_special, stored.dimension, stored.seed)
    return TransformerEmbedder(settings or stored, decode)


def embed_shard(
    out: Path,
    embedder: Embedder,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    name_of: Callable[[int], str] = "chunk {}".format,
    advance: Advance,
) -> int:
    """Embed the chunks [n, m] of one shard and split into the file `out`: [n, d] float16. Returns n.

    Raises:
        InputError: a chunk has no finite embedding; `name_of` gives the name of the chunk with this number.
    """
    with NpyWriter(out, np.float16, (embedder.dimension,)) as writer:
        for start in range(0, len(tokens), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            try:
                vectors = embedder.embed(np.asarray(tokens[block]), np.asarray(lengths[block]))
            except NotFinite as error:
                raise InputError(f"{name_of(start + error.rows[0])}: {error}") from error
            writer.append(vectors)
            advance(len(tokens[block]))
    return writer.rows
