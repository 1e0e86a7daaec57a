"""Datastores that have every kind of artifact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from indexing.corpus.documents import CorpusSettings
from indexing.dedup.near_duplicates import DedupSettings
from indexing.store.datastore import delete_documents
from pipelines.config import Config
from tests.conftest import build_local, tiny_config, write_corpus


def build_complete(folder: Path, **neighbors: Any) -> Config:
    """Build a datastore of two shards, with near copies removed, materialized neighbors, a merged index and sorted prefixes."""
    corpus = write_corpus(folder / "corpus.jsonl", 36)
    corpus.write_text(corpus.read_text() + corpus.read_text().replace('"doc-', '"copy-'))
    evaluation = write_corpus(folder / "evaluation.jsonl", 4, seed=3)
    config = tiny_config(folder, corpus, dedup=DedupSettings(within=True, paths=(str(evaluation),)))
    reading = CorpusSettings(paths=(str(corpus),), shard_bytes=40_000, split=(800, 150, 50))
    neighbors = replace(config.neighbors, materialized=2, **neighbors)
    config = replace(config, corpus=reading, neighbors=neighbors, index=replace(config.index, factory="IVF4,Flat"))
    build_local(config)
    build_local(config, only="merge")
    build_local(config, only="suffixes")
    return config


def build_grown(folder: Path) -> Config:
    """Build a datastore with deleted documents, to which two files were appended one by one."""
    files = tuple(str(write_corpus(folder / f"{seed}.jsonl", 12, seed)) for seed in range(3))
    config = tiny_config(folder, folder, corpus=CorpusSettings(paths=files[:1], split=(800, 200, 0)))
    build_local(config)
    for count in (2, 3):
        config = replace(config, corpus=replace(config.corpus, paths=files[:count]))
        build_local(config, append=True)
    delete_documents(config.datastore, ["doc-1", "doc-7"])
    return config
