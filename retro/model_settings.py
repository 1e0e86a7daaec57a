"""Settings of a model: `[model]` and its sections.

A field's type states what it accepts and its metadata (`_setting`) what it is for, so a new option is one entry here:

    presets        `size`, `with_base`           (`retro/model/presets.py`)
    checkpoints    `changes_function`, `used`    (`retro/training/initial_weights.py`)
    key            `is_key`                      (`indexing/store/settings.py`)
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_type_hints

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import PositiveFraction, settings

PositionScheme = Literal["rope", "transformer-xl", "alibi", "learned"]
Activation = Literal["gelu", "gelu-tanh", "swiglu"]
Norm = Literal["rms", "layer"]
Biases = Literal["none", "qkv", "all"]
RopeScaling = Literal["none", "linear", "llama3"]
Initialization = Literal["depth-scaled", "mup"]
Preset = Literal["", "base", "tiny", "small", "base-cpu", "172m", "425m", "1.5b", "7.5b"]
WithBase = Literal["decoder", "retrieval", "switch", "free"]
SourceName = Literal["context", "neighbors", "datastore"]
"""Names of the sources of copying (`retro/copying/sources.py`), each a field of `CopyHeadSettings`."""

Used = Callable[["ModelSettings"], bool]


def _setting(
    default: Any,
    *,
    size: bool = False,
    with_base: WithBase = "decoder",
    changes_function: bool = False,
    used: Used = lambda model: True,
    is_key: bool = True,
) -> Any:
    """A field with metadata.

    Args:
        default: its default.
        size: whether a preset decides it.
        with_base: what the preset `base` does with it. `decoder`: it is the base's; `retrieval`: it may be set, else it
            is the base's or the usual one; `switch`: it may be switched on; `free`: it may be set.
        changes_function: whether the same weights compute something else with another value.
        used: whether it has an effect in a model with these settings.
        is_key: whether a user can set it; otherwise only the file of a model does.
    """
    roles = {"size": size, "with_base": with_base, "changes_function": changes_function, "used": used, "is_key": is_key}
    return field(default=default, metadata=roles)


class _Section:
    """A section of `[model]`, which can refuse a value."""

    key: ClassVar[str]

    @staticmethod
    def used(model: "ModelSettings") -> bool:
        """Whether the section has an effect in a model with these settings."""
        return True

    def refuse(self, name: str, accepted: str) -> NoReturn:
        """Raise InputError for the value of a field."""
        raise InputError(f"{self.key}.{name} = {getattr(self, name)!r}: should be {accepted}.")


@settings
class AttentionSettings(_Section):
    """Attention in the decoder. `positions` and `qk_norm` also apply to encoder and cross-attention."""

    key: ClassVar = "model.attention"

    num_heads: PositiveInt = _setting(4, size=True, changes_function=True)
    """Heads of every attention in the decoder, chunked cross-attention included."""
    num_kv_heads: NonNegativeInt = _setting(0)
    """Heads of keys and values, each shared by num_heads / num_kv_heads heads of queries (grouped-query attention:
    generation caches less). 0 = num_heads. The encoder, which caches nothing, has no such option."""
    head_dim: PositiveInt = _setting(64, size=True)
    """Features of a head. The width of attention is num_heads * head_dim, independent of d_model."""
    bias: Biases = _setting("none", changes_function=True)
    """Biases of self-attention: `none`; `qkv`, of queries, keys and values; `all`, of the output too."""
    qk_norm: bool = _setting(False, changes_function=True)
    """Apply RMSNorm to the queries and keys of every head, which bounds attention scores."""
    sliding_window: NonNegativeInt = _setting(0, changes_function=True)
    """Number of tokens that a token sees in self-attention, including itself; 0 = all preceding tokens."""
    positions: PositionScheme = _setting("rope", changes_function=True)
    """Relative positions: `rope` (rotary), `alibi` (scores fall with distance) or `transformer-xl` as in the paper
    (slower, more parameters). Absolute positions: `learned`."""
    max_positions: PositiveInt = _setting(2048, used=lambda model: model.attention.positions == "learned")
    """Rows of the decoder's table of `learned` positions: tokens of the longest sequence."""
    smeared_tokens: NonNegativeInt = _setting(0)
    """Number of preceding tokens that self-attention mixes into each key, with learned weights per head; 0 = none.
    Queries mix in as many tokens, including their own, and attention begins by copying, so one head can find what
    followed several tokens. At most `chunk_length`. Not in the paper; small models gain 0.9% to 2.0% with 3
    (docs/results/retrieval-gain.md)."""

    prefix_tokens: NonNegativeInt = _setting(0, with_base="switch")
    """Number of learned keys and values of each layer that every token reads in self-attention, before its document;
    0 = none. Prefix tuning (Li & Liang 2021) trains only these: `preset = "base"` and `train.weights = "none"`. Not in
    the paper."""

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_heads:
            self.refuse("num_kv_heads", f"a divisor of {self.key}.num_heads = {self.num_heads}, or 0 for as many")

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads


