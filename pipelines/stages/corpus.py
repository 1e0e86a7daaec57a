"""The first half of the `chunk` stage: scan the corpus once, plan its shards, make the tokenizer.

A datastore grows by generations. `corpus/` is the first, and every `--append` adds one to `appended/`, with new shards after the
existing ones. Tokenizer, embedder, trained index and `nprobe` of the first generation stay. A generation stays as it was
recorded if `corpus.paths` names none of its files. Documents that were deleted before a generation is made are left out of it.

corpus/     files.json (names, sizes, checksums)   plan.json (slices of every shard)   problems.json
tokenizer/  trained on a sample, or copied from `tokenizer.path`
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from indexing.corpus.megatron import is_megatron
from indexing.corpus.readers import CorpusFile, CorpusSettings
from indexing.corpus.scan import (
    FileScan,
    FileSlice,
    file_order,
    find_duplicates,
    list_files,
    plan_shards,
    read_slice,
    recipe_inputs,
    scan_file,
    split_of_document,
    strict_problem,
)
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
from indexing.store.datastore import read_datastore_manifest, shard_name
from indexing.store.deletions import left_out
from indexing.store.errors import InputError
from indexing.store.files import checksum, write_json
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.training import train_sentencepiece
from pipelines.config import Config
from pipelines.executors.tasks import Executor, Task
from pipelines.terminal.progress import progress

log = logging.getLogger("retro")

_DELETED = "deleted documents"  # in recipes: the fingerprint of the ids that a generation leaves out


def prepare(config: Config, executor: Executor) -> list[list[FileSlice]]:
    """Make `corpus/` and `tokenizer/` unless they are finished; returns the slices of every shard. Without `corpus.paths`, every
    generation of a datastore stays as it was recorded.

    Raises:
        InputError: the files or settings differ from those of the finished corpus, or there is no text.
    """
    first = config.datastore / "corpus"
    files = list_files(config.corpus) if config.corpus.paths or damage(first) else []
    require_tokenizer(config, files)
    groups, new = _by_generation(config.datastore, files)
    if damage(first):  # or not made yet: files that no other generation has belong to the first
        groups, new = [(first, new), *groups], []
    if new:
        raise InputError(
            f"{config.datastore} was built without {len(new):,} files that corpus.paths names now (the first: {new[0].path}). "
            "Add them with `--append`, or rebuild everything: `--stage chunk --rebuild`."
        )
    for folder, members in groups:
        look_through(folder, config.corpus, members or _recorded(folder), executor, deleted=_left_out(folder))
    if missing := missing_generation(config.datastore):
        raise InputError(f"{missing} is missing: add its files again with `--append --corpus.paths FILES`.")
    _make_tokenizer(config)
    return read_plan(config.datastore)


def files_to_append(config: Config, executor: Executor) -> list[tuple[CorpusFile, FileScan]]:
    """Find the files of `corpus.paths` that the datastore does not have, and scan them. Nothing is written.

    A file is known by its path, or, if its path is no longer given, by its name and content: the corpus may have moved.

    Raises:
        InputError: there is no intact datastore to append to, or a file is invalid, has changed since it was indexed, or is a copy
            of one that the datastore has.
    """
    files = list_files(config.corpus)
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
    stored = [file for folder in corpus_folders(datastore) if not damage(folder) for file in _stored(folder)]
    of_path = {file["path"]: file for file in stored}
    of_content = {file["checksum"]: file for file in stored}
    given = {file.path for file in files}
    moved = {(file["name"], file["checksum"]) for file in stored if file["path"] not in given}
    seen = {(file["path"], file["size"], file["modified"]) for file in stored}
    read = [file for file in files if (file.path, file.size, file.modified) not in seen]
    scans = _scan(config.corpus, read, executor, _left_out(_next_generation(datastore))) if read else []
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
    return new


def append(config: Config, files: list[tuple[CorpusFile, FileScan]]) -> None:
    """Make a generation from scanned files.

    Raises:
        InputError: the files hold no text, or are not those of a generation that is missing.
    """
    out, members, scans = _next_generation(config.datastore), [file for file, _ in files], [scan for _, scan in files]
    recipe = _recipe(config.corpus, members, [scan.checksum for scan in scans], _print_of(_left_out(out)))
    if missing_generation(config.datastore):
        shard = config.datastore / "chunks" / shard_name(_first_shard(out))
        if not damage(shard) and parse_manifest(shard)["recipe"]["inputs"]["corpus"] != recipe.fingerprint:
            raise InputError(
                f"{out} is missing, and corpus.paths names other files than it was made from. Name exactly those first."
            )
    _write_corpus(out, recipe, config.corpus, members, scans, "corpus.paths")
    counts = read_manifest(out)["counts"]
    log.info("append: %s new files with %s documents: %s", f"{len(files):,}", f"{counts['documents']:,}", out)


def list_files_before_rebuild(config: Config) -> None:
    """Check `corpus.paths` before anything is removed, and warn of appended files that a rebuild from it leaves out."""
    given = {file.path for file in list_files(config.corpus)}
    folders = [folder for folder in corpus_folders(config.datastore)[1:] if not damage(folder)]
    forgotten = [file["path"] for folder in folders for file in _stored(folder) if file["path"] not in given]
    if forgotten:
        log.warning(
            "rebuild: %s appended files are left out, because corpus.paths does not name them (the first: %s)",
            f"{len(forgotten):,}",
            forgotten[0],
        )


def corpus_folders(datastore: Path) -> list[Path]:
    """The corpus of every generation of a datastore, in order."""
    return [datastore / "corpus", *sorted((datastore / "appended").glob("[0-9]*"))]


def _first_shard(folder: Path) -> int:
    """The first shard of a generation, which need not be made yet."""
    if folder.name == "corpus":
        return 0
    earlier = [other for other in corpus_folders(folder.parent.parent) if other.name == "corpus" or other < folder]
    return sum(len(plan_of(other)) for other in earlier if not damage(other))


def _left_out(folder: Path) -> list[str]:
    """The ids of deleted documents that a generation is made without."""
    datastore = folder.parent if folder.name == "corpus" else folder.parent.parent
    return left_out(datastore, _first_shard(folder))


def _next_generation(datastore: Path) -> Path:
    """The folder of the first generation that is not there, or that is damaged."""
    folders = (datastore / "appended" / shard_name(number) for number in itertools.count(1))
    return next(folder for folder in folders if damage(folder))


def missing_generation(datastore: Path) -> Path | None:
    """The first generation that is not there, or that is damaged, if there is a later one or the manifest counts its shards."""
    first, folders = _next_generation(datastore), [folder for folder in corpus_folders(datastore) if not damage(folder)]
    try:
        listed = len(read_datastore_manifest(datastore)["splits"]["train"]["chunks"])
    except (FileNotFoundError, ValueError):
        listed = 0
    is_later = any(folder.parent == first.parent and folder > first for folder in folders)
    return first if is_later or listed > sum(len(plan_of(folder)) for folder in folders) else None


def _stored(folder: Path) -> list[dict[str, Any]]:
    """The files of a generation as recorded, with their checksums."""
    files: list[dict[str, Any]] = stored_json(folder / "files.json")
    return files


def _recorded(folder: Path) -> list[CorpusFile]:
    """The files of a generation as recorded."""
    return [CorpusFile(**{key: file[key] for key in file if key != "checksum"}) for file in _stored(folder)]


def _by_generation(
    datastore: Path, files: list[CorpusFile]
) -> tuple[list[tuple[Path, list[CorpusFile]]], list[CorpusFile]]:
    """Assign files to the finished generations; returns each generation with its files, and the files that are in none.

    A file is identified by its path, and keeps its recorded name. If the corpus has moved, a file with a new path is identified
    with a file of the same name and size whose path is no longer given.
    """
    folders = [folder for folder in corpus_folders(datastore) if not damage(folder)]
    stored = [(folder, file) for folder in folders for file in _stored(folder)]
    folder_of = {file["path"]: folder for folder, file in stored}
    given = {file.path for file in files}
    gone: dict[tuple[str, int], list[Path]] = {}
    for folder, file in reversed(stored):
        if file["path"] not in given:
            gone.setdefault((file["name"], file["size"]), []).append(folder)
    for corpus_file in files:
        if corpus_file.path not in folder_of and gone.get((corpus_file.name, corpus_file.size)):
            folder_of[corpus_file.path] = gone[corpus_file.name, corpus_file.size].pop()
    names = {file["path"]: file["name"] for _, file in stored}
    named = sorted((replace(file, name=names.get(file.path, file.name)) for file in files), key=file_order)
    groups = [(folder, [file for file in named if folder_of.get(file.path) == folder]) for folder in folders]
    return groups, [file for file in files if file.path not in folder_of]


def look_through(
    folder: Path,
    settings: CorpusSettings,
    files: list[CorpusFile],
    executor: Executor,
    key: str = "corpus.paths",
    deleted: Sequence[str] = (),
) -> None:
    """Make the artifact `folder` unless it is finished: files, plan of shards, problems.

    Args:
        folder: where.
        settings: how the files are read.
        files: the files, in order.
        executor: reads them.
        key: the setting with the paths.
        deleted: sorted ids of documents that a new artifact leaves out. A finished one stays as it is.

    Raises:
        InputError: the files or settings differ from those of the finished artifact, or there is no text.
    """
    known = _known_checksums(folder, files)
    scans = None if known else _scan(settings, files, executor, deleted)
    checksums = known or [scan.checksum for scan in scans or []]
    recorded = {} if damage(folder) else read_manifest(folder)["recipe"]["settings"]
    recipe = _recipe(settings, files, checksums, recorded.get(_DELETED) if recorded else _print_of(deleted))
    if not is_finished(folder, recipe):
        _write_corpus(folder, recipe, settings, files, scans or _scan(settings, files, executor, deleted), key)
    _report_problems(folder)


def _recipe(settings: CorpusSettings, files: list[CorpusFile], checksums: Sequence[str], deleted: str | None) -> Recipe:
    """The recipe of a generation; `deleted` is the fingerprint of the ids that it leaves out, if any."""
    names = ["text_key", "id_key", "metadata_keys", "shard_bytes"]
    names += ["boundary_ids"] if any(is_megatron(file.name) for file in files) else []
    # Only if it is not the default: datastores that are older than the setting have no such key.
    names += ["max_line_bytes"] if settings.max_line_bytes != CorpusSettings.max_line_bytes else []
    values = {f"corpus.{name}": getattr(settings, name) for name in names}
    inputs = recipe_inputs([(file.name, value) for file, value in zip(files, checksums, strict=True)])
    return Recipe("chunk", 1, values | ({_DELETED: deleted} if deleted else {}), inputs)


def _print_of(deleted: Sequence[str]) -> str | None:
    return fingerprint(list(deleted)) if deleted else None


def read_plan(datastore: Path) -> list[list[FileSlice]]:
    """The slices of every shard of a datastore, all generations."""
    return [shard for folder in corpus_folders(datastore) for shard in plan_of(folder)]


def generations(datastore: Path) -> list[range]:
    """The shard numbers of every generation of a datastore."""
    starts = [0]
    for folder in corpus_folders(datastore):
        starts.append(starts[-1] + len(plan_of(folder)))
    return [range(first, stop) for first, stop in itertools.pairwise(starts)]


def plan_of(folder: Path) -> list[list[FileSlice]]:
    """The slices of every shard of one generation, from its `plan.json`."""
    read_manifest(folder)

    def parsed(stored: dict[str, Any]) -> FileSlice:
        left_out = tuple(stored.get("left_out", ()))
        return FileSlice(**{**stored, "file": CorpusFile(**stored["file"]), "left_out": left_out})

    return [[parsed(stored) for stored in shard] for shard in stored_json(folder / "plan.json")]


def _known_checksums(folder: Path, files: list[CorpusFile]) -> list[str] | None:
    """The checksums of an earlier scan, if names, sizes and times of all files have not changed."""
    if damage(folder):
        return None
    stored = stored_json(folder / "files.json")
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
    folder: Path, recipe: Recipe, settings: CorpusSettings, files: list[CorpusFile], scans: list[FileScan], key: str
) -> None:
    left_out, counts = sum(scan.left_out for scan in scans), Counter[str]()
    for scan in scans:
        counts.update(scan.problems)
    if not any(scan.documents for scan in scans):
        counts += Counter({"deleted document": left_out})
        problems = ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) or "none"
        firsts = {problem.kind: problem for scan in reversed(scans) for problem in reversed(scan.examples)}
        listed = "".join(f"\n  {each.file}:{each.line}: {each.kind}: {each.detail}" for each in firsts.values())
        raise InputError(
            f"{key} = {', '.join(settings.paths)}: no document with text in {len(files):,} files. Problems: {problems}. The text is "
            f"read from corpus.text_key = {settings.text_key!r}.{listed}"
        )
    duplicates = find_duplicates(files, scans)
    if settings.strict and duplicates:
        strict_problem(duplicates[0])
    counts += Counter({"duplicate id": len(duplicates)})
    examples = [problem for scan in scans for problem in scan.examples] + duplicates[:1000]
    with create(folder, recipe) as (work, totals):
        write_json(
            work / "files.json", [asdict(f) | {"checksum": s.checksum} for f, s in zip(files, scans, strict=True)]
        )
        plan = plan_shards(scans, settings.shard_bytes)
        write_json(work / "plan.json", [[asdict(file_slice) for file_slice in shard] for shard in plan])
        write_json(work / "problems.json", {"counts": counts, "examples": [asdict(problem) for problem in examples]})
        totals |= {
            "files": len(files),
            "shards": len(plan),
            "documents": sum(scan.documents for scan in scans),
            "bytes": sum(scan.text_bytes for scan in scans),
            "left_out": left_out,
        }


def _report_problems(folder: Path) -> None:
    """Log the problems in the files, with file and line of the first of each kind, and the number of deleted documents."""
    problems: dict[str, Any] = stored_json(folder / "problems.json")
    for kind, count in sorted(problems["counts"].items()):
        first = next((problem for problem in problems["examples"] if problem["kind"] == kind), None)
        where = f"; first: {first['file']}:{first['line']}: {first['detail']}" if first else ""
        log.warning("%s: %s: %s%s", folder.name, kind, f"{count:,}", where)
    if problems["counts"]:
        log.warning("%s: all of them by file and line: %s", folder.name, folder / "problems.json")
    if omitted := read_manifest(folder)["counts"].get("left_out"):
        log.info("%s: %s deleted documents are left out", folder.name, f"{omitted:,}")


# --- tokenizer -----------------------------------------------------------------------------------------------------


def require_tokenizer(config: Config, files: list[CorpusFile]) -> None:
    """Reject training a tokenizer if some of the corpus is stored as tokens of another one."""
    tokens = next((file for file in files if is_megatron(file.name)), None)
    if tokens is not None and config.tokenizer.is_trained:
        raise InputError(
            f"tokenizer.kind = '{config.tokenizer.kind}' is trained on text, but {tokens.path} holds tokens. Set "
            "tokenizer.kind to 'sentencepiece' or 'huggingface', and tokenizer.path to the tokenizer that made them."
        )


def _make_tokenizer(config: Config) -> None:
    """Train the tokenizer on a sample of the training documents, or copy the one at `tokenizer.path`."""
    folder, settings = config.datastore, config.tokenizer
    if settings.is_trained:
        inputs = {"corpus": read_manifest(folder / "corpus")["fingerprint"]}
        seen = {"corpus.split": config.corpus.split}
    else:
        inputs, seen = {"tokenizer.path": _checksum_of(Path(settings.path))}, {}
    values = {f"tokenizer.{key}": value for key, value in asdict(settings).items()} | seen
    recipe = Recipe("chunk", 1, values, inputs)
    if is_finished(folder / "tokenizer", recipe):
        return
    with create(folder / "tokenizer", recipe) as (work, _):
        if settings.is_trained:
            total = read_manifest(folder / "corpus")["counts"]["bytes"]
            with progress("tokenizer", total=total, unit="bytes") as advance:
                train_sentencepiece(_training_texts(config, advance), settings, work)
        else:
            install_tokenizer(settings, work)


def _training_texts(config: Config, advance: Advance) -> Iterator[str]:
    """The text of every training document, in order, large ones in blocks. The tokenizer does not see held-out documents either."""
    empty = True
    for shard in plan_of(config.datastore / "corpus"):
        for file_slice in shard:
            for document in read_slice(file_slice, config.corpus, on_problem=lambda _: None):
                if split_of_document(document, config.corpus.split) == "train":
                    yield from document.blocks()
                    empty = False
                advance(document.size)
    if empty:
        raise nothing_left(config.corpus)


def nothing_left(settings: CorpusSettings) -> InputError:
    """The error if all documents are held out."""
    return InputError(
        f"corpus.split = {settings.split}: every document is held out and none is left for training and the index; "
        "raise the first weight ((1, 0, 0) holds out none) and add `--rebuild`."
    )


def _checksum_of(path: Path) -> str:
    if path.is_file():
        return checksum(path)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return fingerprint([checksum(path / name) for name in names if (path / name).is_file()])
