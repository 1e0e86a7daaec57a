"""What a trained decoder gains if it reads neighbors with its own self-attention, without training, and what that costs.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.safetensors
    python -m benchmarks.quality.decoder_reader smollm2.safetensors NAME=PATH ... --output FOLDER [--tokens 1000]
    python -m benchmarks.quality.decoder_reader summary --output FOLDER

For each corpus: `retro index` (`search = "ngrams"` and `rerank = "tokens"`; with `--neighbors minilm` the nearest embeddings),
`retro add-retrieval` for the copy head, and windows of 512 tokens that are spread evenly over the held-out documents; each scores its
last 256. In-context retrieval, the
baseline that a user would try, puts one neighbor of the preceding chunk in front of the window and computes it again for every
chunk; it is measured on every third window. Costs are CPU time per scored token against OFF, on the same windows in the same run;
those with neighbors that were encoded before are measured on four windows, in alternating rounds.
Finished parts are kept in FOLDER, so the script resumes. `summary` prints the tables.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import budget, markdown, measured_on, model_parser, percent, placement, say, write
from benchmarks.quality.retrieval_gain import EMBEDDERS
from benchmarks.quality.smollm2 import build
from indexing.neighbors.search import NeighborSettings
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet
from pipelines.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, compare, evaluate
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.evaluation.windows import ScoringWindow, document_windows, window_batches
from retro.model.copy_head import CopyHead
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, token_losses
from retro.model.retro import Retro
from retro.model.settings import updated
from retro.training.fitted_copy_head import fit_copy_head
from retro.training.fitted_retrieval import read_batches

WINDOW, STRIDE = 512, 256
NEIGHBORS = {
    "ngrams": (NeighborSettings(search="ngrams", rerank="tokens"), EMBEDDERS["lexical"]),
    "minilm": (NeighborSettings(search="exact"), EMBEDDERS["minilm"]),
}
"""How the neighbors of new datastores are found: by shared n-grams, or by the distance of sentence embeddings."""
_FITTED_TOKENS = 4096
_IN_CONTEXT_EVERY = 3
_ROUNDS = 3
OFF, COPIES, IN_CONTEXT = "OFF", "copies from 4", "in-context retrieval, 1 neighbor"


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
    fit_copy_head(model, read_batches(source, _FITTED_TOKENS // WINDOW, place), place)
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
            sources = [] if head is None else head.sources(batch)
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


@dataclass(frozen=True)
class Corpus:
    """A corpus with its model.

    Attributes:
        name: of the corpus, in output.
        held_out: its held-out documents.
        windows: those that are scored.
        losses: of the model.
        copying: copy head fitted to the model alone.
    """

    name: str
    held_out: EvaluationSet
    windows: list[ScoringWindow]
    losses: Losses
    copying: CopyHead

    @classmethod
    def open(cls, base: Path, name: str, path: str, options: argparse.Namespace) -> "Corpus":
        """Build what is missing, and choose windows."""
        place, folder = placement(), options.output
        file = build(name, path, base, folder, *NEIGHBORS[options.neighbors], options.chunk_length)
        model, copying = open_model(file, place)
        held_out = EvaluationSet(name, Datastore.open(folder / name))
        return cls(name, held_out, spread_windows(held_out, options.tokens), Losses(model, place), copying)

    def score(
        self, row: str, use: NeighborUse, of: Callable[[Inputs], Tensor], windows: Sequence[ScoringWindow] = ()
    ) -> SetResult:
        """Score windows with losses [B, T] of batches."""
        settings = EvaluationSettings(window=WINDOW, stride=STRIDE, batch_size=4)
        shared: dict[str, Any] = {"use": use, "sequence_length": WINDOW, "windows": windows or self.windows}
        model, place = self.losses.model, self.losses.place
        result = evaluate(model, self.held_out, settings, place, token_losses_of=of, **shared)
        say(f"{self.name}: {row}: {result.bits_per_byte:.4f} bits per byte, {result.tokens:,} tokens")
        return result

    def cost(self, row: str, off: str) -> float:
        """CPU time of a row against that of OFF on the same windows."""
        return self.losses.seconds[row] / self.losses.seconds[off]


def gains(corpus: Corpus) -> list[dict[str, Any]]:
    """The rows of the table."""
    losses, datastore = corpus.losses, corpus.held_out.datastore
    together = fit_together(losses.model, corpus.copying, datastore, losses.place)
    rows: dict[str, tuple[NeighborUse, bool, CopyHead | None]] = {OFF: (NeighborUse(0), False, None)}
    rows |= {f"reads {k}": (NeighborUse(k), True, None) for k in (1, 2, 4)}
    rows["reads 2 random neighbors"] = NeighborUse(2, "random"), True, None
    rows[COPIES] = NeighborUse(4), False, corpus.copying
    rows |= {f"reads and copies from {k}": (NeighborUse(k), True, together) for k in (2, 4)}
    results = {
        row: corpus.score(row, use, partial(losses.of, row, head, reads)) for row, (use, reads, head) in rows.items()
    }
    out = [row_as_json(row, result, results[OFF], corpus.cost(row, OFF)) for row, result in results.items()]
    out[-1]["against copying"] = compare([*results.values()][-1], results[COPIES])
    return out + baseline(corpus)


def baseline(corpus: Corpus) -> list[dict[str, Any]]:
    """In-context retrieval, and reading on the same windows."""
    losses, some, reads = corpus.losses, corpus.windows[::_IN_CONTEXT_EVERY], "reads 1, the same windows"
    first = "OFF, windows of in-context retrieval"
    off = corpus.score(first, NeighborUse(0), partial(losses.of, first, None, False), some)
    rows: dict[str, Callable[[Inputs], Tensor]] = {
        IN_CONTEXT: losses.in_context,
        reads: partial(losses.of, reads, None, True),
    }
    results = {row: corpus.score(row, NeighborUse(1), of, some) for row, of in rows.items()}
    return [row_as_json(row, result, off, corpus.cost(row, first)) for row, result in results.items()]


def costs(corpus: Corpus) -> dict[str, list[float]]:
    """CPU time of a batch against OFF by number of neighbors: encoded with the text, and encoded before."""
    model, windows, split = corpus.losses.model, corpus.windows[:4], corpus.held_out.split
    place, work = corpus.losses.place, dict[tuple[int, bool], Callable[[], object]]()
    retrieval = RetrievalSet.of(corpus.held_out.datastore)

    def forward(batch: Inputs, known: tuple[Tensor, Tensor] | None) -> None:
        hidden, _ = model.hidden(batch, known)
        token_losses(hidden, model.output_weight, batch.labels, None)

    with torch.inference_mode(), place.autocast():
        for k in (0, 1, 2, 4):
            ((_, arrays),) = window_batches(split, retrieval, windows, len(windows), NeighborUse(k))
            batch = place.put(as_tensors(arrays))
            work[k, False] = partial(forward, batch, None)
            if k:
                work[k, True] = partial(forward, batch, model.encode_neighbors(batch.neighbors.flatten(0, 1)))
        spent = defaultdict(list)
        for _ in range(_ROUNDS):
            for row, run in work.items():
                began = time.process_time()
                run()
                spent[row].append(time.process_time() - began)
    least = {row: min(times) for row, times in spent.items()}
    return {str(k): [least[k, known] / least[0, False] for known in (False, True)] for k in (1, 2, 4)}


def row_as_json(row: str, result: SetResult, off: SetResult, cost: float) -> dict[str, Any]:
    """A row of the table as plain values."""
    return {"row": row, **result.as_json(), "change": compare(result, off), "cost": cost}


def summary(folder: Path) -> None:
    """Print the tables of all measured corpora as Markdown."""
    corpora = {file.name.split(".")[0]: json.loads(file.read_text()) for file in sorted(folder.glob("*.reader.json"))}
    measured = {name: one["rows"] for name, one in corpora.items() if "rows" in one}
    body, spent = [], []
    for rows in zip(*measured.values(), strict=True):
        label = rows[0]["row"]
        body.append(
            [label, *(f"{row['bits_per_byte']:.4f}" if label == OFF else percent(row["change"]) for row in rows)]
        )
        spent.append([label, *(f"{row['cost']:.2f}" for row in rows)])
        if "against copying" in rows[0]:
            body.append(["the same against copying", *(percent(row["against copying"]) for row in rows)])
    for label, part in (("held out", 0), ("held out, last two rows", -1)):
        counted = (rows[part] for rows in measured.values())
        body.append([label, *(f"{row['tokens']:,} tokens, {row['documents']} documents" for row in counted)])
    say(markdown(Table(["", *measured], body)) + "\n\n" + markdown(Table(["CPU time against OFF", *measured], spent)))
    for name, one in corpora.items():
        say(json.dumps({"corpus": name} | {key: one[key] for key in ("machine", "threads", "commit")}))
        for k, (together, before) in one.get("costs", {}).items():
            say(f"k = {k}: CPU time against OFF {together:.2f}, with neighbors encoded before {before:.2f}")


PARTS: dict[str, Callable[[Corpus], Any]] = {"rows": gains, "costs": costs}
"""What is measured for each corpus, by key of the file."""


def main() -> None:
    """Measure corpora, or print the tables."""
    parser = model_parser(__doc__)
    parser.add_argument("corpus", nargs="*", help="NAME=PATH")
    parser.add_argument("--tokens", type=int, default=1000, help="held-out tokens of each corpus")
    parser.add_argument("--chunk-length", type=int, default=32, help="of new datastores")
    parser.add_argument("--neighbors", choices=NEIGHBORS, default="ngrams", help="of new datastores")
    options = parser.parse_args()
    if options.base == "summary":
        summary(options.output)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    work = [(entry, part) for part in PARTS for entry in options.corpus]
    for entry, part in budget(options).each(work, "part"):
        name, _, path = entry.partition("=")
        file = options.output / f"{name}.reader.json"
        finished = json.loads(file.read_text()) if file.exists() else {}
        if part not in finished:
            corpus = Corpus.open(Path(options.base), name, path, options)
            kept = {key: value for key, value in finished.items() if key not in measured_on()}
            write(file, kept | {part: PARTS[part](corpus)})


if __name__ == "__main__":
    main()
