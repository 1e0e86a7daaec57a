"""Every field of every JSON file of a datastore and a run: with another value it is refused by name, or makes no difference."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.embedding.embedder import open_embedder
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.settings import stored_settings
from indexing.ngrams.search import NgramIndex
from indexing.sparse.index import SparseIndex
from indexing.store.artifact import fingerprint, read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import checksum, read_json, write_checked, write_json
from indexing.store.retrieval_set import RetrievalSet, embedder_kind
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.votes import all_vote, has_votes, read_votes
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.stages.generations import read_plan, stored_files
from tests.conftest import build_local, tiny_config

VALUES: tuple[Any, ...] = (None, 0, -1, 10**30, "x", [], {})
TEXT = np.arange(5, 40)
CONTENT = (
    "deleted.json",
    "corpus/plan.json",
    "corpus/files.json",
    "corpus/manifest.json",
    "embedder/embedder.json",
    "neighbors/00000/manifest.json",
)
"""Their fields have other values in other datastores, so a value that is accepted may be read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """A datastore with every stage, and with deleted documents."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), tiny_corpus, skip_stages=())
    build_local(replace(config, neighbors=replace(config.neighbors, search="ngrams", rerank="tokens")))
    first = Datastore.open(config.datastore).train.chunk_range(0)
    write_checked(config.datastore / "deleted.json", {"documents": {"doc-0": 7}, "chunks": {"train": [list(first)]}})
    return config.datastore


def embedder(folder: Path) -> Any:
    opened = open_embedder(folder / "embedder", lambda rows: [""] * len(rows))
    return opened.embed(TEXT[None], np.array([len(TEXT)])).tolist(), embedder_kind(folder) == "transformer"


def embeddings(folder: Path) -> Any:
    Datastore.open(folder).train.require_shards("embeddings")
    return Datastore.open(folder).train.embeddings.gather(np.arange(3)).tolist()


def sparse(folder: Path) -> Any:
    return [
        found.tolist()
        for found in SparseIndex.open([Datastore.open(folder).train], [0]).search([["index", "chunk"]], 3)
    ]


def split_totals(folder: Path) -> Any:
    split = Datastore.open(folder).split("train")
    documents = split.documents_of(np.arange(0, 60))
    return [array.tolist() for array in documents], split.deleted.tolist(), split.metadata([0, 1])


def votes(folder: Path) -> Any:
    datastore = Datastore.open(folder)
    assert not has_votes(datastore)  # documents were deleted since they were made
    return all_vote(datastore), read_votes(datastore.train, np.arange(20)).tobytes()


def suffixes(folder: Path) -> Any:
    return SuffixIndex.open(folder).votes(TEXT).tolist()


def ngrams(folder: Path) -> Any:
    index = NgramIndex.open(RetrievalSet.of(Datastore.open(folder)))
    tokens = index.retrieval.own.tokens.read(0, 4)
    return index.search(tokens, np.full(4, 16), 5, 1, lambda _, ids: ids, own=True).tolist()


def neighbors(folder: Path) -> Any:
    datastore = Datastore.open(folder)
    return stored_settings(datastore), datastore.train.neighbor_limit


def index(folder: Path) -> Any:
    opened = ShardedIndex.open(folder / "index", range(7))
    return opened.search(np.eye(4, 32, dtype=np.float32), 3, nprobe=1).tolist()


def tokenizer(folder: Path) -> Any:
    return Tokenizer.open(folder / "tokenizer").encode("index chunk").tolist()


def corpus(folder: Path) -> Any:
    return str(read_plan(folder)), stored_files(folder / "corpus"), read_manifest(folder / "corpus")["files"]


FILES: dict[str, Callable[[Path], Any]] = {
    "manifest.json": lambda folder: (split_totals(folder), suffixes(folder)),
    "deleted.json": split_totals,
    "corpus/manifest.json": corpus,
    "corpus/plan.json": corpus,
    "corpus/files.json": corpus,
    "tokenizer/manifest.json": tokenizer,
    "tokenizer/meta.json": tokenizer,
    "embedder/manifest.json": embedder,
    "embedder/embedder.json": embedder,
    "chunks/00000/manifest.json": split_totals,
    "embeddings/00000/manifest.json": embeddings,
    "index/00000/manifest.json": index,
    "index/trained/manifest.json": index,
    "index/tuned/manifest.json": index,
    "index/tuned/tuned.json": index,
    "sparse/00000/manifest.json": sparse,
    "sparse/00000/segments.json": sparse,
    "sparse/00000/chunks.json": sparse,
    "suffixes/00000-00006-00000/manifest.json": suffixes,
    "votes/00000/manifest.json": votes,
    "ngrams/00000/manifest.json": ngrams,
    "neighbors/00000/manifest.json": neighbors,
}


_OTHER_WORDS = ("artifacts", "checksum", "fingerprint", "fingerprints", "format_version", "index_settings", "schema")
"""Fields whose errors say what they mean: a stage is not finished, another version wrote the file, tantivy cannot read it."""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields below a value; of a list, those of its first item."""
    keys = value.keys() if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from fields(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value of a field."""
    out = copy.deepcopy(value)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return out


def write(file: Path, value: Any) -> None:
    """Write a file as whoever makes a datastore can: all checksums and fingerprints are right."""
    if file.name == "manifest.json" or file.name == "deleted.json":
        if isinstance(value.get("recipe"), dict):
            value = value | {"fingerprint": fingerprint(value["recipe"])}
        write_checked(file, value)
        return
    write_json(file, value)
    manifest = read_json(file.with_name("manifest.json"))
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "checksum": checksum(file)}
    write_checked(file.with_name("manifest.json"), manifest)


@pytest.mark.parametrize("name", FILES)
def test_every_field_with_another_value_is_refused_by_name_or_makes_no_difference(folder: Path, name: str) -> None:
    file, read = folder / name, FILES[name]
    whole, before, expected = (
        read_json(file),
        {path: path.read_bytes() for path in file.parent.glob("*.json")},
        read(folder),
    )
    differing = []
    try:
        for path in fields(whole):
            for value in VALUES:
                write(file, changed(whole, path, value))
                field = ".".join(str(key) for key in path if isinstance(key, str))
                try:
                    if read(folder) != expected and name not in CONTENT:
                        differing.append(f"{field} = {value!r:.30} reads something else")
                except InputError as error:
                    is_named = any(str(key) in str(error) for key in path) or path[0] in _OTHER_WORDS
                    if str(folder) not in str(error) or not is_named:
                        differing.append(f"{field} = {value!r:.30} is not named: {error}")
                except Exception as error:
                    differing.append(f"{field} = {value!r:.30}: {error!r:.200}")
    finally:
        for path, data in before.items():
            path.write_bytes(data)
    assert not differing, "\n".join(differing)
