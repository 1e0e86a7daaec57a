"""Copying: next tokens that followed the same text before, mixed with those that the vocabulary predicts.

    p(w) = s_0 softmax(logits)(w) + sum over sources and lengths of s_(source, length) votes for w / all votes

There are three sources (`sources.py`): the preceding tokens of the same document (context), the neighbors of the
preceding chunk, and the whole datastore. A position of a source votes for the token that follows it (pointer networks:
Merity et al. 2017, arXiv 1609.07843; kNN-LM: Khandelwal et al. 2020, arXiv 1911.00172). Every source votes once for
each of `MATCH_LENGTHS`: at a length vote the positions at which as many of the last tokens, or more, equal those that
were read.

The shares s are a softmax of log-odds. Those of each source come from a small network, which reads how many votes there
are and whether they agree, for every source and length, how sure the vocabulary is, and what probability it gives the
best candidate of each source: the token that follows its longest match. It reads no activations, so it fits any model:
it begins with weights that were fitted to other text (`weights.safetensors`). Not in the paper of RETRO.

    tokens, neighbors, votes ─ counts by length ─ evidence ─┬─ networks ─ shares ─┐
    logits ─ probabilities of the likeliest token ──────────┘                     ├─ mixture ─ loss
             and of the best candidates                                           │
    logits ─ losses of the labels ────────────────────────────────────────────────┘

Counts are exact and need no gradient. Retrieval OFF removes the terms of neighbors and datastore: the other shares stay
in proportion. Outside of training, they are as large as they were right in the text so far (`switch.py`), and so is
that of a context that was added to a trained model.

Letters of the shape comments as in `retro.py`. In addition, C are the sources, L the match lengths, and N is a batch of
texts with S positions each and Q queries.
"""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, Evidence, TokenLosses, mixed_losses
from retro.batch.masks import document_starts
from retro.copying.matches import MATCH_LENGTHS
from retro.copying.neighbors import NEIGHBORS
from retro.copying.network_file import NetworkFile, read_networks
from retro.copying.source import CopySource, Votes
from retro.copying.sources import SOURCES
from retro.copying.switch import ALL_SOURCES, REMOVED, RETRIEVAL, trust_of
from retro.copying.votes import SourceMatches

WIDTH = 16
"""Hidden units of the network of a source. 32 gain less than 0.1%."""
STEP = 10.0
"""The outer weights are multiplied by it: AdamW moves each parameter by about the learning rate, too little for a
log-odds."""
UNFITTED = -3.0
"""Log-odds of each length of a source whose network was not fitted to other text: its share begins small."""
ALL_AGREE = 0.999
"""All votes are for one token if its share is larger."""
_TINY = torch.finfo(torch.float32).tiny


@cache
def initial_weights() -> dict[str, Tensor]:
    """The weights that every copy head begins with, by name."""
    return open_networks(Path(__file__).with_name("weights.safetensors")).weights


def open_networks(file: Path) -> NetworkFile:
    """Read networks of a file of `network_file.write_networks`.

    Raises:
        InputError: see `read_networks`.
    """
    head = CopyHead([source.name for source in SOURCES], 1)
    return read_networks(file, {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()})


def num_features(num_sources: int) -> int:
    """Features of some sources: two of the vocabulary, and four for each length of a source."""
    return 2 + 4 * num_sources * len(MATCH_LENGTHS)


BEST_FEATURES = 3
"""Features of the best candidate of a source."""


class SourceNetwork(nn.Module):
    """The network of one source: features to the log-odds of its lengths against the vocabulary.

    Each source has its own, so that one can be added or trained while the others, and retrieval OFF, stay as they are.
    """

    def __init__(self, num_sources: int) -> None:
        """A network that reads the features of some sources (`CopySource.reads`)."""
        super().__init__()
        self.inner = nn.Parameter(torch.zeros(WIDTH, num_features(num_sources)))
        self.inner_best = nn.Parameter(torch.zeros(WIDTH, BEST_FEATURES * num_sources))
        self.inner_bias = nn.Parameter(torch.zeros(WIDTH))
        self.outer = nn.Parameter(torch.zeros(len(MATCH_LENGTHS), WIDTH))
        self.outer_bias = nn.Parameter(torch.zeros(len(MATCH_LENGTHS)))

    def forward(self, features: Tensor, of_best: Tensor) -> Tensor:
        """Log-odds [..., L] from features, float32 [..., features], and those of the best candidates, float32
        [..., `BEST_FEATURES` C]. It reads the first ones."""
        hidden = F.linear(features[..., : self.inner.shape[1]], self.inner, self.inner_bias)
        hidden = hidden + F.linear(of_best[..., : self.inner_best.shape[1]], self.inner_best)
        return STEP * F.linear(F.gelu(hidden), self.outer, self.outer_bias)


