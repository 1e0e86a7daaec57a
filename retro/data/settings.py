"""Settings of training data: datastores, sequences, neighbors."""

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from indexing.store.errors import InputError
from indexing.store.ranged_reads import Reading
from indexing.store.settings import Fraction, settings
from retro.data.neighbor_choice import NeighborSource, NeighborUse


@settings
class DataSettings:
    """Datastores of a run, and how they are read."""

    datastores: tuple[Path, ...] = ()
    """Datastores to mix; empty = `datastore`. They must share one tokenizer."""
    weights: tuple[PositiveFloat, ...] = ()
    """Fraction of the sequences from each datastore; empty = in proportion to their numbers of chunks."""
    sequence_length: PositiveInt = 512
    """Tokens of a training sequence (n in the paper, 2048): a multiple of the chunk length."""
    k: NonNegativeInt = 2
    """Neighbors that each chunk reads in training (paper: 2)."""
    neighbor_source: NeighborSource = "nearest"
    """`nearest`: the stored neighbors. `random`: a control, chunks drawn uniformly from outside the sequence's
    documents, different ones in each epoch."""
    retrieval_dropout: Fraction = 0.1
    """Fraction of the sequences trained without neighbors, so that the model stays good with retrieval OFF. A run that
    trains retrieval only takes 0."""
    max_overlap: Fraction = 1.0
    """Skip neighbors whose longest run of tokens in common with the chunk, or with the next chunk, is more than this
    fraction of it. The next stored neighbors replace them. 1 = skip none. Stricter than `neighbors.max_overlap`, which
    is applied when neighbors are stored and compares only the chunk itself. The datastore has no votes after a match
    that is longer than this fraction of a chunk. It holds in training and in evaluations of held-out documents.
    Scoring, generation, question answering and lm-eval search neighbors and votes for new texts, so only
    `neighbors.max_overlap` limits them."""
    seed: int = 0
    """Seed of the order of sequences, of random neighbors, and of the draws for `data.retrieval_dropout`."""
    reading: Reading = "mmap"
    """Access to files; batches do not depend on it. `mmap` maps files into memory, and fetches those of a URL to the
    local cache first. `pread` requests all bytes of a batch at once: for network file systems and datastores larger
    than memory; from a URL by range requests."""
    materialized: bool = False
    """Read the copies of neighbors that the stage `materialize` has written next to each chunk; others from their own
    place."""

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.datastores):
            raise InputError(
                f"data.weights has {len(self.weights)} numbers for {len(self.datastores)} data.datastores: give one for each."
            )

    @property
    def neighbor_use(self) -> NeighborUse:
        """How the neighbors of each chunk are chosen with these settings."""
        return NeighborUse(self.k, self.neighbor_source, self.max_overlap, self.seed, self.materialized)
