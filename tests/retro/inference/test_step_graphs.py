"""Recorded steps give the logits of a full forward pass: with rows that join and leave, and a cache that grows."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from retro.device import choose_placement
from retro.inference import cache, step_graphs
from retro.inference.step_graphs import StepGraphs
from tests.retro import recorded
from tests.retro.inference.test_decoder import FLOAT32, LENGTHS, check_steps, retriever, rows, uncached
from tests.retro.small_model import M, T, Together, V, build, cached_model, every_scheme_and_reader


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records on a CPU. Grows by one with each replay."""
    counted: list[int] = []

    def record(work: Callable[[], Tensor], memory: object) -> tuple[Tensor, Callable[[], object], object]:
        hidden, replay, memory = recorded.record(work, memory)
        return hidden, lambda: (counted.append(1), replay()), memory

    monkeypatch.setattr(step_graphs, "record", record)
    return counted


def replaying(decoder: Together) -> Together:
    """The decoder with graphs, as on a GPU."""
    layers = decoder.decoder.layers
    layers.graphs = StepGraphs(layers._run)
    return decoder


@pytest.mark.parametrize("k", [0, 3])
@every_scheme_and_reader
def test_every_replayed_step_gives_the_logits_of_a_full_forward_pass(
    scheme: str, k: int, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEY_STEP", 3 * M)
    model, retrieve = cached_model(scheme), retriever(k)
    decoder = replaying(Together(model, FLOAT32, 4 * T, retrieve))

    def expected(row: np.ndarray, generated: int) -> Tensor:
        return uncached(model, row, retrieve, generated)

    check_steps(decoder, expected, rows(*LENGTHS), 2 * M + 2, keep_at=M)
    assert len(replays) > M // 2


def test_a_graph_serves_all_steps_of_its_shape(replays: list[int]) -> None:
    decoder = replaying(Together(build(), FLOAT32, 4 * T, None))
    decoder.read(rows(M, M, M))
    for _ in range(6):
        decoder.read([np.zeros(1, np.int64)] * 3)
    graphs = decoder.decoder.layers.graphs
    assert graphs is not None
    assert (len(graphs._graphs), len(replays)) == (1, 6)
    decoder.keep([])
    assert not graphs._graphs  # the cache is freed too


def test_a_graph_that_cannot_be_recorded_is_named_once_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: Callable[[], Tensor], memory: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "record", fail)
    tokens = [rows(M), *([np.array([token])] for token in range(5))]
    plain, failing = (Together(build(), FLOAT32, 4 * T, None) for _ in range(2))
    replaying(failing)
    with caplog.at_level(logging.WARNING):
        for each in tokens:
            torch.testing.assert_close(failing.read(each), plain.read(each))
    (line,) = caplog.messages
    assert line.endswith("no CUDA graph of a step: operation not permitted when stream is capturing")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replayed_steps_on_a_gpu_give_the_logits_of_others(precision: str) -> None:
    placement, retrieve = choose_placement("cuda", precision), retriever(2)
    model = build().to("cuda")
    placement.cast(model)
    plain, graphs = (Together(model, placement, 4 * T, retrieve) for _ in range(2))
    plain.decoder.layers.graphs = None
    given = rows(*LENGTHS)
    for step in range(3 * M):
        torch.testing.assert_close(graphs.read(given), plain.read(given), rtol=2e-2, atol=2e-2)
        given = [np.array([(step * 7 + number) % V]) for number in range(len(LENGTHS))]
    assert graphs.decoder.layers.graphs is not None
    assert not graphs.decoder.layers.graphs._failed
