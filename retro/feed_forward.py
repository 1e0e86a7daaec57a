"""The feed-forward blocks of decoder and encoder: what each token makes of itself."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Two matrices and a GELU, for each token by itself."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.out(F.gelu(self.up(x)))
