"""Where a decoder that reads neighbors should see them, and whether it should read their first token: what `retro/model/reader.py` fixes.

    python -m benchmarks.quality.decoder_reader_choices smollm2.safetensors NAME=PATH --output FOLDER [--tokens 1024] [--minutes 6]

Measures variants that the model does not have, by changing its keys, rotations and masks from outside, on the corpora and windows
of `benchmarks.quality.decoder_reader`, whose FOLDER it shares.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import add_minutes, budget, markdown, measured_on, percent, say
from benchmarks.quality.decoder_reader import OFF, Corpus
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.results import Table
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.bits_per_byte import compare
from retro.model import reader
from retro.model.inputs import Inputs
from retro.model.masks import neighbor_mask
from retro.model.positions import rotate
from retro.model.reader import ReadingAttention, ReadNeighbors, rotation_at
from retro.model.settings import ModelSettings

FIXED = "right before the document, first token not read"
Move = Callable[[ModelSettings, Tensor, ReadNeighbors, int], ReadNeighbors]
"""(settings, queries [B, T, H, C], neighbors, R) → neighbors at other positions."""


def consecutive(settings: ModelSettings, q: Tensor, neighbors: ReadNeighbors, r: int) -> ReadNeighbors:
    """Each neighbor before the preceding one."""
    at = -(torch.arange(neighbors.keys.shape[1]) // r * r)
    return neighbors._replace(keys=rotate(neighbors.keys, rotation_at(settings, at)))


def further(settings: ModelSettings, q: Tensor, neighbors: ReadNeighbors, r: int) -> ReadNeighbors:
    """All neighbors 64 tokens earlier."""
    at = torch.full((neighbors.keys.shape[1],), -64)
    return neighbors._replace(keys=rotate(neighbors.keys, rotation_at(settings, at)))


def before_window(settings: ModelSettings, q: Tensor, neighbors: ReadNeighbors, r: int) -> ReadNeighbors:
    """All neighbors right before the window, at the positions of the text."""
    at = (torch.arange(q.shape[1]) + 1) % settings.chunk_length + r
    return neighbors._replace(rotation=rotation_at(settings, at))


@contextmanager
def moved(settings: ModelSettings, r: int, move: Move) -> Iterator[None]:
    """Let attention read neighbors at other positions."""
    attend: Any = ReadingAttention.attend_to_both

    def attend_to_both(self: ReadingAttention, q: Tensor, *args: Any) -> Tensor:
        *others, neighbors = args
        return attend(self, q, *others, move(settings, q, neighbors, r))

    with mock.patch.object(ReadingAttention, "attend_to_both", attend_to_both):
        yield


def with_begin(losses: Callable[[Inputs], Tensor], bos: int, batch: Inputs) -> Tensor:
    """Losses of a batch whose neighbors begin with the beginning-of-document token."""
    lengths = batch.neighbor_lengths + (batch.neighbor_lengths > 0)
    return losses(batch._replace(neighbors=F.pad(batch.neighbors, (1, 0), value=bos), neighbor_lengths=lengths))


def main() -> None:
    """Measure the variants on one corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the imported model")
    parser.add_argument("corpus", help="NAME=PATH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="held-out tokens")
    parser.add_argument("--k", type=int, default=2, help="neighbors of each chunk")
    add_minutes(parser)
    options = parser.parse_args()
    name, _, path = options.corpus.partition("=")
    corpus = Corpus.open(options.base, name, path, options.tokens, options.output)
    settings, r = corpus.losses.model.settings, 2 * corpus.held_out.split.chunk_length
    bos = Tokenizer.open(corpus.held_out.datastore.folder / "tokenizer").bos_id

    def score(row: str, wrapped: Any = None) -> Any:
        losses = partial(corpus.losses.of, row, None, True)
        corpus.losses.forget()
        return corpus.score(row, NeighborUse(options.k), losses if wrapped is None else partial(wrapped, losses, bos))

    def at(row: str, move: Move) -> Any:
        with moved(settings, r, move):
            return score(row)

    def whole(row: str) -> Any:
        with mock.patch.object(reader, "readable_tokens", neighbor_mask):
            return score(row)

    variants: dict[str, Callable[[str], Any]] = {
        FIXED: score,
        "first token read too": whole,
        "a beginning-of-document token in front, not read": partial(score, wrapped=with_begin),
        "at consecutive positions": partial(at, move=consecutive),
        "64 tokens further away": partial(at, move=further),
        "right before the window": partial(at, move=before_window),
    }
    off, rows = corpus.score(OFF, NeighborUse(0), partial(corpus.losses.of, OFF, None, False)), []
    for row in budget(options).each([*variants], "variant"):
        rows.append([row, percent(compare(variants[row](row), off))])
    say(
        f"{measured_on()}\n\n"
        + markdown(Table([f"{name}, {off.tokens:,} tokens, k = {options.k}", "against OFF"], rows))
    )


if __name__ == "__main__":
    main()
