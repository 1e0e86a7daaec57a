"""Fit the weights that every copy head begins with, `retro/copying/weights.safetensors`, to several models and their
training text.

    retro import MODEL --output base.safetensors
    retro index CONFIG                                        # once for each datastore, with `suffixes` at least
    python -m benchmarks.quality.copy_weights base.safetensors=DATASTORE ... --parts FOLDER --output FILE.safetensors

One set of networks for all of them, so that it fits other text and other models. Models that have read little text
teach it that an unsure model gains more from a copy. Losses count in parts of those with retrieval OFF, so that those
of such models do not count for more. Sources are left out at random, token by token, since not every model has all of
them. No held-out document is read. A fifth of the sequences of each datastore is not fitted to: the weights are those
of the step with the least loss there.

The table has the change against OFF, without the switch, of these sequences: with the weights that the package has now,
with new ones that do not read the best candidates, with the new ones, with those that were fitted without this
datastore, and with those that `retro add-retrieval` would fit to it.
"""

import argparse
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from benchmarks.common import Budget, add_minutes, add_precision, budget, placement, say
from indexing.store.files import write_bytes
from retro.batch.loss import Evidence, TokenLosses
from retro.checkpoints.any_model import open_model
from retro.copying.head import STEP, CopyHead
from retro.copying.network_file import LATER, write_networks
from retro.copying.sources import SOURCES
from retro.training.fitted_copy_head import TokensToFit, all_sources, fit_networks, joined, tokens_to_fit

NAMES = [source.name for source in SOURCES]
LEFT_OUT = 0.25
"""Chance that a source is left out for a token."""
BATCH_TOKENS = 4096


class Kind(NamedTuple):
    """Tokens of one model and datastore: those that are fitted to, and the others."""

    fitted: TokensToFit
    checked: TokensToFit


def tokens_of(base: Path, folder: Path, options: argparse.Namespace, limit: Budget) -> Kind:
    """What is known about the tokens of training text, from a file if an earlier run has read them."""
    file = (
        options.parts
        / f"{base.stem}-{folder.name}-{options.tokens}-tokens-k{options.k}-{options.precision}.safetensors"
    )
    if file.exists():
        say(f"{base.stem} {folder.name}: from {file}")
        return _kind(load_file(file))
    place = placement(options.precision)
    model, batches = all_sources(open_model(base), folder, place, k=options.k, num_tokens=options.tokens)
    sequences = list(batches)
    found = [tokens_to_fit(model.eval(), batch, place, ["context"]) for batch in limit.each(sequences, "sequence")]
    parts = [part[0] for part in found if part is not None]
    kind = Kind(joined([part for number, part in enumerate(parts) if number % 5]), joined(parts[::5]))
    if len(found) == len(sequences):  # the time was enough
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, save(_tensors(kind)))
    return kind


def _tensors(kind: Kind) -> dict[str, Tensor]:
    """A kind as tensors with names."""
    halves = {name: (*tokens.vocabulary, *tokens.evidence) for name, tokens in kind._asdict().items()}
    return {f"{name}.{number}": part for name, parts in halves.items() for number, part in enumerate(parts)}


