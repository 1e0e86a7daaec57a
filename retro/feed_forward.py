"""The feed-forward blocks of decoder and encoder: what each token makes of itself.

Letters of the shape comments as in `model.py`.
"""

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


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): a third matrix says how much of each inner feature goes on."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner_width, bias=False)
        self.up = nn.Linear(width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.out(F.silu(self.gate(x)) * self.up(x))


FEED_FORWARD = {"gelu": FeedForward, "swiglu": GatedFeedForward}
"""By `ModelSettings.activation`."""
