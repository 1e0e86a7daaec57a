"""Fit sources of the copy head to a trained model with a few forward passes, without training.

The scores of positions and the gates are some dozens of numbers, tables by match length (`CopySource.tables`,
`DatastoreSource.tables`), and one weight for each activation (`gate`): a model's activations tell how sure it is of the next token.
The loss of a token depends on them only through what a forward pass gives once: the loss without these sources, the votes, and
the last hidden state. Tables and gates of all sources are fitted together.

    batches ─ forward passes ─► hidden state, and some numbers per source, of each token ─ L-BFGS on the mean loss ─► tables, gates
"""

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from indexing.progress import during
from retro.device import Placement
from retro.model.copy_datastore import DatastoreSource, DatastoreVotes
from retro.model.copy_head import CopyHead, CopySource, Source
from retro.model.copy_matches import count_votes, longest_match
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro

log = logging.getLogger("retro")

_PULL = 0.5
"""Nats that a number of a table costs at a distance of 1 from its start. It matters for cells that few tokens have."""
_GATE_PULL = 60.0
"""Nats that a gate costs whose log-odds would vary by 1 (root mean square) with activations of independent noise. Chosen with 20,000
tokens of three corpora: with a tenth of it the gates learn the training text, from half to twice of it makes no difference."""
_STEPS = 200


class CopyFit(NamedTuple):
    """What fitting did. Losses are means in nats, over the tokens for which one of the sources has something.

    Attributes:
        num_tokens: number of these tokens.
        off: loss with retrieval OFF. Cross-attention reads no neighbors either.
        before: loss with the initial tables.
        after: loss with the fitted tables.
    """

    num_tokens: int
    off: float
    before: float
    after: float


class MatchesOfTokens(NamedTuple):
    """What n tokens can copy from context or neighbors.

    Attributes:
        wrong: positions by match length that vote for another token than the label, float32 [n, 17].
        right: those that vote for the label, float32 [n, 17].
        longest: length of the longest match, int64 [n]; -1 = the token can read no position.
        agree: whether all matches as long vote for one token, bool [n].
    """

    wrong: Tensor
    right: Tensor
    longest: Tensor
    agree: Tensor

    def odds_and_probability(self, source: CopySource) -> tuple[Tensor, Tensor]:
        """Log-odds of the gate without the term from the activations, and the probability of the label, [n] each."""
        return source.log_odds(self.longest, self.agree), source.probability(self.wrong, self.right)


class VotesOfTokens(NamedTuple):
    """What n tokens can copy from the datastore.

    Attributes:
        length, counts: as in `DatastoreVotes`, [n] and [n, S].
        right: probability of the label, float32 [n].
    """

    length: Tensor
    counts: Tensor
    right: Tensor

    def odds_and_probability(self, source: DatastoreSource) -> tuple[Tensor, Tensor]:
        """As in `MatchesOfTokens`."""
        return source.log_odds(DatastoreVotes(source, self.length, self.counts, self.counts)), self.right


class Fitted(NamedTuple):
    """The tokens that sources are fitted to.

    Attributes:
        nats: loss without these sources, float32 [n].
        kept: log of the share that the vocabulary has without them, float32 [n]: 0 unless the model has other sources.
        hidden: activations that the gates read, float32 [n, D].
        found: what each source has for the tokens.
    """

    nats: Tensor
    kept: Tensor
    hidden: Tensor
    found: Sequence[MatchesOfTokens | VotesOfTokens]


def fit_copy_head(
    model: Retro,
    batches: Iterable[Inputs],
    placement: Placement,
    names: Sequence[str] = ("neighbors",),
    hidden: Iterable[Tensor] | None = None,
) -> CopyFit:
    """Set the tables of some sources. All other weights stay the same.

    Args:
        model: a trained model with these sources, on the device of the placement.
        batches: as for training; some thousand tokens. Those that lack one of the sources are skipped.
        placement: device and precision.
        names: the sources: `context`, `neighbors`, `datastore`.
        hidden: hidden states of the batches, if they are known; they do not depend on the copy head.
    """
    head, training = model.copy_head, model.training
    assert head is not None
    model.eval()
    pairs = ((batch, None) for batch in batches) if hidden is None else zip(batches, hidden, strict=True)
    reads = [_read(model, head, batch, states, placement, names) for batch, states in pairs]
    reads = [read for read in reads if read is not None]
    model.train(training)
    if not reads:
        log.warning("copying from %s is not fitted: the batches have none", " and ".join(names))
        return CopyFit(0, 0.0, 0.0, 0.0)
    parts, off = zip(*reads, strict=True)
    tokens = _joined(parts)
    sources = [copy.deepcopy(getattr(head, name)).cpu() for name in names]
    with during("fitting what is copied from %s", " and ".join(names)):
        before, after = fit_sources(sources, tokens)
    for name, source in zip(names, sources, strict=True):
        getattr(head, name).load_state_dict(source.state_dict())
    fit = CopyFit(len(tokens.nats), float(torch.cat(off).sum()) / max(1, len(tokens.nats)), before, after)
    log.info(
        "copying from %s is fitted to %s tokens: loss %.4f before, %.4f after, %.4f with retrieval OFF",
        *(" and ".join(names), f"{fit.num_tokens:,}", fit.before, fit.after, fit.off),
    )
    return fit


