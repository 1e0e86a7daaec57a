"""Bytes of a forward and backward pass, from a trace with fake tensors, which have shapes and lifetimes but no memory.

    model (layers of each kind) ─ forward ─ backward ─► Storages: bytes that operations create and free ─► Trace, layer by layer

The operations are those of the training step on a CPU. A GPU has kernels for attention and norms that keep fewer
tensors (`retro/model/kernels.py`). For a GPU, operations that keep the same tensors run in their place.
"""

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from retro.batch import loss
from retro.batch.inputs import Inputs
from retro.device import Placement
from retro.model import kernels
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.parallel import forward_backward
from retro.parallel.data_parallel import matrices
from retro.parallel.distribute import checkpoint_activations
from retro.parallel.settings import Checkpointing


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device.

    Attributes:
        num_sequences: B.
        sequence_length: T.
        k: neighbors of a chunk; 0 = retrieval OFF.
        narrow: whether matrix products run under autocast in 16 bits.
        gpu: whether kernels of a GPU run; else of a CPU.
        documents: whether sequences hold several documents. Each attention then keeps a mask, unless a GPU needs none.
    """

    num_sequences: int
    sequence_length: int
    k: int = 0
    narrow: bool = True
    gpu: bool = True
    documents: bool = True


@dataclass(frozen=True)
class Trace:
    """Bytes of a forward and backward pass without parameters and their gradients.

    The tuples have an item for the embedding, for every layer (the first one with cross-attention runs the encoder),
    and for the final norm, copy head and loss.

    Attributes:
        kept: tensors that are created in the forward pass and remain until the backward pass.
        working: temporary tensors of the backward pass, a gradient that is being computed included.
        gradients: float32 gradients of parameters that the backward pass finishes there.
        together: largest sum of both at one time.
        forward: temporary tensors of the forward pass.
    """

    kept: tuple[int, ...]
    working: tuple[int, ...]
    gradients: tuple[int, ...]
    together: tuple[int, ...]
    forward: int


@functools.lru_cache(maxsize=64)
def trace(
    settings: ModelSettings,
    run: Pass,
    checkpointing: Checkpointing = "none",
    *,
    narrow_weights: bool = False,
    compiled: bool = False,
    token_shards: int = 1,
) -> Trace:
    """Trace a pass. Of layers that are equal, at most two are traced.

    Args:
        settings: of the model, with vocab_size and chunk_length filled in.
        run: batch and device.
        checkpointing: activations that the backward pass recomputes.
        narrow_weights: whether the matrices of layers and encoder are in 16 bits already, so that autocast copies none.
        compiled: whether the loss is compiled.
        token_shards: number of processes that share the residual stream between blocks, and the loss, by token.
    """
    layers = _layers_to_trace(settings)
    traced = updated(
        settings,
        {
            "num_layers": len(layers),
            "retrieval.cca_layers": tuple(
                n for n, of in enumerate(layers, 1) if of + 1 in settings.retrieval.cca_layers
            ),
        },
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Retro(traced).train()
        if narrow_weights:
            _narrow(model)
        checkpoint_activations(model, checkpointing)
        storages = Storages(model, casts_once=compiled)
        with storages, _replaced(run):
            kept, working, gradients, together, forward = _pass(model, run, storages, compiled, token_shards)
    last_of = {_kind(settings, layer): position for position, layer in enumerate(layers, start=1)}
    phases = [0, *(last_of[_kind(settings, layer)] for layer in range(settings.num_layers)), len(layers) + 1]

    def of_all(sizes: dict[int, int]) -> tuple[int, ...]:
        return tuple(sizes[phase] for phase in phases)

    return Trace(of_all(kept), of_all(working), of_all(gradients), of_all(together), forward)


def _kind(settings: ModelSettings, layer: int) -> tuple[bool, bool, bool]:
    """What distinguishes a layer, counted from 0: cross-attention, the encoder, experts."""
    ccas = settings.retrieval.cca_layers
    return layer + 1 in ccas, layer + 1 == min(ccas, default=0), layer + 1 in settings.expert_layers


def _layers_to_trace(settings: ModelSettings) -> list[int]:
    """The first two layers of each kind; all layers if every n-th has experts, since their positions are a rule."""
    layers = range(settings.num_layers)
    if settings.expert_layers and settings.experts.every > 1:
        return list(layers)
    seen = Counter[tuple[bool, bool, bool]]()
    chosen = []
    for layer in layers:
        kind = _kind(settings, layer)
        seen[kind] += 1
        chosen += [layer] * (seen[kind] <= 2)
    return chosen


def _narrow(model: Retro) -> None:
    for name, parameter in matrices(model).items():
        if not name.startswith(("head", "copy_head")):  # gathered in float32
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(parameter.detach().to(torch.bfloat16)))


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations have created and nothing has freed, and their peak, by phase.

    Args:
        model: its parameters and their finished gradients do not count.
        casts_once: whether equal casts of a tensor are one, as in compiled code. Eager autocast makes one for each
            product.

    Attributes:
        phase: of the pass: 0 for the embedding, the number of a layer, or one more for what follows the last layer.
        live: bytes now.
        peaks: largest `live` in each phase.
        gradients: bytes of gradients that were finished in each phase, as float32.
        together: largest sum of `live` and the gradients of the phase.
        total_peak: largest sum of `live` and all gradients.
    """

    def __init__(self, model: nn.Module, casts_once: bool = False) -> None:
        super().__init__()
        self.casts_once, self._casts = casts_once, dict[Any, Tensor]()
        self.phase = self.live = self.total_peak = 0
        self.peaks, self.gradients, self.together = Counter[int](), Counter[int](), Counter[int]()
        self._sizes = {parameter.untyped_storage()._cdata: (0, 0) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._finish_gradient)

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        results = self._results(function, args, kwargs or {})
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes(), self.phase
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata)
        self._update_peaks()
        return results

    def _results(self, function: Any, args: Any, kwargs: Any) -> Any:
        is_cast = function is torch.ops.aten._to_copy.default and not isinstance(args[0], nn.Parameter)
        if not self.casts_once or not is_cast:
            return function(*args, **kwargs)
        cast = id(args[0]), kwargs.get("dtype")
        if cast not in self._casts:
            self._casts[cast] = function(*args, **kwargs)
            weakref.finalize(args[0], self._casts.pop, cast)
        return self._casts[cast].detach()

    def divide(self, tensor: Tensor, shards: int) -> None:
        """Count only a part of a tensor, which processes share, or (0) no part of it."""
        key = tensor.untyped_storage()._cdata
        size, phase = self._sizes[key]
        part = size // shards if shards else 0
        self._sizes[key] = part, phase
        self.live += part - size

    def by_phase(self) -> Counter[int]:
        """Bytes now, by the phase that created them."""
        sizes = Counter[int]()
        for size, phase in self._sizes.values():
            sizes[phase] += size
        return sizes

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]

    def _finish_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.divide(parameter.grad, 0)
        self.gradients[self.phase] += 4 * parameter.numel()
        self._update_peaks()

    def _update_peaks(self) -> None:
        phase = self.phase
        self.peaks[phase] = max(self.peaks[phase], self.live)
        self.together[phase] = max(self.together[phase], self.live + self.gradients[phase])
        self.total_peak = max(self.total_peak, self.live + self.gradients.total())