def _is_llama3(model: "ModelSettings") -> bool:
    return model.rope.scaling == "llama3"


@settings
class RopeSettings(_Section):
    """Rotary positions of the decoder's self-attention, with `attention.positions = "rope"`."""

    key: ClassVar = "model.rope"

    theta: PositiveFloat = _setting(10_000.0, changes_function=True)
    """Base of the frequencies: the slowest pair of features has a period of about 2π * theta tokens."""
    partial_rotary_factor: PositiveFraction = _setting(1.0, changes_function=True)
    """Fraction of the features of a head that are rotated, the first ones. The others carry no position (GPT-NeoX)."""
    scaling: RopeScaling = _setting("none", changes_function=True)
    """Rotate more slowly, so that longer sequences span the angles seen in training: all pairs (`linear`), or only slow
    ones (`llama3`)."""
    factor: PositiveFloat = _setting(1.0, changes_function=True, used=lambda model: model.rope.scaling != "none")
    """Factor by which these features turn more slowly."""
    low_freq_factor: PositiveFloat = _setting(1.0, changes_function=True, used=_is_llama3, is_key=False)
    """With `llama3`: pairs with fewer turns than this in original_max_positions tokens are slowed in full."""
    high_freq_factor: PositiveFloat = _setting(4.0, changes_function=True, used=_is_llama3, is_key=False)
    """With `llama3`: pairs with more turns than this stay unchanged. Pairs in between are slowed in part."""
    original_max_positions: PositiveInt = _setting(8192, changes_function=True, used=_is_llama3)
    """With `llama3`: tokens of a sequence in the original training."""

    @staticmethod
    def used(model: "ModelSettings") -> bool:
        """See `_Section.used`."""
        return model.attention.positions == "rope"

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            self.refuse("high_freq_factor", f"more than {self.key}.low_freq_factor = {self.low_freq_factor}")


@settings
class EncoderSettings(_Section):
    """The encoder of neighbors."""

    key: ClassVar = "model.encoder"

    d_model: PositiveInt = _setting(128, size=True, with_base="retrieval")
    """Width of the encoder."""
    d_ffw: PositiveInt = _setting(512, size=True, with_base="retrieval")
    """Inner width of the feed-forward blocks."""
    num_heads: PositiveInt = _setting(2, size=True, with_base="retrieval", changes_function=True)
    """Heads of every attention in the encoder."""
    head_dim: PositiveInt = _setting(64, size=True, with_base="retrieval")
    """Features of a head."""
    num_layers: PositiveInt = _setting(2, size=True, with_base="retrieval")
    """Number of layers."""
    cca_layers: tuple[int, ...] = _setting((1,), size=True, with_base="retrieval")
    """Encoder layers that attend to the querying chunk, counted from 1. Empty = neighbors are encoded independently of
    it."""

    @staticmethod
    def used(model: "ModelSettings") -> bool:
        """See `_Section.used`."""
        return bool(model.retrieval.cca_layers)


