"""Matrices that are gathered in 16 bits train as matrices that are gathered in float32, to the bit, and half the bytes are sent."""

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.speed.traffic import Communication
from retro.device import choose_placement
from retro.parallel import data_parallel
from retro.parallel.data_parallel import matrices
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ParallelSettings
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep
from tests.conftest import PATIENCE, forkserver
from tests.retro.small_model import answers_only, build, split_batch

WORLD = 2
SMALL = {"num_layers": 2, "retrieval.cca_layers": (2,)}
MODELS: dict[str, dict[str, Any]] = {
    "normed": {"attention.qk_norm": True, "attention.smeared_tokens": 2, "attention.bias": "all"},
    "experts": {"experts.num_experts": 4, "experts.every": 2, "shared_embeddings": True},
    "copying": {"copy_head.context": True, "copy_head.neighbors": True},
}
RUNS = [("normed", 0), ("normed", 1), ("experts", 2), ("copying", 3), ("normed", 3)]
"""Model and ZeRO stage."""


def train(name: str, zero: Any, precision: Any = "bfloat16") -> tuple[dict[str, torch.Tensor], int]:
    """Whole parameters after two steps of two batches, and the bytes that the second step gathers."""
    placement = choose_placement("cpu", precision)
    processes = Processes(ParallelSettings(zero=zero), placement.device)
    model = build(**{**SMALL, **MODELS[name]}).train()
    passes = WholeModel(model, processes, placement)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr_factor": 1.0}])
    settings = TrainSettings(gradient_accumulation_steps=2, monitor_every=0, warmup_steps=0)
    step = OptimizerStep(passes, optimizer, processes, placement, settings)
    rows = processes.rows(4)
    batches = [part.rows(slice(rows.start, rows.stop)) for part in split_batch(answers_only(8), 2)]
    step(0, batches)
    with Communication() as communication:
        step(1, batches)
    whole = {key: getattr(value, "full_tensor", lambda one=value: one)() for key, value in model.named_parameters()}
    return {key: value.detach() for key, value in whole.items()}, communication.volume["all-gather"]


def compare(name: str, zero: int) -> str:
    """What differs between gathering in bfloat16 and in float32; empty if nothing does."""
    narrow, sent = train(name, zero)
    data_parallel.MixedPrecisionPolicy = lambda *_, **__: MixedPrecisionPolicy()  # type: ignore[attr-defined, assignment]
    whole, sent_whole = train(name, zero)
    data_parallel.MixedPrecisionPolicy = MixedPrecisionPolicy  # type: ignore[attr-defined]
    differing = [key for key in whole if not torch.equal(whole[key], narrow[key])]
    untrained = [
        key for key, value in build(**{**SMALL, **MODELS[name]}).named_parameters() if torch.equal(value, whole[key])
    ]
    in_blocks = sum(
        value.numel() for key, value in matrices(build(**{**SMALL, **MODELS[name]})).items() if "head" not in key
    )
    # ZeRO-1 and -2 gather once per step, ZeRO-3 in every forward and backward pass.
    saved = 2 * in_blocks * (0, 1, 1, 4)[zero]
    problems = [f"differs: {differing}"] * bool(differing) + [f"does not learn: {untrained}"] * bool(untrained)
    if not 0.9 * saved <= sent_whole - sent <= 1.1 * saved:
        problems.append(f"gathered {sent} of {sent_whole} bytes; {saved} should be saved")
    return "; ".join(problems)


def run_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    for name, zero in RUNS:
        try:
            problem = compare(name, zero)
        except BaseException:
            problem = traceback.format_exc()
        (folder / f"{name}.{zero}.{rank}").write_text(problem)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, context = tmp_path_factory.mktemp("gathered"), forkserver()
    processes = [context.Process(target=run_process, args=(rank, folder)) for rank in range(WORLD)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(PATIENCE)
        one.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zero"), RUNS)
def test_gathering_in_bfloat16_changes_no_bit_and_saves_half(name: str, zero: int, folder: Path) -> None:
    for rank in range(WORLD):
        assert (folder / f"{name}.{zero}.{rank}").read_text() == ""


def test_routers_norms_and_tables_are_no_matrices() -> None:
    model = build(**{**SMALL, **MODELS["experts"], "attention.qk_norm": True, "attention.smeared_tokens": 2})
    others = {name for name, _ in model.named_parameters()} - set(matrices(model))
    assert all("norm" in name or name.endswith(("embedding.weight", "router.weight", "taps.weight")) for name in others)
    assert {id(value) for value in matrices(model).values()} <= {id(value) for value in model.parameters()}
