"""What each verb of the command line does with its settings: a few lines of calls into the layers below."""

import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from indexing.store.artefact import read_manifest
from indexing.store.datastore import Datastore, shard_name
from indexing.store.deleted import deleted_ranges
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.store.remote import present
from indexing.tokenizer import read_meta
from pipelines.config import Config
from pipelines.progress import StagesView, aligned, human_bytes, progress
from retro.evaluation import EvaluationSettings
from retro.generation import GenerationSettings
from retro.loggers import as_line

log = logging.getLogger("retro")


@dataclass(frozen=True)
class IndexOptions(Config):
    """Build a datastore, or bring it up to date. What is finished is kept, so a stopped run goes on where it was."""

    stage: Literal["all", "chunk", "embed", "train-index", "add", "neighbors", "materialise", "merge"] = "all"
    """One stage only; `all` runs them in order (`materialise` where neighbors.materialised asks for it)."""
    rebuild: bool = False
    """First remove what this stage and the ones after it have made."""
    append: bool = False
    """First add the files of the corpus that the datastore does not have, as new shards with the trained index as it is."""
    strict: bool = False
    """Stop at the first problem in the corpus instead of reporting it."""


def index(options: IndexOptions) -> int:
    """`retro index CONFIG`."""
    from pipelines.executors import make_executor
    from pipelines.index_report import summary_table, write_index_report
    from pipelines.stages import build

    config = replace(options, corpus=replace(options.corpus, strict=options.corpus.strict or options.strict))
    view = StagesView()
    datastore = build(
        config,
        make_executor(config.executor),
        only=options.stage,
        rebuild=options.rebuild,
        append=options.append,
        view=view,
    )
    if datastore.has("neighbors"):
        print_rows(summary_table(write_index_report(datastore, view.steps)).rows)
        print(f"report: {datastore.folder / 'report.html'}")
    return 0


@dataclass(frozen=True)
class PlanOptions(Config):
    """What a datastore takes in bytes, time, memory and money, from a calibration of about a minute on this machine."""

    tokens: float = 0.0
    """Tokens of the datastore (2e12); 0 = those of `corpus.paths`."""
    machines: int = 1
    """Machines like this one that work side by side."""
    price: float = 0.0
    """Of a machine for an hour, in any currency; 0 = no costs are shown."""
    days: float = 30.0
    """Time within which everything should be done: how many machines that takes is printed."""
    nprobe: int = 0
    """Inverted lists that a search visits; 0 = extrapolated from what the recall target took in the calibration."""
    sample_bytes: int = 8 * 2**20
    """Text that the calibration builds: more takes longer and tells more."""
    json: str = ""
    """File to write the calibration and the plans to, in bytes and seconds."""

    def __post_init__(self) -> None:
        for key, least in (("tokens", 0), ("price", 0), ("nprobe", 0), ("machines", 1), ("sample_bytes", 10**6)):
            if not least <= getattr(self, key) < float("inf"):
                raise InputError(f"{key} = {getattr(self, key):g}: must be at least {least:,}.")
        if not 0 < self.days < float("inf"):
            raise InputError(f"days = {self.days:g}: must be above 0.")


def plan(options: PlanOptions) -> int:
    """`retro plan [CONFIG]`."""
    from pipelines.calibration import calibrate
    from pipelines.plan import PAPER_CHUNKS, corpus_tokens, paper_config, plan_for
    from pipelines.plan_report import as_json, calibration_rows, plan_tables

    calibration = calibrate(options, tokens=options.tokens, sample_bytes=options.sample_bytes)
    machines, price = options.machines, options.price
    plans = {
        "planned": plan_for(
            options, calibration, options.tokens or corpus_tokens(options, calibration), machines, price, options.nprobe
        ),
        "paper": plan_for(
            paper_config(options), calibration, 64 * PAPER_CHUNKS, machines, price, options.nprobe, paper=True
        ),
    }
    titles = {
        "planned": "This datastore",
        "paper": "The paper's 2 trillion tokens: 28 billion full chunks of 64 tokens of 4 bytes, with this embedder",
    }
    print_rows(calibration_rows(calibration))
    for name, each in plans.items():
        print(f"\n{titles[name]}")
        for rows in plan_tables(each, calibration, machines, price, options.days):
            print_rows(rows)
            print()
    if options.json:
        write_json(Path(options.json), as_json(calibration, plans))
    return 0


