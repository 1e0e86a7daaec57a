"""Choices of the decoder that reads neighbors: their number, a bias on their scores, layers that read, near copies removed.

    python -m benchmarks.quality.reader_choices smollm2.safetensors NAME=PATH ... --output FOLDER [--tokens 4096]

Datastores and windows are those of `decoder_reader` in the same FOLDER; two neighbors where nothing else is said. The bias has a number for each layer and head,
and is fitted to training text by gradients, everything else frozen.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import budget, markdown, measured_on, model_parser, percent, say
from benchmarks.quality.decoder_reader import WINDOW, Corpus
from pipelines.results import Table
from retro.data.batches import TrainingData
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.model import reader
from retro.model.inputs import Inputs
from retro.model.loss import loss
from retro.training.fitted_retrieval import read_batches

K = 2
RATE = 0.1


class Bias:
    """A number for each layer and head, added to the scores of neighbors: [L, H]."""

    def __init__(self, model: Any) -> None:
        self.value = torch.zeros(model.settings.num_layers, model.settings.attention.num_heads)
        self.layer = 0
        original = reader.dot_product_attention_with_lse

        def biased(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any
        ) -> tuple[Tensor, Tensor]:
            y, lse = original(q, k, v, mask=mask, causal=causal, scale=scale)
            return y, lse if causal else lse + self.value[self.layer][:, None]  # text is causal, neighbors are not

        reader.dot_product_attention_with_lse = biased  # type: ignore[assignment]
        for number, layer in enumerate(model.layers):
            layer.attention.block.register_forward_pre_hook(lambda *_, number=number: setattr(self, "layer", number))


def fit(bias: Bias, corpus: Corpus, tokens: int) -> Tensor:
    """The bias after a pass over training text."""
    model, place, folder = corpus.losses.model, corpus.losses.place, corpus.held_out.datastore.folder
    data = DataSettings(datastores=(folder,), sequence_length=WINDOW, k=K)
    bias.value = torch.zeros_like(bias.value, requires_grad=True)
    optimizer = torch.optim.Adam([bias.value], lr=RATE)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for number, batch in enumerate(
        read_batches(TrainingData((folder,), data, retrieval=True), tokens // WINDOW, place)
    ):
        with place.autocast():
            hidden, _ = model.hidden(batch)
            mean = loss(hidden, model.output_weight, batch.labels)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        say(f"{corpus.name}: batch {number + 1}: {mean.item():.4f} nats, mean bias {bias.value.mean().item():+.3f}")
    return bias.value.detach()


def measure(corpus: Corpus, options: Namespace) -> dict[str, SetResult]:
    """Bits per byte of every choice."""
    model, place = corpus.losses.model, corpus.losses.place
    bias = Bias(model)
    zero, closed = torch.zeros_like(bias.value), -torch.inf

    def losses(inputs: Inputs) -> Tensor:
        with torch.inference_mode(), place.autocast():
            return model.token_losses(inputs)

    results = {
        "OFF": corpus.score("OFF", NeighborUse(0), losses),
        "as it is": corpus.score("as it is", NeighborUse(K), losses),
    }
    for k in (1, 4, 8):
        results[f"{k} neighbors"] = corpus.score(f"{k} neighbors", NeighborUse(k), losses)
    num_layers = len(zero)
    third = num_layers // 3
    for name, reads in {
        f"layers 1 to {2 * third} read": range(2 * third),
        f"layers {third + 1} to {num_layers} read": range(third, num_layers),
        "every other layer reads": range(1, num_layers, 2),
    }.items():
        bias.value = torch.full_like(zero, closed)
        bias.value[list(reads)] = 0
        results[name] = corpus.score(name, NeighborUse(K), losses)
    for shift in (-1.0, 1.0):
        bias.value = zero + shift
        results[f"bias {shift:+.0f}"] = corpus.score(f"bias {shift:+.0f}", NeighborUse(K), losses)
    bias.value = zero
    for overlap in (0.5, 0.25):
        name = f"at most {overlap:.0%} of a chunk's tokens shared"
        results[name] = corpus.score(name, NeighborUse(K, max_overlap=overlap), losses)
    bias.value = fit(bias, corpus, options.fitted_tokens)
    torch.save(bias.value, options.output / f"{corpus.name}.bias.pt")
    results["fitted bias"] = corpus.score("fitted bias", NeighborUse(K), losses)
    results["fitted bias, random neighbors"] = corpus.score("fitted bias, random", NeighborUse(K, "random"), losses)
    return results


def main() -> None:
    """Measure corpora, and print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("corpus", nargs="*", help="NAME=PATH")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens of each corpus")
    parser.add_argument("--fitted-tokens", type=int, default=12_288, help="tokens of training text for the bias")
    parser.add_argument("--chunk-length", type=int, default=32, help="of new datastores")
    options = parser.parse_args()
    say(json.dumps(measured_on()))
    for entry in budget(options).each(options.corpus, "corpus"):
        name, _, path = entry.partition("=")
        results = measure(Corpus.open(Path(options.base), name, path, options), options)
        off = results["OFF"]
        body = [
            [row, f"{one.bits_per_byte:.4f}" if one is off else percent(compare(one, off))]
            for row, one in results.items()
        ]
        say(markdown(Table(["", f"{name}, {off.tokens:,} tokens of {off.documents} documents"], body)))


if __name__ == "__main__":
    main()
