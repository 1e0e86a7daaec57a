"""Floating-point operations of a model, and which share of a device's peak a run uses (MFU).

    MFU = training operations of a sequence × sequences per second / peak operations per second of the device

Counted are the matrix products of one forward pass, a multiplication and an addition each as one operation: what PaLM's
appendix B calls model FLOPs, with encoder and chunked cross-attention. Training is three times that, as the backward pass makes
two products for each one of the forward pass; less where weights are frozen. Causal attention is counted in full, as is customary, in a sliding window too; norms, softmax,
rotations, recomputation and the optimizer are not counted. So are documents packed into one sequence, which see less than all of it.
"""

import time

import torch

from indexing.device import has_bfloat16
from retro.device import Placement
from retro.model.settings import ModelSettings
from retro.tuning.settings import ALL, TuningSettings

# Dense matrix products in bfloat16 or float16 with sums in float32, in 10^12 operations per second, by the name that CUDA
# reports, from the data sheets. A name that is not here (a laptop's GPU, a MIG slice) is measured: near names differ by half.
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
    """Operations of a forward pass over one sequence, logits included.

    Args:
        settings: sizes of the model; the vocabulary filled in.
        num_tokens: T, tokens of the sequence.
        k: neighbors of each chunk; 0 = retrieval OFF.
        retrieved_length: r, tokens of a neighbor; 0 = 2m.
    """
    s, t, m = settings, num_tokens, settings.chunk_length
    relative, beside = (int(scheme == "transformer-xl") for scheme in (s.positions, s.beside))
    matrices = 3 if s.activation == "swiglu" else 2
    width, kv_width = s.num_heads * s.head_dim, s.kv_heads * s.head_dim
    attention = _attention(t, t, s.d_model, s.d_model, width, kv_width, relative * (2 * t - 1))
    # Of experts, those that a token asks, and the router; not the empty places in their queues.
    num_routers = len(s.expert_layers)
    num_feed_forwards = s.num_layers - num_routers + s.experts_per_token * num_routers
    total = s.num_layers * attention + num_feed_forwards * 2 * matrices * t * s.d_model * s.d_ffw
    total += 2 * t * s.d_model * (s.vocab_size + num_routers * s.num_experts)
    num_chunks = t // m
    if not (k and s.cca_layers and num_chunks):
        return total
    r, d, inner = retrieved_length or 2 * m, s.encoder_d_model, s.encoder_num_heads * s.encoder_head_dim
    encoder = _attention(r, r, d, d, inner, inner, beside * (2 * r - 1)) + 2 * matrices * r * d * s.encoder_d_ffw
    # Neighbors side by side stand at the same positions: the distances are those of one.
    query = _attention(k * r, m, d, s.d_model, inner, inner, beside * (r + m - 1))
    cross = _attention(m, k * r, s.d_model, d, width, kv_width, beside * (r + m - 1))
    per_chunk = k * s.encoder_num_layers * encoder + len(s.encoder_cca_layers) * query + len(s.cca_layers) * cross
    if s.shared_embeddings:
        per_chunk += 2 * k * r * s.d_model * d
    # Windows are filled up with queries that are none: those were not projected.
    missing = num_chunks * m - (t - m + max(1, s.smeared[1]))
    return total + num_chunks * per_chunk - len(s.cca_layers) * 2 * width * s.d_model * missing


def training_flops(settings: ModelSettings, num_tokens: int, k: int, tuning: TuningSettings = ALL) -> int:
    """Operations of a training step over one sequence: of the forward pass, and as many again for the gradients of activations and
    for those of weights, as far as there are any. The arguments as above; an adapter's own few are not counted.

    Exact where all is trained. Without an adapter, gradients of a frozen decoder's activations end at its first chunked
    cross-attention; that the attention before it has none, and that scores have two and no weights, is left out: a few percent.
    """
    whole, off = (forward_flops(settings, num_tokens, neighbors) for neighbors in (k, 0))
    weights = {"all": whole, "retrieval": whole - off, "none": 0}[tuning.weights]
    if not tuning.retrieval_only:
        return 2 * whole + weights
    num_below = min(settings.cca_layers, default=1) - 1
    layers = off - 2 * num_tokens * settings.d_model * settings.vocab_size  # without the output layer
    below = layers * num_below // settings.num_layers
    return whole if whole == off else 2 * whole - below + weights


def _attention(
    num_queries: int, num_keys: int, width: int, key_width: int, inner: int, kv_inner: int, num_distances: int
) -> int:
    """Of one attention: projections of queries, keys, values and output; scores and sums; Transformer-XL's distances.

    The projection of the distances themselves (W_kR) is left out: it is made once for a whole batch.
    """
    projections = 4 * (inner * num_queries * width + kv_inner * num_keys * key_width)
    return projections + 4 * num_queries * num_keys * inner + 2 * num_queries * num_distances * inner


def peak_flops(placement: Placement) -> float:
    """Operations per second of the device: its maker's figure where it is known, else those of a large matrix product."""
    if placement.device.type == "cuda":
        name = torch.cuda.get_device_name(placement.device)
        if name in _PEAKS and placement.dtype != torch.float32:
            return _PEAKS[name] * 1e12
        return measured_flops(placement, 8192)
    # A CPU that has no instructions for a type multiplies at a hundredth of the rate: the large product would take minutes.
    fast = placement.dtype == torch.float32 or (placement.dtype == torch.bfloat16 and has_bfloat16("cpu"))
    return measured_flops(placement, 2048 if fast else 256)


def measured_flops(placement: Placement, size: int = 2048, repeats: int = 5) -> float:
    """The best rate of square matrix products in the placement's precision, in operations per second."""
    a = torch.ones(size, size, device=placement.device, dtype=placement.dtype)  # no random draw: those are the model's
    count = 5 if a.is_cuda else 1  # waiting for each product would be timed too
    best = min(_seconds(a, count) for _ in range(repeats + 1))  # the first one warms up, and is never the best
    return 2 * size**3 * count / best


def _seconds(a: torch.Tensor, count: int) -> float:
    """The time of some products of a square matrix with itself, one after another."""
    out = torch.empty_like(a)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    started = time.perf_counter()
    for _ in range(count):
        torch.mm(a, a, out=out)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started
