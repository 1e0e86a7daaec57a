"""On a GPU no operation mixes in a tensor of the CPU, and the host waits for no value in between: checked without a GPU."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from indexing.index.product_search import ProductIndex
from retro.adapters.adapters import train_only
from retro.adapters.settings import Weights
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.device import Placement, choose_placement
from retro.model import kernels
from retro.model.retro import Retro
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep
from tests.indexing.index.vector_files import stored
from tests.retro.fake_cuda import CUDA, FakeCuda, fake_cuda
from tests.retro.inference.test_decoder import retriever, rows
from tests.retro.inference.test_scoring import score
from tests.retro.small_model import READERS, SCHEMES, M, T, Together, answers_only, build

SMALL = {"num_layers": 2, "retrieval.cca_layers": (2,)}
MODELS: dict[str, dict[str, Any]] = {
    **SCHEMES,
    **READERS,
    "experts": {"experts.num_experts": 4, "experts.every": 1},
    "grouped queries": {"attention.num_kv_heads": 1},
    "window": {"attention.sliding_window": 5},
    "baseline": {"retrieval.cca_layers": ()},
    "dropout": {"dropout": 0.1},
}
PACKED = ("rope", "learned", "copying", "grouped queries", "window")
"""Models whose attention takes the bounds of packed documents in place of a mask."""


def on_cuda(name: str) -> tuple[Retro, Placement]:
    """A small model on the fake device. Call it inside `fake_cuda`."""
    placement = choose_placement(str(CUDA), "bfloat16")
    scheme = name if name in SCHEMES else "rope"
    model = build(scheme, **{**SMALL, **MODELS[name]}).to(placement.device)
    return model, placement


def packed() -> Inputs:
    """A batch of rows with two documents each, and all arguments of the model."""
    whole = answers_only()
    documents = torch.arange(T // M).expand(len(whole.tokens), -1) // 2
    return whole._replace(documents=documents, lengths=torch.full_like(documents, M))


def reads_of_step(
    cuda: FakeCuda, name: str, batches: list[Inputs], weights: Weights = "all", **settings: Any
) -> list[str]:
    """Train a step; returns what the host read."""
    model, placement = on_cuda(name)
    train_only(model.train(), weights)
    processes = Processes(ALONE, placement.device)
    chosen = TrainSettings(steps=10, warmup_steps=0, **{"monitor_every": 0, **settings})
    passes = WholeModel(model, processes, placement)
    step = OptimizerStep(passes, make_optimizer([model], chosen, dtype=placement.dtype), processes, placement, chosen)
    step(0, [placement.put(batch) for batch in batches])
    assert {parameter.device for parameter in model.parameters()} == {CUDA}
    return cuda.reads


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reads_the_device_once_and_makes_no_mask_of_packed_documents(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = packed()
    if name in PACKED:
        monkeypatch.delattr(kernels, "document_mask")
        monkeypatch.delattr(kernels, "visible")
        # The last row has no neighbors.
        given = given._replace(neighbors=given.neighbors[:3], neighbor_lengths=given.neighbor_lengths[:3])
    with fake_cuda() as cuda:
        (read,) = reads_of_step(cuda, name, [given])
    assert read.startswith("retro/device.py")  # `start_copy`


def test_the_optimizer_is_queued_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device would idle while the host queues the optimizer."""
    order: list[str] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args: (order.append("optimizer"), step(*args))[1])
    with fake_cuda() as cuda:
        torch.cuda.Event.return_value.record.side_effect = lambda: order.append("copy")  # type: ignore[attr-defined]
        torch.cuda.Event.return_value.synchronize.side_effect = lambda: order.append("wait")  # type: ignore[attr-defined]
        reads_of_step(cuda, "rope", [packed()])
    assert order == ["copy", "optimizer", "wait"]


