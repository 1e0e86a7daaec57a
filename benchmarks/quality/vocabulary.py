"""Gain of an extended vocabulary: tokens per byte of two languages, and the first training steps of a small model.

    python -m benchmarks.quality.vocabulary tokenizers --old ENGLISH... --new CHINESE... [--kinds bpe unigram]
    python -m benchmarks.quality.vocabulary model --old ENGLISH... --new CHINESE... --output FOLDER [--pieces 2000]

`tokenizers` compares a tokenizer of the old corpus, its extension with new pieces, and a tokenizer of the same size
that is trained on both corpora, on held-out documents of each corpus. `model` trains a decoder without retrieval on the
old corpus, then three times on the new one with the same seed and tokens: `mean` initializes new rows like `retro
extend-vocabulary`, `random` draws them from a normal distribution with the spread of the table, `old` has no new
pieces. Each part resumes if it was stopped.

By default a part of each corpus is read, and the number of steps is chosen so that `model` ends within --minutes.
docs/how-to/extend-vocabulary.md has the options of its results.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.quality.experiments import SHORT_EVALUATION, retro, steps_that_fit, write_part, written
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.corpus.scan import list_files, read_documents, split_of
from indexing.neighbors.search import NeighborSettings
from indexing.tokenization.extension import compare, extend, open_base
from indexing.tokenization.tokenizer import (
    TextSample,
    Tokenizer,
    TokenizerSettings,
    install_tokenizer,
    train_sentencepiece,
)
from pipelines.config import Config
from retro.checkpoints.checkpoint import open_checkpoint
from retro.checkpoints.extend_vocabulary import tables
from retro.checkpoints.single_file import exported, write_exported
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS
from retro.model.settings import NO_COPY_HEAD, updated
from retro.training.settings import TrainSettings

SPLIT = (95, 5, 0)


# --- tokenizers


def tokenizers(
    old: list[str], new: list[str], kinds: list[str], pieces: list[int], vocab_size: int, mb: int, limit: common.Budget
) -> None:
    """Print a row for each tokenizer."""
    texts = {name: samples(paths, mb * 2**20) for name, paths in (("old", old), ("new", new))}
    for kind in limit.each(kinds, "kind"):
        with tempfile.TemporaryDirectory() as folder:
            base = train(kind, texts["old"][0], vocab_size, Path(folder) / "base")
            row(kind, "base", base, texts)
            for count, ascii in product(pieces, (False, True)):
                name = f"+{count}{' ascii' if ascii else ''}"
                seconds, extended = timed(base, texts["new"][0], count, Path(folder) / name, ascii=ascii)
                row(kind, name, extended.path, texts, seconds)
                figures = {name: compare(extended, texts[name][1]) for name in texts}
                print(
                    f"{'':24} new pieces that occur in held-out text: {figures['new'].used:.1%}; "
                    f"samples of the old corpus with unchanged ids: {figures['old'].unchanged} of {figures['old'].texts}"
                )
            both = [*texts["old"][0], *texts["new"][0]]
            for count in pieces:
                row(kind, f"both {count}", train(kind, both, vocab_size + count, Path(folder) / f"both{count}"), texts)


def samples(paths: list[str], size: int) -> tuple[list[str], list[str]]:
    """Return training texts and held-out texts."""
    training, held_out = TextSample(size, 0), TextSample(size // 8, 0)
    for text in documents(paths):
        (training if split_of(text, SPLIT) == "train" else held_out).add(text)
    return training.pieces(), held_out.pieces()


def documents(paths: list[str]) -> Iterator[str]:
    """Yield the texts of a corpus."""
    settings = CorpusSettings(paths=tuple(paths))
    for file in list_files(settings):
        for document in read_documents(file, settings, on_problem=lambda problem: print(problem, file=sys.stderr)):
            yield document.text


def train(kind: str, texts: Sequence[str], vocab_size: int, folder: Path) -> Path:
    """Train a tokenizer; `huggingface` is a byte-level BPE like that of GPT-2."""
    folder.mkdir()
    if kind != "huggingface":
        train_sentencepiece(texts, TokenizerSettings(kind=kind, vocab_size=vocab_size), folder)  # type: ignore[arg-type]
        return folder
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def timed(base: Path, texts: list[str], count: int, folder: Path, *, ascii: bool) -> tuple[float, Any]:
    """Extend a tokenizer; return the seconds and the extension."""
    folder.mkdir()
    made: list[Any] = []
    seconds = common.seconds(lambda: made.append(extend(open_base(base), texts, [], count, folder, ascii=ascii)))
    return seconds, made[0]


def row(kind: str, name: str, path: Path, texts: dict[str, tuple[list[str], list[str]]], seconds: float = 0) -> None:
    """Print tokens per byte of held-out text."""
    tokenizer = opened(path)
    rates = []
    for _, held_out in texts.values():
        tokens = sum(map(len, tokenizer.encode_batch(held_out)))
        rates.append(tokens / sum(len(text.encode()) for text in held_out))
    time = f"   {seconds:.0f} s" if seconds else ""
    print(
        f"{kind:11} {name:12} {tokenizer.vocab_size:7,} ids   old {rates[0]:.4f}   new {rates[1]:.4f}{time}",
        flush=True,
    )


def opened(path: Path) -> Tokenizer:
    """Open an installed tokenizer, or one that a library has written."""
    if (path / "meta.json").exists():
        return Tokenizer.open(path)
    kind: Any = "huggingface" if path.is_dir() else "sentencepiece"
    with tempfile.TemporaryDirectory() as folder:
        install_tokenizer(TokenizerSettings(kind=kind, path=str(path)), Path(folder))
        return Tokenizer.open(Path(folder))


# --- a model


def model(given: argparse.Namespace, limit: common.Budget) -> None:
    """Write datastores, runs and the extended model to folders of OUT."""
    out, old, new, vocab_size = given.output, given.old, given.new, given.vocab_size
    if given.corpus_mb:
        old, new = (
            [write_part(getattr(given, name), given.corpus_mb, out / f"{name}.jsonl")] for name in ("old", "new")
        )
    config_of = partial(run_config, eval_tokens=20_000 if given.steps else SHORT_EVALUATION)
    base = partial(config_of, out, "base", old, TokenizerSettings(vocab_size=vocab_size))
    retro("index", written(out / "base.toml", base(1)), "--stage", "chunk")
    steps = given.steps
    if not steps:
        rest = limit.share(1.5)  # the remaining time is for chunks of the other corpus and the extension
        steps = steps_that_fit(out / "steps", "train", base, [2, 1, 1, 1], rest)
    train_model(out, "base", base(given.base_steps or 2 * steps))
    if not (out / "extended").exists():
        arguments = ("--corpus.paths", *new, "--pieces", str(given.pieces[0]), "--sample-bytes", str(8 * 2**20))
        retro("extend-vocabulary", str(out / "run-base"), *arguments, "--output", str(out / "extended"))
    draw_rows(out / "extended" / "model.safetensors", out / "random.safetensors", vocab_size)
    extended = TokenizerSettings(kind="sentencepiece", path=str(out / "extended/tokenizer/sentencepiece.model"))
    before = TokenizerSettings(kind="sentencepiece", path=str(out / "base/tokenizer/sentencepiece.model"))
    starts = {"mean": out / "extended/model.safetensors", "random": out / "random.safetensors", "old": out / "run-base"}
    if given.steps:
        limit = common.Budget(math.inf)  # --steps overrides the time limit
    for name, start in limit.each(list(starts.items()), "model"):
        tokenizer, datastore = (before, "old") if name == "old" else (extended, "new")
        train_model(out, name, config_of(out, name, new, tokenizer, steps, str(start), datastore))
    for name in (name for name in starts if (out / f"run-{name}").exists()):
        lines = [json.loads(line) for line in (out / f"run-{name}" / "metrics.jsonl").read_text().splitlines()]
        figures = [
            f"{line['tokens']:,}: {line['valid_bits_per_byte_off']:.3f}" for line in lines if _is_evaluated(line)
        ]
        print(f"{name:7} held-out bits per byte by tokens   {'   '.join(figures)}")


def _is_evaluated(line: dict[str, Any]) -> bool:
    return "valid_bits_per_byte_off" in line


def draw_rows(source: Path, target: Path, first_id: int) -> None:
    """Write the extended model with new rows drawn with the mean and the spread of each column of the old rows."""
    checkpoint = open_checkpoint(source)
    state, tensors = exported(checkpoint)
    generator = torch.Generator().manual_seed(0)
    for name in tables(checkpoint.model):
        old, new = tensors[name][:first_id], tensors[name][first_id:]
        new.copy_(torch.randn(new.shape, generator=generator) * old.std(0) + old.mean(0))
    write_exported(state, tensors, target)


def train_model(out: Path, name: str, config: Config) -> None:
    """Build the chunks of a datastore, and train a run on them."""
    file = written(out / f"{name}.toml", config)
    retro("index", file, "--stage", "chunk")
    retro("train", file)


def run_config(
    out: Path,
    name: str,
    corpus: list[str],
    tokenizer: TokenizerSettings,
    steps: int,
    start: str = "",
    datastore: str = "",
    *,
    eval_tokens: int,
) -> Config:
    """Return the config of a run of a decoder without retrieval."""
    return Config(
        datastore=out / (datastore or name),
        run=out / f"run-{name}",
        corpus=CorpusSettings(paths=tuple(corpus)),
        tokenizer=tokenizer,
        chunks=ChunkSettings(chunk_length=64),
        neighbors=NeighborSettings(rerank="embeddings"),
        model=updated(replace(PRESETS["tiny"], copy_head=NO_COPY_HEAD), {"retrieval.cca_layers": ()}),
        data=DataSettings(sequence_length=256),
        train=TrainSettings(
            steps=steps,
            batch_size=4,
            lr=2e-3,
            warmup_steps=min(20, steps),
            num_threads=1,
            eval_every=max(1, steps // 6),
            eval_tokens=eval_tokens,
            checkpoint_every=steps,
            init_from=start,
        ),
    )


def main() -> None:
    """Run one of the two parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tokenizers", "model"))
    parser.add_argument("--old", nargs="+", required=True, help="files of the base tokenizer's language")
    parser.add_argument("--new", nargs="+", required=True, help="files of the new language")
    parser.add_argument("--output", type=Path, help="folder of `model`")
    parser.add_argument("--kinds", nargs="+", default=["bpe", "huggingface", "unigram"])
    parser.add_argument("--pieces", nargs="+", type=int, default=[2000])
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sample-mb", type=int, default=2)
    parser.add_argument("--corpus-mb", type=float, default=4, help="megabytes of each corpus for `model`; 0: all")
    parser.add_argument("--base-steps", type=int, default=0, help="steps of the base model; 0: twice --steps")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of each other model; 0: as many as fit into --minutes"
    )
    common.add_minutes(parser)
    given = parser.parse_args()
    limit = common.budget(given)
    common.say(common.measured_on())
    if given.part == "tokenizers":
        tokenizers(given.old, given.new, given.kinds, given.pieces, given.vocab_size, given.sample_mb, limit)
    else:
        model(given, limit)


if __name__ == "__main__":
    main()
