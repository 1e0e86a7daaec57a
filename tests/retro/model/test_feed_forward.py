"""Feed-forward blocks equal their formulas."""

import torch

from retro.model.feed_forward import GatedFeedForward


def test_swiglu_gates_every_hidden_feature() -> None:
    torch.manual_seed(0)
    block, x = GatedFeedForward(4, 6), torch.randn(4)
    gate = block.gate_proj.weight @ x
    expected = block.down_proj.weight @ (gate / (1 + (-gate).exp()) * (block.up_proj.weight @ x))
    torch.testing.assert_close(block(x[None])[0], expected)
