"""Settings of `retro serve` on a Ray cluster."""

import math
from dataclasses import dataclass

from indexing.store.errors import InputError


@dataclass(frozen=True)
class ClusterSettings:
    """Placement of a datastore on a Ray cluster."""

    parts: int = 1
    """Parts of each datastore's index, at most one for each shard. A worker and its replicas hold a part in memory."""
    part_replicas: int = 1
    """Workers for each part."""
    part_cpus: float = 1
    """CPUs reserved for a part, and the number of its threads. Memory is reserved for the size of its files."""
    part_seconds: float = 2.0
    """Seconds to wait for a part. Answers without it are marked as partial."""
    retry_seconds: float = 5.0
    """Seconds without queries to a part that did not answer."""
    replicas: int = 1
    """Front ends. Each loads the embedder and, with a checkpoint, the model."""
    replica_cpus: float = 1
    """CPUs reserved for a front end."""
    replica_gpus: float = 0
    """GPUs reserved for a front end, for a model that generates."""

    def __post_init__(self) -> None:
        for key in ("parts", "part_replicas", "replicas"):
            if getattr(self, key) < 1:
                raise InputError(f"cluster.{key} = {getattr(self, key)}: must be at least 1.")
        for key in ("part_cpus", "part_seconds", "retry_seconds", "replica_cpus"):
            if not 0 < getattr(self, key) < math.inf:
                raise InputError(f"cluster.{key} = {getattr(self, key):g}: must be above 0.")
        if self.replica_gpus < 0:
            raise InputError(f"cluster.replica_gpus = {self.replica_gpus:g}: must be 0 or more.")
