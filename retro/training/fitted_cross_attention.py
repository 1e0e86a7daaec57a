"""Cross-attention that copies from the first step on, beside a decoder that is trained: fitted to what the decoder says.

`Attention.initialize_copying` ties weights to each other, which is enough where everything begins together. A trained stream is
another matter: it holds the token that was read in directions of its own, loudly, and a RETROfit with a few hundredths of the
tokens is over before cross-attention has found them (docs/how-to/retrofit.md). They can be had without a gradient. Canonical
correlations (Hotelling 1936) of the stream with the embeddings give the directions in which queries and keys meet; least
squares give the output that raises the logit of a token that was read; and a few forward passes say how sharply to look and
how loudly to speak: not at all, where that is best.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.data.loader import BatchSource, as_tensors
from retro.device import Placement, TensorBatch
from retro.model.attention import Attention
from retro.model.loss import token_losses
from retro.model.positions import DEFAULT_ROPE, frequencies
from retro.model.retro import Retro

log = logging.getLogger("retro")

_DECAY = 0.9
"""Of the taps: how much less a token counts that stands one further back."""
_TURN = 2.0
"""Radians. Features that RoPE turns further over a chunk cannot tell tokens whatever their distance."""
_SHARPNESS = (8.0, 16.0, 32.0)
"""Scores of a key that stands after the same tokens."""
_NATS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""By how much a token that alone is read becomes more likely."""
_TOKENS = 8192
_RIDGE = 1e-3


def can_be_fitted(model: Retro) -> bool:
    """Whether cross-attention is to copy and can look for what followed: its keys must hold the tokens before them."""
    settings = model.settings
    return settings.copying_init and bool(settings.retrieval.cca_layers) and settings.cross_smeared_tokens > 0


