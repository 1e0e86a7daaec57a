"""The retrieval set of a datastore: its own training chunks, and those of other datastores that its neighbors come
from.

    stored neighbor id = number of the datastore << 40 | chunk id in its train split        -1 = none

Number 0 is the datastore itself, so its own ids are chunk ids. The others are numbered from 1 in the order of
`extra_datastores` in its manifest.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from indexing.store.artifact import fingerprint, read_manifest, recorded, stored_json
from indexing.store.datastore import Datastore, Split
from indexing.store.deletions import inside
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.remote import local_folder, url_of

CHUNK_ID_BITS = 40
TRUSTED = "RETRO_EXTRA_DATASTORES"
"""Environment variable with locations, divided by blanks, in which datastores at a URL may have neighbors."""

_Embedder = TypedDict("_Embedder", {"embedder.kind": str})


def neighbor_ids(number: int | np.ndarray, chunk_ids: np.ndarray) -> np.ndarray:
    """Convert chunk ids [...] int64 of the datastore with this number to ids of the retrieval set; -1 stays -1."""
    return np.where(chunk_ids < 0, -1, chunk_ids | (np.int64(number) << CHUNK_ID_BITS))


@dataclass(frozen=True)
class RetrievalSet:
    """The chunks that neighbor ids name.

    Attributes:
        splits: training splits of the datastores, the datastore's own first.
    """

    splits: tuple[Split, ...]

    @classmethod
    def of(cls, datastore: Datastore, named: Sequence[Path | str] = ()) -> "RetrievalSet":
        """Open the retrieval set that a datastore's manifest records.

        Args:
            datastore: the datastore.
            named: datastores that the user has named; one at a URL may have neighbors in them, see `_require_named`.

        Raises:
            InputError: one of the other datastores is missing, has changed since it was searched, or may not be read.
        """
        others = []
        for entry in datastore.manifest.get("extra_datastores", []):
            folder = (datastore.folder.resolve() / entry["folder"]).resolve()
            _require_named(datastore, folder, named)
            again = "or search again: `retro index CONFIG --stage neighbors --rebuild`"
            try:
                other = Datastore.open(folder, datastore.reading)
            except InputError as error:
                raise InputError(
                    f"{datastore.folder} has neighbors in {folder} (neighbors.extra_datastores), which cannot be opened: {error} "
                    f"Put it back, name its new place in neighbors.extra_datastores and run `retro index CONFIG`, {again}."
                ) from error
            if other.manifest["fingerprints"].get("chunk") != entry["chunks"]:
                raise InputError(
                    f"{folder} holds other chunks than when {datastore.folder} searched it (neighbors.extra_datastores). "
                    f"Put them back, {again}."
                )
            others.append(other.train)
        return cls((datastore.train, *others))

    @property
    def own(self) -> Split:
        """The training chunks of the datastore itself."""
        return self.splits[0]

    @property
    def num_chunks(self) -> int:
        """Chunks of all datastores."""
        return sum(split.num_chunks for split in self.splits)

    def has(self, stage: str) -> bool:
        """Whether a stage is finished in all datastores."""
        return all(Datastore.open(split.folder).has(stage) for split in self.splits)

    def require(self, stage: str) -> None:
        """Raise InputError unless a stage is finished in all datastores."""
        for split in self.splits:
            Datastore.open(split.folder).require(stage)

    def require_unchanged(self) -> None:
        """Raise DatastoreChanged if one of the datastores was built again, see `Split.require_unchanged`."""
        for split in self.splits:
            split.require_unchanged()

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """The ids [...] int64 of the chunks at these positions in the concatenation of all datastores."""
        if len(self.splits) == 1:
            return positions
        starts = np.cumsum([0, *(split.num_chunks for split in self.splits)], dtype=np.int64)
        numbers = np.searchsorted(starts, positions, side="right") - 1
        return neighbor_ids(numbers, positions - starts[numbers])

    def with_continuation(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Retrieved chunks with their continuations, like `Split.with_continuation`: ids [n] → tokens [n, 2m], lengths
        [n]."""
        tokens = np.full((len(ids), 2 * self.own.chunk_length), self.own.pad_id, dtype=np.int64)
        lengths = np.zeros(len(ids), dtype=np.int64)
        for split, rows, chunk_ids in self._by_split(ids):
            tokens[rows], lengths[rows] = split.with_continuation(chunk_ids)
        return tokens, lengths

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of chunks without continuation, as stored: ids [n] int64 → [n, m]; 0 for an id of -1."""
        out = np.zeros((len(ids), self.own.chunk_length), dtype=self.own.tokens.dtype)
        for split, rows, chunk_ids in self._by_split(ids):
            out[rows] = split.tokens.gather(chunk_ids)
        return out

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Stored embeddings: ids [n] int64, none of them -1 → [n, d] float16."""
        out = np.empty((len(ids), *self.own.embeddings.row_shape), dtype=np.float16)
        for split, rows, chunk_ids in self._by_split(ids):
            out[rows] = split.embeddings.gather(chunk_ids)
        return out

    def without_deleted(self, ids: np.ndarray) -> np.ndarray:
        """Replace ids [...] int64 of chunks in deleted documents by -1."""
        out = ids.copy()
        for number, split in enumerate(self.splits):
            present = (ids >= 0) & (ids >> CHUNK_ID_BITS == number)
            kept = split.without_deleted(ids[present] & ((1 << CHUNK_ID_BITS) - 1))
            out[present] = neighbor_ids(number, kept)
        return out

    @property
    def deleted_documents(self) -> set[int]:
        """The deleted documents, numbered like chunks."""
        numbered = ((number, split.deleted_documents.tolist()) for number, split in enumerate(self.splits))
        return {(number << CHUNK_ID_BITS) | document for number, documents in numbered for document in documents}

    def among(self, ids: np.ndarray, ranges: Sequence[np.ndarray]) -> np.ndarray:
        """Replace ids [...] int64 by -1 that are in none of the ranges [r, 2] of chunk ids of their datastore."""
        out = np.full_like(ids, -1)
        for number, allowed in enumerate(ranges):
            kept = (ids >> CHUNK_ID_BITS == number) & inside(ids & ((1 << CHUNK_ID_BITS) - 1), allowed)
            out[kept] = ids[kept]
        return out

    def metadata(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """The row of `documents.parquet` of each chunk's document; an empty dictionary for an id of -1."""
        out: list[dict[str, Any]] = [{} for _ in ids]
        for split, rows, chunk_ids in self._by_split(ids):
            metadata = split.metadata(split.documents_of(chunk_ids)[0].tolist())
            for row, values in zip(rows, metadata, strict=True):
                out[row] = values
        return out

    def documents_of(self, ids: np.ndarray) -> np.ndarray:
        """The documents of chunks: ids [n] int64, none of them -1 → [n] int64, numbered like chunks
        (`neighbor_ids`)."""
        out = np.empty(len(ids), dtype=np.int64)
        for split, rows, chunk_ids in self._by_split(ids):
            out[rows] = (ids[rows] >> CHUNK_ID_BITS << CHUNK_ID_BITS) | split.documents_of(chunk_ids)[0]
        return out

    def positions_in_documents(self, ids: np.ndarray) -> np.ndarray:
        """Positions of chunks in their documents, from 0: ids [n] int64, none of them -1 → [n] int64."""
        out = np.empty(len(ids), dtype=np.int64)
        for split, rows, chunk_ids in self._by_split(ids):
            out[rows] = chunk_ids - split.documents_of(chunk_ids)[1]
        return out

    def scan_documents(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Like `DocumentTable.scan`, over all datastores. Documents are numbered like chunks."""
        for number, split in enumerate(self.splits):
            for first, table in split.documents.scan(columns):
                yield (number << CHUNK_ID_BITS) | first, table

    def _by_split(self, ids: np.ndarray) -> Iterator[tuple[Split, np.ndarray, np.ndarray]]:
        """Yield each split that the ids name, the rows with its ids, and their chunk ids in it."""
        numbers = ids >> CHUNK_ID_BITS  # -1 stays -1
        assert len(ids) == 0 or numbers.max() < len(self.splits), "ids of another retrieval set"
        for number, split in enumerate(self.splits):
            rows = np.flatnonzero(numbers == number)
            if len(rows):
                yield split, rows, ids[rows] & ((1 << CHUNK_ID_BITS) - 1)


def _require_named(datastore: Datastore, other: Path, named: Sequence[Path | str]) -> None:
    """Raise InputError if a datastore at a URL names another one that is not below its own location, and that the user
    has not named.

    Otherwise whoever writes a manifest would choose the hosts and the local folders that its readers read.
    """
    url = url_of(datastore.folder)
    trusted = map(local_folder, [*named, *os.environ.get(TRUSTED, "").split()])
    is_below = other.is_relative_to(datastore.folder.resolve())
    if url is None or is_below or other in [location.resolve() for location in trusted]:
        return
    place = url_of(other) or other
    raise InputError(
        f"{url}/{MANIFEST}: extra_datastores names {place}, which is not below {url}. A datastore at a URL does not decide what else is "
        f"read. If you trust it, set the environment variable: `export {TRUSTED}={shlex.quote(str(place))}` (several: with blanks between "
        "them)."
    )


# --- compatibility ---------------------------------------------------------------------------------------------------


def open_others(own: Datastore, locations: Sequence[Path]) -> list[Datastore]:
    """Open the datastores of `neighbors.extra_datastores`, in order.

    Raises:
        InputError: one is missing, not searchable, named twice, or has a different embedder.
    """
    others = list[Datastore]()
    for location in locations:
        other = Datastore.open(location)
        if other.folder.resolve() in [earlier.folder.resolve() for earlier in (own, *others)]:
            raise InputError(
                f"neighbors.extra_datastores names {location} twice, or the datastore itself: name each other datastore once."
            )
        other.require("add")
        check_searchable(own, other)
        others.append(other)
    return others


def entries_of(own: Datastore, locations: Sequence[Path]) -> list[dict[str, str]]:
    """`extra_datastores` in a manifest: relative path and fingerprint of the chunks of each. `RetrievalSet.of` reads
    them."""
    base = own.folder.resolve()
    return [
        {"folder": os.path.relpath(other.folder.resolve(), base), "chunks": other.manifest["fingerprints"]["chunk"]}
        for other in open_others(own, locations)
    ]


def check_searchable(datastore: Datastore, other: Datastore, key: str = "neighbors.extra_datastores") -> None:
    """Raise InputError, naming the setting `key`, unless chunks of one datastore can be neighbors of the other's."""
    if datastore.chunk_length != other.chunk_length:
        raise InputError(
            f"{key}: {other.folder} has chunks of {other.chunk_length} tokens, {datastore.folder} of "
            f"{datastore.chunk_length}. Build it again with the same chunks.chunk_length."
        )
    check_tokenizer(datastore, other, key)
    if not (datastore.has("embed") and other.has("embed")):
        return  # no search compares their vectors
    if embedder_identity(datastore) != embedder_identity(other):
        raise InputError(
            f"{key}: the embedders of {other.folder} and {datastore.folder} give different vectors. Build one of "
            f"them again with the other's: the same embedder.kind and settings, for the lexical one embedder.path = the other."
        )


def check_tokenizer(datastore: Datastore, other: Datastore, key: str) -> None:
    """Raise InputError, naming the setting `key`, unless two datastores have the same tokenizer."""
    if tokenizer_fingerprint(datastore.folder) != tokenizer_fingerprint(other.folder):
        raise InputError(
            f"{key}: {other.folder} and {datastore.folder} have different tokenizers. Build one of them again with the "
            f"other's: tokenizer.kind = 'sentencepiece' or 'huggingface', tokenizer.path = the model in its folder tokenizer/."
        )


def tokenizer_fingerprint(datastore: Path) -> str:
    """A value that is equal for two datastores (folders or URLs) with the same tokens, wherever their tokenizers come
    from."""
    folder = local_folder(datastore) / "tokenizer"
    ignored = ("kind", "added_bytes")  # added_bytes follows from the model
    metadata = {
        key: value for key, value in stored_json(folder / "meta.json", dict[str, Any]).items() if key not in ignored
    }
    files = {name: checksum for name, checksum in _checksums(folder).items() if name != "meta.json"}
    return fingerprint(files | metadata)


def embedder_identity(datastore: Datastore) -> dict[str, str] | str:
    """A value that is equal for two datastores with the same vectors: a transformer's recipe, or a lexical embedder's
    files."""
    folder = datastore.folder / "embedder"
    is_transformer = embedder_kind(datastore.folder) == "transformer"
    return str(read_manifest(folder)["fingerprint"]) if is_transformer else _checksums(folder)


def embedder_kind(datastore: Path) -> str:
    """`embedder.kind` of a datastore."""
    return recorded(datastore / "embedder", "settings", _Embedder)["embedder.kind"]


def _checksums(folder: Path) -> dict[str, str]:
    return {name: file["checksum"] for name, file in read_manifest(folder)["files"].items()}
