"""Virtual tokens before every sequence: keys and values that every token reads in self-attention.

    prefix    keys and values are learned for each layer (Li & Liang 2021, arXiv 2101.00190)
    prompt    embeddings are learned. They pass through the layers as tokens at positions -P … -1; each layer's keys and values
              of them are read (Lester et al. 2021, arXiv 2104.08691)

Keys and values are equal for all sequences, so they are computed once per batch, and a cache begins with them. Virtual tokens
belong to no chunk, so chunks, windows and neighbors do not move. Letters of the shape comments as in `model/retro.py`; P virtual
tokens.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from retro.model.positions import positions_of
from retro.model.retro import Retro

KeysValues = dict[str, tuple[Tensor, Tensor]]
"""Finished keys and values [1, P, G, C] of virtual tokens, by name of the layer."""


class Prompt(nn.Module):
    """Embeddings that pass through the layers like the tokens of a separate document."""

    def __init__(self, peft: Any, model: Retro, count: int) -> None:
        """Initialize with the embeddings of random tokens of the vocabulary.

        Args:
            peft: the package.
            model: the model that gets the prompt.
            count: P.
        """
        super().__init__()
        self.count = count
        config = peft.PromptTuningConfig(
            num_virtual_tokens=count,
            num_transformer_submodules=1,
            token_dim=model.settings.d_model,
            prompt_tuning_init="SAMPLE_VOCAB",
        )
        self.prompt = peft.PromptEmbedding(config, model.embedding)

    def forward(self, model: Retro) -> KeysValues:
        """Compute keys and values of every layer. Gradients reach the embeddings through the layers below."""
        device = self.prompt.embedding.weight.device
        h = model.scaled(self.prompt(torch.arange(self.count, device=device)[None]))  # [1, P, D]
        at = range(-self.count, 0)
        here = positions_of(*model.self_scheme, at, at, device, rope=model.settings.rope)
        keys_values: KeysValues = {}
        for layer in model.layers:
            reads = h if model.settings.parallel_residual else None
            h, *finished = layer.attention(h, here, causal=True, return_keys_values=True)
            keys_values[layer.name] = finished[0], finished[1]
            h = layer.feed_forward(h, reads=reads)
            if isinstance(h, tuple):  # with experts, their routing too
                h, _ = h
        return keys_values


class Prefix(nn.Module):
    """Learned keys and values of P virtual tokens in every layer, without positions."""

    def __init__(self, peft: Any, model: Retro, count: int) -> None:
        """Initialize with keys and values of a `Prompt`. With random ones, training is slow and unstable (Li & Liang, section 7.4).

        Args:
            peft: the package.
            model: the model that gets the prefix.
            count: P.
        """
        super().__init__()
        self.count, self.heads = count, model.settings.attention.kv_heads
        config = peft.PrefixTuningConfig(
            num_virtual_tokens=count,
            num_transformer_submodules=1,
            token_dim=self.heads * model.settings.attention.head_dim,
            num_layers=model.settings.num_layers,
        )
        with torch.no_grad():
            layers = [torch.stack(pair) for pair in Prompt(peft, model, count)(model).values()]
        self.prefix = peft.PrefixEncoder(config)
        with torch.no_grad():
            flat = rearrange(torch.stack(layers), "l two 1 p g c -> p (l two g c)")  # in the layout of peft
            self.prefix.embedding.weight.copy_(flat)

    def forward(self, model: Retro) -> KeysValues:
        """Keys and values of every layer."""
        flat = self.prefix(torch.arange(self.count, device=self.prefix.embedding.weight.device)[None])
        pairs = rearrange(flat, "n p (l two g c) -> l two n p g c", two=2, l=model.settings.num_layers, g=self.heads)
        return {name: (pairs[int(name)][0], pairs[int(name)][1]) for name in model.attention}
