"""Memory by parallel configuration: parameters, gradients and moments are exact; modes compare as expected."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.estimates.trace import Pass
from retro.estimates.training_memory import Memory, memory_of, parameter_units, sent_bytes, state_bytes
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.parallel.data_parallel import matrices
from retro.parallel.pipeline_parallel import Stage
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ParallelSettings, divided
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import SETTINGS, build

RUN = Pass(8, 16, 2)


def tensor_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_unsharded_states_equal_those_of_a_real_step(kind: Any) -> None:
    model = build()
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3, optimizer=kind))
    neighbors = torch.zeros(1, 4, 2, 8, dtype=torch.int64)
    model(Inputs(torch.zeros(1, 16, dtype=torch.int64), neighbors=neighbors)).sum().backward()
    gradients = tensor_bytes(parameter.grad for parameter in model.parameters())
    optimizer.step()
    moments = tensor_bytes(value for state in optimizer.state.values() for value in state.values())
    found = (tensor_bytes(model.parameters()), gradients, moments)
    units = parameter_units(SETTINGS, ParallelSettings())
    assert state_bytes(units, ParallelSettings(), muon=kind == "muon") == found


def part_bytes(model: nn.Module, num_processes: int) -> int:
    """Bytes on the first of several processes if every tensor is split by rows."""
    return tensor_bytes(torch.chunk(parameter.detach(), num_processes)[0] for parameter in model.parameters())


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_zero_divides_moments_then_gradients_then_parameters_by_rows(num_processes: int) -> None:
    model = build()
    part, whole = part_bytes(model, num_processes), tensor_bytes(model.parameters())
    units, count = parameter_units(SETTINGS, ParallelSettings()), len(list(model.parameters()))
    for zero in (1, 2, 3):
        parallel = ParallelSettings(num_processes, zero)  # type: ignore[arg-type]
        assert state_bytes(units, parallel) == (part, part, 2 * part + 4 * count)
        assert state_bytes(units, parallel, accumulation=2)[1] == (whole if zero == 1 else part)


def test_tensor_parallelism_divides_only_the_blocks() -> None:
    smeared = {"attention.smeared_tokens": 1}
    model, halves = build(**smeared), Retro(divided(updated(SETTINGS, smeared), 2))
    for (name, whole), half in zip(model.named_parameters(), halves.parameters(), strict=True):
        is_divided = ".block." in name
        assert half.numel() * (2 if is_divided else 1) == whole.numel(), name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention.positions": "learned", "shared_embeddings": True},
        {"attention.positions": "learned", "retrieval.positions": "rope", "norm": "layer", "attention.bias": "all"},
        {"tied_embeddings": False},
        {"tied_embeddings": False, "copy_head.context": True, "copy_head.neighbors": True},
    ],
)
def test_a_pipeline_process_holds_the_parameters_of_its_stages(schedule: str, changes: dict[str, Any]) -> None:
    settings = updated(SETTINGS, changes)
    parallel = ParallelSettings(pipeline=2, pipeline_schedule=schedule)  # type: ignore[arg-type]
    alone, rounds = Processes(ParallelSettings(), torch.device("cpu")), 1 if schedule == "1f1b" else 2
    for process in range(2):
        stages = [Stage(Retro(settings), process + 2 * r, 2 * rounds, alone) for r in range(rounds)]
        # Two stages that both use the decoder's embeddings share them.
        found = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
        units = parameter_units(settings, parallel, process)
        assert sum(held.shape.numel() for unit in units.values() for held in unit) == sum(
            p.numel() for p in found.values()
        )


def test_expert_parallelism_divides_experts_and_zero_divides_the_rest() -> None:
    settings = updated(SETTINGS, {"experts.num_experts": 8})
    named = dict(Retro(settings).named_parameters())
    experts = tensor_bytes(parameter for name, parameter in named.items() if ".experts." in name)
    rest = tensor_bytes(named.values()) - experts
    shared = ParallelSettings(4, expert=2)
    assert state_bytes(parameter_units(settings, shared), shared)[0] == rest + experts // 2
    parts = sum(
        torch.chunk(p.detach()[: len(p) // 2] if ".experts." in name else p.detach(), 2 if ".experts." in name else 4)[
            0
        ].nbytes
        for name, p in named.items()
    )
    zero = replace(shared, zero=3)
    assert state_bytes(parameter_units(settings, zero), zero)[0] == parts
    # Two processes hold the same experts, four hold the same other parameters.
    assert sent_bytes(settings, shared) == round(2 * (rest * 3 / 4 + experts / 2 / 2))
    apart, together = (memory_of(settings, RUN, each) for each in (ParallelSettings(4), shared))
    assert together.gathered < apart.gathered
    with pytest.raises(InputError, match=r"num_experts = 8: .*parallel\.expert = 3"):
        memory_of(settings, replace(RUN, num_sequences=9), ParallelSettings(3, expert=3))


def estimate(**changes: Any) -> Memory:
    return memory_of(SETTINGS, RUN, ParallelSettings(**{"data": 4, **changes}))


def test_every_zero_stage_and_checkpointing_mode_saves_memory() -> None:
    stages = [estimate(zero=zero) for zero in (1, 2, 3)]
    assert estimate().states > stages[0].states == stages[2].states
    assert stages[1].gathered > stages[2].gathered
    assert [estimate(activation_checkpointing=how).activations for how in ("none", "selective", "full")] == sorted(
        (estimate(activation_checkpointing=how).activations for how in ("none", "selective", "full")), reverse=True
    )
    offloaded = estimate(zero=3, cpu_offload=True)
    assert offloaded.host == stages[2].states
    assert offloaded.device <= stages[2].device - stages[2].parameters - stages[2].optimizer
    assert stages[2].host == 0


def test_a_step_needs_less_than_the_sum_of_its_parts() -> None:
    for memory in (estimate(), estimate(zero=3), memory_of(SETTINGS, RUN, ParallelSettings())):
        assert max(memory.gradients, memory.activations) < memory.step
        assert memory.device <= memory.states + memory.gathered + memory.activations + memory.working
    # The gradients of several passes of a step are kept from the first pass on.
    assert memory_of(SETTINGS, RUN, ParallelSettings(), accumulation=2).step > memory.step


def test_activations_scale_with_the_sequences_of_a_process() -> None:
    run = replace(RUN, num_sequences=32)
    alone, two, four = (memory_of(SETTINGS, run, ParallelSettings(count)) for count in (1, 2, 4))
    assert 1.8 < two.activations / four.activations < 2  # the gradient of the output layer does not shrink
    assert alone.activations > 2 * two.activations  # autocast copies weights that several processes gather in 16 bits
    assert alone.gathered == 0


def test_microbatches_save_memory_in_a_pipeline_and_interleaving_needs_more() -> None:
    run = replace(RUN, num_sequences=16)
    decoder = updated(SETTINGS, {"retrieval.cca_layers": ()})
    plain = memory_of(decoder, run, ParallelSettings(pipeline=2, microbatches=8, activation_checkpointing="full"))
    interleaved = ParallelSettings(
        pipeline=2, microbatches=8, activation_checkpointing="full", pipeline_schedule="interleaved"
    )
    assert memory_of(decoder, run, interleaved).activations > plain.activations
    # At most two microbatches are in flight, so more and smaller ones need less memory.
    fewer = ParallelSettings(pipeline=2, microbatches=4, activation_checkpointing="full")
    assert memory_of(decoder, run, fewer).activations > plain.activations


def test_communication_is_two_or_three_times_the_parameters() -> None:
    whole = tensor_bytes(build().parameters())
    sent = [sent_bytes(SETTINGS, ParallelSettings(4, zero)) for zero in (0, 1, 2, 3)]  # type: ignore[arg-type]
    assert sent == [round(times * whole * 3 / 4) for times in (2, 2, 2, 3)]
    assert sent_bytes(SETTINGS, ParallelSettings(4, 1), accumulation=5) == sent[1]
    assert sent_bytes(SETTINGS, ParallelSettings(4, 3), accumulation=5) == 5 * sent[3]
    assert sent_bytes(SETTINGS, ParallelSettings(4, 2), accumulation=5) == round(
        6 / 2 * sent[2]
    )  # gathered once per step
    assert sent_bytes(SETTINGS, ParallelSettings()) == 0


def test_gathered_matrices_take_half_the_bytes_in_16_bits() -> None:
    model = build()
    inside = tensor_bytes(
        value for name, value in matrices(model).items() if not name.startswith(("head", "copy_head"))
    )
    for zero, times in ((0, 0), (1, 1), (2, 1), (3, 2)):
        parallel = ParallelSettings(4, zero)  # type: ignore[arg-type]
        saved = sent_bytes(SETTINGS, parallel) - sent_bytes(SETTINGS, parallel, narrow=True)
        assert saved == round(times * inside / 2 * 3 / 4)
    wide, narrow = (memory_of(SETTINGS, replace(RUN, narrow=narrow), ParallelSettings(4)) for narrow in (False, True))
    assert wide.gathered - narrow.gathered == inside // 2


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (ParallelSettings(3), "train.batch_size = 8"),
        (ParallelSettings(2, pipeline=2, microbatches=8), "parallel.microbatches = 8"),
        (ParallelSettings(pipeline=8), "model.num_layers = 4"),
        (ParallelSettings(4, expert=2), "parallel.expert = 2"),
        (ParallelSettings(tensor=3), "parallel.tensor = 3: model.attention.num_heads = 2"),
    ],
)
def test_indivisible_configurations_are_rejected(parallel: ParallelSettings, told: str) -> None:
    with pytest.raises(InputError, match=told):
        memory_of(SETTINGS, RUN, parallel)
