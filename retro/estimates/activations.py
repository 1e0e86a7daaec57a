"""Bytes of activations that a forward pass keeps for the backward pass, by block: formulas after Korthikanti et al. (2022).

With n tokens of width D, H heads of width A in all, inner width F, and w = 2 bytes under autocast (else 4), a layer keeps

    attention     4nD input   3wnD inputs of q, k, v   4wnA q, k, v and output   4nH sums of the softmax
    feed-forward  4nD input    wnD input of W_up       2wnF inputs of GELU and W_down

To these, the published terms, come those of grouped heads, gates, experts, cross-attention and encoder, norms of queries and keys,
smeared keys, and biases of scores (documents, ALiBi, Transformer-XL). Fused attention keeps no scores; their softmax is kept by a CPU
that trains in 16 bits, and by a CPU with Transformer-XL's positions. Tensors without n, such as tables of positions, do not count.
Tests hold the sums to what autograd keeps in real models.
"""

import math
from dataclasses import dataclass, replace

import torch

from retro.model.kernels import fits_bounds
from retro.model.settings import ModelSettings
from retro.parallel.settings import Checkpointing


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device.

    Attributes:
        num_sequences: B.
        sequence_length: T.
        k: neighbors of a chunk; 0 = retrieval OFF.
        narrow: whether matrix products run under autocast in 16 bits.
        gpu: whether kernels of a GPU run; else of a CPU.
        documents: whether sequences hold several documents. Each attention then keeps a mask, unless a GPU needs none.
    """

    num_sequences: int
    sequence_length: int
    k: int = 0
    narrow: bool = True
    gpu: bool = True
    documents: bool = True

    @property
    def width(self) -> int:
        """w, bytes of a number in matrix products."""
        return 2 if self.narrow else 4


@dataclass(frozen=True)
class Block:
    """Bytes of a residual block.

    Attributes:
        input: its input in the residual stream, which sequence parallelism divides.
        kept: everything else that autograd keeps without checkpointing, except for copies of weights.
        products: results of matrix products and attentions.
        kept_products: those that are also in `kept`.
        weights: 16-bit copies of its weights. Autocast holds them until it ends; without checkpointing, autograd keeps them.
    """

    input: float
    kept: float
    products: float
    kept_products: float
    weights: float

    def lasting(self, checkpointing: Checkpointing, token_shards: int = 1) -> float:
        """Bytes between the forward and the backward pass."""
        others = {"none": self.kept + self.weights, "selective": self.products, "full": 0}
        return self.input / token_shards + others[checkpointing]

    def recomputed(self, checkpointing: Checkpointing) -> float:
        """Additional bytes while the block is recomputed, copies of its weights included."""
        lasting = {"none": self.kept + self.weights, "selective": self.kept_products, "full": 0}
        return self.kept + self.weights - lasting[checkpointing]


def activations(settings: ModelSettings, run: Pass) -> tuple[dict[str, Block], dict[str, float]]:
    """Residual blocks by the names of their modules, and bytes outside of them: of the `encoder`, and (empty name) of the loss.

    Args:
        settings: of the model, with vocab_size and chunk_length filled in.
        run: batch and device.
    """
    s, own, t = settings, settings.attention, run.sequence_length
    n = run.num_sequences * t
    decoder = _Heads(s.d_model, s.d_model, own.num_heads, own.kv_heads, own.head_dim, own.qk_norm, own.positions)
    by_bounds = run.gpu and run.narrow and fits_bounds(own, torch.bfloat16)
    masked = (run.documents or 0 < own.sliding_window < t) and not by_bounds
    attention = _attention(
        run, decoder, run.num_sequences, t, t, s.norm, own.smeared_tokens, causal=True, masked=masked
    )
    feed_forward = _feed_forward(run, s, s.d_model, s.d_ffw, n, s.norm)
    if s.parallel_residual:  # reads the input of the attention, which is kept there
        feed_forward = replace(feed_forward, kept=feed_forward.kept - 4 * n * s.d_model)
    blocks: dict[str, Block] = {}
    for layer in range(s.num_layers):
        blocks[f"attention.{layer}"] = attention
        blocks[f"feed_forward.{layer}"] = _experts(run, s, n) if layer + 1 in s.expert_layers else feed_forward
    outside = {"": _outside(run, s, n)}
    if not (run.k and s.activations_read):
        return blocks, outside
    e, num_chunks, r = s.encoder, n // s.chunk_length, 2 * s.chunk_length
    rows = num_chunks * run.k * r  # tokens of all neighbors
    if s.decoder_reads:
        attention = _reading_attention(run, s, decoder, attention, num_chunks)
        feed_forward = _feed_forward(run, s, s.d_model, s.d_ffw, n + rows, s.norm)
        for layer in range(s.num_layers):
            blocks |= {f"attention.{layer}": attention, f"feed_forward.{layer}": feed_forward}
        return blocks, outside | {"": outside[""] + 4 * rows * s.d_model}
    norms = _norm(run, n, s.d_model) + _norm(run, rows, e.d_model)
    outside["encoder"] = 4 * (n * s.d_model + rows * e.d_model) + norms + 8 * rows
    encoder = _Heads(e.d_model, e.d_model, e.num_heads, e.num_heads, e.head_dim, own.qk_norm, s.retrieval_positions)
    for layer in range(e.num_layers):
        blocks[f"encoder.attention.{layer}"] = _attention(run, encoder, num_chunks * run.k, r, r)
        blocks[f"encoder.feed_forward.{layer}"] = _feed_forward(run, s, e.d_model, e.d_ffw, rows)
    for layer in e.cca_layers:
        to_chunk = replace(encoder, key_width=s.d_model)
        blocks[f"encoder.cross.{layer}"] = _attention(run, to_chunk, num_chunks, run.k * r, s.chunk_length)
    to_neighbors = replace(decoder, key_width=e.d_model, positions=s.retrieval_positions)
    cross = _attention(run, to_neighbors, num_chunks, s.chunk_length, run.k * r)
    blocks |= {f"cross.{layer}": cross for layer in s.retrieval.cca_layers}
    first = f"cross.{min(s.retrieval.cca_layers)}"
    blocks[first] = replace(
        cross, input=cross.input + 4 * rows * e.d_model
    )  # the encoded neighbors, which all of them read
    return blocks, outside


@dataclass(frozen=True)
class _Heads:
    """Widths and options of an attention, as in `model/attention.py`: D, E, H, G, C."""

    width: int
    key_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    positions: str


def _norm(run: Pass, rows: int, width: int, norm: str = "rms") -> float:
    """Bytes in addition to the input: statistics, and RMSNorm's normalized rows on a CPU."""
    return rows * (8 if norm == "layer" else 4 if run.gpu else 4 + 4 * width)


