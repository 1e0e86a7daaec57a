"""Floating-point operations (FLOPs) of a model, and model FLOPs utilization (MFU).

    MFU = training FLOPs of a sequence × sequences per second / peak FLOPs per second of the device

FLOPs are those of matrix products, with one for each multiplication and one for each addition (model FLOPs, PaLM,
appendix B), including encoder and chunked cross-attention. Training takes three times those of a forward pass, since
the backward pass has two products for each one of the forward pass; frozen weights take less. Attention counts in full,
as is customary, although causal masks, sliding windows and packed documents hide a part of it. Norms, softmax,
rotations, recomputation and the optimizer do not count.
"""

import time

import torch

from indexing.machine import onednn_has_bfloat16
from retro.adapters.settings import NO_LORA, LoraSettings, Weights
from retro.device import Placement
from retro.model_settings import ModelSettings

# Dense matrix products in bfloat16 or float16 with float32 accumulation, in TFLOPS from the data sheets, by the name
# that CUDA reports. Other GPUs (a laptop's, a MIG slice) are measured, since similar names differ by up to a half.
_PEAKS = {
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
}


def forward_flops(settings: ModelSettings, num_tokens: int, k: int, retrieved_length: int = 0) -> int:
    """FLOPs of a forward pass over one sequence, logits included.

    Args:
        settings: of the model, with vocab_size and chunk_length filled in.
        num_tokens: T, tokens of the sequence.
        k: neighbors of each chunk; 0 = retrieval OFF.
        retrieved_length: r, tokens of a neighbor; 0 = 2m.
    """
    s, t, m = settings, num_tokens, settings.chunk_length
    relative, cross_relative = (
        int(scheme == "transformer-xl") for scheme in (s.attention.positions, s.retrieval_positions)
    )
    matrices = 3 if s.activation == "swiglu" else 2
    width, kv_width = s.attention.num_heads * s.attention.head_dim, s.attention.kv_heads * s.attention.head_dim
    attention = _attention(t, t, s.d_model, s.d_model, width, kv_width, relative * (2 * t - 1))
    # Experts that a token is sent to, and the router; not empty slots in queues.
    num_routers = len(s.expert_layers)
    num_feed_forwards = s.num_layers - num_routers + s.experts.per_token * num_routers
    attention += 4 * t * s.attention.prefix_tokens * width
    total = s.num_layers * attention + num_feed_forwards * 2 * matrices * t * s.d_model * s.d_ffw
    total += 2 * t * s.d_model * (s.vocab_size + num_routers * s.experts.num_experts)
    num_chunks, r = t // m, retrieved_length or 2 * m
    if s.decoder_reads:  # each neighbor passes through the layers; a window's queries are those of the text
        neighbor = _attention(r, r, s.d_model, s.d_model, width, kv_width, 0) + 2 * matrices * r * s.d_model * s.d_ffw
        neighbor += 4 * r * s.attention.prefix_tokens * width
        total += num_chunks * s.num_layers * k * (neighbor + 4 * m * r * width)
    if not (k and s.retrieval.cca_layers and num_chunks):
        return total
    d, inner = s.encoder.d_model, s.encoder.num_heads * s.encoder.head_dim
    encoder = (
        _attention(r, r, d, d, inner, inner, cross_relative * (2 * r - 1)) + 2 * matrices * r * d * s.encoder.d_ffw
    )
    # Concatenated neighbors have the same positions: the distances are those of one neighbor.
    query = _attention(k * r, m, d, s.d_model, inner, inner, cross_relative * (r + m - 1))
    cross = _attention(m, k * r, s.d_model, d, width, kv_width, cross_relative * (r + m - 1))
    per_chunk = (
        k * s.encoder.num_layers * encoder + len(s.encoder.cca_layers) * query + len(s.retrieval.cca_layers) * cross
    )
    if s.shared_embeddings:
        per_chunk += 2 * k * r * s.d_model * d
    # Windows are padded with queries that were not projected.
    missing = num_chunks * m - (t - m + 1)
    return total + num_chunks * per_chunk - len(s.retrieval.cca_layers) * 2 * width * s.d_model * missing


def training_flops(
    settings: ModelSettings, num_tokens: int, k: int, trained: Weights = "all", lora: LoraSettings = NO_LORA
) -> int:
    """FLOPs of a training step over one sequence: the forward pass, gradients of activations, and gradients of weights.

    Exact if all weights are trained. Without an adapter, gradients of a frozen decoder's activations end at its first
    chunked cross-attention. With frozen weights the result is a few percent off: it counts gradients of the
    self-attention of that layer, and one instead of two products for gradients of scores. An adapter's FLOPs do not
    count.

    Args:
        settings: as in `forward_flops`.
        num_tokens: T.
        k: neighbors of each chunk.
        trained: which weights are trained (`train.weights`).
        lora: the adapter.
    """
    whole, off = (forward_flops(settings, num_tokens, neighbors) for neighbors in (k, 0))
    weights = {"all": whole, "retrieval": whole - off, "none": 0}[trained]
    if trained != "retrieval" or lora.rank or settings.attention.prefix_tokens:
        return 2 * whole + weights
    num_below = min(settings.retrieval.cca_layers, default=1) - 1
    layers = off - 2 * num_tokens * settings.d_model * settings.vocab_size  # without the output layer
    below = layers * num_below // settings.num_layers
    return whole if whole == off else 2 * whole - below + weights


def _attention(
    num_queries: int, num_keys: int, width: int, key_width: int, inner: int, kv_inner: int, num_distances: int
) -> int:
    """FLOPs of one attention: projections of queries, keys, values and output; scores and sums; Transformer-XL's
    distances.

    The projection of distances (W_kR) does not count: it is computed once per batch.
    """
    projections = 4 * (inner * num_queries * width + kv_inner * num_keys * key_width)
    return projections + 4 * num_queries * num_keys * inner + 2 * num_queries * num_distances * inner


def peak_flops(placement: Placement) -> float:
    """Peak FLOPs per second of the device: from its data sheet if known, else measured with a large matrix product."""
    if placement.device.type == "cuda":
        name = torch.cuda.get_device_name(placement.device)
        if name in _PEAKS and placement.dtype != torch.float32:
            return _PEAKS[name] * 1e12
        return measured_flops(placement, 8192)
    # A CPU without instructions for a dtype multiplies at a hundredth of the rate: the large product would take
    # minutes.
    fast = placement.dtype == torch.float32 or (placement.dtype == torch.bfloat16 and onednn_has_bfloat16())
    return measured_flops(placement, 2048 if fast else 256)


def measured_flops(placement: Placement, size: int = 2048, repeats: int = 5) -> float:
    """The best rate of square matrix products in the placement's dtype, in FLOPs per second."""
    # Random numbers, as a GPU multiplies equal ones faster; of a generator of its own, so that those of the model stay
    # the same.
    generator = torch.Generator(placement.device).manual_seed(0)
    a = torch.randn(size, size, generator=generator, device=placement.device, dtype=placement.dtype)
    count = 5 if a.is_cuda else 1  # on a GPU, synchronizing after each product would be timed too
    best = min(_seconds(a, count) for _ in range(repeats + 1))  # the first one warms up, and is never the best
    return 2 * size**3 * count / best


def _seconds(a: torch.Tensor, count: int) -> float:
    """Seconds for `count` products of a square matrix with itself."""
    out = torch.empty_like(a)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    started = time.perf_counter()
    for _ in range(count):
        torch.mm(a, a, out=out)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started