def _pass(model: Retro, run: Pass, storages: Storages, compiled: bool, token_shards: int) -> tuple[Any, ...]:
    """The attributes of `Trace`, by phase."""

    def entering(phase: int) -> Callable[[nn.Module, Any], None]:
        def enter(_: nn.Module, inputs: Any) -> None:
            storages.phase = phase
            inputs[0].register_hook(lambda _: setattr(storages, "phase", phase - 1))

        return enter

    last = len(model.layers) + 1
    for phase, layer in enumerate(model.layers, start=1):
        layer.attention.register_forward_pre_hook(entering(phase))
    model.norm.register_forward_pre_hook(entering(last))
    if token_shards > 1:
        for block in model.blocks.values():
            block.register_forward_hook(lambda _, __, h: storages.divide(h, token_shards))
    placement = Placement(torch.device("cpu"), torch.bfloat16 if run.narrow else torch.float32)
    inputs = _inputs(model.settings, run)
    context = forward_backward.StepContext(torch.ones((), dtype=torch.int64), run.num_sequences, 1.0, last=True)
    with placement.autocast():
        hidden, routing = model.hidden(inputs)
        num_tokens = run.sequence_length // token_shards  # whose loss one of several processes computes
        evidence = model.evidence(inputs)
        objective, _ = forward_backward.part_of_loss(
            model,
            hidden[:, :num_tokens],
            inputs.labels[:, :num_tokens],
            None if evidence is None else evidence.of((slice(None), slice(num_tokens))),
            routing,
            context,
            compiled=compiled,
        )
    del hidden, routing, evidence
    kept, forward = storages.by_phase(), max(storages.peaks.values()) - storages.live
    storages.peaks.clear()
    storages.together.clear()
    objective.backward()
    until = list(itertools.accumulate(kept[phase] for phase in range(last + 1)))
    working, together = (
        {phase: max(0, peaks[phase] - until[phase]) for phase in range(last + 1)}
        for peaks in (storages.peaks, storages.together)
    )
    return kept, working, storages.gradients, together, forward


def _inputs(settings: ModelSettings, run: Pass) -> Inputs:
    """A batch as training reads it."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(run.num_sequences, *shape, dtype=torch.int64)

    t, num_chunks, retrieves = run.sequence_length, run.sequence_length // settings.chunk_length, run.k > 0
    return Inputs(
        tokens=zeros(t),
        documents=zeros(num_chunks) if run.documents else None,
        neighbors=zeros(num_chunks, run.k, 2 * settings.chunk_length) if retrieves else None,
        neighbor_lengths=zeros(num_chunks, run.k) if retrieves else None,
        labels=zeros(t),
    )


# --- kernels ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced(run: Pass) -> Iterator[None]:
    """Replace what reads values, which fake tensors lack, what `torch.compile` fuses, and, for a GPU, its kernels."""
    rows = loss.block_rows

    def fused(*args: Any) -> Any:
        with _disable_current_modes():  # not counted: what a compiled loss creates and frees
            return loss._logit_gradients(*args)

    replaced: list[tuple[Any, str, Any]] = [
        (forward_backward, "without_ignored", lambda *values: values),
        (loss, "_compiled_logit_gradients", lambda: fused),
    ]
    if run.gpu:
        replaced += [
            (loss, "block_rows", lambda _, vocab_size: rows("cuda", vocab_size)),
            (kernels, "_has_flash_for_bounds", lambda _: True),
            (kernels, "block_of_queries", lambda _: 0),
            (torch.nn.functional, "scaled_dot_product_attention", fused_attention),
            (torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: _FusedNorm.apply(x, weight)),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by one kernel, which keeps its arguments, its result and a sum for each query: [N, H, Q, C].

    With a mask, no kernel of a GPU shares keys among heads, and a bool mask becomes one of the dtype of queries.
    """
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    y: Tensor = attention(q, k, v, attn_mask, True, 0.0, is_causal and attn_mask is None, scale=scale)[0]
    return y


class _FusedNorm(torch.autograd.Function):
    """RMSNorm by one kernel, which keeps its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
