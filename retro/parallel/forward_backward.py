"""Forward and backward passes of a model whose layers are all in this process.

    Inputs ─ local sequences ─ hidden, evidence ─ local tokens ─ part of the loss ─ gradients, summed over processes

`pipeline_parallel.py` does the same with the layers divided over processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from retro.batch.inputs import Inputs
from retro.batch.loss import Evidence, summed_loss, without_ignored
from retro.device import Placement
from retro.model.mixture_of_experts import ROUTING, routing_loss
from retro.model.retro import Retro
from retro.parallel.data_parallel import reshard, sync_gradients, unshard
from retro.parallel.distribute import allow_many_graphs, distribute
from retro.parallel.gradient_norms import squared_norm
from retro.parallel.process_mesh import Processes
from retro.parallel.tensor_parallel import local_tokens, of_all_tokens, own_part, token_losses_of


@dataclass(frozen=True)
class StepContext:
    """Totals of a step, by which the losses of each batch in each process are divided.

    Attributes:
        num_labels: labels that are not ignored, in all batches of the step and all processes: int64 [].
        num_sequences: sequences in all batches of the step and all processes.
        scale: loss scale.
        last: whether the optimizer steps after this batch.
    """

    num_labels: Tensor
    num_sequences: int
    scale: float
    last: bool


class DistributedModel(Protocol):
    """A model as the training loop uses it, independent of parallelism."""

    @property
    def model_parts(self) -> Sequence[Retro]:
        """The parts of the model in this process."""

    def forward_backward(self, inputs: Inputs, context: StepContext) -> Tensor:
        """Accumulate gradients of this process's rows; returns their part of cross-entropy and `ROUTING`: float32
        [1 + 3]."""

    def token_losses(self, inputs: Inputs) -> Tensor:
        """`Retro.token_losses` of inputs that all processes have: float32 [B, T] in all of them. Without gradients."""

    def gradient_norm(self) -> Tensor:
        """Total norm of the gradients of the model."""


class WholeModel:
    """A model that runs all layers in one call."""

    def __init__(
        self,
        model: Retro,
        processes: Processes,
        placement: Placement,
        *,
        compiled: bool = False,
        by_block: bool | None = None,
    ) -> None:
        """Distribute a model.

        Args:
            model: equal in all processes.
            processes: with their settings.
            placement: device and precision.
            compiled: use `torch.compile`.
            by_block: compile each kind of block once, as several processes must. False = the whole model: it takes
                longer, and on a CPU steps are then 4% faster (docs/results/speed.md). None = False for one process on
                a CPU.
        """
        self.processes, self.placement, self.compiled = processes, placement, compiled
        self.mesh = processes.along("tensor")
        if by_block is None:
            by_block = processes.count > 1 or placement.device.type != "cpu"
        distribute(model, processes, compiled=compiled and by_block, dtype=placement.dtype)
        # A distributed model is already on its device, or in the host's memory.
        self.model = model if processes.count > 1 else model.to(placement.device)
        self.run = self._run
        if compiled and not by_block:
            allow_many_graphs()
            self.run = torch.compile(self._run, fullgraph=True, dynamic=False)

    @property
    def model_parts(self) -> Sequence[Retro]:
        """See `DistributedModel`."""
        return [self.model]

    def forward_backward(self, inputs: Inputs, context: StepContext) -> Tensor:
        """See `DistributedModel`."""
        sync_gradients(self.model, self.processes.settings, context.last)
        with self.placement.autocast():
            hidden, routing, evidence = self.run(inputs)
            objective, parts = part_of_loss(
                self.model, hidden, inputs.labels, evidence, routing, context, mesh=self.mesh, compiled=self.compiled
            )
        if objective.requires_grad:
            objective.backward()
        else:  # no trained weight was used: a frozen decoder and a batch without neighbors
            reshard(self.model)
        return parts

    def _run(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Evidence | None]:
        """Hidden states, `ROUTING` and the copy head's evidence."""
        hidden, routing = self.model.hidden(inputs)
        return hidden, routing, self.model.evidence(inputs)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # evaluation has a new shape for each length of text
    def token_losses(self, inputs: Inputs) -> Tensor:
        """See `DistributedModel`."""
        local, num_rows = local_rows(inputs, self.processes, self.processes.data)
        with self.placement.autocast():
            hidden, _ = self.model.hidden(local)
            unshard(self.model)
            losses = token_losses_of(self.model, self.mesh, hidden, local)
        reshard(self.model)
        return self.processes.gathered(losses)[:num_rows]

    def gradient_norm(self) -> Tensor:
        """See `DistributedModel`."""
        return squared_norm(gradients(self.model.parameters())).sqrt()


def part_of_loss(
    model: Retro,
    hidden: Tensor,
    labels: Tensor,
    evidence: Evidence | None,
    routing: Tensor | None,
    context: StepContext,
    *,
    mesh: DeviceMesh | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """The part of a batch in the step's objective, and in its cross-entropy and `ROUTING`: float32 [1 + 3].

    Args:
        model: has the output layer and the copy head.
        hidden: hidden states of this process's tokens [B, T', D].
        labels: of all tokens [B, T].
        evidence: of all tokens, from `Retro.evidence`; None if there is nothing to copy from.
        routing: `ROUTING` of its sequences [B, 3], or None.
        context: of the step.
        mesh: of tensor parallelism, or None.
        compiled: fuse the operations between matrix products.
    """
    if mesh is None and not compiled and hidden.device.type == "cpu":  # a GPU would wait for the number of labels
        hidden, labels, evidence = without_ignored(hidden, labels, evidence)
    best = None if evidence is None else evidence.best
    total, vocabulary = summed_loss(*local_tokens(mesh, hidden, model.output_weight, labels, best), compiled=compiled)
    if evidence is not None and model.copy_head is not None:
        # The loss is that of the mixture. Its gradient trains the copy head, and the vocabulary's own cross-entropy the
        # vocabulary. Gradients of the copy head, like those of embeddings, are equal in all processes of a mesh, and
        # are not summed over it.
        mixed = model.copy_head.losses(of_all_tokens(vocabulary, mesh), labels, evidence)
        trained = total + mixed.sum()
        total = trained - trained.detach() + own_part(mixed, mesh).sum().detach()
    cross_entropy = total / context.num_labels
    objective, routed = cross_entropy, cross_entropy.new_zeros(len(ROUTING))
    if routing is not None:
        rows = len(routing) / context.num_sequences
        objective, routed = objective + routing_loss(routing, model.settings) * rows, routing.detach().mean(0) * rows
    return objective * context.scale, torch.cat((cross_entropy.detach().reshape(1), routed))


def local_rows(inputs: Inputs, processes: Processes, multiple: int) -> tuple[Inputs, int]:
    """This process's rows of inputs padded with their last row to a multiple, and the number of rows before."""
    num_rows = len(inputs.tokens)
    missing = -num_rows % multiple
    rows = processes.rows(num_rows + missing)

    def local(value: Tensor) -> Tensor:
        filled = torch.cat((value, value[-1:].expand(missing, *value.shape[1:]))) if missing else value
        return filled[rows.start : rows.stop]

    return inputs.map(local), num_rows


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def all_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of all parts of a model in a process."""
    return [named for part in parts for named in part.named_parameters()]
