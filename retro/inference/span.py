"""The tokens of a pass through a decoder's layers, and where they are in the cache. Letters of the shape comments as in
`decoder.py`."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retro.copying.rows import Row
from retro.inference.drafts import LONGEST_DRAFT


class Span(NamedTuple):
    """Tokens of one pass and their positions."""

    rows: list[Row]
    tokens: Tensor  # [N, n]
    places: np.ndarray  # [N], slots of the rows
    at: Tensor  # the same, on the device
    slots: slice | Tensor  # the same slots; a slice if they follow each other, which avoids a copy
    starts: np.ndarray  # [N], position of each row's first token
    positions: Tensor  # [N, n]
    last: Tensor  # [N], index of each row's last token; tokens after it are padding, and later passes overwrite them
    begins: Tensor  # bool [N, 1, 1, 1], True for rows that begin with this pass
    columns: Tensor  # [N, n], columns of the tokens in the cache
    stop: int  # number of keys to read
    num_neighbors: int  # the largest K of the rows

    def before(self, stored: Tensor, layer: int, new: Tensor) -> Tensor | None:
        """The W keys or queries [N, W, H, C] before the new ones [N, n, H, C] of a layer; None if W = 0.

        Those before the beginning of a row are zeros. Stores the last ones in `stored` [B, L, W + draft, H, C].
        """
        if not (width := stored.shape[2]):
            return None
        before = stored[self.at, layer].to(new.dtype).masked_fill(self.begins, 0)
        rows, offsets = torch.arange(len(new), device=new.device)[:, None], torch.arange(width, device=new.device)
        # Those up to the last token of each row, not the padding after it. Since a draft can be removed, some earlier
        # ones too.
        last = torch.cat((before, new), dim=1)[rows, self.last[:, None] + 1 + offsets]
        stored[self.at, layer] = last.to(stored.dtype)
        return before[:, LONGEST_DRAFT:]
