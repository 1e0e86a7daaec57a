"""Tensor and sequence parallelism with DTensor: processes hold some heads and features of every layer."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from retro.batch.inputs import Inputs
from retro.batch.loss import TokenLosses, token_losses
from retro.copying.model import MixtureParts
from retro.model.attention import Attention, PerHead
from retro.model.retro import ChunkedCrossAttention, Retro

Reads = tuple[object, ...]
"""What a block takes besides its input."""


def divide_layers(model: Retro, mesh: DeviceMesh) -> None:
    """Divide every block of decoder and encoder by heads or features, and the decoder's stream between blocks by token.

    Every process computes embeddings, and the encoder outside its blocks, in full.
    """
    for of_encoder in model.encoder.blocks if hasattr(model, "encoder") else ():
        _divide_block(of_encoder.block, mesh, Replicate(), local=True)
    for name, residual in model.blocks.items():
        parallelize_module(residual.norm, mesh, SequenceParallel(use_local_output=False))
        if isinstance(residual.block, ChunkedCrossAttention):
            # It takes windows of the whole sequence, so partial sums are placed in the sequence first, then divided.
            _divide_block(residual.block.attention, mesh, Partial(), local=True)
            residual.block.register_forward_pre_hook(partial(_gather_input, mesh, True))
            residual.block.register_forward_hook(partial(_scatter_output, mesh))
        else:
            _divide_block(residual.block, mesh, Shard(1), local=False)
            residual.block.register_forward_pre_hook(partial(_gather_input, mesh, False))
        if name in ("attention.0", "feed_forward.0"):
            residual.register_forward_pre_hook(partial(_scatter_first_input, mesh), with_kwargs=True)
    if model.norm is not None:  # the last stage of a pipeline has it
        parallelize_module(model.norm, mesh, SequenceParallel(use_local_output=False))
    if hasattr(model, "encoder"):
        model.encoder.register_forward_pre_hook(partial(_gather_encoder_input, mesh))


def _divide_block(block: nn.Module, mesh: DeviceMesh, output: Placement, local: bool) -> None:
    """Divide input matrices by rows (heads or features), output matrices by columns, and parameters per head by
    head."""
    if isinstance(block, Attention):
        block.first_head = mesh.get_local_rank() * (block.num_heads // mesh.size())
    for name, module in block.named_modules():
        if isinstance(module, nn.RMSNorm):  # of queries and keys [N, S, H, C], the same for all heads
            parallelize_module(module, mesh, SequenceParallel(sequence_dim=2, use_local_output=True))
        elif isinstance(module, PerHead):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
            module.register_forward_hook(lambda _module, _inputs, weight: weight.to_local())
        elif isinstance(module, nn.Linear):
            into_stream = name.endswith(("o_proj", "down_proj"))
            style = RowwiseParallel(output_layouts=output, use_local_output=local) if into_stream else ColwiseParallel()
            parallelize_module(module, mesh, style)


def _gather_input(mesh: DeviceMesh, local: bool, _: nn.Module, inputs: tuple[DTensor, *Reads]) -> tuple[Tensor, *Reads]:
    """Gather the input of a block, [B, T / tensor, D] to [B, T, D]."""
    x = inputs[0].redistribute(mesh, [Replicate()])
    return (x.to_local() if local else x, *inputs[1:])


def _scatter_output(mesh: DeviceMesh, _: nn.Module, __: object, added: Tensor) -> DTensor:
    """Sum the outputs of all processes [B, T, D] and keep the tokens of each: reduce-scatter."""
    return DTensor.from_local(added, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(1)])


def _scatter_first_input(
    mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, *Reads], kwargs: dict[str, Tensor | None]
) -> tuple[tuple[Tensor | None, *Reads], dict[str, Tensor | None]]:
    """Divide the embedded tokens, which every process has in full, by token, as input of the first layer's blocks."""

    def divide(h: Tensor | None) -> Tensor | None:
        if h is None or isinstance(h, DTensor):  # already divided: a checkpointed block is recomputed
            return h
        return _by_token(h, mesh)

    if "before" in kwargs:
        kwargs = {**kwargs, "before": divide(kwargs["before"])}
    return (divide(inputs[0]), *inputs[1:]), kwargs


def _gather_encoder_input(
    mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, Tensor | None, DTensor, nn.Embedding]
) -> tuple[Tensor, Tensor | None, Tensor, nn.Embedding]:
    """Gather the stream, the encoder's third input."""
    tokens, mask, h, table = inputs
    return tokens, mask, h.redistribute(mesh, [Replicate()]).to_local(), table


def local_tokens(
    mesh: DeviceMesh | None, hidden: Tensor, weight: Tensor, labels: Tensor, best: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states [B, T', D], output layer, labels [B, T'] and best candidates [B, T', C] of the tokens whose loss
    this process computes.

    Args:
        mesh: of tensor parallelism; None without it.
        hidden: from `Retro.hidden`.
        weight: [V, D], equal in all processes; its gradient is the sum over processes.
        labels: [B, T].
        best: of `Evidence`, or None.
    """
    if mesh is None:
        return hidden, weight, labels, best
    assert isinstance(hidden, DTensor)
    shared = DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return hidden.to_local(), shared, own_part(labels, mesh), None if best is None else own_part(best, mesh)


def own_part(values: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The values [B, T', …] of this process's tokens, of those of all tokens [B, T, …]."""
    # Contiguous, since a broadcast reads one block of memory.
    return values if mesh is None else values.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()


def of_all_tokens(vocabulary: TokenLosses, mesh: DeviceMesh | None) -> TokenLosses:
    """Losses of all tokens [B, T] in every process, from those of each one's own tokens [B, T']."""
    if mesh is None:
        return vocabulary
    whole = (DTensor.from_local(part, mesh, [Shard(1)], run_check=False) for part in vocabulary)
    return TokenLosses(*(part.redistribute(mesh, [Replicate()]).to_local() for part in whole))


def token_losses_of(model: Retro, mesh: DeviceMesh | None, hidden: Tensor, inputs: Inputs) -> Tensor:
    """`Retro.token_losses` of the tokens of this process [B, T'], from hidden states; copying needs all tokens in every
    process."""
    evidence = model.scored_evidence(inputs)
    best = None if evidence is None else evidence.best
    vocabulary = token_losses(*local_tokens(mesh, hidden, model.output_weight, model.scored_tokens(inputs), best))
    parts = MixtureParts(of_all_tokens(vocabulary, mesh), evidence)
    return own_part(model.with_copying(parts, inputs)[0], mesh)


def _by_token(values: Tensor, mesh: DeviceMesh) -> DTensor:
    """Divide values [B, T, …] that every process has in full by token. Gradients are gathered."""
    return DTensor.from_local(values, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)])
