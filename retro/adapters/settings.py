"""Settings of `[tuning]`: which weights are trained, and adapters."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import settings

Weights = Literal["all", "retrieval", "none"]
Adapter = Literal["none", "lora"]

RETRIEVAL = ("encoder.", "cross.", "copy_head.neighbors.", "copy_head.datastore.")
"""Prefixes of parameter names in encoder, chunked cross-attention and copying from neighbors, which a baseline lacks."""


@settings
class TuningSettings:
    """Which weights of a model are trained, and which adapter is added. Frozen weights stay bit-identical."""

    weights: Weights = "all"
    """Weights of the model to train: `all`; `retrieval`, encoder, chunked cross-attention and copying from neighbors of a frozen
    decoder (RETROfit, section 4.3 of the paper); `none`, only an adapter."""
    adapter: Adapter = "none"
    """Small weights added to the model: `lora`, low-rank matrices added to its matrices (Hu et al. 2021). Needs the package peft."""
    rank: PositiveInt = 8
    """Rank of LoRA's matrices."""
    alpha: PositiveFloat = 16.0
    """LoRA's products are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of features dropped before LoRA's matrices in training."""
    targets: tuple[str, ...] = ("attention", "feed_forward")
    """Matrices with LoRA, by the beginning of their name without numbers: `attention` (q_proj, k_proj, v_proj and o_proj of the
    decoder), `attention.q_proj`, `feed_forward.up_proj`, `cross`, `encoder.feed_forward` …"""

    def __post_init__(self) -> None:
        if self.weights == "none" and self.adapter == "none":
            raise InputError("tuning.weights = 'none' trains nothing without an adapter: set tuning.adapter.")
        if self.adapter == "lora" and not self.targets:
            raise InputError("tuning.targets is empty: name the matrices with LoRA, for example 'attention'.")

    @property
    def retrieval_only(self) -> bool:
        """True if a sequence without neighbors has no gradient."""
        return self.weights == "retrieval" and self.adapter == "none"


def tuning_from_json(values: Mapping[str, Any]) -> TuningSettings:
    """Settings from what JSON makes of `dataclasses.asdict`. `virtual_tokens` was removed with prefixes and prompts: left out.

    Raises:
        InputError: there is no such setting, or a value is not accepted.
    """
    return TuningSettings(**{key: value for key, value in values.items() if key != "virtual_tokens"})


ALL = TuningSettings()
"""All weights are trained."""
