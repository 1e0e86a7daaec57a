"""The gain of copying against the size of the datastore: from a folder of text to a table and a picture.

    python -m benchmarks.quality.datastore_size TREE --model smollm2.safetensors --output FOLDER [--tokens 768]
        [--folders 48 | --held-out FOLDER ...] [--fractions 1/81 1/27 1/9 1/3 1] [--datastore DATASTORE] [--minutes 10]

    TREE ─┬─ held-out folders ─ a window from the middle of one file of each ─┐
          └─ other files ─ a datastore (`chunk`, `suffixes`) ─ nested parts ──┴─► OFF, ON with each part
    ─► FOLDER/results.json, gain.svg, gain-dark.svg: change by size, by longest match, a line in log10 of the tokens

The model copies from the whole datastore, and from its own context if it was fitted to it. With `--k`, a model that was
fitted to neighbors copies from those too, found in the sorted prefixes of the same part. A part holds the documents
whose hash of the path is below a fraction, so a larger one contains a smaller one. Intervals are of a bootstrap over
windows.

The same command resumes: the datastore, the windows and the scores of each window are kept in FOLDER. `--minutes` stops
before a window that does not fit; then the tables are of the windows so far. The build of the datastore and the first
window always run.
"""

import argparse
import glob
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import Budget, add_minutes, budget, check_same_options, placement, say
from benchmarks.quality.datastore_size_results import report
from benchmarks.quality.held_out_folders import choose_folders, files_by_folder, windows_of
from indexing.corpus.documents import CorpusFile, CorpusSettings
from indexing.corpus.scan import list_corpus
from indexing.corpus.skipped import skipped_line
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main as retro
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.stages.generations import counts_of, intact_folders, stored_files
from retro.checkpoints.any_model import for_tokens_of, load_scorer, open_model, tokenizer_settings
from retro.checkpoints.checkpoint import Checkpoint
from retro.copying.neighbors import NEIGHBORS
from retro.evaluation.datastore_size import (
    SKIPPED_STAGES,
    Part,
    Window,
    WindowScores,
    copy_head_of,
    nested_parts,
    open_parts,
    read_windows,
    score_window,
    write_windows,
)
from retro.evaluation.settings import LEAST_DOCUMENTS

MINUTES = 10.0
FRACTIONS = [1 / 81, 1 / 27, 1 / 9, 1 / 3, 1.0]
LARGE_BYTES = 1 << 20
"""Bytes of a file that is counted as large: one such file can be much of a small part."""
NAMED = 10
"""Leaks that are printed."""


# --- what is measured -------------------------------------------------------------------------------------------------


