"""Trace the tensors that autograd keeps in a forward pass, by block. The model runs on fake tensors, without data.

    Retro on fake tensors ── forward pass, loss ──► Trace: every kept storage, its block, and why it is kept
                                                      │
        bytes between forward and backward pass  ◄────┴── none: all;  full: inputs of blocks;  selective: products too

No formula is derived by hand, so new options of the model need no change here. A trace takes about a second for any model and
batch. Fused GPU kernels (attention, norms) count as they keep tensors, although the fake tensors are on a CPU.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retro.model.encoder import Encoder
from retro.model.inputs import Inputs
from retro.model.kernels import fits_bounds
from retro.model.loss import loss
from retro.model.mixture_of_experts import ExpertLinear
from retro.model.residual_block import Residual
from retro.model.retro import Retro
from retro.model.settings import ModelSettings, updated
from retro.parallel.settings import Checkpointing

_PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product")
"""Operations whose results selective checkpointing keeps, by the beginning of their names."""


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device.

    Attributes:
        num_sequences: B.
        sequence_length: T.
        k: neighbors of a chunk; 0 = retrieval OFF.
        narrow: whether matrix products run under autocast in 16 bits.
        gpu: whether to count kernels of a GPU; else of a CPU.
        documents: whether sequences hold several documents. Each attention then keeps a mask, unless a GPU needs none.
    """

    num_sequences: int
    sequence_length: int
    k: int = 0
    narrow: bool = True
    gpu: bool = True
    documents: bool = True


@dataclass(frozen=True)
class Storage:
    """A tensor storage that is kept for the backward pass, or may be.

    Attributes:
        number: identifies the storage.
        bytes: its size.
        block: name of the residual block in which it was seen; `encoder` or empty outside blocks.
        kind: `input` of a block, `kept` by autograd, or `product`: result of a matrix product or an attention.
        by_token: whether it belongs to the decoder's stream, which sequence parallelism divides.
    """

    number: int
    bytes: int
    block: str
    kind: Literal["input", "kept", "product"]
    by_token: bool


@dataclass(frozen=True)
class Trace:
    """Storages of a forward pass.

    Attributes:
        storages: in the order in which they were seen, with repetitions.
        copies: bytes of 16-bit copies of weights, by block. Autocast holds them until it ends; without checkpointing, autograd
            keeps them.
    """

    storages: list[Storage]
    copies: dict[str, int]

    def only(self, wanted: Callable[[str], bool]) -> "Trace":
        """The part of some blocks, for one device of a pipeline; `encoder` or the empty name is the part outside blocks."""
        return Trace(
            [storage for storage in self.storages if wanted(storage.block)],
            {name: size for name, size in self.copies.items() if wanted(name)},
        )

    def kept(self, checkpointing: Checkpointing, token_shards: int = 1) -> int:
        """Bytes between the forward and the backward pass.

        Args:
            checkpointing: activation checkpointing.
            token_shards: number of shards into which sequence parallelism divides the decoder's stream.
        """
        return _unique((s for s in self.storages if _survives(s, checkpointing)), token_shards)

    def recomputed(self, checkpointing: Checkpointing, token_shards: int = 1) -> int:
        """Additional bytes of the largest block while it is recomputed, copies of its weights included."""
        sizes = [0]
        for name in dict.fromkeys(storage.block for storage in self.storages):
            mine = [storage for storage in self.storages if storage.block == name]
            lasting = {storage.number for storage in mine if _survives(storage, checkpointing)}
            again = (s for s in mine if s.kind == "kept" and s.number not in lasting)
            sizes.append(_unique(again, token_shards))
        return max(sizes)


def _survives(storage: Storage, checkpointing: Checkpointing) -> bool:
    if checkpointing == "none" or storage.block in ("", "encoder"):
        return storage.kind == "kept"
    return storage.kind == "input" or (storage.kind == "product" and checkpointing == "selective")


