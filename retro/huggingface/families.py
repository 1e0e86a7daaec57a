"""Supported families of decoders: convert their config.json to `ModelSettings` and back.

    gpt2       learned positions, LayerNorm, biases everywhere, GELU with the tanh approximation
    gpt_neox   (Pythia) partial RoPE, LayerNorm, biases, parallel residual
    llama      RoPE (scaling: linear, llama3), RMSNorm, SwiGLU, grouped queries, optional biases
    mistral    llama with a sliding window
    qwen2      llama with biases of queries, keys and values
    qwen3      llama with norms of queries and keys

These functions read the keys that the family's code in `transformers` reads (versions 4.50 to 5.24) and ignore all
others. Defaults are those of its configuration classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

from indexing.store.errors import InputError
from retro.huggingface.config_json import Config
from retro.model_settings import Activation, ModelSettings, SourceName, flatten, keys_without_effect, updated

_GELUS: dict[str, Activation] = {
    "gelu_new": "gelu-tanh",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",  # the same formula, factored
}
_SILU: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu"}
_THEIR_GELU = {"gelu": "gelu", "gelu-tanh": "gelu_new"}


@dataclass(frozen=True)
class Family:
    """A row of `FAMILIES`.

    Attributes:
        architecture: name of the class in `transformers`.
        read: returns settings and `context` (length of the longest sequence in tokens) from a config.
        write: returns the keys of config.json that express a plain decoder's settings.
    """

    architecture: str
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[ModelSettings], dict[str, Any]]


def settings_of(config: Config, chunk_length: int) -> tuple[str, ModelSettings, int]:
    """Return the family of a config, the settings of its decoder, and the length of its longest sequence.

    Raises:
        InputError: the family or an option is not supported.
    """
    family = config.choice("model_type", {name: name for name in FAMILIES}, "none")
    config.only("quantization_config", None)
    read = FAMILIES[family].read(config)
    context = read.pop("context")
    read |= {
        "scaled_embeddings": False,
        "retrieval.positions": "rope",
        "retrieval.cca_layers": (),
        **{f"copy_head.{name}": False for name in get_args(SourceName)},
        "chunk_length": chunk_length,
    }
    try:
        return family, updated(ModelSettings(vocab_size=config.integer("vocab_size")), read), context
    except InputError as error:  # invalid combinations of sizes
        raise InputError(f"{config.file}: {error}") from error


def config_of(settings: ModelSettings, context: int) -> tuple[str, dict[str, Any]]:
    """Return the family that can express a plain decoder, and its config.json; the inverse of `settings_of`.

    Ignores scaled embeddings: the caller scales the table and unties it.

    Args:
        settings: settings of the decoder; those of encoder and cross-attention are ignored.
        context: length of the longest sequence in tokens.

    Raises:
        InputError: no family can express the decoder; the message names the unsupported settings of the nearest family.
    """
    if settings.scaled_embeddings:
        settings = replace(settings, scaled_embeddings=False, tied_embeddings=False)
    missed: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        values = {"architectures": [family.architecture], "model_type": name, "vocab_size": settings.vocab_size}
        values |= {"tie_word_embeddings": settings.tied_embeddings, "max_position_embeddings": context}
        values |= family.write(settings)
        try:
            _, back, _ = settings_of(Config("config.json", values), settings.chunk_length)
        except InputError:
            continue  # the family does not support the activation
        ours, theirs = _decoder_settings(settings), _decoder_settings(back)
        missed[name] = [f"model.{key} = {ours[key]!r}" for key in ours if ours[key] != theirs[key]]
        if not missed[name]:
            return name, values
    nearest = min(missed, key=lambda name: len(missed[name]), default="")
    reason = (
        f"{nearest} has no {', '.join(missed[nearest])}" if nearest else f"model.activation is {settings.activation}"
    )
    raise InputError(f"no family of Hugging Face can express the decoder: {reason}.")


def _decoder_settings(settings: ModelSettings) -> dict[str, Any]:
    """The settings, by key, that define the function of a plain decoder; the others at their defaults."""
    default, values = flatten(ModelSettings()), flatten(updated(settings, {"retrieval.cca_layers": ()}))
    unused = keys_without_effect(updated(settings, {"retrieval.cca_layers": ()}))
    for key in unused | {"shared_embeddings", "dropout"}:
        values[key] = default[key]
    values["attention.num_kv_heads"] = settings.attention.kv_heads
    if settings.attention.positions == "rope":  # fractions that rotate as many features are equal
        values["rope.partial_rotary_factor"] = settings.rotary_dim / settings.attention.head_dim
    if settings.attention.positions == settings.retrieval_positions == "learned":
        values["retrieval.positions"] = (
            "learned"  # the stream then has a table of positions in a chunk, which no family has
        )
    return values


# ------------------------------------------------------------------------------------------------- GPT-2 and GPT-NeoX


def _read_gpt2(config: Config) -> dict[str, Any]:
    width = config.integer("n_embd")
    config.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.only(key, False)
    context = config.integer("n_positions", 1024)
    return _heads(config, width, "n_head", "n_embd") | {
        "d_ffw": config.integer("n_inner", 4 * width),
        "num_layers": config.integer("n_layer"),
        "attention.positions": "learned",
        "attention.max_positions": context,
        "activation": config.choice("activation_function", _GELUS, "gelu_new"),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "attention.bias": "all",
        "feed_forward_bias": True,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "context": context,
    }


def _write_gpt2(settings: ModelSettings) -> dict[str, Any]:
    return {
        "n_embd": settings.d_model,
        "n_head": settings.attention.num_heads,
        "n_layer": settings.num_layers,
        "n_inner": settings.d_ffw,
        "n_positions": settings.attention.max_positions,
        "activation_function": _THEIR_GELU.get(settings.activation, settings.activation),
        "layer_norm_epsilon": settings.norm_eps,
    }


def _read_neox(config: Config) -> dict[str, Any]:
    width, context = config.integer("hidden_size"), config.integer("max_position_embeddings", 2048)
    heads = _heads(config, width, "num_attention_heads", "hidden_size")
    return heads | {
        "d_ffw": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "activation": config.choice("hidden_act", _GELUS, "gelu"),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "attention.bias": "all" if config.flag("attention_bias", True) else "none",
        "feed_forward_bias": True,
        "parallel_residual": config.flag("use_parallel_residual", True),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "context": context,
        **_read_rope(config, heads["attention.head_dim"], context, theta="rotary_emb_base", share=("rotary_pct", 0.25)),
    }


def _write_neox(settings: ModelSettings) -> dict[str, Any]:
    rope = _write_rope(settings)
    rope["rope_parameters"]["partial_rotary_factor"] = rope["rotary_pct"] = (
        settings.rotary_dim / settings.attention.head_dim
    )
    return rope | {
        "hidden_size": settings.d_model,
        "num_attention_heads": settings.attention.num_heads,
        "num_hidden_layers": settings.num_layers,
        "intermediate_size": settings.d_ffw,
        "hidden_act": _THEIR_GELU.get(settings.activation, settings.activation),
        "layer_norm_eps": settings.norm_eps,
        "attention_bias": settings.attention.bias != "none",
        "use_parallel_residual": settings.parallel_residual,
        "rotary_emb_base": settings.rope.theta,
    }


def _heads(config: Config, width: int, key: str, width_key: str) -> dict[str, Any]:
    """Return the sizes of heads that divide the width evenly, without grouped queries."""
    heads = config.integer(key)
    if width % heads:
        config.refuse(key, f"a divisor of {width_key} = {width}")
    return {"d_model": width, "attention.num_heads": heads, "attention.head_dim": width // heads}


# --------------------------------------------------------------------------------------------- Llama, Mistral and Qwen


def _read_llama(config: Config) -> dict[str, Any]:
    bias = "all" if config.flag("attention_bias", False) else "none"
    return _read_gated(config) | {"attention.bias": bias, "feed_forward_bias": config.flag("mlp_bias", False)}


def _read_mistral(config: Config) -> dict[str, Any]:
    has_none = "sliding_window" in config.values and config.values["sliding_window"] is None
    return _read_gated(config) | {"attention.sliding_window": 0 if has_none else config.integer("sliding_window", 4096)}


def _read_qwen2(config: Config) -> dict[str, Any]:
    return _read_gated(config) | {"attention.bias": "qkv", "attention.sliding_window": _read_window(config)}


def _read_qwen3(config: Config) -> dict[str, Any]:
    bias = "all" if config.flag("attention_bias", False) else "none"
    window = _read_window(config)
    return _read_gated(config, head_dim=128) | {
        "attention.bias": bias,
        "attention.qk_norm": True,
        "attention.sliding_window": window,
    }


def _read_gated(config: Config, head_dim: int = 0) -> dict[str, Any]:
    """Read the keys that these families share."""
    width, heads, context = (config.integer(key) for key in ("hidden_size", "num_attention_heads", _LONGEST))
    head_dim = config.integer("head_dim", head_dim or max(1, width // heads))
    return {
        "d_model": width,
        "d_ffw": config.integer("intermediate_size"),
        "attention.num_heads": heads,
        "attention.head_dim": head_dim,
        "attention.num_kv_heads": config.integer("num_key_value_heads", heads),
        "num_layers": config.integer("num_hidden_layers"),
        "activation": config.choice("hidden_act", _SILU, "silu"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "context": context,
        **_read_rope(config, head_dim, context),
    }


_LONGEST = "max_position_embeddings"


def _read_window(config: Config) -> int:
    """Read the sliding window of Qwen, which can start at a later layer; here all layers must have the same window."""
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else 0
    named, num_layers = config.values.get("layer_types"), config.integer("num_hidden_layers")
    if named is not None:
        if named == ["full_attention"] * num_layers:
            return 0
        if named == ["sliding_attention"] * num_layers and window:
            return window
        config.refuse("layer_types", "'full_attention' for all layers, or 'sliding_attention' with use_sliding_window")
    full = config.values.get("max_window_layers", 28) if window else num_layers
    if full not in (0, num_layers) and not (isinstance(full, int) and full > num_layers):
        config.refuse("max_window_layers", f"0, or num_hidden_layers = {num_layers} and more: layers must be alike")
    return 0 if full else window


def _write_llama(settings: ModelSettings) -> dict[str, Any]:
    return _write_gated(settings) | {"mlp_bias": settings.feed_forward_bias} | _write_bias(settings)


def _write_mistral(settings: ModelSettings) -> dict[str, Any]:
    return _write_gated(settings) | {"sliding_window": settings.attention.sliding_window or None}


def _write_qwen2(settings: ModelSettings) -> dict[str, Any]:
    return _write_gated(settings) | {
        "sliding_window": settings.attention.sliding_window or None,
        "use_sliding_window": settings.attention.sliding_window > 0,
        "max_window_layers": 0 if settings.attention.sliding_window else settings.num_layers,
        "layer_types": ["sliding_attention" if settings.attention.sliding_window else "full_attention"]
        * settings.num_layers,
    }


def _write_qwen3(settings: ModelSettings) -> dict[str, Any]:
    return _write_qwen2(settings) | _write_bias(settings)


def _write_bias(settings: ModelSettings) -> dict[str, Any]:
    return {"attention_bias": settings.attention.bias != "none"}


def _write_gated(settings: ModelSettings) -> dict[str, Any]:
    return _write_rope(settings) | {
        "hidden_size": settings.d_model,
        "intermediate_size": settings.d_ffw,
        "num_attention_heads": settings.attention.num_heads,
        "head_dim": settings.attention.head_dim,
        "num_key_value_heads": settings.attention.kv_heads,
        "num_hidden_layers": settings.num_layers,
        "hidden_act": "silu" if settings.activation == "swiglu" else settings.activation,
        "rms_norm_eps": settings.norm_eps,
    }


# ---------------------------------------------------------------------------------------------------------------- RoPE


def _read_rope(
    config: Config, head_dim: int, context: int, theta: str = "rope_theta", share: tuple[str, float] = ("", 1.0)
) -> dict[str, Any]:
    """Read RoPE from `rope_parameters` (newer configs), or from `rope_scaling` and separate keys (older configs)."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    rope = config.part(key)
    for name, value in rope.values.items():
        if isinstance(value, dict):
            rope.refuse(name, "numbers, the same for all layers")
    if "rope_type" not in rope.values and "type" in rope.values:  # its name in older ones
        rope = Config(rope.file, {**rope.values, "rope_type": rope.values["type"]})
    scaling = rope.choice("rope_type", {"default": "none", "linear": "linear", "llama3": "llama3"}, "default")
    share_key, share_default = share
    turning = rope.number("partial_rotary_factor", config.number(share_key, share_default) if share_key else 1.0)
    if not share_key and (turning != 1 or config.values.get("partial_rotary_factor") not in (None, 1)):
        (rope if turning != 1 else config).refuse("partial_rotary_factor", "1")
    read = {
        "rope.theta": rope.number("rope_theta", config.number(theta, 10_000.0)),
        "rope.partial_rotary_factor": int(head_dim * turning) / head_dim,
        "rope.scaling": scaling,
    }
    if scaling != "none":
        read["rope.factor"] = rope.number("factor")
    if scaling == "llama3":
        read["rope.low_freq_factor"] = rope.number("low_freq_factor")
        read["rope.high_freq_factor"] = rope.number("high_freq_factor")
        read["rope.original_max_positions"] = rope.integer("original_max_position_embeddings", context)
    return read


def _write_rope(settings: ModelSettings) -> dict[str, Any]:
    """Write RoPE for newer and older versions of transformers."""
    scaling: dict[str, Any] = {}
    if settings.rope.scaling != "none":
        scaling = {"rope_type": settings.rope.scaling, "factor": settings.rope.factor}
    if settings.rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": settings.rope.low_freq_factor,
            "high_freq_factor": settings.rope.high_freq_factor,
        }
        scaling["original_max_position_embeddings"] = settings.rope.original_max_positions
    parameters = {"rope_type": "default", **scaling, "rope_theta": settings.rope.theta}
    return {"rope_theta": settings.rope.theta, "rope_scaling": scaling or None, "rope_parameters": parameters}


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _write_gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", _read_neox, _write_neox),
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen3),
}
"""By `model_type`, the simplest first: the first family that can express a decoder is used."""
