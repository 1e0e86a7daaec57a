"""Activation checkpointing: the backward pass recomputes blocks instead of keeping their activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # defines torch.ops.torch_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from retro.model.retro import Retro
from retro.parallel.settings import Checkpointing

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
"""Operations whose results selective checkpointing keeps."""


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(model: Retro, how: Checkpointing) -> None:
    """Keep only the input of every block, and with `selective` the results of its matrix products.

    This wraps `forward`: Dynamo cannot trace the hooks of `torch.distributed._composable.checkpoint`, and a wrapper module would
    change the names of parameters.
    """
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    encoder = model.encoder.blocks if hasattr(model, "encoder") else []
    for block in [*model.blocks.values(), *encoder] if how != "none" else []:
        block.forward = _checkpointed(block.forward, contexts)


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    """Wrap `forward` in a function of this file: compilation silently skips `partial(checkpoint, forward)`."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return checkpointed
