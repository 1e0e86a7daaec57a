"""Search and storage of neighbors: the settings, and those of stored neighbors."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt
from typing_extensions import TypedDict

from indexing.store.artifact import read_manifest, recorded
from indexing.store.datastore import Datastore, shard_name
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.settings import Fraction, settings

Method = Literal["index", "exact", "ngrams"]

# Far above any use (the paper reads at most 40 neighbors). Without a limit, a mistyped number could fill a disk.
_MOST_NEIGHBORS, _MOST_CANDIDATES = 4096, 65_536


@settings
class NeighborSettings:
    """Search and storage of neighbors."""

    stored: Annotated[int, Field(ge=1, le=_MOST_NEIGHBORS)] = 16
    """Neighbors stored for each chunk. Store more than training reads (`data.k`): a batch skips neighbors from its own
    documents."""
    candidates: Annotated[int, Field(le=_MOST_CANDIDATES)] = 64
    """Candidates that the index returns for each chunk, before filtering and re-ranking."""
    rerank: Literal["auto", "embeddings", "tokens", "none"] = "auto"
    """Order of the candidates. `embeddings`: the nearest first, by the stored embeddings. `tokens`: by the tokens that
    they share with the chunk, each adding to the ones before; for models that copy, with the lexical embedder
    (docs/explanation/neighbor-search.md). `none`: by the index's codes; the same as `embeddings` if `search` uses no
    codes. `auto`: `tokens` with the lexical embedder, `embeddings` (as in the paper) with a transformer; stored
    neighbors keep their order."""
    search: Literal["auto", "index", "exact", "ngrams"] = "auto"
    """Search for candidates. `index`: by the index's codes. `exact`: by matrix products with all embeddings. `ngrams`:
    by the rare n-grams of tokens that chunks share, and by the index's codes for chunks that share too few. `auto`:
    `ngrams` with the lexical embedder, else the faster of the others (docs/explanation/neighbor-search.md); stored
    neighbors keep their method."""
    max_overlap: Fraction = 1.0
    """Store no neighbor whose longest run of tokens in common with the chunk is more than this fraction of it. 1 = keep
    all. Only the chunk itself is compared; `data.max_overlap` also compares the next chunk, which training predicts.
    The datastore has no votes after a match that is longer than this fraction of a chunk."""
    extra_datastores: tuple[Path, ...] = ()
    """More datastores to retrieve from, with the same tokenizer, chunk length and embedder. Their training chunks can
    be neighbors."""
    materialized: NonNegativeInt = 0
    """Neighbors of each chunk whose tokens the stage `materialize` writes next to the chunk, for `data.materialized`.
    Use a few more than `data.k`, because training skips some neighbors. 0 = none."""

    @property
    def precise_candidates(self) -> int:
        """Candidates of a search by the embeddings: 1.5 times `per_index`, at least 16 more, because bfloat16 products
        are not exact."""
        return self.per_index + max(16, self.per_index // 2)

    @property
    def by_distance(self) -> bool:
        """Whether the nearest chunks are stored. Only these can be merged: the order by tokens needs all candidates,
        and n-grams need all chunks, but only the chosen neighbors are stored."""
        return self.rerank != "tokens" and self.search != "ngrams"

    @property
    def per_index(self) -> int:
        """Candidates from an index after its exact distances: `stored`, or all if the order by tokens follows."""
        return self.candidates if self.rerank == "tokens" else self.stored

    def __post_init__(self) -> None:
        if self.materialized > self.stored:
            raise InputError(
                f"neighbors.materialized = {self.materialized}: should be at most neighbors.stored = {self.stored}."
            )
        if self.candidates < self.stored:
            raise InputError(
                f"neighbors.candidates = {self.candidates}: should be at least neighbors.stored = {self.stored}; 4 times k is good."
            )


class _Counts(TypedDict):
    search: Method


def stored_settings(datastore: Datastore) -> tuple[NeighborSettings, Method] | None:
    """The settings of the stored neighbors without `extra_datastores`, and the method that found them; None without
    neighbors."""
    if not datastore.has("neighbors"):
        return None
    folder = datastore.folder / "neighbors" / shard_name(0)
    settings = read_manifest(folder)["recipe"]["settings"]
    stored = {key.removeprefix("neighbors."): value for key, value in settings.items()}
    method: Any = recorded(folder, "counts", _Counts)["search"]
    accepted = {field.name: stored[field.name] for field in fields(NeighborSettings) if field.name in stored}
    try:
        return NeighborSettings(**accepted), method
    except InputError as error:
        raise InputError(f"{folder / MANIFEST}: recipe.settings: neighbors.{error}") from error
