"""Feed-forward blocks of experts: each token is sent to a few of them (GShard, Lepikhin et al. 2021, arXiv 2006.16668).

    x [B, T, D] ─ router ─ the k likeliest experts of each token, and how much each of them counts (gates)
         │                      │ places in the queues of the experts, one queue for each document of each row;
         ▼                      ▼ choices beyond the last place are dropped: the token keeps its residual stream
    queues [E, B·C, D] ─ (all-to-all: to the devices that hold the experts) ─ FeedForward ─ (all-to-all: and back)
                                                                                   │
    y [B, T, D] = sum over a token's choices of gate · answer  ◄───────────────────┘

Queues are filled in the order of the tokens, all choices of a token before those of the next. GShard serves the first choices
of all tokens first, and so lets a token know later ones. A document's queues have places in proportion to its chunks in the
row. So what is dropped depends on the earlier tokens and the number of chunks of the same document, and on nothing else: not
on other documents of the row, not on other rows, and not on how a batch is divided. Padding is sent to no expert. Only
training drops. In evaluation queues are as long as needed, each token is for itself, and reading one token at a time gives the
same.

Balance figures of each sequence are returned with y (`ROUTING`): as a value, compilation, activation checkpointing and
pipeline stages pass it on like any other. Letters of the shape comments: E experts, k choices of a token, C places of a row in
an expert's queue, the rest as in `retro.py`; here U = ceil(T / M), an incomplete chunk included.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from indexing.store.errors import InputError
from retro.model.feed_forward import FEED_FORWARD
from retro.model.settings import ModelSettings

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


class Queues(NamedTuple):
    """What decides which queue of an expert a token stands in, and whether it stands in one at all."""

    first: Tensor  # int64 [B, U], the first chunk in the row of each chunk's document
    size: Tensor  # int64 [B, U], and the number of its chunks in the row that hold tokens
    real: Tensor  # bool [B, T], False for padding


def queues_of(h: Tensor, chunk_length: int, documents: Tensor | None, lengths: Tensor | None) -> Queues:
    """The queues of the tokens of h [B, T, D]; documents and lengths [B, U] as in `Retro.hidden`."""
    num_rows, num_tokens = h.shape[:2]
    num_chunks = -(-num_tokens // chunk_length)
    run = torch.zeros(num_rows, num_chunks, dtype=torch.int64, device=h.device)
    if documents is not None:
        run[:, 1:] = (documents[:, 1:] != documents[:, :-1]).cumsum(1)
    same = run[:, :, None] == run[:, None, :]
    if lengths is None:
        lengths = torch.full_like(run, chunk_length)
    real = torch.arange(chunk_length, device=h.device) < lengths[:, :, None]  # [B, U, M]
    return Queues(same.int().argmax(-1), (same & (lengths > 0)[:, None]).sum(-1), real.flatten(1)[:, :num_tokens])


class Experts(nn.Module):
    """The feed-forward block of a layer with experts."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = settings.num_experts, settings.experts_per_token
        self.capacity_factor, self.chunk_length = settings.capacity_factor, settings.chunk_length
        # Places in a queue for each chunk, not rounded: the capacity factor times an even share.
        even = self.chunk_length * self.experts_per_token / self.num_experts
        self.rate = min(self.capacity_factor * even, self.chunk_length)
        self.mesh: DeviceMesh | None = None  # of the devices that share the experts
        self.router = nn.Linear(settings.d_model, settings.num_experts, bias=False)
        stack = partial(ExpertLinear, settings.num_experts)
        self.experts = FEED_FORWARD[settings.activation](settings.d_model, settings.d_ffw, stack)

    def forward(self, x: Tensor, queues: Queues | None = None) -> tuple[Tensor, Tensor]:
        """[B, T, D] to [B, T, D], 0 for padding and for tokens whose choices were all dropped; and `ROUTING`, float32 [B, 4].

        Without queues every row is one document without padding.
        """
        gates, choices, logits = self.route(x)
        queues = queues_of(x, self.chunk_length, None, None) if queues is None else queues
        chosen, asking = choices.flatten(1), queues.real.repeat_interleave(self.experts_per_token, 1)  # [B, T·k]
        so_far = counted(chosen, asking, self.num_experts)  # [B, T·k, E]
        if self.training:
            places, kept, length = self.places_by_document(chosen, so_far, queues)
            kept = kept & asking
        else:
            places, kept, length = self.places_for_all(chosen, so_far), asking, self.longest(so_far[:, -1])
        num_slots = self.num_experts * length
        slots = (chosen * length + places).masked_fill(~kept, num_slots).flatten()  # [B·T·k]

        tokens = x.to(_product_type(x)).flatten(0, 1).repeat_interleave(self.experts_per_token, 0)  # [B·T·k, D]
        sent = tokens.new_zeros(num_slots + 1, x.shape[-1]).index_copy(0, slots, tokens)[:-1]  # the last one: dropped
        answers = self.ask(sent.unflatten(0, (self.num_experts, -1))).flatten(0, 1)
        answers = answers.index_select(0, slots.clamp(max=num_slots - 1)).view(*gates.shape, -1)  # [B, T, k, D]
        gates = gates.masked_fill(~kept.view(gates.shape), 0).to(answers.dtype)
        return (answers * gates[..., None]).sum(2), describe(logits, queues.real, so_far[:, -1], kept)

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

    def places_by_document(self, chosen: Tensor, so_far: Tensor, queues: Queues) -> tuple[Tensor, Tensor, int]:
        """For training: places in the queues of the experts, and which of them exist, both [B, T·k]; and the queues' length B·C.

        A document has `rate` places for each of its chunks, rounded up once. A row has room for as many documents as chunks: C
        is the same for every row of every device, which sends queues of one length.
        """
        num_rows, num_choices = chosen.shape
        of_chunk, per_chunk = self.chunk_length * self.experts_per_token, math.ceil(self.rate)
        chunk = torch.arange(num_choices, device=chosen.device) // of_chunk  # [T·k], of each choice
        ends = (queues.first * of_chunk - 1).clamp(min=0)[..., None].expand(-1, -1, self.num_experts)
        before = so_far.gather(1, ends).masked_fill(queues.first[..., None] == 0, 0)  # [B, U, E], in earlier documents
        earlier = before.flatten(1).gather(1, chunk * self.num_experts + chosen)  # [B, T·k]
        places = so_far.gather(2, chosen[..., None])[..., 0] - 1 - earlier
        kept = places < (queues.size.double() * self.rate).ceil()[:, chunk]
        row = torch.arange(num_rows, device=chosen.device)[:, None] * queues.first.shape[1]
        return places + ((row + queues.first) * per_chunk)[:, chunk], kept, num_rows * queues.first.shape[1] * per_chunk

    def places_for_all(self, chosen: Tensor, so_far: Tensor) -> Tensor:
        """For evaluation: places in queues that take the choices of all rows, [B, T·k]."""
        load = so_far[:, -1]  # [B, E]
        return so_far.gather(2, chosen[..., None])[..., 0] - 1 + (load.cumsum(0) - load).gather(1, chosen)

    def longest(self, load: Tensor) -> int:
        """Places that the longest queue needs, from the number of choices [B, E] of each row; 1 at least."""
        longest = load.sum(0).max()
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


def counted(chosen: Tensor, asking: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen in a row up to each choice, this one included: int64 [B, S, E].

    Args:
        chosen: [B, S] experts.
        asking: bool [B, S], False for choices that do not count.
        num_experts: E.
    """
    experts = torch.arange(num_experts, device=chosen.device)
    return ((chosen[..., None] == experts) & asking[..., None]).cumsum(1)


def describe(logits: Tensor, real: Tensor, load: Tensor, kept: Tensor) -> Tensor:
    """`ROUTING` of each row, float32 [B, 4].

    Args:
        logits: [B, T, E].
        real: bool [B, T]; padding counts in no figure.
        load: [B, E], choices of each expert.
        kept: bool [B, T·k], choices that were not dropped.
    """
    num_choices, num_experts = load.sum(-1).clamp(min=1), load.shape[-1]
    share, weight = load / num_choices[:, None], real / real.sum(-1, keepdim=True).clamp(min=1)  # [B, E], [B, T]
    balance = num_experts * (share * (logits.softmax(-1) * weight[..., None]).sum(1)).sum(-1)
    z = (logits.logsumexp(-1).square() * weight).sum(1)
    dropped = (load.sum(-1) - kept.sum(-1)) / num_choices
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
