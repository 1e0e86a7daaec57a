"""Where stages, training and serving run, and what each worker of a Ray cluster reserves."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexing.store.settings import SizeOrEmpty, settings, size_bytes

StageName = Literal["chunk", "embed", "train_index", "add", "sparse", "ngrams", "neighbors"]
_Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@settings
class Resources:
    """Number of workers of a stage on Ray, and what each of them reserves."""

    cpus: PositiveFloat = 1
    """CPUs of a worker. It uses as many threads."""
    gpus: NonNegativeFloat = 0
    """GPUs of a worker. With a fraction, workers share a GPU."""
    memory: SizeOrEmpty = ""
    """Memory of a worker (`8GB`), which limits how many workers Ray starts on a machine; empty: not reserved."""
    workers: NonNegativeInt = 0
    """Workers of the stage; 0 = as many as fit into the cluster."""

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes; 0 where none is reserved."""
        return size_bytes(self.memory)


@settings
class ExecutorChoice:
    """This machine or a Ray cluster."""

    kind: Literal["local", "ray"] = "local"
    """Place of work: `local` is this machine, `ray` is a Ray cluster."""
    ray_address: str = ""
    """Cluster to join (`auto`, `ray://…`); empty: the cluster that runs this job, or a new one on this machine."""


@settings
class ExecutorSettings(ExecutorChoice):
    """Executor of stages and training. `local`: shards on all cores of this machine, and training in this process or those
    of torchrun. `ray`: a pool of workers, and training by several workers. What a worker reserves is set by stage in
    `[executor.resources]`, or `--executor.resources.embed.gpus 1`."""

    workers: Annotated[int, Field(ge=0, lt=2**15)] = 0
    """Processes on this machine (`local`), each with a shard at a time; 0 = one for each core, as far as memory allows;
    1 = one shard after another in this process."""
    num_threads: Annotated[int, Field(ge=0, lt=2**15)] = 0
    """Threads of a worker, and of this process where it works; 0 = all cores, shared by the workers (local), or the
    worker's CPUs (Ray)."""
    resources: Mapping[StageName | Literal["train"], Resources] = field(default_factory=dict)
    """Workers on Ray by stage, where they differ from the default: `embed.gpus = 1`, `train.workers = 16`. Stages are
    `chunk`, `embed`, `train_index`, `add`, `sparse`, `ngrams`, `neighbors`, and `train` for training, whose `workers` =
    0 means one for each GPU of the cluster, or one in a cluster without GPUs."""
    train_failures: NonNegativeInt = 8
    """Number of times that Ray restarts training from the last checkpoint after a worker fails."""

    def resources_of(self, stage: StageName | Literal["train"]) -> Resources:
        """What a worker of a stage reserves."""
        return self.resources.get(stage, Resources())


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