def start_copying(model: Retro, data: BatchSource, sequence_length: int, placement: Placement) -> None:
    """`fit_copying` to the first sequences of the training; on the training's device, from where the model comes back."""
    samples = range(max(2, _TOKENS // sequence_length))
    batch = placement.put(as_tensors(data.batch(samples, 0.0, data.neighbor_use(0))))
    if batch["neighbors"] is None:
        log.warning(
            "the first batch has no neighbors: cross-attention is not fitted, and begins as in training from scratch"
        )
        return
    fit_copying(model.to(placement.device), batch, placement)
    model.to("cpu")


@torch.no_grad()
def fit_copying(model: Retro, batch: TensorBatch, placement: Placement) -> None:
    """Set encoder and cross-attention, from the last layer to the first. The decoder stays as it is.

    Args:
        model: whole, with `copying_init`; its decoder is trained, its encoder and cross-attention are drawn.
        batch: sequences with neighbors, as for training; a few thousand tokens.
        placement: device of the model and the batch, and precision.
    """
    labels, inputs = batch["labels"], {name: value for name, value in batch.items() if name != "labels"}
    training = model.training
    model.eval()
    for name, parameter in model.encoder.named_parameters():
        if name.endswith((".o_proj.weight", ".down_proj.weight")) or name == "position_embedding.weight":
            parameter.zero_()  # neighbors are read as they stand
    crosses: dict[str, Any] = dict(model.cross.items())
    attentions: dict[int, Any] = {int(n): cross.block.attention for n, cross in crosses.items()}
    for attention in attentions.values():
        attention.o_proj.weight.zero_()
    loss = partial(_loss, model, inputs, labels, placement)
    streams, size = _streams(model, inputs, placement)
    without = loss()
    for layer, attention in reversed(attentions.items()):
        _look_for_the_same(model, attention, streams[str(layer)], inputs["tokens"])
        _say_what_is_read(model, attention, inputs["tokens"].unique(), size)
        sharpness, nats, found = _loudest_that_helps(attention, loss)
        log.info(
            "cross-attention of layer %d begins as one that copies: sharpness %g, %g nats; loss %.4f, without it %.4f",
            *(layer, sharpness, nats, found, without),
        )
    model.train(training)


def _loss(model: Retro, inputs: TensorBatch, labels: Tensor, placement: Placement) -> float:
    """Nats per token."""
    with placement.autocast():
        losses = token_losses(model.hidden(**inputs), model.output_weight, labels)
    return float(losses.sum() / (labels >= 0).sum())


def _streams(model: Retro, inputs: TensorBatch, placement: Placement) -> tuple[dict[str, Tensor], Tensor]:
    """What each cross-attention is asked with, [B·T, D] float32, and the size of the stream under the output layer."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, of: Any) -> Any:
        return of.register_forward_hook(lambda _, given, made: kept.update({name: given[0] if name == "" else made}))

    crosses: dict[str, Any] = dict(model.cross.items())
    hooks = [keep("", model.norm), *(keep(name, cross.norm) for name, cross in crosses.items())]
    with placement.autocast():
        model.hidden(**inputs)
    for hook in hooks:
        hook.remove()
    size = kept.pop("").float().square().mean(-1).sqrt().mean()
    return {name: stream.flatten(0, 1).float() for name, stream in kept.items()}, size


def _look_for_the_same(model: Retro, attention: Attention, stream: Tensor, tokens: Tensor) -> None:
    """Queries of the stream [N, D] meet keys that stand after the same tokens [B, T]; a match scores 1."""
    _look_back(attention)
    read, count = _encoded(model, tokens.flatten()), len(stream)  # [N, E]
    whiten_read, whiten_stream = _whitening(read), _whitening(stream)
    left, found, right = torch.linalg.svd(whiten_read @ (read.T @ stream / count) @ whiten_stream, full_matrices=False)
    features = _free_features(model, attention)[: len(found)]
    num = len(features)
    of_key = (left.T @ whiten_read)[:num]
    of_query = found[:num, None] * (right @ whiten_stream)[:num]
    for weight, rows in ((attention.k_proj.weight, of_key), (attention.q_proj.weight, of_query)):
        weight.zero_()
        weight.unflatten(0, (-1, attention.head_dim))[:, features] = rows
    q, k = attention.project_queries(stream), attention.project_keys_values(read)[0]
    scores = (q[:, 0] * k[:, 0]).sum(-1) * (attention.scale or attention.head_dim**-0.5)
    _sharpen(attention, 1 / float(scores.mean()))


def _look_back(attention: Attention) -> None:
    """Keys hold the tokens before them, queries as many: their own, and those before."""
    if attention.smeared_tokens == 1:
        attention.smear.weight.fill_(4)  # of a sigmoid
        return
    taps = _DECAY ** torch.arange(attention.smeared_tokens, device=attention.query_taps.weight.device)
    taps = taps / taps.norm()
    attention.query_taps.weight.copy_(taps.expand_as(attention.query_taps.weight))
    attention.key_taps.weight.copy_(F.pad(taps, (1, 0)).expand_as(attention.key_taps.weight))


def _free_features(model: Retro, attention: Attention) -> Tensor:
    """The features of a head whose products do not depend on how far query and key are apart."""
    head_dim, device = attention.head_dim, attention.q_proj.weight.device
    if hasattr(attention, "distance_proj"):
        attention.distance_proj.weight.zero_()
    if model.settings.retrieval_positions != "rope":
        return torch.arange(head_dim, device=device)
    slow = frequencies(head_dim // 2, DEFAULT_ROPE, device) * model.settings.chunk_length < _TURN
    slow[-1] = True  # narrow heads have none that is slow enough
    return slow.repeat(2).nonzero()[:, 0]


def _sharpen(attention: Attention, factor: float) -> None:
    """Multiply the scores."""
    where = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
    where.weight.mul_(factor)


def _say_what_is_read(model: Retro, attention: Attention, tokens: Tensor, size: Tensor) -> None:
    """The output raises the logit of a token [V] that alone is read by one nat, in a stream of some size."""
    rows = model.norm.weight * model.output_weight[tokens]
    rows = rows - rows.mean(0)  # [V, D]; what all logits have in common says nothing
    _, values = attention.project_keys_values(_encoded(model, tokens))
    values = values.repeat_interleave(attention.num_heads // values.shape[1], dim=1).flatten(1)  # [V, H·C]
    said = _least_squares(values, rows)
    nats = ((values @ said) * rows).sum(-1).mean() / size * (model.base_width / model.settings.d_model)
    attention.o_proj.weight.copy_(said.T / nats)


def _loudest_that_helps(attention: Attention, loss: Callable[[], float]) -> tuple[float, float, float]:
    """Set sharpness and loudness to the best of a few; the loss with them."""
    out = attention.o_proj.weight.clone()

    def tried(sharpness: float, nats: float) -> float:
        _sharpen(attention, sharpness)
        attention.o_proj.weight.copy_(out * nats)
        found = loss()
        _sharpen(attention, 1 / sharpness)
        return found

    sharpness = min(_SHARPNESS, key=lambda each: tried(each, 1.0))
    found, nats = min((tried(sharpness, each), each) for each in _NATS)
    _sharpen(attention, sharpness)
    attention.o_proj.weight.copy_(out * nats)
    return sharpness, nats, found


def _encoded(model: Retro, tokens: Tensor) -> Tensor:
    """What an encoder that adds nothing makes of tokens [N]: [N, E] float32."""
    table, encoder = model.embedding.weight, model.encoder
    return encoder.norm(encoder.project(F.rms_norm(table[tokens], table.shape[1:]))).float()


def _whitening(x: Tensor) -> Tensor:
    """The symmetric matrix that makes the second moments of x [N, D] those of independent features of size 1."""
    sizes, directions = torch.linalg.eigh(x.T @ x / len(x))
    return (directions * sizes.clamp(min=_RIDGE * float(sizes.max())) ** -0.5) @ directions.T


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """W [C, D] with x [N, C] W near y [N, D]."""
    moments = x.T @ x
    ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments), device=x.device)
    return torch.linalg.solve(moments + ridge, x.T @ y)
