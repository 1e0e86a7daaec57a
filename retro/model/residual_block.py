"""What stands around every block of decoder and encoder: a norm before it, and the stream that it adds to."""

from typing import Any

from torch import Tensor, nn


class Residual(nn.Module):
    """x + dropout(block(norm(x))), around every block of decoder and encoder."""

    def __init__(self, norm: nn.Module, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.block = block
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *args: Any, reads: Tensor | None = None, **kwargs: Any) -> Any:
        """[..., D] to [..., D]; what else the block takes follows x, and what else it returns follows the sum.

        With `reads` [..., D] the block reads that, and what it makes of it is added to x.
        """
        y = self.block(self.norm(x if reads is None else reads), *args, **kwargs)
        return (x + self.dropout(y[0]), *y[1:]) if isinstance(y, tuple) else x + self.dropout(y)


def rms_norm(width: int) -> nn.Module:
    """The norm of encoder and chunked cross-attention."""
    return nn.RMSNorm(width, eps=1e-6)


NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
"""Those of the decoder's own blocks, by `ModelSettings.norm`."""
