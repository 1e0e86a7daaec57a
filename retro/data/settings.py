"""Settings of what a run trains on: datastores, sequences, neighbors."""

from dataclasses import dataclass
from pathlib import Path

from indexing.store.errors import InputError
from indexing.store.ranged_reads import Reading
from retro.data.neighbor_choice import NeighborSource, NeighborUse


@dataclass(frozen=True)
class DataSettings:
    """Which datastores are trained on, and in what pieces."""

    datastores: tuple[Path, ...] = ()
    """Datastores to mix; empty: the one of this configuration. They must share one tokenizer."""
    weights: tuple[float, ...] = ()
    """Share of the sequences from each datastore; empty: by their numbers of chunks."""
    temperature: float = 1.0
    """Shares by size^(1/temperature): 1 keeps the sizes, above 1 small datastores are read more often."""
    token_budgets: tuple[int, ...] = ()
    """Tokens read of each datastore over the whole run: shares in proportion, and a longer run is refused."""
    sequence_length: int = 512
    """n, tokens of a training sequence: a multiple of the chunk length (paper: 2048)."""
    k: int = 2
    """Neighbors of each chunk in training (paper: 2)."""
    k_choices: tuple[int, ...] = ()
    """Numbers of neighbors of which one is drawn for each batch, 0 for retrieval OFF; empty: always data.k."""
    neighbor_source: NeighborSource = "nearest"
    """`nearest`, as stored; `random`: a control, chunks drawn uniformly outside the sequence's documents in each epoch."""
    retrieval_dropout: float = 0.1
    """Share of the sequences trained with retrieval OFF, so that the model stays good without."""
    max_overlap: float = 1.0
    """Neighbors are skipped that share a longer run of tokens with the chunk or with the next one than this share of its
    length; the next ones stored take their place. 1 skips none."""
    seed: int = 0
    """Of the order of the sequences, of random neighbors and of the draws for data.k_choices and data.retrieval_dropout."""
    reading: Reading = "mmap"
    """How files are read, the batches are the same: `mmap` maps them into memory (of a URL: fetches them to the local cache
    first); `pread` reads only the ranges of bytes asked for, for network file systems (of a URL: by range requests)."""
    materialized: bool = False
    """Read neighbors from where the stage `materialize` has written them beside each chunk, as far as they stand there."""

    def __post_init__(self) -> None:
        for key in ("weights", "token_budgets"):
            values = getattr(self, key)
            if values and len(values) != len(self.datastores):
                raise InputError(
                    f"data.{key} has {len(values)} numbers for {len(self.datastores)} data.datastores: give one for each."
                )
            if any(value <= 0 for value in values):
                raise InputError(f"data.{key} = {values}: all must be above 0.")
        if self.temperature <= 0:
            raise InputError(f"data.temperature = {self.temperature}: must be above 0; 1 keeps the sizes.")
        given = [key for key in ("weights", "temperature", "token_budgets") if getattr(self, key) not in ((), 1.0)]
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(f'data.{key}' for key in given)} are given: each decides the shares alone; keep one."
            )
        if self.sequence_length < 1:
            raise InputError(f"data.sequence_length = {self.sequence_length}: must be a multiple of the chunk length.")
        if self.k < 0:
            raise InputError(f"data.k = {self.k}: must be 0 (no retrieval) or more.")
        if any(k < 0 for k in self.k_choices):
            raise InputError(f"data.k_choices = {self.k_choices}: each must be 0 (no retrieval) or more.")
        if not 0 <= self.retrieval_dropout <= 1:
            raise InputError(f"data.retrieval_dropout = {self.retrieval_dropout}: must be between 0 and 1.")
        if not 0 <= self.max_overlap <= 1:
            raise InputError(f"data.max_overlap = {self.max_overlap}: must be between 0 and 1; 1 skips no neighbor.")

    def neighbor_use(self, k: int) -> NeighborUse:
        """How k neighbors of each chunk are chosen under these settings."""
        return NeighborUse(k, self.neighbor_source, self.max_overlap, self.seed, self.materialized)
