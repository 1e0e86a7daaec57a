"""Estimate the memory of a training run on each device, in bytes, for any parallelism.

    parallel ┬─ tensor: a model with fewer heads and features ─┐
             ├─ pipeline: some of its layers ──────────────────┼─► parameters ─ ZeRO ─► parameters, gradients, optimizer
             └─ data: fewer sequences ─────────────────────────┴─► `trace` ─ checkpointing ─► activations, working

Activations and temporary tensors come from a trace of the pass of one device. States are counted by shape, as the mesh
divides them. Parameters, gradients and moments (two of AdamW, one of Muon) are float32. Models are on the meta device,
so estimates need no memory.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from indexing.store.errors import InputError
from retro.estimates.trace import Pass, trace
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import ModelSettings, updated
from retro.optimizers.muon import layer_matrices
from retro.parallel.data_parallel import matrices
from retro.parallel.settings import ParallelSettings, divided, num_microbatches, num_stages


@dataclass(frozen=True)
class Memory:
    """Memory of a process, in bytes.

    Attributes:
        parameters, gradients, optimizer: its shards of them.
        gathered: whole parameters, and gradients of a unit, that it holds during a step in addition to its shards.
        activations: tensors that remain between forward and backward pass.
        working: temporary tensors of the loss or of the backward pass of a layer, and autocast's copies of weights.
        step: the largest sum of gradients, activations and temporary tensors. While gradients grow, activations are
            freed.
        offloaded: whether the first three are in the host's memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    working: int
    step: int
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
        """The peak on the device."""
        return self.gathered + self.step + (0 if self.offloaded else self.parameters + self.optimizer)


class Held(NamedTuple):
    """A parameter of a process, before ZeRO shards it.

    Attributes:
        shape: of the parameter.
        by_muon: whether Muon updates it, if that is the optimizer: one moment. AdamW keeps two, and a number of steps.
    """

    shape: torch.Size
    by_muon: bool


def memory_of(
    settings: ModelSettings,
    run: Pass,
    parallel: ParallelSettings,
    *,
    accumulation: int = 1,
    compiled: bool = False,
    muon: bool = False,
) -> Memory:
    """Memory of the process with the highest peak.

    Args:
        settings: of the model, with vocab_size and chunk_length filled in.
        run: a forward pass of the whole batch.
        parallel: parallelism.
        accumulation: forward and backward passes of a step.
        compiled: whether the loss is compiled.
        muon: whether the optimizer is Muon. While it orthogonalizes a matrix, no activations exist, so the peak does
            not count it.

    Raises:
        InputError: the model or the batch cannot be divided this way.
    """
    stages = range(parallel.pipeline)
    return max(
        (_memory_of_stage(settings, run, parallel, stage, accumulation, compiled, muon) for stage in stages),
        key=lambda memory: memory.device,
    )


def _memory_of_stage(
    settings: ModelSettings,
    run: Pass,
    parallel: ParallelSettings,
    stage: int,
    accumulation: int,
    compiled: bool,
    muon: bool,
) -> Memory:
    units = parameter_units(settings, parallel, stage)
    parameters, gradients, optimizer = state_bytes(units, parallel, accumulation, muon=muon)
    own, at_once = _own_pass(run, parallel, stage)
    # FSDP2 gathers matrices in 16 bits. In a pipeline autocast copies them once for all microbatches.
    narrow_weights = run.narrow and (num_data(parallel) > 1 or parallel.pipeline > 1)
    copies = _narrow_bytes(units) if narrow_weights and num_data(parallel) == 1 else 0
    traced = trace(
        _with_own_experts(divided(settings, parallel.tensor), parallel),
        own,
        parallel.activation_checkpointing,
        narrow_weights=narrow_weights,
        compiled=compiled,
        token_shards=parallel.tensor,
    )
    held = [phase for phase in range(settings.num_layers + 2) if _holds_phase(settings, phase, parallel, stage)]
    activations = round(at_once * sum(traced.kept[phase] for phase in held))
    whole = sum(traced.gradients[phase] for phase in held)
    # When ZeRO shards gradients, each has a part of its bytes. From the second pass of a step on, all of them exist.
    share = 0.0 if parallel.cpu_offload else gradients / max(1, whole)
    before, remaining = whole if accumulation > 1 or parallel.pipeline > 1 else 0, activations
    peaks = [remaining + share * before + (traced.forward if held[-1] > settings.num_layers else 0)]
    for phase in reversed(held):
        together, working = traced.together[phase], traced.working[phase]
        peaks.append(remaining + share * before + max(working, share * together + (1 - share) * working))
        before, remaining = min(whole, before + traced.gradients[phase]), remaining - traced.kept[phase]
    return Memory(
        parameters,
        gradients,
        optimizer,
        gathered=_gathered_bytes(units, parallel, narrow=run.narrow),
        activations=activations,
        working=max(traced.forward, *(traced.working[phase] for phase in held)) + copies,
        step=round(max(peaks)) + copies,
        offloaded=parallel.cpu_offload,
    )


