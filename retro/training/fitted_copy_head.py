"""Fit copying from neighbors to a trained model with a few forward passes, without training.

The scores of positions and the gates of a copy head are 51 numbers, tables by match length (`CopySource.tables`). The loss of a
token depends on them only through what a forward pass gives once: the loss without this source, and the votes.

    batches ─ forward passes ─► 38 numbers per token ─ L-BFGS on the mean loss ─► tables
"""

import copy
import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from retro.device import Placement
from retro.model.copy_head import CopyHead, CopySource
from retro.model.copy_matches import count_votes, longest_match
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro

log = logging.getLogger("retro")

_PULL = 0.5
"""Nats that a number of a table costs at a distance of 1 from its start. It matters for lengths that few tokens have."""
_STEPS = 200


class CopyFit(NamedTuple):
    """What fitting did. Losses are means in nats, over the tokens that can read a neighbor.

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


class Tokens(NamedTuple):
    """n tokens that can read a neighbor, on the CPU.

    Attributes:
        nats: loss without copying from neighbors, float32 [n].
        kept: log of the share that the vocabulary has without it, float32 [n]: 0 unless the model copies from its context.
        wrong: positions by match length that vote for another token than the label, float32 [n, 17].
        right: those that vote for the label, float32 [n, 17].
        longest: length of the longest match, int64 [n].
        agree: whether all matches as long vote for one token, bool [n].
    """

    nats: Tensor
    kept: Tensor
    wrong: Tensor
    right: Tensor
    longest: Tensor
    agree: Tensor


def fit_copy_head(model: Retro, batches: Iterable[Inputs], placement: Placement) -> CopyFit:
    """Set the tables of copying from neighbors. All other weights stay the same.

    Args:
        model: a trained model with `copy_head.neighbors`, on the device of the placement.
        batches: as for training; some thousand tokens. Those without neighbors are skipped.
        placement: device and precision.
    """
    head, training = model.copy_head, model.training
    assert head is not None
    assert head.neighbors is not None
    model.eval()
    reads = [_read(model, head, batch, placement) for batch in batches if batch.retrieves]
    model.train(training)
    if not reads:
        log.warning("copying from neighbors is not fitted: the batches have no neighbors")
        return CopyFit(0, 0.0, 0.0, 0.0)
    parts, off = zip(*reads, strict=True)
    tokens = Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
    source = copy.deepcopy(head.neighbors).cpu()
    before, after = fit_source(source, tokens)
    head.neighbors.load_state_dict(source.state_dict())
    fit = CopyFit(len(tokens.nats), float(torch.cat(off).sum()) / max(1, len(tokens.nats)), before, after)
    log.info(
        "copying from neighbors is fitted to %s tokens: loss %.4f before, %.4f after, %.4f with retrieval OFF",
        *(f"{fit.num_tokens:,}", fit.before, fit.after, fit.off),
    )
    return fit


@torch.no_grad()
def _read(model: Retro, head: CopyHead, batch: Inputs, placement: Placement) -> tuple[Tokens, Tensor]:
    """The tokens of a batch that can read a neighbor, and their losses with retrieval OFF, float32 [n]."""
    *others, own = model.copy_sources(batch)
    labels = batch.labels
    with placement.autocast():
        hidden, _ = model.hidden(batch)
        mixture = head.mixture(hidden, labels, others)
        off = nats = token_losses(hidden, model.output_weight, labels, mixture)
        if model.settings.activations_read:
            off = model.token_losses(batch.off())
    longest, agree = longest_match(own.matches)
    counted = own.split((labels != IGNORED_LABEL).int()).bool() & (longest >= 0)
    by_query = (
        own.split(nats),
        own.split(mixture.log_keep),
        *count_votes(own.matches, own.split(labels)),
        longest,
        agree,
    )
    return Tokens(*(values[counted].cpu() for values in by_query)), own.split(off)[counted].cpu()


def fit_source(source: CopySource, tokens: Tokens) -> tuple[float, float]:
    """Fit the tables of a source on the CPU; returns the mean loss before and after."""
    tables, initial = (source.scores, source.agreed, source.disagreed), source.tables.detach()
    optimizer = torch.optim.LBFGS(tables, max_iter=_STEPS, line_search_fn="strong_wolfe")
    count = max(1, len(tokens.nats))

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = (
            nats_with_copying(source, tokens).sum() / count + _PULL / count * (source.tables - initial).square().sum()
        )
        value.backward()
        return value

    with torch.enable_grad():
        before = float(objective().detach())
        optimizer.step(objective)
    optimizer.zero_grad()
    with torch.no_grad():
        after = float(nats_with_copying(source, tokens).sum() / count)
    return before, after


def nats_with_copying(source: CopySource, tokens: Tokens) -> Tensor:
    """The loss of each token with copying from neighbors [n].

    The gate's log-odds are those against the vocabulary alone. Against all that the model predicts without this source they are
    lower by the log of 1 / `kept`.
    """
    odds = source.log_odds(tokens.longest, tokens.agree) + tokens.kept
    copied = source.probability(tokens.wrong, tokens.right).clamp(min=torch.finfo(torch.float32).tiny).log()
    return -torch.logaddexp(F.logsigmoid(-odds) - tokens.nats, F.logsigmoid(odds) + copied)
