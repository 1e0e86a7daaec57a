"""Settings of `retro serve` on a Ray cluster."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from indexing.store.settings import settings

_Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@settings
class ClusterSettings:
    """Placement of a datastore on a Ray cluster."""

    parts: PositiveInt = 1
    """Parts of each datastore's index, at most one for each shard. A worker and its replicas hold a part in memory."""
    part_replicas: PositiveInt = 1
    """Workers for each part."""
    part_cpus: _Finite = 1
    """CPUs reserved for a part, and the number of its threads. Memory is reserved for the size of its files."""
    part_seconds: _Finite = 2.0
    """Seconds to wait for a part. Answers without it are marked as partial."""
    retry_seconds: _Finite = 5.0
    """Seconds without queries to a part that did not answer."""
    replicas: PositiveInt = 1
    """Front ends. Each loads the embedder and, with a checkpoint, the model."""
    replica_cpus: _Finite = 1
    """CPUs reserved for a front end."""
    replica_gpus: NonNegativeFloat = 0
    """GPUs reserved for a front end, for a model that generates."""