@pytest.mark.parametrize("name", ["rope", "copying", "experts"])
def test_a_step_of_muon_reads_the_device_once_and_multiplies_in_bfloat16(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied, product = set[torch.dtype](), torch.baddbmm

    def multiply(*matrices: torch.Tensor, **factors: Any) -> torch.Tensor:
        multiplied.update(matrix.dtype for matrix in matrices)
        return product(*matrices, **factors)

    monkeypatch.setattr(torch, "baddbmm", multiply)
    with fake_cuda() as cuda:
        assert len(reads_of_step(cuda, name, [packed()], optimizer="muon")) == 1
    assert multiplied == {torch.bfloat16}


@pytest.mark.parametrize("name", ["rope", "copying"])
def test_a_step_of_several_batches_reads_the_device_once(name: str) -> None:
    with fake_cuda() as cuda:
        assert len(reads_of_step(cuda, name, [answers_only(), answers_only(), packed()])) == 1


@pytest.mark.parametrize("name", ["rope", "copying"])
def test_a_step_of_retrofit_reads_the_device_once(name: str) -> None:
    with fake_cuda() as cuda:
        assert len(reads_of_step(cuda, name, [packed()], "retrieval")) == 1


def test_the_monitor_reads_the_device_twice_in_a_step_that_it_measures() -> None:
    with fake_cuda() as cuda:
        reads = reads_of_step(cuda, "rope", [packed()], monitor_every=1)
    assert [read.split(":")[0] for read in reads].count("retro/training/monitor.py") == 2
    assert len(reads) == 3


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_reads_nothing_before_its_result(name: str) -> None:
    with fake_cuda() as cuda:
        model, placement = on_cuda(name)
        passes = WholeModel(model, Processes(ALONE, placement.device), placement)
        losses = passes.token_losses(placement.put(packed()))
        read = [line for line in cuda.reads if "mixture_of_experts.py" not in line]  # length of the longest queue
        assert losses.device == CUDA
    assert not read


@pytest.mark.parametrize("name", ["rope", "transformer-xl", "copying", "experts", "window"])
def test_scoring_runs_on_the_device(name: str) -> None:
    with fake_cuda():
        model, placement = on_cuda(name)
        retrieve = retriever(2) if model.settings.retrieval.cca_layers else None
        scores = score(model, rows(1, M, 3 * M), placement, context=T, retrieve=retrieve, top=3, sources=True)
    assert [len(each.log_probabilities) for each in scores] == [0, M - 1, 3 * M - 1]


@pytest.mark.parametrize("name", ["rope", "transformer-xl", "copying", "experts", "window"])
def test_cached_decoding_runs_on_the_device(name: str) -> None:
    with fake_cuda():
        model, placement = on_cuda(name)
        placement.cast(model)
        retrieve = retriever(2) if model.settings.retrieval.cca_layers else None
        decoder = Together(model, placement, T, retrieve)
        logits = decoder.read(rows(1, M, 2 * M + 1))
        decoder.keep([0, 2])
        for token in range(M):
            logits = decoder.read([np.array([token])] * 2)
        graphs = decoder.decoder.layers.graphs
        assert (graphs is None) == (name == "experts")
        assert graphs is None or (graphs._graphs and not graphs._failed)
        assert logits.device == CUDA
        assert logits.shape == (2, model.settings.vocab_size)


def test_product_search_runs_on_the_device(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_thread = contextlib.nullcontext(lambda function, items: [function(item) for item in items])
    monkeypatch.setattr("indexing.index.product_search.one_thread_each", lambda _: in_this_thread)
    embeddings = stored(tmp_path, np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32))
    queries = embeddings.read(0, 50).astype(np.float32)
    with fake_cuda():
        ids = ProductIndex(embeddings, str(CUDA)).search(queries, 8, (np.arange(50), np.arange(50) + 3))
    assert ids.shape == (50, 8)


def test_a_tensor_of_the_cpu_among_those_of_the_device_is_an_error() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(3, device=CUDA) + torch.ones(3)


def test_reads_and_shapes_that_depend_on_values_are_noticed() -> None:
    with fake_cuda() as cuda:
        labels = torch.full((2, 3), IGNORED_LABEL, device=CUDA)
        with pytest.raises(DynamicOutputShapeException):
            labels[labels != IGNORED_LABEL]
        assert not cuda.reads
        int(labels.sum())
        labels.cpu()
        labels.tolist()
        if labels.any():
            raise AssertionError("a fake value is zero")
    assert len(cuda.reads) == 4
    assert all(read.startswith("tests/retro/test_cuda_without_device.py") for read in cuda.reads)
