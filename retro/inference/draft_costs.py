"""What drafts cost: how much longer a pass takes that reads them, measured once on a CPU (`indexing/measured.py`)."""

import functools
from collections.abc import Mapping

import numpy as np

from indexing.measured import times_of
from retro.inference.packed_kernels import PackedProduct, drafts
from retro.model.retro import Retro

GPU_COSTS = (0.0, 0.03, 0.11, 0.16, 0.29, 0.36, 0.49, 0.53, 0.66)
"""Of drafts of 0 to 8 tokens on a GPU. Nothing is measured there, and these are a CPU's, which are larger."""


def draft_costs(model: Retro) -> np.ndarray:
    """What drafts of 0 to 8 tokens add to a pass over one text, as shares of it, float64 [1 + LONGEST_DRAFT]."""
    if model.output_weight.device.type != "cpu":
        return np.array(GPU_COSTS)
    packed = model.packed_output
    return _measured_costs(packed.few if isinstance(packed, PackedProduct) else "unpacked").copy()


@functools.cache
def _measured_costs(kernel: str) -> np.ndarray:
    return costs_of(times_of(drafts(kernel)))


def costs_of(milliseconds: Mapping[str, float]) -> np.ndarray:
    """The same from the times of products with the rows of a draft of 0 tokens, 1 token …"""
    times = np.array([*milliseconds.values()])
    return np.maximum(times / times[0] - 1, 0.0)
