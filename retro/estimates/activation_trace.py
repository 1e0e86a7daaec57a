"""What autograd keeps of a forward pass, block by block: the model itself runs, on tensors that have shapes and no data.

    Retro on fake tensors ── forward pass, loss ──► Trace: every storage that is kept, in which block, and why
                                                      │
        bytes between forward and backward pass  ◄────┴── none: all;  full: inputs of blocks;  selective: products too

Nothing is derived by hand, so new options of the model need nothing here. It takes about a second for any model and batch.
What a GPU does in one kernel (attention, norms) is counted as that kernel keeps it, though the tensors claim to be on a CPU.
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
from retro.model.loss import loss
from retro.model.mixture_of_experts import ExpertLinear
from retro.model.residual_block import Residual
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.parallel.settings import Checkpointing

_PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product")
"""Operations whose outcomes selective checkpointing keeps, by the beginning of their names."""


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device.

    Attributes:
        num_sequences: B.
        sequence_length: T.
        k: neighbors of a chunk; 0 = retrieval OFF.
        narrow: whether matrix products run under autocast in 16 bits.
        gpu: kernels of a GPU; else those of a CPU.
        documents: whether sequences hold several documents: then each attention keeps a mask of its own.
    """

    num_sequences: int
    sequence_length: int
    k: int = 0
    narrow: bool = True
    gpu: bool = True
    documents: bool = True


@dataclass(frozen=True)
class Storage:
    """A piece of memory that is, or may be, kept for the backward pass.

    Attributes:
        number: the same for two that are one.
        bytes: its size.
        block: name of the residual block that it was seen in; `encoder` or empty outside of blocks.
        kind: `input` of a block, `kept` by autograd, or `product`: outcome of a matrix product or an attention.
        by_token: whether it is of the decoder's stream, which sequence parallelism divides.
    """

    number: int
    bytes: int
    block: str
    kind: Literal["input", "kept", "product"]
    by_token: bool


@dataclass(frozen=True)
class Trace:
    """What a forward pass leaves behind.

    Attributes:
        storages: in the order in which they were seen; one that is kept twice stands here twice.
        copies: bytes of 16-bit copies of weights, by block. Autocast holds all of them until it ends, and autograd keeps them
            without checkpointing.
    """

    storages: list[Storage]
    copies: dict[str, int]

    def only(self, wanted: Callable[[str], bool]) -> "Trace":
        """The part of some blocks, what stands outside of them being `encoder` or empty: what one device of a pipeline keeps."""
        return Trace(
            [storage for storage in self.storages if wanted(storage.block)],
            {name: size for name, size in self.copies.items() if wanted(name)},
        )

    def kept(self, checkpointing: Checkpointing, token_shares: int = 1) -> int:
        """Bytes between the forward and the backward pass.

        Args:
            checkpointing: of activations.
            token_shares: parts into which sequence parallelism divides the decoder's stream.
        """
        return _unique((s for s in self.storages if _survives(s, checkpointing)), token_shares)

    def computed_again(self, checkpointing: Checkpointing, token_shares: int = 1) -> int:
        """Bytes that the largest block takes beside them while it is computed again, its copies of weights included."""
        sizes = [0]
        for name in dict.fromkeys(storage.block for storage in self.storages):
            mine = [storage for storage in self.storages if storage.block == name]
            lasting = {storage.number for storage in mine if _survives(storage, checkpointing)}
            again = (s for s in mine if s.kind == "kept" and s.number not in lasting)
            sizes.append(_unique(again, token_shares))
        return max(sizes)


def _survives(storage: Storage, checkpointing: Checkpointing) -> bool:
    if checkpointing == "none" or storage.block in ("", "encoder"):
        return storage.kind == "kept"
    return storage.kind == "input" or (storage.kind == "product" and checkpointing == "selective")


def _unique(storages: Iterable[Storage], token_shares: int) -> int:
    sizes = {s.number: s.bytes // token_shares if s.by_token else s.bytes for s in storages}
    return sum(sizes.values())


# --------------------------------------------------------------------------------------------------------- observing


def trace(settings: ModelSettings, run: Pass) -> Trace:
    """Run a model forward on fake tensors, loss included, and note what is kept.

    Args:
        settings: of the model; the vocabulary filled in.
        run: batch and device.
    """
    with torch.device("meta"):
        model = Retro(settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        return observe(model, run)


def observe(model: Retro, run: Pass) -> Trace:
    """The same of a model that exists, with tensors as real as its own: to see whether the fake ones tell the truth."""
    m, retrieved = model.settings.chunk_length, run.k if model.settings.cca_layers else 0
    shape, num_chunks = (run.num_sequences, run.sequence_length), run.sequence_length // m
    tokens = torch.zeros(shape, dtype=torch.int64)
    documents = torch.zeros(run.num_sequences, -(-run.sequence_length // m), dtype=torch.int64)
    neighbors = torch.zeros(run.num_sequences, num_chunks, retrieved, 2 * m, dtype=torch.int64) if retrieved else None
    seen = _Seen(model)
    # A CPU attends in bfloat16 by a way of its own (`attend`), in float16 as a GPU does in both: they take the same bytes.
    dtype = torch.float16 if run.gpu else torch.bfloat16
    with (
        seen.watching(),
        _FusedNorms() if run.gpu else contextlib.nullcontext(),
        torch.autocast("cpu", dtype, enabled=run.narrow),
    ):
        hidden = model.hidden(tokens, documents if run.documents else None, neighbors)
        loss(hidden, model.output_weight, tokens)
    return Trace(seen.storages, seen.copies if run.narrow else {})


class _Seen:
    """Notes storages while a model runs."""

    def __init__(self, model: Retro) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {
            module: name for name, module in model.named_modules() if isinstance(module, Residual | Encoder)
        }
        self.storages: list[Storage] = []
        self.copies: dict[str, int] = {}
        self._inside = [""]
        self._in_norm = False
        self._alive: list[Any] = []  # so that no two storages have one address
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
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
                # Beside the stream a block takes what all blocks take: positions, masks, encoded neighbors.
                self.note(leaf, "input", by_token=leaf is args[0] or leaf is kwargs.get("reads"))

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _norm(self, begins: bool, *_: Any) -> None:
        self._in_norm = begins

    def _keep(self, tensor: Tensor) -> Tensor:
        self.note(tensor, "kept", by_token=self._in_norm)
        return tensor

    def note(self, tensor: Tensor, kind: Literal["input", "kept", "product"], by_token: bool = False) -> None:
        """One tensor, if it is no weight."""
        storage, block = tensor.untyped_storage(), self._inside[-1]
        if storage._cdata in self._weights:
            return
        self._alive.append(storage)
        by_token = by_token and not block.startswith("encoder")
        self.storages.append(Storage(storage._cdata, storage.nbytes(), block, kind, by_token))


class _Products(TorchDispatchMode):
    """Notes the outcomes of matrix products and attentions."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.__name__.startswith(_PRODUCTS):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self.seen.note(leaf, "product")
        return made


class _FusedNorms(TorchFunctionMode):
    """RMSNorm as the kernel of a GPU does it: it keeps its input and a number for each row, where a CPU keeps a second copy too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.rms_norm and len(args) > 2 and args[2] is not None:
            return _FusedNorm.apply(args[0], args[2])
        return function(*args, **(kwargs or {}))


class _FusedNorm(torch.autograd.Function):
    """Keeps what the kernel keeps. Nothing runs backward here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return torch.empty_like(x)
