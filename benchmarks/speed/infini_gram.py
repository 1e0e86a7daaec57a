"""The order of prefixes against infini-gram: both are built from the same tokens and asked the same questions.

    python -m benchmarks.speed.infini_gram TEXT ... --output FOLDER [--environment FOLDER/environment] [--queries 2000]

infini-gram (Liu et al. 2024, arXiv 2401.17377) is installed from PyPI into an environment of its own. Its Rust program
sorts on one core, from a file with the tokens of the datastore's documents. The stage `suffixes` is a process of its
own too, so its CPU seconds include the start of Python.

Questions are ends of up to 64 tokens in held-out documents. Next tokens: infini-gram's `infgram_ntd` (the longest match
that is followed by a token) and the votes here (seven lengths of match). Counts: of the last four tokens. Lengths of
the longest matches and counts have to be equal.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, markdown, say, write
from benchmarks.speed.scale import artifact_bytes, measured, measured_process, scale_config
from indexing.store.datastore import Datastore, Split
from indexing.suffixes.search import LONGEST, SuffixIndex
from pipelines.cli.results import Table
from pipelines.cli.settings.toml_file import to_toml

# Run by the other environment: questions on standard input, answers on standard output.
_ASK = """
import json, sys, time
from infini_gram.engine import InfiniGramEngine
asked = json.load(sys.stdin)
engine = InfiniGramEngine(asked["folder"], eos_token_id=0, vocab_size=asked["vocabulary"], token_dtype=asked["dtype"])
out = {}
for name, ask, texts in (
    ("next tokens", lambda text: engine.infgram_ntd(prompt_ids=text)["suffix_len"], asked["texts"]),
    ("count", lambda text: engine.count(input_ids=text)["count"], asked["grams"]),
):
    found = [ask(text) for text in texts]  # the files are in memory then
    started = time.process_time()
    for text in texts:
        ask(text)
    out[name] = {"found": found, "microseconds": 1e6 * (time.process_time() - started) / len(texts)}
print(json.dumps(out))
"""


def environment(folder: Path) -> Path:
    """The Python of an environment with infini-gram, which is made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"installing infini-gram into {folder}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "infini-gram", "numpy"], check=True)
    return python


def write_tokens(split: Split, folder: Path) -> str:
    """Write the documents of a split as infini-gram's `tokenized.0` and `offset.0`; returns the name of its dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype: np.dtype[Any] = np.dtype(np.uint16 if split.vocab_size < 2**16 - 1 else np.uint32)
    written = 0
    with open(folder / "tokenized.0", "wb") as tokens, open(folder / "offset.0", "wb") as offsets:
        for shard in range(len(split.chunk_rows)):
            lengths = split.lengths.shard(shard).astype(np.int64)
            if not len(lengths):
                continue
            firsts = split.document_offsets.shard(shard)[:-1]
            stored = split.tokens.shard(shard)
            flat = stored[np.arange(stored.shape[1]) < lengths[:, None]].astype(dtype)
            starts = np.concatenate([[0], np.cumsum(lengths)])[firsts]
            separated = np.insert(flat, starts, 2 ** (8 * dtype.itemsize) - 1)  # before each document
            tokens.write(separated.tobytes())
            offsets.write((written + dtype.itemsize * (starts + np.arange(len(starts)))).astype(np.uint64).tobytes())
            written += separated.nbytes
    return f"u{8 * dtype.itemsize}"


def build_theirs(python: Path, folder: Path, dtype: str) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of infini-gram's suffix array on one core."""
    (folder / "table.0").unlink(missing_ok=True)  # it keeps one that is there
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # it sets this limit
    options = f"--token_dtype {dtype} --cpus 1 --mem 8 --ulimit {files}".split()
    folders = ["--data_dir", str(folder), "--save_dir", str(folder)]
    return measured_process([str(python), "-m", "infini_gram.indexing", *folders, *options])


