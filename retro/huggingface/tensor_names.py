"""Mapping between tensor names of the families and of `Retro`, with tensors that the families join or transpose.

ours      attention.3.block.q_proj.weight  [H·C, D]
GPT-2     h.3.attn.c_attn.weight           [D, 3·H·C]   transposed; queries, then keys, then values
GPT-NeoX  layers.3.attention.query_key_value.weight     [H·3·C, D], query, key and value of each head side by side
Llama     layers.3.self_attn.q_proj.weight [H·C, D]
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_JOINED = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Names:
    """A family's names of a decoder's modules.

    Attributes:
        prefix: prefix of all modules except the output layer; folders saved without an output layer have no prefix.
        outer: our name → their name of the embeddings and the last norm.
        layers: name of the list of layers.
        inner: our name without the number → their name of a layer's modules. Queries, keys and values can share a
            tensor.
        head: name of the output layer.
        ignored: pattern of stored tensors that are not weights, after the prefix.
        by_head: True if a joint tensor has query, key and value of each head next to each other.
        transposed: True if the matrices of layers are [in, out].
    """

    prefix: str
    outer: Mapping[str, str]
    layers: str
    inner: Mapping[str, str]
    ignored: str
    head: str = "lm_head"
    by_head: bool = False
    transposed: bool = False

    def of(self, ours: str) -> tuple[str, int | None]:
        """Return their name of our tensor, and its number if it is one of three parts of their tensor, else None."""
        module, _, kind = ours.rpartition(".")
        if module == "head":
            return f"{self.head}.{kind}", None
        if module in self.outer:
            return f"{self.prefix}{self.outer[module]}.{kind}", None
        block, number, inside = module.split(".", 2)
        theirs = self.inner[f"{block}.{inside}"]
        name = f"{self.prefix}{self.layers}.{number}.{theirs}.{kind}"
        last = inside.rpartition(".")[2]
        is_part = last in _JOINED and list(self.inner.values()).count(theirs) == 3
        return name, _JOINED.index(last) if is_part else None

    def is_ignored(self, theirs: str) -> bool:
        """True if a stored tensor is not a weight: a causal mask or frequencies of RoPE."""
        return re.fullmatch(self.ignored, theirs.removeprefix(self.prefix)) is not None

    def ours(self, name: str, theirs: Tensor, num_heads: int) -> Tensor:
        """Convert their tensor to ours."""
        theirs = self._turned(name, theirs)
        part = self.of(name)[1]
        if part is None:
            return theirs
        if self.by_head:  # [H·3·C, …]
            return theirs.unflatten(0, (num_heads, 3, -1))[:, part].flatten(0, 1)
        return theirs.chunk(3)[part]

    def theirs(self, tensors: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
        """Convert all our tensors to theirs; the inverse of `ours`."""
        layers: dict[str, dict[int | None, tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            theirs, part = self.of(name)
            layers.setdefault(theirs, {})[part] = name, tensor
        joined: dict[str, Tensor] = {}
        for theirs, parts in layers.items():
            name = next(iter(parts.values()))[0]
            if None in parts:
                tensor = parts[None][1]
            elif self.by_head:
                heads = [parts[part][1].unflatten(0, (num_heads, -1)) for part in range(3)]  # [H, C, …] each
                tensor = torch.stack(heads, dim=1).flatten(0, 2)
            else:
                tensor = torch.cat([parts[part][1] for part in range(3)])
            joined[theirs] = self._turned(name, tensor)
        return joined

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        is_matrix = tensor.ndim == 2 and ".block." in name
        return tensor.T.contiguous() if self.transposed and is_matrix else tensor


_LLAMA = Names(
    prefix="model.",
    outer={"embedding": "embed_tokens", "norm": "norm"},
    layers="layers",
    inner={
        "attention.norm": "input_layernorm",
        "attention.block.q_proj": "self_attn.q_proj",
        "attention.block.k_proj": "self_attn.k_proj",
        "attention.block.v_proj": "self_attn.v_proj",
        "attention.block.o_proj": "self_attn.o_proj",
        "attention.block.q_norm": "self_attn.q_norm",
        "attention.block.k_norm": "self_attn.k_norm",
        "feed_forward.norm": "post_attention_layernorm",
        "feed_forward.block.gate_proj": "mlp.gate_proj",
        "feed_forward.block.up_proj": "mlp.up_proj",
        "feed_forward.block.down_proj": "mlp.down_proj",
    },
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
_GPT2 = Names(
    prefix="transformer.",
    outer={"embedding": "wte", "position_embedding": "wpe", "norm": "ln_f"},
    layers="h",
    inner={
        "attention.norm": "ln_1",
        **{f"attention.block.{name}": "attn.c_attn" for name in _JOINED},
        "attention.block.o_proj": "attn.c_proj",
        "feed_forward.norm": "ln_2",
        "feed_forward.block.up_proj": "mlp.c_fc",
        "feed_forward.block.down_proj": "mlp.c_proj",
    },
    ignored=r"h\.\d+\.attn\.(masked_)?bias",
    transposed=True,
)
_NEOX = Names(
    prefix="gpt_neox.",
    outer={"embedding": "embed_in", "norm": "final_layer_norm"},
    layers="layers",
    inner={
        "attention.norm": "input_layernorm",
        **{f"attention.block.{name}": "attention.query_key_value" for name in _JOINED},
        "attention.block.o_proj": "attention.dense",
        "feed_forward.norm": "post_attention_layernorm",
        "feed_forward.block.up_proj": "mlp.dense_h_to_4h",
        "feed_forward.block.down_proj": "mlp.dense_4h_to_h",
    },
    ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    head="embed_out",
    by_head=True,
)
NAMES = {"gpt2": _GPT2, "gpt_neox": _NEOX, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}
"""By `model_type`."""
