"""The stage table: what is made from what, and which of it is still to do.

    chunk → embed → train-index → add → neighbors

Each stage looks at the manifests before it, writes a recipe for every artefact of its own, skips those that are finished
and maps a plain function of `indexing/` over the rest. Nothing here knows where the tasks run.
"""

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from indexing import chunks, embedders, index, neighbors
from indexing.store.artefact import Recipe, create, fingerprint, is_finished, read_manifest, remove
from indexing.store.datastore import SPLITS, Datastore, shard_name, write_datastore_manifest
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.tokenizer import Tokenizer
from pipelines import corpus_stage, sharing
from pipelines.config import Config
from pipelines.executors import Advance, Executor, Task
from pipelines.progress import progress

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Stage:
    """A row of the stage table.

    Attributes:
        run: makes every unfinished artefact of the stage and returns the stage's fingerprint.
        outputs: globs of the artefacts, relative to the datastore: what `--rebuild` removes.
    """

    run: Callable[[Config, Executor], str]
    outputs: tuple[str, ...]


def build(config: Config, executor: Executor, *, only: str = "all", rebuild: bool = False) -> Datastore:
    """Bring a datastore up to date with its settings.

    Args:
        config: the settings.
        executor: where the tasks run.
        only: one stage of `STAGES`, or `all`.
        rebuild: first remove what this stage and the ones after it have made.

    Raises:
        InputError: a finished artefact was made with other settings, an earlier stage is missing, the input is bad, or
            another process is building the same datastore.
    """
    folder = config.datastore
    folder.mkdir(parents=True, exist_ok=True)
    names = list(STAGES) if only == "all" else [only]
    with _lock(folder):
        if rebuild:
            _remove_from(folder, names[0])
        for name in names:
            _require_earlier(folder, name)
            result = STAGES[name].run(config, executor)
            _write_manifest(config, name, result)
    return Datastore.open(folder)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{folder} is being built by another process; wait for it or stop it.") from error
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [".lock"]:  # refused before anything was made
                shutil.rmtree(folder)


def _remove_from(folder: Path, first: str) -> None:
    """Remove what a stage and those after it have made: first from the manifest, then from the disk, the last first."""
    path, names = folder / "manifest.json", list(STAGES)
    later = names[names.index(first) :]
    if path.exists():
        manifest = read_json(path)
        kept = {name: value for name, value in manifest["fingerprints"].items() if name not in later}
        write_datastore_manifest(folder, {**manifest, "fingerprints": kept})
    for name in reversed(later):
        for pattern in STAGES[name].outputs:
            for output in folder.glob(pattern):
                remove(output) if output.is_dir() else output.unlink()
    if first == names[0]:
        path.unlink(missing_ok=True)


def _require_earlier(folder: Path, name: str) -> None:
    position = list(STAGES).index(name)
    if position:
        Datastore.open(folder).require(list(STAGES)[position - 1])


def _write_manifest(config: Config, name: str, result: str) -> None:
    """Record that a stage is finished; the stages after it stay recorded only if this one made nothing new."""
    folder = config.datastore
    old = Datastore.open(folder).manifest if (folder / "manifest.json").exists() else {}
    fingerprints = dict(old.get("fingerprints", {}))
    if fingerprints.get(name) != result:
        position = list(STAGES).index(name)
        fingerprints = {key: value for key, value in fingerprints.items() if list(STAGES).index(key) < position}
        fingerprints[name] = result
    tokenizer = Tokenizer.open(folder / "tokenizer")
    counts = _shard_counts(folder)
    splits = [split for split in SPLITS if all(split in count for count in counts)]
    manifest = {
        "chunk_length": config.chunks.chunk_length,
        "pad_id": tokenizer.pad_id,
        "vocab_size": tokenizer.vocab_size,
        "fingerprints": fingerprints,
        "splits": {
            split: {key: [count[split][key] for count in counts] for key in ("documents", "chunks", "tokens", "bytes")}
            for split in splits
        },
    }
    if "neighbors" in fingerprints:
        manifest["also"] = sharing.manifest_entries(config) if name == "neighbors" else old.get("also", [])
    if manifest != {key: value for key, value in old.items() if key != "format_version"}:
        write_datastore_manifest(folder, manifest)


def _shard_counts(folder: Path) -> list[dict[str, Any]]:
    return [read_manifest(path)["counts"] for path in _shards(folder, "chunks")]


