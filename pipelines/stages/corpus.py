"""The first half of the `chunk` stage: scan the corpus once, plan its shards, make the tokenizer.

A datastore grows by generations. `corpus/` is the first, and every `--append` adds one to `appended/`, with new shards after the
existing ones. Tokenizer, embedder, trained index and `nprobe` of the first generation stay.

corpus/     files.json (names, sizes, checksums)   plan.json (slices of every shard)   problems.json
tokenizer/  trained on a sample, or copied from `tokenizer.path`
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from indexing.corpus.megatron import is_megatron
from indexing.corpus.readers import CorpusFile, CorpusSettings
from indexing.corpus.scan import (
    FileScan,
    FileSlice,
    find_duplicates,
    list_files,
    plan_shards,
    read_slice,
    recipe_inputs,
    scan_file,
    split_of,
    strict_problem,
)
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, damage, fingerprint, is_finished, read_manifest, stored_json
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.files import checksum, write_json
from indexing.tokenization.tokenizer import install_tokenizer, train_sentencepiece
from pipelines.config import Config
from pipelines.executors.tasks import Executor, Task
from pipelines.terminal import progress

log = logging.getLogger("retro")


def prepare(config: Config, executor: Executor) -> list[list[FileSlice]]:
    """Make `corpus/` and `tokenizer/` unless they are finished; returns the slices of every shard.

    Raises:
        InputError: the files or settings differ from those of the finished corpus, or there is no text.
    """
    files = list_files(config.corpus)
    require_tokenizer(config, files)
    groups, new = _by_generation(config.datastore, files)
    first = config.datastore / "corpus"
    if damage(first):  # or not made yet: files that no other generation has belong to the first
        groups, new = [(first, new), *groups], []
    if new:
        raise InputError(
            f"{config.datastore} was built without {len(new):,} files that corpus.paths names now (the first: {new[0].path}). "
            "Add them with `--append`, or rebuild everything: `--stage chunk --rebuild`."
        )
    for folder, members in groups:
        look_through(folder, config.corpus, members, executor)
    _make_tokenizer(config)
    return read_plan(config.datastore)


def append(config: Config, executor: Executor) -> None:
    """Make a generation from the files that the datastore does not have yet.

    Raises:
        InputError: there is no intact datastore to append to, or the input is invalid.
    """
    files = list_files(config.corpus)
    require_tokenizer(config, files)
    _, new = _by_generation(config.datastore, files)
    if config.dedup.is_on:
        raise InputError(
            "--append and [dedup] cannot be combined: near copies are searched in the whole corpus at once. Build another "
            "datastore of the new files and name it in neighbors.extra_datastores, or rebuild everything."
        )
    if damage(config.datastore / "corpus"):
        raise InputError(
            f"{config.datastore} holds nothing to append to, or its corpus/ is damaged: run `retro index CONFIG` without "
            "--append first, with the files that it was built from."
        )
    if not new:
        log.info("append: corpus.paths names no file that %s does not have", config.datastore)
        return
    folders = (config.datastore / "appended" / shard_name(number) for number in itertools.count(1))
    look_through(next(folder for folder in folders if damage(folder)), config.corpus, new, executor)


def corpus_folders(datastore: Path) -> list[Path]:
    """The corpus of every generation of a datastore, in order."""
    return [datastore / "corpus", *sorted((datastore / "appended").glob("[0-9]*"))]


def _by_generation(
    datastore: Path, files: list[CorpusFile]
) -> tuple[list[tuple[Path, list[CorpusFile]]], list[CorpusFile]]:
    """Assign files to the finished generations; returns each generation with its files, and the files that are in none.

    A file is identified by its path. If the corpus has moved, a file with a new path is identified with a file of the same name
    whose path is no longer given.
    """
    folders = [folder for folder in corpus_folders(datastore) if not damage(folder)]
    stored = [(folder, file) for folder in folders for file in stored_json(folder / "files.json")]
    folder_of = {file["path"]: folder for folder, file in stored}
    given = {file.path for file in files}
    gone: dict[str, list[Path]] = {}
    for folder, file in reversed(stored):
        if file["path"] not in given:
            gone.setdefault(file["name"], []).append(folder)
    for corpus_file in files:
        if corpus_file.path not in folder_of and gone.get(corpus_file.name):
            folder_of[corpus_file.path] = gone[corpus_file.name].pop()
    groups = [(folder, [file for file in files if folder_of.get(file.path) == folder]) for folder in folders]
    return groups, [file for file in files if file.path not in folder_of]


def look_through(
    folder: Path, settings: CorpusSettings, files: list[CorpusFile], executor: Executor, key: str = "corpus.paths"
) -> None:
    """Make the artifact `folder` unless it is finished: files, plan of shards, problems. `key` is the setting with the paths.

    Raises:
        InputError: the files or settings differ from those of the finished artifact, or there is no text.
    """
    known = _known_checksums(folder, files)
    scans = None if known else _scan(settings, files, executor)
    checksums = known or [scan.checksum for scan in scans or []]
    names = ["text_key", "id_key", "metadata_keys", "shard_bytes"]
    names += ["boundary_ids"] if any(is_megatron(file.name) for file in files) else []
    recipe = Recipe(
        stage="chunk",
        version=1,
        settings={f"corpus.{name}": getattr(settings, name) for name in names},
        inputs=recipe_inputs([(file.name, value) for file, value in zip(files, checksums, strict=True)]),
    )
    if not is_finished(folder, recipe):
        _write_corpus(folder, recipe, settings, files, scans or _scan(settings, files, executor), key)
    _report_problems(folder)


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
    return [
        [FileSlice(**{**file_slice, "file": CorpusFile(**file_slice["file"])}) for file_slice in shard]
        for shard in stored_json(folder / "plan.json")
    ]


def _known_checksums(folder: Path, files: list[CorpusFile]) -> list[str] | None:
    """The checksums of an earlier scan, if names, sizes and times of all files have not changed."""
    if damage(folder):
        return None
    stored = stored_json(folder / "files.json")
    now = [asdict(file) for file in files]
    if [{key: value for key, value in file.items() if key != "checksum"} for file in stored] != now:
        return None
    return [file["checksum"] for file in stored]


def _scan(settings: CorpusSettings, files: list[CorpusFile], executor: Executor) -> list[FileScan]:
    tasks = [Task(f"scan/{file.name}", (file, settings), max(1, file.size)) for file in files]
    with progress("scan", total=sum(task.size for task in tasks), unit="bytes") as advance:
        return list(executor.map("chunk", scan_task, tasks, advance))


def scan_task(file: CorpusFile, settings: CorpusSettings, *, advance: Advance) -> FileScan:
    """Scan one file."""
    scan = scan_file(file, settings)
    advance(max(1, file.size))
    return scan


def _write_corpus(
    folder: Path, recipe: Recipe, settings: CorpusSettings, files: list[CorpusFile], scans: list[FileScan], key: str
) -> None:
    if not any(scan.documents for scan in scans):
        raise InputError(
            f"{key} = {settings.paths}: {len(files)} files hold no document with text. "
            f"Problems: {dict(_problem_counts(scans))}. The text is read from corpus.text_key = {settings.text_key!r}."
        )
    duplicates = find_duplicates(files, scans)
    if settings.strict and duplicates:
        strict_problem(duplicates[0])
    counts = _problem_counts(scans) + Counter({"duplicate id": len(duplicates)} if duplicates else {})
    examples = [problem for scan in scans for problem in scan.examples] + duplicates[:1000]
    with create(folder, recipe) as (work, totals):
        write_json(
            work / "files.json", [asdict(f) | {"checksum": s.checksum} for f, s in zip(files, scans, strict=True)]
        )
        plan = plan_shards(files, scans, settings.shard_bytes)
        write_json(work / "plan.json", [[asdict(file_slice) for file_slice in shard] for shard in plan])
        write_json(work / "problems.json", {"counts": counts, "examples": [asdict(problem) for problem in examples]})
        totals |= {
            "files": len(files),
            "shards": len(plan),
            "documents": sum(scan.documents for scan in scans),
            "bytes": sum(scan.text_bytes for scan in scans),
        }


def _problem_counts(scans: list[FileScan]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for scan in scans:
        counts.update(scan.problems)
    return counts


def _report_problems(folder: Path) -> None:
    """Log the problems in the files, with file and line of the first of each kind."""
    found: dict[str, Any] = stored_json(folder / "problems.json")
    for kind, count in sorted(found["counts"].items()):
        first = next((problem for problem in found["examples"] if problem["kind"] == kind), None)
        where = f"; first: {first['file']}:{first['line']}: {first['detail']}" if first else ""
        log.warning("%s: %s: %s%s", folder.name, kind, f"{count:,}", where)
    if found["counts"]:
        log.warning("%s: all of them by file and line: %s", folder.name, folder / "problems.json")


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
    """The text of every training document, in order. The tokenizer does not see held-out documents either."""
    empty = True
    for shard in plan_of(config.datastore / "corpus"):
        for file_slice in shard:
            for document in read_slice(file_slice, config.corpus, on_problem=lambda _: None):
                if split_of(document.text, config.corpus.split) == "train":
                    yield document.text
                    empty = False
                advance(len(document.text.encode()))
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
