"""Scores of positions by content: where copying can begin although no token matches, such as the answer of a question.

    tokens of a neighbor ─┬─ embedded ────────────────────────┬─ mixed with tokens around ─ keys ─┬─ scores of positions
    tokens of chunk u ────┴─ which ones equal a token of u ───┘                                   │
    activations ─ queries ────────────────────────────────────────────────────────────────────────┘

Tokens that a neighbor shares with its querying chunk show which of its sentences are about the same. A small model learns to read
answers from them, and hardly from embeddings alone (Chen et al. 2017, arXiv 1704.00051, section 3.2: exact match as a feature).
Queries start at zero, so the scores are 0 until they are trained. Not in the paper of RETRO.

Letters of the shape comments as in `copy_head.py`; C is the width of the keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_AROUND = 5
"""Tokens that a key mixes: its own, and as many before as after."""
_WINDOWS = (9, 33, 129)
"""Lengths of windows around a position. Shared tokens are counted in each: about a phrase, a sentence, a passage."""
_WEIGHTS = 4
"""Weights of a shared token, each learned from its embedding: rare tokens say more than frequent ones."""


class Content(nn.Module):
    """Keys of positions, and queries."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.token = nn.Linear(d_model, width, bias=False)
        self.shared_token = nn.Linear(d_model, width, bias=False)
        self.weights = nn.Linear(d_model, _WEIGHTS)
        self.counts = nn.Linear(_WEIGHTS * len(_WINDOWS), width)
        self.around = nn.ModuleList(nn.Linear(_AROUND * width, width) for _ in range(2))
        self.key = nn.Linear(width, width, bias=False)
        self.query = nn.Parameter(torch.zeros(width, d_model))
        self.gate = nn.Parameter(torch.zeros(width))

    @staticmethod
    def flops_per_position(d_model: int, width: int) -> int:
        """FLOPs of the matrix products of a key."""
        counts = _WEIGHTS * len(_WINDOWS)
        return 2 * (d_model * (2 * width + _WEIGHTS) + width * (counts + 2 * _AROUND * width + width))

    @torch.no_grad()
    def initialize(self) -> None:
        """Set queries and gate to zero; `Retro.initialize` draws the matrices."""
        self.query.zero_()
        self.gate.zero_()

    def keys(self, neighbors: Tensor, real: Tensor, chunks: Tensor, table: Tensor) -> Tensor:
        """Keys of the positions of neighbors, float32 [N, K·R, C].

        Args:
            neighbors: tokens, int64 [N, K, R].
            real: which of them may be read, bool [N, K, R].
            chunks: tokens of the querying chunks, int64 [N, m].
            table: embeddings [V, D].
        """
        shared = real & (neighbors[..., None] == chunks[:, None, None]).any(-1)
        e = F.rms_norm(F.embedding(neighbors, table), table.shape[1:]).flatten(0, 1)  # [N·K, R, D]
        is_real, is_shared = (mask.flatten(0, 1)[..., None].float() for mask in (real, shared))
        x = self.token(e) + is_shared * self.shared_token(e) + self.counts(_counts(self.weights(e), is_shared))
        for mix in self.around:
            windows = F.pad(x * is_real, (0, 0, _AROUND // 2, _AROUND // 2)).unfold(1, _AROUND, 1)
            x = x + F.gelu(mix(windows.flatten(2)))  # [N·K, R, C·5] to [N·K, R, C]
        keys = self.key(F.rms_norm(x, x.shape[-1:])).float()
        return keys.unflatten(0, neighbors.shape[:2]).flatten(1, 2)

    def scores(self, hidden: Tensor, keys: Tensor) -> Tensor:
        """Scores of positions, float32 [N, Q, S], for activations [N, Q, D] and keys [N, S, C]."""
        return F.linear(hidden, self.query) @ keys.transpose(1, 2) * keys.shape[2] ** -0.5


def _counts(weights: Tensor, is_shared: Tensor) -> Tensor:
    """Log of the weights [N, R, 4] of shared tokens, summed over windows around each position: [N, R, 4 · windows]."""
    shared = (F.softplus(weights) * is_shared).transpose(1, 2)
    sums = [size * F.avg_pool1d(shared, size, stride=1, padding=size // 2) for size in _WINDOWS]
    return torch.cat(sums, 1).log1p().transpose(1, 2)
