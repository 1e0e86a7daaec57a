"""`retro.Dataset`: the sequences of `retro train` as a map-style dataset of torch, for another training loop.

sample number ─► datastore and chunks (`retro/data/batches.py`) ─► tensors of one sequence, its neighbors and votes

A sample is a function of its number, the seed and the settings. So its bytes depend neither on the batch nor on the
number of workers, and a number is all that a run needs to resume.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor

from indexing.store.errors import InputError, OutOfRange
from indexing.store.ranged_reads import Reading
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import TrainingData
from retro.data.neighbor_choice import NeighborSource
from retro.data.settings import DataSettings

Layout: TypeAlias = Literal["retro", "transformers"]
Sample: TypeAlias = dict[str, Tensor]
_ANYWHERE = ("datastores", "reading", "materialized", "retrieval_dropout")
"""Settings that do not change a sample, or are in the state by another key."""


class State(TypedDict):
    """The state of a dataset, for a checkpoint: values of JSON.

    Attributes:
        samples: number of the next sample.
        data: fingerprints of the datastores, in order.
        settings: the settings that decide which bytes a sample has.
    """

    samples: int
    data: list[str]
    settings: dict[str, str | int | float | bool | list[float]]


class Dataset(torch.utils.data.Dataset[Sample]):
    """Sequences with neighbors and votes: `DataLoader(retro.Dataset("peps"), batch_size=8)`.

    The order is shuffled already: read it without `shuffle`. With T tokens of a sequence, chunks of m tokens, U = T / m
    and R = 2m, a sample has

    - `tokens` int64 [T], padded at the ends of documents;
    - `labels` int64 [T], the next token of the same document, -100 = none;
    - `documents` int64 [U], the document of each chunk; different numbers are different documents;
    - `lengths` int64 [U], tokens of each chunk without padding;
    - with k: `neighbors` int64 [U, k, R] and `neighbor_lengths` int64 [U, k], 0 = no neighbor. The neighbors of a chunk
      are for the chunk after it;
    - with `votes`: `votes` int64 [T, 32], the tokens that follow the same text elsewhere in the
      datastore (`Inputs.votes`).

    `retro.batch.inputs.Inputs(**batch)` is what the project's models take.

    Attributes:
        num_samples: samples from number 0 on.
        first: number of the sample with index 0.
    """

    def __init__(
        self,
        datastores: Path | str | Sequence[Path | str],
        *,
        sequence_length: int = 512,
        k: int = 2,
        votes: bool = False,
        num_samples: int | None = None,
        layout: Layout = "retro",
        retrieval_dropout: float = 0.0,
        neighbor_source: NeighborSource = "nearest",
        max_overlap: float = 1.0,
        weights: Sequence[float] = (),
        seed: int = 0,
        reading: Reading = "mmap",
        materialized: bool = False,
    ) -> None:
        """Open datastores. Arguments without a description here are keys of the section `data` of `retro train`.

        Args:
            datastores: folder or URL, or several; they must share one tokenizer.
            sequence_length: T, a multiple of the chunk length.
            k: neighbors of each chunk; 0 = none.
            votes: read votes too. They take 256 bytes for each token.
            num_samples: None = as many as the datastores have sequences. Later samples are further passes, in another
                order.
            layout: `transformers` has `input_ids` in place of `tokens`, and `labels` that the model shifts: the token
                itself, and -100 for padding and the first token of a document.
            retrieval_dropout: fraction of the samples without neighbors and votes (lengths and votes are 0).
            neighbor_source: `nearest` or `random`.
            max_overlap: skip neighbors with a longer run of tokens in common, as a fraction of the chunk. 1 = skip
                none.
            weights: fraction of the samples from each datastore; empty = in proportion to their chunks.
            seed: of the order, of random neighbors and of `retrieval_dropout`.
            reading: `mmap` or `pread`.
            materialized: read the copies of neighbors next to the chunks.

        Raises:
            InputError: an argument has another value, a datastore lacks the stage `neighbors` or `votes`, or the
                datastores do not fit together.
        """
        if layout not in get_args(Layout):
            raise InputError(f"layout = {layout!r}: accepted are {', '.join(get_args(Layout))}.")
        folders = (datastores,) if isinstance(datastores, str | Path) else tuple(datastores)
        if not folders:
            raise InputError("datastores is empty: name at least one.")
        self._settings = DataSettings(
            datastores=tuple(map(Path, folders)),
            weights=tuple(weights),
            sequence_length=sequence_length,
            k=k,
            neighbor_source=neighbor_source,
            retrieval_dropout=retrieval_dropout,
            max_overlap=max_overlap,
            seed=seed,
            reading=reading,
            materialized=materialized,
        )
        self._votes, self._layout = votes, layout
        self._data = TrainingData(self._settings.datastores, self._settings, retrieval=k > 0, votes=votes)
        chunks = sum(datastore.train.num_chunks for datastore in self._data.datastores)
        self.num_samples = max(1, chunks // self._data.num_chunks) if num_samples is None else num_samples
        if self.num_samples < 1:
            raise InputError(f"num_samples = {num_samples}: must be at least 1.")
        self.first = 0

    def __len__(self) -> int:
        """Samples from `first` on."""
        return self.num_samples - self.first

    def __getitem__(self, index: int) -> Sample:
        """A sample.

        Raises:
            OutOfRange: the index is not in [-len, len). It is an InputError and an IndexError.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Some samples, which are read together; a DataLoader calls this for each batch."""
        rows = self._data.rows([self._number(index) for index in indices], self._settings.retrieval_dropout)
        columns = {name: torch.from_numpy(value) for name, value in rows._asdict().items() if value is not None}
        if self._layout == "transformers":
            columns = for_transformers(columns)
        return [{name: column[row] for name, column in columns.items()} for row in range(len(indices))]

    def _number(self, index: int) -> int:
        """The sample number of an index."""
        if not -len(self) <= index < len(self):
            raise OutOfRange(f"index {index}: the dataset has {len(self)} samples.")
        return self.first + (index + len(self) if index < 0 else int(index))

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, samples: int | None = None) -> State:
        """The state for a checkpoint.

        Args:
            samples: samples of number 0 on that are used up: steps · batch size. None = `first`. A loader that counts
                by itself (torchdata's StatefulDataLoader, the Trainer of transformers) leaves this out.

        Raises:
            InputError: `samples` is not in [0, num_samples].
        """
        used = self.first if samples is None else samples
        if not 0 <= used <= self.num_samples:
            raise InputError(f"samples = {used}: must be 0 to {self.num_samples}.")
        return {"samples": used, "data": self._data.fingerprints, "settings": self._identity}

    def load_state_dict(self, state: State) -> None:
        """Continue at the sample of a state: index 0 is then its number.

        Raises:
            InputError: the state is not one of a dataset, or of other data or settings, which would give other
                sequences.
        """
        if missing := State.__annotations__.keys() - state.keys():
            raise InputError(f"the state lacks {', '.join(sorted(missing))}: it is not the state of a retro.Dataset.")
        if state["data"] != self._data.fingerprints:
            raise InputError(
                "the state is of other datastores, or they were built again since: its sequences are other ones."
            )
        for key, value in self._identity.items():
            if state["settings"].get(key) != value:
                raise InputError(
                    f"{key} = {value!r}, but the state has {state['settings'].get(key)!r}. Use the same value."
                )
        self.first = self.state_dict(state["samples"])["samples"]

    @property
    def _identity(self) -> dict[str, str | int | float | bool | list[float]]:
        settings = {key: value for key, value in asdict(self._settings).items() if key not in _ANYWHERE}
        own = {"votes": self._votes, "layout": self._layout, "retrieval_dropout": self._settings.retrieval_dropout}
        return settings | own | {"weights": list(self._data.weights)}


def for_transformers(columns: Sample) -> Sample:
    """Columns [B, …] with the names and labels of transformers, whose models compare each prediction with the next
    label."""
    labels = columns["labels"].new_full(columns["labels"].shape, IGNORED_LABEL)
    labels[:, 1:] = columns["labels"][:, :-1]
    renamed = {"input_ids": columns["tokens"], **columns, "labels": labels}
    del renamed["tokens"]
    return renamed
