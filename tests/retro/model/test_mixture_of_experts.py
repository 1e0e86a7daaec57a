"""Experts equal a loop over tokens, drop the last choices beyond capacity, and give the same on several processes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.model.mixture_of_experts import (
    ROUTING,
    ExpertLinear,
    Experts,
    Queues,
    queues_of,
    routing_loss,
    share_experts,
)
from retro.model.retro import ModelSettings, Retro
from retro.model_settings import updated
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import SETTINGS, B, M, T, U, batch, build, inputs, plain_loss, split_batch, step_of

D, E = SETTINGS.d_model, 4
top_k = pytest.mark.parametrize("k", [1, 2])


def make_experts(k: int = 2, capacity_factor: float = 1.0, **changes: Any) -> Experts:
    """Experts in training mode, with weights large enough to matter."""
    torch.manual_seed(0)
    experts = Experts(
        updated(
            SETTINGS,
            {"experts.num_experts": E, "experts.per_token": k, "experts.capacity_factor": capacity_factor, **changes},
        )
    )
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return experts


def activations(rows: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(rows, T, D, generator=torch.Generator().manual_seed(seed))


def expert_output(experts: Experts, expert: int, token: Tensor) -> Tensor:
    """Output of one expert for one token [D]."""
    matrices = {name: stack.weight[expert] for name, stack in experts.experts.named_children()}
    inner = matrices["up_proj"] @ token
    if "gate_proj" in matrices:
        return matrices["down_proj"] @ (F.silu(matrices["gate_proj"] @ token) * inner)
    return matrices["down_proj"] @ F.gelu(inner)


def slow_experts(experts: Experts, x: Tensor, documents: Tensor | None = None, lengths: Tensor | None = None) -> Any:
    """Experts as a loop over rows, tokens and choices: output and the dropped fraction of each row's choices, [B]."""
    num_rows, num_tokens = x.shape[:2]
    documents = torch.zeros(num_rows, U) if documents is None else documents
    lengths = torch.full((num_rows, U), M) if lengths is None else lengths
    y, dropped = torch.zeros_like(x), torch.zeros(num_rows)
    for row in range(num_rows):
        queues, num_choices = Counter(), 0
        for token in range(num_tokens):
            document = documents[row, token // M].item()
            if token % M >= lengths[row, token // M]:
                continue
            chunks = [c for c in range(U) if documents[row, c] == document and lengths[row, c]]
            even = len(chunks) * M * experts.experts_per_token / E
            probabilities = (experts.router.weight @ x[row, token]).softmax(-1)
            chosen = sorted(range(E), key=lambda expert: -float(probabilities[expert]))[: experts.experts_per_token]
            total = sum(float(probabilities[expert]) for expert in chosen) if len(chosen) > 1 else 1.0
            for expert in chosen:
                num_choices += 1
                queues[document, expert] += 1
                if experts.training and queues[document, expert] > math.ceil(experts.capacity_factor * even):
                    dropped[row] += 1
                else:
                    gate = probabilities[expert] / total
                    y[row, token] += gate * expert_output(experts, expert, x[row, token])
        dropped[row] /= num_choices
    return y, dropped


# --------------------------------------------------------------------------------------------- outputs and capacity


DOCUMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2], [0, 0, 0, 0]])
LENGTHS = torch.tensor([[4, 2, 4, 3], [1, 3, 4, 0], [4, 4, 1, 0]])


@top_k
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@torch.no_grad()
def test_in_evaluation_all_chosen_experts_process_every_token(k: int, activation: str) -> None:
    experts, x = make_experts(k, activation=activation).eval(), activations()
    for queues in (None, queues_of(x, M, DOCUMENTS, LENGTHS)):
        y, routing = experts(x, queues)
        expected, _ = slow_experts(experts, x, *((DOCUMENTS, LENGTHS) if queues else ()))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
        assert routing.shape == (len(x), len(ROUTING))
        assert routing[:, ROUTING.index("dropped_choices")].eq(0).all()


@top_k
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_in_training_the_last_choices_of_a_document_are_dropped(k: int, packed: bool) -> None:
    experts, x = make_experts(k), activations()
    given = (DOCUMENTS, LENGTHS) if packed else (None, None)
    expected, dropped = slow_experts(experts, x, *given)
    y, routing = experts(x, queues_of(x, M, *given))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    assert dropped.sum() > 0
    torch.testing.assert_close(routing[:, ROUTING.index("dropped_choices")], dropped)