def questions(split: Split, number: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ends of up to 64 tokens of documents of a split, and the last four tokens of other ends."""
    random, texts = np.random.default_rng(0), list[list[int]]()
    while len(texts) < 2 * number:
        chunk = int(random.integers(split.num_chunks))
        (first, _), m = split.chunk_range(int(split.documents_of(np.array([chunk]))[0][0])), split.chunk_length
        begin = max(first, chunk - LONGEST // m)
        lengths = split.lengths.read(begin, chunk + 1)
        tokens = np.concatenate(
            [row[:length] for row, length in zip(split.tokens.read(begin, chunk + 1), lengths, strict=True)]
        )
        end = len(tokens) - int(random.integers(lengths[-1]))
        if end >= 4:
            texts.append(tokens[max(0, end - LONGEST) : end].tolist())
    return texts[:number], [text[-4:] for text in texts[number:]]


def ask_ours(folder: Path, texts: list[list[int]], grams: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Answers and CPU microseconds of a question, as `_ASK` gives them."""
    index = SuffixIndex.open(folder)

    def length(text: np.ndarray) -> int:
        return index.longest_match(text).length

    def count(gram: np.ndarray) -> int:
        match = index.longest_match(gram)
        return index.count(match) if match.length == len(gram) else 0

    def asked(
        ask: Callable[[np.ndarray], Any], answer: Callable[[np.ndarray], int], lists: list[list[int]]
    ) -> dict[str, Any]:
        arrays = [np.array(one, np.int64) for one in lists]
        found = [answer(one) for one in arrays]
        for one in arrays:
            ask(one)
        started = time.process_time()
        for one in arrays:
            ask(one)
        return {"found": found, "microseconds": 1e6 * (time.process_time() - started) / len(arrays)}

    votes = asked(lambda text: index.last_votes([text]), length, texts)
    return {"next tokens": votes, "count": asked(count, count, grams)}


def measure(files: list[Path], folder: Path, python: Path, number: int, limit: Budget) -> dict[str, Any]:
    """Build both, ask both, and compare the answers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = scale_config(folder, files)
    (folder / "config.toml").write_text(to_toml(config))
    chunked = measured("index", str(folder / "config.toml"), "--stage", "chunk")
    datastore, theirs = Datastore.open(config.datastore), folder / "theirs"
    tokens = int(sum(datastore.manifest["splits"]["train"]["tokens"]))
    say(f"{tokens:,} tokens; sorting by infini-gram")
    dtype = write_tokens(datastore.train, theirs)
    built = {"infini-gram": build_theirs(python, theirs, dtype)}
    say("sorting here")
    built["retro"] = measured("index", str(folder / "config.toml"), "--stage", "suffixes", "--rebuild")
    sizes = {"infini-gram": (theirs / "table.0").stat().st_size, "retro": artifact_bytes(config.datastore)["suffixes"]}
    if limit.left <= 0:
        say("no time is left for questions: raise --minutes")
        return {"tokens": tokens, "chunk": chunked, "built": built, "bytes": sizes}
    texts, grams = questions(datastore.valid, number)
    asked = {
        "folder": str(theirs),
        "vocabulary": datastore.train.vocab_size,
        "dtype": dtype,
        "texts": texts,
        "grams": grams,
    }
    answered = subprocess.run(
        [str(python), "-c", _ASK], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    answers = {
        "infini-gram": json.loads(answered.stdout.splitlines()[-1]),
        "retro": ask_ours(config.datastore, texts, grams),
    }
    equal = {}
    for name in answers["retro"]:
        pairs = zip(*(found[name]["found"] for found in answers.values()), strict=True)
        equal[name] = sum(theirs == ours for theirs, ours in pairs)
    times = {who: {name: answer["microseconds"] for name, answer in found.items()} for who, found in answers.items()}
    return {
        "tokens": tokens,
        "chunk": chunked,
        "built": built,
        "bytes": sizes,
        "times": times,
        "equal": equal,
        "queries": number,
    }


def table(results: dict[str, Any]) -> Table:
    """The figures of both, a line each."""
    names, tokens = list(results["built"]), results["tokens"]
    rows = [
        ["order: CPU µs a token", *(f"{1e6 * results['built'][name]['cpu_seconds'] / tokens:.2f}" for name in names)],
        ["order: memory, GB", *(f"{results['built'][name]['peak_bytes'] / 1e9:.2f}" for name in names)],
        ["order: bytes a token", *(f"{results['bytes'][name] / tokens:.1f}" for name in names)],
    ]
    for question in results.get("equal", {}):
        rows.append([f"{question}: CPU µs", *(f"{results['times'][name][question]:.0f}" for name in names)])
        rows.append([f"{question}: equal answers", f"{results['equal'][question]:,} of {results['queries']:,}", ""])
    return Table([f"{tokens:,} tokens", *names], rows)


def main() -> None:
    """Measure, print a table and write FOLDER/infini_gram.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+", help="files or folders of text")
    parser.add_argument("--output", type=Path, required=True, help="folder for datastore, tables and results")
    parser.add_argument(
        "--environment", type=Path, help="of infini-gram; default: OUTPUT/environment, made if necessary"
    )
    parser.add_argument("--queries", type=int, default=2000, help="questions of each kind")
    add_minutes(parser)
    options = parser.parse_args()
    limit, output = budget(options), options.output.absolute()
    python = environment((options.environment or output / "environment").absolute())
    results = measure(options.corpus, output, python, options.queries, limit)
    write(output / "infini_gram.json", results)
    print(markdown(table(results)))


if __name__ == "__main__":
    main()