class Origins(NamedTuple):
    """Where the probability of labels [B, T] comes from, as far as it is copied.

    Attributes:
        shares: share of the probability of a label that is copied from each source, float32 [B, T, C], 0 to 1.
        lengths: longest match in a neighbor among those that vote for the label, int64 [B, T]; -1 = no position votes
            for it.
        neighbors: number of this neighbor, the first one of several, int64 [B, T]; -1 = none.
        positions: the token of this neighbor that equals the label, int64 [B, T]; -1 = none.
    """

    shares: Tensor
    lengths: Tensor
    neighbors: Tensor
    positions: Tensor

    def of(self, source: CopySource) -> Tensor:
        """The share of each label that is copied from one of `SOURCES`, float32 [B, T]."""
        return self.shares[..., SOURCES.index(source)]


class CopyHead(nn.Module):
    """The networks of a model's sources, and the mixture. Computed in float32.

    Attributes:
        known: all C sources, those without a network too, so evidence has the same shape for each model.
        chunk_length: m.
        switch: its S experts.
        moves: what each expert adds to the log-odds of each source, [C, S]: 0 for a source that needs no trust.
    """

    def __init__(self, names: Collection[str], chunk_length: int, known: tuple[CopySource, ...] = SOURCES) -> None:
        """A copy head with some of the known sources; `CopyHeadSettings.names` has those of a model."""
        super().__init__()
        self.known, self.chunk_length = known, chunk_length
        for source in known:
            network = SourceNetwork(source.reads) if source.name in names else None
            setattr(self, source.name, network)
        own = any(source.switched and not source.of_retrieval for source in known if source.name in names)
        self.switch = ALL_SOURCES if own else RETRIEVAL
        none = (0.0,) * len(self.switch.start)
        self.moves = tuple(
            none if not source.switched else self.switch.of_retrieval if source.of_retrieval else self.switch.of_context
            for source in known
        )

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the weights that were fitted to other text; other sources begin with a small share."""
        for name, parameter in self.named_parameters():
            unfitted = UNFITTED / STEP if name.endswith("outer_bias") else 0.0
            parameter.copy_(initial_weights().get(name, torch.full_like(parameter, unfitted)))

    def network(self, source: CopySource) -> SourceNetwork | None:
        """The network of a source; None = this head does not copy from it."""
        network: SourceNetwork | None = getattr(self, source.name)
        return network

    def index(self, name: str) -> int:
        """The place of a source among the C sources of `evidence`."""
        return [source.name for source in self.known].index(name)

    # --- what there is to copy ----------------------------------------------------------------------------------------

    def present(self, inputs: Inputs) -> list[CopySource]:
        """The sources of this head that have something to copy from in a batch."""
        return [source for source in self.known if self.network(source) is not None and source.is_present(inputs)]

    def sources(self, inputs: Inputs) -> dict[str, Votes]:
        """The votes of all sources by name; empty if there is nothing to copy from."""
        return {source.name: source.of_batch(inputs, self.chunk_length) for source in self.present(inputs)}

    def evidence(self, sources: dict[str, Votes], labels: Tensor) -> Evidence:
        """What the sources say about labels [B, T]."""
        absent = torch.zeros(*labels.shape, len(MATCH_LENGTHS), 4, device=labels.device), torch.zeros_like(labels)
        with torch.no_grad():
            found = [
                sources[source.name].evidence(labels) if source.name in sources else absent for source in self.known
            ]
        return Evidence(*(torch.stack(parts, 2) for parts in zip(*found, strict=True)))

    def learns_trust(self, inputs: Inputs) -> bool:
        """Whether a text must earn trust in copying: outside of training, if it can copy from a source that the switch
        covers."""
        return not self.training and any(source.switched for source in self.present(inputs))

    # --- shares -------------------------------------------------------------------------------------------------------

    def log_odds(self, log_top: Tensor, log_best: Tensor, votes: Tensor) -> Tensor:
        """Log-odds of the sources and lengths against the vocabulary, float32 [B, T, C L]; -inf where nothing votes.

        Args:
            log_top: log-probability of the vocabulary's likeliest token, float32 [B, T].
            log_best: log-probability of the best candidate of each source, float32 [B, T, C].
            votes: from `evidence`.
        """
        size, agree = votes[..., 0], votes[..., 1]  # [B, T, C, L]; a size is 0, or 1 and more
        # Four numbers between 0 and about 1 for each source and length: are there votes, how many (a logarithm: 100
        # votes are not ten times as certain as 10), do they agree, and do all of them agree.
        by_length = torch.stack((size.clamp(max=1), size / 4, agree, (agree > ALL_AGREE).float()), -1).flatten(2)
        # A sure vocabulary keeps its share. As a probability and as a logarithm: the first tells .9 from .99, the
        # second .01 from .1.
        sure = torch.stack((2 * log_top.exp() - 1, log_top.clamp(min=-4.0) / 2 + 1), -1)
        features = torch.cat((sure, by_length), -1)  # [B, T, features]
        # What the vocabulary gives each best candidate, and whether it is its likeliest token too.
        is_top = (log_best >= log_top[..., None]).float()
        of_best = torch.stack((log_best.exp(), log_best.clamp(min=-16.0) / 8 + 1, is_top), -1)  # [B, T, C, 3]
        of_best = of_best.where((size > 0).any(-1, keepdim=True), 0.0).flatten(2)
        absent = size.new_zeros(*log_top.shape, len(MATCH_LENGTHS))  # its size is 0, so it is masked below
        networks = map(self.network, self.known)
        odds = [absent if network is None else network(features, of_best) for network in networks]
        return torch.stack(odds, 2).masked_fill(size == 0, -torch.inf).flatten(2)

    def losses(self, vocabulary: TokenLosses, labels: Tensor, evidence: Evidence) -> Tensor:
        """Losses of labels [B, T] with the shares as they are, float32 [B, T]; 0 for ignored labels.

        Args:
            vocabulary: of the labels, without gradients.
            labels: int64 [B, T].
            evidence: from `evidence`.
        """
        with torch.autocast(labels.device.type, enabled=False):
            shares = _shares(self._odds(vocabulary, evidence))
            return _mixed(vocabulary.nats, shares, evidence.votes).masked_fill(labels == IGNORED_LABEL, 0.0)

    def _odds(self, vocabulary: TokenLosses, evidence: Evidence) -> Tensor:
        """Log-odds [B, T, C L] of all tokens."""
        return self.log_odds(vocabulary.log_top, vocabulary.log_best, evidence.votes)

    def trusted_losses(self, vocabulary: TokenLosses, evidence: Evidence, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Losses with the trust that the text before each token earned, and this trust [B, T, S] (`switch.py`).

        Args:
            vocabulary: of all following tokens (`Inputs.following`).
            evidence: about these tokens, from `evidence`.
            inputs: of the model.
        """
        starts = None
        if inputs.documents is not None:
            starts = document_starts(inputs.documents, self.chunk_length, inputs.tokens.shape[1])
        with torch.autocast(evidence.votes.device.type, enabled=False):
            odds = self._odds(vocabulary, evidence)
            trust = trust_of(self._log_p(odds, vocabulary, evidence.votes), self.switch, starts)
            return _mixed(vocabulary.nats, self._trusted(odds, trust), evidence.votes), trust

    def trust_after(self, vocabulary: TokenLosses, evidence: Evidence, earns: Tensor) -> Tensor:
        """Trust [S] after one text, earned by some of its tokens.

        Args:
            vocabulary: [1, T], of all following tokens (`Inputs.following`).
            evidence: about these tokens, from `evidence`.
            earns: numbers of the tokens whose following token earns trust, int64 [n].
        """
        with torch.autocast(evidence.votes.device.type, enabled=False):
            log_p = self._log_p(self._odds(vocabulary, evidence), vocabulary, evidence.votes)
            # `trust_of` does not use the last row.
            return trust_of(F.pad(log_p[:, earns], (0, 0, 0, 1)), self.switch)[0, -1]

    def _log_p(self, odds: Tensor, vocabulary: TokenLosses, votes: Tensor) -> Tensor:
        """Log-probabilities of the labels with each expert, [B, T, S]: these decide how far it is trusted after them."""
        each = [_mixed(vocabulary.nats, shares, votes) for shares in self._by_expert(odds).unbind(-1)]
        return -torch.stack(each, -1)

    def losses_with(
        self, vocabulary: TokenLosses, evidence: Evidence, trust: Tensor, copy_strength: Tensor | None = None
    ) -> Tensor:
        """Losses with a given trust [B, T, S], see `trusted_losses` and `mix`."""
        with torch.autocast(evidence.votes.device.type, enabled=False):
            odds = self._odds(vocabulary, evidence)
            return _mixed(vocabulary.nats, self._trusted(odds, trust, copy_strength), evidence.votes)

    def mix(
        self,
        logits: Tensor,
        sources: dict[str, Votes],
        evidence: Evidence,
        tokens: slice = slice(None),
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities [B, T', V] of the mixture, from the logits [B, T', V] of some tokens.

        Args:
            logits: of the vocabulary.
            sources: from `sources`, of all T tokens.
            evidence: from `evidence`, about any labels [B, T].
            tokens: T' of the T tokens.
            trust: in each expert, float32 [B, T, S], see `trusted_losses`; None = the shares as they are.
            copy_strength: factor of the odds of sources of retrieval, float32 [B, T] or [B, 1]; None = 1. 0 is
                retrieval OFF.
        """
        with torch.autocast(logits.device.type, enabled=False):
            log_p = logits.float().log_softmax(-1)
            votes, best = evidence
            log_top, log_best = log_p.new_zeros(best.shape[:2]), log_p.new_zeros(best.shape)
            log_top[:, tokens] = log_p.detach().amax(-1)  # as in training, the gates do not train the vocabulary
            log_best[:, tokens] = log_p.detach().gather(-1, best[:, tokens])
            shares = self._trusted(self.log_odds(log_top, log_best, votes), trust, copy_strength)
            by_source = shares[..., 1:].exp().unflatten(-1, (len(self.known), len(MATCH_LENGTHS)))
            kept, found = _kept(shares, votes)[:, tokens, None], list[tuple[Tensor, Tensor]]()
            # Logits of a whole batch are large: in place, unless autograd needs them.
            mixed = log_p + kept if log_p.requires_grad or kept.requires_grad else log_p.add_(kept)
            for number, source in enumerate(self.known):
                if source.name in sources:
                    candidates = sources[source.name].candidates(by_source[:, :, number], votes[:, :, number, :, 0])
                    found.append((candidates[0][:, tokens], candidates[1][:, tokens]))
            return _with_copied(mixed, *(torch.cat(parts, 2) for parts in zip(*found, strict=True))) if found else mixed

    def _by_expert(self, odds: Tensor) -> Tensor:
        """Logs of the shares of each expert: [B, T, 1 + C L, S]."""
        moved = odds.clamp(min=REMOVED)[..., None] + _columns(self.moves, odds.device)  # [B, T, C L, S]
        return F.pad(moved, (0, 0, 1, 0)).log_softmax(-2)

    def _trusted(self, odds: Tensor, trust: Tensor | None, copy_strength: Tensor | None = None) -> Tensor:
        """Logs of the shares of the vocabulary and all others, [B, T, 1 + C L], with trust [B, T, S]."""
        if copy_strength is not None:
            odds = odds + copy_strength.log()[..., None].where(self._of_retrieval(odds.device), 0.0)
        shares = _shares(odds)
        if trust is None:
            return shares
        mixed = self._by_expert(odds) + trust.log()[:, :, None]
        # A token that these sources have nothing for has the shares of the last expert, to the bit.
        switched = odds.masked_fill(~self._switched(odds.device), -torch.inf)
        return mixed.logsumexp(-1).where(switched.amax(-1, keepdim=True) > -torch.inf, shares)

    def _switched(self, device: torch.device) -> Tensor:
        """Which columns of log-odds must earn trust: bool [C L]."""
        return _columns(tuple(source.switched for source in self.known), device)

    def _of_retrieval(self, device: torch.device) -> Tensor:
        """Which columns of log-odds retrieval OFF removes: bool [C L]."""
        return _columns(tuple(source.of_retrieval for source in self.known), device)

    # --- where tokens were copied from --------------------------------------------------------------------------------

    def origins(
        self,
        log_top: Tensor,
        log_best: Tensor,
        labels: Tensor,
        losses: Tensor,
        sources: dict[str, Votes],
        neighbor_length: int,
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Origins:
        """Find where labels [B, T] were copied from.

        Args:
            log_top: see `log_odds`.
            log_best: see `log_odds`.
            labels: int64 [B, T]; nothing votes for `IGNORED_LABEL`.
            losses: of the labels in nats, float32 [B, T].
            sources: from `sources`.
            neighbor_length: R.
            trust: see `mix`.
            copy_strength: see `mix`.
        """
        none = torch.full_like(labels, -1)
        if not sources:
            return Origins(losses.new_zeros(*losses.shape, len(self.known)), none, none, none)
        with torch.autocast(losses.device.type, enabled=False):
            votes = self.evidence(sources, labels).votes
            shares = self._trusted(self.log_odds(log_top, log_best, votes), trust, copy_strength)[..., 1:]
            # Shares times votes over the probability of the label, exp(-loss). Rounded, it can exceed 1.
            parts = shares.unflatten(-1, (len(self.known), len(MATCH_LENGTHS))) + losses.float()[..., None, None]
            copied = (parts.exp() * votes[..., 2]).sum(-1).clamp(max=1.0)  # [B, T, C]
        source = sources.get(NEIGHBORS.name)
        if source is None:
            return Origins(copied, none, none, none)
        assert isinstance(source, SourceMatches)
        matches = source.matches
        right = (matches.following[:, None] == source.split(labels)[..., None]) & (matches.lengths >= MATCH_LENGTHS[0])
        lengths, best = matches.lengths.masked_fill(~right, -1).long().max(2)
        num_tokens = labels.shape[1]
        lengths, best = source.join(lengths, num_tokens, fill=-1), source.join(best, num_tokens, fill=-1)
        best = best.masked_fill(lengths < 0, -1)
        positions = (best % neighbor_length + 1).where(best >= 0, none)
        return Origins(copied, lengths, best.div(neighbor_length, rounding_mode="floor"), positions)


@cache
def _columns(of_sources: tuple[bool | tuple[float, ...], ...], device: torch.device) -> Tensor:
    """The values of each source [C, ...] for each of its columns of log-odds, [C L, ...]."""
    with torch.inference_mode(False):  # kept for callers with gradients too
        return torch.tensor(of_sources, device=device).repeat_interleave(len(MATCH_LENGTHS), 0)


def _shares(odds: Tensor) -> Tensor:
    """Logs of the shares of the vocabulary and all others, [B, T, 1 + C L], from log-odds [B, T, C L]."""
    return F.pad(odds, (1, 0)).log_softmax(-1)


def _kept(shares: Tensor, votes: Tensor) -> Tensor:
    """Log of what the vocabulary keeps, [B, T]: its own share, and that of votes for tokens that are not known."""
    # The datastore names the tokens of most votes, not of all. What is left of a share cannot be copied, so the
    # vocabulary gets it: the mixture stays a distribution.
    unknown = (shares[..., 1:].exp() * (1 - votes[..., 3].flatten(2))).sum(-1)
    return torch.logaddexp(shares[..., 0], unknown.clamp(min=_TINY).log())


def _with_copied(log_p: Tensor, following: Tensor, weights: Tensor) -> Tensor:
    """Add probabilities [B, T, S] of tokens [B, T, S] to log-probabilities [B, T, V], which may be changed.

    A token can occur several times. One that has no probability, since it is forbidden, gets none. Few tokens can be
    copied, so only their logarithms are computed.
    """
    copied = torch.zeros_like(log_p).scatter_add_(2, following, weights)
    # A candidate may have no probability: the smallest number instead of log 0, whose gradient would be NaN.
    added = copied.gather(2, following).clamp(min=_TINY).log()
    before = log_p.gather(2, following)
    values = torch.logaddexp(before, added).where(before > -torch.inf, before)
    if not values.requires_grad:
        return log_p.scatter_(2, following, values)
    # A token that occurs n times is written n times with the same value, so each of these has 1/n of the gradient.
    times = torch.zeros_like(log_p).scatter_add_(2, following, torch.ones_like(weights)).gather(2, following)
    return log_p.scatter(2, following, values.detach() + (values - values.detach()) / times)


def _mixed(nats: Tensor, shares: Tensor, votes: Tensor) -> Tensor:
    """Losses [B, T] of the mixture from those of the vocabulary [B, T] and logs of shares [B, T, 1 + C L]."""
    copied = (shares[..., 1:].exp() * votes[..., 2].flatten(2)).sum(-1)
    return mixed_losses(nats, _kept(shares, votes), copied)
