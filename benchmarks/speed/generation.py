"""Tokens/s of generation: this project, with a cache of keys and values, and `generate` of retro-pytorch 0.3.9.

pip install --no-deps retro-pytorch==0.3.9
python -m benchmarks.speed.generation DATASTORE [--tokens 512] [--rounds 3] [--batches 1 8] [--cases NAME ...]

All models have the sizes of `benchmarks/speed/training.py` and random weights. All rows begin with one token and end at
the same length. Our model searches the index of the datastore for every chunk, except in the case OFF; retro-pytorch
receives random chunks without a search. Rounds alternate between the cases, because shared machines drift; ratios
within a run are reliable. On a CPU all cases use one thread: its operations are small, and on a shared machine several
threads wait for each other at each of them. Times include sampling.
"""

import argparse
import contextlib
import io
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, add_cases, add_minutes, add_precision, budget, say, seconds, write
from benchmarks.speed.training import SMALL, their_model
from indexing.retrieval.retriever import Retriever
from retro.copying.rows import RetrieveNeighbors
from retro.device import Placement, Precision, choose_inference_placement
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, generate
from retro.inference.packed_weights import pack
from retro.inference.settings import GenerationSettings
from retro.inference.text_stream import Decode
from retro.model.retro import Retro
from retro.model_settings import ModelSettings

THEIRS = "retro-pytorch 0.3.9"
K = 2
_WARM_UP = 64
"""Tokens of a row in the warm-up."""
Run = Callable[[int], object]
"""Generates for a batch with the given number of rows."""


def ours(
    settings: ModelSettings, placement: Placement, tokens: int, retrieve: RetrieveNeighbors | None, decode: Decode
) -> Run:
    """Return generation as `LanguageModel` runs it."""
    model = Retro(settings).to(placement.device).eval()
    pack(model, placement)
    placement.cast(model)

    def run(batch: int) -> None:
        texts, drawn = Batch(Decoder(model, placement, tokens), decode, -1), GenerationSettings(max_tokens=tokens - 1)
        steps = generate(texts, [np.ones(1, np.int64)] * batch, drawn, [retrieve] * batch)
        assert sum(map(len, steps)) == batch * (tokens - 1)

    return run


def theirs(settings: ModelSettings, placement: Placement, tokens: int) -> Run:
    """Return the method `TrainingWrapper.generate` without its wrapper, which needs a corpus and an index."""
    import retro_pytorch.training

    retro_pytorch.training.EOS_ID = -1  # all cases generate the same number of tokens
    s, generator = settings, torch.Generator().manual_seed(0)

    class Wrapper(torch.nn.Module):
        generate = retro_pytorch.training.TrainingWrapper.generate
        chunk_size, max_seq_len = s.chunk_length, tokens - 1

        def fetch_knn_chunks_fn(self, chunks: torch.Tensor) -> torch.Tensor:
            found = torch.randint(1, s.vocab_size, (len(chunks), K, 2 * s.chunk_length), generator=generator)
            return found.to(chunks.device)

    wrapper = Wrapper()
    wrapper.retro = their_model(s, tokens).to(placement.device)

    def run(batch: int) -> None:
        with placement.autocast(), contextlib.redirect_stdout(io.StringIO()):  # it prints each retrieval
            out = wrapper.generate(torch.ones(batch, 1, dtype=torch.long))
        assert out.shape == (batch, tokens)

    return run


def cases(datastore: Path, tokens: int, precision: Precision) -> dict[str, Run]:
    """Return the cases by name. The first is the reference: retro-pytorch if it is installed."""
    placed, retriever = choose_inference_placement("auto", precision), Retriever.open(datastore)
    settings = replace(SMALL, vocab_size=retriever.tokenizer.vocab_size)

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return retriever.neighbors.find(chunks, K)[:2]

    found: dict[str, Run] = {}
    try:
        found[THEIRS] = theirs(settings, placed, tokens)
    except ImportError as error:
        say(f"{THEIRS} is skipped: {error}")
    decode = retriever.tokenizer.decode
    found["retro"] = ours(settings, placed, tokens, retrieve, decode)
    found["retro, retrieval OFF"] = ours(settings, placed, tokens, None, decode)
    if placed.dtype != torch.float32:
        found["retro, float32"] = ours(settings, replace(placed, dtype=torch.float32), tokens, retrieve, decode)
    return found


def selected(options: argparse.Namespace, tokens: int) -> dict[str, Run]:
    """Return the cases that `--cases` selects."""
    found = cases(options.datastore, tokens, options.precision)
    return {
        name: run for name, run in found.items() if not options.cases or any(part in name for part in options.cases)
    }


def tokens_that_fit(options: argparse.Namespace, limit: Budget) -> int:
    """Warm up; return the tokens of a row with which a round of all cases fits into the remaining time."""
    took = 0.0
    for name, run in selected(options, min(_WARM_UP, options.tokens)).items():
        took += (now := seconds(partial(run, 1)))
        say(f"{name}: {now:.1f} s to warm up", file=sys.stderr)
    round_seconds = took * sum(batch**0.5 for batch in options.batches)  # approximate, for this number of tokens
    times = min(
        (max(0.0, limit.left) / round_seconds) ** 0.5, options.tokens
    )  # without a cache, time grows with the square
    fitting = min(options.tokens, _WARM_UP * int(max(2, times)))
    if fitting < options.tokens:
        say(f"rows of {fitting} tokens, so that a round fits. For longer rows: --tokens {options.tokens} --minutes 0.")
    return fitting


def compare(chosen: dict[str, Run], batches: list[int], tokens: int, count: int, limit: Budget) -> list[dict[str, Any]]:
    """Run all cases in turn for some rounds; return a row per batch size and case, with its ratio to the first case."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in limit.rounds(count):
        for batch in limit.each(batches, "batch size", lambda batch: batch**0.5):
            for name, run in chosen.items():
                times[batch, name].append(seconds(partial(run, batch)))
    rows = []
    for (batch, name), took in times.items():
        ratios = [one / other for one, other in zip(times[batch, next(iter(chosen))], took, strict=True)]
        rate = batch * (tokens - 1) / statistics.median(took)
        rows.append(
            {
                "case": name,
                "batch": batch,
                "tokens_per_second": rate,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
        )
    return rows


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    help_tokens = "largest final length of a row; shorter if one round does not fit into --minutes"
    parser.add_argument("--tokens", type=int, default=512, help=help_tokens)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    add_cases(parser)
    add_precision(parser)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-generation.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    tokens = tokens_that_fit(options, limit)
    chosen = selected(options, tokens)
    rows = compare(chosen, options.batches, tokens, options.rounds, limit)
    print(f"{'':26}{'batch':>6}{'tokens/s':>11}{'ratio':>9}")
    for row in rows:
        print(f"{row['case']:26}{row['batch']:6}{row['tokens_per_second']:11,.0f}{row['ratio']:8.2f}×")
    precision = str(choose_inference_placement("auto", options.precision).dtype)
    write(options.output, {"tokens": tokens, "k": K, "precision": precision, "rows": rows})


if __name__ == "__main__":
    main()
