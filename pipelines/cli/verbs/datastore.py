"""Verbs that plan, build, search and check datastores."""

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from indexing.retrieval.filters import stored_examples
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import Hit
from indexing.store.artifact import read_manifest
from indexing.store.datastore import SPLITS, Datastore, delete_documents, read_report, shard_name
from indexing.store.deletions import read_deletions
from indexing.store.errors import InputError
from indexing.store.settings import settings
from indexing.store.stages import StageName
from indexing.tokenization.metadata import read_meta
from pipelines.cli.results import Format, ResultOptions, print_result
from pipelines.config import Config
from pipelines.terminal.output import aligned, echo, grouped, one_line, print_rows
from pipelines.terminal.progress import progress
from pipelines.terminal.stages import StagesView
from pipelines.terminal.units import counted, human_bytes
from retro.evaluation.settings import LEAST_DOCUMENTS

log = logging.getLogger("retro")

_CHUNKS_FOR_DOCUMENTS = 10  # chunks that `retro search` reads for each one that it prints


@settings
class IndexOptions(Config):
    """Build a datastore, or update it. Finished parts are kept, so a stopped run continues where it was.

    In place of a file of settings, `retro index CORPUS` takes text: a file, folder, glob or URL. The datastore is then
    `datastores/NAME`. `--tokenizer MODEL`, a folder or a name on the Hugging Face Hub, makes one for a model of
    transformers: without neighbors, unless --skip-stages says otherwise.
    """

    stage: Literal["all"] | StageName = "all"
    """Run one stage only; `all` runs them in order (`ngrams` only for neighbors by n-grams, `materialize` only if
    neighbors.materialized is set, others unless skip_stages leaves them out). By name `merge` makes one index file for
    serving."""
    rebuild: bool = False
    """First remove the files of this stage and of all stages that depend on it. Deleted documents stay deleted
    (`retro delete`): new chunks are made without them."""
    append: bool = False
    """First add the files of `corpus.paths` that the datastore does not have, as new shards. Files that it has need not
    be named. The trained index stays as it is."""
    strict: bool = False
    """Stop at the first problem in the corpus instead of counting it."""


def index(options: IndexOptions) -> int:
    """`retro index CONFIG`."""
    from pipelines.executors.factory import make_executor

    executor = make_executor(options.executor)  # a worker on Ray starts during these imports
    from pipelines.cli.reports.datastore import summary_table, write_index_report
    from pipelines.stages.table import STAGES, build

    config = replace(options, corpus=replace(options.corpus, strict=options.corpus.strict or options.strict))
    view = StagesView()
    datastore = build(
        config,
        executor,
        only=options.stage,
        rebuild=options.rebuild,
        append=options.append,
        view=view,
    )
    del executor  # and its workers
    _warn_if_little_is_held_out(datastore, config.corpus.split)
    print_rows(summary_table(write_index_report(datastore, view.steps, config.neighbors.extra_datastores)).rows)
    if not datastore.has("neighbors"):
        echo(f"finished stages: {', '.join(filter(datastore.has, STAGES))}")
    echo(f"report: {datastore.folder / 'report.html'}")
    return 0


def _warn_if_little_is_held_out(datastore: Datastore, split: tuple[float, float, float]) -> None:
    """Warn if the split `valid`, which evaluations score, is wanted and has fewer documents than intervals need."""
    held_out, trained = datastore.valid.num_documents, datastore.train.num_documents
    if split[1] and held_out < LEAST_DOCUMENTS:
        log.warning(
            "%s: %d of %d documents are held out. `retro eval` needs %d or more to measure what retrieval brings. Raise the "
            "second weight, for example corpus.split = [900, 100, 0], and run again with --rebuild; or add documents.",
            *(datastore.folder, held_out, held_out + trained, LEAST_DOCUMENTS),
        )


