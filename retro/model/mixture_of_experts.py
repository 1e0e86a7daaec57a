"""Mixture of experts: each token is sent to a few feed-forward blocks (GShard, Lepikhin et al. 2021, arXiv 2006.16668).

    x [B, T, D] ─ router ─ the k likeliest experts of each token, and their weights (gates)
         │                      │ slots in the queues of the experts, one queue for each document of each row;
         ▼                      ▼ choices beyond the last slot are dropped: the block adds nothing to the token
    queues [E, B·C, D] ─ (all-to-all: to the devices with the experts) ─ FeedForward ─ (all-to-all: back)
                                                                              │
    y [B, T, D] = sum over the choices of a token of gate · output  ◄─────────┘

Queues are filled in the order of the tokens, all choices of a token before those of the next one. (GShard places the
first choices of all tokens first, so later tokens influence earlier ones.) A document's queues have slots in proportion
to its chunks in the row. So whether a choice is dropped depends only on earlier tokens and on the number of chunks of
the same document: not on other documents, on other rows, or on how a batch is divided. Padding is sent to no expert.
Choices are dropped only in training. In evaluation, queues are as long as needed, so tokens are independent and
incremental decoding gives the same result.

Routing statistics of each sequence (`ROUTING`) are returned with y as a tensor, so compilation, activation
checkpointing and pipeline stages handle them like any other value. Letters of the shape comments: E experts, k choices
of a token, C slots of a row in an expert's queue, the rest as in `retro.py`; here U = ceil(T / M), an incomplete chunk
included.
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
from retro.model.kernels import product_dtype
from retro.model_settings import ModelSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROUTING = ("balance_loss", "dropped_choices", "busiest_expert")
"""Columns of the routing statistics: Switch Transformer's balance loss (Fedus et al. 2022, equations 4 to 6), from 1
(balanced) to E / k; the fraction of choices that were dropped; and the load of the busiest expert relative to an even
load. With a capacity factor f, load above f is dropped."""


class ExpertLinear(nn.Module):
    """The matrices of E experts, stacked: one `nn.Linear` per expert."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sharded = False  # by `share_experts`
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """[E, S, in] to [E, S, out], for the experts of this device."""
        weight: Any = self.weight
        if self.sharded:
            weight = weight.to_local()
        return torch.bmm(x, weight.transpose(1, 2))


class Queues(NamedTuple):
    """The queue of each token, and whether it enters one."""

    first: Tensor  # int64 [B, U], number of the first chunk of each chunk's document in its row
    size: Tensor  # int64 [B, U], number of chunks with tokens of that document in the row
    real: Tensor  # bool [B, T], False for padding


