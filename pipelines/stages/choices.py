"""Values of `auto` in the settings of neighbors: what stored neighbors were made with, else a choice.

before the build         with_choices    the order, and n-grams where chunks have them
once `nprobe` is tuned   search_method   the faster search of embeddings
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexing.index.key import num_lists
from indexing.index.sharded import MEMORY, Trained, Tuned
from indexing.neighbors.settings import Method
from indexing.store.artifact import damage, parse_manifest, stored_json
from indexing.store.datastore import Datastore
from pipelines.config import Config

log = logging.getLogger("retro")

_MOST_VISITED = 1 / 4
"""Fraction of the lists from which on visiting them takes longer than comparing all embeddings
(docs/results/speed.md)."""

_LEAST_LENGTH = 8
"""Tokens of a chunk with enough n-grams to find neighbors (docs/results/which-neighbors.md)."""


def with_choices(config: Config) -> Config:
    """Replace every `auto` of `[neighbors]`, except that of a search of embeddings, which depends on the tuned index.

    Stored neighbors keep their method.
    """
    stored, is_lexical = _stored(config.datastore), config.embedder.kind == "lexical"
    chosen: dict[str, Any] = {}
    if config.neighbors.rerank == "auto":
        chosen["rerank"] = "tokens" if is_lexical else "embeddings"
    if config.neighbors.search == "auto":
        chosen["search"] = "auto" if _without_ngrams(config) else "ngrams"
    recorded = stored["recipe"]["settings"] if stored else {}
    if is_lexical or recorded.get("neighbors.rerank") != "tokens":  # else the stage `embed` refuses the other embedder
        chosen |= {key: recorded.get(f"neighbors.{key}", chosen[key]) for key in chosen}
    return replace(config, neighbors=replace(config.neighbors, **chosen))


def search_method(config: Config) -> tuple[Config, Method]:
    """The settings in the recipe of neighbors, and the method of their search.

    Args:
        config: the settings `with_choices`.
    """
    if config.neighbors.search != "auto":
        return config, config.neighbors.search
    train = Datastore.open(config.datastore).train
    index = stored_json(train.folder / "index" / "trained" / "index.json", Trained)
    tuned = stored_json(train.folder / "index" / "tuned" / "tuned.json", Tuned)
    lists = num_lists(index["key"])
    visited = next((nprobe for nprobe, recall in tuned["curve"] if recall >= config.index.recall_target), lists)
    method = by_embeddings(train.num_chunks, index["dimension"], visited / lists)
    log.info("neighbors.search = 'auto' chooses %r: %s", method, _without_ngrams(config))
    return replace(config, neighbors=replace(config.neighbors, search=method)), method


def _without_ngrams(config: Config) -> str:
    """The reason why `auto` does not choose `ngrams`; empty if it does."""
    if config.embedder.kind != "lexical":
        return f"embedder.kind = {config.embedder.kind!r} finds meaning, n-grams find wording"
    if config.chunks.chunk_length < _LEAST_LENGTH:
        return f"chunks.chunk_length = {config.chunks.chunk_length} is below {_LEAST_LENGTH}"
    if "ngrams" in config.skip_stages:
        return "skip_stages leaves out 'ngrams'"
    others = (folder for folder in config.neighbors.extra_datastores if not Datastore.open(folder).has("ngrams"))
    return next((f"{folder} has no finished 'ngrams' stage" for folder in others), "")


def by_embeddings(num_vectors: int, dimension: int, visited: float) -> Method:
    """The faster search of embeddings [num_vectors, dimension] by an index that reaches the recall target in this
    fraction of its lists."""
    if 2 * num_vectors * dimension > MEMORY:
        return "index"
    return "index" if visited <= _MOST_VISITED else "exact"


def _stored(folder: Path) -> dict[str, Any] | None:
    """The manifest of one shard of stored neighbors; None without any."""
    stored = (path.parent for path in sorted(folder.glob("neighbors/[0-9]*/manifest.json")))
    return next((parse_manifest(path) for path in stored if not damage(path)), None)
