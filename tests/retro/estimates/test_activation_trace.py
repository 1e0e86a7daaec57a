"""Predicted activation memory equals that of real tensors, measured by autograd's hooks and with real checkpointing."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from retro.estimates.activation_trace import Pass, trace, trace_model
from retro.model.inputs import Inputs
from retro.model.loss import loss
from retro.model.residual_block import Residual
from retro.model.retro import Retro
from retro.model.settings import ModelSettings, updated
from tests.retro.small_model import SCHEMES, SETTINGS

WIDER = updated(SETTINGS, {"d_model": 64, "d_ffw": 256, "encoder.d_model": 48, "encoder.d_ffw": 192})
ON_CPU = Pass(2, 64, 2, gpu=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forward(model: Retro, run: Pass) -> Tensor:
    """The loss on a batch of zeros."""
    m = model.settings.chunk_length
    num_chunks = run.sequence_length // m
    tokens = torch.zeros(run.num_sequences, run.sequence_length, dtype=torch.int64)
    documents = torch.zeros(run.num_sequences, num_chunks, dtype=torch.int64) if run.documents else None
    neighbors = torch.zeros(run.num_sequences, num_chunks, run.k, 2 * m, dtype=torch.int64) if run.k else None
    with torch.autocast("cpu", torch.bfloat16, enabled=run.narrow):
        hidden = model.hidden(Inputs(tokens, documents, neighbors))[0]
        return loss(
            hidden,
            model.output_weight,
            tokens,
            model.mixture(hidden, Inputs(tokens, documents, neighbors, labels=tokens)),
        )


def hooked_bytes(model: Retro, run: Pass) -> int:
    """Bytes of the distinct storages that autograd saves, without weights."""
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = forward(model, run)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert value.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


CASES: dict[str, tuple[dict[str, Any], Pass]] = {
    **{scheme: (dict(changes), ON_CPU) for scheme, changes in SCHEMES.items()},
    "float32": ({}, replace(ON_CPU, narrow=False)),
    "off": ({}, replace(ON_CPU, k=0, num_sequences=3)),
    "one document": ({}, replace(ON_CPU, documents=False, sequence_length=32, k=3)),
    "heads": ({"activation": "swiglu", "attention.num_kv_heads": 1, "attention.qk_norm": True}, ON_CPU),
    "experts": ({"experts.num_experts": 4}, ON_CPU),
}


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_predict_the_saved_bytes(name: str) -> None:
    changes, run = CASES[name]
    settings = updated(WIDER, changes)
    model = Retro(settings).train()
    predicted, ours = trace(settings, run), trace_model(model, run)
    assert predicted.kept("none") == pytest.approx(hooked_bytes(model, run), rel=0.02)
    for checkpointing in ("none", "selective", "full"):
        assert predicted.kept(checkpointing) == ours.kept(checkpointing)


def test_full_checkpointing_equals_a_real_checkpoint() -> None:
    model = Retro(WIDER).train()
    for block in [module for module in model.modules() if isinstance(module, Residual)]:
        checkpoint(block)
    # A real checkpoint keeps its inputs without autograd's hooks and does not keep copies of weights.
    predicted = trace(WIDER, ON_CPU)
    assert resident_bytes(model, ON_CPU) == pytest.approx(predicted.kept("full"), rel=0.1)
    assert predicted.kept("full") < predicted.kept("selective") < predicted.kept("none")


def test_selective_checkpointing_equals_a_real_checkpoint() -> None:
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = Retro(WIDER).train()
    for block in [module for module in model.modules() if isinstance(module, Residual)]:
        checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, policy))
    assert resident_bytes(model, ON_CPU) == pytest.approx(trace(WIDER, ON_CPU).kept("selective"), rel=0.1)


def resident_bytes(model: Retro, run: Pass) -> int:
    """Bytes allocated during a forward pass and not freed at its end."""
    from torch.profiler import ProfilerActivity, profile

    forward(model, run)  # creates everything that is created only once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        value = forward(model, run)
    assert value.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def test_checkpointing_recomputes_blocks_and_a_plain_decoder_has_no_retrieval() -> None:
    seen = trace(WIDER, ON_CPU)
    assert seen.recomputed("none") == 0
    assert 0 < seen.recomputed("selective") < seen.recomputed("full") < seen.kept("none")
    plain = trace(updated(WIDER, {"retrieval.cca_layers": ()}), ON_CPU)
    assert not any(storage.block.startswith(("encoder", "cross")) for storage in plain.storages)


def test_bytes_grow_with_the_batch_and_a_gpu_saves_no_attention_scores() -> None:
    one, two = (trace(WIDER, replace(ON_CPU, num_sequences=count)) for count in (1, 2))
    copies = sum(one.copies.values())
    table = 4 * WIDER.vocab_size * WIDER.d_model  # the loss computes its gradient in the forward pass
    assert two.kept("none") - copies - table == pytest.approx(2 * (one.kept("none") - copies - table), rel=0.02)
    longer = replace(ON_CPU, sequence_length=256, documents=False)
    scores = (
        4 * 2 * 256 * 256 * WIDER.attention.num_heads
    )  # bytes of the smallest tensor with a number per pair of tokens
    assert trace(WIDER, longer).kept("none") - trace(WIDER, replace(longer, gpu=True)).kept("none") > scores


@pytest.mark.parametrize("positions", ["rope", "transformer-xl"])
def test_sequence_parallelism_divides_only_the_decoders_residual_stream(positions: str) -> None:
    settings: ModelSettings = updated(WIDER, {"attention.positions": positions})  # type: ignore[arg-type]
    seen = trace(settings, ON_CPU)
    stream = {s.number: s.bytes for s in seen.storages if s.by_token and s.kind == "input"}
    assert set(stream.values()) == {4 * 2 * 64 * settings.d_model}
    assert len(stream) == 2 * settings.num_layers + len(settings.retrieval.cca_layers)
    assert seen.kept("full") - seen.kept("full", token_shards=2) >= sum(stream.values()) // 2