@torch.no_grad()
def test_a_packed_document_is_routed_as_if_it_were_alone() -> None:
    """Other documents, their padding and the document's own padding change neither its logits nor its routing."""
    model = build(**{"experts.num_experts": E, "experts.every": 1, "experts.capacity_factor": 0.6}).train()
    tokens = batch()[0]
    documents, lengths = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]]), torch.tensor([[4, 3, 4, 2], [2, 4, 1, 4]])
    packed = model(Inputs(tokens, documents, lengths=lengths))
    for row, first, stop in ((0, 0, 2), (0, 2, 4), (1, 0, 1), (1, 1, 3), (1, 3, 4)):
        at = slice(first * M, stop * M)
        real = (torch.arange(M) < lengths[row, first:stop, None]).flatten()
        alone = model(
            Inputs(tokens[row : row + 1, at].where(real, 0), None, lengths=lengths[row : row + 1, first:stop])
        )
        torch.testing.assert_close(alone[0, real], packed[row, at][real], rtol=1e-4, atol=1e-5)
    _, routing = model.hidden(Inputs(tokens, documents, lengths=lengths))
    real = (torch.arange(M) < lengths[..., None]).flatten(1)
    _, same = model.hidden(Inputs(tokens.where(real, 7), documents, lengths=lengths))
    torch.testing.assert_close(same, routing)


@torch.no_grad()
def test_padding_uses_no_capacity_and_gets_no_output() -> None:
    experts, x = make_experts(capacity_factor=0.5), activations()
    lengths = LENGTHS[2:].expand(len(x), U)
    real = (torch.arange(M) < lengths[..., None]).flatten(1)
    queues = queues_of(x, M, None, lengths)
    y, routing = experts(x, queues)
    other, same = experts(x.where(real[..., None], -x), queues)
    assert y[~real].eq(0).all()
    assert torch.equal(other, y)
    assert torch.equal(same, routing)


def test_dropped_tokens_get_no_output_and_no_gradient() -> None:
    experts, x = make_experts(k=1, capacity_factor=0.25), activations().requires_grad_()
    with torch.no_grad():
        experts.router.weight.zero_()  # a tie: all tokens choose expert 0, whose capacity is 1 token
    y, _ = experts(x)
    assert y[:, 0].ne(0).all()
    assert y[:, 1:].eq(0).all()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[:, 1:].eq(0).all()


@top_k
def test_a_sequences_output_does_not_depend_on_its_batch(k: int) -> None:
    experts, x = make_experts(k), activations(rows=4)
    y, routing = experts(x)
    halves = [experts(half) for half in x.split(2)]
    torch.testing.assert_close(torch.cat([half for half, _ in halves]), y)
    torch.testing.assert_close(torch.cat([part for _, part in halves]), routing)
    settings = updated(SETTINGS, {"experts.num_experts": E, "experts.balance_loss_weight": 0.1})
    mean = sum(routing_loss(part, settings) for _, part in halves) / 2
    torch.testing.assert_close(mean, routing_loss(routing, settings))


