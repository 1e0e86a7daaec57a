"""The `sparse` stage: chunks → an inverted index over their terms, shard by shard."""

from pathlib import Path

from indexing.progress import Advance
from indexing.sparse.index import FOLDER
from indexing.sparse.segments import write_segments
from indexing.store.artifact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.shards import fingerprint_of, run_tasks, shard_task, shards


def run_sparse(config: Config, executor: Executor) -> str:
    """Chunks → an inverted index over their terms."""
    folder = config.datastore
    train = Datastore.open(folder).train
    todo = []
    for shard, source in enumerate(shards(folder, "chunks")):
        rows = (int(train.tokens.starts[shard]), int(train.tokens.starts[shard + 1]))
        recipe = Recipe("sparse", 2, {"first_id": rows[0]}, {"chunks": fingerprint_of(source)})
        out = folder / FOLDER / shard_name(shard)
        if not is_finished(out, recipe):
            todo.append(shard_task(out, recipe, train, rows, size=train.chunk_rows[shard]))
    run_tasks("sparse", "chunks", sparse_task, todo, executor)
    return fingerprint([fingerprint_of(path) for path in shards(folder, FOLDER)])


def sparse_task(out: Path, recipe: Recipe, train: Split, rows: tuple[int, int], *, advance: Advance) -> None:
    """Write the inverted lists of one shard."""
    with create(out, recipe) as (work, counts):
        counts["chunks"] = write_segments(work, train, rows, Tokenizer.open(train.folder / "tokenizer"), advance)