def described(options: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """The options that decide the results."""
    names = ("tokens", "folders", "held_out", "fractions", "seed", "suffixes", "exclude", "precision", "k")
    paths = {"corpus": str(options.tree.resolve()), "datastore": str(options.datastore and options.datastore.resolve())}
    return {name: getattr(options, name) for name in names} | paths | {"model": checkpoint.fingerprint}


def held_out_names(
    file: Path, settings: dict[str, Any], files: Sequence[CorpusFile], options: argparse.Namespace
) -> list[str]:
    """The held-out folders: those that a stopped run chose, those of the options, or a choice. They are kept in a file
    with the settings.

    Raises:
        InputError: the file has other settings, or a folder has no file.
    """
    if file.exists():
        stored = read_json(file)
        check_same_options(file, stored, settings)
        names: list[str] = stored["folders_held_out"]
        return names
    named = [name.strip("/") for name in options.held_out]
    names = named or choose_folders(files, options.folders, options.tokens, options.seed)
    files_by_folder(files, names)
    write_json(file, settings | {"folders_held_out": names})
    return names


def built(folder: Path, corpus: CorpusSettings, held_out: Sequence[str], tokenizer: TokenizerSettings) -> Datastore:
    """Build the datastore of all other folders, or finish it."""
    left_out = tuple(f"{glob.escape(name)}/**" for name in held_out)
    config = Config(
        datastore=folder / "datastore",
        skip_stages=SKIPPED_STAGES,
        corpus=replace(corpus, exclude=(*corpus.exclude, *left_out), split=(1, 0, 0)),
        tokenizer=tokenizer,
    )
    if not is_finished(config.datastore):
        (folder / "datastore.toml").write_text(to_toml(config))
        if status := retro(["index", str(folder / "datastore.toml")]):
            sys.exit(status)
    return Datastore.open(config.datastore)


def is_finished(folder: Path) -> bool:
    """Whether a datastore has all that is read."""
    return (folder / "manifest.json").exists() and Datastore.open(folder).has("suffixes")


def chosen_windows(
    file: Path, datastore: Datastore, folders: dict[str, list[CorpusFile]], options: argparse.Namespace
) -> tuple[list[Window], dict[str, Any]]:
    """The windows of the held-out folders, from a file if they were chosen before.

    Raises:
        InputError: there are too few.
    """
    if not file.exists():
        stored = [one for part in intact_folders(datastore.folder) for one in stored_files(part)]
        tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
        settings = CorpusSettings(suffixes=tuple(options.suffixes))
        found = windows_of(folders, stored, tokenizer, options.tokens, options.seed, settings)
        write_windows(file, found.windows, found.about())
    windows, about = read_windows(file)
    for name, same in islice(about["leaks"].items(), NAMED):
        say(f"leak, left out: {name} is in the datastore as {same}")
    if (more := len(about["leaks"]) - NAMED) > 0:
        say(f"leaks, left out: {more:,} more, in {file}")
    for folder, reason in about["without_window"].items():
        say(f"no window of {folder}: {reason}")
    if len(windows) < LEAST_DOCUMENTS:
        raise InputError(
            f"{len(windows)} of {len(folders)} held-out folders have a window; at least {LEAST_DOCUMENTS} are needed. Hold out other folders "
            "(--held-out, --folders, --seed), or take shorter windows (--tokens)."
        )
    return windows, about


# --- scores -----------------------------------------------------------------------------------------------------------


def score(
    checkpoint: Checkpoint,
    datastore: Datastore,
    parts: Sequence[Part],
    windows: Sequence[Window],
    options: argparse.Namespace,
    limit: Budget,
) -> dict[int, WindowScores]:
    """Score the windows that have no scores yet, as far as the time allows. Returns all scores by number of the
    window."""
    folder, work = options.output / "scores", options.output / "parts"
    folder.mkdir(exist_ok=True)
    files = {number: folder / f"{number}.npz" for number in range(len(windows))}
    if todo := [number for number, file in files.items() if not file.exists()]:
        place = placement(options.precision)
        model = load_scorer(checkpoint, place)
        head, whole = copy_head_of(model, place), SuffixIndex.open(datastore.folder)
        if options.k and head.network(NEIGHBORS) is None:
            raise InputError(f"--k {options.k}: {options.model} does not copy from neighbors; accepted is 0.")
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        try:
            indexes = open_parts(whole, parts, work, say_part)
            for number in limit.each(todo, "window"):
                score_window(model, head, windows[number], indexes, place, options.k).write(files[number])
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return {number: WindowScores.read(file) for number, file in files.items() if file.exists()}


def say_part(part: Part) -> None:
    """Name a part whose sorted prefixes are made."""
    say(f"sorted prefixes of {part.documents:,} documents, {part.tokens:,} tokens", file=sys.stderr)


# --- from text to results ---------------------------------------------------------------------------------------------


def figures_of_corpus(datastore: Datastore, files: Sequence[CorpusFile]) -> dict[str, Any]:
    """What the corpus has: files, large ones, and numbers of problems and of skipped files."""
    large = [file.size for file in files if file.size >= LARGE_BYTES]
    sizes = {"files": len(files), "bytes": sum(file.size for file in files)}
    return sizes | {"large_files": len(large), "large_bytes": sum(large)} | counts_of(datastore.folder / "corpus")


def corpus_words(figures: dict[str, Any]) -> str:
    """The figures of the corpus in two lines."""
    problems = ", ".join(f"{kind} {count:,}" for kind, count in figures["problems"].items()) or "none"
    share = figures["large_bytes"] / max(1, figures["bytes"])
    return (
        f"corpus: {figures['files']:,} files, {figures['bytes']:,} bytes; {figures['large_files']:,} files of 1 MiB and more have "
        f"{share:.1%} of the bytes\nproblems: {problems}; skipped: {skipped_line(figures['skipped']) or 'none'}"
    )


def run(options: argparse.Namespace) -> None:
    """Measure, or resume, and report."""
    limit, out = budget(options), options.output
    checkpoint = open_model(options.model)
    corpus = CorpusSettings(
        paths=(str(options.tree),), suffixes=tuple(options.suffixes), exclude=tuple(options.exclude)
    )
    files = list_corpus(corpus).files
    out.mkdir(parents=True, exist_ok=True)
    names = held_out_names(out / "settings.json", described(options, checkpoint), files, options)
    if options.datastore:
        datastore = Datastore.open(options.datastore)
        datastore.require("suffixes")
    else:
        datastore = built(out, corpus, names, tokenizer_settings(checkpoint))
    checkpoint = for_tokens_of(checkpoint, datastore)
    figures = figures_of_corpus(datastore, files)
    say(corpus_words(figures))
    windows, about = chosen_windows(out / "windows.json", datastore, files_by_folder(files, names), options)
    parts = nested_parts(datastore.train, options.fractions, options.seed)
    scored = score(checkpoint, datastore, parts, windows, options, limit)
    copies = [windows[number].name for number, one in scored.items() if one.is_copy]
    for name in copies:
        say(f"leak, left out: the datastore has the whole window of {name}")
    kept = [number for number, one in scored.items() if not one.is_copy]
    if not kept:
        raise InputError(f"the datastore has the text of all {len(scored)} windows. Hold out other folders.")
    some, scores = [windows[number] for number in kept], [scored[number] for number in kept]
    found = {"model": str(options.model), "chosen": len(windows), "corpus": figures, "held_out": names}
    report(found | about | {"copied_windows": copies}, parts, some, scores, out)


def main() -> None:
    """Measure one corpus with one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="folder of text")
    parser.add_argument(
        "--model", type=Path, required=True, help="a checkpoint, `retro import`, or a folder of transformers"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the datastore, the scores and the results"
    )
    parser.add_argument("--tokens", type=positive, default=768, help="of a window")
    parser.add_argument("--folders", type=positive, default=48, help="number of held-out folders")
    parser.add_argument("--held-out", nargs="+", default=[], help="these folders instead, as paths below TREE")
    parser.add_argument("--fractions", nargs="+", type=fraction, default=FRACTIONS, help="of the documents")
    parser.add_argument("--seed", type=int, default=0, help="of folders, files and parts")
    parser.add_argument("--suffixes", nargs="+", default=[], help="corpus.suffixes: more files to read")
    parser.add_argument("--exclude", nargs="+", default=[], help="corpus.exclude: globs of files to skip")
    parser.add_argument(
        "--datastore", type=Path, help="use this one, made of the same text without the held-out folders"
    )
    parser.add_argument("--precision", default="auto", help="auto, float32, bfloat16")
    parser.add_argument("--k", type=int, default=0, help="neighbors of each chunk")
    add_minutes(parser, MINUTES)
    options = parser.parse_args()
    try:
        run(options)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


def positive(words: str) -> int:
    """A whole number above 0."""
    if (value := int(words)) < 1:
        raise ValueError(words)
    return value


def fraction(words: str) -> float:
    """A fraction such as `1/9` or `0.1`, above 0 and at most 1."""
    numerator, _, denominator = words.partition("/")
    value = float(numerator) / (float(denominator or 1) or math.nan)
    if not 0 < value <= 1:
        raise ValueError(words)
    return value


if __name__ == "__main__":
    main()
