"""Prefix tuning: the first keys and values of a model's prefix (`model.attention.Prefix`)."""

import torch

from retro.model.layer_pass import LayerPass
from retro.model.positions import positions_of
from retro.model.reader import StoredKeysValues
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import updated

PREFIX = ".prefix."
"""Part of the names of a prefix's parameters: `attention.0.block.prefix.keys.weight` [G, P, C]."""


@torch.no_grad()
def initialize_prefix(model: Retro) -> None:
    """Set a prefix to what the layers compute of random tokens of the vocabulary, at the positions -P … -1.

    Prefixes that begin as real tokens are learned better from few examples (Li & Liang 2021, section 7.4).
    """
    settings = model.settings
    at, device = range(-settings.attention.prefix_tokens, 0), model.embedding.weight.device
    with shapes_only():
        base = Retro(updated(settings, {"attention.prefix_tokens": 0}))
    base.load_state_dict({n: one for n, one in model.state_dict().items() if PREFIX not in n}, strict=True, assign=True)
    tokens = torch.randint(settings.vocab_size, (1, len(at)), device=device)
    positions = positions_of(*settings.self_scheme, at, at, device, rope=settings.rope)
    caches = [StoredKeysValues() for _ in base.layers]
    base.eval().run(base.embed(tokens), LayerPass(positions, caches=caches))
    for layer, cache in zip(model.layers, caches, strict=True):
        prefix = layer.attention.block.prefix
        assert prefix is not None
        for part, finished in zip((prefix.keys, prefix.values), cache.keys_values, strict=True):
            part.weight.copy_(finished[0].transpose(0, 1))  # [P, G, C] to [G, P, C]
