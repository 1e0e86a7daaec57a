"""Sizes of models by name: the paper's four (table 10) and three for a CPU. Sizes of retrieval for a trained decoder,
and of a baseline with as many parameters as a RETRO."""

from dataclasses import asdict
from typing import Any

from torch import nn

from indexing.store.errors import InputError
from retro.copying.sources import SOURCES
from retro.model.mixture_of_experts import ExpertLinear
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import (
    AttentionSettings,
    CopyHeadSettings,
    EncoderSettings,
    ModelSettings,
    RetrievalSettings,
    flatten,
    keys_with,
    updated,
)


def _preset(
    d_model: int,
    d_ffw: int,
    heads: tuple[int, int],
    num_layers: int,
    cca_layers: tuple[int, ...],
    encoder: tuple[int, int, int],
    *,
    copies: bool = True,
) -> ModelSettings:
    """Settings of some sizes.

    Args:
        d_model: width of the decoder.
        d_ffw: inner width of its feed-forward blocks.
        heads: number of its heads, and features of each.
        num_layers: its layers.
        cca_layers: those with chunked cross-attention.
        encoder: its width, inner width and number of heads of 64 features. It has two layers and cross-attention in the
            first.
        copies: whether it has a copy head over its context, its neighbors and the whole datastore.
    """
    return ModelSettings(
        d_model=d_model,
        d_ffw=d_ffw,
        num_layers=num_layers,
        attention=AttentionSettings(num_heads=heads[0], head_dim=heads[1]),
        retrieval=RetrievalSettings(cca_layers=cca_layers),
        encoder=EncoderSettings(d_model=encoder[0], d_ffw=encoder[1], num_heads=encoder[2]),
        copy_head=CopyHeadSettings(context=copies, neighbors=copies, datastore=copies),
    )


def _paper(d_model: int, d_ffw: int, heads: tuple[int, int], num_layers: int, last_cca: int) -> ModelSettings:
    """A row of table 10. All sizes have the same encoder, and P is every third layer from 6 (section 2.5)."""
    layers = tuple(range(6, last_cca + 1, 3))
    return _preset(d_model, d_ffw, heads, num_layers, layers, (896, 3584, 16), copies=False)


PRESETS: dict[str, ModelSettings] = {
    # name            d  d_ffw  heads   layers  P     encoder            without embeddings
    "tiny": _preset(128, 512, (2, 64), 4, (2, 4), (64, 256, 1)),  # 1.0M
    "small": _preset(256, 1024, (4, 64), 6, (3, 6), (128, 512, 2)),  # 5.5M
    "base-cpu": _preset(384, 1536, (6, 64), 7, (3, 6), (256, 1024, 4)),  # 15.2M
    # Table 10; names are the published sizes, with Transformer-XL positions. RoPE needs fewer parameters.
    "172m": _paper(896, 3584, (16, 64), 12, last_cca=12),
    "425m": _paper(1536, 6144, (12, 128), 12, last_cca=12),
    "1.5b": _paper(2048, 8192, (16, 128), 24, last_cca=24),
    "7.5b": _paper(4096, 16384, (32, 128), 32, last_cca=30),
}
"""Settings by name of the preset: sizes for a CPU, then the paper's."""


def resolve(settings: ModelSettings, base: ModelSettings | None = None) -> ModelSettings:
    """Settings with the sizes of their preset, and with the copy head that they have by default.

    Args:
        settings: with or without a preset.
        base: settings of the model that training starts from, for the preset `base`.

    Raises:
        InputError: a size is set in addition to the preset, or the preset `base` has no base.
    """
    if not settings.preset:
        one_reader = updated(settings, _reader(settings.retrieval.reader))
        return _with_copy_head(one_reader, copies=settings.activations_read)
    if settings.preset == "base":
        return _with_base(settings, base)
    sizes = keys_with("size")
    _check_unset(settings, ModelSettings(), sizes)
    preset = flatten(PRESETS[settings.preset])
    sized = updated(settings, {key: preset[key] for key in sizes} | {"preset": ""} | _reader(settings.retrieval.reader))
    return _with_copy_head(sized, copies=preset["copy_head.neighbors"])


def _reader(reader: str) -> dict[str, Any]:
    """Settings, by key, of a reader: the decoder reads neighbors without cross-attention."""
    return {"retrieval.reader": reader} | ({"retrieval.cca_layers": ()} if reader == "decoder" else {})


