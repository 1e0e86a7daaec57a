"""Settings of `[parallel]`: how the processes of a training run share a model and its batches."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import settings
from retro.model_settings import ModelSettings, flatten, updated

Checkpointing = Literal["none", "selective", "full"]


@settings
class ParallelSettings:
    """Parallelism of a training run. It does not change what the run computes."""

    data: NonNegativeInt = 0
    """Number of processes that share the sequences of a batch; 0 = all processes / (tensor * pipeline)."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """Tensors that data-parallel processes shard (ZeRO): 0 none, 1 the optimizer's moments, 2 also gradients, 3 also
    parameters."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and moments in the host's memory and run the optimizer there. Needs `zero` 1
    or more."""
    tensor: PositiveInt = 1
    """Number of processes that share heads and feed-forward features of every layer, and the sequence between
    blocks."""
    pipeline: PositiveInt = 1
    """Number of processes (stages) that share the layers, one after another."""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule: `1f1b`, one stage per process; `interleaved`, two stages per process (less waiting, more
    communication)."""
    microbatches: NonNegativeInt = 0
    """Parts of a batch that pass through a pipeline one after another; 0 = 2 * pipeline, if the batch is divisible by
    it."""
    expert: PositiveInt = 1
    """Number of data-parallel processes that share the experts of a layer. Tokens are sent to the process with their
    experts."""
    activation_checkpointing: Checkpointing = "none"
    """Activations that the backward pass recomputes: `none`; `selective`, all but those of matrix products and
    attention; `full`, all within a block."""

    def __post_init__(self) -> None:
        if self.cpu_offload and not self.zero:
            raise InputError(
                "parallel.cpu_offload = true needs parallel.zero of 1 or more: only sharded tensors are offloaded."
            )


ALONE = ParallelSettings()
"""A single process."""


def divided(model: ModelSettings, tensor: int) -> ModelSettings:
    """Settings of the part of a model that a process of tensor parallelism holds: some of the heads and features.

    Raises:
        InputError: the model cannot be divided this way.
    """
    values = flatten(model)
    for key in ("dropout", "experts.num_experts"):
        if values[key] and tensor > 1:
            raise InputError(f"model.{key} = {values[key]}: must be 0 with parallel.tensor = {tensor}.")
    check_reader(model, tensor=tensor)
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


def check_reader(model: ModelSettings, **sizes: int) -> None:
    """Raise InputError if a dimension divides the stream of a decoder that reads neighbors, which are packed into
    it."""
    for key, size in sizes.items():
        if size > 1 and model.decoder_reads:
            raise InputError(f"parallel.{key} = {size}: must be 1 with model.retrieval.reader = 'decoder'.")


def num_stages(settings: ParallelSettings, num_layers: int) -> int:
    """Number of stages of a pipeline, one or two per process.

    Raises:
        InputError: there are fewer layers.
    """
    stages = settings.pipeline * (2 if settings.pipeline_schedule == "interleaved" and settings.pipeline > 1 else 1)
    if stages > num_layers:
        raise InputError(
            f"parallel.pipeline = {settings.pipeline} with parallel.pipeline_schedule = {settings.pipeline_schedule!r} makes {stages} "
            f"stages: too many for model.num_layers = {num_layers}."
        )
    return stages


def num_microbatches(settings: ParallelSettings, num_rows: int) -> int:
    """Number of microbatches into which the sequences of a data-parallel process are divided.

    Raises:
        InputError: the sequences are not divisible.
    """
    fitting = [n for n in range(1, num_rows + 1) if num_rows % n == 0 and n >= settings.pipeline]
    if not fitting or settings.microbatches not in (0, *fitting):
        raise InputError(
            f"parallel.microbatches = {settings.microbatches}: each data-parallel process has {num_rows} sequences "
            f"(train.batch_size), to divide into at least parallel.pipeline = {settings.pipeline} equal parts. "
            + (f"Accepted are {', '.join(map(str, fitting))}." if fitting else "Raise train.batch_size.")
        )
    return settings.microbatches or max([n for n in fitting if n <= 2 * settings.pipeline], default=min(fitting))
