"""What drafts cost: how much longer a pass takes that reads them.

On a CPU passes of a small decoder are measured once (`indexing/measured.py`), with packed or with plain weights. With
plain ones products of two and of three rows are slower than those of four.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from indexing.measured import INNER, WIDTH, Question, Ways, times_of
from retro.device import Placement
from retro.inference.decoder import Decoder
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.packed_kernels import PackedProduct
from retro.inference.packed_weights import pack_with
from retro.model.retro import Retro
from retro.model_settings import NO_COPY_HEAD, AttentionSettings, ModelSettings, RetrievalSettings

GPU_COSTS = (0.0, 0.03, 0.11, 0.16, 0.29, 0.36, 0.49, 0.53, 0.66)
"""Of drafts of 0 to 8 tokens on a GPU. Nothing is measured there, and these are a CPU's, which are larger."""


def draft_costs(model: Retro) -> np.ndarray:
    """What drafts of 0 to 8 tokens add to a pass over one text, as shares of it, float64 [1 + LONGEST_DRAFT]."""
    if model.output_weight.device.type != "cpu":
        return np.array(GPU_COSTS)
    return _measured_costs(isinstance(model.packed_output, PackedProduct)).copy()


@functools.cache
def _measured_costs(packed: bool) -> np.ndarray:
    return costs_of(times_of(drafts(packed)))


def costs_of(milliseconds: Mapping[str, float]) -> np.ndarray:
    """The same from the times of passes with drafts of 0 tokens, 1 token …"""
    times = np.array([*milliseconds.values()])
    return np.maximum(times / times[0] - 1, 0.0)


def drafts(packed: bool) -> Question:
    """How long a pass with a draft of 0 to 8 tokens takes, with packed or with plain weights."""
    lengths = range(1 + LONGEST_DRAFT)
    name = "drafts, packed" if packed else "drafts, unpacked"
    return Question(name, tuple(map(str, lengths)), partial(_passes, packed))


_LAYERS, _VOCABULARY, _PROMPT, _CONTEXT = 8, 4096, 128, 4096


def _passes(packed: bool) -> Ways:
    """Passes of a decoder that has read a prompt, each over one token more than the last one."""
    settings = ModelSettings(
        vocab_size=_VOCABULARY,
        chunk_length=64,
        d_model=WIDTH,
        d_ffw=INNER,
        num_layers=_LAYERS,
        activation="swiglu",
        attention=AttentionSettings(num_heads=WIDTH // 64, head_dim=64),
        retrieval=RetrievalSettings(cca_layers=()),
        copy_head=NO_COPY_HEAD,
    )
    with torch.device("meta"):
        model = Retro(settings)
    for blocks in (model.attention, model.feed_forward):
        blocks.update(dict.fromkeys(blocks, blocks["0"]))  # packed once, run in each layer
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    if packed:
        pack_with(model, "float16")
    decoder = Decoder(model, Placement(torch.device("cpu"), torch.float32), _CONTEXT)
    row = decoder.add(np.zeros(_PROMPT, np.int64))
    decoder.read([row])

    def way(draft: np.ndarray) -> Callable[[], None]:
        def run() -> None:
            decoder.append(row, 0)
            decoder.step(lambda *_: draft)

        return run

    return {str(length): way(np.zeros(length, np.int64)) for length in range(1 + LONGEST_DRAFT)}