@settings
class PlanOptions(Config, ResultOptions):
    """Estimate size, time and memory of a datastore: build a sample of the corpus on this machine, and scale it."""

    tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Tokens of the datastore (2e12); 0 = all tokens of `corpus.paths`."""
    machines: PositiveInt = 1
    """Machines like this one that work in parallel."""
    sample_bytes: Annotated[int, Field(ge=10**6)] | None = None
    """Bytes of text in the sample. More bytes take longer and give a better estimate. None = 8 MiB, or an eighth of a
    smaller corpus, so that a plan takes less time than the build."""


def plan(options: PlanOptions) -> int:
    """`retro plan datastore [CONFIG]`."""
    from pipelines.cli.planning.datastore import as_json, plan_for, plan_tables, scaling
    from pipelines.cli.planning.sample import measure

    sample = measure(options, tokens=options.tokens, sample_bytes=options.sample_bytes)
    planned = plan_for(options, sample, options.tokens, options.machines)
    blocks = ["\n".join(aligned(rows)) for rows in plan_tables(planned, sample, options.machines)]
    options.deliver(as_json(sample, planned), "\n\n".join([*blocks, scaling(planned, sample)]))
    return 0


@settings
class SearchOptions:
    """Print the chunks of a datastore that answer a question or resemble a text best."""

    k: PositiveInt = 5
    """Number of chunks. They come from different documents: of ten times as many chunks, the best one of each document
    is printed, in order, and others only if there are fewer documents. `--same-document` prints the best chunks of
    any."""
    same_document: bool = False
    """Print the best chunks, also if several are of one document."""
    retrieval: Retrieval = "hybrid"
    """Search for chunks: by embeddings (`dense`), by terms (`sparse`), or by both (`hybrid`)."""
    filters: tuple[str, ...] = ()
    """`COLUMN=VALUE`: search only documents with this value. Several values of one column are alternatives."""
    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""
    format: Format = "text"
    """Print `text`, in which control characters are shown as `\\u001b`, or `json` with the exact texts."""


def search(datastore: str, text: str, options: SearchOptions) -> int:
    """`retro search DATASTORE "text"`."""
    from indexing.retrieval.retriever import Retriever

    retriever = Retriever.open(datastore, *options.extra_datastores)
    filters = parse_filters(options.filters)
    k = options.k if options.same_document else options.k * _CHUNKS_FOR_DOCUMENTS
    hits = retriever.search([text], k, filters=filters, retrieval=options.retrieval).hits[0]
    hits = hits if options.same_document else of_different_documents(hits, options.k)
    for column in filters if not hits else ():
        examples = ", ".join(map(repr, stored_examples(retriever.retrieval.own, column)))
        log.warning(
            "nothing found with --filters %s; values of %s are stored as %s", column, column, examples or "null"
        )
    text = "\n".join(_hit_text(rank, hit) for rank, hit in enumerate(hits, start=1))
    named = ("chunk_id", "score", "distance", "text", "continuation")
    rows = [{name: getattr(hit, name) for name in named} | {"document": hit.metadata} for hit in hits]
    print_result(rows, text, options.format)
    return 0


def of_different_documents(hits: Sequence[Hit], k: int) -> list[Hit]:
    """Choose k hits: the best one of each document, then the best others. They stay in order."""
    first: dict[str, int] = {}
    for rank, hit in enumerate(hits):
        first.setdefault(hit.document_id, rank)
    others = [rank for rank, hit in enumerate(hits) if first[hit.document_id] != rank]
    return [hits[rank] for rank in sorted([*first.values(), *others][:k])]


def _hit_text(rank: int, hit: Hit) -> str:
    distance = "" if hit.distance is None else f"  distance {hit.distance:.3f}"
    figures = f"score {hit.score:.3f}{distance}"
    continuation = f"\n   ⋯\n{indented(hit.continuation)}" if hit.continuation else ""
    name = f"{one_line(hit.document_id)}  (chunk {hit.chunk_id})"
    return f"{rank}. {figures}  {name}\n{indented(hit.text)}{continuation}\n"


def parse_filters(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse filters, `COLUMN=VALUE` each, into the values of every column.

    Raises:
        InputError: a filter has another form.
    """
    filters: dict[str, list[str]] = {}
    for word in words:
        column, equals, value = word.partition("=")
        if not column or not equals:
            raise InputError(f"--filters {word!r}: must be COLUMN=VALUE, for example source=wiki.")
        filters.setdefault(column, []).append(value)
    return filters


@settings
class DeleteOptions:
    """Delete all documents with some ids, training and held-out ones. From then on they are in no result of a search,
    no neighbors, no training batch (as text, their tokens are neither learned nor read as context) and no evaluation.
    Rebuilds and `--append` leave documents with these ids out. Their bytes stay in the files
    until `retro index CONFIG --rebuild`, which keeps them out of chunks, embeddings and index. Trained models, caches
    and reports are not changed."""

    ids: tuple[str, ...] = ()
    """Ids of documents, as `retro search` prints them."""
    ids_from: str = ""
    """File with one id per line."""


def delete(datastore: str, options: DeleteOptions) -> int:
    """`retro delete DATASTORE --ids ID …`."""
    ids = {*options.ids, *(Path(options.ids_from).read_text().split("\n") if options.ids_from else ())} - {""}
    if not ids:
        raise InputError("no documents to delete: set --ids ID …, or --ids-from FILE with one id per line.")
    documents, chunks = delete_documents(Datastore.open(datastore).folder, ids)
    echo(f"{datastore}: {documents:,} documents deleted, {chunks:,} chunks")
    return 0


