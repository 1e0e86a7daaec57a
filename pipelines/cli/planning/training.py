"""`retro plan train [CONFIG]`: parameters, operations, memory by mode, and time of a training run.

    [model] [data] [train]  +  --devices, --device-memory, --tokens, --peak-tflops, --mfu  (or --measured RUN)
        ├─ retro/estimates/flops.py   ─► operations of a token ─► seconds of a step, days
        └─ retro/estimates/training_memory.py  ─► a row for each ZeRO stage × checkpointing × offload; the cheapest that fits

Nothing is trained and no device is used. docs/results/speed.md compares the figures with measurements.
"""

import itertools
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from pydantic import Field, PositiveInt

from indexing.store.errors import InputError
from indexing.store.schemas import parsed
from indexing.store.settings import Fraction, Size, settings, size_bytes
from indexing.tokenization.installation import open_installed
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.results import ResultOptions
from pipelines.config import Config
from pipelines.terminal.output import aligned
from pipelines.terminal.units import human_bytes, human_count, long_time
from retro.adapters.settings import NO_LORA, LoraSettings, Weights
from retro.data.settings import DataSettings
from retro.model_settings import ModelSettings, from_json
from retro.parallel.settings import Checkpointing, ParallelSettings, num_microbatches

if TYPE_CHECKING:
    from retro.estimates.training_memory import Memory

_RECOMPUTATION: dict[Checkpointing, float] = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
"""Operations relative to no checkpointing: full checkpointing adds a forward pass to three; selective adds none."""


@settings
class PlanTrainOptions(Config, ResultOptions):
    """Estimate memory by ZeRO stage, checkpointing and offload, and time of a training run."""

    devices: PositiveInt = 8
    """Number of devices, with one process each."""
    device_memory: Size = "80GB"
    """Memory of each device (`24GB`, `80GB`). A tenth of it is reserved for the runtime and fragmentation."""
    tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Tokens to train on (2e12); 0 = as set by `train.steps`."""
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 989.0
    """Peak of a device in 10^12 operations per second: 989 for bfloat16 on an H100 or H200, 312 on an A100."""
    mfu: Fraction = 0.0
    """Model FLOPs utilization: fraction of the peak that training reaches (0.4); 0 = unknown, so no times. Small models
    reach less."""
    measured: str = ""
    """Folder of a run on the same kind of devices. Its `tokens_per_second` replaces `peak_tflops` and `mfu`."""
    measured_devices: PositiveInt = 1
    """Number of devices of that run."""
    all_modes: bool = False
    """Print all combinations of ZeRO, checkpointing and offload. The default prints the cheapest, the cheapest that
    fits, and the one with the least memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        others, data = self.parallel.tensor * self.parallel.pipeline, self.parallel.data
        if self.devices % others or data * others not in (0, self.devices):
            raise InputError(
                f"devices = {self.devices}: must be pipeline {self.parallel.pipeline} × data {data or 'any'} × tensor {self.parallel.tensor} "
                "of [parallel]."
            )


@dataclass(frozen=True)
class ParallelMode:
    """A combination of parallel settings.

    Attributes:
        parallel: the settings.
        memory: of the device with the largest memory use.
        sent_bytes: parameters and gradients that a device sends in a step.
        step_seconds: time of an optimizer step; None without `measured` and `mfu`.
        days: time for all tokens, or None.
        fits: whether it fits into the device memory.
    """

    parallel: ParallelSettings
    memory: "Memory"
    sent_bytes: int
    step_seconds: float | None
    days: float | None
    fits: bool


@dataclass(frozen=True)
class TrainPlan:
    """Plan of a training run.

    Attributes:
        parameters: without embeddings, as in the paper.
        all_parameters: with them.
        flops_per_token: of forward and backward pass.
        tokens: to train on.
        tokens_per_step: of all devices.
        num_sequences: of a device in a forward pass.
        device_flops: expected operations per second of a device; 0 = unknown.
        modes: from the cheapest to the most expensive.
    """

    parameters: int
    all_parameters: int
    flops_per_token: float
    tokens: float
    tokens_per_step: int
    num_sequences: int
    device_flops: float
    modes: list[ParallelMode]

    @property
    def cheapest(self) -> ParallelMode | None:
        """The first mode that fits."""
        return next((mode for mode in self.modes if mode.fits), None)


def plan_train(options: PlanTrainOptions) -> int:
    """`retro plan train [CONFIG]`."""
    plan = plan_training(options)
    blocks = ["\n".join(aligned(rows)) for rows in tables(plan, options)]
    options.deliver(asdict(plan), "\n\n".join([*blocks, advice(plan, options)]))
    return 0


# ------------------------------------------------------------------------------------------------------------ planning


