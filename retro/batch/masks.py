"""Masks of attention: documents, sliding windows and padding of neighbors.

Masks are True where a query may attend. Letters of the shape comments as in `retro.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """Causal mask within documents: [B, ceil(T/m)] to bool [B, 1, T, T]."""
    document = documents.repeat_interleave(chunk_length, dim=1)[:, :num_tokens]  # [B, T]
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def visible(query: Tensor, key: Tensor, window: int = 0) -> Tensor:
    """Causal mask, restricted to the last `window` tokens including the query's own (0 = all).

    Positions [..., T] and [S] to bool [..., T, S].
    """
    apart = query[..., None] - key
    return (apart >= 0) & (apart < window) if window else apart >= 0


def document_starts(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """True for the first token of each document in its row: [B, ceil(T/m)] to bool [B, T]."""
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # [B, ceil(T/m)]
    begins = torch.arange(num_tokens, device=documents.device) % chunk_length == 0
    return first.repeat_interleave(chunk_length, dim=1)[:, :num_tokens] & begins


def document_positions(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """Position of each token in its document, within its row: [B, ceil(T/m)] to int64 [B, T]."""
    starts = document_starts(documents, chunk_length, num_tokens)
    at = torch.arange(num_tokens, device=documents.device)
    return at - (starts * at).cummax(dim=1).values


def neighbor_mask(neighbors: Tensor, lengths: Tensor | None, documents: Tensor | None) -> Tensor:
    """True for tokens of the neighbors [B', U, K, R] that may be read: bool [B', U, K, R].

    These are real tokens, unless the next chunk begins another document, which most of the window then belongs to. The
    first token of that window, the last of chunk u, reads no neighbors, but its document has no next token to predict.
    """
    mask = torch.ones_like(neighbors, dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(neighbors.shape[3], device=neighbors.device) < lengths[..., None]
    if documents is not None:
        documents = documents[: len(neighbors)]
        continues = documents[:, 1:] == documents[:, :-1]
        # The last complete chunk of a sequence may have no next one.
        continues = F.pad(continues, (0, neighbors.shape[1] - continues.shape[1]), value=True)
        mask = mask & continues[:, :, None, None]
    return mask


def some_key(mask: Tensor) -> Tensor:
    """The mask [..., S], with all keys visible in rows that had none, so softmax and gradients stay finite.

    The caller must discard the output of such rows.
    """
    return mask | ~mask.any(-1, keepdim=True)
