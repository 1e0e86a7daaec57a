"""The `neighbors` stage: embeddings and indexes → the neighbors of every chunk of all splits. And `materialize`: their
tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from indexing.embedding.lexical import token_weights
from indexing.neighbors.build import neighbor_shard
from indexing.neighbors.index_search import open_index
from indexing.neighbors.materialize import materialize_shard
from indexing.neighbors.search import NeighborSearch, OpenIndex
from indexing.neighbors.settings import Method, NeighborSettings
from indexing.ngrams.search import NgramIndex
from indexing.progress import Advance
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store import remote
from indexing.store.artifact import (
    Artifacts,
    Recipe,
    fingerprint,
    made_by,
    parse_manifest,
    remove,
)
from indexing.store.datastore import SPLITS, Datastore, read_datastore_manifest, shard_name
from indexing.store.errors import InputError
from indexing.store.paths import path_of
from indexing.store.retrieval_set import RetrievalSet, open_others
from pipelines.config import Config
from pipelines.executors.tasks import Executor, kept_for_stage
from pipelines.stages.choices import search_method
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.index import TUNED
from pipelines.stages.shards import Shard, chunks_in_shards, finished, prefixed, run_shards

log = logging.getLogger("retro")


@dataclass(frozen=True)
class SearchedShards:
    """Shards that are searched as one index: those of a generation, or of another datastore.

    Attributes:
        folder: folder of the datastore.
        shards: their numbers.
        number: number of the datastore in the retrieval set.
        made: everything that their search depends on; of another datastore only its fingerprint.
    """

    folder: Path
    shards: range
    number: int
    made: Artifacts | str


def run_neighbors(config: Config, executor: Executor) -> Artifacts:
    """Embeddings and indexes → the neighbors of every chunk of all splits."""
    folder = config.datastore
    config, method = search_method(config)
    own, others = _generations(config), _others(config)
    stops = [len(own)] * len(own) if config.neighbors.by_distance else _num_searched(config, own, others)
    train, sizes, kept, shards = Datastore.open(folder).train, chunks_in_shards(folder), 0, list[Shard]()
    for generation, stop in zip(own, stops, strict=True):
        kept += sum(train.chunk_rows[shard] for shard in generation.shards) if stop < len(own) else 0
        shards += [_shard(config, method, shard, own[:stop], others, sizes[shard]) for shard in generation.shards]
    warn = partial(_warn, config, kept)
    made = run_shards(folder, "neighbors", "chunks", neighbor_task, shards, executor, before=warn)
    for shard in shards:
        remove(_before(folder / shard.path))
    return made


def _shard(
    config: Config, method: Method, shard: int, own: list[SearchedShards], others: list[SearchedShards], size: int
) -> Shard:
    """The neighbors of a shard in the generations `own` and the datastores `others`."""
    path = path_of("neighbors", shard)
    out = config.datastore / path
    # The recipes of this shard for a datastore with one generation, two generations, …
    recipes = [_recipe(config, shard, own[:count], others) for count in range(1, len(own) + 1)]
    known = _set_aside(out, recipes) if config.neighbors.by_distance else 0
    searched = (*own[known:], *(() if known else others))
    arguments = (config.datastore, shard, config.neighbors, searched, method, _before(out) if known else None)
    return Shard(path, recipes[-1], arguments, size)


def _warn(config: Config, kept: int, unfinished: Sequence[Shard]) -> None:
    """Log what a search of these shards will not find; `kept` chunks are not searched again."""
    if not unfinished:
        return
    own, others = Datastore.open(config.datastore), config.neighbors.extra_datastores
    num_chunks = sum(datastore.train.num_chunks for datastore in (own, *open_others(own, others)))
    if config.neighbors.stored > num_chunks:
        log.warning(
            "neighbors.stored = %s, but there are only %s chunks to retrieve. Missing neighbors are stored as -1.",
            f"{config.neighbors.stored:,}",
            f"{num_chunks:,}",
        )
    if kept:
        log.info(
            "neighbors: %s earlier chunks keep their neighbors. To search the new chunks for them too: "
            "retro index CONFIG --stage neighbors --rebuild",
            f"{kept:,}",
        )


def _searched(config: Config) -> dict[str, str]:
    """The inputs of the neighbors of a chunk, in every searched datastore: name in the recipe → stage."""
    by_ngrams = {"ngrams": "ngrams"} if config.neighbors.search == "ngrams" else {}
    return {"chunks": "chunk", "embeddings": "embed", "index": "add"} | by_ngrams


def _generations(config: Config) -> list[SearchedShards]:
    folder, searched = config.datastore, list[SearchedShards]()
    for stage in _searched(config).values():
        Datastore.open(folder).require(stage)
    for generation in generations(folder):
        paths: dict[str, Any] = {name: path_of(name, generation) for name in _searched(config)}
        if not searched:
            paths["index"] = TUNED
        searched.append(SearchedShards(folder, generation, 0, finished(folder, paths)))
    return searched


def _others(config: Config) -> list[SearchedShards]:
    own, searched = Datastore.open(config.datastore), []
    for number, other in enumerate(open_others(own, config.neighbors.extra_datastores), start=1):
        for stage in _searched(config).values():
            other.require(stage)
        prints = {name: other.manifest["fingerprints"][stage] for name, stage in _searched(config).items()}
        searched.append(SearchedShards(other.folder, range(len(other.train.chunk_rows)), number, fingerprint(prints)))
    return searched


def _recipe(config: Config, shard: int, own: list[SearchedShards], others: list[SearchedShards]) -> Recipe:
    return Recipe(
        stage="neighbors",
        version=7 if config.neighbors.search == "ngrams" else 6,  # 7: until the lists have 512 entries
        settings=prefixed("neighbors", config.neighbors, without=("extra_datastores", "materialized"))
        | {"shard": shard},
        inputs={f"generation {number}": part.made for number, part in enumerate(own)}
        # The folder is not an input: a datastore that was moved is the same.
        | {f"neighbors.extra_datastores[{number}]": part.made for number, part in enumerate(others)},
    )


def _before(out: Path) -> Path:
    """Folder of a shard's neighbors until those in an appended generation have been merged with them."""
    return out.with_name(f"{out.name}.before")


