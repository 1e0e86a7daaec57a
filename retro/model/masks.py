"""Which token may see which: nothing of other documents, and of neighbors only what is there.

Masks are True where one may look. Letters of the shape comments as in `retro.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """Which token may see which: none later, none of another document. [B, ceil(T/m)] to bool [B, 1, T, T]."""
    document = documents.repeat_interleave(chunk_length, dim=1)[:, :num_tokens]  # [B, T]
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def visible(query: Tensor, key: Tensor, window: int = 0) -> Tensor:
    """Which key a query may see: none later, and of a window of tokens, its own the last of them, only these (0 = all).

    Positions [..., T] and [S] to bool [..., T, S].
    """
    apart = query[..., None] - key
    return (apart >= 0) & (apart < window) if window else apart >= 0


def document_starts(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """Which tokens are the first of a document in their row: [B, ceil(T/m)] to bool [B, T]."""
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # [B, ceil(T/m)]
    begins = torch.arange(num_tokens, device=documents.device) % chunk_length == 0
    return first.repeat_interleave(chunk_length, dim=1)[:, :num_tokens] & begins


def document_positions(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """How many tokens of its document stand before each token in its row: [B, ceil(T/m)] to int64 [B, T]."""
    starts = document_starts(documents, chunk_length, num_tokens)
    at = torch.arange(num_tokens, device=documents.device)
    return at - (starts * at).cummax(dim=1).values


def neighbor_mask(neighbors: Tensor, lengths: Tensor | None, documents: Tensor | None) -> Tensor:
    """Which tokens of the neighbors [B, U, K, R] may be read: bool [B, U, K, R].

    Real ones, unless the next chunk begins another document: most of the window belongs to that one. The window's
    first token, the last of chunk u, then goes without, but it has nothing left to predict in its own document.
    """
    mask = torch.ones_like(neighbors, dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(neighbors.shape[3], device=neighbors.device) < lengths[..., None]
    if documents is not None:
        goes_on = documents[:, 1:] == documents[:, :-1]
        # The last complete chunk of a sequence may have no next one.
        goes_on = F.pad(goes_on, (0, neighbors.shape[1] - goes_on.shape[1]), value=True)
        mask = mask & goes_on[:, :, None, None]
    return mask


def some_key(mask: Tensor) -> Tensor:
    """The mask [..., S], with everything visible where nothing was, so that softmax and gradients stay finite.

    What is read there means nothing, and the caller must drop it.
    """
    return mask | ~mask.any(-1, keepdim=True)
