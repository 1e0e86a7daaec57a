"""A step whose sequences all lack neighbors changes the same weights in one process and in two.

The first two steps of a run have neighbors in some sequences, the third has none: `SEED` draws the retrieval dropout so.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from indexing.store.datastore import Datastore
from retro.data.batches import TrainingData
from retro.data.loader import load
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep
from tests.conftest import PATIENCE, forkserver
from tests.retro.small_model import SETTINGS

WORLD, SEED, BATCH_SIZE, DROPOUT = 2, 50, 4, 0.7
CPU = Placement(torch.device("cpu"), torch.float32)
COPYING = {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True}
RUN = TrainSettings(steps=3, batch_size=BATCH_SIZE, lr=1e-3, lr_schedule="constant", warmup_steps=0, monitor_every=0)
ZERO = (0, 3)


def weights(datastore: Path, zero: int) -> list[dict[str, Tensor]]:
    """The whole parameters after each step, by name."""
    processes = Processes(ParallelSettings(zero=zero), CPU.device)
    data = TrainingData([datastore], DataSettings(sequence_length=32, k=2, seed=SEED), retrieval=True, votes=True)
    torch.manual_seed(0)
    passes = WholeModel(Retro(settings(data)).train(), processes, CPU)
    step = OptimizerStep(passes, make_optimizer(passes.model_parts, RUN), processes, CPU, RUN)
    rows, after = processes.rows(BATCH_SIZE), list[dict[str, Tensor]]()
    loading: dict[str, Any] = {"batch_size": BATCH_SIZE, "rows": rows, "retrieval_dropout": DROPOUT}
    loaded = load(data, batches=range(3), workers=0, placement=CPU, **loading)
    for number, batch in enumerate(loaded):
        step(number, [batch])
        named = passes.model.named_parameters()
        after.append({name: whole(parameter.detach()).clone() for name, parameter in named})
    return after


def settings(data: TrainingData) -> ModelSettings:
    manifest = data.datastores[0].manifest
    return updated(
        SETTINGS, {**COPYING, "vocab_size": manifest["vocab_size"], "chunk_length": manifest["chunk_length"]}
    )


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def run_process(rank: int, folder: Path, datastore: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    found = {zero: weights(datastore, zero) for zero in ZERO}
    if rank == 0:
        torch.save(found, folder / "weights.pt")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, voting_datastore: Datastore) -> dict[int, list[dict[str, Tensor]]]:
    folder, context = tmp_path_factory.mktemp("two"), forkserver()
    processes = [context.Process(target=run_process, args=(r, folder, voting_datastore.folder)) for r in range(WORLD)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(PATIENCE)
        one.kill()
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def of_one(voting_datastore: Datastore) -> list[dict[str, Tensor]]:
    return weights(voting_datastore.folder, 0)


def test_the_batches_are_those_that_the_tests_need(voting_datastore: Datastore) -> None:
    data = TrainingData([voting_datastore.folder], DataSettings(sequence_length=32, seed=SEED), retrieval=True)
    batches = [data.batch(range(BATCH_SIZE * n, BATCH_SIZE * (n + 1)), DROPOUT) for n in range(3)]
    reads = [batch.neighbor_lengths.any(axis=(1, 2)) for batch in batches]
    assert [bool(rows.any()) for rows in reads] == [True, True, False]
    assert any(rows[:2].any() != rows[2:].any() for rows in reads)  # one of two processes has neighbors


@pytest.mark.slow
@pytest.mark.parametrize("zero", ZERO)
def test_two_processes_change_all_weights_as_one_does(
    zero: int, of_one: list[dict[str, Tensor]], of_two: dict[int, list[dict[str, Tensor]]]
) -> None:
    for one, two in zip(of_one, of_two[zero], strict=True):
        assert one.keys() == two.keys()
        # Some gradients of scores are 0 but for rounding errors, and AdamW's first steps follow their signs.
        for name in (name for name in one if not name.endswith(".scores")):
            torch.testing.assert_close(
                two[name], one[name], rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
            )


def test_a_step_without_neighbors_changes_all_copy_sources_by_their_momentum(of_one: list[dict[str, Tensor]]) -> None:
    before, after = of_one[1:]
    for source in ("context", "neighbors", "datastore"):
        name = f"copy_head.{source}.outer_bias"
        assert not torch.equal(before[name], after[name]), name
