"""Pre-norm residual connection around every block of decoder and encoder."""

from typing import Any

from torch import Tensor, nn


class Residual(nn.Module):
    """x + dropout(block(norm(x)))."""

    def __init__(self, norm: nn.Module, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.block = block
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *args: Any, reads: Tensor | None = None, **kwargs: Any) -> Any:
        """Apply the block to x [..., D]; further arguments are passed to the block.

        Args:
            x: residual stream.
            args: of the block.
            reads: input of the block in place of x (parallel residual), [..., D].
            kwargs: of the block.

        Returns:
            [..., D]; if the block returns a tuple, followed by its other items.
        """
        y = self.block(self.norm(x if reads is None else reads), *args, **kwargs)
        return (x + self.dropout(y[0]), *y[1:]) if isinstance(y, tuple) else x + self.dropout(y)


def rms_norm(width: int) -> nn.Module:
    """Create the norm of encoder and chunked cross-attention."""
    return nn.RMSNorm(width, eps=1e-6)


NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
"""Norms of the decoder's self-attention and feed-forward blocks, by `ModelSettings.norm`."""
