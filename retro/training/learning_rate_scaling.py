"""Maximal update parametrization (Yang et al. 2022, arXiv 2203.03466, table 8, for Adam): one learning rate for all widths.

A step changes activations by the same amount in wide and narrow models. With `init` = mup

    hidden matrices    learn at mup_base_width / inputs of train.lr (here); initial weights as usual, 1/sqrt(inputs)
    embeddings         enter the stream times sqrt(mup_base_width), not sqrt(d_model), and learn at train.lr
    output layer       is read times mup_base_width / d_model; its first weights, where not tied, do not depend on the width
    attention          has scores q·k / C, not q·k / sqrt(C)
"""

from torch import nn

from retro.model.mixture_of_experts import ExpertLinear
from retro.model.retro import Retro


def learning_rate_factors(model: Retro) -> dict[str, float]:
    """Name of a parameter → factor of its learning rate, for those that do not learn at `train.lr`. Empty without muP.

    Adapters learn at `train.lr`.
    """
    settings = model.settings
    if settings.init != "mup":
        return {}
    return {
        f"{name}.weight": settings.mup_base_width / module.in_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | ExpertLinear) and module is not model.head and ".lora_" not in name
    }
