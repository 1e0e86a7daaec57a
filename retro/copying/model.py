"""A language model with a copy head: logits and losses of the next tokens, what is copied included.

    inputs ─► hidden ─┬─► logits ────────────┬─► mix ─► log-probabilities
                      └─► vocabulary_losses ─┴─► with_copying ─► losses, trust
    inputs ─► copy_sources ─► evidence ──────┘

Two models: `retro/model/retro.py`, and any decoder of transformers (`transformers_model.py`). Letters of the shape
comments as in `head.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, TokenLosses
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
    def vocabulary_losses(self, hidden: Tensor, labels: Tensor) -> TokenLosses:
        """Losses of labels int64 [B, T] with the vocabulary alone, from hidden [B, T, D]. Without gradients."""

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

    def evidence(self, inputs: Inputs) -> Tensor | None:
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
    def read(self, ways: Sequence[Inputs]) -> TokenLosses:
        """The vocabulary's losses for `with_copying`, of the same text with different neighbors and votes.

        The text is read once, with the neighbors of the first one: the activations must be equal for all.
        """
        hidden, _ = self.hidden(ways[0])
        # The losses of labels are among those of all next tokens.
        learns = next((inputs for inputs in ways if self.copy_head and self.copy_head.learns_trust(inputs)), ways[0])
        return self.vocabulary_losses(hidden, self.scored_tokens(learns))

    @torch.no_grad()
    def scored(self, inputs: Inputs, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None, TokenLosses]:
        """As `token_losses`, the trust of `CopyHead.trusted_losses` (None if none is learned), and the vocabulary's
        losses of `scored_tokens`."""
        if hidden is None:
            hidden, _ = self.hidden(inputs)
        vocabulary = self.vocabulary_losses(hidden, self.scored_tokens(inputs))
        return *self.with_copying(vocabulary, inputs), vocabulary

    def scored_tokens(self, inputs: Inputs) -> Tensor:
        """The tokens whose losses `with_copying` needs, int64 [B, T]: the labels, or all next tokens if retrieval must
        earn trust."""
        learns = self.copy_head is not None and self.copy_head.learns_trust(inputs)
        return inputs.following() if learns else inputs.labels

    def with_copying(self, vocabulary: TokenLosses, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Losses and trust of `scored`, from those of `scored_tokens` with the vocabulary alone."""
        head, sources, trust = self.copy_head, self.copy_sources(inputs), None
        if head is None or not sources:
            return vocabulary.nats.masked_fill(inputs.labels == IGNORED_LABEL, 0.0), None
        scored = self.scored_tokens(inputs)
        evidence = head.evidence(sources, scored)
        if head.learns_trust(inputs):
            losses, trust = head.trusted_losses(vocabulary, evidence, inputs)
        else:
            losses = head.losses(vocabulary, scored, evidence)
        return losses.masked_fill(inputs.labels == IGNORED_LABEL, 0.0), trust


def mixed(head: CopyHead, logits: Tensor, inputs: Inputs) -> Tensor:
    """`CopyingModel.mix` with a copy head: [B, T, V]."""
    if not (sources := head.sources(inputs)):
        return logits
    following, trust = inputs.following(), None
    evidence = head.evidence(sources, following)
    if head.learns_trust(inputs):
        log_p = logits.float().log_softmax(-1)
        nats = -log_p.gather(-1, following[..., None])[..., 0]
        _, trust = head.trusted_losses(TokenLosses(nats, log_p.amax(-1)), evidence, inputs)
    return head.mix(logits, sources, evidence, trust=trust)
