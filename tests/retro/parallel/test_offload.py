"""ZeRO-3 with parameters and optimizer in the host's memory, in a single process: the losses are those without it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from retro.batch.inputs import Inputs
from retro.device import choose_placement
from retro.parallel.data_parallel import share_data
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import batch, build, plain_loss


@pytest.fixture
def group(tmp_path: Path, device: str) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(parallel: ParallelSettings, device: str) -> list[float]:
    """Losses of eager steps in the training precision."""
    placement, model = choose_placement(device, "auto"), build().train()
    if parallel.zero:
        share_data(model, model, Processes(parallel, placement.device), placement.dtype)
    else:
        model = model.to(placement.device)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-3))
    tokens, neighbors, _ = (x.to(placement.device) for x in batch())
    found = []
    for _ in range(4):
        with placement.autocast():
            hidden, _ = model.hidden(Inputs(tokens, neighbors=neighbors))
            value = plain_loss(hidden, model.output_weight, tokens.roll(-1, dims=1))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(float(value.detach()))
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("group")
def test_offloaded_training_has_the_losses_of_training_on_the_device(device: str) -> None:
    offloaded = losses(ParallelSettings(zero=3, cpu_offload=True), device)
    plain = losses(ALONE, device)
    assert offloaded == pytest.approx(plain, rel=1e-2)
    assert plain[-1] < plain[0]
