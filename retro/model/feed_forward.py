"""Feed-forward blocks of decoder and encoder.

Letters of the shape comments as in `retro.py`.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

Matrix = Callable[[int, int], nn.Module]
"""A function from numbers of input and output features to a module that multiplies by a matrix."""


def linear(in_features: int, out_features: int) -> nn.Module:
    """A matrix without a bias."""
    return nn.Linear(in_features, out_features, bias=False)


def affine(in_features: int, out_features: int) -> nn.Module:
    """A matrix with a bias."""
    return nn.Linear(in_features, out_features)


class FeedForward(nn.Module):
    """Two matrices with GELU in between. Experts pass another kind of matrix (`mixture_of_experts.py`)."""

    def __init__(self, width: int, inner_width: int, matrix: Matrix = linear, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate  # `tanh`: a formula for the normal distribution (Hendrycks & Gimpel 2016)
        self.up_proj = matrix(width, inner_width)
        self.down_proj = matrix(inner_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): a third matrix gates the inner features."""

    def __init__(self, width: int, inner_width: int, matrix: Matrix = linear) -> None:
        super().__init__()
        self.gate_proj = matrix(width, inner_width)
        self.up_proj = matrix(width, inner_width)
        # Both in one product, from `inference/packed_weights.py`, which then removes them.
        self.gate_up_proj: nn.Module | None = None
        self.down_proj = matrix(inner_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        joined = self.gate_up_proj
        gate, up = (self.gate_proj(x), self.up_proj(x)) if joined is None else joined(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


FEED_FORWARD: dict[str, Callable[..., nn.Module]] = {
    "gelu": FeedForward,
    "gelu-tanh": partial(FeedForward, approximate="tanh"),
    "swiglu": GatedFeedForward,
}
"""Feed-forward blocks by `ModelSettings.activation`."""
