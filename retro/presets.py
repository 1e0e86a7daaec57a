"""Named sizes of models: the paper's four (table 10) and three for a CPU; and a baseline as large as a RETRO."""

from dataclasses import fields, replace

import torch
from torch import nn

from indexing.store.errors import InputError
from retro.experts import ExpertLinear
from retro.model import Retro
from retro.model_settings import ModelSettings


def _paper(d: int, d_ffw: int, heads: int, head_dim: int, layers: int, last_cca: int) -> ModelSettings:
    """A row of table 10. All sizes share one encoder, and P is every third layer from 6 (section 2.5)."""
    return ModelSettings(0, d, d_ffw, heads, head_dim, layers, tuple(range(6, last_cca + 1, 3)), 896, 3584, 16)


PRESETS: dict[str, ModelSettings] = {
    # name            d  d_ffw  heads size layers P            without embeddings
    "tiny": ModelSettings(0, 128, 512, 2, 64, 4, (2, 4), 64, 256, 1),  # 1.0M
    "small": ModelSettings(0, 256, 1024, 4, 64, 6, (3, 6), 128, 512, 2),  # 5.5M
    "base-cpu": ModelSettings(0, 384, 1536, 6, 64, 7, (3, 6), 256, 1024, 4),  # 15.2M
    # Table 10, by the published size with Transformer-XL positions; RoPE needs fewer parameters.
    "172m": _paper(896, 3584, 16, 64, 12, last_cca=12),
    "425m": _paper(1536, 6144, 12, 128, 12, last_cca=12),
    "1.5b": _paper(2048, 8192, 16, 128, 24, last_cca=24),
    "7.5b": _paper(4096, 16384, 32, 128, 32, last_cca=30),
}
"""Named settings: sizes for a CPU, then the paper's."""

# What a preset leaves open: these may be set beside it.
_OPEN = {
    "preset",
    "vocab_size",
    "chunk_length",
    "positions",
    "max_positions",
    "activation",
    "num_kv_heads",
    "qk_norm",
    "init",
    "mup_base_width",
    "num_experts",
    "experts_every",
    "experts_per_token",
    "capacity_factor",
    "balance_weight",
    "router_z_weight",
    "dropout",
    "tied_embeddings",
    "shared_embeddings",
    "smeared_keys",
    "copying_init",
}


def resolve(settings: ModelSettings) -> ModelSettings:
    """Settings with the sizes of their preset filled in.

    Raises:
        InputError: there is no such preset, or a size is set beside it.
    """
    if not settings.preset:
        return settings
    if settings.preset not in PRESETS:
        raise InputError(f"model.preset = {settings.preset!r}: accepted are {', '.join(PRESETS)}.")
    default = ModelSettings()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name not in _OPEN and value != getattr(default, field.name):
            raise InputError(f"model.{field.name} = {value!r} and model.preset = {settings.preset!r}: set one of them.")
    chosen = {name: getattr(settings, name) for name in _OPEN - {"preset"}}
    return replace(PRESETS[settings.preset], **chosen)


def baseline_of(settings: ModelSettings) -> ModelSettings:
    """A plain decoder with as many parameters, embeddings excluded: what encoder and CCA take goes into its FFW width."""
    settings = resolve(settings)
    plain = replace(settings, cca_layers=())
    surplus = _size(settings) - _size(plain)
    num_blocks = settings.num_layers + len(settings.expert_layers) * (settings.num_experts - 1)
    per_unit = (3 if settings.activation == "swiglu" else 2) * settings.d_model * num_blocks
    return replace(plain, d_ffw=settings.d_ffw + round(surplus / per_unit))


def _size(settings: ModelSettings) -> int:
    with torch.device("meta"):
        return count_parameters(Retro(replace(settings, vocab_size=settings.vocab_size or 1)))


def count_parameters(model: nn.Module, embeddings: bool = False) -> int:
    """The number of parameters, as table 10 counts them: without the embedding tables and the output layer."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if embeddings or not name.endswith(("embedding.weight", "head.weight"))
    )


def count_active_parameters(model: Retro) -> int:
    """As `count_parameters`, but of the experts of a layer only as many as a token asks."""
    stacks = [module.weight for module in model.modules() if isinstance(module, ExpertLinear)]
    idle = sum(stack[0].numel() * (len(stack) - model.settings.experts_per_token) for stack in stacks)
    return count_parameters(model) - idle
