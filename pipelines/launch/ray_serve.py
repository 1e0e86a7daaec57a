"""A datastore on Ray Serve: workers that hold parts of the index, and front ends that query all parts.

    clients ─► proxies ─► front ends (API, embedder, model) ─┬─► part 0: shards 0 to 3 of the index and their embeddings
                                                             ├─► part 1: shards 4 to 7
                                                             └─► …
    an answer names parts that do not answer in time (`partial`, `missing`); they receive no queries for a while

A part reranks its candidates by exact distances, so it reads the embeddings of its own shards, and only ids and
distances cross the network.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from indexing.index.exact_search import rerank
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.search import merge_nearest
from indexing.retrieval.candidates import PartsMissing
from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
from pipelines.executors.ray_cluster import connect
from pipelines.executors.settings import ClusterSettings
from pipelines.executors.tasks import use_threads
from retro.checkpoints.checkpoint import open_checkpoint
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings

log = logging.getLogger("retro")

APPLICATION = "retro"
_BYTES_MARGIN = 1.2  # memory of an index over the size of its files: Faiss keeps more than the codes
# As `retro serve` on one machine (pipelines/cli/main.py).
_SLEEPING = {"runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}}


@dataclass(frozen=True)
class Served:
    """What is served, and its limits.

    Attributes:
        datastores: locations that every node can read; several are searched as one.
        checkpoint: of the model; empty: no model.
        device: of the model.
        token: bearer token of requests; empty: none.
        settings: the limits of each front end.
    """

    datastores: tuple[str, ...]
    checkpoint: str = ""
    device: str = "auto"
    token: str = ""
    settings: ServeSettings = field(default_factory=ServeSettings)


# --- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartOf:
    """Some shards of one datastore of the retrieval set.

    Attributes:
        name: in answers that lack this part.
        deployment: its name in Ray Serve.
        datastore: index in the retrieval set.
        folder: of the datastore.
        shards: their numbers.
    """

    name: str
    deployment: str
    datastore: int
    folder: Path
    shards: range

    @property
    def bytes(self) -> int:
        """Of the shards' index files."""
        folders = (self.folder / "index" / shard_name(shard) for shard in self.shards)
        return sum(read_manifest(folder)["files"]["vectors.faiss"]["bytes"] for folder in folders)


def parts_of(splits: Sequence[Split], count: int) -> list[PartOf]:
    """Divide the shards of every datastore into `count` parts, or one part for each shard if there are fewer."""
    parts = []
    for index, split in enumerate(splits):
        num_shards = len(split.chunk_rows)
        pieces = min(count, num_shards)
        borders = [round(piece * num_shards / pieces) for piece in range(pieces + 1)]
        for piece in range(pieces):
            shards = range(borders[piece], borders[piece + 1])
            name = f"{split.folder.name}/index/{shard_name(shards[0])} to {shard_name(shards[-1])}"
            parts.append(PartOf(name, f"part-{index}-{piece}", index, split.folder, shards))
    return parts


class IndexPart:
    """Some shards of an index, in the memory of one worker."""

    def __init__(self, part: PartOf, threads: int) -> None:
        use_threads(threads)
        self.split = Datastore.open(part.folder).train
        self.index = ShardedIndex.open(part.folder / "index", part.shards)

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [n, d] → ids [n, k] int64 (-1 = none) and exact squared distances [n, k], nearest first."""
        distances, ids = rerank(vectors, self.index.search(vectors, k), self.split.embeddings)
        return ids, distances


class RemoteIndex:
    """The parts of one datastore's index as one index; see `indexing.retrieval.candidates.SearchableIndex`.

    Args:
        handles: of the parts by name.
        num_vectors: of all parts.
        part_seconds, retry_seconds: as in `ClusterSettings`.
    """

    def __init__(self, handles: dict[str, Any], num_vectors: int, part_seconds: float, retry_seconds: float) -> None:
        self.handles, self.num_vectors = handles, num_vectors
        self.part_seconds, self.retry_seconds = part_seconds, retry_seconds
        self._left_out: dict[str, float] = {}  # until when

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Query all parts at once: [n, d] float32 → ids [n, k] int64.

        Raises:
            PartsMissing: some parts did not answer now or recently.
        """
        now = time.monotonic()
        sent = {
            name: handle.search.remote(queries, k)
            for name, handle in self.handles.items()
            if self._left_out.get(name, 0) <= now
        }
        answers = [
            (np.full((len(queries), k), -1, dtype=np.int64), np.full((len(queries), k), np.inf, dtype=np.float32))
        ]
        missing = [name for name in self.handles if name not in sent]
        for name, response in sent.items():
            answer = self._answer(name, response, now + self.part_seconds)
            if answer is None:
                missing.append(name)
            else:
                answers.append(answer)
        ids, _ = merge_nearest(answers, k)
        if missing:
            raise PartsMissing(missing, ids)
        return ids

    def _answer(self, name: str, response: Any, deadline: float) -> tuple[np.ndarray, np.ndarray] | None:
        import ray
        from ray.serve.exceptions import RayServeException

        try:
            answer: tuple[np.ndarray, np.ndarray] = response.result(timeout_s=max(0.0, deadline - time.monotonic()))
        except (TimeoutError, RayServeException, ray.exceptions.RayActorError) as error:
            log.warning("part %s of the index did not answer: %s", name, type(error).__name__)
            self._left_out[name] = time.monotonic() + self.retry_seconds
            response.cancel()
            return None
        return answer


