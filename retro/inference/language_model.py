"""A checkpoint with its tokenizer and, if the model retrieves, its datastore: scores and generates text.

`retro generate`, the server, question answering and lm-eval use this class. k = 0 is retrieval OFF everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.installation import open_huggingface
from indexing.tokenization.tokenizer import Tokenizer
from retro.checkpoints.any_model import for_datastore, load_scorer, open_model
from retro.checkpoints.checkpoint import Checkpoint, scores_only
from retro.copying.model import CopyingModel
from retro.copying.rows import RetrieveNeighbors
from retro.device import Placement, choose_inference_placement
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, GeneratedToken, generate
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.packed_weights import pack
from retro.inference.scoring import ScoredSequence, Scores, Window, score_windows, to_score
from retro.inference.settings import GenerationSettings
from retro.inference.verbatim_runs import open_sorted_prefixes
from retro.model.retro import Retro

NEIGHBOR_CACHE_BYTES = 2**30
"""Default size of the cache of encoded neighbors."""

GivenNeighbors = Sequence[tuple[np.ndarray, ...]]
"""For each prompt the neighbors that all its chunks read: tokens [K, R] int64 and lengths [K] int64, and optionally ids
[K] int64 and distances [K] float32, as in `Neighbors`. R is equal for all prompts."""


@dataclass(frozen=True)
class LanguageModel:
    """A model for inference: `LanguageModel.open(checkpoint)`, then `score` or `generate`.

    Attributes:
        checkpoint: metadata of the weights.
        model: the model in evaluation mode.
        tokenizer: tokenizer of the datastore.
        retriever: retriever of the datastore; None if the model or the caller does not retrieve.
        placement: device and precision.
        context: context length in tokens: the sequence length of training, in whole chunks.
        suffixes: finds what the copy head copies from the whole datastore; None if it does not.
        neighbor_cache: encoded neighbors, of a model whose decoder reads them; None = other models.
    """

    checkpoint: Checkpoint
    model: CopyingModel
    tokenizer: Tokenizer
    retriever: Retriever | None
    placement: Placement
    context: int
    suffixes: SuffixIndex | None = None
    neighbor_cache: NeighborCache | None = None
    _searches: dict[int, RetrieveNeighbors] = field(default_factory=dict)  # by k: a batch joins equal searches

    @classmethod
    def open(
        cls,
        checkpoint: Path | str,
        datastore: Path | str | Retriever | None = None,
        device: str = "auto",
        *,
        retrieval: bool = True,
        neighbor_cache_bytes: int = NEIGHBOR_CACHE_BYTES,
    ) -> "LanguageModel":
        """Open a checkpoint and the datastore it retrieves from.

        Args:
            checkpoint: path for `open_checkpoint`.
            datastore: folder, URL or an open retriever; None = the first datastore of the training run. An imported
                model, which has none, then uses its own tokenizer and does not retrieve.
            device: `auto`, `cpu`, `cuda` …
            retrieval: False opens no index; then the model only works with k = 0.
            neighbor_cache_bytes: largest size of the encoded neighbors that are kept, if the decoder reads them.

        Raises:
            InputError: the checkpoint or the datastore cannot be opened, or they do not fit each other.
        """
        opened = open_model(Path(checkpoint))
        placement = choose_inference_placement(device, opened.settings["train"]["precision"])
        retriever: Retriever | None = None
        own = imported_tokenizer(opened) if datastore is None else ""
        source = own or (opened.folders[0] if datastore is None else datastore)
        if own:
            tokenizer = open_huggingface(own)
        elif isinstance(source, Retriever):
            retriever, tokenizer = source, source.tokenizer
        elif retrieval and opened.model.uses_datastore:
            retriever = Retriever.open(source)
            tokenizer = retriever.tokenizer
        else:
            tokenizer = Tokenizer.open(Path(source) / "tokenizer")
        if not own:
            opened = for_datastore(opened, retriever.datastore.folder if retriever else str(source))
            _check_fits(opened, tokenizer, retriever, source)
        if not retrieval or not opened.model.uses_datastore:
            retriever = None
        if retriever is not None and opened.model.retrieves:
            retriever.require_neighbors()  # before the weights are read
        copies = retriever is not None and opened.model.copy_head.datastore
        suffixes = open_sorted_prefixes(retriever.datastore.folder) if copies and retriever is not None else None
        model = load_scorer(opened, placement)
        cache = None
        if isinstance(model, Retro):
            pack(model, placement)  # weights that are not rounded yet
            placement.cast(model)
            cache = NeighborCache(model, neighbor_cache_bytes) if opened.model.decoder_reads else None
        m, length = opened.model.chunk_length, opened.settings["data"]["sequence_length"]
        return cls(opened, model, tokenizer, retriever, placement, -(-length // m) * m, suffixes, cache)

    def score(self, sequences: Sequence[np.ndarray], k: int = 0) -> list[np.ndarray]:
        """Compute log-probabilities in nats of all tokens of each sequence except its first.

        Args:
            sequences: token ids [t] of each sequence, including the beginning-of-document token if it begins a
                document; t ≥ 1. Sequences longer than the context are read in windows that overlap by half.
            k: number of neighbors of each complete chunk, found by search; 0 = retrieval OFF.

        Returns:
            [t - 1] float64 for each sequence.

        Raises:
            InputError: a sequence is empty or has ids outside the vocabulary; k is not 0 and there is no retriever.
        """
        return [scores.log_probabilities for scores in self.score_with_likeliest(sequences, k, top=0)]

    def score_off_and_on(self, sequences: Sequence[np.ndarray], k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """As `score`, with retrieval OFF and with k neighbors.

        The model reads the text once if its activations do not depend on neighbors.
        """
        if self.model.settings.activations_read:
            return self.score(sequences), self.score(sequences, k)
        begun = self.to_score(sequences, top=0)
        for sequence in begun:
            sequence.off = np.zeros_like(sequence.scores.log_probabilities)
        self.score_windows([window for sequence in begun for window in sequence.windows], k, top=0)
        return [s.off for s in begun if s.off is not None], [s.scores.log_probabilities for s in begun]

    def score_with_likeliest(
        self,
        sequences: Sequence[np.ndarray],
        k: int = 0,
        top: int = 1,
        sources: bool = False,
    ) -> list[Scores]:
        """Like `score`, with the `top` likeliest tokens at every position; for `sources` see
        `retro.inference.scoring.score_windows`."""
        begun = self.to_score(sequences, top)
        self.score_windows([window for sequence in begun for window in sequence.windows], k, top, sources)
        return [sequence.scores for sequence in begun]

    def to_score(self, sequences: Sequence[np.ndarray], top: int = 1) -> list[ScoredSequence]:
        """Return sequences whose windows `score_windows` can score, in several calls.

        Raises:
            InputError: see `score`.
        """
        checked = [self._checked(tokens, f"sequences[{index}]") for index, tokens in enumerate(sequences)]
        if top < 0:
            raise InputError(f"top = {top}: must be 0 or more.")
        return to_score(self.model, checked, context=self.context, top=self._within_ids(top))

    def score_windows(self, windows: Sequence[Window], k: int = 0, top: int = 1, sources: bool = False) -> None:
        """Score windows of sequences `to_score`; for the rest see `score_with_likeliest`."""
        retrieve = self._retrieve(k)
        score_windows(
            self.model,
            windows,
            self.placement,
            retrieve=retrieve,
            datastore=self.suffixes if retrieve else None,
            top=self._within_ids(top),
            sources=sources,
            neighbor_cache=self.neighbor_cache,
            masked=self.masked,
        )

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int = 0,
        given: GivenNeighbors | None = None,
        n: int = 1,
        sources: bool = False,
        inserted: Sequence[tuple[int, int]] | None = None,
    ) -> Iterator[list[GeneratedToken]]:
        """Continue prompts together; yield after every step the new tokens.

        Args:
            prompts: token ids [t] of each prompt, the beginning-of-document token first; t ≥ 1.
            settings: length and sampling.
            k: number of neighbors of each complete chunk, found by search; 0 = retrieval OFF.
            given: neighbors of each prompt, which all its chunks read; no search runs.
            n: continuations of each prompt, with the seeds `settings.seed`, `settings.seed` + 1 …
            sources: return with each token the neighbors that the model read and the token that the copy head copied.
            inserted: [start, stop) of each prompt's tokens that are passages of the datastore, which earn no trust in
                copying; None = none.

        Raises:
            InputError: see `score`; or an id in the settings is outside the vocabulary. It is raised by this call,
                before the first step.
        """
        checked, retrieve = self.checked(prompts, settings, k, given)
        return generate(self.batch(), checked, settings, retrieve, n=n, sources=sources, inserted=inserted)

    def batch(self) -> Batch:
        """Return an empty batch. Prompts that join it must be `checked`.

        Raises:
            InputError: transformers computes the model.
        """
        if not isinstance(self.model, Retro):
            raise scores_only(self.checkpoint.path, self.checkpoint.of_transformers["family"])
        decoder = Decoder(self.model, self.placement, self.context, self.suffixes, self.neighbor_cache)
        next_document = () if self.tokenizer.has_bos else (self.tokenizer.bos_id,)
        return Batch(decoder, self.tokenizer.decode, self.tokenizer.eos_id, {*next_document}, self.masked)

    @cached_property
    def masked(self) -> torch.Tensor | None:
        """Ids of the model that are no tokens of texts, bool [V]: never generated or returned as likeliest; None =
        there are none.

        Tables of many models are padded to a multiple of 64 or 128 rows, and a datastore adds a token for padding if
        the tokenizer has none. Log-probabilities are still those of the whole table.
        """
        return None if self._known.all() else torch.from_numpy(~self._known).to(self.placement.device)

    @cached_property
    def _known(self) -> np.ndarray:
        """Ids of the model that are not `masked`, bool [V]."""
        known = np.arange(self.model.settings.vocab_size) < self.tokenizer.num_model_tokens
        known[[self.tokenizer.bos_id, self.tokenizer.eos_id]] = True
        return known

    def _within_ids(self, top: int) -> int:
        """Limit a number of likeliest tokens to those that are not masked."""
        return min(top, int(self._known.sum()))

    def checked(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int,
        given: GivenNeighbors | None = None,
    ) -> tuple[list[np.ndarray], list[RetrieveNeighbors | None]]:
        """Return prompts as int64, and for each the search for k neighbors of its chunks, or what returns those given.

        Raises:
            InputError: see `generate`.
        """
        settings.check_ids(self._num_ids)
        checked = [self._checked(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        if given is not None:
            return checked, [_always(*neighbors) for neighbors in given]
        return checked, [self._retrieve(k)] * len(prompts)

    def _retrieve(self, k: int) -> RetrieveNeighbors | None:
        """Return the function that finds k neighbors of chunks; None for k = 0 and for models without retrieval."""
        if k < 0:
            raise InputError(f"k = {k}: must be 0 (retrieval OFF) or more.")
        if not k or not self.model.settings.uses_datastore:
            return None
        retriever = self.retriever
        if retriever is None:
            raise InputError(f"k = {k}: the model was opened without retrieval; use k = 0.")
        if not self.model.settings.retrieves:  # it copies from the whole datastore only
            return _always(np.zeros((0, 2 * self.model.settings.chunk_length), np.int64), np.zeros(0, np.int64))
        return self._searches.setdefault(k, lambda chunks: retriever.neighbors.find(chunks, k))

    @property
    def _num_ids(self) -> int:
        """Ids from 0 that texts can have: retrieval knows those of the tokenizer only."""
        return min(self.model.settings.vocab_size, self.tokenizer.vocab_size)

    def _checked(self, tokens: np.ndarray, name: str) -> np.ndarray:
        """Return tokens as int64.

        Raises:
            InputError: the tokens are empty, not one-dimensional, not integers, or outside the vocabulary.
        """
        row, size = np.asarray(tokens), self._num_ids
        if row.ndim != 1 or not len(row):
            raise InputError(f"{name} has the shape {row.shape}; give a one-dimensional array with at least one token.")
        if not np.issubdtype(row.dtype, np.integer):
            raise InputError(f"{name} has the type {row.dtype}; token ids must be integers.")
        row = row.astype(np.int64)
        if row.min() < 0 or row.max() >= size:
            outside = row[(row < 0) | (row >= size)][0]
            raise InputError(f"{name} has the token id {outside}; this model accepts 0 to {size - 1}.")
        return row


def imported_tokenizer(checkpoint: Checkpoint) -> str:
    """The folder of the tokenizer that an imported model came with; empty if it has a datastore, or if the folder is
    gone."""
    folder: str = checkpoint.settings.get("imported", {}).get("folder", "")
    has_own = folder and not checkpoint.settings["data"]["datastores"] and not checkpoint.model.uses_datastore
    return folder if has_own and (Path(folder) / "tokenizer.json").is_file() else ""


def _always(*tables: np.ndarray) -> RetrieveNeighbors:
    """Return a search that finds the same neighbors for every chunk: tokens [K, R], lengths [K], and optionally ids and
    distances [K]."""
    return lambda chunks: tuple(np.broadcast_to(table, (len(chunks), *table.shape)) for table in tables)


def _check_fits(
    checkpoint: Checkpoint, tokenizer: Tokenizer, retriever: Retriever | None, source: Retriever | Path | str
) -> None:
    """Raise InputError unless a model can read the tokens and, with retrieval, the chunks of a datastore."""
    name = source.datastore.folder if isinstance(source, Retriever) else source
    length = checkpoint.model.chunk_length if retriever is None else retriever.datastore.chunk_length
    sizes = {"vocab_size": tokenizer.vocab_size, "chunk_length": length}
    checkpoint.check_fits(sizes, name, tokenizer=tokenizer_fingerprint(Path(name)))
