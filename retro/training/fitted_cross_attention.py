"""Fit cross-attention to a trained decoder, so that it copies tokens of neighbors from the first step on.

`Attention.initialize_copying` ties weights to each other, which is enough if all weights start random. The residual stream of a
trained decoder represents the current token in its own directions and with large norms, and a RETROfit with a few percent of the
tokens ends before cross-attention has learned them (docs/how-to/retrofit.md). Here they are computed without gradients. Canonical
correlations (Hotelling 1936) of the stream with the embeddings give the projections of queries and keys. Least squares give the
output that raises the logit of a token that was read. A few forward passes choose sharpness and strength; the strength can be 0.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.device import Placement
from retro.model.attention import Attention
from retro.model.inputs import Inputs
from retro.model.positions import DEFAULT_ROPE, frequencies
from retro.model.retro import Retro

log = logging.getLogger("retro")

_DECAY = 0.9
"""Factor of a tap for each token further back."""
_TURN = 2.0
"""Radians. Features that RoPE rotates further over a chunk depend too much on the distance to match tokens."""
_SHARPNESS = (8.0, 16.0, 32.0)
"""Candidates for the score of a key that follows the same tokens as the query."""
_NATS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Candidates for the increase of a token's logit if it alone is read."""
_RIDGE = 1e-3


def can_be_fitted(model: Retro) -> bool:
    """True with `copying_init` if the keys of cross-attention contain the preceding tokens, which the fit matches."""
    settings = model.settings
    return settings.copying_init and bool(settings.retrieval.cca_layers) and settings.cross_smeared_tokens > 0


@torch.no_grad()
def fit_copying(model: Retro, batch: Inputs, placement: Placement) -> None:
    """Set the weights of encoder and cross-attention, from the last layer to the first. The decoder does not change.

    Args:
        model: a whole model with `copying_init`, a trained decoder, and a random encoder and cross-attention.
        batch: sequences with neighbors, as for training; a few thousand tokens.
        placement: device of the model and the batch, and precision.
    """
    training = model.training
    model.eval()
    for name, parameter in model.encoder.named_parameters():
        if name.endswith((".o_proj.weight", ".down_proj.weight")) or name == "position_embedding.weight":
            parameter.zero_()  # the encoder returns the embeddings of the neighbors
    crosses: dict[str, Any] = dict(model.cross.items())
    attentions: dict[int, Any] = {int(n): cross.block.attention for n, cross in crosses.items()}
    for attention in attentions.values():
        attention.o_proj.weight.zero_()
    loss = partial(_loss, model, batch, placement)
    streams, size = _streams(model, batch, placement)
    without = loss()
    for layer, attention in reversed(attentions.items()):
        _match_tokens(model, attention, streams[str(layer)], batch.tokens)
        _set_output(model, attention, batch.tokens.unique(), size)
        sharpness, nats, fitted = _choose_strength(attention, loss)
        log.info(
            "cross-attention of layer %d is fitted to copy: sharpness %g, %g nats; loss %.4f, without it %.4f",
            *(layer, sharpness, nats, fitted, without),
        )
    model.train(training)


def _loss(model: Retro, batch: Inputs, placement: Placement) -> float:
    """Nats per token."""
    with placement.autocast():
        losses = model.token_losses(batch)
    return float(losses.sum() / (batch.labels >= 0).sum())