def vocabulary(settings: TokenizerSettings) -> int:
    """Tokens of a model's vocabulary: those of the tokenizer at `tokenizer.path`, or those that a trained one has at most.

    Raises:
        InputError: the tokenizer cannot be read.
    """
    if settings.is_trained or not Path(settings.path).expanduser().exists():
        return settings.vocab_size
    return open_installed(settings).vocab_size


def plan_training(options: PlanTrainOptions) -> TrainPlan:
    """Plan a run.

    Raises:
        InputError: model or batch cannot be divided among the devices, or the measured run has no rates.
    """
    from retro.checkpoints.checkpoint import open_checkpoint
    from retro.estimates.trace import Pass
    from retro.estimates.training_memory import memory_of, sent_bytes
    from retro.model.presets import count_parameters, resolve
    from retro.model.retro import Retro
    from retro.model.shapes import shapes_only

    start = options.train.init_from if options.model.preset == "base" else ""
    model = resolve(options.model, open_checkpoint(Path(start)).model if start else None)
    vocab_size, chunk_length = model.vocab_size or vocabulary(options.tokenizer), options.chunks.chunk_length
    model = replace(model, vocab_size=vocab_size, chunk_length=model.chunk_length or chunk_length)
    data, train = options.data, options.train.for_model(options.model.preset)
    if data.sequence_length % model.chunk_length:
        raise InputError(
            f"data.sequence_length = {data.sequence_length}: must be a multiple of model.chunk_length = {model.chunk_length}."
        )
    with shapes_only():
        retro = Retro(model)
    per_token = flops_per_token(model, data, train.weights, options.lora)
    per_step = train.batch_size * train.gradient_accumulation_steps * data.sequence_length
    rate = (
        measured_flops(Path(options.measured), options.measured_devices)
        if options.measured
        else options.peak_tflops * 1e12 * options.mfu
    )
    tokens = options.tokens or float(train.steps * per_step)
    step_seconds = per_step * per_token / (options.devices * rate) / _busy(options) if rate else 0.0
    gpu = train.device != "cpu"
    run = Pass(train.batch_size, data.sequence_length, data.k, train.precision != "float32", gpu)
    budget, modes = 0.9 * size_bytes(options.device_memory), []
    for parallel in modes_of(options):
        memory = memory_of(
            model,
            run,
            parallel,
            accumulation=train.gradient_accumulation_steps,
            compiled=gpu and train.compile != "no",
            muon=train.optimizer == "muon",
        )
        seconds = step_seconds * _RECOMPUTATION[parallel.activation_checkpointing] if rate else None
        sent = sent_bytes(model, parallel, train.gradient_accumulation_steps, narrow=run.narrow)
        days = None if seconds is None else seconds * tokens / per_step / 86_400
        modes.append(ParallelMode(parallel, memory, sent, seconds, days, memory.device <= budget))
    return TrainPlan(
        parameters=count_parameters(retro),
        all_parameters=count_parameters(retro, embeddings=True),
        flops_per_token=per_token,
        tokens=tokens,
        tokens_per_step=per_step,
        num_sequences=train.batch_size // _num_data(options),
        device_flops=rate,
        modes=modes,
    )


def modes_of(options: PlanTrainOptions) -> list[ParallelSettings]:
    """All modes, cheapest first. Offload costs most, then recomputation, then communication."""
    data = _num_data(options)
    zeros = range(4) if data > 1 else (0,)
    return [
        replace(options.parallel, data=data, zero=zero, cpu_offload=offload, activation_checkpointing=checkpointing)
        for offload, checkpointing, zero in itertools.product((False, True), get_args(Checkpointing), zeros)
        if zero or not offload
    ]


def _num_data(options: PlanTrainOptions) -> int:
    return options.devices // (options.parallel.tensor * options.parallel.pipeline)


def flops_per_token(
    model: ModelSettings, data: DataSettings, trained: Weights = "all", lora: LoraSettings = NO_LORA
) -> float:
    """Training operations per token, as MFU counts them (`retro/estimates/flops.py`)."""
    from retro.estimates.flops import training_flops

    return training_flops(model, data.sequence_length, data.k, trained, lora) / data.sequence_length


