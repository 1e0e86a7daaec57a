"""Pre-norm residual connection around every block of decoder and encoder."""

from typing import Generic, TypeVar

from torch import Tensor, nn

Block = TypeVar("Block", bound=nn.Module)


class PreNorm(nn.Module, Generic[Block]):
    """A block with the norm before it and the dropout after it."""

    block: Block

    def __init__(self, norm: nn.Module, block: Block, dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.block = block
        self.dropout = nn.Dropout(dropout)


class Residual(PreNorm[Block]):
    """x + dropout(block(norm(x)))."""

    def forward(self, x: Tensor, *reads: object, before: Tensor | None = None) -> Tensor:
        """Add the output of the block to the residual stream x [..., D].

        Args:
            x: residual stream.
            reads: what the block takes besides its input, such as `reads.Reads`.
            before: input of the block in place of x (parallel residual), [..., D].
        """
        return x + self.dropout(self.block(self.norm(x if before is None else before), *reads))


class RoutedResidual(PreNorm[Block]):
    """A `Residual` of experts, which return their routing too."""

    def forward(self, x: Tensor, *reads: object, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Residual.forward`, with `mixture_of_experts.ROUTING`, float32 [B, 3]."""
        y, routing = self.block(self.norm(x if before is None else before), *reads)
        return x + self.dropout(y), routing


def rms_norm(width: int) -> nn.Module:
    """Create the norm of encoder and chunked cross-attention."""
    return nn.RMSNorm(width, eps=1e-6)


NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
"""Norms of the decoder's self-attention and feed-forward blocks, by `ModelSettings.norm`."""
