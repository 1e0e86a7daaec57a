"""Does an extended vocabulary pay? Tokens per byte of both languages, and a small model's first steps in the new one.

python -m benchmarks.quality.vocabulary tokenizers --old ENGLISH... --new CHINESE... [--kinds bpe huggingface unigram]
python -m benchmarks.quality.vocabulary model --old ENGLISH... --new CHINESE... --output FOLDER [--steps 300] [--pieces 2000]

`tokenizers`: a tokenizer of the old corpus, the same with new pieces, and one trained on both from scratch with as many; on
held-out documents of each corpus. `model`: a plain decoder is trained on the old corpus, then on the new one, three times with
the same seed and tokens: `mean` with new rows begun as `retro extend-vocabulary` does, `random` with new rows drawn from a normal
distribution with the table's own spread, and `old` without new pieces. Every part of it goes on where it was stopped.

The defaults take minutes. docs/how-to/extend-vocabulary.md names the options of its results.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from indexing.corpus.readers import CorpusSettings
from indexing.corpus.scan import list_files, read_documents, split_of
from indexing.tokenization.extension import compare, extend, open_base
from indexing.tokenization.tokenizer import Sample, Tokenizer, TokenizerSettings, install_tokenizer, train_sentencepiece
from pipelines.config import Config
from pipelines.config_files import to_toml
from retro.checkpoints.checkpoint import open_checkpoint
from retro.checkpoints.extend_vocabulary import tables
from retro.checkpoints.single_file import exported, write_exported
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS
from retro.training.settings import TrainSettings

SPLIT = (95, 5, 0)


# --- tokenizers


def tokenizers(old: list[str], new: list[str], kinds: list[str], pieces: list[int], vocab_size: int, mb: int) -> None:
    """Prints a row for each tokenizer."""
    texts = {name: samples(paths, mb * 2**20) for name, paths in (("old", old), ("new", new))}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            base = train(kind, texts["old"][0], vocab_size, Path(folder) / "base")
            row(kind, "base", base, texts)
            for count, ascii in product(pieces, (False, True)):
                name = f"+{count}{' ascii' if ascii else ''}"
                seconds, extended = timed(base, texts["new"][0], count, Path(folder) / name, ascii=ascii)
                row(kind, name, extended.path, texts, seconds)
                figures = {name: compare(extended, texts[name][1]) for name in texts}
                print(
                    f"{'':24} new pieces that stand in held-out text: {figures['new'].used:.1%}; samples of the old corpus "
                    f"with the ids they had: {figures['old'].unchanged} of {figures['old'].texts}"
                )
            both = [*texts["old"][0], *texts["new"][0]]
            for count in pieces:
                row(kind, f"both {count}", train(kind, both, vocab_size + count, Path(folder) / f"both{count}"), texts)


def samples(paths: list[str], size: int) -> tuple[list[str], list[str]]:
    """Texts to learn from and held-out ones."""
    learnt, held_out = Sample(size, 0), Sample(size // 8, 0)
    for text in documents(paths):
        (learnt if split_of(text, SPLIT) == "train" else held_out).add(text)
    return learnt.pieces(), held_out.pieces()


def documents(paths: list[str]) -> Iterator[str]:
    settings = CorpusSettings(paths=tuple(paths))
    for file in list_files(settings):
        for document in read_documents(file, settings, on_problem=lambda problem: print(problem, file=sys.stderr)):
            yield document.text


def train(kind: str, texts: Sequence[str], vocab_size: int, folder: Path) -> Path:
    """Train a tokenizer; `huggingface` is a byte-level BPE as GPT-2's."""
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
    """Extend a base; how long that took."""
    folder.mkdir()
    made: list[Any] = []
    seconds = common.seconds(lambda: made.append(extend(open_base(base), texts, [], count, folder, ascii=ascii)))
    return seconds, made[0]


def row(kind: str, name: str, path: Path, texts: dict[str, tuple[list[str], list[str]]], seconds: float = 0) -> None:
    """Tokens per byte of held-out text."""
    tokenizer = opened(path)
    shares = []
    for _, held_out in texts.values():
        tokens = sum(map(len, tokenizer.encode_batch(held_out)))
        shares.append(tokens / sum(len(text.encode()) for text in held_out))
    time = f"   {seconds:.0f} s" if seconds else ""
    print(
        f"{kind:11} {name:12} {tokenizer.vocab_size:7,} ids   old {shares[0]:.4f}   new {shares[1]:.4f}{time}",
        flush=True,
    )


