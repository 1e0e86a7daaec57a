"""The `embed` stage: chunks → embedder → embeddings."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedding.embedder import embed_shard, open_embedder
from indexing.embedding.lexical import fit_lexical
from indexing.embedding.settings import FIT_CHUNKS, Embedder, EmbedderSettings, write_settings
from indexing.embedding.transformer import model_fingerprint
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe, create, fingerprint, is_finished
from indexing.store.datastore import SPLITS, Datastore
from indexing.store.documents import DocumentTable
from indexing.store.errors import InputError
from indexing.store.paths import path_of
from indexing.store.remote import present
from indexing.store.retrieval_set import check_tokenizer, embedder_identity
from indexing.store.sharded_array import open_array
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor, kept_for_stage
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.shards import Shard, chunks_in_shards, finished, former_setting, prefixed, run_shards
from pipelines.terminal.progress import progress


def run_embed(config: Config, executor: Executor) -> Artifacts:
    """Chunks → embedder → embeddings."""
    folder = config.datastore
    _make_embedder(config)
    embedder, sizes = finished(folder, "embedder"), chunks_in_shards(folder)

    def shard_of(shard: int) -> Shard:
        chunks = finished(folder, path_of("chunks", shard))
        recipe = Recipe("embed", 1, {"shard": shard}, {"chunks": chunks, "embedder": embedder})
        arguments = (folder, embedder.fingerprint, folder / chunks.paths, config.embedder)
        return Shard(path_of("embeddings", shard), recipe, arguments, sizes[shard])

    return run_shards(folder, "embed", "chunks", embed_task, map(shard_of, all_shards(folder)), executor)


def _make_embedder(config: Config) -> None:
    folder, settings = config.datastore, config.embedder
    datastore, first = Datastore.open(folder), generations(folder)[0]
    values, files = prefixed("embedder", settings.recipe()), dict[str, str]()
    inputs: dict[str, Artifacts | str]
    if settings.kind == "transformer":
        inputs = {"model": model_fingerprint(settings.path)}
    elif settings.path:
        files = _embedder_files(datastore, settings)
        inputs = {"embedder.path": fingerprint(files)}
    else:
        inputs = {"chunks": finished(folder, path_of("chunks", first))}
        values["embedder.fit_chunks"] = former_setting(folder / "embedder", "embedder.fit_chunks", FIT_CHUNKS)
    recipe = Recipe("embed", 1, values, inputs)
    if is_finished(folder / "embedder", recipe):
        return
    train = datastore.train.first_shards(len(first))
    with create(folder / "embedder", recipe) as (work, counts):
        if settings.kind == "transformer":
            write_settings(work, settings)
            return
        if settings.path:
            for name in files:
                shutil.copyfile(present(Path(settings.path) / "embedder" / name), work / name)
            return
        total = train.num_chunks
        rng = np.random.default_rng(settings.seed)
        size = min(total, values["embedder.fit_chunks"])
        ids = np.sort(rng.choice(total, size, replace=False)).astype(np.int64)
        is_special = Tokenizer.open(folder / "tokenizer").token_bytes == 0
        counts["chunks"] = size
        with progress("embed: count n-grams", total=size, unit="chunks") as advance:
            fit_lexical(work, settings, train.tokens.gather(ids), train.lengths.gather(ids), is_special)
            advance(size)


def _embedder_files(datastore: Datastore, settings: EmbedderSettings) -> dict[str, str]:
    """File name → checksum of the lexical embedder in the datastore at `embedder.path`.

    Raises:
        InputError: there is none, or it was made for another tokenizer.
    """
    other = Datastore.open(settings.path)
    other.require("embed")
    check_tokenizer(datastore, other, "embedder.path")
    files = embedder_identity(other)
    if isinstance(files, str):
        raise InputError(
            f"embedder.path: {other.folder} has a transformer. Set embedder.kind = 'transformer' and embedder.path to its model."
        )
    return files


@kept_for_stage
def _open_embedder(folder: Path, _: str, settings: EmbedderSettings) -> Embedder:
    """The fingerprint in the key detects another embedder."""
    return open_embedder(folder / "embedder", Tokenizer.open(folder / "tokenizer").decode, settings)


def embed_task(
    work: Path, folder: Path, embedder_print: str, source: Path, settings: EmbedderSettings, *, advance: Advance
) -> dict[str, Any]:
    """Make one shard of embeddings for all splits."""
    embedder, counts = _open_embedder(folder, embedder_print, settings), {}
    for split in SPLITS:
        tokens, lengths = (open_array(source / split / f"{name}.npy") for name in ("tokens", "lengths"))
        name_of = partial(_name_of_chunk, source / split)
        out_file = work / f"{split}.npy"
        counts[split] = embed_shard(out_file, embedder, tokens, lengths, name_of=name_of, advance=advance)
    return counts


def _name_of_chunk(folder: Path, chunk: int) -> str:
    """The document of a chunk in one shard and split, for a message."""
    offsets = open_array(folder / "documents.npy")
    document = int(np.searchsorted(offsets, chunk, side="right")) - 1
    row = DocumentTable([folder / "documents.parquet"], [len(offsets) - 1]).take([document])[0]
    return f"document {row['id']!r} of {row['file']}, chunk {chunk - int(offsets[document]) + 1}"