# --- the application -------------------------------------------------------------------------------------------------


def application(served: Served, cluster: ClusterSettings) -> Any:
    """The application for `serve.run`.

    Raises:
        InputError: a datastore or the checkpoint cannot be opened.
    """
    from ray import serve

    if served.checkpoint:
        open_checkpoint(Path(served.checkpoint))
    retriever = Retriever.open(*served.datastores, indexes=())
    parts = parts_of(retriever.retrieval.splits, cluster.parts) if retriever.dense else []
    threads = max(1, int(cluster.part_cpus))
    bound = []
    for part in parts:
        deployment = serve.deployment(IndexPart).options(
            name=part.deployment,
            num_replicas=cluster.part_replicas,
            ray_actor_options=_SLEEPING | {"num_cpus": cluster.part_cpus, "memory": int(_BYTES_MARGIN * part.bytes)},
        )
        bound.append(deployment.bind(part, threads))
    front_end = serve.deployment(serve.ingress(lambda: front_end_app(served, cluster, parts))()).options(
        name="front-end",
        num_replicas=cluster.replicas,
        max_ongoing_requests=2 * served.settings.max_requests,  # the front end itself answers 429 to more
        ray_actor_options=_SLEEPING | {"num_cpus": cluster.replica_cpus, "num_gpus": cluster.replica_gpus},
    )
    return front_end.bind(*bound)


def front_end_app(served: Served, cluster: ClusterSettings, parts: Sequence[PartOf]) -> Any:
    """The HTTP API in a front end's process. It searches the index through handles of the parts."""
    from ray import serve

    use_threads(max(1, int(cluster.replica_cpus)))
    retriever = Retriever.open(*served.datastores, indexes=())
    indexes = []
    for index, split in enumerate(retriever.retrieval.splits):
        of_datastore = [part for part in parts if part.datastore == index]
        handles = {part.name: serve.get_deployment_handle(part.deployment, APPLICATION) for part in of_datastore}
        indexes.append(RemoteIndex(handles, split.num_chunks, cluster.part_seconds, cluster.retry_seconds))
    retriever = replace(retriever, dense=retriever.dense and replace(retriever.dense, indexes=tuple(indexes)))
    model = None
    if served.checkpoint:
        size = served.settings.neighbor_cache_bytes
        model = LanguageModel.open(served.checkpoint, retriever, served.device, neighbor_cache_bytes=size)
    return make_app(retriever, model, served.settings, token=served.token)


@contextmanager
def serve_on_ray(served: Served, cluster: ClusterSettings, address: str, host: str, port: int) -> Iterator[str]:
    """Deploy, yield the URL when the application is ready, and delete the application at the end.

    Raises:
        InputError: no cluster answers at the address, or a datastore or the checkpoint cannot be opened.
    """
    from ray import serve

    app = application(served, cluster)
    connect(address)
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": served.settings.request_seconds + 5})
    try:
        serve.run(app, name=APPLICATION)
        yield f"http://{host}:{port}"
    finally:
        serve.delete(APPLICATION)