@pytest.mark.parametrize("training", [True, False])
def test_no_token_depends_on_later_ones_even_with_dropping(training: bool) -> None:
    model = build(**{"experts.num_experts": E, "experts.every": 1, "experts.capacity_factor": 0.6}).train(training)
    tokens, neighbors, lengths = batch()
    with torch.no_grad():
        before = model(Inputs(tokens, None, neighbors, lengths))
        for position in range(0, T, 3):
            changed = tokens.clone()
            changed[:, position:] = (changed[:, position:] + 1) % SETTINGS.vocab_size
            after = model(Inputs(changed, None, neighbors, lengths))
            torch.testing.assert_close(after[:, :position], before[:, :position], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(after[:, position:], before[:, position:], rtol=1e-2, atol=1e-2)


# --------------------------------------------------------------------------------------------------------------- balance


@top_k
def test_the_balance_loss_is_1_for_a_uniform_router_and_at_most_experts_over_choices(k: int) -> None:
    experts, x = make_experts(k), activations()
    with torch.no_grad():
        experts.router.weight.zero_()
        _, routing = experts(x)
        assert routing[:, 0].tolist() == pytest.approx([1.0] * len(x))
        # Logits that favor the same k experts for every token.
        experts.router.weight[:k] = 30 * torch.ones(D)
        _, routing = experts(x.abs())
    assert routing[:, 0].tolist() == pytest.approx([E / k] * len(x))
    assert routing[:, ROUTING.index("busiest_expert")].tolist() == pytest.approx([E / k] * len(x))
    settings = updated(SETTINGS, {"experts.num_experts": E, "experts.per_token": k, "experts.balance_loss_weight": 0.5})
    assert routing_loss(routing, settings).item() == pytest.approx(0.5 * E / k)


def test_minimizing_the_balance_loss_evens_out_the_load() -> None:
    experts, x = make_experts(), activations(rows=4) + 1  # positive, so that one expert can suit all tokens
    with torch.no_grad():
        experts.router.weight.mul_(0.1)
        experts.router.weight[0] += 0.1
    optimizer = torch.optim.SGD([experts.router.weight], lr=0.1)
    busiest = []
    for _ in range(20):
        _, routing = experts(x)
        busiest.append(routing[:, ROUTING.index("busiest_expert")].mean().item())
        optimizer.zero_grad()
        routing_loss(
            routing, updated(SETTINGS, {"experts.num_experts": E, "experts.balance_loss_weight": 1.0})
        ).backward()
        optimizer.step()
    assert busiest[0] > 1.6
    assert busiest[-1] < 1.3


# ---------------------------------------------------------------------------------------------------- in the whole model


def test_every_nth_layer_has_experts_with_the_initial_scale_of_a_dense_block() -> None:
    torch.manual_seed(0)
    settings = updated(SETTINGS, {"d_model": 64, "experts.num_experts": E, "experts.every": 2})
    model, dense = Retro(settings), Retro(updated(settings, {"experts.num_experts": 0}))
    blocks = {int(name) + 1: residual.block for name, residual in model.feed_forward.items()}
    assert (
        [layer for layer, block in blocks.items() if isinstance(block, Experts)] == [2, 4] == [*settings.expert_layers]
    )
    for name, stack in blocks[2].experts.named_children():
        plain = dense.get_parameter(f"feed_forward.1.block.{name}.weight")
        assert isinstance(stack, ExpertLinear)
        assert stack.weight.shape == (E, *plain.shape)
        assert stack.weight.std().item() == pytest.approx(plain.std().item(), rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "accepted"),
    [
        ({"experts.num_experts": 1}, "2 or more, or 0"),
        ({"experts.num_experts": 4, "experts.per_token": 5}, "1 to model.experts.num_experts = 4"),
        ({"experts.num_experts": 4, "experts.every": 7}, "1 to model.num_layers = 6"),
        ({"experts.every": 0}, "greater than 0"),
        ({"experts.capacity_factor": 0.0}, "greater than 0"),
        ({"experts.balance_loss_weight": -0.1}, "greater than or equal to 0"),
    ],
)
def test_invalid_expert_settings_are_rejected_with_their_key(wrong: dict[str, Any], accepted: str) -> None:
    key, value = list(wrong.items())[-1]
    with pytest.raises(InputError) as refusal:
        updated(ModelSettings(), wrong)
    assert f"model.{key} = {value!r}: " in str(refusal.value)
    assert accepted in str(refusal.value)


def test_a_step_applies_the_balance_loss_and_logs_the_routing() -> None:
    """The mean over two batches of one sequence equals one batch of two."""
    whole = inputs()
    halves = split_batch(whole, B)

    def step(batches: list[Inputs], **changes: Any) -> tuple[dict[str, float], Retro]:
        model = build(**{"experts.num_experts": E, **changes}).train()
        settings = TrainSettings(steps=1, warmup_steps=0, gradient_accumulation_steps=len(batches), max_grad_norm=0.0)
        optimizer = make_optimizer([model], TrainSettings(lr=1e-3, weight_decay=0.0))
        return step_of(model, optimizer, iter(batches), settings)(0).metrics, model

    together, model = step([whole])
    apart, other = step(halves)
    assert set(ROUTING) <= set(together)
    for name, value in together.items():
        assert apart[name] == pytest.approx(value, rel=1e-4), name
    torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=1e-3, atol=1e-5)
    unbalanced, _ = step([whole], **{"experts.balance_loss_weight": 0.0})
    assert unbalanced["loss"] == together["loss"]
    assert unbalanced["gradient_norm"] != together["gradient_norm"]
    assert not set(ROUTING) & set(step([whole], **{"experts.num_experts": 0})[0])