def train(config: Config) -> int:
    """`retro train CONFIG`."""
    from pipelines.run_report import write_run_report

    outcome = run_training(config, "train")
    print(as_line(outcome.metrics[-1]))
    print(f"checkpoint: {outcome.checkpoint}")
    write_run_report([config.run], config.run / "report.html")
    print(f"report: {config.run / 'report.html'}")
    return 0


def run_training(config: Config, name: str) -> Any:
    """Train with a progress bar; see `retro.trainer.train`."""
    from retro import trainer

    folders = list(config.data.datastores) or [config.datastore]
    per_step = config.train.batch_size * config.train.accumulation * config.data.sequence_length
    with progress(name, total=config.train.steps * per_step, unit="tokens") as advance:
        return trainer.train(
            config.run, folders, config.model, config.data, config.train, config.evaluation, advance=advance
        )


@dataclass(frozen=True)
class EvalOptions:
    """Bits-per-byte of held-out documents, retrieval OFF and ON."""

    against: str = ""
    """Another checkpoint or run, say the baseline: scored on the same sets and windows, and compared."""
    datastore: str = ""
    """Datastore in place of those of the training run: its held-out documents are scored."""
    leakage_from: str = ""
    """Datastore of the same chunks whose nearest neighbors say what leaks; empty: that of each set."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    json: str = ""
    """File to write the results to, with the fingerprints of checkpoints and datastores."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


def evaluate(checkpoint: str, options: EvalOptions) -> int:
    """`retro eval CHECKPOINT`."""
    from pipelines.eval_report import (
        as_json,
        change_lines,
        leakage_table,
        levels_of,
        measure_checkpoints,
        results_table,
    )
    from retro.checkpoint import open_checkpoint
    from retro.evaluation_sets import open_sets

    settings = options.evaluation
    opened = [open_checkpoint(Path(path)) for path in (checkpoint, options.against) if path]
    folders = [options.datastore] if options.datastore else opened[0].settings["data"]["datastores"]
    k = max(settings.k, default=0) if any(each.model.cca_layers for each in opened) else 0
    sets = open_sets(settings.sets, [Path(folder) for folder in folders], opened[0].model, k)
    if not sets:
        raise InputError(f"{checkpoint}: its datastores hold nothing out; name documents with --evaluation.sets.")
    source = Datastore.open(options.leakage_from) if options.leakage_from else None
    measured = measure_checkpoints(opened, sets, settings, options.device, source)
    levels = [
        level for each, rows in zip(sets, measured, strict=True) for level in levels_of(each, rows, settings, source)
    ]
    table = results_table([each for rows in measured for each in rows])
    print_rows([table.header, *table.rows])
    print("\n".join(change_lines(levels)))
    if any(level.leakage_at_most is not None for level in levels):
        table = leakage_table(levels, [each.label for each in measured[0]])
        print_rows([[], table.header, *table.rows])
    if options.json:
        prints = dict(zip(("checkpoint", "against"), (each.fingerprint for each in opened), strict=False))
        datastores = {each.name: each.datastore.fingerprint for each in sets}
        write_json(Path(options.json), {"fingerprints": prints | {"datastores": datastores}} | as_json(levels))
    return 0


@dataclass(frozen=True)
class ReportOptions:
    """What training runs did, on one page: curves, held-out figures, settings. Also of a run that still goes on."""

    out: str = ""
    """HTML file to write; empty: `report.html` in the run's folder, for several runs `comparison.html` in the first one's."""


def report(runs: list[str], options: ReportOptions) -> int:
    """`retro report RUN [RUN2 …]`."""
    from pipelines.run_report import write_run_report

    folders = [Path(run) for run in runs]
    path = Path(options.out) if options.out else folders[0] / ("comparison.html" if folders[1:] else "report.html")
    print_rows(write_run_report(folders, path))
    print(f"report: {path}")
    return 0


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt, with retrieval at every chunk boundary."""

    prompt: str = ""
    """Text to continue; empty: from the beginning of a document."""
    retrieval: bool = True
    """Whether finished chunks ask the datastore for neighbors."""
    k: int = 2
    """Neighbors of each chunk."""
    datastore: str = ""
    """Datastore to search; empty: the one of the training run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    generation: GenerationSettings = field(default_factory=GenerationSettings)


