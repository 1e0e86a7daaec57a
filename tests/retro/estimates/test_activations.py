"""Planned activation memory is close to that of real tensors, measured by autograd's hooks and with real checkpointing."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._composable import checkpoint
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from retro.estimates.activations import Pass, activations
from retro.model.inputs import Inputs
from retro.model.loss import loss
from retro.model.presets import PRESETS
from retro.model.residual_block import Residual
from retro.model.retro import Retro
from retro.model.settings import ModelSettings, updated
from retro.parallel.settings import Checkpointing
from tests.retro.small_model import SCHEMES, SETTINGS

WIDER = updated(
    SETTINGS, {"d_model": 64, "d_ffw": 256, "encoder.d_model": 48, "encoder.d_ffw": 192, "chunk_length": 16}
)
ON_CPU = Pass(2, 128, 2, gpu=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planned(settings: ModelSettings, run: Pass, checkpointing: Checkpointing = "none", token_shards: int = 1) -> float:
    blocks, outside = activations(settings, run)
    return sum(block.lasting(checkpointing, token_shards) for block in blocks.values()) + sum(outside.values())


def forward(model: Retro, run: Pass) -> Tensor:
    """The loss on a batch of zeros."""
    m = model.settings.chunk_length
    num_chunks = run.sequence_length // m
    tokens = torch.zeros(run.num_sequences, run.sequence_length, dtype=torch.int64)
    documents = torch.zeros(run.num_sequences, num_chunks, dtype=torch.int64) if run.documents else None
    neighbors = torch.zeros(run.num_sequences, num_chunks, run.k, 2 * m, dtype=torch.int64) if run.k else None
    with torch.autocast("cpu", torch.bfloat16, enabled=run.narrow):
        inputs = Inputs(tokens, documents, neighbors, labels=tokens)
        hidden, _ = model.hidden(inputs)
        return loss(hidden, model.output_weight, tokens, model.mixture(hidden, inputs))


def kept_bytes(model: Retro, run: Pass) -> int:
    """Bytes of the distinct storages that autograd keeps, without weights."""
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = forward(model, run)
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert value.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def resident_bytes(model: Retro, run: Pass) -> int:
    """Bytes allocated during a forward pass and not freed at its end."""
    forward(model, run)  # creates everything that is created only once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        value = forward(model, run)
    assert value.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


OPTIONS: dict[str, dict[str, Any]] = {
    **SCHEMES,
    "learned": {**SCHEMES["learned"], "attention.max_positions": 128},
    "gates": {"activation": "swiglu"},
    "shared keys": {"attention.num_kv_heads": 1},
    "experts": {"experts.num_experts": 4},
    "two experts": {"experts.num_experts": 4, "experts.per_token": 2, "activation": "swiglu"},
    "window": {"attention.sliding_window": 32},
    "reading": {"retrieval.reader": "decoder", "retrieval.cca_layers": (), "attention.num_kv_heads": 1},
    "copying without cross-attention": {"retrieval.cca_layers": (), "copy_head.neighbors": True},
}
RUNS = {
    "bfloat16": ON_CPU,
    "float32": replace(ON_CPU, narrow=False),
    "off": replace(ON_CPU, k=0),
    "one document": replace(ON_CPU, documents=False, k=3),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("option", OPTIONS)
def test_planned_bytes_are_those_that_autograd_keeps(option: str, run: str) -> None:
    settings = updated(WIDER, OPTIONS[option])
    assert planned(settings, RUNS[run]) == pytest.approx(kept_bytes(Retro(settings).train(), RUNS[run]), rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rope", "transformer-xl"])
@pytest.mark.parametrize("preset", ["tiny", "small", "base-cpu"])
def test_planned_bytes_of_presets_are_those_that_autograd_keeps(preset: str, positions: str) -> None:
    changes = {"attention.positions": positions}
    settings: ModelSettings = updated(replace(PRESETS[preset], vocab_size=2000, chunk_length=64), changes)  # type: ignore[arg-type]
    run = Pass(1, 256, 2, narrow=False, gpu=False)
    assert planned(settings, run) == pytest.approx(kept_bytes(Retro(settings).train(), run), rel=0.08)


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def save_products(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_planned_bytes_with_checkpointing_are_those_of_real_checkpoints(checkpointing: Checkpointing) -> None:
    model = Retro(WIDER).train()
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    for block in [module for module in model.modules() if isinstance(module, Residual)]:
        checkpoint(block, **({"context_fn": contexts} if checkpointing == "selective" else {}))
    assert planned(WIDER, ON_CPU, checkpointing) == pytest.approx(resident_bytes(model, ON_CPU), rel=0.15)


def test_checkpointing_recomputes_blocks_and_sequence_parallelism_divides_their_inputs() -> None:
    blocks, _ = activations(WIDER, ON_CPU)
    for block in blocks.values():
        assert block.recomputed("none") == 0
        assert 0 < block.recomputed("selective") <= block.recomputed("full")
    halves = planned(WIDER, ON_CPU, "full") - planned(WIDER, ON_CPU, "full", token_shards=2)
    assert halves == sum(block.input for block in blocks.values()) / 2
    plain, _ = activations(updated(WIDER, {"retrieval.cca_layers": ()}), ON_CPU)
    assert not any(name.startswith(("encoder", "cross")) for name in plain)


def test_a_gpu_keeps_no_scores() -> None:
    longer = Pass(2, 256, documents=False, gpu=False)
    scores = 2 * 2 * 256 * 256 * WIDER.attention.num_heads * WIDER.num_layers  # 16-bit numbers
    assert planned(WIDER, longer) - planned(WIDER, replace(longer, gpu=True)) > scores / 2