def _streams(model: Retro, batch: Inputs, placement: Placement) -> tuple[dict[str, Tensor], Tensor]:
    """The input of each cross-attention, [B·T, D] float32, and the RMS of the input of the final norm."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, of: Any) -> Any:
        return of.register_forward_hook(
            lambda _, inputs, output: kept.update({name: inputs[0] if name == "" else output})
        )

    crosses: dict[str, Any] = dict(model.cross.items())
    hooks = [keep("", model.norm), *(keep(name, cross.norm) for name, cross in crosses.items())]
    with placement.autocast():
        model.hidden(batch)
    for hook in hooks:
        hook.remove()
    size = kept.pop("").float().square().mean(-1).sqrt().mean()
    return {name: stream.flatten(0, 1).float() for name, stream in kept.items()}, size


def _match_tokens(model: Retro, attention: Attention, stream: Tensor, tokens: Tensor) -> None:
    """Set the projections of queries and keys so that stream [N, D] and keys after the same tokens [B, T] match with score 1."""
    _set_taps(attention)
    read, count = _encoded(model, tokens.flatten()), len(stream)  # [N, E]
    whiten_read, whiten_stream = _whitening(read), _whitening(stream)
    left, singular_values, right = torch.linalg.svd(
        whiten_read @ (read.T @ stream / count) @ whiten_stream, full_matrices=False
    )
    features = _free_features(model, attention)[: len(singular_values)]
    num = len(features)
    of_key = (left.T @ whiten_read)[:num]
    of_query = singular_values[:num, None] * (right @ whiten_stream)[:num]
    for weight, rows in ((attention.k_proj.weight, of_key), (attention.q_proj.weight, of_query)):
        weight.zero_()
        weight.unflatten(0, (-1, attention.head_dim))[:, features] = rows
    q, k = attention.project_queries(stream), attention.project_keys_values(read)[0]
    scores = (q[:, 0] * k[:, 0]).sum(-1) * (attention.scale or attention.head_dim**-0.5)
    _sharpen(attention, 1 / float(scores.mean()))


def _set_taps(attention: Attention) -> None:
    """Set the taps: keys contain the tokens before them, queries their own and as many before in total."""
    if attention.smeared_tokens == 1:
        attention.smear.weight.fill_(4)  # of a sigmoid
        return
    taps = _DECAY ** torch.arange(attention.smeared_tokens, device=attention.query_taps.weight.device)
    taps = taps / taps.norm()
    attention.query_taps.weight.copy_(taps.expand_as(attention.query_taps.weight))
    attention.key_taps.weight.copy_(F.pad(taps, (1, 0)).expand_as(attention.key_taps.weight))


def _free_features(model: Retro, attention: Attention) -> Tensor:
    """The features of a head whose products depend little on the distance between query and key."""
    head_dim, device = attention.head_dim, attention.q_proj.weight.device
    if hasattr(attention, "distance_proj"):
        attention.distance_proj.weight.zero_()
    if model.settings.retrieval_positions != "rope":
        return torch.arange(head_dim, device=device)
    slow = frequencies(head_dim // 2, DEFAULT_ROPE, device) * model.settings.chunk_length < _TURN
    slow[-1] = True  # narrow heads may have no feature that is slow enough
    return slow.repeat(2).nonzero()[:, 0]


def _sharpen(attention: Attention, factor: float) -> None:
    """Multiply the scores."""
    where = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
    where.weight.mul_(factor)


def _set_output(model: Retro, attention: Attention, tokens: Tensor, size: Tensor) -> None:
    """Set the output so that it raises the logit of a token [V] that alone is read by one nat, in a stream of RMS `size`."""
    rows = model.norm.weight * model.output_weight[tokens]
    rows = rows - rows.mean(0)  # [V, D]; the softmax ignores what all logits have in common
    _, values = attention.project_keys_values(_encoded(model, tokens))
    values = values.repeat_interleave(attention.num_heads // values.shape[1], dim=1).flatten(1)  # [V, H·C]
    output = _least_squares(values, rows)
    nats = ((values @ output) * rows).sum(-1).mean() / size * (model.base_width / model.settings.d_model)
    attention.o_proj.weight.copy_(output.T / nats)


def _choose_strength(attention: Attention, loss: Callable[[], float]) -> tuple[float, float, float]:
    """Set sharpness and strength to the best candidates, and return them and the loss."""
    out = attention.o_proj.weight.clone()

    def tried(sharpness: float, nats: float) -> float:
        _sharpen(attention, sharpness)
        attention.o_proj.weight.copy_(out * nats)
        nats_per_token = loss()
        _sharpen(attention, 1 / sharpness)
        return nats_per_token

    sharpness = min(_SHARPNESS, key=lambda candidate: tried(candidate, 1.0))
    lowest, nats = min((tried(sharpness, candidate), candidate) for candidate in _NATS)
    _sharpen(attention, sharpness)
    attention.o_proj.weight.copy_(out * nats)
    return sharpness, nats, lowest


def _encoded(model: Retro, tokens: Tensor) -> Tensor:
    """The encoder's output for tokens [N] if its layers add 0: [N, E] float32."""
    table, encoder = model.embedding.weight, model.encoder
    return encoder.norm(encoder.project(F.rms_norm(table[tokens], table.shape[1:]))).float()


def _whitening(x: Tensor) -> Tensor:
    """The symmetric matrix that makes the second moments of x [N, D] the identity."""
    sizes, directions = torch.linalg.eigh(x.T @ x / len(x))
    return (directions * sizes.clamp(min=_RIDGE * float(sizes.max())) ** -0.5) @ directions.T


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """W [C, D] that minimizes |x W - y|² for x [N, C] and y [N, D], with a small ridge."""
    moments = x.T @ x
    ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments), device=x.device)
    return torch.linalg.solve(moments + ridge, x.T @ y)
