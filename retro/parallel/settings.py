"""Settings of `[parallel]`: how the processes of a training run share a model and its batches."""

from dataclasses import dataclass
from typing import Literal

from indexing.store.errors import InputError
from retro.model.settings import ModelSettings, flatten, updated

Checkpointing = Literal["none", "selective", "full"]
Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes of a run share its work. What a run computes does not depend on it."""

    data: int = 0
    """Processes that share the sequences of a batch; 0 = as many as the other ways leave."""
    zero: Zero = 0
    """What is divided over them (ZeRO): 0 nothing, 1 the optimizer's moments, 2 gradients too, 3 parameters too."""
    cpu_offload: bool = False
    """Keep the divided parameters, gradients and moments in the host's memory, and step there; with `zero` from 1 on."""
    tensor: int = 1
    """Processes that share heads and feed-forward features of every layer, and the sequence between blocks."""
    pipeline: int = 1
    """Processes that share the layers, one after another."""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Of a pipeline: one run of layers for each process, or two (less waiting, more sending)."""
    microbatches: int = 0
    """Parts that pass through a pipeline one after another; 0 = twice as many as it has processes, if the batch can be cut so."""
    expert: int = 1
    """Data-parallel processes that share the experts of every layer that has some: tokens are sent to where theirs are."""
    activation_checkpointing: Checkpointing = "none"
    """Activations computed again in the backward pass: `none`; `selective`: all but matrix products and attention; `full`:
    everything within a block."""

    def __post_init__(self) -> None:
        for key, least in (("data", 0), ("tensor", 1), ("pipeline", 1), ("microbatches", 0), ("expert", 1)):
            if getattr(self, key) < least:
                raise InputError(f"parallel.{key} = {getattr(self, key)}: must be {least} or more.")
        if self.cpu_offload and not self.zero:
            raise InputError(
                "parallel.cpu_offload = true: needs parallel.zero from 1 on, as only what is divided is offloaded."
            )


ALONE = ParallelSettings()
"""One process, which does everything."""


def divided(model: ModelSettings, tensor: int) -> ModelSettings:
    """Settings of the part of a model that a process of tensor parallelism holds: some of the heads and features.

    Raises:
        InputError: the model cannot be divided this way.
    """
    values = flatten(model)
    for key in ("dropout", "experts.num_experts"):
        if values[key] and tensor > 1:
            raise InputError(f"model.{key} = {values[key]}: must be 0 with parallel.tensor = {tensor}.")
    keys = ["attention.num_heads", "attention.num_kv_heads", "d_ffw"]
    keys += ["encoder.num_heads", "encoder.d_ffw"] * bool(model.retrieval.cca_layers)
    for key in keys:
        if values[key] % tensor:
            raise InputError(f"parallel.tensor = {tensor}: model.{key} = {values[key]} is not divisible by it.")
    if model.chunk_length % tensor:  # sequences are divided by token and may have any number of chunks
        raise InputError(
            f"parallel.tensor = {tensor}: model.chunk_length = {model.chunk_length} is not divisible by it."
        )
    return updated(model, {key: values[key] // tensor for key in keys})


def num_stages(settings: ParallelSettings, num_layers: int) -> int:
    """Runs of layers that a pipeline consists of, one or two for each process.

    Raises:
        InputError: there are not as many layers.
    """
    stages = settings.pipeline * (2 if settings.pipeline_schedule == "interleaved" and settings.pipeline > 1 else 1)
    if stages > num_layers:
        raise InputError(
            f"parallel.pipeline = {settings.pipeline}, parallel.pipeline_schedule = {settings.pipeline_schedule!r}: make {stages} stages of "
            f"model.num_layers = {num_layers}, one layer each at least."
        )
    return stages


def num_microbatches(settings: ParallelSettings, num_rows: int) -> int:
    """Into how many parts the sequences of a data-parallel process are cut, so that they pass through a pipeline.

    Raises:
        InputError: they cannot be cut so.
    """
    fitting = [n for n in range(1, num_rows + 1) if num_rows % n == 0 and n >= settings.pipeline]
    if not fitting or settings.microbatches not in (0, *fitting):
        raise InputError(
            f"parallel.microbatches = {settings.microbatches}: train.batch_size leaves {num_rows} sequences to each data-parallel "
            f"process, to be cut into equal parts, parallel.pipeline = {settings.pipeline} at least"
            + (f": {', '.join(map(str, fitting))}." if fitting else "; raise train.batch_size.")
        )
    return settings.microbatches or max([n for n in fitting if n <= 2 * settings.pipeline], default=min(fitting))
