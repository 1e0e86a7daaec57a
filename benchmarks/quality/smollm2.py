"""What retrieval without training brings to a model that people have: bits per byte of held-out documents, for several
corpora.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.safetensors
    python -m benchmarks.quality.smollm2 smollm2.safetensors NAME=PATH ... --output FOLDER [--tokens 40000]
    python -m benchmarks.quality.smollm2 summary --output FOLDER

For each corpus: `retro index` (chunks of 32, `rerank = "tokens"`), `retro add-retrieval` (k = 4), and the held-out
documents in windows, OFF and ON; and, with `--texts FILE ...`, text of other kinds. The model has no cross-attention,
so its activations do not depend on neighbors: one pass serves all rows of a window. Rows of finished windows are kept
in FOLDER, so the script resumes. `summary` prints the tables.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import budget, markdown, measured_on, model_parser, percent, placement, say, write
from benchmarks.quality.other_text import add_texts, scored_texts, texts_table
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main as retro
from pipelines.cli.results import Table
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.leakage import by_leakage, leakage_of
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.inference.language_model import LanguageModel
from retro.model.retro import Retro

WINDOW = 1024
CONTEXTS = (256, 512, 2048)
LEAKAGE = (4, 8, 16, 32)
PARTS = ("k", "context", "texts")


def build(
    name: str,
    corpus: str,
    base: Path,
    folder: Path,
    neighbors: NeighborSettings,
    embedder: EmbedderSettings,
    chunk_length: int,
) -> Path:
    """Build a datastore with the model's tokenizer, and add retrieval to the model. Returns the model's file."""
    datastore, file = folder / name, folder / f"{name}.safetensors"
    tokenizer = open_checkpoint(base).settings["imported"]["folder"]
    config = Config(
        datastore=datastore,
        skip_stages=("suffixes", "votes"),  # with votes, `retro add-retrieval` adds the whole datastore as a source too
        corpus=CorpusSettings(paths=(corpus,)),
        tokenizer=TokenizerSettings(kind="huggingface", path=tokenizer),
        chunks=ChunkSettings(chunk_length=chunk_length),
        embedder=embedder,
        neighbors=neighbors,
    )
    if not datastore.exists():
        (folder / f"{name}.toml").write_text(to_toml(config))
        assert retro(["index", str(folder / f"{name}.toml")]) == 0
    if not file.exists():
        assert retro(["add-retrieval", str(base), "--datastore", str(datastore), "--output", str(file)]) == 0
    return file


def measure(
    model: Retro, held_out: EvaluationSet, uses: Iterable[NeighborUse], window: int, tokens: int, place: Placement
) -> list[SetResult]:
    """Score held-out documents with each choice of neighbors."""
    settings = EvaluationSettings(window=window, stride=window * 3 // 4, max_tokens=tokens, batch_size=4)
    return Evaluator(model, place, settings).score_each(held_out, list(uses))


def rows_of(results: dict[str, SetResult], reference: SetResult) -> list[dict[str, Any]]:
    """The results as plain values, with their changes against a reference."""
    return [
        {"row": name, **result.as_json(), "change": compare(result, reference) if result is not reference else None}
        for name, result in results.items()
    ]


def run(base: Path, name: str, corpus: str, parts: Sequence[str], options: argparse.Namespace) -> None:
    """Measure parts of one corpus; finished ones are skipped."""
    stored = options.output / f"{name}.json"
    finished: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    finished = {key: value for key, value in finished.items() if key not in measured_on()}  # written again below
    parts = [part for part in parts if part not in finished]
    if not parts:
        return
    neighbors = NeighborSettings(rerank="tokens", search=options.search)
    file = build(name, corpus, base, options.output, neighbors, EmbedderSettings(), options.chunk_length)
    datastore = Datastore.open(options.output / name)
    held_out, place = EvaluationSet(name, datastore), placement(options.precision)
    totals = datastore.manifest["splits"]["train"]
    finished["datastore"] = {key: int(sum(totals[key])) for key in ("tokens", "documents", "chunks")}
    model = load_model(open_checkpoint(file), place.device)

    def keep(part: str, rows: Any, began: float) -> None:
        finished[part] = rows
        write(stored, finished | {"precision": str(place.dtype).removeprefix("torch.")})
        say(f"{name} {part}: {time.monotonic() - began:.0f} s")

    near = NeighborUse(4)
    with torch.inference_mode():
        if "k" in parts:
            began = time.monotonic()
            uses = {"OFF": NeighborUse(0), **{f"k = {k}": NeighborUse(k) for k in (1, 2, 4, 16)}}
            uses["4 random neighbors"] = NeighborUse(4, source="random")
            results = dict(
                zip(uses, measure(model, held_out, uses.values(), WINDOW, options.tokens, place), strict=True)
            )
            off, on = results["OFF"], results["k = 4"]
            leakage = []
            for tokens, chunks in by_leakage(
                leakage_of(held_out, off.token_scores.chunks), LEAKAGE, held_out.split.chunk_length
            ):
                without, reading = off.part(chunks), on.part(chunks)
                if without and reading:
                    figures = {"off": without.bits_per_byte, "on": reading.bits_per_byte}
                    level = {"shared_tokens": tokens, "share": float(chunks.mean())}
                    leakage.append(level | figures | {"change": compare(reading, without)})
            keep("k", {"rows": rows_of(results, off), "leakage": leakage}, began)
        for window in CONTEXTS:
            if f"context {window}" in parts:
                began = time.monotonic()
                off, on = measure(model, held_out, (NeighborUse(0), near), window, options.context_tokens, place)
                keep(f"context {window}", rows_of({"OFF": off, "k = 4": on}, off), began)
    if "texts" in parts:
        keep("texts", scored_texts(LanguageModel.open(file, device="cpu"), 4, options), time.monotonic())


def summary(folder: Path) -> None:
    """Print the tables of all measured corpora as Markdown."""

    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    tables: dict[str, Table] = {}
    names = list(found)
    rows = [[row["row"] for row in one["k"]["rows"]] for one in found.values() if "k" in one]
    say(
        json.dumps(
            {
                name: {key: one[key] for key in ("machine", "commit", "datastore", "precision")}
                for name, one in found.items()
            }
        )
    )
    body = []
    for number, label in enumerate(rows[0]):
        cells = [label]
        for one in found.values():
            row = one["k"]["rows"][number]
            cells.append(percent(row["change"]) if row["change"] else f"{row['bits_per_byte']:.4f}")
        body.append(cells)
    counts = [
        f"{one['k']['rows'][0]['tokens']:,} tokens, {one['k']['rows'][0]['documents']} documents"
        for one in found.values()
    ]
    tables["Number of neighbors"] = Table(["", *names], [*body, ["held out", *counts]])
    tables["Leakage"] = Table(
        ["corpus", "shared tokens", "chunks", "OFF", "ON, k = 4", "change"],
        [
            [
                name,
                str(part["shared_tokens"]),
                f"{part['share']:.0%}",
                f"{part['off']:.4f}",
                f"{part['on']:.4f}",
                percent(part["change"]),
            ]
            for name, one in found.items()
            for part in one["k"]["leakage"]
        ],
    )
    tables["Context"] = Table(
        ["corpus", "context", "tokens", "documents", "OFF", "ON, k = 4", "change"],
        [
            [
                name,
                str(window),
                f"{off['tokens']:,}",
                str(off["documents"]),
                f"{off['bits_per_byte']:.4f}",
                f"{on['bits_per_byte']:.4f}",
                percent(on["change"]),
            ]
            for name, one in found.items()
            for window in CONTEXTS
            for off, on in [one.get(f"context {window}", (None, None))]
            if off
        ],
    )
    tables["Text of other kinds"] = texts_table(found)
    for title, table in tables.items():
        say(f"\n## {title}\n\n{markdown(table)}")


def main() -> None:
    """Measure corpora, or print the tables."""
    parser = model_parser(__doc__)
    parser.add_argument("corpus", nargs="*", help="NAME=PATH")
    parser.add_argument("--tokens", type=int, default=40_000, help="held-out tokens of each corpus")
    parser.add_argument(
        "--context-tokens", type=int, default=15_000, help="the same, for the other lengths of the context"
    )
    parser.add_argument("--chunk-length", type=int, default=32, help="of new datastores")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add_texts(parser)
    parser.add_argument("--search", default="auto", help="neighbors.search of new datastores (default: auto)")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.base == "summary":
        summary(options.output)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    parts_of = {"k": ["k"], "context": [f"context {window}" for window in CONTEXTS], "texts": ["texts"]}
    chosen = [part for part in options.parts if part != "texts" or options.texts]
    work = [(entry, parts_of[part]) for part in chosen for entry in options.corpus]
    for entry, parts in budget(options).each(work, "part"):
        name, _, path = entry.partition("=")
        run(Path(options.base), name, path, parts, options)


if __name__ == "__main__":
    main()