def opened(path: Path) -> Tokenizer:
    if (path / "meta.json").exists():
        return Tokenizer.open(path)
    kind: Any = "huggingface" if path.is_dir() else "sentencepiece"
    with tempfile.TemporaryDirectory() as folder:
        install_tokenizer(TokenizerSettings(kind=kind, path=str(path)), Path(folder))
        return Tokenizer.open(Path(folder))


# --- a model


def retro(*arguments: str) -> None:
    """The command line, as a user runs it."""
    subprocess.run([sys.executable, "-m", "pipelines.cli", *arguments], check=True)


def model(old: list[str], new: list[str], out: Path, base_steps: int, steps: int, pieces: int, vocab_size: int) -> None:
    """Folders OUT/…: datastores, runs, and the extended model."""
    out.mkdir(parents=True, exist_ok=True)
    run(out, "base", old, TokenizerSettings(vocab_size=vocab_size), base_steps)
    if not (out / "extended").exists():
        arguments = ("--corpus.paths", *new, "--pieces", str(pieces), "--sample-bytes", str(8 * 2**20))
        retro("extend-vocabulary", str(out / "run-base"), *arguments, "--output", str(out / "extended"))
    draw_rows(out / "extended" / "model.safetensors", out / "random.safetensors", vocab_size)
    extended = TokenizerSettings(kind="sentencepiece", path=str(out / "extended/tokenizer/sentencepiece.model"))
    before = TokenizerSettings(kind="sentencepiece", path=str(out / "base/tokenizer/sentencepiece.model"))
    run(out, "mean", new, extended, steps, str(out / "extended/model.safetensors"), datastore="new")
    run(out, "random", new, extended, steps, str(out / "random.safetensors"), datastore="new")
    run(out, "old", new, before, steps, str(out / "run-base"))
    for name in ("mean", "random", "old"):
        lines = [json.loads(line) for line in (out / f"run-{name}" / "metrics.jsonl").read_text().splitlines()]
        figures = [
            f"{line['tokens']:,}: {line['valid_bits_per_byte_off']:.3f}" for line in lines if _is_evaluated(line)
        ]
        print(f"{name:7} held-out bits per byte by tokens   {'   '.join(figures)}")


def _is_evaluated(line: dict[str, Any]) -> bool:
    return "valid_bits_per_byte_off" in line


def draw_rows(source: Path, target: Path, first_id: int) -> None:
    """The extended model with new rows from a normal distribution with mean and spread of each column of the old ones."""
    checkpoint = open_checkpoint(source)
    state, tensors = exported(checkpoint)
    generator = torch.Generator().manual_seed(0)
    for name in tables(checkpoint.model):
        old, new = tensors[name][:first_id], tensors[name][first_id:]
        new.copy_(torch.randn(new.shape, generator=generator) * old.std(0) + old.mean(0))
    write_exported(state, tensors, target)


def run(
    out: Path,
    name: str,
    corpus: list[str],
    tokenizer: TokenizerSettings,
    steps: int,
    start: str = "",
    datastore: str = "",
) -> None:
    """A datastore's chunks, and a run of a plain decoder on them."""
    config = Config(
        datastore=out / (datastore or name),
        run=out / f"run-{name}",
        corpus=CorpusSettings(paths=tuple(corpus)),
        tokenizer=tokenizer,
        model=replace(PRESETS["tiny"], cca_layers=()),
        data=DataSettings(sequence_length=256),
        train=TrainSettings(
            steps=steps,
            batch_size=4,
            lr=2e-3,
            warmup_steps=min(20, steps),
            num_threads=1,
            eval_every=max(1, steps // 6),
            eval_tokens=20_000,
            checkpoint_every=steps,
            init_from=start,
        ),
    )
    file = out / f"{name}.toml"
    file.write_text(to_toml(config))
    retro("index", str(file), "--stage", "chunk")
    retro("train", str(file))


def main() -> None:
    """One of the two parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tokenizers", "model"))
    parser.add_argument("--old", nargs="+", required=True, help="files of the language that the base knows")
    parser.add_argument("--new", nargs="+", required=True, help="files of the other one")
    parser.add_argument("--output", type=Path, help="folder of `model`")
    parser.add_argument("--kinds", nargs="+", default=["bpe", "huggingface", "unigram"])
    parser.add_argument("--pieces", nargs="+", type=int, default=[2000])
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sample-mb", type=int, default=2)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    common.say(common.measured_on())
    if given.part == "tokenizers":
        tokenizers(given.old, given.new, given.kinds, given.pieces, given.vocab_size, given.sample_mb)
    else:
        model(given.old, given.new, given.out, given.base_steps, given.steps, given.pieces[0], given.vocab_size)


if __name__ == "__main__":
    main()
