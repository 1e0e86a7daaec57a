"""Does copying from the own context harm a text? Without a datastore, so nothing is searched.

    retro import MODEL --output base.safetensors
    python -m benchmarks.quality.own_context base.safetensors --output FOLDER --texts PATH ... --minutes 0
    python -m benchmarks.quality.own_context summary --output FOLDER

The context is added to a trained model that has none, with the networks that every copy head begins with. A random
window of each drawn document is read once and scored in three ways:

| way | |
|---|---|
| model alone | without a copy head |
| no switch | the shares as the networks give them |
| switch | the context must earn trust (`retro/copying/switch.py`), as in all verbs |

Results are stored after every path, so the benchmark resumes.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, budget, markdown, model_parser, say, write
from indexing.store.errors import InputError
from pipelines.cli.results import Table
from retro.batch.inputs import Inputs
from retro.batch.loss import TokenLosses
from retro.copying.head import CopyHead
from retro.copying.sources import sources_of
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.other_texts import num_bytes, sample_texts, text_files
from retro.evaluation.sets import short_names
from retro.evaluation.settings import PerplexitySettings
from retro.inference.language_model import LanguageModel
from retro.model_settings import CopyHeadSettings

WAYS = ("model alone", "no switch", "switch")


def added_context(chunk_length: int) -> CopyHead:
    """A copy head over the own context, which was not trained with the model."""
    settings = CopyHeadSettings(context=True, context_added=True)
    head = CopyHead(settings.names, chunk_length, sources_of(settings)).eval()
    head.initialize()
    return head


@torch.inference_mode()
def nats_of(model: LanguageModel, head: CopyHead, tokens: np.ndarray) -> list[float]:
    """Nats of a window [t] in each of `WAYS`."""
    inputs = Inputs(torch.from_numpy(tokens[None, :-1]), labels=torch.from_numpy(tokens[None, 1:]))
    with model.placement.autocast():
        hidden, _ = model.model.hidden(inputs)
        evidence = head.evidence(head.sources(inputs), inputs.labels)
        losses = model.model.vocabulary_losses(hidden, inputs.labels, evidence.best)
        vocabulary = TokenLosses(*(part.float() for part in losses))
    switched, _ = head.trusted_losses(vocabulary, evidence, inputs)
    ways = vocabulary.nats, head.losses(vocabulary, inputs.labels, evidence), switched
    return [float(part.double().sum()) for part in ways]


def run(model: LanguageModel, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the documents of a path."""
    settings = PerplexitySettings(texts=(path,), max_tokens=options.text_tokens, window=options.window)
    texts = sample_texts(path, text_files(settings)[path], model, settings, lambda _: None)
    head = added_context(model.model.settings.chunk_length)
    nats = np.array([nats_of(model, head, text.tokens) for text in texts])  # [documents, ways]
    sizes = np.array([num_bytes(text, model.tokenizer) for text in texts], dtype=np.float64)
    tokens = sum(len(text.tokens) - 1 for text in texts)
    alone, *others = [SetResult(path, 0, tokens, 0.0, nats[:, way], sizes) for way in range(len(WAYS))]
    return {
        "tokens": tokens,
        "documents": len(texts),
        "bits_per_byte": alone.bits_per_byte,
        "ways": {
            way: {"change": list(compare(result, alone)), "worst": worst(result, alone)}
            for way, result in zip(WAYS[1:], others, strict=True)
        },
    }


def worst(result: SetResult, alone: SetResult) -> dict[str, float]:
    """The changes of the document whose bits grow most in percent, and of that whose bits grow most."""
    added = (result.nats_by_document - alone.nats_by_document) / math.log(2)
    share = added / (alone.nats_by_document / math.log(2))
    return {"percent": 100 * float(share.max()), "bits": float(added.max())}


def summary(folder: Path) -> None:
    """Print the table as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    body = []
    for name, row in found.items():
        cells = [name, f"{row['documents']}", f"{row['tokens']:,}", f"{row['bits_per_byte']:.4f}"]
        for way in WAYS[1:]:
            change = row["ways"][way]
            interval = "{:+.2f}% ({:+.2f} to {:+.2f})".format(*change["change"])
            cells += [interval, "{percent:+.2f}%, {bits:+.1f} bits".format(**change["worst"])]
        body.append(cells)
    of_ways = [column for way in WAYS[1:] for column in (way, "worst document")]
    say(markdown(Table(["text", "documents", "tokens", "bits per byte, model alone", *of_ways], body)))
    say(json.dumps({name: {key: row[key] for key in ("machine", "commit")} for name, row in found.items()}))


def main() -> None:
    """Measure some paths, or print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("--texts", nargs="+", default=[], help="files, folders or globs of texts")
    parser.add_argument("--text-tokens", type=int, default=6144, help="tokens of each path")
    parser.add_argument("--window", type=int, default=513, help="tokens of a window; all but the first are scored")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.base != "summary":
        model = LanguageModel.open(options.base, device="cpu", retrieval=False)
        if model.model.copy_head is not None:
            raise InputError(f"{options.base} has a copy head: name a model without one.")
        limit: Budget = budget(options)
        names = [name.partition(".")[0] for name in short_names([Path(path) for path in options.texts])]
        for name, path in limit.each(list(zip(names, options.texts, strict=True)), "path"):
            stored = options.output / f"{name}.json"
            if not stored.exists():
                write(stored, run(model, path, options))
    summary(options.output)


if __name__ == "__main__":
    main()
