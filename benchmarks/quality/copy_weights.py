"""Fit the weights that every copy head begins with, `retro/copying/weights.safetensors`, to several models and their
training text.

    retro import MODEL --output base.safetensors
    retro index CONFIG                                        # once for each datastore, with its votes
    python -m benchmarks.quality.copy_weights base.safetensors=DATASTORE ... --output retro/copying/weights.safetensors

One set of networks for all of them, so that it fits other text and other models. Models that have read little text
teach it that an unsure model gains more from a copy. Sources are left out at random, token by token, since not every
model has all of them. No held-out document is read. A fifth of the sequences of each datastore is not fitted to, and
stops the fit.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Budget, add_minutes, add_precision, budget, placement, say
from indexing.store.datastore import Datastore
from retro.batch.loss import Evidence, TokenLosses
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.copying.head import STEP, CopyHead
from retro.copying.network_file import write_networks
from retro.copying.sources import SOURCES
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
from retro.model_settings import updated
from retro.training.fitted_copy_head import SPAN, TokensToFit, joined, read_batches, tokens_to_fit

NAMES = [source.name for source in SOURCES]
LEFT_OUT = 0.25
"""Chance that a source is left out for a token."""
BATCH_TOKENS = 4096
PATIENCE = 10  # checks


def tokens_of(base: Path, folder: Path, options: argparse.Namespace, limit: Budget) -> list[TokensToFit]:
    """What is known about the tokens of each sequence of training text."""
    datastore, place, checkpoint = Datastore.open(folder), placement(options.precision), open_checkpoint(base)
    changes = {"chunk_length": datastore.chunk_length}
    model = load_model(replace(checkpoint, model=updated(checkpoint.model, changes)), place.device).eval()
    model.settings = updated(model.settings, {f"copy_head.{name}": True for name in NAMES})
    model.copy_head = CopyHead(NAMES, datastore.chunk_length)  # its weights do not matter
    place.cast(model)
    data = DataSettings(datastores=(folder,), sequence_length=SPAN, k=options.k)
    source = TrainingData(data.datastores, data, retrieval=True, votes=True)
    parts = list[TokensToFit]()
    for batch in limit.each(list(read_batches(source, options.tokens // SPAN, place)), "sequence"):
        part, _ = tokens_to_fit(model, batch, place, NAMES) or (None, None)
        parts += [] if part is None else [part]
    say(f"{folder.name}: {sum(part.vocabulary.nats.numel() for part in parts):,} tokens")
    return parts


def some(tokens: TokensToFit, rows: Tensor, left_out: float) -> TokensToFit:
    """Some of the tokens, without some of their sources."""
    votes, best = (part[:, rows] for part in tokens.evidence)
    kept = torch.rand(1, len(rows), len(NAMES), 1, 1) >= left_out
    return TokensToFit(TokenLosses(*(part[:, rows] for part in tokens.vocabulary)), Evidence(votes * kept, best))


def fit(head: CopyHead, fitted: TokensToFit, checked: TokensToFit, steps: int) -> float:
    """Fit all networks from random weights; returns the mean loss of the tokens that were not fitted to."""
    for name, parameter in head.named_parameters():
        of_layer = name.rsplit(".", 1)[1]
        with torch.no_grad():
            if of_layer == "inner":
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.fill_(-2.0 / STEP if of_layer == "outer_bias" else 0.0)
    inner = [parameter for name, parameter in head.named_parameters() if "inner" in name]
    outer = [parameter for name, parameter in head.named_parameters() if "outer" in name]
    groups: list[dict[str, Any]] = [{"params": inner}, {"params": outer, "lr": 0.01 / STEP}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05)
    best, state, since, count = float("inf"), head.state_dict(), 0, fitted.vocabulary.nats.numel()
    for step in range(steps):
        part = some(fitted, torch.randint(count, (BATCH_TOKENS,)), LEFT_OUT)
        optimizer.zero_grad()
        part.losses(head).mean().backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                loss = float(checked.losses(head).mean())
            since = 0 if loss < best - 1e-5 else since + 1
            if not since:
                best, state = loss, {name: tensor.clone() for name, tensor in head.state_dict().items()}
            if since == PATIENCE:
                break
    head.load_state_dict(state)
    return best


def run(options: argparse.Namespace) -> None:
    """Fit, and write the weights."""
    torch.manual_seed(0)
    fitted, checked = list[TokensToFit](), list[TokensToFit]()
    limit, pairs = budget(options), [pair.split("=") for pair in options.pairs]
    for number, (base, folder) in enumerate(pairs):
        parts = tokens_of(Path(base), Path(folder), options, limit.share(len(pairs) - number))
        fitted += [part for number, part in enumerate(parts) if number % 5]
        checked += parts[::5]
    head = CopyHead(NAMES, 1)
    checks = joined(checked)
    off, loss = float(checks.vocabulary.nats.mean()), fit(head, joined(fitted), checks, options.steps)
    say(f"loss {loss:.4f}, OFF {off:.4f}")
    about = {
        "made_by": "python -m benchmarks.quality.copy_weights",
        "fitted_to": [f"{Path(base).stem} and {Path(folder).name}" for base, folder in pairs],
        "fit": {"tokens": sum(part.vocabulary.nats.numel() for part in fitted), "loss_off": off, "loss_after": loss},
    }
    write_networks(options.output, about, head.state_dict())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs", nargs="+", metavar="BASE=DATASTORE", help="a model and a datastore made with its tokenizer"
    )
    parser.add_argument("--output", type=Path, required=True, help="FILE.safetensors")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of training text of each datastore")
    parser.add_argument("--steps", type=int, default=3000, help="largest number of steps")
    parser.add_argument("--k", type=int, default=4, help="neighbors of each chunk")
    add_precision(parser)
    add_minutes(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
