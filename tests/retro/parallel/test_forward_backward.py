"""Compilation changes speed only, with every kind of checkpointing and every shape of batch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.device import choose_placement
from retro.model.retro import Retro
from retro.parallel.forward_backward import StepContext, WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, ParallelSettings
from tests.retro.small_model import READERS, SCHEMES, T, U, batch, build

EXPERTS = {"experts.num_experts": 4, "experts.every": 1}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces graphs and runs them as they are, because Inductor's code generation takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def passes_of(checkpointing: Any, compiled: bool, by_block: bool | None = None, **model: Any) -> WholeModel:
    settings = replace(ALONE, activation_checkpointing=checkpointing)
    return passes_with(build(**model), settings, compiled=compiled, by_block=by_block)


def passes_with(model: Retro, settings: ParallelSettings = ALONE, **how: bool | None) -> WholeModel:
    placement = choose_placement("cpu", "float32")
    return WholeModel(model.train(), Processes(settings, placement.device), placement, **how)  # type: ignore[arg-type]


def inputs(k: int = 2, documents: bool = False) -> Inputs:
    """A batch with k neighbors per chunk, with or without document boundaries."""
    tokens, neighbors, lengths = batch()
    whole = Inputs(
        tokens,
        torch.arange(U).expand(len(tokens), U) // 2 if documents else None,
        neighbors[:, :, :1].repeat(1, 1, k, 1),
        lengths[:, :, :1].repeat(1, 1, k),
        labels=tokens.roll(-1, dims=1),
    )
    return whole if k else whole.off()


def gradients(passes: WholeModel, given: Inputs) -> dict[str, Tensor]:
    torch.manual_seed(0)  # seed of dropout
    passes.forward_backward(given, StepContext(torch.tensor(1), len(given.tokens), 1.0, True))
    found = {name: one.grad for name, one in passes.model.named_parameters() if one.grad is not None}
    passes.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_compiled_checkpointed_model_has_the_same_gradients(checkpointing: str, by_block: bool) -> None:
    model = {"copy_head.context": True, "copy_head.neighbors": True}
    expected = gradients(passes_of("none", compiled=False, **model), inputs())
    found = gradients(passes_of(checkpointing, compiled=True, by_block=by_block, **model), inputs())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def graphs_of_a_step(model: Retro) -> int:
    """Compile a model for a batch with neighbors and document boundaries. A graph break would raise."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert gradients(passes_with(model, compiled=True, by_block=True), inputs(documents=True))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("scheme", [*SCHEMES, *READERS, "experts", "datastore"])
def test_blocks_of_a_kind_share_a_graph_without_breaks(scheme: str) -> None:
    """A value that the host reads (`item`, `if`) and a shape that depends on values would each break the graph."""
    options = {"experts": EXPERTS, "datastore": {"copy_head.datastore": True}}
    found = []
    for crosses in ((1, 2), (1, 2, 3, 4)):
        small = {"num_layers": len(crosses), "retrieval.cca_layers": () if scheme in READERS else crosses}
        model = build(**small, **options[scheme]) if scheme in options else build(scheme, **small)
        found.append(graphs_of_a_step(model))
    assert found[0] == found[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*SCHEMES, *READERS, "experts", "datastore"])
def test_every_model_is_one_graph_on_a_cpu(scheme: str) -> None:
    torch._dynamo.reset()
    small = {"num_layers": 2, "retrieval.cca_layers": () if scheme in READERS else (2,)}
    options = {"experts": EXPERTS, "datastore": {"copy_head.datastore": True}}
    model = build(**small, **options[scheme]) if scheme in options else build(scheme, **small)
    found = torch._dynamo.explain(passes_with(model)._run)(inputs(documents=True))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_any_number_of_shapes_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four graphs. PyTorch's limit, lowered from eight, is two: a graph takes three seconds."""
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, limit, 2)
    passes = passes_of("none", compiled=True, num_layers=1, **{"retrieval.cca_layers": (1,), "encoder.num_layers": 1})
    for k in (0, 2):
        for documents in (False, True):
            assert gradients(passes, inputs(k, documents))


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_evaluation_compiles_nothing() -> None:
    passes = passes_of("none", compiled=True, num_layers=1, **{"retrieval.cca_layers": (1,)})
    given = inputs()
    gradients(passes, given)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    passes.model.eval()
    for num_tokens in range(1, T, 3):
        passes.token_losses(Inputs(given.tokens[:, :num_tokens], labels=given.labels[:, :num_tokens]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.gpu
def test_a_model_compiled_for_a_gpu_has_the_loss_and_the_gradient_norm_of_an_eager_one() -> None:
    placement = choose_placement("cuda", "auto")
    processes, found = Processes(ALONE, placement.device), []
    for compiled in (False, True):
        passes = WholeModel(build().to(placement.device).train(), processes, placement, compiled=compiled)
        given = placement.put(inputs())
        total = torch.tensor(given.labels.numel(), device=placement.device)
        loss = passes.forward_backward(given, StepContext(total, len(given.tokens), 1.0, True))[0]
        found.append((float(loss), float(passes.gradient_norm())))
    assert found[1] == pytest.approx(found[0], rel=1e-2)