def _kind(tensors: Mapping[str, Tensor]) -> Kind:
    """The kind with these `_tensors`."""
    halves = ([tensors[f"{name}.{number}"] for number in range(len(tensors) // 2)] for name in Kind._fields)
    return Kind(*(TokensToFit(TokenLosses(*half[:3]), Evidence(*half[3:])) for half in halves))


def some(tokens: TokensToFit, rows: Tensor, left_out: float) -> TokensToFit:
    """Some of the tokens, without some of their sources."""
    votes, best = (part[:, rows] for part in tokens.evidence)
    kept = torch.rand(1, len(rows), len(NAMES), 1, 1) >= left_out
    return TokensToFit(TokenLosses(*(part[:, rows] for part in tokens.vocabulary)), Evidence(votes * kept, best))


def fit(kinds: Sequence[Kind], steps: int, reads_best: bool = True) -> CopyHead:
    """Fit all networks from random weights; they can ignore the best candidates."""
    torch.manual_seed(0)
    head, fitted = CopyHead(NAMES, 1), joined([kind.fitted for kind in kinds])
    weights = torch.cat([torch.full_like(kind.fitted.vocabulary.nats, 1 / off_of(kind)) for kind in kinds], 1)[0]
    for name, parameter in head.named_parameters():
        of_layer = name.rsplit(".", 1)[1]
        with torch.no_grad():
            if of_layer == "inner":
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.fill_(-2.0 / STEP if of_layer == "outer_bias" else 0.0)
    read = [pair for pair in head.named_parameters() if reads_best or not pair[0].endswith(LATER)]
    inner = [parameter for name, parameter in read if "inner" in name]
    outer = [parameter for name, parameter in head.named_parameters() if "outer" in name]
    groups: list[dict[str, Any]] = [{"params": inner}, {"params": outer, "lr": 0.01 / STEP}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    best, state = float("inf"), head.state_dict()
    for step in range(steps):
        rows = torch.randint(len(weights), (BATCH_TOKENS,))
        optimizer.zero_grad()
        (some(fitted, rows, LEFT_OUT).losses(head)[0] * weights[rows]).mean().backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            loss = sum(mean_loss(head, kind.checked) / off_of(kind) for kind in kinds)
            if loss < best:
                best, state = loss, {name: tensor.clone() for name, tensor in head.state_dict().items()}
    head.load_state_dict(state)
    return head


def off_of(kind: Kind) -> float:
    """Nats of a token with retrieval OFF."""
    return float(kind.checked.vocabulary.nats.mean())


@torch.no_grad()
def mean_loss(head: CopyHead, tokens: TokensToFit) -> float:
    """Nats of a token."""
    return float(tokens.losses(head).mean())


def compare(kinds: Mapping[str, Kind], new: CopyHead, steps: int) -> None:
    """Print the table."""
    now = CopyHead(NAMES, 1)
    now.initialize()
    blind = fit([*kinds.values()], steps, reads_best=False)
    say(
        "change against OFF: weights of the package, without best candidates, new, without this datastore, fitted to it"
    )
    for name, kind in kinds.items():
        others = fit([kind for other, kind in kinds.items() if other != name], steps)
        fitted = copy.deepcopy(new)
        fit_networks(fitted, NAMES, kind.fitted)
        off = off_of(kind)
        changes = [100 * (mean_loss(head, kind.checked) / off - 1) for head in (now, blind, new, others, fitted)]
        say(f"{name:30} OFF {off:.3f} nats   " + "  ".join(f"{change:+6.2f}%" for change in changes))


def run(options: argparse.Namespace) -> None:
    """Fit, and write the weights."""
    limit, pairs = budget(options), [tuple(map(Path, pair.split("="))) for pair in options.pairs]
    kinds = {
        f"{base.stem} {folder.name}": tokens_of(base, folder, options, limit.share(len(pairs) - number))
        for number, (base, folder) in enumerate(pairs)
    }
    head = fit([*kinds.values()], options.steps)
    about = {
        "made_by": "python -m benchmarks.quality.copy_weights",
        "fitted_to": [*kinds],
        "tokens": sum(kind.fitted.vocabulary.nats.numel() for kind in kinds.values()),
    }
    write_networks(options.output, about, head.state_dict())
    compare(kinds, head, options.steps)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs", nargs="+", metavar="BASE=DATASTORE", help="a model and a datastore made with its tokenizer"
    )
    parser.add_argument("--output", type=Path, required=True, help="FILE.safetensors")
    parser.add_argument("--parts", type=Path, required=True, help="folder for what was read of each pair")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of training text of each datastore")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each fit")
    parser.add_argument("--k", type=int, default=4, help="neighbors of each chunk")
    add_precision(parser)
    add_minutes(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
