"""How `retro serve` uses a Ray cluster."""

import math
from dataclasses import dataclass

from indexing.store.errors import InputError


@dataclass(frozen=True)
class ClusterSettings:
    """How a datastore is spread over a Ray cluster."""

    parts: int = 1
    """Parts of the index of each datastore, at most its shards; each is held in memory by one worker and its replicas."""
    part_replicas: int = 1
    """Workers that hold the same part."""
    part_cpus: float = 1
    """CPUs reserved for a part, which is also how many threads it uses. Memory is reserved for the size of its files."""
    part_seconds: float = 2.0
    """Time for a part to answer; without it the answer is marked as partial."""
    retry_seconds: float = 5.0
    """How long a part that did not answer is left out before it is asked again."""
    replicas: int = 1
    """Front ends, each with the embedder and, with a checkpoint, the model."""
    replica_cpus: float = 1
    """CPUs reserved for a front end."""
    replica_gpus: float = 0
    """GPUs reserved for a front end: one that generates."""

    def __post_init__(self) -> None:
        for key in ("parts", "part_replicas", "replicas"):
            if getattr(self, key) < 1:
                raise InputError(f"cluster.{key} = {getattr(self, key)}: must be at least 1.")
        for key in ("part_cpus", "part_seconds", "retry_seconds", "replica_cpus"):
            if not 0 < getattr(self, key) < math.inf:
                raise InputError(f"cluster.{key} = {getattr(self, key):g}: must be above 0.")
        if self.replica_gpus < 0:
            raise InputError(f"cluster.replica_gpus = {self.replica_gpus:g}: must be 0 or more.")
