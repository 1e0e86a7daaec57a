"""The fields of JSON files in a datastore: types, ranges and sizes, checked where a file is parsed. Another machine may
have written it.

    manifest.json ─► `parsed(kind, value, file)` ─► the same value, or InputError: file, field, what was found, what is accepted

Manifests of artifacts and of datastores are described here. A module that reads settings or counts of one stage
describes them itself, as a `TypedDict` (`artifact.recorded`). Keys that nobody reads are ignored, so that later
versions can add some.
"""

import json
import re
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NotRequired,  # pydantic needs these before Python 3.12
    TypeVar,
)

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from indexing.store.errors import InputError

T = TypeVar("T")

MOST_ROWS = 1 << 40
"""Chunks of a split; a chunk id has 40 bits (retrieval_set.py)."""
MOST_SHARDS = 1 << 20
LONGEST_CHUNK = 65_535
"""Tokens; lengths are uint16."""
LARGEST_VOCABULARY = 1 << 31
_MOST_BYTES = 1 << 60
_LONGEST_PATH = 4096
_SHOWN = 100  # characters of a value in a message
_NEEDED = ("fingerprints", "artifacts", "splits", "chunk_length", "pad_id", "vocab_size")  # to read chunks

Rows = Annotated[int, Field(ge=0, lt=MOST_ROWS)]
Bytes = Annotated[int, Field(ge=0, lt=_MOST_BYTES)]
Name = Annotated[str, Field(max_length=255)]
Fingerprint = Annotated[str, Field(max_length=64)]
Version = Annotated[int, Field(ge=0, lt=1 << 31)]


def _paths(value: object) -> object:
    """Paths of artifacts, see `paths.py`, which reads them."""
    if not isinstance(value, str | list | dict):
        raise ValueError("cannot be an artifact: should be its path, or a list or an object of such paths")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _paths(part)
    return value


Paths = Annotated[Any, BeforeValidator(_paths)]


def _location(text: str) -> str:
    if not 0 < len(text) <= _LONGEST_PATH or "\0" in text:
        raise ValueError(f"should be a path of 1 to {_LONGEST_PATH:,} characters")
    return text


class Recipe(TypedDict):
    """`recipe` in the manifest of an artifact."""

    stage: Name
    version: Version
    settings: dict[str, Any]
    inputs: dict[str, str]


class File(TypedDict):
    """An entry of `files`."""

    bytes: Bytes
    checksum: Fingerprint


class ArtifactManifest(TypedDict):
    """`manifest.json` of an artifact. Those of earlier versions lack `name` and `paths`."""

    fingerprint: Fingerprint
    recipe: Recipe
    counts: dict[str, Any]
    files: dict[str, File]
    name: NotRequired[Name]
    paths: NotRequired[dict[str, Paths]]


class SplitTotals(TypedDict):
    """A split in a datastore's manifest: a number for each shard."""

    chunks: Annotated[list[Rows], Field(max_length=MOST_SHARDS)]
    documents: list[Rows]
    tokens: NotRequired[list[Bytes]]
    bytes: NotRequired[list[Bytes]]


class ExtraDatastore(TypedDict):
    """A datastore that neighbors come from: its folder, and the fingerprint of its chunks."""

    folder: Annotated[str, AfterValidator(_location)]
    chunks: Fingerprint


class DatastoreManifest(TypedDict):
    """`manifest.json` of a datastore, from its first stage on."""

    fingerprints: NotRequired[dict[str, Fingerprint]]
    artifacts: NotRequired[dict[str, Paths]]
    extra_datastores: NotRequired[Annotated[list[ExtraDatastore], Field(max_length=1 << 16)]]
    splits: NotRequired[dict[str, SplitTotals]]
    chunk_length: NotRequired[Annotated[int, Field(ge=1, le=LONGEST_CHUNK)]]
    pad_id: NotRequired[Annotated[int, Field(ge=0, lt=LARGEST_VOCABULARY)]]
    vocab_size: NotRequired[Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]]


def _fitting(manifest: Any) -> Any:
    """Check that a manifest has what readers need, and that its fields fit together."""
    if missing := [key for key in _NEEDED if key not in manifest]:
        raise ValueError(f"{missing[0]} is missing: no chunks are finished")
    if "train" not in manifest["splits"]:
        raise ValueError("splits.train is missing")
    if manifest["pad_id"] >= manifest["vocab_size"]:
        raise ValueError(f"pad_id should be below vocab_size, which is {manifest['vocab_size']:,}")
    longest, shards = manifest["chunk_length"], len(manifest["splits"]["train"]["chunks"])
    for name, totals in manifest["splits"].items():
        for key, numbers in totals.items():
            if len(numbers) != shards:
                raise ValueError(f"splits.{name}.{key} should have a number for each of {shards:,} shards")
        if sum(totals["chunks"]) >= MOST_ROWS:
            raise ValueError(f"splits.{name}.chunks should have a sum below {MOST_ROWS:,}")
        for shard, (chunks, documents) in enumerate(zip(totals["chunks"], totals["documents"], strict=True)):
            tokens = totals["tokens"][shard] if "tokens" in totals else chunks
            if not (min(1, chunks) <= documents <= chunks <= tokens <= chunks * longest):
                raise ValueError(
                    f"splits.{name} should fit together in shard {shard}: {documents:,} documents, {chunks:,} chunks of "
                    f"{longest:,} tokens, {tokens:,} tokens"
                )
    return manifest


FinishedManifest = Annotated[DatastoreManifest, AfterValidator(_fitting)]
"""`manifest.json` of a datastore with finished chunks."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parsed(kind: type[T], value: Any, file: Path, key: str = "") -> T:
    """Check what a JSON file holds, without conversions: a number as text is refused.

    Args:
        kind: a `TypedDict`, a dataclass, or any other type.
        value: the content, or a part of it.
        file: for messages.
        key: of the part.

    Raises:
        InputError: a field is missing, has another type, or is out of range.
    """
    hashable: Any = kind
    try:
        if is_dataclass(kind):  # pydantic makes one of text only, if it may not convert anything
            record: T = _adapter(hashable).validate_json(json.dumps(value), strict=True)
            return record
        checked: T = _adapter(hashable).validate_python(value, strict=True)
    except ValidationError as error:
        raise InputError(f"{file}: {_mistake(error, key)}. Restore the file, or make it again.") from error
    return value if isinstance(checked, dict) else checked  # with the keys that nobody reads


def _mistake(error: ValidationError, key: str) -> str:
    """The first mistake: `field = value: should be …`."""
    first = error.errors()[0]
    if isinstance(
        cause := first.get("ctx", {}).get("error"), InputError
    ):  # from a `__post_init__`; it names the fields
        return str(cause).rstrip(".")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    field = f"{key}{path}".removeprefix(".")
    if first["type"] == "missing":
        return f"{field} is missing"
    accepted = re.sub("^(Value error,|Input|String|List|Dictionary) ", "", first["msg"]).replace("dictionary", "object")
    if not field:
        return accepted if first["type"] == "value_error" else f"it {accepted}"
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    return f"{field} = {value[:_SHOWN]}{'…' * (len(value) > _SHOWN)}: {accepted}"
