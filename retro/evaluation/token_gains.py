"""What retrieval brings to each token of a passage, and the neighbors that tokens were copied from.

a window of chunks ─┬─ retrieval OFF ─ log p of every token ──────────────────────────────┬─ gain
                    └─ retrieval ON ── log p, share copied from neighbors, which of them ─┘
"""

from dataclasses import dataclass

import numpy as np
import torch

from indexing.store.datastore import Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.batch.inputs import Inputs
from retro.copying.datastore import DATASTORE
from retro.copying.model import CopyingModel
from retro.copying.neighbors import NEIGHBORS
from retro.data.batches import read_sequences
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse, Queries, choose_neighbors
from retro.device import Placement
from retro.evaluation.bits_per_byte import TokenScores
from retro.evaluation.sets import EvaluationSet
from retro.inference.scoring import origins_of


@dataclass(frozen=True)
class Passage:
    """A held-out chunk with its context, scored token by token. All tokens of a chunk read the neighbors of the chunk
    before it.

    Attributes:
        chunk: its id in the split.
        before: int64 [c], the tokens before it that the model read.
        tokens: int64 [t], its tokens.
        off, on: float64 [t], log2 of their probabilities, retrieval OFF and ON.
        copied: float32 [t], share of the probability of each token that is copied from neighbors, 0 to 1.
        neighbors: int64 [t], number of the neighbor with the longest match that votes for the token; -1 = none.
        positions: int64 [t], the token of this neighbor that votes; -1 = none.
        from_datastore: float32 [t], share of the probability that is copied from the whole datastore, 0 to 1.
        neighbor_ids: int64 [k], ids in the retrieval set; -1 = none.
        neighbor_tokens: the tokens of each neighbor and its continuation, without padding: k of int64 [r].
    """

    chunk: int
    before: np.ndarray
    tokens: np.ndarray
    off: np.ndarray
    on: np.ndarray
    copied: np.ndarray
    neighbors: np.ndarray
    positions: np.ndarray
    from_datastore: np.ndarray
    neighbor_ids: np.ndarray
    neighbor_tokens: list[np.ndarray]

    @property
    def gains(self) -> np.ndarray:
        """Bits that retrieval saves for each token: float64 [t]; negative = it costs bits."""
        return self.on - self.off


def chunks_by_gain(off: TokenScores, on: TokenScores, split: Split) -> np.ndarray:
    """Order chunks by the bits that retrieval saves for them, among chunks that are scored whole and read neighbors.

    Args:
        off: scores of tokens with retrieval OFF.
        on: scores of the same tokens, retrieval ON.
        split: the split of the chunks.

    Returns:
        their ids, the smallest gain first: int64 [n].

    Raises:
        InputError: no document has two full chunks.
    """
    rows = np.flatnonzero(off.scored.all(1) & (off.chunks > split.documents_of(off.chunks)[1]))
    if not len(rows):
        raise InputError(
            f"{split.folder}: no {split.name} document has two full chunks, so none of them read neighbors."
        )
    gains = (off.chunk_nats - on.chunk_nats)[rows]
    return off.chunks[rows[np.argsort(gains, kind="stable")]]


@torch.inference_mode()
def score_passage(
    model: CopyingModel, evaluation_set: EvaluationSet, chunk: int, placement: Placement, *, k: int, window: int
) -> Passage:
    """Score the tokens of a held-out chunk that is not the first of its document.

    Args:
        model: in evaluation mode; without a copy head nothing is copied.
        evaluation_set: the held-out documents.
        chunk: id of the chunk.
        placement: device and precision.
        k: neighbors of each chunk.
        window: chunks that the model reads at most, this one included.
    """
    split, m = evaluation_set.split, evaluation_set.split.chunk_length
    retrieval = RetrievalSet.of(evaluation_set.datastore)
    first = max(int(split.documents_of(np.array([chunk]))[1][0]), chunk + 1 - window)
    use = NeighborUse(k, votes=bool(model.settings.copy_head.datastore))
    batch = read_sequences(split, retrieval, [(first, chunk + 1)], chunk + 1 - first, use)
    inputs = placement.put(as_tensors(batch))
    with placement.autocast():
        off = model.token_losses(inputs.off())
        on, trust, vocabulary = model.scored(inputs)
        origins = origins_of(model, vocabulary, on, inputs, trust)
    length = int(batch.lengths[0, -1])
    start = (chunk - first) * m
    predicted = slice(start - 1, start + length - 1)  # where the chunk's tokens are predicted
    read, lengths = batch.neighbors[0, -2], batch.neighbor_lengths[0, -2]
    copied, from_datastore, numbers, positions = (
        table[0, predicted].cpu().numpy()
        for table in (origins.of(NEIGHBORS), origins.of(DATASTORE), origins.neighbors, origins.positions)
    )
    return Passage(
        chunk=chunk,
        before=batch.tokens[0, :start],
        tokens=batch.tokens[0, start : start + length],
        off=-off[0, predicted].double().cpu().numpy() / np.log(2),
        on=-on[0, predicted].double().cpu().numpy() / np.log(2),
        copied=copied,
        neighbors=numbers,
        positions=positions,
        from_datastore=from_datastore,
        neighbor_ids=choose_neighbors(split, retrieval, _query(batch, chunk - 1, m), NeighborUse(k))[0],
        neighbor_tokens=[tokens[:count] for tokens, count in zip(read, lengths, strict=True)],
    )


def _query(batch: Inputs[np.ndarray], chunk: int, m: int) -> Queries:
    """The chunk before the last one of a batch of one window, as a query of a held-out split."""
    return Queries(
        ids=np.array([chunk]),
        excluded=np.zeros((1, 2), dtype=np.int64),
        tokens=batch.tokens.reshape(-1, m)[-2:-1],
        lengths=batch.lengths[0, -2:-1],
        followed=np.array([True]),
    )
