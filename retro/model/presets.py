"""Named sizes of models: the paper's four (table 10) and three for a CPU; those beside a trained decoder; and a baseline as
large as a RETRO."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from indexing.store.errors import InputError
from retro.model.mixture_of_experts import ExpertLinear
from retro.model.retro import Retro
from retro.model.settings import ModelSettings


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
    "norm",
    "norm_eps",
    "attention_bias",
    "feed_forward_bias",
    "rope_theta",
    "rope_share",
    "rope_scaling",
    "rope_factor",
    "rope_low_factor",
    "rope_high_factor",
    "rope_original_length",
    "sliding_window",
    "parallel_residual",
    "scaled_embeddings",
    "retrieval_positions",
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
    "retrieval_smeared_keys",
    "smeared_tokens",
    "copying_init",
}


# What the preset `base` leaves open: what is not of a trained decoder, or matters in training alone.
_RETRIEVAL = {
    "cca_layers",
    "encoder_d_model",
    "encoder_d_ffw",
    "encoder_num_heads",
    "encoder_head_dim",
    "encoder_num_layers",
    "encoder_cca_layers",
}
_SWITCHES = {"shared_embeddings", "retrieval_smeared_keys", "copying_init"}
_BESIDE_BASE = (
    _RETRIEVAL
    | _SWITCHES
    | {
        "preset",
        "chunk_length",
        "dropout",
        "capacity_factor",
        "balance_weight",
        "router_z_weight",
    }
)


def resolve(settings: ModelSettings, base: ModelSettings | None = None) -> ModelSettings:
    """Settings with the sizes of their preset filled in.

    Args:
        settings: with or without a preset.
        base: of the model that training starts from, which the preset `base` stands for.

    Raises:
        InputError: there is no such preset, or a size is set beside it.
    """
    if not settings.preset:
        return settings
    if settings.preset == "base":
        return _beside(settings, base)
    if settings.preset not in PRESETS:
        raise InputError(f"model.preset = {settings.preset!r}: accepted are base, {', '.join(PRESETS)}.")
    _refuse_others(settings, ModelSettings(), _OPEN)
    chosen = {name: getattr(settings, name) for name in _OPEN - {"preset"}}
    return replace(PRESETS[settings.preset], **chosen)


def _refuse_others(settings: ModelSettings, theirs: ModelSettings, open_fields: set[str]) -> None:
    """Raise InputError where a setting that the preset decides stands neither at its default nor at the preset's value."""
    default = ModelSettings()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name not in open_fields and value not in (getattr(default, field.name), getattr(theirs, field.name)):
            raise InputError(f"model.{field.name} = {value!r} and model.preset = {settings.preset!r}: set one of them.")


def _beside(settings: ModelSettings, base: ModelSettings | None) -> ModelSettings:
    """The decoder of the base, with the encoder and cross-attention that are set, or else those it has, or else usual ones."""
    if base is None:
        raise InputError("model.preset = 'base': stands for the model of train.init_from; name a trained one there.")
    beside = _BESIDE_BASE | (set() if any(base.smeared) else {"smeared_tokens"})
    _refuse_others(settings, base, beside)
    default = ModelSettings()
    usual = {name: getattr(base, name) for name in _RETRIEVAL} if base.cca_layers else usual_retrieval(base)
    chosen = {name: getattr(settings, name) for name in beside}
    chosen |= {name: chosen[name] or getattr(base, name) for name in _SWITCHES}
    for names in ({"cca_layers"}, _RETRIEVAL - {"cca_layers"}):
        if all(chosen[name] == getattr(default, name) for name in names):
            chosen |= {name: usual[name] for name in names}
    return replace(base, **{**chosen, "preset": ""})


def usual_retrieval(base: ModelSettings) -> dict[str, Any]:
    """What is set beside a decoder without retrieval: by section 2.5, P is every third layer from 6, and the encoder has two
    layers and the width of the decoder, up to 896. A decoder of less than 12 layers reads in every second one."""
    width, matrices = min(base.d_model, 896), 3 if base.activation == "swiglu" else 2
    layers = range(6, base.num_layers + 1, 3) if base.num_layers >= 12 else range(2, base.num_layers + 1, 2)
    return {
        "cca_layers": tuple(layers) or (1,),
        "encoder_d_model": width,
        "encoder_d_ffw": 8 * width // matrices,
        "encoder_num_heads": max(1, width // 64),
        "encoder_head_dim": min(64, width // 2 * 2),
        "encoder_num_layers": 2,
        "encoder_cca_layers": (1,),
    }


def baseline_of(settings: ModelSettings) -> ModelSettings:
    """A plain decoder with as many parameters, embeddings excluded: what encoder and CCA take goes into its FFW width."""
    settings = resolve(settings)
    plain = replace(settings, cca_layers=())
    surplus = _size(settings) - _size(plain)
    num_blocks = settings.num_layers + len(settings.expert_layers) * (settings.num_experts - 1)
    matrices = 3 if settings.activation == "swiglu" else 2
    per_unit = (matrices * settings.d_model + (matrices - 1) * settings.feed_forward_bias) * num_blocks
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