def measured_flops(run: Path, num_devices: int) -> float:
    """Operations per second of a device in a finished run: the median of its rates times the operations per token.

    Raises:
        InputError: the folder is not a run, or has no rates yet.
    """
    from retro.checkpoints.checkpoint import latest, read
    from retro.training.run_folder import read_metrics, read_sections

    sections = read_sections(run)
    rates = [line["tokens_per_second"] for line in read_metrics(run) if "tokens_per_second" in line]
    if not rates:
        raise InputError(
            f"{run / 'metrics.jsonl'}: no line has tokens_per_second yet. Wait until the run has logged a step."
        )
    if folder := latest(run):
        read(folder)  # refuses a run of another format version
    model, weights = from_json(sections["model"]), sections["train"].get("weights", "all")
    file = run / "settings.json"
    data = parsed(DataSettings, sections["data"], file, "data")
    lora = parsed(LoraSettings, sections.get("lora", {}), file, "lora")
    flops = flops_per_token(model, data, weights, lora)
    return statistics.median(rates) * flops / num_devices


def _busy(options: PlanTrainOptions) -> float:
    """Fraction of the time in which a device of a pipeline computes. It waits for the first microbatch and after the
    last one."""
    parallel = options.parallel
    if parallel.pipeline == 1:
        return 1.0
    runs = num_microbatches(parallel, options.train.batch_size // _num_data(options))
    runs *= 2 if parallel.pipeline_schedule == "interleaved" else 1
    return runs / (runs + parallel.pipeline - 1)


# ------------------------------------------------------------------------------------------------------------ reporting


def tables(plan: TrainPlan, options: PlanTrainOptions) -> list[list[list[str]]]:
    """Two tables: the run, and the modes."""
    data, train = options.data, options.train
    of_peak = "measured" if options.measured else f"{options.mfu:.0%} of {options.peak_tflops:g}"
    rate = f", {plan.device_flops / 1e12:,.3g} TFLOP/s each ({of_peak})" if plan.device_flops else ""
    what = [
        ["parameters", f"{plan.parameters:,}; {plan.all_parameters:,} with embeddings"],
        [
            "operations",
            f"{plan.flops_per_token / 1e9:,.2f} GFLOP per token, n = {data.sequence_length:,}, k = {data.k}",
        ],
        ["devices", f"{options.devices:,} of {options.device_memory}{rate}"],
        [
            "step",
            f"{human_count(plan.tokens_per_step)} tokens: {train.gradient_accumulation_steps} × {train.batch_size} sequences, "
            f"{plan.num_sequences} per device and pass",
        ],
        ["tokens", f"{plan.tokens:,.0f} in {plan.tokens / plan.tokens_per_step:,.0f} steps"],
    ]
    head = ["ZeRO", "checkpointing", "offload", "parameters", "gradients", "optimizer", "gathered", "activations"]
    modes = [[*head, "working", "device", "host", "sent per step", "step", "all tokens", "fits"]]
    for mode in plan.modes if options.all_modes else _notable(plan):
        parallel, memory = mode.parallel, mode.memory
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.activations)
        modes.append(
            [
                *(str(parallel.zero), parallel.activation_checkpointing, "yes" if parallel.cpu_offload else ""),
                *map(human_bytes, (*parts, memory.working, memory.device, memory.host, mode.sent_bytes)),
                *_times(mode),
                "yes" if mode.fits else "no",
            ]
        )
    return [what, modes]


def _notable(plan: TrainPlan) -> list[ParallelMode]:
    """The cheapest mode, the cheapest that fits, and the one with the least memory, in order; each once."""
    notable = (plan.modes[0], plan.cheapest, min(plan.modes, key=lambda mode: mode.memory.device))
    return [mode for mode in plan.modes if mode in notable]


def advice(plan: TrainPlan, options: PlanTrainOptions) -> str:
    """The cheapest mode that fits, or advice if none fits."""
    mode = plan.cheapest
    if mode is None:
        least = min(plan.modes, key=lambda mode: mode.memory.device)
        return (
            f"No mode fits into {options.device_memory}: the smallest needs {human_bytes(least.memory.device)}. Lower train.batch_size (and raise "
            "train.gradient_accumulation_steps), divide layers (--parallel.tensor, --parallel.pipeline), or use more devices."
        )
    parallel = mode.parallel
    changes = (
        f'zero = {parallel.zero}, activation_checkpointing = "{parallel.activation_checkpointing}"'
        + ", cpu_offload = true" * parallel.cpu_offload
    )
    fits = f"The cheapest mode that fits: {changes}: {human_bytes(mode.memory.device)} per device"
    if mode.step_seconds is None:
        return f"{fits}. For times, train a few steps and add --measured RUN, or add --mfu and --peak-tflops."
    step, all_tokens = _times(mode)
    return f"{fits}, {step} per step, {all_tokens} for all tokens."


def _times(mode: ParallelMode) -> tuple[str, str]:
    """Time of a step and of all tokens, or dashes."""
    if mode.step_seconds is None or mode.days is None:
        return "–", "–"
    return _short_time(mode.step_seconds), long_time(86_400 * mode.days)


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else long_time(seconds)
