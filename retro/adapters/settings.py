"""Which weights of a model are trained, and the settings of `[lora]`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from indexing.store.errors import InputError
from indexing.store.settings import settings

Weights = Literal["all", "retrieval", "none"]


@settings
class LoraSettings:
    """Low-rank matrices added to those of the model (LoRA, Hu et al. 2021). Needs the package peft.
    Weights that are not trained
    (`train.weights`) stay bit-identical."""

    key: ClassVar = "lora"

    rank: NonNegativeInt = 0
    """Rank of the added matrices; 0 = no adapter."""
    alpha: PositiveFloat = 16.0
    """Their products are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of features dropped before the added matrices in training."""
    targets: tuple[str, ...] = ("attention", "feed_forward")
    """Matrices of the model to add to, by the beginning of their name without numbers: `attention` (q_proj, k_proj,
    v_proj and o_proj of the decoder), `attention.q_proj`, `feed_forward.up_proj`, `cross`, `encoder.feed_forward` …"""

    def __post_init__(self) -> None:
        if self.rank and not self.targets:
            raise InputError("lora.targets is empty: name the matrices with LoRA, for example 'attention'.")


NO_LORA = LoraSettings()


def check_trained(weights: Weights, lora: LoraSettings, prefix_tokens: int) -> None:
    """Raise InputError if nothing is trained."""
    if weights == "none" and not lora.rank and not prefix_tokens:
        raise InputError(
            "train.weights = 'none' trains nothing without an adapter: set lora.rank or model.attention.prefix_tokens to 1 or more."
        )
