"""The blockwise loss equals PyTorch's cross-entropy and never holds the logits of a whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retro.batch import loss as module
from retro.batch.loss import IGNORED_LABEL, summed_loss, token_losses, without_ignored
from tests.retro.small_model import plain_loss

B, T, D, V = 3, 7, 12, 50


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(B, T, D), torch.randn(V, D), torch.randint(V, (B, T))
    labels[0, 3:] = IGNORED_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


@pytest.fixture(params=[1, 5, 512], ids=["row by row", "in unequal blocks", "at once"])
def block_rows(request, monkeypatch) -> None:
    monkeypatch.setattr(module, "block_rows", lambda device_type, vocab_size: request.param)


@pytest.mark.usefixtures("block_rows")
def test_value_and_gradients_equal_cross_entropy(parts) -> None:
    hidden, weight, labels = parts
    expected = reference(hidden, weight, labels)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    value = plain_loss(hidden, weight, labels)
    found = torch.autograd.grad(value / 4, (hidden, weight))  # as with four batches per step
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs / 4)


@pytest.mark.usefixtures("block_rows")
def test_token_losses_equal_cross_entropy(parts) -> None:
    hidden, weight, labels = parts
    best = torch.randint(len(weight), (*labels.shape, 3))
    nats, log_top, log_best = token_losses(hidden, weight, labels, best)
    assert nats.dtype == log_top.dtype == torch.float32
    assert (nats[0, 3:] == 0).all()
    logits = hidden @ weight.T
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(nats, flat.view(B, T))
    torch.testing.assert_close(log_top, logits.log_softmax(-1).amax(-1))
    torch.testing.assert_close(log_best, logits.log_softmax(-1).gather(-1, best))
    total, parts_of_total = summed_loss(hidden, weight, labels, best)
    torch.testing.assert_close(parts_of_total, (nats, log_top, log_best), check_stride=False)
    torch.testing.assert_close(total, nats.sum())


@pytest.mark.parametrize("counting", [0, 1, B * T // 2, B * T])
def test_dropping_ignored_rows_changes_no_loss_and_no_gradient(parts, counting: int) -> None:
    hidden, weight, labels = parts
    labels = torch.where(torch.randperm(B * T).view(B, T) < counting, labels.clamp(min=0), IGNORED_LABEL)
    few, their_labels, _ = without_ignored(hidden, labels)
    assert their_labels.numel() == (counting if 0 < counting < B * T / 2 else B * T)
    whole, part = summed_loss(hidden, weight, labels)[0], summed_loss(few, weight, their_labels)[0]
    torch.testing.assert_close(part, whole)
    wanted, found = (torch.autograd.grad(each, (hidden, weight)) for each in (whole, part))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_without_labels_the_loss_and_its_gradients_are_zero(parts) -> None:
    hidden, weight, labels = parts
    value = plain_loss(hidden, weight, torch.full_like(labels, IGNORED_LABEL))
    value.backward()
    assert value == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_bfloat16_loss_is_close_to_float32(parts) -> None:
    hidden, weight, labels = parts
    exact = reference(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        value = plain_loss(hidden, weight, labels)
    value.backward()
    assert value.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(value, exact, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float16_gradients_neither_underflow_nor_overflow(device: str) -> None:
    """Probabilities of 10⁻⁷ are near float16's smallest number, and a label's sum over all rows exceeds 65,504."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 200, 8, device=device), 0.02 * torch.randn(30_000, 8, device=device)
    hidden[..., 0], weight[:, 0] = 400, 0
    weight[0, 0] = 0.04  # a likely token that is never a label
    labels = torch.ones(1, 200, dtype=torch.int64, device=device)
    hidden.requires_grad_()
    weight.requires_grad_()
    wanted = torch.autograd.grad(200 * reference(hidden, weight, labels), (hidden, weight))
    with torch.autocast(device, torch.float16):
        value = plain_loss(hidden, weight, labels)
    found = torch.autograd.grad(200 * value, (hidden, weight))
    assert wanted[1].abs().max() > torch.finfo(torch.float16).max
    tails, exact = found[1][2:], wanted[1][2:]  # of the unlikely tokens
    for ours, theirs in [*zip(found, wanted, strict=True), (tails, exact)]:
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_of_a_whole_batch_never_exist() -> None:
    rows, vocab_size = 4096, 20_000
    hidden, weight = torch.randn(1, rows, 8, requires_grad=True), torch.randn(vocab_size, 8, requires_grad=True)
    labels = torch.randint(vocab_size, (1, rows))
    with _Largest() as largest:
        plain_loss(hidden, weight, labels).backward()
        token_losses(hidden, weight, labels)
    assert largest.elements <= 512 * vocab_size
