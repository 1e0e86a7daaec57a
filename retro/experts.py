"""Feed-forward blocks of experts, of which each token asks a few (GShard, Lepikhin et al. 2021, arXiv 2006.16668).

    x [B, T, D] ─ router ─ the k likeliest experts of each token, and how much each of them counts (gates)
         │                      │ places in the queues of the experts, one queue for each sequence; who comes after
         ▼                      ▼ the last place is dropped: its token goes on unchanged, by the residual stream
    queues [E, B·C, D] ─ (all-to-all: to the devices that hold the experts) ─ FeedForward ─ (all-to-all: and back)
                                                                                   │
    y [B, T, D] = sum over a token's choices of gate · answer  ◄───────────────────┘

Notable: queues are filled in the order of the tokens, all choices of a token before those of the next. So what is dropped
depends on earlier tokens alone (GShard serves the first choices of all tokens first, and lets a token know what comes after
it), and on nothing of other sequences: however a batch is divided, the same choices are dropped. Only training drops. In
evaluation queues are as long as they must be, each token is for itself, and reading one token at a time gives the same.

What balances the experts is returned beside y, as numbers of each sequence (`ROUTING`): a value, so that compilation, activation
checkpointing and pipeline stages hand it on like any other. Letters of the shape comments: E experts, k choices of a token,
C places in a queue, G queues of an expert (the sequences in training, one in evaluation), the rest as in `model.py`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from indexing.store.errors import InputError
from retro.feed_forward import FEED_FORWARD
from retro.model_settings import ModelSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROUTING = ("balance_loss", "router_z_loss", "dropped_choices", "busiest_expert")
"""The columns of what is returned of the routing: Switch Transformer's balance loss (Fedus et al. 2022, equations 4 to 6), 1
where experts are chosen evenly, up to E / k; the router's z-loss (ST-MoE, Zoph et al. 2022, equation 5); the share of the
choices that were dropped; and the choices of the busiest expert over an even share. With a capacity factor f, what lies above f is
dropped."""


class ExpertLinear(nn.Module):
    """The matrices of E experts, as a stack: an `nn.Linear` for each."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.divided = False  # by `share_experts`
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """[E, S, in] to [E, S, out], for as many experts as this device holds."""
        weight: Any = self.weight
        if self.divided:
            weight = weight.to_local()
        return torch.bmm(x, weight.transpose(1, 2))


class Experts(nn.Module):
    """The feed-forward block of a layer with experts."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = settings.num_experts, settings.experts_per_token
        self.capacity_factor = settings.capacity_factor
        self.mesh: DeviceMesh | None = None  # of the devices that share the experts
        self.router = nn.Linear(settings.d_model, settings.num_experts, bias=False)
        stack = partial(ExpertLinear, settings.num_experts)
        self.experts = FEED_FORWARD[settings.activation](settings.d_model, settings.d_ffw, stack)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] to [B, T, D], 0 for tokens whose choices were all dropped; and `ROUTING`, float32 [G, 4]."""
        gates, chosen, logits = self.route(x)
        num_groups = len(x) if self.training else 1
        chosen = chosen.view(num_groups, -1)  # [G, T·k], in the order of the tokens
        places, load = places_in_queues(chosen, self.num_experts)
        capacity = self.capacity(load, x.shape[1])
        kept = places < capacity
        group = torch.arange(num_groups, device=x.device)[:, None]
        num_slots = self.num_experts * num_groups * capacity
        slots = ((chosen * num_groups + group) * capacity + places).masked_fill(~kept, num_slots).flatten()  # [B·T·k]

        asking = x.to(_product_type(x)).flatten(0, 1).repeat_interleave(self.experts_per_token, 0)  # [B·T·k, D]
        queues = asking.new_zeros(num_slots + 1, x.shape[-1]).index_copy(0, slots, asking)[:-1]  # the last one: dropped
        answers = self.ask(queues.unflatten(0, (self.num_experts, -1))).flatten(0, 1)
        answers = answers.index_select(0, slots.clamp(max=num_slots - 1)).view(*gates.shape, -1)  # [B, T, k, D]
        gates = gates.masked_fill(~kept.view(gates.shape), 0).to(answers.dtype)
        routing = describe(logits.flatten(0, 1).unflatten(0, (num_groups, -1)), load, capacity)
        return (answers * gates[..., None]).sum(2), routing

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gates of each token's choices, float32 [B, T, k], the choices, int64 [B, T, k], and the logits [B, T, E].

        The gates of several choices sum to 1. That of a single one stays its probability (Switch Transformer): 1 would
        leave the router without a gradient.
        """
        with torch.autocast(x.device.type, enabled=False):  # Switch Transformer, section 2.4: bfloat16 is not enough
            logits = nn.functional.linear(x.float(), self.router.weight.float())
        gates, chosen = logits.softmax(-1).topk(self.experts_per_token)
        if self.experts_per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates, chosen, logits

    def capacity(self, load: Tensor, num_tokens: int) -> int:
        """Places in a queue, C: the capacity factor times an even share in training; in evaluation as many as are wanted."""
        if self.training:
            even = num_tokens * self.experts_per_token / self.num_experts
            return min(num_tokens, math.ceil(self.capacity_factor * even))
        longest = load.max()
        if self.mesh is not None:  # all devices send queues of one length
            longest = collectives.all_reduce(longest, "max", self.mesh)
        return max(1, int(longest))

    def ask(self, queues: Tensor) -> Tensor:
        """The answers to the queues of all experts, [E, G·C, D] twice, whichever device holds the expert."""
        if self.mesh is None:
            return self.experts(queues)
        n = self.mesh.size()
        received = rearrange(_exchange(queues, self.mesh), "(n e) s d -> e (n s) d", n=n)
        return _exchange(rearrange(self.experts(received), "e (n s) d -> (n e) s d", n=n), self.mesh)


def places_in_queues(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The place of every choice [G, S] in the queue of its expert, from 0 on, and the length of every queue [G, E]."""
    is_chosen = chosen[..., None] == torch.arange(num_experts, device=chosen.device)  # [G, S, E]
    so_far = is_chosen.cumsum(1)
    return so_far.gather(2, chosen[..., None])[..., 0] - 1, so_far[:, -1]