def _unique(storages: Iterable[Storage], token_shards: int) -> int:
    sizes = {s.number: s.bytes // token_shards if s.by_token else s.bytes for s in storages}
    return sum(sizes.values())


# --------------------------------------------------------------------------------------------------------- recording


def trace(settings: ModelSettings, run: Pass) -> Trace:
    """Run a forward pass and the loss on fake tensors, and record which storages are kept.

    Args:
        settings: of the model, with vocab_size and chunk_length filled in.
        run: batch and device.
    """
    if _by_bounds(settings, run):
        settings = updated(settings, {"attention.sliding_window": 0})
    with torch.device("meta"):
        model = Retro(settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        return trace_model(model, run)


def trace_model(model: Retro, run: Pass) -> Trace:
    """As `trace`, of an existing model. With real tensors, this verifies the trace of fake ones."""
    m, retrieved = model.settings.chunk_length, run.k if model.settings.retrieves else 0
    shape, num_chunks = (run.num_sequences, run.sequence_length), run.sequence_length // m
    tokens, documents = torch.zeros(shape, dtype=torch.int64), None
    if run.documents and not _by_bounds(model.settings, run):
        documents = torch.zeros(run.num_sequences, -(-run.sequence_length // m), dtype=torch.int64)
    neighbors = lengths = None
    if retrieved:
        neighbors = torch.zeros(run.num_sequences, num_chunks, retrieved, 2 * m, dtype=torch.int64)
        lengths = torch.full(neighbors.shape[:3], 2 * m)
    recorder = _Recorder(model)
    # On a CPU, attention has a separate path for bfloat16; its float16 path keeps what a GPU keeps in either dtype.
    dtype = torch.float16 if run.gpu else torch.bfloat16
    with (
        recorder.hooks(),
        _FusedNorms() if run.gpu else contextlib.nullcontext(),
        torch.autocast("cpu", dtype, enabled=run.narrow),
    ):
        inputs = Inputs(tokens, documents, neighbors, lengths, labels=tokens)
        hidden, _ = model.hidden(inputs)
        loss(hidden, model.output_weight, tokens, model.mixture(hidden, inputs))
    return Trace(recorder.storages, recorder.copies if run.narrow else {})


def _by_bounds(settings: ModelSettings, run: Pass) -> bool:
    """True if attention on a GPU keeps no mask of documents or of a window, so it keeps what it keeps without them."""
    return run.gpu and run.narrow and fits_bounds(settings.attention, torch.bfloat16)


class _Recorder:
    """Records storages while a model runs."""

    def __init__(self, model: Retro) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {
            module: name for name, module in model.named_modules() if isinstance(module, Residual | Encoder)
        }
        self.storages: list[Storage] = []
        self.copies: dict[str, int] = {}
        self._inside = [""]
        self._in_norm = False
        self._alive: list[Any] = []  # keeps storages alive, so addresses stay unique
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in self.names:
                stack.callback(block.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            for module in self.model.modules():
                if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                    stack.callback(module.register_forward_pre_hook(partial(self._norm, True)).remove)
                    stack.callback(module.register_forward_hook(partial(self._norm, False)).remove)
            stack.enter_context(_Products(self))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            yield

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside.append(self.names[block])
        if isinstance(block, Encoder):
            return
        multiplying = [module for module in block.modules() if isinstance(module, nn.Linear | ExpertLinear)]
        self.copies[self.names[block]] = 2 * sum(own.numel() for module in multiplying for own in module.parameters())
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                # Other inputs are shared by all blocks: positions, masks, encoded neighbors.
                self.record(leaf, "input", by_token=leaf is args[0] or leaf is kwargs.get("reads"))

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _norm(self, begins: bool, *_: Any) -> None:
        self._in_norm = begins

    def _keep(self, tensor: Tensor) -> Tensor:
        self.record(tensor, "kept", by_token=self._in_norm)
        return tensor

    def record(self, tensor: Tensor, kind: Literal["input", "kept", "product"], by_token: bool = False) -> None:
        """Record the storage of a tensor, unless it is a weight."""
        storage, block = tensor.untyped_storage(), self._inside[-1]
        if storage._cdata in self._weights:
            return
        self._alive.append(storage)
        by_token = by_token and not block.startswith("encoder")
        self.storages.append(Storage(storage._cdata, storage.nbytes(), block, kind, by_token))


class _Products(TorchDispatchMode):
    """Records the results of matrix products and attentions."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.__name__.startswith(_PRODUCTS):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self.recorder.record(leaf, "product")
        return made


class _FusedNorms(TorchFunctionMode):
    """RMSNorm as on a GPU: the fused kernel keeps its input and a number per row; a CPU also keeps a second copy."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.rms_norm and len(args) > 2 and args[2] is not None:
            return _FusedNorm.apply(args[0], args[2])
        return function(*args, **(kwargs or {}))


class _FusedNorm(torch.autograd.Function):
    """Keeps what the fused kernel keeps. It has no backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return torch.empty_like(x)
