"""Growth of every stage with the size of the datastore: time, bytes, memory, and the plan made before.

    python -m benchmarks.speed.scale_text CORPORA... --output scale/text --gigabytes 1.3
    python -m benchmarks.speed.scale build --text scale/text --parts 7 --output scale     # about 500,000 chunks
    python -m benchmarks.speed.scale build --text scale/text --parts 70 --output scale --stages chunk embed train-index add sparse
    python -m benchmarks.speed.scale summary --output scale

`build` makes OUTPUT/PARTS/datastore from the first --parts files of --text with the default settings:
`retro plan datastore`, then `retro index --stage` for every stage, in a process of its own. Then it measures:

- 100 training steps of the preset `tiny`,
- 1,000 single queries, and 1,000 tokens of held-out documents that a model would copy for, also with nothing of the
  files in memory,
- an appended file of 1% of the text, and the deletion of a document.

--kill names stages whose process is killed by SIGKILL in the middle of the planned time, and started again. Memory is
that of all processes of a stage, without files that are only mapped. CPU seconds are those of all threads, which other
work on the machine changes less than wall time; of a killed run, those of its first process. Each finished step is in
OUTPUT/PARTS/scale.json and is not repeated. `summary` prints a table of all sizes, the exponents of CPU seconds, and
the seconds of the plan against the measured ones, to which the start of each process adds some.
"""

import argparse
import gc
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.common import Budget, add_minutes, budget, markdown, measured_on, memory_bytes, say
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.files import read_json, write_bytes, write_json
from indexing.suffixes.search import SuffixIndex
from pipelines.cli.results import Table
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.data.settings import DataSettings
from retro.model.presets import PRESETS
from retro.model_settings import NO_COPY_HEAD
from retro.training.settings import TrainSettings

STAGES = {
    "chunk": ("scan", "tokenizer", "chunk"),
    "embed": ("embed: count n-grams", "embed"),
    "train-index": ("train-index",),
    "add": ("add", "tune nprobe"),
    "sparse": ("sparse",),
    "ngrams": ("ngrams", "ngrams, merge"),
    "neighbors": ("neighbors",),
    "suffixes": ("suffixes, runs", "suffixes"),
    "votes": ("votes, held-out documents", "votes", "votes, collect"),
}
"""Stages, and the steps of the plan in each."""
_QUERIES, _COLD_TOKENS, _COLD_TEXT = 1000, 50, 1024
_READ_AHEAD = 1.0
"""Seconds after the index is opened, in which the kernel reads its heads and upper levels."""
_APPENDED = 0.01  # share of the text


# --- build -----------------------------------------------------------------------------------------------------------


