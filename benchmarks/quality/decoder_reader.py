"""What a trained decoder gains if it reads neighbors with its own self-attention, without training, and what that costs.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.safetensors
    python -m benchmarks.quality.decoder_reader smollm2.safetensors NAME=PATH ... --output FOLDER [--tokens 1000]
    python -m benchmarks.quality.decoder_reader summary --output FOLDER

For each corpus: `retro index` (chunks of 32, `search = "ngrams"`, `rerank = "tokens"`), `retro add-retrieval` for the copy head, and
windows of 512 tokens that are spread evenly over the held-out documents; each scores its last 256. In-context retrieval, the
baseline that a user would try, puts one neighbor of the preceding chunk in front of the window and computes it again for every
chunk; it is measured on every third window. Costs are CPU time per scored token against OFF, on the same windows in the same run.
Finished rows are kept in FOLDER, so the script resumes. `summary` prints the tables.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import add_minutes, budget, markdown, placement, say, write
from benchmarks.quality.smollm2 import build
from indexing.store.datastore import Datastore
from pipelines.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.batches import TrainingData
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, compare, evaluate
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.evaluation.windows import ScoringWindow, document_windows
from retro.model.copy_head import CopyHead
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro
from retro.model.settings import updated
from retro.training.fitted_copy_head import fit_copy_head
from retro.training.fitted_retrieval import read_batches

WINDOW, STRIDE = 512, 256
_FITTED_TOKENS = 4096
_IN_CONTEXT_EVERY = 3
OFF, IN_CONTEXT = "OFF", "in-context retrieval, 1 neighbor"


def open_model(file: Path, place: Placement) -> tuple[Retro, CopyHead]:
    """The model with its decoder as reader and without its copy head, and the copy head."""
    copying = load_model(open_checkpoint(file), place.device)
    assert copying.copy_head is not None
    model = Retro(updated(copying.settings, {"retrieval.reader": "decoder"})).eval()
    model.load_state_dict(copying.state_dict())
    model.copy_head = None
    return model, copying.copy_head


def fit_together(model: Retro, head: CopyHead, datastore: Datastore, place: Placement) -> CopyHead:
    """A copy head whose tables are fitted to what the model predicts after reading four neighbors."""
    data = DataSettings(datastores=(datastore.folder,), sequence_length=WINDOW, k=4)
    source = TrainingData(data.datastores, data, retrieval=True)
    model.copy_head = deepcopy(head)
    assert model.copy_head.neighbors is not None
    model.copy_head.neighbors.initialize()
    fit_copy_head(model, read_batches(source, _FITTED_TOKENS // WINDOW, 1, place), place)
    fitted, model.copy_head = model.copy_head, None
    return fitted


class Losses:
    """Losses of batches with and without reading, with and without a copy head. Activations are computed once.

    Attributes:
        seconds: CPU seconds by row of the table.
    """

    def __init__(self, model: Retro, place: Placement) -> None:
        self.model, self.place = model, place
        self.seconds: dict[str, float] = defaultdict(float)
        self._known: dict[bytes, tuple[Tensor, float]] = {}

    def of(self, row: str, head: CopyHead | None, reads: bool, batch: Inputs) -> Tensor:
        """Losses [B, T] for a row of the table."""
        model = self.model
        with torch.inference_mode(), self.place.autocast():
            hidden, spent = self._hidden(batch if reads else batch.off())
            began = time.process_time()
            sources = [] if head is None else head.sources(batch, model.embedding)
            mixture = head.mixture(hidden, batch.labels, sources) if head and sources else None
            losses = token_losses(hidden, model.output_weight, batch.labels, mixture)
        self.seconds[row] += spent + time.process_time() - began
        return losses

    def _hidden(self, batch: Inputs) -> tuple[Tensor, float]:
        key = b"".join(part.numpy().tobytes() for part in (batch.tokens, batch.neighbors) if part is not None)
        if key not in self._known:
            began = time.process_time()
            hidden, _ = self.model.hidden(batch)
            self._known[key] = hidden, time.process_time() - began
        return self._known[key]

    def in_context(self, batch: Inputs) -> Tensor:
        """Losses [B, T] with the first neighbor of the preceding chunk in front of the window, computed again for each chunk."""
        losses = self.of("OFF of chunks without neighbors", None, False, batch).clone()
        m, began = self.model.settings.chunk_length, time.process_time()
        groups = defaultdict(list)  # rows of equal length
        for row, lengths in enumerate(batch.neighbor_lengths[:, :, 0].tolist()):
            for chunk, length in enumerate(lengths):
                read = slice((chunk + 1) * m - 1, min((chunk + 2) * m - 1, batch.tokens.shape[1]))
                if length and (batch.labels[row, read] != IGNORED_LABEL).any():
                    groups[chunk, length].append((row, read))
        for (chunk, length), rows in groups.items():
            texts = [
                torch.cat((batch.neighbors[row, chunk, 0, :length], batch.tokens[row, : read.stop]))
                for row, read in rows
            ]
            tokens = torch.stack(texts)
            labels, size = torch.full_like(tokens, IGNORED_LABEL), rows[0][1].stop - rows[0][1].start
            labels[:, -size:] = torch.stack([batch.labels[row, read] for row, read in rows])
            with torch.inference_mode(), self.place.autocast():
                nats = self.model.token_losses(Inputs(tokens, labels=labels))[:, -size:]
            for (row, read), own in zip(rows, nats, strict=True):
                losses[row, read] = own
        self.seconds[IN_CONTEXT] += time.process_time() - began
        return losses


def spread_windows(held_out: EvaluationSet, tokens: int) -> list[ScoringWindow]:
    """Windows that score about this many tokens together, evenly spaced over those of all held-out documents."""
    m = held_out.split.chunk_length
    windows = list(document_windows(held_out.split, WINDOW // m, STRIDE // m))
    count = max(1, tokens // STRIDE)
    return windows[:: max(1, len(windows) // count)][:count]


def measure(base: Path, name: str, corpus: str, tokens: int, folder: Path) -> dict[str, Any]:
    """Measure one corpus; see the module."""
    file = build(name, corpus, base, folder, "ngrams")
    datastore, place = Datastore.open(folder / name), placement()
    held_out = EvaluationSet(name, datastore)
    model, copying = open_model(file, place)
    together, losses = fit_together(model, copying, datastore, place), Losses(model, place)
    say(f"{name}: copy head and reader are fitted together")
    windows = spread_windows(held_out, tokens)
    some = windows[::_IN_CONTEXT_EVERY]
    settings = EvaluationSettings(window=WINDOW, stride=STRIDE, batch_size=4)

    def score(row: str, use: NeighborUse, part: Sequence[ScoringWindow], of: Callable[[Inputs], Tensor]) -> SetResult:
        result = evaluate(
            model, held_out, settings, place, use=use, sequence_length=WINDOW, windows=part, token_losses_of=of
        )
        say(f"{name}: {row}: {result.bits_per_byte:.4f} bits per byte, {result.tokens:,} tokens")
        return result

    def row_of(row: str, k: int, reads: bool, head: CopyHead | None = None, source: Any = "nearest") -> SetResult:
        return score(row, NeighborUse(k, source), windows, partial(losses.of, row, head, reads))

    results = {OFF: row_of(OFF, 0, reads=False)}
    results |= {row: row_of(row, k, reads=True) for k in (1, 2, 4) for row in [f"reads {k}"]}
    results["reads 2 random neighbors"] = row_of("reads 2 random neighbors", 2, reads=True, source="random")
    results["copies from 4"] = row_of("copies from 4", 4, reads=False, head=copying)
    results |= {row: row_of(row, k, True, together) for k in (2, 4) for row in [f"reads and copies from {k}"]}
    rows = [
        row_as_json(row, result, results[OFF], losses.seconds[row] / losses.seconds[OFF])
        for row, result in results.items()
    ]
    best = compare(results["reads and copies from 4"], results["copies from 4"])
    first = "OFF, windows of in-context retrieval"
    off = score(first, NeighborUse(0), some, partial(losses.of, first, None, False))
    reads = score("reads 1", NeighborUse(1), some, partial(losses.of, "some", None, True))
    in_context = score(IN_CONTEXT, NeighborUse(1), some, losses.in_context)
    cost = losses.seconds[IN_CONTEXT] / losses.seconds[first]
    rows += [
        row_as_json(IN_CONTEXT, in_context, off, cost),
        row_as_json("reads 1, the same windows", reads, off, losses.seconds["some"] / losses.seconds[first]),
    ]
    return {"rows": rows, "reading against copying": best, "precision": str(place.dtype).removeprefix("torch.")}


def row_as_json(row: str, result: SetResult, off: SetResult, cost: float) -> dict[str, Any]:
    """A row of the table as plain values."""
    return {"row": row, **result.as_json(), "change": compare(result, off), "cost": cost}


def summary(folder: Path) -> None:
    """Print the tables of all measured corpora as Markdown."""
    corpora = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.reader.json"))}
    names = [name.removesuffix(".reader") for name in corpora]
    for one in corpora.values():
        say(json.dumps({key: one[key] for key in ("machine", "commit", "precision")}))
    body, costs = [], []
    for rows in zip(*(one["rows"] for one in corpora.values()), strict=True):
        changes = (f"{row['change'][0]:+.1f}% ({row['change'][1]:+.1f} to {row['change'][2]:+.1f})" for row in rows)
        body.append(
            [rows[0]["row"], *([f"{row['bits_per_byte']:.4f}" for row in rows] if rows[0]["row"] == OFF else changes)]
        )
        costs.append([rows[0]["row"], *(f"{row['cost']:.2f}" for row in rows)])
    counts = [
        [
            f"{one['rows'][part]['tokens']:,} tokens, {one['rows'][part]['documents']} documents"
            for one in corpora.values()
        ]
        for part in (0, -1)
    ]
    say(
        "\n" + markdown(Table(["", *names], [*body, ["held out", *counts[0]], ["held out, last two rows", *counts[1]]]))
    )
    say("\n" + markdown(Table(["CPU time against OFF", *names], costs)))
    for name, one in zip(names, corpora.values(), strict=True):
        say(
            f"{name}: reading and copying from 4 against copying alone: "
            + "{:+.1f}% ({:+.1f} to {:+.1f})".format(*one["reading against copying"])
        )


def main() -> None:
    """Measure corpora, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the imported model, or the word summary")
    parser.add_argument("corpus", nargs="*", help="NAME=PATH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1000, help="held-out tokens of each corpus")
    add_minutes(parser)
    options = parser.parse_args()
    if options.base == "summary":
        summary(options.output)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    stored = {entry: options.output / f"{entry.partition('=')[0]}.reader.json" for entry in options.corpus}
    for entry in budget(options).each([entry for entry in options.corpus if not stored[entry].exists()], "corpus"):
        name, _, path = entry.partition("=")
        write(stored[entry], measure(Path(options.base), name, path, options.tokens, options.output))


if __name__ == "__main__":
    main()