def _num_searched(config: Config, own: list[SearchedShards], others: list[SearchedShards]) -> list[int]:
    """How many generations the chunks of each generation search, if nothing is merged.

    - As the datastore's manifest records: damaged shards get their bytes again.
    - Else as many as the finished shards of the generation have searched: stored neighbors stay.
    - Else all.
    """
    counts = range(1, len(own) + 1)
    recipes = [
        [[_recipe(config, shard, own[:count], others) for count in counts] for shard in generation.shards]
        for generation in own
    ]
    prints = [[[recipe.fingerprint for recipe in shard] for shard in shards] for shards in recipes]
    recorded = read_datastore_manifest(config.datastore)["fingerprints"].get("neighbors")
    for least in counts:  # generations when all were searched last
        stops = [max(number, least) for number in counts]
        made = zip(prints, stops, strict=True)
        if recorded == fingerprint([shard[stop - 1] for shards, stop in made for shard in shards]):
            return stops
    folder = config.datastore / "neighbors"
    return [
        max(made_by(folder / shard_name(shard), each) for shard, each in zip(generation.shards, some, strict=True))
        or len(own)
        for generation, some in zip(own, recipes, strict=True)
    ]


def _set_aside(out: Path, recipes: list[Recipe]) -> int:
    """Set the neighbors from the first generations aside; returns the number of these generations, 0 if none are
    usable."""
    if made_by(out, recipes[:-1]):
        remove(_before(out))
        remove(out.parent.with_name("materialized") / out.name)  # made from these neighbors, so made again
        remote.move(out, _before(out))
    return made_by(_before(out), recipes[:-1])


@kept_for_stage
def _open_searched(searched: tuple[SearchedShards, ...], method: Method) -> list[OpenIndex]:
    """The fingerprints in the key detect another index."""
    opened = []
    for part in searched:
        train = Datastore.open(part.folder).train
        opened.append(OpenIndex(open_index(train, part.shards, method), train, part.number))
    return opened


def neighbor_task(
    work: Path,
    folder: Path,
    shard: int,
    settings: NeighborSettings,
    searched: tuple[SearchedShards, ...],
    method: Method,
    before: Path | None,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Search the neighbors of one shard's chunks for all splits, and merge them with those of earlier generations."""
    opened, datastore = _open_searched(searched, method), Datastore.open(folder)
    own = datastore.train.first_shards(max(part.shards.stop for part in searched if part.number == 0))
    others = open_others(datastore, settings.extra_datastores)
    retrieval = RetrievalSet((own, *(other.train for other in others)))
    order = SharedTokens(token_weights(folder / "embedder"), retrieval) if settings.rerank == "tokens" else None
    search = NeighborSearch(opened, settings, order, NgramIndex.open(retrieval) if method == "ngrams" else None)
    counts: dict[str, Any] = {"search": method}
    for split in map(datastore.split, SPLITS):
        starts = split.tokens.starts
        counts[split.name] = neighbor_shard(
            work / split.name,
            split,
            (int(starts[shard]), int(starts[shard + 1])),
            search,
            before=(before / split.name, retrieval) if before else None,
            advance=advance,
        )
        if before:  # so that the counts equal those of one search of everything
            counts[split.name]["deeper"] += parse_manifest(before)["counts"][split.name]["deeper"]
    return counts


# --- materialize ------------------------------------------------------------------------------------------------------


def run_materialize(config: Config, executor: Executor) -> Artifacts:
    """Chunks and neighbors → the tokens of each chunk's first neighbors, next to the chunk.

    Raises:
        InputError: neighbors.materialized is 0, or a datastore that neighbors come from has changed.
    """
    folder, num_neighbors = config.datastore, config.neighbors.materialized
    others = config.neighbors.extra_datastores
    if not num_neighbors:
        raise InputError(
            "neighbors.materialized = 0: set how many neighbors of each chunk to write, for example data.k + 2."
        )
    sizes = chunks_in_shards(folder)

    def shard_of(shard: int) -> Shard:
        # The recipe of the neighbors names all chunks that were searched.
        inputs = {"neighbors": finished(folder, path_of("neighbors", shard))}
        recipe = Recipe("materialize", 1, {"neighbors.materialized": num_neighbors, "shard": shard}, inputs)
        return Shard(path_of("materialized", shard), recipe, (folder, shard, num_neighbors, others), sizes[shard])

    shards = map(shard_of, all_shards(folder))
    # It reads as many data as the search, so it runs on the workers of the search.
    return run_shards(folder, "neighbors", "chunks", materialize_task, shards, executor, name="materialize")


def materialize_task(
    work: Path, folder: Path, shard: int, num_neighbors: int, others: Sequence[Path], *, advance: Advance
) -> dict[str, Any]:
    """Write the neighbors of one shard's chunks, which may be in other datastores, for all splits."""
    datastore, counts = Datastore.open(folder), {}
    retrieval = RetrievalSet.of(datastore, others)
    for split in map(datastore.split, SPLITS):
        starts = split.tokens.starts
        rows = (int(starts[shard]), int(starts[shard + 1]))
        counts[split.name] = materialize_shard(
            work / split.name, split, rows, retrieval, num_neighbors, advance=advance
        )
    return counts