def build(folder: Path, options: argparse.Namespace, limit: Budget) -> None:
    """Run the steps of one size that are not done yet."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(options.text.glob("*.jsonl.zst"))
    needed = options.parts + appended_parts(options.parts)
    if len(files) < needed:
        raise SystemExit(
            f"{options.text} has {len(files)} parts, but --parts {options.parts} needs {needed}, with those that are appended."
        )
    config = scale_config(folder, files[: options.parts])
    file = str(folder / "config.toml")
    Path(file).write_text(to_toml(config))
    results: dict[str, Any] = read_json(folder / "scale.json") if (folder / "scale.json").exists() else measured_on()
    steps: dict[str, Callable[[], Any]] = {"plan": partial(plan, file, folder / "plan.json")}
    for name in options.stages:
        steps[name] = partial(stage, name, file, folder, killed=name in options.kill)
    if "suffixes" in options.stages:
        steps["tokens"] = partial(token_times, config.datastore)
    steps["bytes"] = partial(artifact_bytes, config.datastore)
    if "neighbors" in options.stages:
        steps |= {
            "train": partial(train, file, config.run),
            "queries": partial(query_times, config.datastore),
            "append": partial(append, folder, files, config, options.stages),
            "delete": partial(delete, config.datastore),
        }
    left = [
        name for name in steps if name not in results or (name == "bytes" and options.stages[-1] not in results[name])
    ]
    for name in limit.each(left, "step"):
        say(name)
        results[name] = steps[name]()
        say(json.dumps(results[name]))
        write_json(folder / "scale.json", results)


def scale_config(folder: Path, files: list[Path]) -> Config:
    """Settings of the measured scale, and a run of 100 steps."""
    return Config(
        datastore=folder / "datastore",
        run=folder / "run",
        corpus=CorpusSettings(paths=tuple(map(str, files))),
        chunks=ChunkSettings(chunk_length=64),
        model=replace(PRESETS["tiny"], copy_head=NO_COPY_HEAD),
        data=DataSettings(sequence_length=512),
        train=TrainSettings(steps=100, batch_size=4, warmup_steps=10, eval_every=100, eval_tokens=10_000, log_every=50),
    )


def plan(file: str, out: Path) -> dict[str, Any]:
    """Plan the datastore."""
    cost = measured("plan", "datastore", file, "--output", str(out))
    made = read_json(out)["plan"]
    return {**cost, "steps": {step["name"]: step["seconds"] for step in made["steps"]}, "bytes": made["bytes"]}


def stage(name: str, file: str, folder: Path, *, killed: bool) -> dict[str, Any]:
    """Run one stage, after a first run that is killed in the middle of the planned time if `killed`."""
    first = None
    if killed:
        half = planned(read_json(folder / "scale.json"), name) / 2
        first = measured("index", file, "--stage", name, kill_after=half)
    return {**measured("index", file, "--stage", name), "killed": first}


def planned(results: dict[str, Any], name: str) -> float:
    """The seconds of a stage in the plan."""
    return float(sum(results["plan"]["steps"].get(step, 0.0) for step in STAGES[name]))


def measured(*arguments: str, kill_after: float | None = None) -> dict[str, float]:
    """`measured_process` of `retro` with some arguments."""
    return measured_process([sys.executable, "-m", "pipelines.cli", *arguments], kill_after)


def measured_process(command: Sequence[str], kill_after: float | None = None) -> dict[str, float]:
    """Run a command; return its seconds, its CPU seconds, and the peak memory of its processes in bytes.

    Args:
        command: of a program that says what is wrong if it fails.
        kill_after: seconds until SIGKILL.
    """
    started, cpu, peak, killed = time.perf_counter(), _children_seconds(), 0, False
    with subprocess.Popen(command, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, session_bytes(process.pid))
            if kill_after is not None and time.perf_counter() - started > kill_after and not killed:
                os.killpg(process.pid, signal.SIGKILL)
                killed = True
            time.sleep(0.1)
    if process.returncode and not killed:
        raise SystemExit(process.returncode)
    if kill_after is not None and not killed:
        say(f"ended before it was killed: {' '.join(command)}")
    spent = {"seconds": time.perf_counter() - started, "cpu_seconds": _children_seconds() - cpu}
    return {**spent, "peak_bytes": peak}


def _children_seconds() -> float:
    """CPU seconds of all finished processes that this one started."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def session_bytes(session: int) -> int:
    """Anonymous memory of all processes of a session: without mapped files, which the system can drop."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session:
                total += memory_bytes("RssAnon", entry.name)
        except OSError:
            continue  # the process has ended
    return total


def artifact_bytes(datastore: Path) -> dict[str, int]:
    """Bytes of every artifact, and the number of chunks."""
    sizes = {
        each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
        for each in datastore.iterdir()
        if each.is_dir()
    }
    return {"num_chunks": Datastore.open(datastore).train.num_chunks, **sizes}


def train(file: str, run: Path) -> dict[str, float]:
    """100 training steps."""
    cost = measured("train", file)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        **cost,
        "tokens_per_second": [line for line in lines if "tokens_per_second" in line][-1]["tokens_per_second"],
    }


def query_times(folder: Path) -> dict[str, float]:
    """Milliseconds of single searches for the texts of held-out chunks, after as many others that read the files."""
    retriever, valid = Retriever.open(folder), Datastore.open(folder).valid
    rows = np.random.default_rng(0).choice(valid.num_chunks, min(2 * _QUERIES, valid.num_chunks), replace=False)
    texts = [text for text in retriever.tokenizer.decode_batch(list(valid.tokens.gather(rows))) if text.strip()]
    times = []
    for text in texts:
        started = time.perf_counter()
        retriever.search([text], k=10, retrieval="dense")
        times.append(1e3 * (time.perf_counter() - started))
    warm = times[len(times) // 2 :]
    return {"queries": len(warm), "p50_ms": statistics.median(warm), "p99_ms": float(np.quantile(warm, 0.99))}


def token_times(folder: Path) -> dict[str, float]:
    """What a token of a generation costs to copy from the whole datastore: CPU microseconds with the files in memory;
    milliseconds, and reads of the disk, with nothing of them in memory; and seconds for all tokens of a text then."""
    texts = held_out_texts(Datastore.open(folder), 2 * _QUERIES)
    index, times = SuffixIndex.open(folder), []
    for text in texts:
        started = time.process_time()
        index.votes(text, len(text) - 1)
        times.append(1e6 * (time.process_time() - started))
    cold, reads = [], []
    for text in texts[:_COLD_TOKENS]:
        del index
        gc.collect()  # a mapped page stays in memory
        forget(folder)
        index = SuffixIndex.open(folder)
        time.sleep(_READ_AHEAD)
        started, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        index.votes(text, len(text) - 1)
        cold.append(1e3 * (time.perf_counter() - started))
        reads.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults)
    del index
    gc.collect()
    forget(folder)
    index = SuffixIndex.open(folder)
    time.sleep(_READ_AHEAD)
    whole = np.concatenate(texts)[:_COLD_TEXT].astype(np.int64)
    started = time.perf_counter()
    index.votes(whole)
    return {
        "cold_text_tokens": len(whole),
        "cold_text_s": time.perf_counter() - started,
        "tokens": sum(Datastore.open(folder).manifest["splits"]["train"]["tokens"]),
        "p50_us": statistics.median(times[len(times) // 2 :]),
        "cold_p50_ms": statistics.median(cold),
        "cold_reads": statistics.median(reads),
    }


def held_out_texts(datastore: Datastore, count: int) -> list[np.ndarray]:
    """Up to `count` texts of held-out documents: of two chunks in a row, up to a random token of the second one."""
    random, valid, m = np.random.default_rng(0), datastore.valid, datastore.chunk_length
    rows = random.permutation(valid.num_chunks)
    inner = rows[valid.documents_of(rows)[1] < rows][:count]
    lengths = valid.lengths.gather(inner)
    return [
        valid.tokens.read(row - 1, row + 1).reshape(-1)[: m + random.integers(1, length + 1)]
        for row, length in zip(inner.tolist(), lengths.tolist(), strict=True)
    ]


def forget(folder: Path) -> None:
    """Drop the files of a folder from memory, unless they are mapped."""
    for path in folder.rglob("*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def append(folder: Path, files: list[Path], config: Config, stages: Iterable[str]) -> dict[str, Any]:
    """Append a file of the next documents, stage by stage."""
    parts = len(config.corpus.paths)
    following = files[parts : parts + appended_parts(parts)]
    content = b"".join(zstandard.ZstdDecompressor().decompressobj().decompress(each.read_bytes()) for each in following)
    share = _APPENDED * parts / len(following)
    added = content[: content.index(b"\n", int(share * (len(content) - 1))) + 1]
    path = folder / "appended.jsonl"
    write_bytes(path, added)
    before, costs = Datastore.open(config.datastore).train.num_chunks, {}
    for name in stages:
        named = ("--append", "--corpus.paths", str(path)) if name == "chunk" else ()
        costs[name] = measured("index", str(folder / "config.toml"), "--stage", name, *named)
        say(f"{name}: {json.dumps(costs[name])}")
    return {
        "num_chunks": Datastore.open(config.datastore).train.num_chunks - before,
        "cpu_seconds": sum(cost["cpu_seconds"] for cost in costs.values()),
        "peak_bytes": max(cost["peak_bytes"] for cost in costs.values()),
        "stages": costs,
    }


def appended_parts(parts: int) -> int:
    """Files of text that hold what is appended to this number of them."""
    return math.ceil(_APPENDED * parts)


def delete(folder: Path) -> dict[str, float]:
    """Delete the first document."""
    return measured("delete", str(folder), "--ids", "00000-0")


# --- summary ---------------------------------------------------------------------------------------------------------


def summary(out: Path) -> None:
    """Print the tables."""
    sizes = sorted((read_json(file) for file in out.glob("*/scale.json")), key=lambda each: each["bytes"]["num_chunks"])
    chunks = [each["bytes"]["num_chunks"] for each in sizes]
    header = ["", *(f"{count:,} chunks" for count in chunks), "exponent"]
    rows = [
        row
        for name in STAGES
        for row in (
            [f"{name}: CPU seconds", *(_seconds(each.get(name)) for each in sizes), exponent(chunks, sizes, name)],
            [f"{name}: peak memory", *(_gigabytes(each.get(name)) for each in sizes), ""],
        )
    ]
    say(markdown(Table(header, rows)))
    compared = []
    for name in STAGES:
        ratios = [f"{planned(each, name) / each[name]['seconds']:.2f}" if name in each else "" for each in sizes]
        compared.append([name, *ratios])
    for name in sizes[0]["plan"]["bytes"]:
        ratios = [
            f"{each['plan']['bytes'][name] / each['bytes'][name]:.3f}" if name in each["bytes"] else ""
            for each in sizes
        ]
        compared.append([f"{name}: bytes", *ratios])
    say(markdown(Table(["planned / measured", *header[1:-1]], compared)))
    for each in sizes:
        say(json.dumps({name: each.get(name) for name in ("train", "queries", "tokens", "append", "delete")}))
        say(", ".join(f"{name} {each[name]}" for name in measured_on()))


def exponent(chunks: list[int], sizes: list[dict[str, Any]], name: str) -> str:
    """The exponent of the stage's CPU seconds in the number of chunks, of at least two sizes."""
    points = [(count, whole_seconds(each[name])) for count, each in zip(chunks, sizes, strict=True) if name in each]
    if len(points) < 2:
        return ""
    x, y = np.log(np.array(points, dtype=np.float64)).T
    return f"{np.polyfit(x, y, 1)[0]:.2f}"


def whole_seconds(cost: dict[str, Any]) -> float:
    """CPU seconds of a stage; if it was killed once, of both runs."""
    return float(cost["cpu_seconds"] + (cost["killed"]["cpu_seconds"] if cost["killed"] else 0))


def _seconds(cost: dict[str, Any] | None) -> str:
    return f"{whole_seconds(cost):,.1f}{' (killed once)' if cost['killed'] else ''}" if cost else ""


def _gigabytes(cost: dict[str, Any] | None) -> str:
    return f"{cost['peak_bytes'] / 1e9:.2f} GB" if cost else ""


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["build", "summary"])
    parser.add_argument("--text", type=Path, default=Path("scale/text"))
    parser.add_argument("--parts", type=int, default=1, help="files of --text, each about 70,000 chunks")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--kill", nargs="*", default=[], choices=STAGES, help="stages to kill once")
    parser.add_argument("--output", type=Path, default=Path("scale"))
    add_minutes(parser)
    options = parser.parse_args()
    if options.part == "summary":
        summary(options.output)
    else:
        build(options.output / str(options.parts), options, budget(options))


if __name__ == "__main__":
    main()
