"""The first step of the `chunk` stage: scan the files of a corpus once, and plan its shards.

A generation stays as it was recorded if `corpus.paths` names none of its files.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from indexing.corpus.documents import BINARY_FILE, CorpusFile, CorpusProblem, CorpusSettings
from indexing.corpus.megatron import is_megatron
from indexing.corpus.scan import (
    CorpusListing,
    FileScan,
    FileSlice,
    find_duplicates,
    list_corpus,
    list_files,
    plan_shards,
    recipe_inputs,
    scan_file,
    shard_size,
    strict_problem,
)
from indexing.corpus.skipped import Skipped, skipped_line, with_binary
from indexing.progress import Advance
from indexing.store.artifact import (
    Recipe,
    create,
    damage,
    fingerprint,
    is_finished,
    parse_manifest,
    read_manifest,
    stored_json,
)
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.files import write_json
from pipelines.config import Config
from pipelines.executors.tasks import Executor, Task
from pipelines.stages.generations import (
    Problems,
    by_generation,
    first_shard,
    intact_folders,
    left_out_of,
    missing_generation,
    next_generation,
    read_plan,
    recorded_files,
    stored_files,
)
from pipelines.stages.shards import former_setting
from pipelines.stages.tokenizer import require_tokenizer
from pipelines.terminal.progress import progress

log = logging.getLogger("retro")

_LISTED = 1000  # problems of a kind
_DELETED = "deleted documents"  # in recipes: the fingerprint of the ids that a generation leaves out


def prepare(config: Config, executor: Executor) -> list[list[FileSlice]]:
    """Make `corpus/` unless it is finished; returns the slices of every shard. Without `corpus.paths`, every generation
    of a datastore stays as it was recorded.

    Raises:
        InputError: the files or settings differ from those of the finished corpus, or there is no text.
    """
    first = config.datastore / "corpus"
    nothing = CorpusListing([], {})
    listing = list_corpus(config.corpus) if config.corpus.paths or damage(first) else nothing
    files = listing.files
    require_tokenizer(config, files)
    groups, new = by_generation(config.datastore, files)
    if damage(first):  # or not made yet: files that no other generation has belong to the first
        groups, new = [(first, new), *groups], []
    if new:
        raise InputError(
            f"{config.datastore} was built without {len(new):,} files that corpus.paths names now (the first: {new[0].path}). "
            "Add them with `--append`, or rebuild everything: `--stage chunk --rebuild`."
        )
    for folder, named in groups:
        members = CorpusListing(named or recorded_files(folder), listing.skipped if folder == first else {})
        make_corpus(folder, config.corpus, members, executor, deleted=left_out_of(folder))
    if missing := missing_generation(config.datastore):
        raise InputError(f"{missing} is missing: add its files again with `--append --corpus.paths FILES`.")
    return read_plan(config.datastore)


def files_to_append(config: Config, executor: Executor) -> tuple[list[tuple[CorpusFile, FileScan]], Skipped]:
    """Find the files of `corpus.paths` that the datastore does not have, and scan them; returns also what those paths
    skip. Nothing is written.

    A file is known by its path, or, if its path is no longer given, by its name and content: the corpus may have moved.

    Raises:
        InputError: there is no intact datastore to append to, or a file is invalid, has changed since it was indexed,
            or is a copy of one that the datastore has.
    """
    listing = list_corpus(config.corpus)
    files = listing.files
    require_tokenizer(config, files)
    datastore = config.datastore
    if config.dedup.is_on:
        raise InputError(
            "--append and [dedup] cannot be combined: near copies are searched in the whole corpus at once. Build another "
            "datastore of the new files and name it in neighbors.extra_datastores, or rebuild everything."
        )
    if damage(datastore / "corpus"):
        raise InputError(
            f"{datastore} holds nothing to append to, or its corpus/ is damaged: run `retro index CONFIG` without "
            "--append first, with the files that it was built from."
        )
    stored = [file for folder in intact_folders(datastore) for file in stored_files(folder)]
    of_path = {file["path"]: file for file in stored}
    of_content = {file["checksum"]: file for file in stored}
    given = {file.path for file in files}
    moved = {(file["name"], file["checksum"]) for file in stored if file["path"] not in given}
    seen = {(file["path"], file["size"], file["modified"]) for file in stored}
    read = [file for file in files if (file.path, file.size, file.modified) not in seen]
    scans = _scan(config.corpus, read, executor, left_out_of(next_generation(datastore))) if read else []
    new = []
    for file, scan in zip(read, scans, strict=True):
        if file.path in of_path:
            if of_path[file.path]["checksum"] != scan.checksum:
                raise InputError(
                    f"{file.path} has changed since {datastore} was built; --append only adds files. Put it back, give the new "
                    "documents a file of their own, or rebuild everything: `--stage chunk --rebuild`."
                )
        elif (file.name, scan.checksum) not in moved:
            if scan.documents > 1 and scan.checksum in of_content:  # short texts, such as licenses, are often equal
                raise InputError(
                    f"{file.path} is a copy of {of_content[scan.checksum]['path']}, which {datastore} already has. Nothing was "
                    "added: remove it from corpus.paths."
                )
            new.append((file, scan))
    if not new:
        log.info("append: corpus.paths names no file that %s does not have", datastore)
    return new, listing.skipped


def append(config: Config, files: list[tuple[CorpusFile, FileScan]], skipped: Skipped) -> None:
    """Make a generation from scanned files, and record the numbers of `skipped` ones.

    Raises:
        InputError: the files hold no text, or are not those of a generation that is missing.
    """
    out, members, scans = next_generation(config.datastore), [file for file, _ in files], [scan for _, scan in files]
    recipe = _recipe(config.corpus, members, [scan.checksum for scan in scans], _print_of(left_out_of(out)))
    if missing_generation(config.datastore):
        shard = config.datastore / "chunks" / shard_name(first_shard(out))
        if not damage(shard) and parse_manifest(shard)["recipe"]["inputs"]["corpus"] != recipe.fingerprint:
            raise InputError(
                f"{out} is missing, and corpus.paths names other files than it was made from. Name exactly those first."
            )
    _write_corpus(out, recipe, config.corpus, CorpusListing(members, skipped), scans, "corpus.paths")
    counts = read_manifest(out)["counts"]
    log.info("append: %s new files with %s documents: %s", f"{len(files):,}", f"{counts['documents']:,}", out)


def list_files_before_rebuild(config: Config) -> None:
    """Check `corpus.paths` before anything is removed, and warn of appended files that a rebuild from it leaves out."""
    given = {file.path for file in list_files(config.corpus)}
    folders = [folder for folder in intact_folders(config.datastore) if folder.name != "corpus"]
    forgotten = [file["path"] for folder in folders for file in stored_files(folder) if file["path"] not in given]
    if forgotten:
        log.warning(
            "rebuild: %s appended files are left out, because corpus.paths does not name them (the first: %s)",
            f"{len(forgotten):,}",
            forgotten[0],
        )


def make_corpus(
    folder: Path,
    settings: CorpusSettings,
    listing: CorpusListing,
    executor: Executor,
    key: str = "corpus.paths",
    deleted: Sequence[str] = (),
) -> None:
    """Make the artifact `folder` unless it is finished: files, plan of shards, problems.

    Args:
        folder: where.
        settings: how the files are read.
        listing: the files, in order, and the numbers of skipped ones, which a new artifact records.
        executor: reads them.
        key: the setting with the paths.
        deleted: sorted ids of documents that a new artifact leaves out. A finished one stays as it is.

    Raises:
        InputError: the files or settings differ from those of the finished artifact, or there is no text.
    """
    files = listing.files
    if not settings.shard_bytes:  # an earlier version wrote the size that it chose
        settings = replace(settings, shard_bytes=former_setting(folder, "corpus.shard_bytes", 0))
    known = _known_checksums(folder, files)
    scans = None if known else _scan(settings, files, executor, deleted)
    checksums = known or [scan.checksum for scan in scans or []]
    recorded = {} if damage(folder) else read_manifest(folder)["recipe"]["settings"]
    recipe = _recipe(settings, files, checksums, recorded.get(_DELETED) if recorded else _print_of(deleted))
    if not is_finished(folder, recipe):
        _write_corpus(folder, recipe, settings, listing, scans or _scan(settings, files, executor, deleted), key)
    _report_problems(folder, listing.skipped)


def _recipe(settings: CorpusSettings, files: list[CorpusFile], checksums: Sequence[str], deleted: str | None) -> Recipe:
    """The recipe of a generation; `deleted` is the fingerprint of the ids that it leaves out, if any."""
    names = ["text_key", "id_key", "metadata_keys", "shard_bytes", "max_line_bytes"]
    names += ["boundary_ids"] if any(is_megatron(file.name) for file in files) else []
    values = {f"corpus.{name}": getattr(settings, name) for name in names}
    inputs = recipe_inputs([(file.name, value) for file, value in zip(files, checksums, strict=True)])
    return Recipe("chunk", 1, values | ({_DELETED: deleted} if deleted else {}), inputs)


def _print_of(deleted: Sequence[str]) -> str | None:
    return fingerprint(list(deleted)) if deleted else None


def _known_checksums(folder: Path, files: list[CorpusFile]) -> list[str] | None:
    """The checksums of an earlier scan, if names, sizes and times of all files have not changed."""
    if damage(folder):
        return None
    stored: list[Mapping[str, Any]] = [*stored_files(folder)]
    now = [asdict(file) for file in files]
    if [{key: value for key, value in file.items() if key != "checksum"} for file in stored] != now:
        return None
    return [file["checksum"] for file in stored]


def _scan(
    settings: CorpusSettings, files: list[CorpusFile], executor: Executor, deleted: Sequence[str]
) -> list[FileScan]:
    tasks = [Task(f"scan/{file.name}", (file, settings, deleted), max(1, file.size)) for file in files]
    with progress("scan", total=sum(task.size for task in tasks), unit="bytes") as advance:
        return list(executor.map("chunk", scan_task, tasks, advance))


def scan_task(file: CorpusFile, settings: CorpusSettings, deleted: Sequence[str], *, advance: Advance) -> FileScan:
    """Scan one file."""
    scan = scan_file(file, settings, deleted=deleted)
    advance(max(1, file.size))
    return scan


def _write_corpus(
    folder: Path, recipe: Recipe, settings: CorpusSettings, listing: CorpusListing, scans: list[FileScan], key: str
) -> None:
    files, skipped = (
        listing.files,
        with_binary(listing.skipped, [p.file for s in scans for p in s.examples if p.kind == BINARY_FILE]),
    )
    left_out, counts = sum(scan.left_out for scan in scans), Counter[str]()
    for scan in scans:
        counts.update({kind: count for kind, count in scan.problems.items() if kind != BINARY_FILE})
    if not any(scan.documents for scan in scans):
        counts += Counter({"deleted document": left_out})
        problems = ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) or "none"
        firsts = {problem.kind: problem for scan in reversed(scans) for problem in reversed(scan.examples)}
        listed = "".join(f"\n  {each.file}:{each.line}: {each.kind}: {each.detail}" for each in firsts.values())
        listed += f"\n  skipped: {skipped_line(skipped)}" if skipped else ""
        raise InputError(
            f"{key} = {', '.join(settings.paths)}: no document with text in {len(files):,} files. Problems: {problems}. The text is "
            f"read from corpus.text_key = {settings.text_key!r}.{listed}"
        )
    duplicates = find_duplicates(files, scans)
    if settings.strict and duplicates:
        strict_problem(duplicates[0])
    counts += Counter({"duplicate id": len(duplicates)})
    examples = _first_of_each_kind(itertools.chain(*(scan.examples for scan in scans), duplicates))
    with create(folder, recipe) as (work, totals):
        write_json(
            work / "files.json", [asdict(f) | {"checksum": s.checksum} for f, s in zip(files, scans, strict=True)]
        )
        plan = plan_shards(scans, shard_size(settings, sum(scan.text_bytes for scan in scans)))
        write_json(work / "plan.json", [[asdict(file_slice) for file_slice in shard] for shard in plan])
        stored = {"counts": counts, "examples": [asdict(problem) for problem in examples], "skipped": skipped}
        write_json(work / "problems.json", stored)
        totals |= {
            "files": len(files),
            "shards": len(plan),
            "documents": sum(scan.documents for scan in scans),
            "bytes": sum(scan.text_bytes for scan in scans),
            "left_out": left_out,
        }


def _first_of_each_kind(problems: Iterable[CorpusProblem]) -> list[CorpusProblem]:
    """The problems to list. There may be one in each of millions of files."""
    kept, numbers = list[CorpusProblem](), Counter[str]()
    for problem in problems:
        numbers[problem.kind] += 1
        if numbers[problem.kind] <= _LISTED and problem.kind != BINARY_FILE:
            kept.append(problem)
    return kept


def _report_problems(folder: Path, skipped_now: Skipped) -> None:
    """Log the skipped files, the problems in the others with file and line of the first of each kind, and the number of
    deleted documents."""
    problems = stored_json(folder / "problems.json", Problems)
    if skipped := problems.get("skipped", skipped_now):  # older datastores do not record it
        number = f"{sum(sum(counts.values()) for counts in skipped.values()):,}"
        advice = "; corpus.suffixes adds text files by suffix or name" if "unknown suffix" in skipped else ""
        log.info("%s: scan: %s files skipped: %s%s", folder.name, number, skipped_line(skipped), advice)
    for kind, count in sorted(problems["counts"].items()):
        first = next((problem for problem in problems["examples"] if problem["kind"] == kind), None)
        where = f"; first: {first['file']}:{first['line']}: {first['detail']}" if first else ""
        log.warning("%s: %s: %s%s", folder.name, kind, f"{count:,}", where)
    if problems["counts"]:
        log.warning("%s: up to %s of each by file and line: %s", folder.name, f"{_LISTED:,}", folder / "problems.json")
    if omitted := read_manifest(folder)["counts"].get("left_out"):
        log.info("%s: %s deleted documents are left out", folder.name, f"{omitted:,}")
