"""What a model is told: its sizes and its options."""

import math
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from indexing.store.errors import InputError

PositionScheme = Literal["rope", "transformer-xl", "alibi", "learned"]
Activation = Literal["gelu", "gelu-tanh", "swiglu"]
Norm = Literal["rms", "layer"]
Biases = Literal["none", "qkv", "all"]
RopeScaling = Literal["none", "linear", "llama3"]
Initialization = Literal["depth-scaled", "mup"]


@dataclass(frozen=True)
class ModelSettings:
    """The sizes of a model; `retro/model/presets.py` holds the paper's four and three for a CPU."""

    vocab_size: int = 0
    """Rows of the embedding tables; 0 takes the number from the datastore's tokenizer."""
    d_model: int = 256
    """Width of the decoder."""
    d_ffw: int = 1024
    """Inner width of the decoder's feed-forward blocks."""
    num_heads: int = 4
    """Heads of every attention in the decoder."""
    head_dim: int = 64
    """Features of a decoder head; the attention's width is num_heads * head_dim, whatever d_model is."""
    num_layers: int = 6
    """Layers of the decoder."""
    cca_layers: tuple[int, ...] = (3, 6)
    """Decoder layers with chunked cross-attention, counted from 1 (P in the paper); none = a plain decoder."""
    encoder_d_model: int = 128
    """Width of the encoder of neighbors."""
    encoder_d_ffw: int = 512
    """Inner width of the encoder's feed-forward blocks."""
    encoder_num_heads: int = 2
    """Heads of every attention in the encoder."""
    encoder_head_dim: int = 64
    """Features of an encoder head."""
    encoder_num_layers: int = 2
    """Layers of the encoder."""
    encoder_cca_layers: tuple[int, ...] = (1,)
    """Encoder layers that read the querying chunk, counted from 1; none = neighbors encoded without their query."""
    chunk_length: int = 64
    """Tokens of a chunk (m); must be the datastore's."""
    positions: PositionScheme = "rope"
    """Relative positions: `rope` (rotary), `alibi` (scores fall with the distance), or `transformer-xl` as in the paper
    (slower, more parameters); or absolute ones, `learned`."""
    max_positions: int = 2048
    """Rows of the decoder's table of `learned` positions: tokens of the longest sequence."""
    activation: Activation = "gelu"
    """Of the feed-forward blocks. `swiglu` has three matrices: with two thirds of d_ffw it is as large as `gelu`; `gelu-tanh`
    is GPT-2's approximation of it."""
    num_kv_heads: int = 0
    """Heads of keys and values of every attention in the decoder, each read by num_heads / num_kv_heads heads of queries
    (grouped-query attention: generation remembers less). 0 = num_heads. The encoder, which remembers nothing, has no such."""
    norm: Norm = "rms"
    """Of the decoder's own blocks: RMSNorm, or LayerNorm with gains and biases. Encoder and cross-attention have RMSNorm."""
    norm_eps: float = 1e-6
    """What these norms, and those of the decoder's own queries and keys, add to the variance."""
    attention_bias: Biases = "none"
    """Biases of the decoder's own attentions: of queries, keys and values, or of the output too."""
    feed_forward_bias: bool = False
    """Biases of the decoder's feed-forward blocks."""
    rope_theta: float = 10_000.0
    """With `rope`, the period of the slowest pair of features of the decoder's own attentions, over 2π (nearly)."""
    rope_share: float = 1.0
    """Share of the features of a head that turn, the first ones; the others know no position (GPT-NeoX)."""
    rope_scaling: RopeScaling = "none"
    """Turn more slowly, so that longer sequences span the angles of those in training: all pairs (`linear`), or the slow ones
    alone (`llama3`)."""
    rope_factor: float = 1.0
    """How many times more slowly."""
    rope_low_factor: float = 1.0
    """With `llama3`, a pair that turns less than so many times in `rope_original_length` tokens is slow,"""
    rope_high_factor: float = 4.0
    """and one that turns more often than this stays as it is; those between are slowed in part."""
    rope_original_length: int = 8192
    """With `llama3`, tokens of a sequence in the training before."""
    sliding_window: int = 0
    """Tokens that a token sees in the decoder's own attentions, itself the last of them; 0 = all before it."""
    parallel_residual: bool = False
    """Let the feed-forward block of a layer read what the attention has read, and not what it has made of it (GPT-NeoX).
    Chunked cross-attention comes after attention as ever, and no feed-forward block of its own layer reads it."""
    scaled_embeddings: bool = True
    """Multiply the rows of the embedding table by sqrt(d_model) where they enter the residual stream; else they enter as they are."""
    retrieval_positions: PositionScheme | Literal[""] = ""
    """Positions of encoder and chunked cross-attention, plain ones of theta 10,000 with `rope`; empty = as `positions`."""
    qk_norm: bool = False
    """Give the queries and keys of every head the same size (RMSNorm), so that no score can grow without bounds."""
    init: Initialization = "depth-scaled"
    """First weights. `depth-scaled`: what is added to the residual stream is the smaller, the more layers there are. `mup`:
    this, and sizes and learning rates such that the best `train.lr` of a narrow model is that of a wide one."""
    mup_base_width: int = 256
    """With `mup`, inputs of a matrix that learns at `train.lr`; one with n inputs learns at mup_base_width / n of it."""
    smeared_keys: bool = False
    """Mix the key before into every key of the decoder's attentions (learned per head), so that one layer can find what
    followed a token, in the text before or in a neighbor. Not in the paper; it brings copying sooner (docs/results/copying.md)."""
    retrieval_smeared_keys: bool = False
    """The same of chunked cross-attention alone: beside a trained decoder that has none (docs/how-to/retrofit.md)."""
    smeared_tokens: int = 1
    """With one of these, tokens before of which a key holds something. From 2 on queries hold so many too, their own included,
    so that one head finds what followed several tokens at once; at most `chunk_length`."""
    copying_init: bool = False
    """Begin the decoder's attentions as ones that copy: queries look for tokens like their own, and what is read is said
    again. Chunked cross-attention needs `shared_embeddings` for it; beside a trained decoder it is fitted to what that says
    (docs/how-to/retrofit.md). Not in the paper (docs/results/copying.md)."""
    num_experts: int = 0
    """Experts of a decoder layer, of which each token asks a few, in the place of its feed-forward block; 0 = none."""
    experts_every: int = 2
    """Every so many decoder layers one has experts: 1 = all; 2 = layers 2, 4, 6 … (GShard)."""
    experts_per_token: int = 2
    """Experts that a token asks."""
    capacity_factor: float = 1.25
    """Tokens of a document in a sequence that an expert takes in training, over an even share of its chunks. Later ones are
    dropped: none from num_experts / experts_per_token on, and none in evaluation."""
    balance_weight: float = 0.01
    """Weight in the loss of what keeps the experts evenly busy (Switch Transformer)."""
    router_z_weight: float = 0.0
    """Weight in the loss of what keeps the routers' logits small (ST-MoE: 0.001)."""
    dropout: float = 0.0
    """Share of the features dropped from the output of every block in training."""
    tied_embeddings: bool = True
    """Use the decoder's embedding table as its output layer too."""
    shared_embeddings: bool = False
    """Let the encoder read the decoder's embedding table, through a projection, instead of one of its own (the paper's)."""
    preset: str = ""
    """A row of the table in `retro/model/presets.py` (`tiny`, `small`, `base-cpu`, `172m`, `425m`, `1.5b`, `7.5b`) for all sizes; or
    `base`: the decoder of the model that `train.init_from` names, all its sizes and options. Then cca_layers and the sizes of
    the encoder may be set; left at their defaults, they are those that it has, or every third layer from 6 (of less than 12,
    every second), and an encoder of two layers as wide as the decoder, up to 896."""

    def __post_init__(self) -> None:
        """Refuse what no model can have.

        Raises:
            InputError: (a ValueError) naming the key, the value found, and what is accepted.
        """
        if self.vocab_size < 0:
            self._refuse("vocab_size", "a positive number, or 0 to take it from the datastore's tokenizer")
        sizes = ("d_model", "d_ffw", "num_heads", "head_dim", "num_layers", "chunk_length")
        encoder_sizes = ("d_model", "d_ffw", "num_heads", "head_dim", "num_layers")
        for field in (*sizes, *(f"encoder_{size}" for size in encoder_sizes), "max_positions", "mup_base_width"):
            if getattr(self, field) < 1:
                self._refuse(field, "a positive number")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in get_args(choices):
                self._refuse(field, f"one of {', '.join(get_args(choices))}")
        if self.num_kv_heads < 0 or self.num_heads % self.kv_heads:
            self._refuse("num_kv_heads", f"a divisor of model.num_heads = {self.num_heads}, or 0 for as many")
        self._check_positions()
        for field in ("cca_layers", "encoder_cca_layers"):
            layers, count = getattr(self, field), field.replace("cca", "num")
            last = math.inf if self.preset == "base" else getattr(self, count)  # a base may have more layers
            if list(layers) != sorted({layer for layer in layers if 1 <= layer <= last}):
                self._refuse(field, f"increasing numbers from 1 to model.{count} = {getattr(self, count)}, or nothing")
        if self.copying_init and self.cca_layers and not self.shared_embeddings:
            self._refuse("copying_init", "false, or set model.shared_embeddings")
        if not 1 <= self.smeared_tokens <= self.chunk_length:
            self._refuse("smeared_tokens", f"a number from 1 to model.chunk_length = {self.chunk_length}")
        if self.norm_eps <= 0:
            self._refuse("norm_eps", "a number above 0")
        self._check_experts()
        if not 0 <= self.dropout < 1:
            self._refuse("dropout", "a number from 0 up to, not including, 1")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in the decoder."""
        return self.num_kv_heads or self.num_heads

    @property
    def beside(self) -> PositionScheme:
        """Positions of encoder and chunked cross-attention."""
        return self.retrieval_positions or self.positions

    @property
    def smeared(self) -> tuple[int, int]:
        """Tokens before of which a key holds something: of the decoder's own attentions, and of chunked cross-attention."""
        own, cross = self.smeared_keys, self.smeared_keys or self.retrieval_smeared_keys
        return own * self.smeared_tokens, cross * self.smeared_tokens

    @property
    def turning(self) -> int:
        """Features of a head of the decoder's own attentions that RoPE turns."""
        return round(self.head_dim * self.rope_share)

    def check_length(self, num_tokens: int) -> None:
        """Raise InputError where sequences of so many tokens are longer than the table of learned positions."""
        if self.positions == "learned" and num_tokens > self.max_positions:
            self._refuse("max_positions", f"{num_tokens} or more, the tokens of a sequence")

    def _check_positions(self) -> None:
        if self.retrieval_positions not in ("", *get_args(PositionScheme)):
            self._refuse("retrieval_positions", f"one of {', '.join(get_args(PositionScheme))}, or nothing")
        if self.beside == "learned" and self.positions != "learned":
            self._refuse(
                "retrieval_positions", "another scheme: only with model.positions = 'learned' the stream tells"
            )
        # Sines and cosines come in pairs: per head with RoPE, over the whole width with Transformer-XL.
        paired = {"rope": "head_dim", "transformer-xl": "d_model"}
        for scheme, prefix in ((self.positions, ""), (self.beside, ""), (self.beside, "encoder_")):
            if scheme in paired and getattr(self, field := prefix + paired[scheme]) % 2:
                self._refuse(field, f"an even number, as model.positions = {scheme!r} pairs its features")
        if not 0 < self.rope_share <= 1 or (self.positions == "rope" and (self.turning < 2 or self.turning % 2)):
            self._refuse("rope_share", f"a share, up to 1, of model.head_dim = {self.head_dim} that is an even number")
        for field in ("rope_theta", "rope_factor", "rope_low_factor", "rope_high_factor", "rope_original_length"):
            if getattr(self, field) <= 0:
                self._refuse(field, "a positive number")
        if self.rope_high_factor <= self.rope_low_factor:
            self._refuse("rope_high_factor", f"more than model.rope_low_factor = {self.rope_low_factor}")
        if self.sliding_window < 0:
            self._refuse("sliding_window", "a positive number, or 0 to see all")

    def _check_experts(self) -> None:
        if self.num_experts < 0 or self.num_experts == 1:
            self._refuse("num_experts", "2 or more, or 0 for none")
        if self.num_experts and self.feed_forward_bias:
            self._refuse("feed_forward_bias", "false: experts have no biases")
        if self.experts_every < 1 or (self.num_experts and not self.preset and self.experts_every > self.num_layers):
            self._refuse("experts_every", f"a number from 1 to model.num_layers = {self.num_layers}")
        if self.experts_per_token < 1 or self.experts_per_token > (self.num_experts or math.inf):
            self._refuse("experts_per_token", f"a number from 1 to model.num_experts = {self.num_experts}")
        if self.capacity_factor <= 0:
            self._refuse("capacity_factor", "a number above 0")
        for field in ("balance_weight", "router_z_weight"):
            if getattr(self, field) < 0:
                self._refuse(field, "0 or more")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Decoder layers with experts, counted from 1."""
        return tuple(range(self.experts_every, self.num_layers + 1, self.experts_every)) if self.num_experts else ()

    def _refuse(self, field: str, accepted: str) -> NoReturn:
        raise InputError(f"model.{field} is {getattr(self, field)!r}: set it to {accepted}.")


_CHOICES = {
    "positions": PositionScheme,
    "activation": Activation,
    "init": Initialization,
    "norm": Norm,
    "attention_bias": Biases,
    "rope_scaling": RopeScaling,
}
