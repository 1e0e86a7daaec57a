"""How the processes of a training run share its work: what `retro/parallel.py` and `retro/pipeline.py` are told."""

from dataclasses import dataclass
from typing import Literal

from indexing.store.errors import InputError

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes of a run share its work. What a run computes does not depend on it."""

    data: int = 0
    """Processes that share the sequences of a batch; 0 = as many as the other ways leave."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is divided over them (ZeRO): 0 nothing, 1 the optimizer's moments, 2 gradients too, 3 parameters too."""
    offload: bool = False
    """Keep the divided parameters, gradients and moments in the host's memory, and step there; with `zero` from 1 on."""
    tensor: int = 1
    """Processes that share heads and feed-forward features of every layer, and the sequence between blocks."""
    pipeline: int = 1
    """Processes that share the layers, one after another."""
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Of a pipeline: one run of layers for each process, or two (less waiting, more sending)."""
    microbatches: int = 0
    """Parts that pass through a pipeline one after another; 0 = twice as many as it has processes, if the batch can be cut so."""
    checkpointing: Checkpointing = "none"
    """Activations computed again in the backward pass: `none`; `selective`: all but matrix products and attention; `full`:
    everything within a block."""

    def __post_init__(self) -> None:
        for key, least in (("data", 0), ("tensor", 1), ("pipeline", 1), ("microbatches", 0)):
            if getattr(self, key) < least:
                raise InputError(f"parallel.{key} = {getattr(self, key)}: must be {least} or more.")
        if self.offload and not self.zero:
            raise InputError(
                "parallel.offload = true: needs parallel.zero from 1 on, as only what is divided is offloaded."
            )


ALONE = ParallelSettings()
"""One process, which does everything."""
