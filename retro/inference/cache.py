"""Tensors that a decoder keeps of the tokens that its rows have read. Each row has a slot, the first dimension of all
of them.

Slots, tokens of a slot and neighbors are enlarged on demand. The letters of the shape comments are those of
`model/retro.py`; in addition, B is the number of slots.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.inference.drafts import LONGEST_DRAFT
from retro.model.retro import Retro

KEY_STEP = 128
"""Self-attention reads a multiple of this number of keys, and a mask hides those after the last token. Kernels that are
prepared for one shape (compiled code, cuDNN's plans) then see few shapes instead of a new one with every token."""


@dataclass
class Cache:
    """The tensors."""

    keys: Tensor  # [B, L, G, S, C] of every layer, with positions applied
    values: Tensor  # same shape
    # The last W projected keys are mixed into the next ones. Tokens of drafts are more, since they may be removed
    # again.
    last_keys: Tensor  # [B, L, W + draft, G, C]; without smeared tokens [B, L, 0, G, C]
    last_queries: Tensor  # [B, L, W - 1 + draft, H, C] of projected queries; 0 tokens if W < 2
    chunk: Tensor  # [B, M, D], input of the encoder: activations of token t of the current chunk are at t % m
    neighbor_keys: Tensor  # [B, P, G, K·R, C] of every layer that reads neighbors, for the last complete chunk
    neighbor_values: Tensor  # same shape
    readable: Tensor  # bool [B, K, R], False for tokens of the neighbors that are not read, such as padding

    @classmethod
    def of(cls, model: Retro, dtype: torch.dtype) -> "Cache":
        """Create one slot without tokens. Memory is always zeros at first: masked values are multiplied by 0, not by
        NaN."""
        s, device = model.settings, model.embedding.weight.device
        # On a CPU a single query takes six times as long with bfloat16 keys.
        dtype = torch.float32 if device.type == "cpu" else dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(1, *shape, dtype=dtype, device=device)

        layers = s.num_layers
        head_dim, heads, kv_heads = s.attention.head_dim, s.attention.num_heads, s.attention.kv_heads

        def with_draft(width: int) -> int:
            return width + LONGEST_DRAFT if width > 0 else 0

        return cls(
            keys=zeros(layers, kv_heads, 0, head_dim),
            values=zeros(layers, kv_heads, 0, head_dim),
            last_keys=zeros(layers, with_draft(s.attention.smeared_tokens), kv_heads, head_dim),
            last_queries=zeros(layers, with_draft(s.attention.smeared_tokens - 1), heads, head_dim),
            chunk=zeros(s.chunk_length, s.d_model).float(),
            neighbor_keys=zeros(s.reading_layers, kv_heads, 0, head_dim),
            neighbor_values=zeros(s.reading_layers, kv_heads, 0, head_dim),
            readable=zeros(0, 0).bool(),
        )

    def make_slots(self, num_slots: int) -> None:
        """Enlarge all tensors for this number of slots. They at least double, so copies are rare."""
        size = len(self.keys)
        if num_slots <= size:
            return
        more = max(num_slots, 2 * size) - size
        for name, tensor in self._named():
            setattr(self, name, F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, more)))

    def make_tokens(self, num_tokens: int, largest: int) -> int:
        """Enlarge keys and values for `num_tokens` tokens; return the number of keys to read.

        They at least double, up to the `largest` number of tokens of a row.
        """
        size, largest = self.keys.shape[3], max(largest, num_tokens)
        stop = min(-(-num_tokens // KEY_STEP) * KEY_STEP, largest)
        if stop > size:
            more = min(max(stop, 2 * size), largest) - size
            self.keys, self.values = (F.pad(tensor, (0, 0, 0, more)) for tensor in (self.keys, self.values))
        return stop

    def make_neighbors(self, k: int, r: int) -> None:
        """Enlarge for K neighbors of R tokens. R is the same in every call."""
        more = max(0, k - self.readable.shape[1])
        self.neighbor_keys, self.neighbor_values = (
            F.pad(tensor, (0, 0, 0, more * r)) for tensor in (self.neighbor_keys, self.neighbor_values)
        )
        self.readable = F.pad(self.readable, (0, r - self.readable.shape[2], 0, more))

    def remove_last(self, slot: int, num_tokens: int) -> None:
        """Remove the last tokens of a slot, at most `LONGEST_DRAFT`. Their keys and values are overwritten by later
        tokens."""
        for last in (self.last_keys, self.last_queries):
            if last.shape[2]:
                last[slot] = last[slot].roll(num_tokens, dims=1)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot, with the first `num_tokens` tokens."""
        for name, tensor in self._named():
            part = tensor[..., :num_tokens, :] if name in ("keys", "values") else tensor
            part[target] = part[source]

    def swap(self, first: int, second: int, num_tokens: int) -> None:
        """Swap two slots, with the first `num_tokens` tokens."""
        for name, tensor in self._named():
            part = tensor[..., :num_tokens, :] if name in ("keys", "values") else tensor
            part[[first, second]] = part[[second, first]]

    def tensors(self) -> list[Tensor]:
        """All tensors. They are others after the cache has grown."""
        return [tensor for _, tensor in self._named()]

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]