@torch.no_grad()
def _read(
    model: Retro, head: CopyHead, batch: Inputs, hidden: Tensor | None, placement: Placement, names: Sequence[str]
) -> tuple[Fitted, Tensor] | None:
    """The tokens of a batch for which a source has something, and their losses with retrieval OFF, float32 [n]; None = it lacks a source."""
    by_module = {id(source.source): source for source in model.copy_sources(batch)}
    own = [by_module.pop(id(getattr(head, name)), None) for name in names]
    if None in own:
        return None
    labels, others = batch.labels, list(by_module.values())
    with placement.autocast():
        if hidden is None:
            hidden, _ = model.hidden(batch)
        mixture = head.mixture(hidden, labels, others)
        off = nats = token_losses(hidden, model.output_weight, labels, mixture)
        if model.settings.activations_read or any(source.source is not head.context for source in others):
            off = model.token_losses(batch.off())
    found = [found_by(source, labels) for source in own if source is not None]
    present = [values.longest >= 0 if isinstance(values, MatchesOfTokens) else values.length > 0 for values in found]
    counted = (labels != IGNORED_LABEL) & torch.stack(present).any(0)

    def kept(values: Any) -> Any:
        return type(values)(*(each[counted].cpu() for each in values))

    own_nats, log_keep, activations = (values[counted].float().cpu() for values in (nats, mixture.log_keep, hidden))
    tokens = Fitted(own_nats, log_keep, activations, [kept(values) for values in found])
    return tokens, off[counted].cpu()


def found_by(source: Source, labels: Tensor) -> MatchesOfTokens | VotesOfTokens:
    """What a source has for all tokens of labels [B, T]: values [B, T, ...]."""
    if isinstance(source, DatastoreVotes):
        return VotesOfTokens(source.length, source.counts, source.probability(labels))
    longest, agree = longest_match(source.matches)
    counts = count_votes(source.matches, source.split(labels))
    num_tokens = labels.shape[1]
    wrong, right = (source.join(values, num_tokens) for values in counts)
    agree = source.join(agree.int(), num_tokens).bool()
    return MatchesOfTokens(wrong, right, source.join(longest, num_tokens, -1), agree)


def _joined(parts: Sequence[Fitted]) -> Fitted:
    """The tokens of several batches."""
    nats, kept, hidden, found = zip(*parts, strict=True)
    of_sources = [type(values[0])(*map(torch.cat, zip(*values, strict=True))) for values in zip(*found, strict=True)]
    return Fitted(torch.cat(nats), torch.cat(kept), torch.cat(hidden), of_sources)


def fit_sources(sources: Sequence[CopySource | DatastoreSource], tokens: Fitted) -> tuple[float, float]:
    """Fit the tables and gates of sources on the CPU; returns the mean loss before and after."""
    fitted = [getattr(source, name) for source in sources for name in (*source.TABLES, "gate")]
    initial = [(source.tables.detach(), source.gate.detach().clone()) for source in sources]
    optimizer = torch.optim.LBFGS(fitted, max_iter=_STEPS, line_search_fn="strong_wolfe")
    count = max(1, len(tokens.nats))
    gate_pull = _GATE_PULL * tokens.hidden.square().mean() if len(tokens.nats) else 0.0

    def objective() -> Tensor:
        optimizer.zero_grad()
        moved = [
            _PULL * (source.tables - tables).square().sum() + gate_pull * (source.gate - gate).square().sum()
            for source, (tables, gate) in zip(sources, initial, strict=True)
        ]
        value = (with_copying(sources, tokens)[0].sum() + torch.stack(moved).sum()) / count
        value.backward()
        return value

    with torch.enable_grad():
        before = float(objective().detach())
        optimizer.step(objective)
    optimizer.zero_grad()
    with torch.no_grad():
        after = float(with_copying(sources, tokens)[0].sum() / count)
    return before, after


def with_copying(sources: Sequence[Any], tokens: Fitted) -> tuple[Tensor, Tensor]:
    """The loss of each token with copying from these sources [n], and the log of the share that is not copied from them [n].

    The log-odds of a gate are those against the vocabulary alone. Against all that the model predicts without the fitted sources they
    are lower by the log of 1 / `kept`.
    """
    joint, all_odds = [-tokens.nats], [torch.zeros_like(tokens.nats)]
    for source, found in zip(sources, tokens.found, strict=True):
        odds, copied = found.odds_and_probability(source)
        odds = odds + tokens.hidden @ source.gate + tokens.kept
        all_odds.append(odds)
        joint.append(odds + copied.clamp(min=torch.finfo(torch.float32).tiny).log())
    total = torch.stack(all_odds).logsumexp(0)
    return total - torch.stack(joint).logsumexp(0), -total
