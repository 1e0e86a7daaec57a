"""What copying costs a decoder of transformers for each token: `DatastoreLogitsProcessor`, without the model.

    python -m benchmarks.speed.logits_processor DATASTORE ... [--rows 1 8 32] [--ids 49152]
    python -m benchmarks.speed.logits_processor DATASTORE --model MODEL         # and tokens/s of `generate`, without and with it

Texts are held-out documents of each datastore, which grow token by token, and scores are random. The parts are measured
in turn, token by token: the search in the sorted prefixes, the whole processor, and the floor, a softmax of the scores.
Times are CPU times of one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, say, seconds, write
from indexing.store.datastore import Datastore
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.results import Table
from retro.copying.head import CopyHead
from retro.huggingface import DatastoreLogitsProcessor

FIRST = 32
"""Tokens of a text before the first one that is measured."""


def held_out(datastore: Datastore, rows: int, tokens: int) -> torch.Tensor:
    """Texts of held-out documents, [rows, tokens]."""
    chunks = -(-tokens // datastore.chunk_length)
    text = datastore.valid.tokens.gather(np.arange(rows * chunks) % datastore.valid.tokens.starts[-1])
    return torch.from_numpy(text.reshape(rows, -1)[:, :tokens].astype(np.int64))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def costs(folder: Path, rows: int, options: argparse.Namespace) -> dict[str, float]:
    """CPU microseconds for a row: medians over the tokens of a text."""
    datastore, suffixes = Datastore.open(folder), SuffixIndex.open(folder)
    head = CopyHead(("datastore",), datastore.chunk_length)
    head.initialize()
    tokenizer = Tokenizer.open(folder / "tokenizer")
    processor = DatastoreLogitsProcessor(head, suffixes, tokenizer, None)
    texts, scores = held_out(datastore, rows, FIRST + options.tokens), torch.randn(rows, options.ids)
    took: dict[str, list[float]] = {"search": [], "processor": [], "softmax": []}
    processor(texts[:, : FIRST - 1], scores)  # loads the compiled loops too
    for stop in range(FIRST, texts.shape[1] + 1):
        part = texts[:, :stop]
        work: dict[str, Callable[[], object]] = {
            "search": partial(suffixes.last_votes, [*part.numpy()]),
            "processor": partial(processor, part, scores),
            "softmax": partial(scores.log_softmax, -1),
        }
        for name, call in work.items():
            took[name].append(cpu_seconds(call) / rows * 1e6)
    return {name: statistics.median(values) for name, values in took.items()}


def generation(folder: Path, options: argparse.Namespace, limit: Budget) -> dict[str, float]:
    """Tokens/s of `generate`, without and with the processor: medians over rounds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(options.model)
    file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    path = path.parent if file else path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **file).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, **file)
    processor = DatastoreLogitsProcessor.open(folder, tokenizer, model)
    texts, tokens = held_out(Datastore.open(folder), options.rows[0], FIRST), options.tokens
    drawn = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    took: dict[str, list[float]] = {"generate": [], "with the processor": []}
    for _ in limit.rounds(options.rounds):
        for name, processors in (("generate", []), ("with the processor", [processor])):
            more = {"attention_mask": torch.ones_like(texts), "logits_processor": processors, **drawn}
            took[name].append(seconds(partial(model.generate, texts, **more)))
    return {name: len(texts) * tokens / statistics.median(values) for name, values in took.items()}


def main() -> None:
    """Print the tables and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastores", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ids", type=int, default=49_152, help="ids of the model")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each text that are measured")
    parser.add_argument(
        "--model", default="", help="folder or .gguf file of a model with the tokenizer of the datastores"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmark-logits-processor.json"))
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for folder in options.datastores:
        tokens = int(sum(Datastore.open(folder).manifest["splits"]["train"]["tokens"]))
        for rows in limit.each(options.rows, "number of rows", float):
            found.append({"datastore": folder.name, "tokens": tokens, "rows": rows, **costs(folder, rows, options)})
        if options.model:
            found[-1]["tokens_per_second"] = generation(folder, options, limit)
    names = ("search", "processor", "softmax")
    body = [
        [one["datastore"], f"{one['tokens']:,}", str(one["rows"]), *(f"{one[name]:.0f}" for name in names)]
        for one in found
    ]
    say(markdown(Table(["datastore", "tokens", "rows", *(f"{name}, µs a row" for name in names)], body)))
    for one in found:
        for name, rate in one.get("tokens_per_second", {}).items():
            say(f"{one['datastore']}: {name}: {rate:.1f} tokens/s")
    write(options.output, {"costs": found})


if __name__ == "__main__":
    main()