def generate(checkpoint: str, options: GenerateOptions) -> int:
    """`retro generate CHECKPOINT`."""
    from retro.checkpoint import load_model, open_checkpoint
    from retro.device import place

    opened = open_checkpoint(Path(checkpoint))
    folder = Path(options.datastore or opened.settings["data"]["datastores"][0])
    placement = place(options.device, opened.settings["train"]["precision"])
    model = load_model(opened, placement.device)
    print(options.prompt + generate_text(model, folder, options, placement, opened.settings["data"]["sequence_length"]))
    return 0


def generate_text(model: Any, folder: Path, options: GenerateOptions, placement: Any, context: int) -> str:
    """The continuation of a prompt as text."""
    from indexing.tokenizer import Tokenizer
    from retro.generation import generate as sample

    tokenizer = Tokenizer.open(folder / "tokenizer")
    retrieve = None
    if options.retrieval and model.settings.cca_layers:
        from indexing.retriever import Retriever

        retriever = Retriever.open(folder)
        retrieve = lambda chunks: retriever.neighbors(chunks, options.k)  # noqa: E731
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(options.prompt)]).astype(np.int64)
    with progress("generate", total=options.generation.max_tokens, unit="tokens") as advance:
        tokens = []
        for token in sample(
            model, prompt, options.generation, placement, eos_id=tokenizer.eos_id, context=context, retrieve=retrieve
        ):
            tokens.append(token)
            advance(1)
    return tokenizer.decode(np.array(tokens, dtype=np.int64))


@dataclass(frozen=True)
class SearchOptions:
    """The chunks of a datastore that are nearest to a text."""

    k: int = 5
    """How many."""
    json: bool = False
    """Print JSON instead of text."""


def search(datastore: str, text: str, options: SearchOptions) -> int:
    """`retro search DATASTORE "text"`."""
    from dataclasses import asdict

    from indexing.retriever import Retriever

    hits = Retriever.open(datastore).search([text], options.k)[0]
    if options.json:
        print(json.dumps([asdict(hit) for hit in hits], ensure_ascii=False, indent=1))
        return 0
    for rank, hit in enumerate(hits, start=1):
        print(f"{rank}. cosine {1 - hit.distance / 2:.3f}  {hit.document['id']}  (chunk {hit.chunk_id})")
        print(indented(hit.text) + (f"\n   ⋯\n{indented(hit.continuation)}" if hit.continuation else "") + "\n")
    return 0


@dataclass(frozen=True)
class DeleteOptions:
    """Delete documents of a datastore by id: no search and no batch names their chunks any more."""

    ids: tuple[str, ...] = ()
    """Their ids, as `retro search` shows them."""
    ids_from: str = ""
    """File with one id a line."""


def delete(datastore: str, options: DeleteOptions) -> int:
    """`retro delete DATASTORE --ids ID …`."""
    from indexing.store.deleted import delete_ranges

    opened = Datastore.open(datastore)
    wanted = [*options.ids, *(Path(options.ids_from).read_text().split("\n") if options.ids_from else ())]
    numbers = opened.train.find_documents([each for each in wanted if each])
    if not numbers:
        raise InputError("name documents to delete: --ids ID …, or --ids-from FILE with one id a line.")
    ranges = np.array([opened.train.chunk_range(number) for number in numbers], dtype=np.int64)
    print(
        f"{datastore}: {delete_ranges(opened.folder, ranges):,} documents deleted, {int(np.diff(ranges).sum()):,} chunks"
    )
    return 0


@dataclass(frozen=True)
class InspectOptions:
    """What a datastore or a checkpoint holds."""


def inspect(path: str, options: InspectOptions) -> int:
    """`retro inspect DATASTORE|CHECKPOINT`."""
    from retro.checkpoint import locate

    if locate(Path(path)) is not None:
        return inspect_checkpoint(Path(path))
    return inspect_datastore(Path(path))


