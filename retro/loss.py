"""Cross-entropy of the next token, in float32."""

import torch.nn.functional as F
from torch import Tensor

from retro.batches import IGNORED_LABEL


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each label under its logits, in nats: float32 [B, T], 0 where the label is ignored.

    Args:
        logits: [B, T, V]. Log-probabilities are taken in float32, whatever their type.
        labels: int64 [B, T], the token that follows each; `IGNORED_LABEL` where none counts.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.view(labels.shape)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of `token_losses` over the labels that count; 0, not NaN, where none does."""
    return token_losses(logits, labels).sum() / (labels != IGNORED_LABEL).sum().clamp(min=1)