def _with_copy_head(settings: ModelSettings, *, copies: bool) -> ModelSettings:
    """Decide `copy_head.neighbors`, by default as `copies`, and its other sources, by default as `neighbors`."""
    head = settings.copy_head
    neighbors = copies if head.neighbors is None else head.neighbors
    chosen = {name: neighbors if value is None else value for name, value in asdict(head).items()}
    return updated(settings, {f"copy_head.{name}": value for name, value in chosen.items()})


def _check_unset(settings: ModelSettings, preset: ModelSettings, decided: set[str]) -> None:
    """Raise InputError if a setting that the preset decides differs from both its default and the preset's value."""
    default, theirs = flatten(ModelSettings()), flatten(preset)
    for key, value in flatten(settings).items():
        if key in decided and value not in (default[key], theirs[key]):
            raise InputError(f"model.{key} = {value!r} and model.preset = {settings.preset!r}: set only one of them.")


def _with_base(settings: ModelSettings, base: ModelSettings | None) -> ModelSettings:
    """The decoder of the base, with the encoder and cross-attention that are set, else the base's, else the usual
    ones."""
    if base is None:
        raise InputError("model.preset = 'base' needs train.init_from: name a trained model there.")
    base = _with_copy_head(base, copies=False)
    decided = keys_with("with_base", "decoder")
    _check_unset(settings, base, decided)
    default, ours, theirs = flatten(ModelSettings()), flatten(settings), flatten(base)
    chosen = {key: value for key, value in ours.items() if key not in decided}
    chosen |= {key: ours[key] or theirs[key] for key in keys_with("with_base", "switch")}
    retrieval = keys_with("with_base", "retrieval")
    usual = theirs if base.retrieval.cca_layers else usual_retrieval(base)
    for keys in ({"retrieval.cca_layers"}, retrieval - {"retrieval.cca_layers"}):
        if all(ours[key] == default[key] for key in keys):
            chosen |= {key: usual[key] for key in keys}
    return updated(base, chosen | {"preset": ""} | _reader(chosen["retrieval.reader"]))


def usual_retrieval(base: ModelSettings) -> dict[str, Any]:
    """Settings, by key, of encoder and cross-attention for a decoder without retrieval.

    By section 2.5, P is every third layer from 6, and the encoder has two layers of the decoder's width, up to 896. A
    decoder with fewer than 12 layers has cross-attention in every second layer.
    """
    width, matrices = min(base.d_model, 896), 3 if base.activation == "swiglu" else 2
    layers = range(6, base.num_layers + 1, 3) if base.num_layers >= 12 else range(2, base.num_layers + 1, 2)
    return {
        "retrieval.cca_layers": tuple(layers) or (1,),
        "encoder.d_model": width,
        "encoder.d_ffw": 8 * width // matrices,
        "encoder.num_heads": max(1, width // 64),
        "encoder.head_dim": min(64, width // 2 * 2),
        "encoder.num_layers": 2,
        "encoder.cca_layers": (1,),
    }


def baseline_of(settings: ModelSettings) -> ModelSettings:
    """A plain decoder with as many parameters, embeddings excluded: wider feed-forward blocks replace encoder and CCA.

    It keeps the copying from its own context.
    """
    settings = resolve(settings)
    of_retrieval = {f"copy_head.{source.name}": False for source in SOURCES if source.of_retrieval}
    plain = updated(settings, {"retrieval.reader": "", "retrieval.cca_layers": (), **of_retrieval})
    surplus = _size(settings) - _size(plain)
    num_blocks = settings.num_layers + len(settings.expert_layers) * (settings.experts.num_experts - 1)
    matrices = 3 if settings.activation == "swiglu" else 2
    per_unit = (matrices * settings.d_model + (matrices - 1) * settings.feed_forward_bias) * num_blocks
    return updated(plain, {"d_ffw": settings.d_ffw + round(surplus / per_unit)})


def _size(settings: ModelSettings) -> int:
    # Sizes of tables, which are not counted: any will do.
    sizes = {"vocab_size": settings.vocab_size or 1, "chunk_length": settings.chunk_length or 64}
    with shapes_only():
        return count_parameters(Retro(updated(settings, sizes)))


def count_parameters(model: nn.Module, embeddings: bool = False) -> int:
    """Number of parameters, as table 10 counts them: without embedding tables and output layer."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if embeddings or not name.endswith(("embedding.weight", "head.weight"))
    )


def count_active_parameters(model: Retro) -> int:
    """As `count_parameters`, counting for each layer with experts only as many as a token is sent to."""
    stacks = [module.weight for module in model.modules() if isinstance(module, ExpertLinear)]
    idle = sum(stack[0].numel() * (len(stack) - model.settings.experts.per_token) for stack in stacks)
    return count_parameters(model) - idle
