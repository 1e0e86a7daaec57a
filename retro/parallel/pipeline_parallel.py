"""Pipeline parallelism: each process holds some layers, and microbatches pass through them one after another.

    stage 0    tokens ─ embed ─ layers ─ h ─┐
    stage 1    h ─ layers, encoder in the one with the first CCA ─ h, encoded neighbors ─┐
    stage 2    h, encoded ─ layers ─ norm ─ copy head ─ loss

With experts, routing statistics are sent along. Every process reads the whole batch and computes masks and positions
itself. Schedules are PyTorch's. They need the shapes of what is sent, so there is one schedule per shape of batch, with
the same stages.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from retro.batch.inputs import Inputs
from retro.batch.loss import Evidence
from retro.copying.matches import MATCH_LENGTHS
from retro.copying.sources import SOURCES
from retro.device import Placement
from retro.model.mixture_of_experts import ROUTING
from retro.model.retro import Retro
from retro.model_settings import ModelSettings
from retro.parallel.data_parallel import reshard, unshard
from retro.parallel.distribute import distribute
from retro.parallel.forward_backward import StepContext, all_parameters, gradients, local_rows, part_of_loss
from retro.parallel.gradient_norms import local, squared_norm
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import check_reader, num_microbatches, num_stages
from retro.parallel.tensor_parallel import token_losses_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.pipelining import PipelineStage


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and the norm after the last."""

    def __init__(self, model: Retro, index: int, count: int, processes: Processes) -> None:
        """Take the part of a model that a stage needs.

        Args:
            model: the whole model, from which the other layers are removed.
            index: of the stage, from 0.
            count: number of stages.
            processes: with the mesh of tensor parallelism.
        """
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        self.tensor_mesh = processes.along("tensor")
        layers = stage_layers(model.settings, index, count)
        first_cca = min(model.settings.retrieval.cca_layers, default=0)
        self.sends_encoded = bool(first_cca) and first_cca <= layers.stop and not self.is_last
        first_experts = min(model.settings.expert_layers, default=model.settings.num_layers + 1)
        self.receives_routing, self.sends_routing = first_experts <= layers.start, first_experts <= layers.stop
        _prune(model, layers, self.is_first, self.is_last)
        self.model = model

    def forward(self, x: Tensor, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layers on tokens [B, T], or on the stream [B, T', D] and what the preceding stage sent in addition.

        The other arguments are the values of `Inputs` that are not None.

        Returns:
            The stream, followed by encoded neighbors and routing statistics if later stages need them. Of the last
            stage: the hidden states, followed by the copy head's evidence if there is something to copy from, and by
            the routing statistics.
        """
        batch, tensors = Inputs(**inputs), list(received)
        routing_before = tensors.pop() if self.receives_routing else None
        encoded = tensors.pop() if tensors else None
        if self.is_first:
            h = self.model.embed(x, batch.documents)
        else:
            h = x if self.tensor_mesh is None else DTensor.from_local(x, self.tensor_mesh, [Shard(1)], run_check=False)
        h, encoded, routing = self.model.run_layers(h, encoded, batch)
        if routing_before is not None:
            routing = routing_before if routing is None else routing + routing_before
        sent: Sequence[Tensor] = [encoded] if self.sends_encoded and encoded is not None else []
        if self.is_last:
            h = self.model.finish(h)
            evidence = self.model.evidence(batch)
            sent = [] if evidence is None else evidence
        else:
            h = local(h)
        return (h, *sent, *([] if routing is None else [routing]))


def _outputs(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Evidence | None, Tensor | None]:
    """Hidden states, evidence and routing statistics [B, 3] from what the last stage returns."""
    hidden, *others = out if isinstance(out, tuple) else (out,)
    of_dimensions = {part.ndim: part for part in others}
    evidence = Evidence(of_dimensions[5], of_dimensions[3]) if 5 in of_dimensions else None
    return hidden, evidence, of_dimensions.get(2)


def stage_layers(model: ModelSettings, index: int, count: int) -> range:
    """The layers of a stage, from 0, divided as evenly as possible."""
    return range(model.num_layers * index // count, model.num_layers * (index + 1) // count)


def _prune(model: Retro, layers: range, is_first: bool, is_last: bool) -> None:
    """Remove modules that the stage with these layers does not need."""
    settings = model.settings
    for children in (model.attention, model.feed_forward):
        for name in list(children):
            if int(name) not in layers:
                del children[name]
    for name in list(model.cross):
        if int(name) - 1 not in layers:
            del model.cross[name]
    encodes = min(settings.retrieval.cca_layers, default=0) - 1 in layers
    if not encodes and hasattr(model, "encoder"):
        del model.encoder
    if not (is_first or (is_last and settings.tied_embeddings) or (encodes and settings.shared_embeddings)):
        model.embedding = None  # type: ignore[assignment]
    if not is_last:
        model.norm = None  # type: ignore[assignment]
        model.head = model.copy_head = None
    if not is_first and settings.attention.positions == "learned":
        del model.position_embedding
    if not is_first and settings.retrieval_positions == "learned":
        del model.chunk_embedding


class Pipeline:
    """A model whose layers are divided over processes; otherwise like `WholeModel`."""

    def __init__(
        self,
        model: Retro,
        processes: Processes,
        placement: Placement,
        batch_size: int,
        *,
        compiled: bool = False,
    ) -> None:
        """Distribute a model.

        Args:
            model: equal in all processes.
            processes: with their settings.
            placement: device and precision.
            batch_size: sequences of a training batch.
            compiled: use `torch.compile`, block by block.

        Raises:
            InputError: the model cannot be divided this way.
        """
        settings = processes.settings
        check_reader(model.settings, pipeline=settings.pipeline)
        self.processes, self.placement, self.settings = processes, placement, model.settings
        self.compiled = compiled
        self.mesh = processes.mesh("pipeline")
        self.rank, size = self.mesh.get_local_rank(), self.mesh.size()
        self.num_stages = num_stages(settings, model.settings.num_layers)
        self.num_microbatches = num_microbatches(settings, len(processes.rows(batch_size)))
        self.indexes = range(self.rank, self.num_stages, size)
        self.stages = []
        for index in self.indexes:
            stage = Stage(copy.deepcopy(model), index, self.num_stages, processes)
            distribute(stage.model, processes, root=stage, compiled=compiled, dtype=placement.dtype)
            self.stages.append(stage)
        self._holders = self._embedding_holders()
        self._schedules: dict[object, Any] = {}  # PyTorch types their arguments for lists and dicts of one kind

    @property
    def model_parts(self) -> Sequence[Retro]:
        """See `DistributedModel`."""
        return [stage.model for stage in self.stages]

    def forward_backward(self, inputs: Inputs, context: StepContext) -> Tensor:
        """See `DistributedModel`."""
        schedule = self._schedule(inputs, training=True)
        self._context, self._losses = context, torch.zeros(1 + len(ROUTING), device=self.placement.device)
        with self.placement.autocast():
            first = [inputs.tokens] if self.rank == 0 else []
            target = inputs.labels if self._has_last else None
            schedule.step(*first, target=target, losses=[], return_outputs=False, **_for_all_stages(inputs))
        if context.last:
            self._sum_tied_gradients()
        return self._losses

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # as in `WholeModel`
    def token_losses(self, inputs: Inputs) -> Tensor:
        """See `DistributedModel`."""
        rows, num_rows = local_rows(inputs, self.processes, self.processes.data * self.num_microbatches)
        mesh = self.processes.along("tensor")
        with self.placement.autocast():
            schedule = self._schedule(rows, training=False)
            out = schedule.eval(*([rows.tokens] if self.rank == 0 else []), **_for_all_stages(rows))
            if self._has_last:
                unshard(self.stages[-1])
                losses = token_losses_of(self.stages[-1].model, mesh, _outputs(out)[0], rows)
            else:
                share = rows.labels if mesh is None else rows.labels.chunk(mesh.size(), 1)[0]
                losses = torch.zeros(share.shape, device=share.device)
        for stage in self.stages:
            reshard(stage)
        dist.broadcast(losses, group=self.mesh.get_group(), group_src=self.mesh.size() - 1)
        return self.processes.gathered(losses)[:num_rows]

    def gradient_norm(self) -> Tensor:
        """See `DistributedModel`."""
        # An embedding table held by several stages is one parameter: only that of the first stage counts.
        copies = {
            id(part.embedding.weight)
            for n, part in zip(self.indexes, self.model_parts, strict=True)
            if n and part.embedding
        }
        parameters = [parameter for _, parameter in all_parameters(self.model_parts) if id(parameter) not in copies]
        return self.processes.sum(squared_norm(gradients(parameters)), "pipeline").sqrt()

    @property
    def _has_last(self) -> bool:
        return self.stages[-1].is_last

    def _loss(self, out: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """The objective of a microbatch, from the outputs of the last stage."""
        hidden, evidence, routing = _outputs(out)
        model, mesh = self.stages[-1].model, self.processes.along("tensor")
        objective, parts = part_of_loss(
            model, hidden, labels, evidence, routing, self._context, mesh=mesh, compiled=self.compiled
        )
        self._losses += parts
        return objective

    def _schedule(self, inputs: Inputs, training: bool) -> Any:
        """Get or create the schedule for inputs of this shape."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B  # slow to import

        neighbors = None if inputs.neighbors is None else inputs.neighbors.shape[1:]
        key = inputs.tokens.shape, neighbors, inputs.votes is None, training
        if key not in self._schedules:
            indexed = zip(self.stages, self.indexes, strict=True)
            stages: list[Any] = [self._pipeline_stage(stage, index, inputs) for stage, index in indexed]
            loss = self._loss if training else None
            if len(stages) > 1:
                self._schedules[key] = ScheduleInterleaved1F1B(stages, self.num_microbatches, loss, scale_grads=False)
            else:
                self._schedules[key] = Schedule1F1B(stages[0], self.num_microbatches, loss, scale_grads=False)
        return self._schedules[key]

    def _pipeline_stage(self, stage: Stage, index: int, inputs: Inputs) -> "PipelineStage":
        """PyTorch's wrapper of a stage, with its inputs and outputs for a microbatch as meta tensors."""
        from torch.distributed.pipelining import PipelineStage

        settings, (rows, num_tokens) = self.settings, inputs.tokens.shape
        rows, tensor = rows // self.num_microbatches, self.processes.settings.tensor
        first_cca = min(settings.retrieval.cca_layers, default=settings.num_layers + 1)
        receives_encoded = first_cca <= stage_layers(settings, index, self.num_stages).start

        def of(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta", requires_grad=True)

        h = of(rows, num_tokens // tensor, settings.d_model)
        encoded = []
        if inputs.neighbors is not None:
            encoded = [of(rows, *inputs.neighbors.shape[1:], settings.encoder.d_model)]
        copies = any(source.name in settings.copy_head.names and source.is_present(inputs) for source in SOURCES)
        of_sources = rows, num_tokens, len(SOURCES)
        evidence = []
        if copies and stage.is_last:
            evidence = [
                of(*of_sources, len(MATCH_LENGTHS), 4),
                torch.empty(of_sources, dtype=torch.int64, device="meta"),
            ]
        routing = [of(rows, len(ROUTING))]
        received = (h, *encoded * receives_encoded, *routing * stage.receives_routing)
        outputs = (h, *encoded * stage.sends_encoded, *evidence, *routing * stage.sends_routing)
        if stage.is_first:
            received = (torch.empty(rows, num_tokens, dtype=torch.int64, device="meta"),)
        return PipelineStage(
            stage,
            index,
            self.num_stages,
            self.placement.device,
            input_args=received,
            output_args=outputs,
            group=self.mesh.get_group(),
        )

    # ------------------------------------------------------------------------------------------------ tied embeddings

    def _embedding_holders(self) -> dist.ProcessGroup | None:
        """Group of the processes of this pipeline that hold the embedding table; None for a process without it, or the
        only one."""
        holds = any(part.embedding is not None for part in self.model_parts)
        gathered: list[tuple[bool, list[int]]] = [(False, [])] * self.processes.count
        dist.all_gather_object(gathered, (holds, self.mesh.mesh.tolist()))
        joined = None
        for ranks in sorted({tuple(pipeline) for _, pipeline in gathered}):
            holders = [rank for rank in ranks if gathered[rank][0]]
            group = dist.new_group(holders) if len(holders) > 1 else None
            if self.processes.rank in holders:
                joined = group
        return joined

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of all copies of the embedding table."""
        tables = [part.embedding.weight for part in self.model_parts if part.embedding is not None]
        tables = [table for table in tables if table.requires_grad]
        if not tables or (self._holders is None and len(tables) == 1):
            return
        gradients = [
            local(table.grad) if table.grad is not None else torch.zeros_like(local(table)) for table in tables
        ]
        total = torch.stack(gradients).sum(0)
        if self._holders is not None:
            dist.all_reduce(total, group=self._holders)
        for table in tables:
            if table.grad is None:
                table.grad = torch.zeros_like(table)
            local(table.grad).copy_(total)


def _for_all_stages(inputs: Inputs) -> dict[str, Tensor]:
    """The values that are not None, with as many rows each, since a schedule divides them by row."""
    neighbors = inputs.neighbors
    if neighbors is not None and (absent := len(inputs.tokens) - len(neighbors)):
        lengths = inputs.neighbor_lengths
        if lengths is None:
            lengths = torch.full(neighbors.shape[:3], neighbors.shape[3], device=neighbors.device)
        inputs = inputs._replace(
            neighbors=F.pad(neighbors, (0, 0, 0, 0, 0, 0, 0, absent)),
            neighbor_lengths=F.pad(lengths, (0, 0, 0, 0, 0, absent)),  # 0 = no neighbor
        )
    return {name: value for name, value in inputs._asdict().items() if value is not None}