def queues_of(h: Tensor, chunk_length: int, documents: Tensor | None, lengths: Tensor | None) -> Queues:
    """Queues of the tokens of h [B, T, D]; documents and lengths [B, U] are those of `Inputs`."""
    num_rows, num_tokens = h.shape[:2]
    num_chunks = -(-num_tokens // chunk_length)
    document = torch.zeros(num_rows, num_chunks, dtype=torch.int64, device=h.device)
    if documents is not None:
        document[:, 1:] = (documents[:, 1:] != documents[:, :-1]).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    if lengths is None:
        lengths = torch.full_like(document, chunk_length)
    real = torch.arange(chunk_length, device=h.device) < lengths[:, :, None]  # [B, U, M]
    return Queues(same.int().argmax(-1), (same & (lengths > 0)[:, None]).sum(-1), real.flatten(1)[:, :num_tokens])


class Experts(nn.Module):
    """The feed-forward block of a layer with experts."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = settings.experts.num_experts, settings.experts.per_token
        self.capacity_factor, self.chunk_length = settings.experts.capacity_factor, settings.chunk_length
        # Slots in a queue per chunk, not rounded: the capacity factor times an even load.
        even = self.chunk_length * self.experts_per_token / self.num_experts
        self.slots_per_chunk = min(self.capacity_factor * even, self.chunk_length)
        self.mesh: DeviceMesh | None = None  # of expert parallelism
        self.router = nn.Linear(settings.d_model, settings.experts.num_experts, bias=False)
        stack = partial(ExpertLinear, settings.experts.num_experts)
        self.experts = FEED_FORWARD[settings.activation](settings.d_model, settings.d_ffw, stack)

    def forward(self, x: Tensor, queues: Queues | None = None) -> tuple[Tensor, Tensor]:
        """Send tokens [B, T, D] to experts: [B, T, D] and `ROUTING`, float32 [B, 3].

        The output is 0 for padding and for tokens whose choices were all dropped. Without queues, every row is one
        document without padding.
        """
        gates, choices, logits = self.route(x)
        queues = queues_of(x, self.chunk_length, None, None) if queues is None else queues
        chosen, counted = choices.flatten(1), queues.real.repeat_interleave(self.experts_per_token, 1)  # [B, T·k]
        so_far = running_load(chosen, counted, self.num_experts)  # [B, T·k, E]
        if self.training:
            slots, queued, length = self.slots_by_document(chosen, so_far, queues)
            queued = queued & counted
        else:
            slots, queued, length = self.slots_for_all(chosen, so_far), counted, self.longest(so_far[:, -1])
        num_slots = self.num_experts * length
        slots = (chosen * length + slots).masked_fill(~queued, num_slots).flatten()  # [B·T·k]

        # Queues of equal length, so that one batched product serves all experts. Dropped choices share the slot after
        # the last one.
        tokens = x.to(product_dtype(x)).flatten(0, 1).repeat_interleave(self.experts_per_token, 0)  # [B·T·k, D]
        sent = tokens.new_zeros(num_slots + 1, x.shape[-1]).index_copy(0, slots, tokens)[:-1]
        outputs = self.run_experts(sent.unflatten(0, (self.num_experts, -1))).flatten(0, 1)
        outputs = outputs.index_select(0, slots.clamp(max=num_slots - 1)).view(*gates.shape, -1)  # [B, T, k, D]
        gates = gates.masked_fill(~queued.view(gates.shape), 0).to(outputs.dtype)
        return (outputs * gates[..., None]).sum(2), routing_statistics(logits, queues.real, so_far[:, -1], queued)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts: gates float32 [B, T, k], experts int64 [B, T, k], and router logits [B, T, E].

        Gates of several choices sum to 1. The gate of a single choice is its probability (Switch Transformer): with 1,
        the router would receive no gradient.
        """
        with torch.autocast(x.device.type, enabled=False):  # Switch Transformer, section 2.4: bfloat16 is too coarse
            logits = nn.functional.linear(x.float(), self.router.weight.float())
        gates, chosen = logits.softmax(-1).topk(self.experts_per_token)
        if self.experts_per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates, chosen, logits

    def slots_by_document(self, chosen: Tensor, so_far: Tensor, queues: Queues) -> tuple[Tensor, Tensor, int]:
        """Slots of training: slot of each choice in its expert's queue, whether it exists, both [B, T·k]; and queue
        length B·C.

        A document has `slots_per_chunk` slots for each of its chunks, rounded up once per document. A row has room for
        as many documents as chunks, so C is equal for all rows and devices, and all queues have the same length.
        """
        num_rows, num_choices = chosen.shape
        of_chunk, per_chunk = self.chunk_length * self.experts_per_token, math.ceil(self.slots_per_chunk)
        chunk = torch.arange(num_choices, device=chosen.device) // of_chunk  # [T·k], of each choice
        ends = (queues.first * of_chunk - 1).clamp(min=0)[..., None].expand(-1, -1, self.num_experts)
        before = so_far.gather(1, ends).masked_fill(queues.first[..., None] == 0, 0)  # [B, U, E], in earlier documents
        earlier = before.flatten(1).gather(1, chunk * self.num_experts + chosen)  # [B, T·k]
        slots = so_far.gather(2, chosen[..., None])[..., 0] - 1 - earlier
        queued = slots < (queues.size.double() * self.slots_per_chunk).ceil()[:, chunk]
        row = torch.arange(num_rows, device=chosen.device)[:, None] * queues.first.shape[1]
        return (
            slots + ((row + queues.first) * per_chunk)[:, chunk],
            queued,
            num_rows * queues.first.shape[1] * per_chunk,
        )

    def slots_for_all(self, chosen: Tensor, so_far: Tensor) -> Tensor:
        """Slots of evaluation, in queues that hold the choices of all rows: [B, T·k]."""
        load = so_far[:, -1]  # [B, E]
        return so_far.gather(2, chosen[..., None])[..., 0] - 1 + (load.cumsum(0) - load).gather(1, chosen)

    def longest(self, load: Tensor) -> int:
        """Length of the longest queue, at least 1, from the number of choices [B, E] of each row."""
        longest = load.sum(0).max()
        if self.mesh is not None:  # all devices exchange queues of the same length
            longest = collectives.all_reduce(longest, "max", self.mesh)
        return max(1, int(longest))

    def run_experts(self, queues: Tensor) -> Tensor:
        """Run all experts on their queues [E, B·C, D], with all-to-all exchanges if devices share the experts."""
        if self.mesh is None:
            return self.experts(queues)
        n = self.mesh.size()
        received = rearrange(_exchange(queues, self.mesh), "(n e) s d -> e (n s) d", n=n)
        return _exchange(rearrange(self.experts(received), "e (n s) d -> (n e) s d", n=n), self.mesh)


def running_load(chosen: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Number of times that each expert was chosen in a row, up to and including each choice: int64 [B, S, E].

    Args:
        chosen: [B, S] experts.
        counted: bool [B, S], False for choices to leave out.
        num_experts: E.
    """
    experts = torch.arange(num_experts, device=chosen.device)
    return ((chosen[..., None] == experts) & counted[..., None]).cumsum(1)


def routing_statistics(logits: Tensor, real: Tensor, load: Tensor, queued: Tensor) -> Tensor:
    """`ROUTING` of each row, float32 [B, 3].

    Args:
        logits: [B, T, E].
        real: bool [B, T], False for padding, which no statistic counts.
        load: [B, E], number of times that each expert was chosen.
        queued: bool [B, T·k], choices that were not dropped.
    """
    num_choices, num_experts = load.sum(-1).clamp(min=1), load.shape[-1]
    share, weight = load / num_choices[:, None], real / real.sum(-1, keepdim=True).clamp(min=1)  # [B, E], [B, T]
    balance = num_experts * (share * (logits.softmax(-1) * weight[..., None]).sum(1)).sum(-1)
    dropped = (load.sum(-1) - queued.sum(-1)) / num_choices
    return torch.stack((balance, dropped, num_experts * share.amax(-1)), dim=-1)


def routing_loss(routing: Tensor, settings: ModelSettings) -> Tensor:
    """Auxiliary loss of experts: the mean over sequences, from `ROUTING` summed over layers, [B, 3]."""
    return settings.experts.balance_loss_weight * routing[:, ROUTING.index("balance_loss")].mean()


def routing_metrics(routing: Sequence[float], settings: ModelSettings) -> dict[str, float]:
    """Metrics by name: means over layers of `ROUTING`, which is summed over layers. Empty without experts."""
    num_layers = len(settings.expert_layers)
    return {name: value / num_layers for name, value in zip(ROUTING, routing, strict=True)} if num_layers else {}


def _exchange(x: Tensor, mesh: "DeviceMesh") -> Tensor:
    """All-to-all of equal blocks of rows: block i is sent to device i, and the block from device i becomes block i."""
    exchanged: Tensor = collectives.all_to_all_single_autograd(x.contiguous(), None, None, mesh)
    return exchanged


def share_experts(model: nn.Module, mesh: "DeviceMesh") -> set[nn.Parameter]:
    """Shard the experts over the devices of a mesh. Each device trains on its own sequences (expert parallelism).

    The stacks of matrices become DTensors, sharded by expert. Every device keeps its shard of its values, so all
    devices must have equal values (or meta tensors). After the backward pass, gradients are already summed over the
    mesh. Only devices with the same experts still need to sum them.

    Args:
        model: its `Experts` are changed in place.
        mesh: of one dimension.

    Returns:
        The sharded parameters. Data parallelism over the same mesh must skip them.

    Raises:
        InputError: the number of experts is not a multiple of the number of devices.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, Experts) or mesh.size() == 1:
            continue
        if module.num_experts % mesh.size():
            raise InputError(
                f"model.experts.num_experts = {module.num_experts}: should be a multiple of parallel.expert = {mesh.size()}."
            )
        module.mesh = mesh
        for stack in module.experts.children():
            assert isinstance(stack, ExpertLinear)
            part = distribute_tensor(stack.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            stack.weight, stack.sharded = nn.Parameter(part, stack.weight.requires_grad), True
            sharded.add(stack.weight)
    return sharded
