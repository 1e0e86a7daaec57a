"""Memory by mode: parameters, gradients and moments to the byte of what tensors take, and how modes compare."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from indexing.store.errors import InputError
from retro.activations import Pass
from retro.memory import Memory, Sharing, divided_settings, memory_of, parameter_units, sent_bytes, state_bytes
from retro.model import Retro
from retro.optimizer import make_optimizer
from tests.retro.small_model import SETTINGS, build

RUN = Pass(8, 16, 2)


def tensor_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_whole_states_are_what_a_real_step_leaves() -> None:
    model = build()
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    neighbors = torch.zeros(1, 4, 2, 8, dtype=torch.int64)
    model(torch.zeros(1, 16, dtype=torch.int64), neighbors=neighbors).sum().backward()
    gradients = tensor_bytes(parameter.grad for parameter in model.parameters())
    optimizer.step()
    moments = tensor_bytes(value for state in optimizer.state.values() for value in state.values())
    found = (tensor_bytes(model.parameters()), gradients, moments)
    assert state_bytes(parameter_units(SETTINGS, Sharing()), Sharing()) == found


def part_bytes(model: nn.Module, num_processes: int) -> int:
    """What the first of several processes holds when every tensor is cut into rows."""
    return tensor_bytes(torch.chunk(parameter.detach(), num_processes)[0] for parameter in model.parameters())


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_zero_divides_moments_then_gradients_then_parameters_by_rows(num_processes: int) -> None:
    model = build()
    part, whole = part_bytes(model, num_processes), tensor_bytes(model.parameters())
    units, count = parameter_units(SETTINGS, Sharing()), len(list(model.parameters()))
    for zero in (1, 2, 3):
        sharing = Sharing(num_processes, zero)  # type: ignore[arg-type]
        assert state_bytes(units, sharing) == (part, part, 2 * part + 4 * count)
        assert state_bytes(units, sharing, accumulation=2)[1] == (whole if zero == 1 else part)


def test_tensor_parallelism_divides_what_the_blocks_hold_and_nothing_else() -> None:
    model, halves = build("smeared"), Retro(divided_settings(replace(SETTINGS, smeared_keys=True), 2))
    for (name, whole), half in zip(model.named_parameters(), halves.parameters(), strict=True):
        is_divided = ".block." in name
        assert half.numel() * (2 if is_divided else 1) == whole.numel(), name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_parameter_has_a_place_in_a_pipeline_and_tied_embeddings_two(schedule: str) -> None:
    table = SETTINGS.vocab_size * SETTINGS.d_model
    sharing = Sharing(pipeline=2, schedule=schedule)  # type: ignore[arg-type]
    held = sum(
        shape.numel()
        for stage in range(2)
        for unit in parameter_units(SETTINGS, sharing, stage).values()
        for shape in unit
    )
    assert held == sum(parameter.numel() for parameter in build().parameters()) + table
    stages = {"1f1b": ({"0", "1"}, {"2", "3"}), "interleaved": ({"0", "2"}, {"1", "3"})}[schedule]
    for stage, layers in enumerate(stages):
        units = parameter_units(SETTINGS, sharing, stage)
        assert {name.removeprefix("layer ") for name in units if name.startswith("layer")} == layers
    # The encoder stands where the first CCA does: layer 2, which is number 1 from 0.
    assert "encoder" in parameter_units(SETTINGS, sharing, 1 if schedule == "interleaved" else 0)


def of(**changes: Any) -> Memory:
    return memory_of(SETTINGS, RUN, Sharing(**{"data": 4, **changes}))


def test_each_stage_of_zero_and_each_checkpointing_takes_less() -> None:
    stages = [of(zero=zero) for zero in (1, 2, 3)]
    assert of().states > stages[0].states == stages[2].states
    assert stages[1].gathered > stages[2].gathered
    assert [of(checkpointing=how).activations for how in ("none", "selective", "full")] == sorted(
        (of(checkpointing=how).activations for how in ("none", "selective", "full")), reverse=True
    )
    offloaded = of(zero=3, offload=True)
    assert offloaded.host == stages[2].states
    assert offloaded.device == stages[2].device - stages[2].states
    assert stages[2].host == 0


def test_activations_follow_the_sequences_that_a_process_has() -> None:
    run = replace(RUN, num_sequences=32)
    alone, four = memory_of(SETTINGS, run, Sharing()), memory_of(SETTINGS, run, Sharing(4))
    assert 3 < alone.activations / four.activations < 4  # copies of weights and the loss's gradient stay
    assert alone.gathered == 0


def test_a_pipeline_keeps_most_in_its_first_process_and_interleaving_takes_more() -> None:
    run = replace(RUN, num_sequences=16)
    decoder = replace(SETTINGS, cca_layers=())
    plain = memory_of(decoder, run, Sharing(pipeline=2, microbatches=8, checkpointing="full"))
    interleaved = Sharing(pipeline=2, microbatches=8, checkpointing="full", schedule="interleaved")
    assert memory_of(decoder, run, interleaved).activations > plain.activations
    # Two microbatches are under way at most, so more of them, and smaller, take less.
    fewer = Sharing(pipeline=2, microbatches=4, checkpointing="full")
    assert memory_of(decoder, run, fewer).activations > plain.activations


def test_what_is_sent_is_two_or_three_times_the_parameters() -> None:
    whole = tensor_bytes(build().parameters())
    sent = [sent_bytes(SETTINGS, Sharing(4, zero)) for zero in (0, 1, 2, 3)]  # type: ignore[arg-type]
    assert sent == [round(times * whole * 3 / 4) for times in (2, 2, 2, 3)]
    assert sent_bytes(SETTINGS, Sharing(4, 1), accumulation=5) == sent[1]
    assert sent_bytes(SETTINGS, Sharing(4, 3), accumulation=5) == 5 * sent[3]
    assert sent_bytes(SETTINGS, Sharing()) == 0


@pytest.mark.parametrize(
    ("sharing", "told"),
    [
        (Sharing(3), "train.batch_size = 8: must be a multiple of the 3 data-parallel processes"),
        (Sharing(2, pipeline=2, microbatches=8), "2 data-parallel processes × 8 microbatches"),
        (Sharing(tensor=3), "parallel.tensor = 3: model.num_heads = 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(sharing: Sharing, told: str) -> None:
    with pytest.raises(InputError, match=told):
        memory_of(SETTINGS, RUN, sharing)
