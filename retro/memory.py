"""Memory of a training run on each device, in bytes, by how the processes share the work.

    Sharing ─┬─ tensor: a model with fewer heads and features ─┐
             ├─ pipeline: some of its layers ──────────────────┼─► parameters ─ ZeRO ─► parameters, gradients, optimizer
             └─ data: fewer sequences ─────────────────────────┴─► `activations.trace` ─ checkpointing ─► activations, working

Parameters, gradients and AdamW's two moments are float32. Nothing runs here: models are on the meta device.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from indexing.store.errors import InputError
from retro.activations import Checkpointing, Pass, trace
from retro.loss import block_rows
from retro.model import Retro
from retro.model_settings import ModelSettings

Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Sharing:
    """How processes share a run.

    Attributes:
        data: processes that share the sequences of a batch.
        zero: what is divided over them: 0 nothing, 1 the optimizer's moments, 2 gradients too, 3 parameters too.
        offload: what is divided lies in the host's memory.
        tensor: processes that share heads and features.
        pipeline: processes that share the layers.
        schedule: of a pipeline; interleaved: two runs of layers for each process.
        microbatches: parts of a batch in a pipeline; 0 = twice as many as it has processes.
        checkpointing: of activations.
    """

    data: int = 1
    zero: Zero = 0
    offload: bool = False
    tensor: int = 1
    pipeline: int = 1
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    microbatches: int = 0
    checkpointing: Checkpointing = "none"


@dataclass(frozen=True)
class Memory:
    """What a process holds, in bytes.

    Attributes:
        parameters, gradients, optimizer: its part of them.
        gathered: whole parameters, and gradients of a unit, that it holds during a step beside its part of them.
        activations: kept by autograd between forward and backward pass.
        working: what the loss, or a block that is computed again, takes for a moment, and copies of weights that autocast holds.
        offloaded: whether the first three lie in the host's memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    working: int
    offloaded: bool

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return self.states if self.offloaded else 0

    @property
    def device(self) -> int:
        """Bytes on the device at the peak, as if all of it were there at one time: no step takes more."""
        return self.gathered + self.activations + self.working + (0 if self.offloaded else self.states)


def memory_of(
    settings: ModelSettings, run: Pass, sharing: Sharing, *, accumulation: int = 1, compiled: bool = False
) -> Memory:
    """The memory of the process that holds most.

    Args:
        settings: of the model; the vocabulary filled in.
        run: a forward pass of the whole batch, before it is divided.
        sharing: how processes share it.
        accumulation: passes of a step.
        compiled: whether the loss is compiled.

    Raises:
        InputError: the model or the batch cannot be divided so.
    """
    stages = range(sharing.pipeline)
    return max(
        (_memory_of_stage(settings, run, sharing, stage, accumulation, compiled) for stage in stages),
        key=lambda memory: memory.device,
    )


def _memory_of_stage(
    settings: ModelSettings, run: Pass, sharing: Sharing, stage: int, accumulation: int, compiled: bool
) -> Memory:
    units = parameter_units(settings, sharing, stage)
    states = state_bytes(units, sharing, accumulation)
    own, at_once = _own_pass(run, sharing, stage)
    divided, checkpointing, tensor = divided_settings(settings, sharing.tensor), sharing.checkpointing, sharing.tensor
    seen = _trace(divided, own).only(lambda name: _is_held(settings, name, sharing, stage))
    # Autocast holds one copy of each weight while it lasts: through a forward pass, or through all of a pipeline's step.
    copies, kept = sum(seen.copies.values()), seen.kept(checkpointing, tensor)
    shared = copies if checkpointing == "none" else 0
    forward = copies - shared + (_loss_bytes(settings, own, tensor, compiled) if _holds_loss(sharing, stage) else 0)
    again = seen.computed_again(checkpointing, tensor) + (copies - shared if sharing.pipeline > 1 else 0)
    return Memory(
        *states,
        gathered=_gathered_bytes(units, sharing),
        activations=round((kept - shared) * at_once) + shared,
        working=max(forward, again),
        offloaded=sharing.offload,
    )


def _holds_loss(sharing: Sharing, stage: int) -> bool:
    return stage == sharing.pipeline - 1


# ------------------------------------------------------------------------------------ parameters, gradients, optimizer


