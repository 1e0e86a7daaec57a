"""Keys and values of neighbors that the decoder has read lately (`RetrievalSettings.reader` = decoder).

A neighbor is encoded alone, so its keys and values depend on its tokens only. Chunks that retrieve it again, in this
text or in another request, find them here. Entries are kept by tokens, not by chunk id: equal text has equal keys and
values, whatever datastore it is from. Letters of the shape comments as in `model/reader.py`.
"""

import threading
from collections import OrderedDict

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from retro.model.retro import Retro

_Key = tuple[int, bytes]


class NeighborCache:
    """Encodes neighbors, and keeps the results up to a number of bytes; those that were not read for longest leave
    first.

    Threads can share it.

    Attributes:
        hits: number of neighbors that were found.
        misses: number of neighbors that were encoded.
        bytes: size of the entries.
    """

    def __init__(self, model: Retro, max_bytes: int) -> None:
        """Create an empty cache; with `max_bytes` = 0 it keeps nothing."""
        self.hits = self.misses = self.bytes = 0
        self._model, self._max_bytes = model, max_bytes
        self._entries: OrderedDict[_Key, Tensor] = OrderedDict()  # keys and values [2, L, G, R, C]
        self._lock = threading.Lock()

    def encode(self, neighbors: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `Retro.encode_neighbors`: tokens [N, K, R] with lengths [N, K] to keys and values [N, L, G, K·R, C]."""
        rows, k = neighbors.reshape(-1, neighbors.shape[2]), neighbors.shape[1]
        keys = [(len(row), row[:length].tobytes()) for row, length in zip(rows, lengths.ravel(), strict=True)]
        first = {key: index for index, key in reversed([*enumerate(keys)])}
        with self._lock:
            entries = {key: self._entries[key] for key in first if key in self._entries}
            for key in entries:
                self._entries.move_to_end(key)
            missing = [key for key in first if key not in entries]
            self.hits, self.misses = self.hits + len(keys) - len(missing), self.misses + len(missing)
        if missing:
            tokens = torch.from_numpy(rows[[first[key] for key in missing]]).to(self._model.embedding.weight.device)
            encoded = torch.stack(self._model.encode_neighbors(tokens[:, None]), dim=1)  # [missing, 2, L, G, R, C]
            new = dict(zip(missing, (entry.clone() for entry in encoded), strict=True))
            self._keep(new)
            entries |= new
        both = rearrange([entries[key] for key in keys], "(n k) two l g r c -> two n l g (k r) c", k=k)
        return both[0], both[1]

    def _keep(self, new: dict[_Key, Tensor]) -> None:
        with self._lock:
            for key, entry in new.items():
                self.bytes += 0 if key in self._entries else entry.nbytes
                self._entries[key] = entry
            while self.bytes > self._max_bytes:
                _, entry = self._entries.popitem(last=False)
                self.bytes -= entry.nbytes