@settings
class RetrievalSettings(_Section):
    """Reader of neighbors: chunked cross-attention (CCA), or the self-attention of the decoder."""

    key: ClassVar = "model.retrieval"

    reader: Literal["", "encoder", "decoder"] = _setting("", with_base="switch")
    """`encoder`: the paper's encoder and chunked cross-attention in `cca_layers`. `decoder`: the decoder encodes each
    neighbor alone, and its self-attention reads them in all layers. It has no parameters, so it needs no training
    (docs/results/retrieval-gain.md). It needs `attention.positions = "rope"`. Empty = `encoder`; with the preset
    `base`, as in the checkpoint."""
    cca_layers: tuple[int, ...] = _setting((3, 6), size=True, with_base="retrieval")
    """Decoder layers with chunked cross-attention, counted from 1 (P in the paper). Empty = a plain decoder."""
    positions: Literal["", PositionScheme] = _setting("", changes_function=True, used=EncoderSettings.used)
    """Positions in encoder and chunked cross-attention; `rope` has theta 10,000 here. Empty = `attention.positions`."""


@settings
class CopyHeadSettings(_Section):
    """Copying: the prediction is a mixture of the vocabulary's and of tokens that followed the same text before. Not in
    the paper."""

    key: ClassVar = "model.copy_head"

    context: bool | None = _setting(None, with_base="switch")
    """Copy from the preceding tokens of the same document. A baseline can have it too, which keeps a comparison fair.
    "None" = as `neighbors`."""
    neighbors: bool | None = _setting(None, with_base="switch")
    """Copy from the neighbors of the preceding chunk. It needs no encoder and no cross-attention. "None" = true for a
    model with chunked cross-attention, but false for the paper's presets (`172m`, `425m`, `1.5b`, `7.5b`); with the
    preset `base`, as in the checkpoint."""
    datastore: bool | None = _setting(None, with_base="switch")
    """Copy what followed the last tokens of the text in the whole datastore, searched at every token. Training needs
    the stage `votes` of the datastore, generation its stage `suffixes`; `retro index` makes both. "None" = as
    `neighbors`; with the preset `base`, as in the checkpoint."""
    context_added: bool = _setting(
        False, changes_function=True, used=lambda model: bool(model.copy_head.context), is_key=False
    )
    """Whether the context was added to a trained model, and so must earn trust (`retro/copying/switch.py`)."""

    @property
    def names(self) -> tuple[SourceName, ...]:
        """The sources that are switched on; "None" counts as off."""
        return tuple(name for name in get_args(SourceName) if getattr(self, name))


NO_COPY_HEAD = CopyHeadSettings(**dict.fromkeys(get_args(SourceName), False))


def _has_experts(model: "ModelSettings") -> bool:
    return model.experts.num_experts > 0


@settings
class ExpertSettings(_Section):
    """Mixture of experts in place of feed-forward blocks of the decoder."""

    key: ClassVar = "model.experts"

    num_experts: NonNegativeInt = _setting(0)
    """Experts of a layer; 0 = none."""
    every: PositiveInt = _setting(2, used=_has_experts)
    """Every n-th decoder layer has experts: 1 = all layers; 2 = layers 2, 4, 6 … (GShard)."""
    per_token: PositiveInt = _setting(2, used=_has_experts)
    """Experts that each token is sent to."""
    capacity_factor: PositiveFloat = _setting(1.25, with_base="free", used=_has_experts)
    """Capacity of an expert in training, relative to an even share of the chunks of a document. Later tokens are
    dropped. No token is dropped with num_experts / per_token or more, nor in evaluation."""
    balance_loss_weight: NonNegativeFloat = _setting(0.01, with_base="free", used=_has_experts)
    """Weight of the loss that balances the load of experts (Switch Transformer; docs/results/what-did-not-work.md)."""

    def __post_init__(self) -> None:
        if self.num_experts == 1:
            self.refuse("num_experts", "2 or more, or 0 for none")
        if self.per_token > (self.num_experts or math.inf):
            self.refuse("per_token", f"a number from 1 to {self.key}.num_experts = {self.num_experts}")


