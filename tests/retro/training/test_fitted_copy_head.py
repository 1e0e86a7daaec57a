"""Fitted copying lowers the loss on the text it was fitted to, does no harm without copies, and changes nothing else."""

from typing import Any

import pytest
import torch

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.device import choose_placement
from retro.model.retro import Retro
from retro.training.fitted_copy_head import _PULL, CopyFit, fit_copy_head
from tests.retro.small_model import B, M, T, U, V, build

HERE = choose_placement("cpu", "float32")
BASES: dict[str, dict[str, Any]] = {
    "plain decoder": {"retrieval.cca_layers": ()},
    "own context": {"retrieval.cca_layers": (), "copy_head.context": True},
    "cross-attention": {},
}


def make_batch(seed: int, *, telling: bool = True) -> Inputs:
    """Random text of two documents a row. One neighbor of each chunk is its continuation, or random if not `telling`."""
    torch.manual_seed(seed)
    tokens = torch.randint(V, (B, T))
    chunks = tokens.unflatten(1, (U, M))
    following = torch.cat((chunks, chunks.roll(-1, 1)), dim=2)
    others = torch.randint(V, following.shape)
    neighbors = torch.stack((others, following if telling else others.flip(-1)), dim=2)
    labels = tokens.roll(-1, 1)
    labels[:, [T // 2 - 1, T - 1]] = IGNORED_LABEL
    documents = (torch.arange(U) // 2).expand(B, U)
    return Inputs(tokens, documents, neighbors, labels=labels)


def batches(count: int = 20, **options: Any) -> list[Inputs]:
    return [make_batch(seed, **options) for seed in range(count)]


@torch.no_grad()
def mean_loss(model: Retro, found: list[Inputs], *, on: bool = True) -> float:
    """Over the tokens that can read a neighbor: those from the last one of the first chunk of a document on."""
    total = count = 0.0
    for batch in found:
        losses = model.token_losses(batch if on else batch.off())
        reads = (torch.arange(T) % (T // 2) >= M - 1) & (batch.labels != IGNORED_LABEL)
        total, count = total + float(losses[reads].sum()), count + int(reads.sum())
    return total / count


def build_base(base: str) -> Retro:
    """A model that reads neighbors, with the initial networks, as a base has when it is fitted."""
    model = build(**BASES[base], **{"copy_head.neighbors": True})
    assert model.copy_head is not None
    model.copy_head.initialize()
    return model


@pytest.mark.parametrize("base", BASES)
def test_fitting_lowers_the_loss_by_as_much_as_it_reports(base: str) -> None:
    model, found = build_base(base).train(), batches()
    before, off = mean_loss(model, found), mean_loss(model, found, on=False)
    fit = fit_copy_head(model, found, HERE)
    torch.testing.assert_close(torch.tensor([fit.before, fit.after]), torch.tensor([before, mean_loss(model, found)]))
    assert fit.after < fit.before
    assert fit.after < off - 1  # the neighbors hold every token
    torch.testing.assert_close(fit.off, off)  # of cross-attention too


@pytest.mark.parametrize("base", BASES)
def test_fitting_changes_one_network_and_no_logit_off(base: str) -> None:
    model, found = build_base(base), batches(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    off = model(Inputs(found[0].tokens))
    fit_copy_head(model, found, HERE)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert changed <= {
        f"copy_head.neighbors.{name}" for name in ("inner", "inner_best", "inner_bias", "outer", "outer_bias")
    }
    assert torch.equal(model(Inputs(found[0].tokens)), off)


def test_fitting_does_no_harm_if_neighbors_are_random() -> None:
    model, found = build_base("plain decoder"), batches(telling=False)
    fit = fit_copy_head(model, found, HERE)
    assert fit.after < fit.off + 0.01


def test_a_few_tokens_move_the_network_by_little() -> None:
    """The loss of n tokens falls by less than their loss before, which bounds the pull."""
    model = build_base("plain decoder")
    assert model.copy_head is not None
    assert model.copy_head.neighbors is not None
    before = [parameter.detach().clone() for parameter in model.copy_head.neighbors.parameters()]
    fit = fit_copy_head(model, batches(1), HERE)
    after = model.copy_head.neighbors.parameters()
    moved = sum(float((new.detach() - old).square().sum()) for new, old in zip(after, before, strict=True))
    assert 0 < _PULL * moved <= fit.num_tokens * (fit.before - fit.after)


def test_the_fit_does_not_depend_on_the_number_of_threads() -> None:
    before, fits = torch.get_num_threads(), list[tuple[CopyFit, list[list[float]]]]()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            model = build_base("cross-attention")
            fit = fit_copy_head(model, batches(7), HERE)
        finally:
            torch.set_num_threads(before)
        assert model.copy_head is not None
        fits.append((fit, [parameter.flatten().tolist() for parameter in model.copy_head.parameters()]))
    assert fits[0] == fits[1]


def test_without_neighbors_nothing_is_fitted(caplog: pytest.LogCaptureFixture) -> None:
    model = build_base("plain decoder")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert fit_copy_head(model, [make_batch(0).off()], HERE).num_tokens == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "the batches have none" in caplog.text
