"""Part A of three on one NVIDIA GPU, in eight minutes: tests, training, decoding, search, embedding, memory against the
plan.

pip install -e '.[gpu,minilm,test]' && pip install --no-deps retro-pytorch==0.3.9      # without a network: gpu_kit.py
python -m benchmarks.speed.gpu [--cases NAME ...] [--minutes 8] [--tiny]

Every case runs in a separate process with a time limit, so an error in one does not stop the others, and memory is
measured separately. The most important cases come first, and the JSON file is written after every figure. A case whose
package or memory is missing is skipped with the reason. Without a GPU nothing runs, except with `--tiny`, which runs
each case at a size for tests; its speeds mean nothing. Part B is `gpu_run.py`, part C `gpu_cross_attention.py`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_cases, add_minutes, budget, placement, say, seconds
from benchmarks.deadline import Case, Figures, run_cases, selected
from benchmarks.speed import training
from indexing.embedding.settings import EmbedderSettings
from indexing.embedding.transformer import TransformerEmbedder
from indexing.index.faiss_gpu import num_gpus, on_cpu, on_gpus
from indexing.index.product_search import ProductIndex
from indexing.store.sharded_array import ShardedArray
from pipelines.terminal.units import human_bytes
from retro.batch.masks import document_mask
from retro.estimates.flops import measured_flops, peak_flops, training_flops
from retro.estimates.trace import Pass
from retro.estimates.training_memory import memory_of
from retro.inference.decoder import Decoder
from retro.model.kernels import Bounds, dot_product_attention, self_attention_mask
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model_settings import NO_COPY_HEAD, AttentionSettings, updated
from retro.parallel.settings import ALONE

TESTS = Path(__file__).parents[2] / "tests"
MINUTES = 8.0
WIDTH = 256
"""Dimension of the vectors."""
SMALL = updated(
    replace(PRESETS["tiny"], copy_head=NO_COPY_HEAD),
    {"num_layers": 2, "retrieval.cca_layers": (2,), "vocab_size": 128, "chunk_length": 8},
)
"""The model of `--tiny`."""


def timed(work: Callable[[], object]) -> float:
    """Time one call, until the GPU has finished."""
    if not torch.cuda.is_available():
        return seconds(work)

    def finished() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return seconds(finished)


def attention(tiny: bool) -> Iterator[Figures]:
    """Forward and backward pass of packed documents: by mask, and by bounds if training uses them."""
    batch_size, num_tokens, m, width = (2, 64, 8, 16) if tiny else (8, 2048, 64, 64)
    placed = placement()
    documents = (torch.arange(num_tokens // m, device=placed.device) // 5).expand(batch_size, -1)
    shapes = [(batch_size, heads, num_tokens, width) for heads in (16, 4, 4)]
    q, k, v = (torch.randn(s, device=placed.device, dtype=placed.dtype, requires_grad=True) for s in shapes)
    chosen = self_attention_mask(q.flatten(0, 1), documents, m, AttentionSettings(head_dim=width))
    biases: dict[str, Any] = {"mask": document_mask(documents, m, num_tokens)}
    for name, bias in (biases | ({"bounds": chosen} if isinstance(chosen, Bounds) else {})).items():

        def step(bias: Any = bias) -> None:
            torch.autograd.grad(dot_product_attention(q, k, v, bias, True), (q, k, v), torch.ones_like(q))

        step()  # warms up
        yield {name: f"{1000 * statistics.median(timed(step) for _ in range(5)):.2f} ms"}


def tests(tiny: bool) -> Iterator[Figures]:
    """`pytest -m gpu`, in the files that have such tests: others may import packages that a machine for training
    lacks."""
    files = sorted(str(file) for file in TESTS.rglob("test_*.py") if "mark.gpu" in file.read_text())
    options = ["-n", "0", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", *(["--collect-only"] if tiny else [])]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(TESTS.parent), *options, *files]
    lines = list[str]()
    with subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"pytest": lines[-1] if lines else "no output", "failed tests": failed}
    if process.returncode:
        raise AssertionError(f"pytest ended with status {process.returncode}")


def machine_rates(tiny: bool) -> Iterator[Figures]:
    """What the device reaches: a large matrix product, and a copy of its memory (bytes read and written)."""
    yield {"product, TFLOP/s": round(measured_flops(placement(), 256 if tiny else 8192) / 1e12, 2)}
    source = torch.empty(2**20 if tiny else 2**32, dtype=torch.uint8, device=placement().device)
    target = torch.empty_like(source)
    took = statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))
    yield {"copy, GB/s": round(2 * source.nbytes / took / 1e9, 1)}


def train(case: training.Case, tiny: bool, fill: bool = False) -> Iterator[Figures]:
    """Training steps: time, tokens/s, model FLOPs utilization, and peak memory against `retro plan train`.

    Args:
        case: one of `training.cases`. The batch of retro-pytorch is halved until it fits.
        tiny: at a size for tests.
        fill: as many sequences as the plan says that fit.
    """
    case = replace(case, settings=SMALL, batch_size=2, num_tokens=32) if tiny else case
    if fill:
        case = replace(case, batch_size=largest_batch(case))
    placed, tokens = placement(), case.batch_size * case.num_tokens
    torch._dynamo.reset()
    smaller: training.Case | None = None
    try:
        step, _ = (training.our_step if case.ours else training.their_step)(case, placed)
        first = timed(step)
    except torch.OutOfMemoryError:
        if case.ours or case.batch_size == 1:
            raise
        smaller = replace(case, batch_size=case.batch_size // 2)
    if smaller:  # outside of `except`, which would keep the memory
        torch.cuda.empty_cache()
        yield from train(smaller, tiny)
        return
    yield {"sequences": case.batch_size, "first step": f"{first:.1f} s"}
    step()
    took = statistics.median(timed(step) for _ in range(5))
    flops = case.batch_size * training_flops(case.settings, case.num_tokens, case.k)
    yield {
        "step": f"{1000 * took:.1f} ms",
        "tokens/s": f"{tokens / took:,.0f}",
        "MFU": f"{flops / took / peak_flops(placed):.1%}",
    }
    if placed.device.type == "cuda":
        yield {"peak memory": human_bytes(torch.cuda.max_memory_allocated())}
    if case.ours:
        yield {"planned memory": human_bytes(planned_bytes(case))}
    yield {"of the rate of a product": f"{flops / took / measured_flops(placed, 256 if tiny else 8192):.1%}"}


def planned_bytes(case: training.Case) -> int:
    """Peak memory of the device that `retro plan train` states."""
    run = Pass(case.batch_size, case.num_tokens, case.k, documents=False)
    return memory_of(case.settings, run, ALONE, compiled=case.compiled).device


def largest_batch(case: training.Case, memory: int = 0) -> int:
    """Sequences, a power of two, whose planned peak is at most nine tenths of the device's memory (or of `memory`
    bytes)."""
    if not memory:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 1 << 27
    size = 1
    while planned_bytes(replace(case, batch_size=2 * size)) <= 0.9 * memory:
        size *= 2
    return size


def decoding(tiny: bool) -> Iterator[Figures]:
    """Cached decoding with random neighbors at 172m: tokens/s by the number of rows, with and without graphs."""
    settings = SMALL if tiny else replace(PRESETS["172m"], vocab_size=128_000, chunk_length=64)
    placed, m = placement(), settings.chunk_length
    model = Retro(settings).to(placed.device).eval()
    placed.cast(model)

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.concatenate((chunks, chunks[:, ::-1]), axis=1)
        return np.repeat(tokens[:, None], 2, axis=1), np.full((len(chunks), 2), 2 * m)

    steps = 2 * m + 1
    for num_rows, graphs in ((1, True), (8, True), (64, True), (1, False), (64, False)):
        decoder = Decoder(model, placed, 8 * m)
        if not graphs:
            decoder.layers.graphs = None
        rows = [decoder.add(np.arange(m) % settings.vocab_size, retrieve) for _ in range(num_rows)]
        decoder.read(rows)

        def decode(decoder: Decoder = decoder, rows: list = rows) -> None:
            for _ in range(steps):
                for row in rows:
                    decoder.append(row, 1)
                decoder.read(rows)

        how = "" if graphs else ", each kernel alone"
        yield {f"tokens/s, {num_rows} rows{how}": f"{num_rows * steps / timed(decode):,.0f}"}


def clustered(count: int, seed: int = 0) -> np.ndarray:
    """Unit vectors [count, WIDTH] float32 around centers, which are the same for every seed."""
    centers = np.random.default_rng(0).standard_normal((256, WIDTH), dtype=np.float32)
    random = np.random.default_rng(seed + 1)
    vectors = centers[random.integers(0, 256, count)] + random.standard_normal((count, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def faiss_index(tiny: bool) -> Iterator[Figures]:
    """Train (k-means and codebooks), fill and search an IVF-PQ."""
    import faiss

    if not tiny and not num_gpus():
        raise ImportError("Faiss has no GPU (pip install 'retro[gpu]')")
    count, lists, codes = (4_000, 16, "SQ8") if tiny else (400_000, 1024, "PQ32")
    vectors, queries = clustered(count), clustered(256, seed=1)
    index: Any = faiss.index_factory(WIDTH, f"IVF{lists},{codes}")
    index.cp.niter = 10
    moved = on_gpus(index, "k-means")
    times = {"train": timed(lambda: moved.train(vectors[: 64 * lists])), "add": timed(lambda: moved.add(vectors))}
    faiss.ParameterSpace().set_index_parameter(index := on_cpu(moved), "nprobe", 16)
    searching = on_gpus(index, "searching")
    times["search, 256 queries"] = timed(lambda: searching.search(queries, 10))
    yield {name: f"{took:.2f} s" for name, took in times.items()}


def products(tiny: bool) -> Iterator[Figures]:
    """Exact search by matrix products: queries/s."""
    count, num_queries = (3_000, 100) if tiny else (500_000, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vectors.npy"
        np.save(file, clustered(count).astype(np.float16))
        index = ProductIndex(ShardedArray([file], [count]), placement().device.type)
        queries = clustered(num_queries, seed=1)
        index.search(queries[: num_queries // 2], 32)  # warms up
        yield {"exact, queries/s": f"{num_queries / timed(partial(index.search, queries, 32)):,.0f}"}


def embedding(tiny: bool) -> Iterator[Figures]:
    """Embed with MiniLM: chunks/s."""
    settings, count = EmbedderSettings(kind="transformer", path="minilm"), 8 if tiny else 8192
    embedder = TransformerEmbedder(settings, lambda row: " ".join(map(str, row)))
    tokens = np.random.default_rng(0).integers(0, 1000, (count, 64))
    yield {"chunks/s": f"{count / timed(lambda: embedder.embed(tokens, np.full(count, 64))):,.0f}"}


_ALL = {case.name: case for case in training.cases("cuda", torch.bfloat16)}
CASES: dict[str, tuple[Callable[..., Iterator[Figures]], float]] = {
    "tests": (tests, 150),
    "the device": (machine_rates, 25),
    "train, retro 172m, compiled": (partial(train, _ALL["retro 172m, compiled"]), 130),
    "train, retro-pytorch 0.3.9, 172m": (partial(train, _ALL["retro-pytorch 0.3.9, 172m"]), 60),
    "decoding": (decoding, 60),
    "products": (products, 60),
    "train, retro 172m, compiled, largest batch": (partial(train, _ALL["retro 172m, compiled"], fill=True), 90),
    "train, retro 172m, eager": (partial(train, _ALL["retro 172m, eager"]), 40),
    "train, retro 1.5b, eager": (partial(train, _ALL["retro 1.5b, eager"], fill=True), 45),
    "attention of packed documents": (attention, 30),
    "embedding": (embedding, 40),
    "Faiss": (faiss_index, 40),
    "train, retro 1.5b, compiled": (partial(train, _ALL["retro 1.5b, compiled"], fill=True), 240),
}
"""Cases, the most important first, and the seconds after which each is ended."""


def cases_of(tiny: bool) -> dict[str, Case]:
    """All cases in order."""
    works = {name: partial(work, tiny=tiny) for name, (work, _) in CASES.items()}
    if tiny:
        works = {name: partial(without_code, work) for name, work in works.items()}
    return {name: Case(works[name], seconds) for name, (_, seconds) in CASES.items()}


def without_code(work: Callable[[], Iterator[Figures]]) -> Iterator[Figures]:
    """Let compilation generate no code, which takes minutes on a CPU."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    yield from work()


def main() -> int:
    """Print the figures and write them as JSON. Return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cases(parser)
    parser.add_argument("--tiny", action="store_true", help="run at a size for tests, without a GPU too")
    add_minutes(parser, MINUTES)
    parser.add_argument("--output", type=Path, default=Path("benchmark-gpu.json"))
    options = parser.parse_args()
    cases = selected(cases_of(options.tiny), options.cases)
    if not options.tiny and not torch.cuda.is_available():
        say("Skipped, since torch finds no CUDA device (`retro doctor` shows what it finds):", *cases, sep="\n  ")
        return 0
    return run_cases(cases, options.output, budget(options), {"tiny": options.tiny})


if __name__ == "__main__":
    sys.exit(main())
