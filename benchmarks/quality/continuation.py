"""Continuations of held-out documents, without and with retrieval, greedy and sampled: are they plausible, and do they
repeat themselves?

    retro add-retrieval MODEL --datastore DATASTORE --output FILE.safetensors     for each datastore
    python -m benchmarks.quality.continuation FILE.safetensors ... --output FOLDER [--documents 40]
    python -m benchmarks.quality.continuation summary --output FOLDER

From the middle of a document the model reads 256 tokens and generates 64. The same model without retrieval then scores
these 64 after five times as many tokens of the document: what the short prompt did not tell is known there. Measures:

- bits of a token under this larger context; less is more plausible,
- similarity with the next 64 tokens of the document, as in `completion.py`,
- repeats: four tokens occur three times in a row of 64,
- distinct 4-grams: different 4-grams of generated tokens / their number.

The document's own tokens are measured too. Changes are of ON against OFF, with 95% intervals of a paired bootstrap over
documents. Results are stored after every datastore, so the benchmark resumes.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import budget, markdown, model_parser, say, write
from benchmarks.quality.completion import change, distinct_grams, similarity
from benchmarks.quality.other_text import continued, repeats
from indexing.store.datastore import Datastore
from pipelines.cli.results import Table
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

K, PROMPT, TOKENS, CONTEXT = 4, 256, 64, 1280
WAYS = {
    "greedy": GenerationSettings(max_tokens=TOKENS, temperature=0, ignore_eos=True),
    "sampled": GenerationSettings(max_tokens=TOKENS, ignore_eos=True),  # as `retro generate` does
}
MEASURES = ("bits of a token", "similarity", "repeats", "distinct 4-grams")


def middles(datastore: Datastore, count: int) -> list[np.ndarray]:
    """`CONTEXT + TOKENS` tokens from the middle of some held-out documents that are long enough."""
    split, m = datastore.valid, datastore.chunk_length
    chunks = -(-(CONTEXT + TOKENS) // m)
    ranges = split.chunk_ranges(np.arange(split.num_documents))
    long = ranges[ranges[:, 1] - ranges[:, 0] > chunks]
    found = list[np.ndarray]()
    for first, stop in np.random.default_rng(0).permutation(long)[:count].tolist():
        begin = (first + stop - chunks) // 2
        found.append(split.tokens.gather(np.arange(begin, begin + chunks)).ravel()[: CONTEXT + TOKENS].astype(np.int64))
    return found


def measured(model: LanguageModel, texts: Sequence[np.ndarray], ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Measure a continuation of each text."""
    decode = model.tokenizer.decode
    longer = [np.append(text[:CONTEXT], row).astype(np.int64) for text, row in zip(texts, ids, strict=True)]
    nats = [-scores[-len(row) :].mean() for scores, row in zip(model.score(longer), ids, strict=True)]
    return [
        {
            "text": decode(row),
            "bits of a token": float(loss) / math.log(2),
            "similarity": similarity(decode(row), decode(text[CONTEXT:])),
            "repeats": float(repeats(row)),
            "distinct 4-grams": distinct_grams(row),
        }
        for text, row, loss in zip(texts, ids, nats, strict=True)
    ]


def run(file: Path, documents: int) -> dict[str, list[dict[str, Any]]]:
    """Measure one model with its datastore."""
    model = LanguageModel.open(file, device="cpu")
    assert model.retriever is not None
    texts = middles(model.retriever.datastore, documents)
    found = {"the document": measured(model, texts, [text[CONTEXT:].tolist() for text in texts])}
    for way, settings in WAYS.items():
        for case, k in (("OFF", 0), ("ON", K)):
            rows = continued(model, [text[CONTEXT - PROMPT : CONTEXT] for text in texts], k, settings)
            found[f"{way}, {case}"] = measured(model, texts, rows)
            say(f"{file.stem}: {way}, {case}")
    return found


def summary(folder: Path) -> None:
    """Print the table as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    body = []
    for name, one in found.items():
        for case, rows in one["cases"].items():
            body.append(
                [name, f"{case}, {len(rows)}", *(f"{np.mean([row[key] for row in rows]):.3f}" for key in MEASURES)]
            )
            if case.endswith("ON"):
                off = one["cases"][case.replace("ON", "OFF")]
                body.append([name, "change", *(change(off, rows, key) for key in MEASURES)])
    say(markdown(Table(["datastore", "", *MEASURES], body)))
    say(json.dumps({name: {key: one[key] for key in ("machine", "commit")} for name, one in found.items()}))


def main() -> None:
    """Measure some models, or print the table."""
    parser = model_parser(__doc__)
    parser.add_argument("models", nargs="*", help="more models")
    parser.add_argument("--documents", type=int, default=40, help="of each datastore, at most")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    files = [] if options.base == "summary" else [Path(name) for name in (options.base, *options.models)]
    for file in budget(options).each(files, "model"):
        stored = options.output / f"{file.stem}.json"
        if not stored.exists():
            write(stored, {"cases": run(file, options.documents)})
    summary(options.output)


if __name__ == "__main__":
    main()