def inspect_datastore(folder: Path, form: Format) -> int:
    """Print totals, stages, problems of the corpus, removed near copies and, where there is a report, the recalls."""
    from pipelines.stages import dedup
    from pipelines.stages.generations import counts_of

    datastore = Datastore.open(folder)
    folder = datastore.folder
    totals = {
        name: {key: sum(counts) for key, counts in split.items()} | {"shards": len(split["chunks"])}
        for name, split in datastore.manifest["splits"].items()
    }
    deduplicated = "dedup" in read_manifest(folder / "chunks" / shard_name(0))["recipe"]["inputs"]
    metadata = {
        "path": str(folder),
        "fingerprint": datastore.fingerprint,
        "stages": list(datastore.manifest["fingerprints"]),
        "tokenizer": asdict(read_meta(folder / "tokenizer")),
        "chunk_length": datastore.chunk_length,
        "deleted_documents": len(read_deletions(folder).documents),
        "deleted_documents_on_disk": sum(len(datastore.split(name).deleted) for name in SPLITS),
        "disk_bytes": _disk_bytes(folder),
        "splits": totals,
        **counts_of(folder / "corpus"),
        "dedup": dedup.summary(folder / dedup.REMOVED) if deduplicated else None,
        "report": read_report(folder),
    }
    print_result(metadata, grouped(_datastore_groups(metadata)), form)
    return 0


def _disk_bytes(folder: Path) -> int:
    """Bytes of all files. During a build, temporary folders can vanish while they are listed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _datastore_groups(metadata: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The rows of `retro inspect DATASTORE` under their headings."""
    from indexing.corpus.skipped import skipped_line

    tokenizer = metadata["tokenizer"]
    lossless = "lossless" if tokenizer["lossless"] else "not lossless"
    rows = [
        ["fingerprint", metadata["fingerprint"]],
        ["finished stages", ", ".join(metadata["stages"])],
        ["tokenizer", f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, {lossless}"],
        ["chunk length", str(metadata["chunk_length"])],
        [
            "deleted",
            f"{metadata['deleted_documents']:,} ids, {metadata['deleted_documents_on_disk']:,} documents on disk until a rebuild",
        ],
        ["on disk", human_bytes(metadata["disk_bytes"])],
    ]
    corpus = []
    for name, totals in metadata["splits"].items():
        parts = (f"{totals[key]:,} {key}" for key in ("documents", "chunks", "tokens", "bytes"))
        corpus.append([name, ", ".join(parts) + f", in {totals['shards']} shards"])
    problems = ", ".join(f"{kind}: {count:,}" for kind, count in metadata["problems"].items())
    corpus.append(["problems", problems or "none"])
    corpus += [["skipped files", skipped_line(metadata["skipped"])]] if metadata["skipped"] else []
    corpus += [["dedup", metadata["dedup"]]] if metadata["dedup"] else []
    return {metadata["path"]: rows, "corpus": corpus} | (
        _measured_groups(metadata["report"]) if "index" in (metadata["report"] or {}) else {}
    )


def _measured_groups(measured: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Recalls of two searches: that of queries, and the one that found the stored neighbors."""
    from pipelines.cli.reports.datastore import recalls

    index = measured["index"]
    return {
        "index, for `retro search` and the server": [
            ["searched with", f"{index['key']}, nprobe {index['nprobe']}"],
            ["recall at 10", f"{index['recall_at_10']:.3f}"],
        ],
        "stored neighbors, for training and evaluation": [
            ["found by", measured["search"]],
            *([f"recall at {k}", f"{value:.3f}"] for k, value in recalls(measured)),
        ],
    }


@settings
class VerifyOptions:
    """Compare every file with its checksum, and check the cross-references of a datastore. A run has all of its
    checkpoints checked. Each error is one line that says how to repair it."""

    repair: bool = False
    """Remove the broken parts of a datastore. `retro index CONFIG` then builds them again."""


def verify(datastore: str, options: VerifyOptions) -> int:
    """`retro verify DATASTORE`: 0 = no errors, 1 = errors."""
    from indexing.verification.datastore import repair, verify_datastore
    from pipelines.stages.table import STAGES, lock

    folder = Path(datastore)
    with lock(folder) if options.repair and (folder / ".lock").exists() else nullcontext():
        result = verify_datastore(folder, progress, locked=options.repair)
        removed = repair(folder, result) if options.repair else []
    for problem in result.problems:
        echo(problem)
    size = f"{result.artifacts:,} artifacts, {result.files:,} files, {human_bytes(result.bytes)}"
    if not result.problems:
        stages = ", ".join(stage for stage in STAGES if stage in result.stages)
        echo(f"{folder}: {size}, finished stages {stages}: no errors")
        return 0
    echo(f"{folder}: {size}: {counted(len(result.problems), 'error')}")
    if options.repair:
        append = " --append" if any(name.startswith("appended/") for name in removed) else ""
        echo(f"removed {', '.join(removed) or 'nothing'}; `retro index CONFIG{append}` builds them again")
    return 1


def indented(text: str) -> str:
    """Text with every line indented by three blanks."""
    return "\n".join(f"   {line}" for line in text.splitlines())