def describe(logits: Tensor, load: Tensor, capacity: int) -> Tensor:
    """`ROUTING` of each group, float32 [G, 4], from logits [G, T, E] and the number of choices of each expert [G, E]."""
    num_choices, num_experts = load.sum(-1), load.shape[-1]
    share = load / num_choices[:, None]
    balance = num_experts * (share * logits.softmax(-1).mean(1)).sum(-1)
    z = logits.logsumexp(-1).square().mean(1)
    dropped = (load - capacity).clamp(min=0).sum(-1) / num_choices
    return torch.stack((balance, z, dropped, num_experts * share.amax(-1)), dim=-1)


def routing_loss(routing: Tensor, settings: ModelSettings) -> Tensor:
    """What experts add to the loss, from the `ROUTING` of a batch, [B, 4], summed over the layers: a mean over sequences."""
    balance, z = routing[:, :2].mean(0)
    return settings.balance_weight * balance + settings.router_z_weight * z


def routing_metrics(routing: Sequence[float], settings: ModelSettings) -> dict[str, float]:
    """What is logged, by name: the mean over the layers of `ROUTING`, which is summed over them. Nothing without experts."""
    num_layers = len(settings.expert_layers)
    return {name: value / num_layers for name, value in zip(ROUTING, routing, strict=True)} if num_layers else {}


def _product_type(x: Tensor) -> torch.dtype:
    """What autocast multiplies in: half the bytes, for the queues too."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _exchange(x: Tensor, mesh: "DeviceMesh") -> Tensor:
    """All-to-all of equal blocks of rows: the i-th to device i, and device i's in the i-th place."""
    exchanged: Tensor = collectives.all_to_all_single_autograd(x.contiguous(), None, None, mesh)
    return exchanged


def share_experts(model: nn.Module, mesh: "DeviceMesh") -> set[nn.Parameter]:
    """Divide the experts over the devices of a mesh, all of which train on sequences of their own.

    The stacks of matrices become DTensors, sharded along the experts. Every device keeps its part of the values that it has, so
    all must have drawn the same (or none: meta tensors). Their gradients are already sums over the mesh, when the backward
    pass ends: of what all devices have learned from their sequences. Only devices with the same experts have more to add up.

    Args:
        model: its `Experts` are changed; on all devices alike.
        mesh: of one dimension.

    Returns:
        The parameters that are divided now: data parallelism over the same mesh has to leave them alone.

    Raises:
        InputError: the number of experts is no multiple of the number of devices.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    divided: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, Experts) or mesh.size() == 1:
            continue
        if module.num_experts % mesh.size():
            raise InputError(
                f"model.num_experts is {module.num_experts}: set it to a multiple of {mesh.size()}, "
                "the number of devices that share the experts."
            )
        module.mesh = mesh
        for stack in module.experts.children():
            assert isinstance(stack, ExpertLinear)
            part = distribute_tensor(stack.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            stack.weight, stack.divided = nn.Parameter(part, stack.weight.requires_grad), True
            divided.add(stack.weight)
    return divided