def divided_settings(settings: ModelSettings, tensor: int) -> ModelSettings:
    """The model that a process of tensor parallelism computes: all widths, but some of the heads and features.

    Raises:
        InputError: there are not as many heads or features.
    """
    sizes = ["num_heads", "d_ffw"] + ["encoder_num_heads", "encoder_d_ffw"] * bool(settings.cca_layers)
    for key in sizes:
        if getattr(settings, key) % tensor:
            raise InputError(
                f"parallel.tensor = {tensor}: model.{key} = {getattr(settings, key)} cannot be divided by it."
            )
    return replace(settings, **{key: getattr(settings, key) // tensor for key in sizes})


def parameter_units(settings: ModelSettings, sharing: Sharing, stage: int = 0) -> dict[str, list[torch.Size]]:
    """Shapes of the parameters of a process before ZeRO divides them, by what is gathered at a time.

    Units are attention and feed-forward of a layer, a CCA, the encoder, and (empty name) what is left.
    """
    units: dict[str, list[torch.Size]] = {}
    for name, shape in _shapes(divided_settings(settings, sharing.tensor)).items():
        if not _is_held(settings, name, sharing, stage):
            continue
        kind, number = (*name.split("."), "")[:2]
        unit = {"attention": f"layer {number}", "feed_forward": f"layer {number}", "cross": f"cross {number}"}.get(
            kind, "encoder" if kind == "encoder" else ""
        )
        units.setdefault(unit, []).append(shape)
    return units


@functools.lru_cache(maxsize=16)
def _shapes(settings: ModelSettings) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Retro(settings).named_parameters()}


def state_bytes(units: dict[str, list[torch.Size]], sharing: Sharing, accumulation: int = 1) -> tuple[int, int, int]:
    """Parameters, gradients and AdamW's state of a process between two steps (gradients: at the end of the backward pass).

    FSDP2 divides every tensor by rows and pads the last part, so the first process holds most.
    """
    shapes = [shape for unit in units.values() for shape in unit]
    whole = sum(shape.numel() for shape in shapes)
    part = sum(-(-shape[0] // sharing.data) * shape[1:].numel() for shape in shapes) if sharing.zero else whole
    # With ZeRO-1 the gradients of several passes are summed in full before they are divided.
    gradients = whole if sharing.zero == 1 and accumulation > 1 else part
    return 4 * part, 4 * gradients, 8 * part + 4 * len(shapes)  # two moments, and the number of steps for each tensor


def _gathered_bytes(units: dict[str, list[torch.Size]], sharing: Sharing) -> int:
    """Whole parameters beside the own part: all, or with ZeRO-3 the unit at work, the next one and what is left; and a unit's gradient.

    Without ZeRO the own part is everything, and FSDP2's `replicate` computes with a copy of it.
    """
    if sharing.data == 1:
        return 0
    sizes = {name: 4 * sum(shape.numel() for shape in shapes) for name, shapes in units.items()}
    largest = sorted((size for name, size in sizes.items() if name), reverse=True)[:2]
    held = sum(largest) + sizes.get("", 0) if sharing.zero == 3 else sum(sizes.values())
    return held + (max(largest, default=0) if sharing.zero else 0)


def sent_bytes(settings: ModelSettings, sharing: Sharing, accumulation: int = 1) -> int:
    """Bytes that a process sends in a step for parameters and gradients: 2X of X bytes of parameters, with ZeRO-3 3X.

    A sum over N processes, in a ring, is a division and a gathering, each of X (N - 1) / N. ZeRO-0 and -1 sum once a step, ZeRO-2 and -3
    in every pass of it; ZeRO-3 gathers once more in the backward pass. Tensor and pipeline parallelism send activations, not counted here.
    """
    sizes = [
        4 * sum(shape.numel() for unit in parameter_units(settings, sharing, stage).values() for shape in unit)
        for stage in range(sharing.pipeline)
    ]
    times = 3 * accumulation if sharing.zero == 3 else 2 * accumulation if sharing.zero == 2 else 2
    return round(times * max(sizes) * (sharing.data - 1) / sharing.data)


# --------------------------------------------------------------------------------------------------------- pipelines


def _is_held(settings: ModelSettings, name: str, sharing: Sharing, stage: int) -> bool:
    """Whether a process holds a parameter or block; the empty name is what stands outside of all: the loss."""
    runs = sharing.pipeline * (2 if sharing.schedule == "interleaved" and sharing.pipeline > 1 else 1)
    last, encodes = settings.num_layers - 1, min(settings.cca_layers, default=1) - 1
    kind, number = (*name.split("."), "")[:2]
    layers = {
        "attention": lambda: [int(number)],
        "feed_forward": lambda: [int(number)],
        "cross": lambda: [int(number) - 1],
        "encoder": lambda: [encodes],
        "embedding": lambda: [0] + [last] * settings.tied_embeddings + [encodes] * settings.shared_embeddings,
    }.get(kind, lambda: [last])()
    # Run r of R holds layers from L r // R to L (r + 1) // R, and a process every so manyeth run.
    return any(((layer + 1) * runs - 1) // settings.num_layers % sharing.pipeline == stage for layer in layers)


def _own_pass(run: Pass, sharing: Sharing, stage: int) -> tuple[Pass, float]:
    """What a process computes at a time, and of how many of these it keeps the activations.

    Raises:
        InputError: the batch cannot be divided.
    """
    microbatches = (sharing.microbatches or 2 * sharing.pipeline) if sharing.pipeline > 1 else 1
    each, rest = divmod(run.num_sequences, sharing.data * microbatches)
    if rest or not each:
        parts = f"{sharing.data} data-parallel processes" + (
            f" × {microbatches} microbatches" if microbatches > 1 else ""
        )
        raise InputError(f"train.batch_size = {run.num_sequences}: must be a multiple of the {parts}.")
    before = sharing.pipeline - stage
    at_once = float(min(before, microbatches))
    if (
        sharing.schedule == "interleaved" and sharing.pipeline > 1
    ):  # of two runs of layers, each half of what a process has
        at_once = min(2 * (before - 1) + sharing.pipeline + 1, 2 * microbatches) / 2
    return replace(run, num_sequences=each), at_once


# -------------------------------------------------------------------------------------------------------- activations

_trace = functools.lru_cache(maxsize=16)(trace)


def _loss_bytes(settings: ModelSettings, run: Pass, tensor: int, compiled: bool) -> int:
    """What the loss takes while it runs (`loss.py`): a block of logits with what is made of it, and the output layer twice."""
    rows = min(
        run.num_sequences * run.sequence_length // tensor, block_rows("cuda" if run.gpu else "cpu", settings.vocab_size)
    )
    width = 2 if run.narrow else 4
    # Float32 log-probabilities, probabilities, labels (with a byte for the mask) and slopes; a compiled kernel makes none of them.
    logit = width + (width if compiled else 17)
    table = settings.vocab_size * settings.d_model * width  # the gradient of a block, and a copy in 16 bits
    return rows * settings.vocab_size * logit + table * (2 if run.narrow else 1)