def test_under_bfloat16_autocast_routing_equals_float32() -> None:
    experts, x = make_experts().eval(), activations()
    exact, routing = experts(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, same = experts(x)
    assert torch.equal(routing, same)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().mean() < 0.02 * exact.std()


def test_compilation_and_checkpointing_give_the_same_gradients() -> None:
    experts, x = make_experts(capacity_factor=0.8), activations()
    queues = queues_of(x, M, DOCUMENTS, LENGTHS)

    def gradients(call: Any) -> list[Tensor]:
        experts.zero_grad()
        y, routing = call(x, queues)
        (
            y.square().mean()
            + routing_loss(routing, updated(SETTINGS, {"experts.num_experts": E, "experts.balance_loss_weight": 10.0}))
        ).backward()
        return [parameter.grad.clone() for parameter in experts.parameters() if parameter.grad is not None]

    def checkpointed(x: Tensor, queues: Queues) -> Any:
        return checkpoint(experts, x, queues, use_reentrant=False)

    plain = gradients(experts)
    assert len(plain) == 3
    torch.testing.assert_close(gradients(checkpointed), plain)
    compiled = torch.compile(checkpointed, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), plain)


# ------------------------------------------------------------------------------------------------- on two processes


def objective(model: Retro, rows: slice) -> Tensor:
    """This part's share of the mean loss over the batch. One row is one document, the other holds three."""
    tokens, neighbors, neighbor_lengths = (each[rows] for each in batch())
    documents, lengths = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 2]])[rows], torch.tensor([[4, 4, 4, 4], [2, 4, 1, 4]])
    one_document = bool((documents == documents[:, :1]).all())
    hidden, routing = model.hidden(
        Inputs(tokens, None if one_document else documents, neighbors, neighbor_lengths, lengths[rows])
    )
    assert routing is not None
    value = plain_loss(hidden, model.output_weight, tokens.roll(-1, 1)) + routing_loss(routing, model.settings)
    return value * len(tokens) / B


def shared_model(k: int) -> Retro:
    return build(
        **{
            "experts.num_experts": E,
            "experts.per_token": k,
            "experts.balance_loss_weight": 0.5,
        },
        activation="swiglu",
    ).train()


def train_and_save(rank: int, folder: Path) -> None:
    """Train one of two processes, with one sequence and half of the experts; save gradients, loss and logits."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for k in (1, 2):
        model = shared_model(k)
        divided = share_experts(model, mesh)
        value = objective(model, slice(rank, rank + 1))
        value.backward()
        total = value.detach().clone()
        dist.all_reduce(total)
        state: dict[str, Any] = {"loss": total}
        for name, parameter in model.named_parameters():
            if parameter not in divided:
                dist.all_reduce(parameter.grad)
            state[f"parameters.{name}"], state[f"gradients.{name}"] = parameter.detach(), parameter.grad
        model.eval()
        with torch.no_grad():
            # Ranks may score batches of different sizes.
            state[f"logits.{rank}"] = model(Inputs(batch()[0][:, : T - 3 * rank]))
        dcp.save(state, checkpoint_id=folder / str(k))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # intended
def test_two_processes_sharing_the_experts_equal_one(tmp_path: Path) -> None:
    """A single process also loads their checkpoint."""
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing

    torch.multiprocessing.spawn(train_and_save, (tmp_path,), nprocs=2)
    for k in (1, 2):
        model = shared_model(k)
        value = objective(model, slice(0, B))
        value.backward()
        expected: dict[str, Tensor] = {"loss": value.detach()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected[f"parameters.{name}"], expected[f"gradients.{name}"] = parameter.detach(), parameter.grad
        model.eval()
        with torch.no_grad():
            expected |= {f"logits.{rank}": model(Inputs(batch()[0][:, : T - 3 * rank])) for rank in range(2)}
        found = {name: torch.full_like(tensor, math.nan) for name, tensor in expected.items()}
        dcp.load(found, checkpoint_id=tmp_path / str(k))
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_an_indivisible_number_of_experts_is_rejected() -> None:
    class Mesh:
        def size(self) -> int:
            return 3

    with pytest.raises(InputError, match=r"model\.experts\.num_experts = 4: .* parallel.expert = 3"):
        share_experts(make_experts(), Mesh())  # type: ignore[arg-type]
