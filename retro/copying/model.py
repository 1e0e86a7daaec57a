"""A language model with a copy head: logits and losses of the next tokens, what is copied included.

    inputs ─► hidden ─┬─► logits ──────────────────────────────┬─► mix ─► log-probabilities
                      └─► vocabulary_losses ─► `MixtureParts` ─┴─► with_copying ─► losses, trust
    inputs ─► copy_sources ─► evidence ─┘

Two models: `retro/model/retro.py`, and any decoder of transformers (`transformers_model.py`). Letters of the shape
comments as in `head.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, Evidence, TokenLosses
from retro.copying.head import CopyHead
from retro.copying.source import Votes
from retro.model_settings import ModelSettings


class CopyingModel(nn.Module, ABC):
    """What scoring needs of a model.

    Attributes:
        settings: of the model.
        copy_head: None = it copies from nowhere.
    """

    settings: ModelSettings
    copy_head: CopyHead | None

    @abstractmethod
    def hidden(self, inputs: Inputs, cached: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the input of the output layer, [B, T, D], and the routing of experts if there are some.

        `cached` has keys and values of encoded neighbors, of a model whose decoder reads them.
        """

    @property
    @abstractmethod
    def steps(self) -> list[nn.Module]:
        """Modules that run one after the other in `hidden`, for progress."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the vocabulary's logits [..., V] from hidden [..., D]. They are large, so callers can pass a few rows
        at a time."""

    @abstractmethod
    def vocabulary_losses(self, hidden: Tensor, labels: Tensor, best: Tensor | None = None) -> TokenLosses:
        """Losses of labels int64 [B, T] with the vocabulary alone, from hidden [B, T, D], and what it gives the best
        candidates int64 [B, T, C] (`Evidence`). Without gradients."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Compute the logits of every next token, [B, T, V].

        They are log-probabilities if the copy head has a source: always if it copies from the context, otherwise with
        neighbors.
        """
        hidden, _ = self.hidden(inputs)
        return self.mix(self.logits(hidden), inputs)

    def mix(self, logits: Tensor, inputs: Inputs) -> Tensor:
        """Mix logits [B, T, V] with what the copy head votes for; unchanged if there is nothing to copy from.

        Args:
            logits: from `logits`.
            inputs: of the model.
        """
        return logits if self.copy_head is None else mixed(self.copy_head, logits, inputs)

    def evidence(self, inputs: Inputs) -> Evidence | None:
        """What the copy head knows about the labels, see `CopyHead.evidence`; None if there is nothing to copy from."""
        sources = self.copy_sources(inputs)
        return self.copy_head.evidence(sources, inputs.labels) if self.copy_head and sources else None

    def copy_sources(self, inputs: Inputs) -> dict[str, Votes]:
        """Where the copy head can copy from. Empty without a copy head."""
        return {} if self.copy_head is None else self.copy_head.sources(inputs)

    def token_losses(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """The loss of each label in nats, copying included: float32 [B, T], 0 for ignored labels. Without gradients.

        `hidden` [B, T, D] are the hidden states of these inputs, which are computed otherwise.
        """
        return self.scored(inputs, hidden)[0]

    @torch.no_grad()
    def read(self, ways: Sequence[Inputs], hidden: Tensor | None = None) -> "list[MixtureParts]":
        """What `with_copying` needs of the same text with different neighbors and votes.

        The text is read once, with the neighbors of the first one: the activations must be equal for all. `hidden`
        [B, T, D] are they, if they are known.
        """
        if hidden is None:
            hidden, _ = self.hidden(ways[0])
        # The losses of labels are among those of all next tokens.
        learns = next((inputs for inputs in ways if self.copy_head and self.copy_head.learns_trust(inputs)), ways[0])
        found = [self.scored_evidence(inputs) for inputs in ways]
        best = [evidence.best for evidence in found if evidence is not None]
        losses = self.vocabulary_losses(hidden, self.scored_tokens(learns), torch.cat(best, 2) if best else None)
        parts = iter(losses.log_best.split([part.shape[2] for part in best], 2))
        return [
            MixtureParts(losses if evidence is None else losses._replace(log_best=next(parts)), evidence)
            for evidence in found
        ]

    def scored_evidence(self, inputs: Inputs) -> Evidence | None:
        """The evidence about `scored_tokens`; None if there is nothing to copy from."""
        sources = self.copy_sources(inputs)
        return self.copy_head.evidence(sources, self.scored_tokens(inputs)) if self.copy_head and sources else None

    @torch.no_grad()
    def scored(self, inputs: Inputs, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None, TokenLosses]:
        """As `token_losses`, the trust of `CopyHead.trusted_losses` (None if none is learned), and the vocabulary's
        losses of `scored_tokens`."""
        (read,) = self.read([inputs], hidden)
        return *self.with_copying(read, inputs), read.vocabulary

    def scored_tokens(self, inputs: Inputs) -> Tensor:
        """The tokens whose losses `with_copying` needs, int64 [B, T]: the labels, or all next tokens if retrieval must
        earn trust."""
        learns = self.copy_head is not None and self.copy_head.learns_trust(inputs)
        return inputs.following() if learns else inputs.labels

    def with_copying(self, parts: "MixtureParts", inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Losses and trust of `scored`, from what `read` returned for these inputs."""
        (vocabulary, evidence), head, trust = parts, self.copy_head, None
        if head is None or evidence is None:
            return vocabulary.nats.masked_fill(inputs.labels == IGNORED_LABEL, 0.0), None
        if head.learns_trust(inputs):
            losses, trust = head.trusted_losses(vocabulary, evidence, inputs)
        else:
            losses = head.losses(vocabulary, self.scored_tokens(inputs), evidence)
        return losses.masked_fill(inputs.labels == IGNORED_LABEL, 0.0), trust


class MixtureParts(NamedTuple):
    """What is mixed for the tokens of a text with some neighbors and votes.

    Attributes:
        vocabulary: losses of `CopyingModel.scored_tokens` with the vocabulary alone.
        evidence: about these tokens; None if there is nothing to copy from.
    """

    vocabulary: TokenLosses
    evidence: Evidence | None


def mixed(head: CopyHead, logits: Tensor, inputs: Inputs) -> Tensor:
    """`CopyingModel.mix` with a copy head: [B, T, V]."""
    if not (sources := head.sources(inputs)):
        return logits
    following, trust = inputs.following(), None
    evidence = head.evidence(sources, following)
    if head.learns_trust(inputs):
        log_p = logits.float().log_softmax(-1)
        nats = -log_p.gather(-1, following[..., None])[..., 0]
        vocabulary = TokenLosses(nats, log_p.amax(-1), log_p.gather(-1, evidence.best))
        _, trust = head.trusted_losses(vocabulary, evidence, inputs)
    return head.mix(logits, sources, evidence, trust=trust)
