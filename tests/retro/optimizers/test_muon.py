"""Muon moves whole matrices by orthogonal updates, leaves the rest to AdamW, and skips steps that overflow."""

import math

import pytest
import torch
from torch import nn

from indexing.store.errors import InputError
from retro.adapters.adapters import add_adapter, train_only
from retro.adapters.settings import LoraSettings
from retro.model.mixture_of_experts import ExpertLinear
from retro.optimizers import muon
from retro.optimizers.muon import layer_matrices, orthogonal
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import build

MUON = TrainSettings(lr=1e-2, muon_lr=0.05, optimizer="muon", weight_decay=0.1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (1, 9), (9, 1), (3, 8, 5)])
def test_singular_values_become_about_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = normal(*shape)
    left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
    kept = sizes > 0.1 * sizes.amax(-1, keepdim=True)  # five steps do not raise the smallest ones fully
    found = left.mT @ orthogonal(matrices) @ right.mT  # diagonal
    values = found.diagonal(dim1=-2, dim2=-1)
    assert ((values > 0.6) & (values < 1.3))[kept].all()
    assert (found - torch.diag_embed(values)).abs().max() < 1e-3


def test_no_gradient_in_a_matrix_is_no_update() -> None:
    assert torch.equal(orthogonal(torch.zeros(4, 3)), torch.zeros(4, 3))


def test_experts_are_orthogonalized_one_by_one() -> None:
    stacked = normal(3, 8, 4)
    torch.testing.assert_close(orthogonal(stacked), torch.stack([orthogonal(each) for each in stacked]))


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_steps_equal_those_of_torch(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer([ours], MUON, dtype=torch.bfloat16)  # as torch's, which knows no other precision
    decay = MUON.lr * 0.1 / MUON.muon_lr
    reference = torch.optim.Muon(theirs.parameters(), lr=MUON.muon_lr, weight_decay=decay, momentum=MUON.muon_momentum)
    for step in range(4):
        for layer, each in ((ours, optimizer), (theirs, reference)):
            layer.weight.grad = normal(*shape, seed=step)
            each.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=2e-3)  # the order of bfloat16 products differs


def test_updates_do_not_depend_on_the_size_of_gradients_and_have_the_learning_rate_as_their_size() -> None:
    layer = nn.Linear(8, 32, bias=False)
    optimizer = make_optimizer([layer], MUON)
    (group,) = [group for group in optimizer.param_groups if group["orthogonal"]]
    before = layer.weight.detach().clone()
    layer.weight.grad = 1e-3 * normal(32, 8)
    optimizer.step()
    update = (before * (1 - MUON.lr * MUON.weight_decay) - layer.weight.detach()) / MUON.muon_lr
    largest = torch.linalg.matrix_norm(update, 2)
    assert 0.7 * math.sqrt(4) < largest < 1.25 * math.sqrt(4)  # sqrt(outputs / inputs)
    assert group["lr_factor"] == MUON.muon_lr / MUON.lr


def test_matrices_of_layers_are_muons_and_the_rest_are_adamws() -> None:
    model = build("transformer-xl", **{"experts.num_experts": 4, "copy_head.neighbors": True, "tied_embeddings": False})
    ours = {name.split(".")[-2] for name in layer_matrices(model)}
    assert ours == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    optimizer = make_optimizer([model], MUON)
    orthogonal_ids = {id(p) for group in optimizer.param_groups if group["orthogonal"] for p in group["params"]}
    assert orthogonal_ids == {id(parameter) for parameter in layer_matrices(model).values()}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = {len(optimizer.state[p]) for p in layer_matrices(model).values()}
    assert kept == {1}
    assert all(len(optimizer.state[p]) == 3 for p in model.parameters() if id(p) not in orthogonal_ids)


def test_a_step_that_overflows_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), ExpertLinear(2, 6, 3))
    nn.init.normal_(model[2].weight)
    optimizer = make_optimizer([model], MUON)

    def step(value: float, found_inf: float) -> list[torch.Tensor]:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = normal(*parameter.shape, seed=number) * value
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    before = step(1.0, 0.0)
    momenta = [value.clone() for state in optimizer.state.values() for value in state.values()]
    assert all(map(torch.equal, before, step(math.nan, 1.0)))
    assert all(map(torch.equal, momenta, [value for state in optimizer.state.values() for value in state.values()]))
    assert not any(map(torch.equal, before, step(1.0, 0.0)))


def test_adapters_alone_have_no_matrix_for_muon() -> None:
    model = build()
    add_adapter(model, LoraSettings(rank=2))
    train_only(model, "none")
    with pytest.raises(InputError, match=r"train\.optimizer = 'muon': no matrix .* 'adamw'"):
        make_optimizer([model], MUON)


def test_matrices_of_one_shape_move_together_as_each_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1, 200, 1 << 22):  # elements of a batch
        monkeypatch.setattr("retro.optimizers.muon._BATCH", most)
        layers = nn.Sequential(*(nn.Linear(*size, bias=False) for size in ((8, 8), (8, 8), (8, 16), (16, 8), (8, 8))))
        for seed, parameter in enumerate(layers.parameters()):
            parameter.data = normal(*parameter.shape, seed=seed)
            parameter.grad = normal(*parameter.shape, seed=seed + 10)
        optimizer = make_optimizer([layers], MUON)
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in layers.parameters()])
    for some in found[1:]:
        for one, other in zip(found[0], some, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (3, 8, 40)])
def test_long_matrices_have_the_singular_values_of_the_steps(shape: tuple[int, ...]) -> None:
    """Also with singular values a thousand times smaller than others: a gradient has such ones."""
    random = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(random, full_matrices=False)
    values = torch.logspace(0, -3, min(shape[-2:]), dtype=torch.float64)
    expected, (a, b, c) = values / values.norm(), muon.COEFFICIENTS
    for _ in range(muon.STEPS):
        expected = a * expected + b * expected**3 + c * expected**5
    found = orthogonal(((u * values) @ v).float())
    torch.testing.assert_close(found, ((u * expected) @ v).float(), rtol=0, atol=2e-3)