@settings
class ModelSettings(_Section):
    """Sizes and options of a model."""

    key: ClassVar = "model"

    preset: Preset = _setting("", with_base="free")
    """Name of a row in `retro/model/presets.py` that sets all sizes: `tiny` to `7.5b`. The last four are the paper's,
    without a copy head. `base` takes the decoder, with all its sizes and options, from the checkpoint named by
    `train.init_from`. `[model.encoder]` and `retrieval.cca_layers` may be set with it. Left at their defaults, they are
    the checkpoint's. If it has none, every third layer from 6 has cross-attention (with fewer than 12 layers, every
    second), and the encoder has two layers of the decoder's width, up to 896."""
    vocab_size: NonNegativeInt = _setting(0)
    """Rows of the embedding tables; 0 = the size of the datastore's vocabulary."""
    d_model: PositiveInt = _setting(256, size=True)
    """Width of the decoder."""
    d_ffw: PositiveInt = _setting(1024, size=True)
    """Inner width of the decoder's feed-forward blocks."""
    num_layers: PositiveInt = _setting(6, size=True)
    """Layers of the decoder."""
    chunk_length: NonNegativeInt = _setting(0, with_base="free", is_key=False)
    """Tokens of a chunk (m); 0 = the datastore's."""
    activation: Activation = _setting("gelu", changes_function=True)
    """Activation of the feed-forward blocks. `swiglu` has three matrices: with two thirds of d_ffw it is as large as
    `gelu`. `gelu-tanh` is GPT-2's approximation of `gelu`."""
    norm: Norm = _setting("rms", changes_function=True)
    """Norms of the decoder's self-attention and feed-forward blocks: RMSNorm, or LayerNorm with gains and biases.
    Encoder and cross-attention use RMSNorm."""
    norm_eps: PositiveFloat = _setting(1e-6, changes_function=True, is_key=False)
    """Epsilon of these norms and of the `qk_norm` of self-attention."""
    feed_forward_bias: bool = _setting(False, changes_function=True)
    """Biases of the decoder's feed-forward blocks."""
    parallel_residual: bool = _setting(False, changes_function=True)
    """Let the feed-forward block of a layer read the input of the layer's self-attention instead of its output
    (GPT-NeoX). Chunked cross-attention still follows self-attention; the feed-forward block of the same layer does not
    read its output."""
    scaled_embeddings: bool = _setting(True, changes_function=True)
    """Multiply embeddings by sqrt(d_model) where they enter the residual stream."""
    init: Initialization = _setting("depth-scaled", changes_function=True)
    """Initial weights. `depth-scaled`: outputs of blocks are smaller the more layers there are. `mup`: in addition,
    sizes and learning rates follow the width, so the best `train.lr` of a narrow model is that of a wide one
    (docs/results/what-did-not-work.md)."""
    mup_base_width: PositiveInt = _setting(256, changes_function=True, used=lambda model: model.init == "mup")
    """With `mup`, a matrix with n inputs learns at `train.lr` * mup_base_width / n."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = _setting(0.0, with_base="free")
    """Fraction of the features dropped from the output of every block in training."""
    tied_embeddings: bool = _setting(True)
    """Use the decoder's embedding table as its output layer too."""
    shared_embeddings: bool = _setting(False, with_base="switch")
    """Let the encoder read the decoder's embedding table through a projection, instead of its own table as in the
    paper."""
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    rope: RopeSettings = field(default_factory=RopeSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    copy_head: CopyHeadSettings = field(default_factory=CopyHeadSettings)
    experts: ExpertSettings = field(default_factory=ExpertSettings)

    def __post_init__(self) -> None:
        self._check_positions()
        self._check_layers()
        self._check_reader()
        if self.attention.smeared_tokens > (self.chunk_length or math.inf):
            self.attention.refuse("smeared_tokens", f"a number from 0 to model.chunk_length = {self.chunk_length}")
        if self.experts.num_experts and self.feed_forward_bias:
            self.refuse("feed_forward_bias", "false: experts have no biases")

    @property
    def retrieves(self) -> bool:
        """Whether the model reads neighbors."""
        return self.activations_read or bool(self.copy_head.neighbors)

    @property
    def activations_read(self) -> bool:
        """Whether the decoder's activations depend on neighbors."""
        return bool(self.retrieval.cca_layers) or self.decoder_reads

    @property
    def decoder_reads(self) -> bool:
        """Whether the decoder reads neighbors with its own self-attention."""
        return self.retrieval.reader == "decoder"

    @property
    def uses_datastore(self) -> bool:
        """Whether the model reads a datastore: neighbors, or what it copies from all of it."""
        return self.retrieves or bool(self.copy_head.datastore)

    @property
    def retrieval_positions(self) -> PositionScheme:
        """Positions in encoder and chunked cross-attention."""
        return self.retrieval.positions or self.attention.positions

    @property
    def self_scheme(self) -> tuple[str, int, int]:
        """Scheme, width and head size for `positions_of`, of self-attention."""
        return self.attention.positions, self.d_model, self.attention.head_dim

    @property
    def cross_scheme(self) -> tuple[str, int, int]:
        """The same of chunked cross-attention."""
        return self.retrieval_positions, self.d_model, self.attention.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that RoPE rotates in the decoder's self-attention."""
        return round(self.attention.head_dim * self.rope.partial_rotary_factor)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Decoder layers with experts, counted from 1."""
        every = self.experts.every
        return tuple(range(every, self.num_layers + 1, every)) if self.experts.num_experts else ()

    @property
    def reading_layers(self) -> int:
        """Number of decoder layers that read neighbors."""
        return self.num_layers if self.decoder_reads else len(self.retrieval.cca_layers)

    def attention_scale(self, head_dim: int) -> float | None:
        """Factor of the products of queries and keys; None = the usual 1/sqrt(head_dim)."""
        return 1 / head_dim if self.init == "mup" else None

    def check_length(self, num_tokens: int) -> None:
        """Raise InputError if sequences of `num_tokens` tokens are longer than the table of learned positions."""
        if self.attention.positions == "learned" and num_tokens > self.attention.max_positions:
            self.attention.refuse("max_positions", f"{num_tokens} or more, the tokens of a sequence")

    def _check_positions(self) -> None:
        decoder_scheme, retrieval = self.attention.positions, self.retrieval_positions
        if retrieval == "learned" and decoder_scheme != "learned":
            self.retrieval.refuse("positions", "another scheme: 'learned' needs model.attention.positions = 'learned'")
        # Sines and cosines come in pairs: per head with RoPE, over the whole width with Transformer-XL.
        decoder: tuple[_Section, _Section] = self, self.attention
        encoder: tuple[_Section, _Section] = self.encoder, self.encoder
        for scheme, (wide, narrow) in ((decoder_scheme, decoder), (retrieval, decoder), (retrieval, encoder)):
            section, name = (wide, "d_model") if scheme == "transformer-xl" else (narrow, "head_dim")
            if scheme in ("rope", "transformer-xl") and getattr(section, name) % 2:
                section.refuse(name, f"an even number: positions = {scheme!r} pairs features")
        if decoder_scheme == "rope" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            accepted = f"a fraction of model.attention.head_dim = {self.attention.head_dim} that is an even number"
            self.rope.refuse("partial_rotary_factor", accepted)

    def _check_layers(self) -> None:
        for section, stack in ((self.retrieval, self), (self.encoder, self.encoder)):
            layers = section.cca_layers
            last = math.inf if self.preset == "base" else stack.num_layers  # a base can have more layers
            if list(layers) != sorted({layer for layer in layers if 1 <= layer <= last}):
                count = f"{stack.key}.num_layers = {stack.num_layers}"
                section.refuse("cca_layers", f"increasing numbers from 1 to {count}, or an empty list")
        if self.experts.num_experts and not self.preset and self.experts.every > self.num_layers:
            self.experts.refuse("every", f"a number from 1 to model.num_layers = {self.num_layers}")

    def _check_reader(self) -> None:
        """Refuse the decoder as reader where its keys cannot be placed before the text, or not without the text's
        tokens."""
        if not self.decoder_reads:
            return
        reads = "with model.retrieval.reader = 'decoder'"
        if self.attention.positions != "rope":
            self.attention.refuse("positions", f"'rope' {reads}")
        if self.attention.smeared_tokens:
            self.attention.refuse("smeared_tokens", f"0 {reads}")
        if self.experts.num_experts:
            self.experts.refuse("num_experts", f"0 {reads}")
        if (
            self.retrieval.cca_layers
            and not self.preset
            and self.retrieval.cca_layers != RetrievalSettings().cca_layers
        ):
            self.retrieval.refuse("cca_layers", f"an empty list {reads}")


# ------------------------------------------------------------------------------------- all settings, by dotted key

_SECTIONS: dict[str, Any] = {name: hint for name, hint in get_type_hints(ModelSettings).items() if is_dataclass(hint)}
_FIELDS = {
    f"{section}.{leaf.name}".removeprefix("."): leaf
    for section, kind in {"": ModelSettings, **_SECTIONS}.items()
    for leaf in fields(kind)
    if leaf.name not in _SECTIONS
}


def flatten(settings: ModelSettings) -> dict[str, Any]:
    """Every setting by its key: `{"d_model": 256, …, "attention.num_heads": 4, …}`."""
    return {key: attrgetter(key)(settings) for key in _FIELDS}


def updated(settings: ModelSettings, values: Mapping[str, Any]) -> ModelSettings:
    """Settings with other values, by key: `updated(settings, {"attention.num_heads": 8})`.

    Raises:
        InputError: there is no such key, or a value is not accepted.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    return replace(settings, **top, **{name: replace(getattr(settings, name), **sections[name]) for name in sections})


def as_json(settings: ModelSettings) -> dict[str, Any]:
    """The settings as JSON holds them: tuples are lists."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return values


def from_json(values: Mapping[str, Any]) -> ModelSettings:
    """Settings from what `as_json` returned, in this version or an earlier one. A stored copy head has no sources that
    came later.

    Raises:
        InputError: there is no such setting, or a value is not accepted.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"model = {values!r:.50}: should be an object.")
    head = values.get("copy_head", {})
    if not isinstance(head, Mapping):
        raise InputError(f"model.copy_head = {head!r:.50}: should be an object.")
    return ModelSettings(**{**values, "copy_head": {**asdict(NO_COPY_HEAD), **head}})


def keys_with(role: str, *values: Any) -> set[str]:
    """Keys of the settings whose metadata have one of some values, `keys_with("with_base", "free")`; True by
    default."""
    return {key for key, leaf in _FIELDS.items() if leaf.metadata[role] in (values or (True,))}


def keys_without_effect(settings: ModelSettings) -> set[str]:
    """Keys of the settings that change nothing, given the others: RoPE's parameters with other positions, for
    example."""
    sections = {name for name, kind in _SECTIONS.items() if not kind.used(settings)}
    return {
        key for key, leaf in _FIELDS.items() if key.split(".")[0] in sections or not leaf.metadata["used"](settings)
    }