def inspect_datastore(folder: Path) -> int:
    """Totals, stages, problems of the corpus, near copies removed and, where it has been measured, the report."""
    from pipelines import dedup_stage
    from pipelines.index_report import recalls

    datastore = Datastore.open(folder)
    folder = datastore.folder
    meta = read_meta(folder / "tokenizer")
    rows = [
        ["fingerprint", datastore.fingerprint],
        ["tokenizer", f"{meta.kind}, {meta.vocab_size:,} tokens, {'lossless' if meta.lossless else 'not lossless'}"],
    ]
    rows.append(["chunk length", str(datastore.chunk_length)])
    for name in datastore.split_names:
        totals = datastore.manifest["splits"][name]
        parts = (f"{sum(totals[key]):,} {key}" for key in ("documents", "chunks", "tokens", "bytes"))
        rows.append([name, ", ".join(parts) + f", in {len(totals['chunks'])} shards"])
    rows.append(["finished stages", ", ".join(datastore.manifest["fingerprints"])])
    problems = read_json(present(folder / "corpus" / "problems.json"))["counts"]
    rows.append(["corpus problems", ", ".join(f"{kind}: {count:,}" for kind, count in problems.items()) or "none"])
    if "dedup" in read_manifest(folder / "chunks" / shard_name(0))["recipe"]["inputs"]:
        rows.append(["dedup", dedup_stage.summary(folder / dedup_stage.FOLDER / "removed")])
    rows.append(["on disk", human_bytes(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))])
    rows.append(["deleted", f"{len(deleted_ranges(folder)):,} documents"])
    if (folder / "report.json").exists():
        measured = read_json(folder / "report.json")
        rows.append(["index", f"{measured['index']['key']}, nprobe {measured['index']['nprobe']}"])
        rows += [[f"recall at {k}", f"{value:.3f}"] for k, value in recalls(measured)]
    print_rows(rows)
    return 0


def inspect_checkpoint(path: Path) -> int:
    """Step, sizes, parameters and settings."""
    import torch

    from retro.checkpoint import open_checkpoint
    from retro.model import Retro
    from retro.presets import count_parameters

    opened = open_checkpoint(path)
    with torch.device("meta"):
        model = Retro(opened.model)
    rows = [["checkpoint", str(opened.path)], ["fingerprint", opened.fingerprint]]
    rows += [["step", f"{opened.step:,}"], ["tokens", f"{opened.tokens:,}"]]
    rows.append(
        ["parameters", f"{count_parameters(model):,} and {count_parameters(model, embeddings=True):,} with embeddings"]
    )
    rows.append(["datastores", ", ".join(opened.settings["data"]["datastores"])])
    rows += [
        [f"{section}.{key}", str(value)] for section, values in opened.settings.items() for key, value in values.items()
    ]
    print_rows(rows)
    return 0


@dataclass(frozen=True)
class VerifyOptions:
    """Check every checksum and cross-reference of a datastore: one line for each thing that is broken, with how to mend it."""

    mend: bool = False
    """Remove what is broken, so that `retro index CONFIG` makes it again."""


def verify(datastore: str, options: VerifyOptions) -> int:
    """`retro verify DATASTORE`: 0 = all is well, 1 = something is broken."""
    from indexing.verify import mend, verify_datastore
    from pipelines.stages import lock

    folder = Path(datastore)
    with lock(folder) if options.mend and (folder / ".lock").exists() else nullcontext():
        found = verify_datastore(folder, progress)
        removed = mend(folder, found) if options.mend else []
    for problem in found.problems:
        print(problem)
    size = f"{found.artefacts:,} artefacts, {found.files:,} files, {human_bytes(found.bytes)}"
    if not found.problems:
        print(f"{folder}: {size}, finished stages {', '.join(found.stages)}: all is as it was written")
        return 0
    print(f"{folder}: {size}: {len(found.problems)} broken")
    if options.mend:
        print(f"removed {', '.join(removed) or 'nothing'}; `retro index CONFIG` makes it again")
    return 1


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint's weights, settings and fingerprints as one file, which then serves as CHECKPOINT too."""

    to: Path
    """The file, `NAME.safetensors`."""


def export(checkpoint: str, options: ExportOptions) -> int:
    """`retro export CHECKPOINT --to FILE.safetensors`."""
    from retro.checkpoint import export as write
    from retro.checkpoint import open_checkpoint

    opened = open_checkpoint(Path(checkpoint))
    write(opened, options.to)
    print(f"{options.to}: {human_bytes(options.to.stat().st_size)}, step {opened.step:,} of {opened.path}")
    return 0


def print_rows(rows: list[list[str]]) -> None:
    """Rows of text as aligned columns on standard output."""
    print("\n".join(aligned(rows)))


def indented(text: str) -> str:
    """Text moved in by three blanks."""
    return "\n".join(f"   {line}" for line in text.splitlines())
