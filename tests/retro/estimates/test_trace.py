"""Traced bytes are those of real tensors: measured by torch's allocator, counted on real models, and on fake tensors of CUDA."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from retro.estimates import trace as trace_module
from retro.estimates.trace import Pass, Storages, Trace, trace
from retro.estimates.training_memory import memory_of
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.parallel import forward_backward
from retro.parallel.distribute import checkpoint_activations
from retro.parallel.settings import ALONE, Checkpointing
from tests.retro.estimates.measure_step import measured, model_settings
from tests.retro.fake_cuda import CUDA, fake_cuda
from tests.retro.small_model import SCHEMES, SETTINGS

WIDER = updated(
    SETTINGS, {"d_model": 64, "d_ffw": 256, "encoder.d_model": 48, "encoder.d_ffw": 192, "chunk_length": 16}
)
ON_CPU = Pass(2, 128, 2, gpu=False)
OPTIONS: dict[str, dict[str, Any]] = {
    **SCHEMES,
    "learned": {**SCHEMES["learned"], "attention.max_positions": 128},
    "two experts": {"experts.num_experts": 4, "experts.per_token": 2, "activation": "swiglu"},
    "experts in every second layer": {"experts.num_experts": 4, "experts.every": 2},
    "window": {"attention.sliding_window": 32},
    "reading": {"retrieval.reader": "decoder", "retrieval.cca_layers": (), "attention.num_kv_heads": 1},
    "deep": {"num_layers": 8, "retrieval.cca_layers": (3, 5, 7, 8)},
}
RUNS = {"bfloat16": ON_CPU, "float32, one document": replace(ON_CPU, narrow=False, documents=False, k=3)}


def peak(traced: Trace) -> int:
    """The largest sum of everything but parameters."""
    largest, before = sum(traced.kept) + traced.forward, 0
    for phase in reversed(range(len(traced.kept))):
        largest = max(largest, sum(traced.kept[: phase + 1]) + before + traced.together[phase])
        before += traced.gradients[phase]
    return largest


def counted(settings: ModelSettings, run: Pass, checkpointing: Checkpointing) -> tuple[int, int]:
    """Bytes that real tensors of all layers keep, and the peak with gradients."""
    model = Retro(settings).train()
    checkpoint_activations(model, checkpointing)
    with Storages(model) as storages:
        kept, *_ = trace_module._pass(model, run, storages, False, 1)
        return sum(kept.values()), max(storages.total_peak, storages.live)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_trace_counts_the_bytes_of_real_tensors(option: str, run: str) -> None:
    settings = updated(WIDER, OPTIONS[option])
    kept, highest = counted(settings, RUNS[run], "none")
    traced = trace(settings, RUNS[run])
    assert sum(traced.kept) == pytest.approx(kept, rel=0.01)
    assert peak(traced) == pytest.approx(highest, rel=0.05)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_trace_with_checkpointing_counts_the_bytes_of_real_tensors(checkpointing: Checkpointing) -> None:
    kept, highest = counted(WIDER, ON_CPU, checkpointing)
    traced = trace(WIDER, ON_CPU, checkpointing)
    assert sum(traced.kept) == pytest.approx(kept, rel=0.01)
    assert peak(traced) == pytest.approx(highest, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        "tiny 4 512 2 bfloat16 none 16000",
        "tiny 2 1024 4 float32 full 4000",
        "small 2 512 2 bfloat16 selective 16000",
    ],
)
def test_planned_memory_is_within_a_tenth_of_the_measured_peak(step: str) -> None:
    preset, rows, tokens, k, precision, checkpointing, vocab_size = step.split()
    run = Pass(int(rows), int(tokens), int(k), precision == "bfloat16", gpu=False)
    parallel = replace(ALONE, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    allocated, resident = measured(*step.split())
    planned = memory_of(model_settings(preset, int(vocab_size)), run, parallel).device
    assert planned == pytest.approx(allocated, rel=0.1)
    assert planned < resident


def test_compiled_code_casts_the_input_of_queries_keys_and_values_once() -> None:
    settings = updated(WIDER, {**OPTIONS["learned"], "retrieval.cca_layers": ()})
    eager, compiled = (trace(settings, ON_CPU, compiled=compiled).kept[1] for compiled in (False, True))
    one_cast = 2 * ON_CPU.num_sequences * ON_CPU.sequence_length * settings.d_model
    assert eager - compiled == 2 * one_cast


def test_checkpointing_trades_kept_for_recomputed_bytes() -> None:
    none, selective, full = (trace(WIDER, ON_CPU, how) for how in ("none", "selective", "full"))
    assert sum(none.kept) > sum(selective.kept) > sum(full.kept)
    assert max(none.working) < max(full.working)


def test_sequence_parallelism_divides_the_residual_stream_between_blocks() -> None:
    settings = updated(WIDER, {"retrieval.cca_layers": ()})
    whole, halves = (trace(settings, ON_CPU, "full", token_shards=shards) for shards in (1, 2))
    stream = 4 * ON_CPU.num_sequences * ON_CPU.sequence_length * settings.d_model
    assert whole.kept[2] - halves.kept[2] == 2 * stream // 2  # two blocks


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("option", ["rope", "alibi", "transformer-xl", "window", "neox"])
def test_a_trace_for_a_gpu_takes_the_choices_of_cuda(option: str, narrow: bool) -> None:
    """Masks, shared keys and products are those of `kernels.py` on CUDA; fake CUDA has no fused kernels of its own."""
    settings, run = updated(WIDER, OPTIONS[option]), replace(ON_CPU, gpu=True, narrow=narrow)
    model = Retro(settings).train()
    context = forward_backward.StepContext(torch.ones((), dtype=torch.int64), 2, 1.0, last=True)
    with fake_cuda():
        inputs = trace_module._inputs(settings, run).map(lambda value: value.to(CUDA))
        model.to(CUDA)
        with Storages(model) as storages, trace_module._replaced(run):
            with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
                hidden, routing = model.hidden(inputs)
                own = hidden, inputs.labels, model.evidence(inputs)
                objective, _ = forward_backward.part_of_loss(model, *own, routing, context)
                del hidden, own
            kept = storages.live
    assert objective.requires_grad
    inputs_bytes = sum(value.nbytes for value in inputs if value is not None)
    assert sum(trace(settings, run).kept) == pytest.approx(kept + inputs_bytes, rel=0.05)


def test_a_gpu_keeps_no_scores() -> None:
    longer = Pass(2, 256, documents=False, gpu=False)
    scores = 2 * 2 * 256 * 256 * WIDER.attention.num_heads * WIDER.num_layers  # 16-bit numbers
    on_cpu, on_gpu = (sum(trace(WIDER, replace(longer, gpu=gpu)).kept) for gpu in (False, True))
    assert on_cpu - on_gpu > scores / 2


def test_a_compiled_loss_has_no_temporary_logits() -> None:
    settings = replace(WIDER, vocab_size=4000)
    eager, compiled = (trace(settings, replace(ON_CPU, gpu=True), compiled=compiled) for compiled in (False, True))
    assert compiled.forward < eager.forward / 2