def _attention(
    run: Pass,
    heads: _Heads,
    batch: int,
    num_queries: int,
    num_keys: int,
    norm: str = "rms",
    smeared: int = 0,
    *,
    causal: bool = False,
    masked: bool = False,
) -> Block:
    """Attention of `batch` sequences of queries to as many of keys.

    Args:
        run: batch and device.
        heads: widths and options.
        batch: number of sequences or chunks.
        num_queries: Q, of each.
        num_keys: S, of each.
        norm: kind of the block's norm.
        smeared: tokens mixed into each key.
        causal: whether later keys are hidden.
        masked: whether a mask is passed to the kernel.
    """
    w, d, e, wide = run.width, heads.width, heads.key_width, heads.num_heads * heads.head_dim
    q, k, pairs = batch * num_queries, batch * num_keys, batch * num_queries * num_keys
    keys = k * heads.num_kv_heads * heads.head_dim  # numbers in all keys; values have as many
    # Under autocast each projection keeps a copy of its input; in float32 they share the output of the norm.
    kept = _norm(run, q, d, norm) + (w * (q * d + 2 * k * e) if run.narrow else 4 * q * d)
    products, kept_products = float(w * (q * wide + 2 * keys)), 0.0
    if heads.qk_norm:
        kept += 4 * (q * wide + keys) + _norm(run, q * heads.num_heads + k * heads.num_kv_heads, heads.head_dim)
        kept_products += 0 if run.narrow else 4 * (q * wide + keys)
    if smeared:
        kept += w * ((smeared + 1) * keys + smeared * q * wide)
        kept_products += w * (keys + q * wide)
    relative = heads.positions == "transformer-xl"
    if relative:  # of Q + S - 1 distances: their keys for each sequence, and scores before and after the lookup
        distances = num_queries + num_keys - 1
        kept += w * (2 * q * wide + batch * distances * wide + q * heads.num_heads * distances)
        products += w * q * heads.num_heads * distances
    if not run.gpu and (run.narrow or relative):
        # Scores by products. Causal scores are computed for a quarter of the queries at a time, without the keys after it.
        part, copies = (10 / 16, 2.5) if causal and run.narrow else (1, 1)
        scores = part * w * heads.num_heads * pairs
        kept += scores + w * (2 * q * wide + 2 * copies * keys) + part * masked * pairs
        products += scores + w * q * wide
    else:
        bias = heads.num_heads if relative or heads.positions == "alibi" else int(masked)
        if run.gpu and bias:  # no kernel of a GPU shares keys among heads and takes a bias too
            keys = k * wide
        output = w * q * wide + 4 * q * heads.num_heads
        kept += output + w * (q * wide + 2 * keys + bias * pairs)
        products += output
        kept_products += output + w * k * heads.num_kv_heads * heads.head_dim
    matrices = 2 * d * wide + 2 * e * heads.num_kv_heads * heads.head_dim + relative * d * wide
    return Block(4 * q * d, kept, products + w * q * d, kept_products, 2 * matrices * run.narrow)


