"""A small random model of each family, made and saved by `transformers`. Every weight affects its logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

V, LONGEST = 61, 64
_SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
_SIZES |= {"max_position_embeddings": LONGEST}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32}
_GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LONGEST}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def _rope(scaling: dict[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    """The settings of RoPE as transformers 4 and 5 name them."""
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": theta}}


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-other": (
        "gpt2",
        _GPT2
        | {"n_inner": 24, "activation_function": "gelu", "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", _SIZES | {"rotary_emb_base": 300, "rotary_pct": 0.25}),
    "gpt_neox-serial": (
        "gpt_neox",
        _SIZES | {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "llama": ("llama", _GROUPED | {"rms_norm_eps": 1e-2}),
    "llama3": ("llama", _GROUPED | _rope(_LLAMA3, theta=500.0) | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "llama",
        _GROUPED | _rope({"rope_type": "linear", "factor": 2.5}) | {"tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("mistral", _GROUPED | {"sliding_window": 5}),
    "qwen2": ("qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", _GROUPED | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 16, "rms_norm_eps": 1e-3}),
}
"""Name of a base → its `model_type` and its configuration."""


def make(name: str, **changes: Any) -> Any:
    """A model with all parameters perturbed, because biases and norms start at constants."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, told = BASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **told | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save as users do, with `save_pretrained`."""
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits
