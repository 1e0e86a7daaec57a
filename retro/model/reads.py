"""What attentions read besides their input: values without parameters, which `layer_pass.py` and the cache of
generation make.

    Reads                       of self-attention, and of both attentions of the encoder
        CachedNeighbors         neighbors for all layers of a decoder that reads them itself; `of_layer` gives ReadNeighbors
        PackedNeighbors         the same, in the stream of the text
    EncodedNeighbors            of cross-attention over whole sequences
    WindowNeighbors             of cross-attention over some tokens of one window

Letters of the shape comments as in `retro.py`; in addition N = B'·U·K neighbors of a batch, S = B·T + N·R tokens of its
stream, W = B'·U windows, L layers, G heads of keys and values.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from retro.copying.matches import Windows
from retro.model.kernels import Bounds
from retro.model.positions import Positions, RopePositions

# --- neighbors that the decoder reads with its own self-attention ---------------------------------------------------


class ReadNeighbors(NamedTuple):
    """Neighbors that the queries of a layer read in addition to the text.

    Attributes:
        keys: finished keys, [W, K·R, G, C].
        values: their values, [W, K·R, G, C].
        readable: bool [W, K·R].
        rotation: of the queries, [2, T, 1, C/2] or [2, B, T, 1, C/2]: positions in their documents plus R.
        windows: of the queries; the queries of window n read neighbors n. None = the queries of row n do.
    """

    keys: Tensor
    values: Tensor
    readable: Tensor
    rotation: Tensor
    windows: Windows | None = None


class CachedNeighbors(NamedTuple):
    """Neighbors with keys and values from a cache: only the text is in the stream.

    Attributes:
        keys: of all layers from `Retro.encode_neighbors`, [W, L, G, K·R, C].
        values: the same shape.
        readable: as in `ReadNeighbors`.
        rotation: as in `ReadNeighbors`.
        windows: as in `ReadNeighbors`.
    """

    keys: Tensor
    values: Tensor
    readable: Tensor
    rotation: Tensor
    windows: Windows | None = None

    def of_layer(self, index: int) -> ReadNeighbors:
        """What the attention of a layer reads."""
        # A cache has heads first, so that one head's keys follow each other; an attention has tokens first, as its
        # projections.
        keys, values = (part[:, index].transpose(1, 2) for part in (self.keys, self.values))
        return ReadNeighbors(keys, values, self.readable, self.rotation, self.windows)


class PackedNeighbors(NamedTuple):
    """The neighbors in the stream of a batch, after its text.

    Attributes:
        shape: B, T and R.
        positions: of the tokens of a neighbor in its own attention.
        mask: of its own attention, bool [R, R]; None = all preceding tokens.
        readable: see `reader.readable_tokens`, bool [W, K·R].
        rotation: as in `ReadNeighbors`.
        windows: as in `ReadNeighbors`.
    """

    shape: tuple[int, int, int]
    positions: RopePositions
    mask: Tensor | None
    readable: Tensor
    rotation: Tensor
    windows: Windows

    def of_layer(self, index: int) -> "PackedNeighbors":
        """What the attention of a layer reads: it computes keys and values itself."""
        return self

    def pack(self, text: Tensor, neighbors: Tensor) -> Tensor:
        """The stream [S, ...] of a text [B, T, ...] and of neighbors [N, R, ...]."""
        # Rows and neighbors have different lengths, so both become one long row of tokens.
        return torch.cat((text.flatten(0, 1), neighbors.flatten(0, 1)))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The text [B, T, ...] and the neighbors [N, R, ...] of a stream [S, ...]."""
        num_rows, num_tokens, r = self.shape
        text, neighbors = x.tensor_split((num_rows * num_tokens,))
        return text.unflatten(0, (num_rows, num_tokens)), neighbors.unflatten(0, (-1, r))


# --- self-attention -------------------------------------------------------------------------------------------------


class LayerCache(Protocol):
    """What an attention keeps of tokens that it read before. In training there is none; `inference/cached_layers.py`
    has them.

    Attributes:
        distance_keys: of `Attention.attend`; None = they are computed.
    """

    distance_keys: Tensor | None

    def before(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The W - 1 projected queries and W keys that precede new ones [N, Q, H, C] and [N, S, G, C]. Stores the new
        ones.

        Only smeared tokens need them; W is their number.
        """

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new finished keys and values [N, S, G, C]; return all that the queries can read."""


class Reads(NamedTuple):
    """What an `Attention` reads besides its input x [N, Q, D].

    Attributes:
        positions: from `positions_of`, for Q queries and S keys.
        source: input of keys and values [N, S, E]; None = x (self-attention).
        mask: bool, broadcastable to [N, 1, Q, S], True where the query may look. Every query needs at least one visible
            key: a softmax over no keys is NaN. In self-attention also `kernels.Bounds`.
        causal: hide later keys. A mask must hide them too; without a mask, faster kernels are used.
        starts: bool [1 or N, S], True for the first tokens of documents: smearing does not cross them. None = only the
            first token. Also applies to queries in self-attention.
        cache: earlier tokens of x, which the queries read too; the S keys of positions and mask are then those of the
            cache.
        neighbors: neighbors that `reader.ReadingAttention` reads too.
    """

    positions: Positions
    source: Tensor | None = None
    mask: Tensor | Bounds | None = None
    causal: bool = False
    starts: Tensor | None = None
    cache: LayerCache | None = None
    neighbors: PackedNeighbors | ReadNeighbors | None = None


# --- chunked cross-attention ----------------------------------------------------------------------------------------


class EncodedNeighbors(NamedTuple):
    """The neighbors of all complete chunks of whole sequences.

    Attributes:
        positions: of a window's m tokens from m - 1 on, and K times those of a neighbor from 0 on.
        encoded: output of the encoder, [B', U, K, R, E].
        mask: bool, which of their tokens are real, [B', U, K, R]; None = all.
    """

    positions: Positions
    encoded: Tensor
    mask: Tensor | None


class WindowNeighbors(NamedTuple):
    """The neighbors that the queries of each row read; the tokens of a row are some of one window.

    Attributes:
        positions: of these tokens and of the neighbors.
        keys: finished keys [N, K·R, G, C].
        values: their values, the same shape.
        mask: bool [N, K, R], which of their tokens are real; None = all.
        distance_keys: as in `LayerCache`.
    """

    positions: Positions
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    distance_keys: Tensor | None = None
