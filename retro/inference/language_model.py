"""A checkpoint with its tokenizer and, where it retrieves, its datastore: text in, probabilities or text out.

One class for `retro generate`, the server, question answering and lm-eval. k = 0 is retrieval OFF everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.checkpoints.checkpoint import Checkpoint, load_model, open_checkpoint
from retro.device import Placement, choose_inference_placement
from retro.inference.decoder import Decoder, Given, Retrieve
from retro.inference.generation import GeneratedToken, generate
from retro.inference.scoring import Scores, score
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro


@dataclass(frozen=True)
class LanguageModel:
    """`LanguageModel.open(checkpoint)`, then `score` or `generate`.

    Attributes:
        checkpoint: what the weights say of themselves.
        model: in evaluation mode.
        tokenizer: of the datastore.
        retriever: of the datastore; None where the model or the caller does not retrieve.
        placement: device and precision.
        context: tokens that the model sees at most: the sequences of training, in whole chunks.
    """

    checkpoint: Checkpoint
    model: Retro
    tokenizer: Tokenizer
    retriever: Retriever | None
    placement: Placement
    context: int

    @classmethod
    def open(
        cls,
        checkpoint: Path | str,
        datastore: Path | str | Retriever | None = None,
        device: str = "auto",
        *,
        retrieval: bool = True,
    ) -> "LanguageModel":
        """Open a checkpoint and the datastore it retrieves from.

        Args:
            checkpoint: what `open_checkpoint` takes.
            datastore: folder, URL, or one that is open; None: the first of the training run.
            device: `auto`, `cpu`, `cuda` …
            retrieval: False opens no index: the model can only be used with k = 0.

        Raises:
            InputError: one of them cannot be opened, or they do not fit each other.
        """
        opened = open_checkpoint(Path(checkpoint))
        placement = choose_inference_placement(device, opened.settings["train"]["precision"])
        source = opened.folders[0] if datastore is None else datastore
        retriever: Retriever | None = None
        if isinstance(source, Retriever):
            retriever, tokenizer = source, source.tokenizer
        elif retrieval and opened.model.retrieval.cca_layers:
            retriever = Retriever.open(source)
            tokenizer = retriever.tokenizer
        else:
            tokenizer = Tokenizer.open(Path(source) / "tokenizer")
        _check_fits(opened, tokenizer, retriever, source)
        if not retrieval or not opened.model.retrieval.cca_layers:
            retriever = None
        model = load_model(opened, placement.device)
        placement.cast(model)
        m, length = opened.model.chunk_length, opened.settings["data"]["sequence_length"]
        return cls(opened, model, tokenizer, retriever, placement, -(-length // m) * m)

    def score(self, sequences: Sequence[np.ndarray], k: int = 0) -> list[np.ndarray]:
        """Log-probabilities in nats of each token of some sequences but the first, which has nothing before it.

        Args:
            sequences: token ids [t] of each, with the beginning of the document where one is meant; t ≥ 1. What is longer
                than the context is read by windows that overlap by half (`retro/inference/scoring.py`).
            k: neighbors of each complete chunk, found live; 0 = retrieval OFF.

        Returns:
            [t - 1] float64 of each sequence.

        Raises:
            InputError: a sequence is empty or has ids outside the vocabulary; k is not 0 and there is no retriever.
        """
        return [scores.log_probabilities for scores in self.score_with_likeliest(sequences, k, top=0)]

    def score_with_likeliest(
        self,
        sequences: Sequence[np.ndarray],
        k: int = 0,
        top: int = 1,
        wanted: Callable[[int], bool] = lambda sequence: True,
    ) -> list[Scores]:
        """As `score`, and the likeliest `top` tokens at every place; `wanted` as in `retro.inference.scoring.score`."""
        checked = [self._checked(each, f"sequences[{number}]") for number, each in enumerate(sequences)]
        if top < 0:
            raise InputError(f"top = {top}: must be 0 or more.")
        retrieve = self._retrieve(k)
        return score(
            self.model, checked, self.placement, context=self.context, retrieve=retrieve, top=top, wanted=wanted
        )

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int = 0,
        given: Given | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[list[GeneratedToken]]:
        """Continue prompts together: after every step a piece for each row that is not finished.

        Args:
            prompts: token ids [t] of each, which begin with the beginning of a document; t ≥ 1.
            settings: length and sampling.
            k: neighbors of each complete chunk, found live; 0 = retrieval OFF.
            given: neighbors of each prompt, which all chunks of it read, whatever they would find; nothing is searched.
            check: called before each window of the prompts is read; what it raises ends the generation.

        Raises:
            InputError: as `score`, at once and not at the first step.
        """
        checked = [self._checked(each, f"prompts[{number}]") for number, each in enumerate(prompts)]
        retrieve = self._retrieve(k) if given is None else None
        decoder = Decoder(self.model, self.placement, self.context, retrieve, given, check)
        return generate(decoder, checked, settings, decode=self.tokenizer.decode, eos_id=self.tokenizer.eos_id)

    def _retrieve(self, k: int) -> Retrieve | None:
        """What finds k neighbors of chunks; None for k = 0, and for a model that reads none."""
        if k < 0:
            raise InputError(f"k = {k}: must be 0 (retrieval OFF) or more.")
        if not k or not self.model.settings.retrieval.cca_layers:
            return None
        retriever = self.retriever
        if retriever is None:
            raise InputError(f"k = {k}: the model was opened without retrieval; use k = 0.")
        return lambda chunks: retriever.neighbors(chunks, k)

    def _checked(self, tokens: np.ndarray, name: str) -> np.ndarray:
        """Tokens as int64.

        Raises:
            InputError: they are none, no row of whole numbers, or outside the vocabulary.
        """
        row, size = np.asarray(tokens), self.model.settings.vocab_size
        if row.ndim != 1 or not len(row):
            raise InputError(f"{name} has the shape {row.shape}: give a row of tokens, at least one.")
        if not np.issubdtype(row.dtype, np.integer):
            raise InputError(f"{name} is of type {row.dtype}: token ids are whole numbers.")
        row = row.astype(np.int64)
        if row.min() < 0 or row.max() >= size:
            outside = row[(row < 0) | (row >= size)][0]
            raise InputError(f"{name} holds the token id {outside}: ids of this model are 0 to {size - 1}.")
        return row


def _check_fits(checkpoint: Checkpoint, tokenizer: Tokenizer, retriever: Retriever | None, source: object) -> None:
    """Raise InputError unless a model can read the tokens and, with retrieval, the chunks of a datastore."""
    name = source.datastore.folder if isinstance(source, Retriever) else source
    length = checkpoint.model.chunk_length if retriever is None else retriever.datastore.chunk_length
    checkpoint.check_fits({"vocab_size": tokenizer.vocab_size, "chunk_length": length}, name)
