"""What a training run changes of the model it begins with."""

from dataclasses import dataclass
from typing import Literal, get_args

from indexing.store.errors import InputError

Weights = Literal["all", "retrieval", "none"]
Adapter = Literal["none", "lora", "prefix", "prompt"]

RETRIEVAL = ("encoder.", "cross.")
"""What the names of the parameters of encoder and chunked cross-attention begin with: a baseline has none of them."""


@dataclass(frozen=True)
class TuningSettings:
    """Which weights are trained, and what small ones are added. What is not trained stays as it was, to the bit."""

    weights: Weights = "all"
    """Of the model itself: `all`; `retrieval`, the encoder and chunked cross-attention beside a frozen decoder (RETROfit,
    section 4.3 of the paper); `none`, an adapter alone."""
    adapter: Adapter = "none"
    """Small weights beside those of the model: `lora`, matrices of a low rank added to its own (Hu et al. 2021); `prefix`, keys
    and values before every sequence, in each layer of the decoder (Li & Liang 2021); `prompt`, the same made of vectors that
    pass through the layers like tokens (Lester et al. 2021). Needs the package peft."""
    rank: int = 8
    """Of LoRA's matrices."""
    alpha: float = 16.0
    """LoRA's products are added times alpha / rank."""
    dropout: float = 0.0
    """Share of the features dropped before LoRA's matrices in training."""
    targets: tuple[str, ...] = ("attention", "feed_forward")
    """What gets LoRA, by the beginning of the names that `retro.tuning.adapters.matrices` gives: `attention` (q_proj, k_proj, v_proj and
    o_proj of the decoder), `attention.q_proj`, `feed_forward.up_proj`, `cross`, `encoder.feed_forward` …"""
    virtual_tokens: int = 20
    """Of a prefix or prompt. They belong to no chunk and to no document: every token sees them."""

    def __post_init__(self) -> None:
        """Refuse what says nothing.

        Raises:
            InputError: naming the key, the value found, and what is accepted.
        """
        for key, choices in (("weights", Weights), ("adapter", Adapter)):
            if getattr(self, key) not in get_args(choices):
                raise InputError(f"tuning.{key} = {getattr(self, key)!r}: accepted are {', '.join(get_args(choices))}.")
        if self.weights == "none" and self.adapter == "none":
            raise InputError("tuning.weights = 'none': nothing would be trained; set tuning.adapter too.")
        for key in ("rank", "virtual_tokens"):
            if getattr(self, key) < 1:
                raise InputError(f"tuning.{key} = {getattr(self, key)}: must be at least 1.")
        if self.alpha <= 0:
            raise InputError(f"tuning.alpha = {self.alpha}: must be above 0.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"tuning.dropout = {self.dropout}: must be from 0 up to, not including, 1.")
        if self.adapter == "lora" and not self.targets:
            raise InputError("tuning.targets is empty: name what gets LoRA, 'attention' for example.")

    @property
    def retrieval_only(self) -> bool:
        """Whether a sequence without neighbors teaches nothing."""
        return self.weights == "retrieval" and self.adapter == "none"


ALL = TuningSettings()
"""Everything is trained."""
