"""The residual blocks of a model, in the order in which they run."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from retro.model.retro import Retro


def named_blocks(model: Retro) -> Iterator[tuple[str, Any]]:
    """Every residual block of a decoder by name."""
    for kind in ("attention", "cross", "feed_forward"):
        for name, block in getattr(model, kind).items():
            yield f"{kind}.{name}", block


def blocks(stack: nn.Module) -> Iterator[Any]:
    """Every residual block of a decoder or an encoder."""
    for kind in ("attention", "cross", "feed_forward"):
        children: Any = getattr(stack, kind)
        yield from children.values() if isinstance(children, nn.ModuleDict) else children