def _shards(folder: Path, stage: str) -> list[Path]:
    plan = corpus_stage.read_plan(folder / "corpus")
    return [folder / stage / shard_name(shard) for shard in range(len(plan))]


def _fingerprint_of(folder: Path) -> str:
    return read_manifest(folder)["fingerprint"]


def _prefixed(section: str, settings: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings as `section.key`, the names that a message or a command line uses."""
    values = settings if isinstance(settings, dict) else asdict(settings)
    return {f"{section}.{key}": value for key, value in values.items() if key not in without}


def _run_tasks(
    name: str, unit: str, function: Callable[..., Any], todo: list[tuple[Path, Task]], executor: Executor
) -> None:
    """Run the tasks of the unfinished artefacts under one progress bar."""
    if not todo:
        log.info("%s: finished already", name)
        return
    with progress(name, total=sum(task.size for _, task in todo), unit=unit) as advance:
        for _ in executor.map(function, [task for _, task in todo], advance):
            pass


# --- chunk ---------------------------------------------------------------------------------------------------------


def run_chunk(config: Config, executor: Executor) -> str:
    """Corpus → tokenizer → chunks."""
    folder = config.datastore
    plan = corpus_stage.prepare(config, executor)
    corpus_print, tokenizer_print = (_fingerprint_of(folder / name) for name in ("corpus", "tokenizer"))
    todo = []
    for shard, pieces in enumerate(plan):
        recipe = Recipe(
            stage="chunk",
            version=1,
            settings=_prefixed("chunks", config.chunks) | {"corpus.split": config.corpus.split, "shard": shard},
            inputs={"corpus": corpus_print, "tokenizer": tokenizer_print},
        )
        out = folder / "chunks" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(piece.text_bytes for piece in pieces)
            todo.append((out, Task((out, recipe, pieces, config.corpus, config.chunks, folder / "tokenizer"), size)))
    _run_tasks("chunk", "bytes", chunk_task, todo, executor)
    if not any(counts["train"]["chunks"] for counts in _shard_counts(folder)):
        raise corpus_stage.nothing_left(config.corpus)
    return fingerprint([_fingerprint_of(path) for path in _shards(folder, "chunks")])


def chunk_task(
    out: Path, recipe: Recipe, pieces: Any, corpus: Any, settings: Any, tokenizer: Path, *, advance: Advance
) -> None:
    """Make one shard of chunks. Problems were listed when the corpus was scanned."""
    with create(out, recipe) as (work, counts):
        counts |= chunks.chunk_shard(
            work, pieces, corpus, settings, tokenizer, on_problem=lambda _: None, advance=advance
        )


# --- embed ---------------------------------------------------------------------------------------------------------


def run_embed(config: Config, executor: Executor) -> str:
    """Chunks → embedder → embeddings."""
    folder = config.datastore
    _make_embedder(config)
    embedder_print = _fingerprint_of(folder / "embedder")
    todo = []
    for shard, source in enumerate(_shards(folder, "chunks")):
        recipe = Recipe("embed", 1, {"shard": shard}, {"chunks": _fingerprint_of(source), "embedder": embedder_print})
        out = folder / "embeddings" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in read_manifest(source)["counts"].values())
            todo.append((out, Task((out, recipe, folder, embedder_print, source, config.embedder), size)))
    _run_tasks("embed", "chunks", embed_task, todo, executor)
    return fingerprint([_fingerprint_of(path) for path in _shards(folder, "embeddings")])


def _make_embedder(config: Config) -> None:
    folder, settings = config.datastore, config.embedder
    datastore = Datastore.open(folder)
    inputs = {"chunks": datastore.manifest["fingerprints"]["chunk"]}
    if settings.kind == "transformer":
        inputs = {"model": embedders.model_fingerprint(settings.path)}
    elif settings.path:
        inputs = {"embedder.path": fingerprint(sharing.embedder_files(datastore, settings))}
    recipe = Recipe("embed", 1, _prefixed("embedder", settings.recipe()), inputs)
    if is_finished(folder / "embedder", recipe):
        return
    train = datastore.train
    with create(folder / "embedder", recipe) as (work, counts):
        if settings.kind == "transformer":
            embedders.write_settings(work, settings)
            return
        if settings.path:
            sharing.copy_embedder(datastore, settings, work)
            return
        total = train.num_chunks
        rng = np.random.default_rng(settings.seed)
        size = min(total, settings.fit_chunks)
        ids = np.sort(rng.choice(total, size, replace=False)).astype(np.int64)
        is_special = Tokenizer.open(folder / "tokenizer").token_bytes == 0
        counts["chunks"] = size
        embedders.fit_lexical(work, settings, train.tokens.gather(ids), train.lengths.gather(ids), is_special)


@lru_cache(maxsize=1)
def _open_embedder(folder: Path, _: str, settings: embedders.EmbedderSettings) -> embedders.Embedder:
    """Kept between the shards of one worker: a model is loaded once. The fingerprint in its key notices another one."""
    return embedders.open_embedder(folder / "embedder", Tokenizer.open(folder / "tokenizer").decode, settings)


def embed_task(
    out: Path, recipe: Recipe, folder: Path, embedder_print: str, source: Path, settings: Any, *, advance: Advance
) -> None:
    """Make one shard of embeddings, all splits."""
    embedder = _open_embedder(folder, embedder_print, settings)
    with create(out, recipe) as (work, counts):
        for split in Datastore.open(folder).split_names:
            tokens, lengths = (np.load(source / split / f"{name}.npy", mmap_mode="r") for name in ("tokens", "lengths"))
            counts[split] = embedders.embed_shard(work / f"{split}.npy", embedder, tokens, lengths, advance=advance)


# --- index ---------------------------------------------------------------------------------------------------------


def run_train_index(config: Config, executor: Executor) -> str:
    """Embeddings → an empty trained index."""
    folder, settings = config.datastore, config.index
    datastore = Datastore.open(folder)
    recipe = Recipe(
        stage="train-index",
        version=1,
        settings=_prefixed("index", settings, without=("recall_target", "tune_queries")),
        inputs={"embeddings": datastore.manifest["fingerprints"]["embed"]},
    )
    out = folder / "index" / "trained"
    if not is_finished(out, recipe):
        dimension = datastore.train.embeddings.shard(0).shape[1]
        key = index.choose_key(datastore.train.num_chunks, dimension, settings)
        sample = index.training_sample(datastore.train, key, settings)
        with (
            progress(f"train-index {key}", total=len(sample), unit="vectors") as advance,
            create(out, recipe) as (work, counts),
        ):
            index.train(work, key, sample, settings)
            counts["vectors"] = len(sample)
            advance(len(sample))
    return _fingerprint_of(out)


def run_add(config: Config, executor: Executor) -> str:
    """Embeddings → the trained index, filled shard by shard, and `nprobe` tuned."""
    folder = config.datastore
    trained_print = _fingerprint_of(folder / "index" / "trained")
    train = Datastore.open(folder).train
    todo = []
    for shard, source in enumerate(_shards(folder, "embeddings")):
        first_id = int(train.tokens.starts[shard])
        recipe = Recipe(
            "add", 1, {"first_id": first_id}, {"trained": trained_print, "embeddings": _fingerprint_of(source)}
        )
        out = folder / "index" / shard_name(shard)
        if not is_finished(out, recipe):
            todo.append((out, Task((out, recipe, folder, source / "train.npy", first_id), train.chunk_rows[shard])))
    _run_tasks("add", "chunks", add_task, todo, executor)
    return _tune(config)


def add_task(out: Path, recipe: Recipe, folder: Path, source: Path, first_id: int, *, advance: Advance) -> None:
    """Add one shard's embeddings to a copy of the trained index."""
    with create(out, recipe) as (work, counts):
        embeddings = np.load(source, mmap_mode="r")
        index.add_shard(work, folder / "index" / "trained", embeddings, first_id, advance=advance)
        counts["vectors"] = len(embeddings)


def _tune(config: Config) -> str:
    folder, settings = config.datastore, config.index
    out = folder / "index" / "tuned"
    shards = _shards(folder, "index")
    recipe = Recipe(
        stage="add",
        version=1,
        settings={
            "index.recall_target": settings.recall_target,
            "index.tune_queries": settings.tune_queries,
            "neighbors.candidates": config.neighbors.candidates,
        },
        inputs={path.name: _fingerprint_of(path) for path in shards},
    )
    if not is_finished(out, recipe):
        datastore = Datastore.open(folder)
        queries = sample_queries(datastore, settings.tune_queries, settings.seed)[1]
        opened = index.ShardedIndex.open(folder / "index", len(shards))
        with (
            progress("tune nprobe", total=len(queries), unit="queries") as advance,
            create(out, recipe) as (work, counts),
        ):
            tuned = index.tune(work, opened, queries, datastore.train.embeddings, config.neighbors.candidates, settings)
            counts |= {"nprobe": tuned["nprobe"], "recall_at_10": tuned["recall_at_10"]}
            advance(len(queries))
    return _fingerprint_of(out)


def sample_queries(datastore: Datastore, wanted: int, seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Chunk ids and embeddings of a sample of held-out chunks, or of `train` where next to nothing is held out.

    Returns:
        ids [n] int64, embeddings [n, d] float32, and the name of their split.
    """
    split = datastore.valid if datastore.valid.num_chunks >= min(100, wanted) else datastore.train
    size = min(wanted, split.num_chunks)
    ids = np.sort(np.random.default_rng(seed).choice(split.num_chunks, size, replace=False)).astype(np.int64)
    return ids, split.embeddings.gather(ids).astype(np.float32), split.name


# --- neighbors -----------------------------------------------------------------------------------------------------

# What the neighbors of a chunk depend on, in every datastore that is searched: the name in the recipe, and the stage.
_SEARCHED = {"chunks": "chunk", "embeddings": "embed", "index": "add"}


def run_neighbors(config: Config, executor: Executor) -> str:
    """Embeddings and indexes → the neighbors of every chunk of all splits."""
    folder = config.datastore
    fingerprints = Datastore.open(folder).manifest["fingerprints"]
    inputs = {name: fingerprints[stage] for name, stage in _SEARCHED.items()}
    searched = [(folder, fingerprint(inputs))]
    for number, other in enumerate(sharing.retrieved_from(config)):
        theirs = fingerprint({name: other.manifest["fingerprints"][stage] for name, stage in _SEARCHED.items()})
        inputs[f"neighbors.also[{number}]"] = theirs  # not the folder: a datastore that was moved is the same
        searched.append((other.folder, theirs))
    todo = []
    for shard, source in enumerate(_shards(folder, "chunks")):
        recipe = Recipe(
            stage="neighbors",
            version=1,
            settings=_prefixed("neighbors", config.neighbors, without=("also",)) | {"shard": shard},
            inputs=inputs,
        )
        out = folder / "neighbors" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in read_manifest(source)["counts"].values())
            todo.append((out, Task((out, recipe, shard, config.neighbors, tuple(searched)), size)))
    _run_tasks("neighbors", "chunks", neighbor_task, todo, executor)
    return fingerprint([_fingerprint_of(path) for path in _shards(folder, "neighbors")])


@lru_cache(maxsize=1)
def _open_searched(searched: tuple[tuple[Path, str], ...]) -> list[neighbors.Searchable]:
    """Kept between the shards of one worker; the fingerprints in the key notice another index."""
    datastores = [Datastore.open(folder) for folder, _ in searched]
    return [
        neighbors.Searchable(index.ShardedIndex.open(each.folder / "index", len(each.train.chunk_rows)), each.train)
        for each in datastores
    ]


def neighbor_task(
    out: Path, recipe: Recipe, shard: int, settings: Any, searched: tuple[tuple[Path, str], ...], *, advance: Advance
) -> None:
    """Search the neighbors of one shard's chunks, all splits; the datastore's own folder is the first of `searched`."""
    datastore, opened = Datastore.open(searched[0][0]), _open_searched(searched)
    with create(out, recipe) as (work, counts):
        for split in map(datastore.split, datastore.split_names):
            starts = split.tokens.starts
            rows = (int(starts[shard]), int(starts[shard + 1]))
            counts[split.name] = neighbors.neighbor_shard(
                work / split.name, split, rows, opened, settings, advance=advance
            )


STAGES: dict[str, Stage] = {
    "chunk": Stage(run_chunk, ("corpus", "tokenizer", "chunks/*")),
    "embed": Stage(run_embed, ("embedder", "embeddings/*")),
    "train-index": Stage(run_train_index, ("index/trained",)),
    "add": Stage(run_add, ("index/[0-9]*", "index/tuned")),
    "neighbors": Stage(run_neighbors, ("neighbors/*", "report.json", "report.html")),
}
