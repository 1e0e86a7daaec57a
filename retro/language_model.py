"""A checkpoint with its tokenizer and, where it retrieves, its datastore: text in, probabilities or text out.

One class for `retro generate`, the server, question answering and lm-eval. k = 0 is retrieval OFF everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from indexing.retriever import Retriever
from indexing.tokenizer import Tokenizer
from retro.checkpoint import Checkpoint, load_model, open_checkpoint
from retro.device import Placement, place
from retro.generation import GenerationSettings, generate
from retro.loss import token_losses
from retro.model import Retro


@dataclass(frozen=True)
class LanguageModel:
    """`LanguageModel.open(checkpoint)`, then `score` or `generate`.

    Attributes:
        checkpoint: what the weights say of themselves.
        model: in evaluation mode.
        tokenizer: of the datastore.
        retriever: of the datastore; None where the model or the caller does not retrieve.
        placement: device and precision.
        context: tokens that the model sees at most.
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
        placement = place(device, opened.settings["train"]["precision"])
        source = opened.settings["data"]["datastores"][0] if datastore is None else datastore
        retriever: Retriever | None = None
        if isinstance(source, Retriever):
            retriever, tokenizer = source, source.tokenizer
        elif retrieval and opened.model.cca_layers:
            retriever = Retriever.open(source)
            tokenizer = retriever.tokenizer
        else:
            tokenizer = Tokenizer.open(Path(source) / "tokenizer")
        if not retrieval or not opened.model.cca_layers:
            retriever = None
        model = load_model(opened, placement.device)
        return cls(opened, model, tokenizer, retriever, placement, opened.settings["data"]["sequence_length"])

    def score(self, sequences: Sequence[np.ndarray], k: int = 0) -> list[np.ndarray]:
        """Log-probabilities in nats of each token of some sequences but the first, which has nothing before it.

        Args:
            sequences: token ids [t] of each, with the beginning of the document where one is meant; 1 ≤ t ≤ context.
            k: neighbors of each complete chunk, found live; 0 = retrieval OFF.

        Returns:
            [t - 1] float64 of each sequence.
        """
        return [self._score(np.asarray(each, dtype=np.int64), k) for each in sequences]

    @torch.inference_mode()
    def _score(self, tokens: np.ndarray, k: int) -> np.ndarray:
        m = self.model.settings.chunk_length
        full = len(tokens) // m
        tensors = {"tokens": torch.from_numpy(tokens[None]), "neighbors": None, "neighbor_lengths": None}
        if k and full and self.retriever is not None:
            neighbors, lengths = self.retriever.neighbors(tokens[: full * m].reshape(-1, m), k)
            tensors |= {
                "neighbors": torch.from_numpy(neighbors[None]),
                "neighbor_lengths": torch.from_numpy(lengths[None]),
            }
        with self.placement.autocast():
            hidden = self.model.hidden(**self.placement.put(tensors))
            labels = self.placement.put({"labels": torch.from_numpy(tokens[None, 1:])})["labels"]
            losses = token_losses(hidden[:, :-1], self.model.output_weight, labels)
        scores: np.ndarray = -losses[0].double().cpu().numpy()
        return scores

    def generate(self, prompt: np.ndarray, settings: GenerationSettings, k: int = 0) -> Iterator[int]:
        """Tokens that continue a prompt [t], which begins with the beginning of a document."""
        retriever = self.retriever
        retrieve = (lambda chunks: retriever.neighbors(chunks, k)) if k and retriever is not None else None
        return generate(
            self.model,
            prompt,
            settings,
            self.placement,
            eos_id=self.tokenizer.eos_id,
            context=self.context,
            retrieve=retrieve,
        )
