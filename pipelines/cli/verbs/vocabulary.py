"""`retro extend-vocabulary CHECKPOINT|TOKENIZER`: add pieces learned on a corpus to a tokenizer, and rows for them to a
model.

FOLDER/tokenizer/          the value for tokenizer.path
       model.safetensors   the model with rows for the new pieces, if a CHECKPOINT is given
       figures.json        tokens per byte before and after, and the other printed figures
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from indexing.corpus.documents import CorpusProblem, CorpusSettings, Document
from indexing.corpus.megatron import is_megatron
from indexing.corpus.scan import list_files, read_documents, split_of_document, strict_problem
from indexing.store.artifact import Recipe, create, fingerprint
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.store.settings import settings
from indexing.tokenization.extension import Comparison, ExtensibleTokenizer, Extension, compare, extend, open_base
from indexing.tokenization.training import TextSample
from pipelines.terminal.output import echo, print_rows
from pipelines.terminal.progress import progress

log = logging.getLogger("retro")

_HELD_OUT_BYTES = 4 * 2**20
_VERSION = 1


@settings
class ExtendVocabularyOptions:
    """Add pieces learned on a corpus to a tokenizer, and rows for them to a model. Old ids and rows stay unchanged."""

    output: Path
    """A new folder for `tokenizer/`, `model.safetensors` and `figures.json`."""
    pieces: PositiveInt = 8000
    """Maximum number of new pieces."""
    tokenizer: str = ""
    """Tokenizer of the checkpoint: a SentencePiece .model, a tokenizer.json, a folder with one of them, or a datastore;
    empty: the tokenizer of its training datastore."""
    keep: tuple[str, ...] = ()
    """Files, folders or globs of text whose ids must stay the same. Pieces that change the ids of a sample of it are
    dropped."""
    ascii: bool = False
    """Also learn pieces of ASCII characters and blanks, for example technical terms. English texts that contain them
    then get other ids. Without this option, every ASCII text keeps its ids."""
    sample_bytes: PositiveInt = 32 * 2**20
    """Bytes of text to learn from, and maximum bytes of text to keep: uniform samples of all documents."""
    seed: NonNegativeInt = 0
    """Seed of the samples."""
    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def extend_vocabulary(path: str, options: ExtendVocabularyOptions) -> int:
    """`retro extend-vocabulary CHECKPOINT|TOKENIZER`."""
    from retro.checkpoints.checkpoint import locate, open_checkpoint
    from retro.checkpoints.extend_vocabulary import check_tables, extend_tables

    if options.output.exists():
        raise InputError(f"output = {str(options.output)!r} exists already. Name a new folder, or remove this one.")
    checkpoint = open_checkpoint(Path(path)) if locate(Path(path)) else None
    if checkpoint is None:
        if options.tokenizer:
            raise InputError(f"--tokenizer applies only to checkpoints, and {path} is not one. Remove the option.")
        base = open_base(Path(path))
    else:
        base = open_base(Path(options.tokenizer or checkpoint.folders[0]))
        check_tables(checkpoint, base.tokenizer.vocab_size, base.tokenizer.num_model_tokens)
    samples = _read(options)
    names = ("pieces", "ascii", "sample_bytes", "seed")
    inputs = {name: _digest(texts) for name, texts in asdict(samples).items()}
    inputs["tokenizer"] = fingerprint([asdict(base.tokenizer.meta), base.checksum])
    inputs |= {"checkpoint": checkpoint.fingerprint} if checkpoint else {}
    recipe = Recipe("extend-vocabulary", _VERSION, {name: getattr(options, name) for name in names}, inputs)
    with create(options.output, recipe) as (work, counts):
        (work / "tokenizer").mkdir()
        extension = _extend(base, samples, options, work / "tokenizer")
        figures = _measure(extension, samples)
        if checkpoint is not None:
            extend_tables(checkpoint, extension.old.vocab_size, extension.cuts, work / "model.safetensors")
        write_json(work / "figures.json", {name: asdict(figure) for name, figure in figures.items()})
        counts.update({"old_ids": extension.old.vocab_size, "pieces": len(extension.pieces)})
        tokenizer = options.output / extension.path.relative_to(work)
    print_rows(_rows(extension, figures))
    echo(f'tokenizer: tokenizer.kind = "{extension.kind}", tokenizer.path = "{tokenizer}"')
    if checkpoint is not None:
        echo(f"model: {options.output / 'model.safetensors'}")
    return 0


@dataclass(frozen=True)
class _Samples:
    """Samples of the corpus and of the texts to keep: to learn from, and to measure on."""

    learned: list[str]
    held_out: list[str]
    kept: list[str]
    kept_held_out: list[str]


def _read(options: ExtendVocabularyOptions) -> _Samples:
    """Read the corpus and the kept texts once. Held out for measuring: the corpus's own splits, and half of the kept
    texts.

    Raises:
        InputError: one of them has no text.
    """
    corpus = options.corpus
    learned, held_out = TextSample(options.sample_bytes, options.seed), TextSample(_HELD_OUT_BYTES, options.seed)
    kept, kept_held_out = TextSample(options.sample_bytes, options.seed), TextSample(_HELD_OUT_BYTES, options.seed)

    def into(first: TextSample, second: TextSample, weights: tuple[int, int, int]) -> Callable[[Document], None]:
        def add(document: Document) -> None:
            sample = first if split_of_document(document, weights) == "train" else second
            for text in document.blocks():
                sample.add(text)

        return add

    _go_through(corpus, "corpus.paths", into(learned, held_out, corpus.split))
    if options.keep:
        _go_through(replace(corpus, paths=options.keep), "keep", into(kept, kept_held_out, (1, 1, 0)))
    samples = _Samples(learned.pieces(), held_out.pieces(), kept.pieces(), kept_held_out.pieces())
    if not samples.learned:
        raise InputError(
            f"corpus.paths = {corpus.paths}: found no training document with text. The text is read from "
            f"corpus.text_key = {corpus.text_key!r}; corpus.split = {corpus.split}."
        )
    if options.keep and not samples.kept + samples.kept_held_out:
        raise InputError(f"keep = {options.keep}: found no document with text under corpus.text_key.")
    return samples


def _go_through(settings: CorpusSettings, key: str, add: Callable[[Document], None]) -> None:
    problems: Counter[str] = Counter()

    def note(problem: CorpusProblem) -> None:
        problems[problem.kind] += 1

    files = list_files(settings, key)
    tokens = next((file for file in files if is_megatron(file.name)), None)
    if tokens is not None:
        raise InputError(f"{key}: {tokens.path} contains tokens; pieces are learned from text.")
    with progress(key.partition(".")[0], total=None, unit="bytes") as advance:
        for file in files:
            for document in read_documents(file, settings, on_problem=strict_problem if settings.strict else note):
                add(document)
                advance(document.size)
    for kind, count in problems.items():
        log.warning("%s: %s: %d", key, kind, count)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


def _extend(base: ExtensibleTokenizer, samples: _Samples, options: ExtendVocabularyOptions, folder: Path) -> Extension:
    with progress("pieces", total=None, unit="pieces") as advance:
        extension = extend(base, samples.learned, samples.kept, options.pieces, folder, ascii=options.ascii)
        advance(len(extension.pieces))
    return extension


def _measure(extension: Extension, samples: _Samples) -> dict[str, Comparison]:
    texts = {"corpus": samples.held_out or samples.learned, "keep": samples.kept_held_out or samples.kept}
    return {name: compare(extension, pieces) for name, pieces in texts.items() if pieces}


def _rows(extension: Extension, figures: dict[str, Comparison]) -> list[list[str]]:
    """The printed figures."""
    first, last = extension.old.vocab_size, extension.tokenizer.vocab_size - 1
    rows = [
        ["ids", f"{first:,} unchanged, {len(extension.pieces):,} new: {first} to {last}"],
        ["lossless", "yes" if extension.tokenizer.meta.lossless else "no, like the base"],
    ]
    for name, figure in figures.items():
        before, after = figure.old_tokens / figure.num_bytes, figure.new_tokens / figure.num_bytes
        rows += [
            [f"{name}: tokens per byte", f"{before:.4f} → {after:.4f}"],
            [f"{name}: new pieces that occur", f"{100 * figure.used:.1f}%"],
            [f"{name}: samples with unchanged ids", f"{figure.unchanged:,} of {figure.texts:,}"],
        ]
    return rows