def _reading_attention(run: Pass, settings: ModelSettings, heads: _Heads, text: Block, num_chunks: int) -> Block:
    """Self-attention that reads neighbors: that of the text, that of each neighbor, and scores by products with their logs.

    Autograd keeps float32 scores and weights of the text and of the windows, and the weights in the dtype of products.
    """
    m, r, t, w = settings.chunk_length, 2 * settings.chunk_length, run.sequence_length, run.width
    alone = _attention(run, heads, num_chunks * run.k, r, r, settings.norm, causal=True)
    read = num_chunks * m * (t + run.k * r) * heads.num_heads  # scores
    outputs = num_chunks * m * heads.num_heads * heads.head_dim  # queries and sums of both
    logs = read * (8 + w * run.narrow) + 6 * w * outputs
    return Block(
        text.input + alone.input,
        text.kept + alone.kept + logs,
        text.products + alone.products + w * read,
        text.kept_products + alone.kept_products + w * read,
        text.weights,
    )


def _feed_forward(run: Pass, settings: ModelSettings, width: int, inner: int, rows: int, norm: str = "rms") -> Block:
    w, gates = run.width, int(settings.activation == "swiglu")
    products = (1 + gates) * w * rows * inner
    kept = _norm(run, rows, width, norm) + ((1 + gates) * w if run.narrow else 4) * rows * width + 2 * products
    weights = 2 * (2 + gates) * width * inner * run.narrow
    return Block(4 * rows * width, kept, products + w * rows * width, products, weights)


def _experts(run: Pass, settings: ModelSettings, rows: int) -> Block:
    """A router with float32 logits, and experts that run on queues of equal length."""
    s, w, gates = settings, run.width, int(settings.activation == "swiglu")
    num_experts, chosen = s.experts.num_experts, rows * s.experts.per_token
    even = s.chunk_length * s.experts.per_token / num_experts
    slots = num_experts * rows // s.chunk_length * math.ceil(min(s.experts.capacity_factor * even, s.chunk_length))
    products = (1 + gates) * w * slots * s.d_ffw
    router = 4 * rows * s.d_model + 12 * rows * num_experts + 40 * chosen
    kept = _norm(run, rows, s.d_model, s.norm) + router + w * (2 * chosen + slots) * s.d_model + 2 * products
    weights = 2 * num_experts * (2 + gates) * s.d_model * s.d_ffw * run.narrow
    results = products + 4 * rows * num_experts + w * slots * s.d_model
    return Block(4 * rows * s.d_model, kept, results, products, weights)


def _outside(run: Pass, settings: ModelSettings, rows: int) -> float:
    """Final norm, loss and copy head. The loss computes its gradients, of its input and of the output layer, in the forward pass."""
    s, copy = settings, settings.copy_head
    total = 8 * rows * s.d_model + _norm(run, rows, s.d_model, s.norm) + 4 * s.vocab_size * s.d_model + 8 * rows
    total += (bool(copy.context) + bool(copy.neighbors)) * rows * (4 * s.d_model + 240)
    return total