def _holds_phase(settings: ModelSettings, phase: int, parallel: ParallelSettings, stage: int) -> bool:
    """True if a process runs a phase of `Trace`."""
    last = phase > settings.num_layers
    name = "" if last else f"attention.{phase - 1}" if phase else "position_embedding"
    return _is_held(settings, name, parallel, stage)


# ------------------------------------------------------------------------------------ parameters, gradients, optimizer


def parameter_units(settings: ModelSettings, parallel: ParallelSettings, stage: int = 0) -> dict[str, list[Held]]:
    """The parameters of a process before ZeRO shards them, by the unit in which they are gathered.

    Units are the matrices of attention and feed-forward of a layer, of experts that processes share, of a CCA and of
    the encoder, the encoder's own table, and (empty name) the rest.

    Raises:
        InputError: the model cannot be divided this way.
    """
    _check_experts(settings, parallel)
    units: dict[str, list[Held]] = {}
    for name, (shape, is_multiplied, by_muon) in _parameters(divided(settings, parallel.tensor)).items():
        if not _is_held(settings, name, parallel, stage):
            continue
        kind, number = (*name.split("."), "")[:2]
        layer = f"layer {number}"
        kinds = {"attention": layer, "feed_forward": layer, "cross": f"cross {number}", "encoder": "encoder"}
        unit = kinds.get(kind, "") if is_multiplied else _TABLE if name == _TABLE else ""
        if parallel.expert > 1 and ".experts." in name:
            unit, shape = f"experts {number}", torch.Size((shape[0] // parallel.expert, *shape[1:]))
        units.setdefault(unit, []).append(Held(shape, by_muon))
    return units


_TABLE = "encoder.embedding.weight"


@functools.lru_cache(maxsize=16)
def _parameters(settings: ModelSettings) -> dict[str, tuple[torch.Size, bool, bool]]:
    """The shape of each parameter, whether it is one of `matrices`, and whether Muon updates it, by name."""
    with shapes_only():
        model = Retro(settings)
    multiplied, of_muon = matrices(model), layer_matrices(model)
    return {name: (p.shape, name in multiplied, name in of_muon) for name, p in model.named_parameters()}


def state_bytes(
    units: dict[str, list[Held]], parallel: ParallelSettings, accumulation: int = 1, *, muon: bool = False
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and the optimizer's state of a process.

    FSDP2 shards every tensor by rows and pads the last shard, so the first process holds most.
    """
    whole = part = moments = 0
    for name, unit in units.items():
        holders = _num_holders(name, parallel) if parallel.zero else 1
        for shape, by_muon in unit:
            own = -(-shape[0] // holders) * shape[1:].numel()
            whole, part = whole + shape.numel(), part + own
            moments += 4 * own if muon and by_muon else 8 * own + 4  # AdamW's number of steps of each tensor
    # With ZeRO-1 the gradients of several passes are summed in full before they are divided.
    gradients = whole if parallel.zero == 1 and accumulation > 1 else part
    return 4 * part, 4 * gradients, moments


def _num_holders(unit: str, parallel: ParallelSettings) -> int:
    """Number of data-parallel processes over which a unit is sharded; those that share experts hold different ones."""
    return num_data(parallel) // (parallel.expert if unit.startswith("experts ") else 1)


def _check_experts(settings: ModelSettings, parallel: ParallelSettings) -> None:
    """Raise InputError if processes cannot share the experts this way."""
    expert = parallel.expert
    if expert > 1 and not settings.experts.num_experts:
        raise InputError(f"parallel.expert = {expert}: the model has no experts (model.experts.num_experts = 0).")
    if num_data(parallel) % expert:
        raise InputError(
            f"parallel.expert = {expert}: must divide the number of data-parallel processes, {num_data(parallel)}."
        )
    if settings.experts.num_experts % expert:
        raise InputError(
            f"model.experts.num_experts = {settings.experts.num_experts}: should be a multiple of parallel.expert = {expert}."
        )


def _with_own_experts(settings: ModelSettings, parallel: ParallelSettings) -> ModelSettings:
    """A model with the activations of a process that holds some of the experts: it has fewer, proportionally longer
    queues."""
    own = settings.experts.num_experts // parallel.expert
    return updated(settings, {"experts.num_experts": own}) if own >= max(2, settings.experts.per_token) else settings


def _gathered_bytes(units: dict[str, list[Held]], parallel: ParallelSettings, *, narrow: bool) -> int:
    """Bytes of gathered parameters: all, or with ZeRO-3 the current unit, the next one and the rest; and of a unit's
    gradient.

    Without ZeRO, FSDP2's `replicate` computes with a copy of all parameters. Gradients are reduced in float32.
    """
    if num_data(parallel) == 1:
        return 0
    counts = {name: sum(held.shape.numel() for held in unit) for name, unit in units.items()}
    sizes = {name: _bytes_of_number(name, narrow) * count for name, count in counts.items()}
    largest = sorted((size for name, size in sizes.items() if name), reverse=True)[:2]
    held = sum(largest) + sizes.get("", 0) if parallel.zero == 3 else sum(sizes.values())
    return held + (max((4 * count for name, count in counts.items() if name), default=0) if parallel.zero else 0)


def _narrow_bytes(units: dict[str, list[Held]]) -> int:
    """Bytes of 16-bit copies of the matrices."""
    return sum(2 * held.shape.numel() for name, unit in units.items() if name not in ("", _TABLE) for held in unit)


def _bytes_of_number(unit: str, narrow: bool) -> int:
    """Bytes of a gathered number: matrices are gathered in 16 bits if they are multiplied in 16 bits."""
    return 2 if narrow and unit not in ("", _TABLE) else 4


def sent_bytes(
    settings: ModelSettings, parallel: ParallelSettings, accumulation: int = 1, *, narrow: bool = False
) -> int:
    """Bytes that a process sends in a step to sum gradients and gather parameters.

    Of X bytes, a reduce-scatter and an all-gather over N processes in a ring send X (N - 1) / N bytes each, an
    all-reduce twice as many. ZeRO-0 and -1 reduce once per step, ZeRO-2 and -3 in every pass. ZeRO-0 gathers gradients,
    ZeRO-1 and -2 parameters once per step, ZeRO-3 twice in every pass. Activations that tensor and pipeline parallelism
    send do not count.

    Args:
        settings: of the model.
        parallel: parallelism.
        accumulation: forward and backward passes of a step.
        narrow: whether matrix products run in 16 bits: so are matrices gathered.
    """
    reductions, gathers = accumulation if parallel.zero > 1 else 1, 2 * accumulation if parallel.zero == 3 else 1

    def summed(stage: int) -> float:
        total = 0.0
        for name, unit in parameter_units(settings, parallel, stage).items():
            per_number = reductions * 4 + gathers * _bytes_of_number(name, narrow and parallel.zero > 0)
            total += per_number * sum(held.shape.numel() for held in unit) * (1 - 1 / _num_holders(name, parallel))
        return total

    return round(max(map(summed, range(parallel.pipeline))))


# --------------------------------------------------------------------------------------------------------- pipelines


def _is_held(settings: ModelSettings, name: str, parallel: ParallelSettings, stage: int) -> bool:
    """True if a process holds a parameter or block. The empty name means the loss."""
    runs = num_stages(parallel, settings.num_layers)
    last, encodes = settings.num_layers - 1, min(settings.retrieval.cca_layers, default=1) - 1
    kind, index = (*name.split("."), "")[:2]
    layers = {
        "attention": lambda: [int(index)],
        "feed_forward": lambda: [int(index)],
        "cross": lambda: [int(index) - 1],
        "encoder": lambda: [encodes],
        "position_embedding": lambda: [0],
        "chunk_embedding": lambda: [0],
        "embedding": lambda: [0] + [last] * settings.tied_embeddings + [encodes] * settings.shared_embeddings,
    }.get(kind, lambda: [last])()
    # Stage r of R has layers L r // R to L (r + 1) // R, and process p of P has stages p, p + P …
    return any(((layer + 1) * runs - 1) // settings.num_layers % parallel.pipeline == stage for layer in layers)


def _own_pass(run: Pass, parallel: ParallelSettings, stage: int) -> tuple[Pass, float]:
    """The forward pass that a process computes at a time, and the number of such passes whose activations it keeps.

    Raises:
        InputError: the batch cannot be divided.
    """
    own, rest = divmod(run.num_sequences, num_data(parallel))
    if rest or not own:
        raise InputError(
            f"train.batch_size = {run.num_sequences}: must be a multiple of the {num_data(parallel)} data-parallel processes."
        )
    if parallel.pipeline == 1:
        return replace(run, num_sequences=own), 1.0
    microbatches, before = num_microbatches(parallel, own), parallel.pipeline - stage
    at_once = float(min(before, microbatches))
    if parallel.pipeline_schedule == "interleaved":  # two stages per process, each with half of its layers
        at_once = min(2 * (before - 1) + parallel.pipeline + 1, 2 * microbatches) / 2
    return replace(run, num_sequences=own // microbatches), at_once


def num_data(parallel: ParallelSettings) -> int:
    """Number of data-parallel processes; 0 (all that there are) counts as one."""
    return parallel.data or 1
