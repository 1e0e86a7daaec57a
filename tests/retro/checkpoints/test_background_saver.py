"""The background saver writes a snapshot of the tensors at the time of the call and raises every write error."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints import training_state
from retro.checkpoints.background_saver import Saver
from retro.checkpoints.checkpoint import TensorFiles
from retro.model.retro import Retro
from retro.model_settings import AttentionSettings, ModelSettings, RetrievalSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings

STATE = {
    "step": 3,
    "tokens": 30,
    "settings": {"train": {"lr": 0.1}},
    "datastores": ["0123"],
    "best": None,
    "started_from": None,
}


def train_one_step() -> tuple[Retro, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Retro(
        ModelSettings(
            vocab_size=50,
            chunk_length=64,
            d_model=16,
            d_ffw=16,
            attention=AttentionSettings(num_heads=1, head_dim=16),
            num_layers=3,
            retrieval=RetrievalSettings(cca_layers=()),
        )
    )
    optimizer = make_optimizer([model], TrainSettings(lr=1e-2))
    step(model, optimizer)
    return model, optimizer


def step(model: Retro, optimizer: torch.optim.Optimizer) -> None:
    model(Inputs(torch.randint(50, (2, 8)))).square().mean().backward()
    optimizer.step()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_background_save_equals_a_foreground_save_while_training_continues(tmp_path: Path) -> None:
    model, optimizer = train_one_step()
    saver, goes_on = Saver(), threading.Event()
    saver.prepare(training_state.tensors_of(model, optimizer))
    for number in (3, 4):
        state = {**STATE, "step": number}
        checkpoints.write(tmp_path / "plain", state, training_state.tensors_of(model, optimizer))

        def delayed_write(copies: TensorFiles, state=state) -> None:
            goes_on.wait()
            checkpoints.write(tmp_path / "threaded", state, copies)

        saver.save(training_state.tensors_of(model, optimizer), delayed_write)
        step(model, optimizer)
        goes_on.set()
    saver.close()
    assert files(tmp_path / "threaded") == files(tmp_path / "plain")
    assert len(files(tmp_path / "plain")) == 8


def test_its_thread_takes_no_cores_of_training() -> None:
    saver, seen, threads = Saver(), list[int](), torch.get_num_threads()
    saver.save({"file": {"a": torch.ones(3)}}, lambda _: seen.append(torch.get_num_threads()))
    saver.close()
    assert seen == [1]
    assert torch.get_num_threads() == threads


def test_a_second_save_waits_for_the_first_and_reuses_its_memory() -> None:
    tensors = {"file": {"a": torch.arange(5.0)}}
    saver, seen = Saver(), []

    def keep(copies: TensorFiles) -> None:
        seen.append((copies["file"]["a"].data_ptr(), copies["file"]["a"].tolist()))

    saver.save(tensors, keep)
    tensors["file"]["a"] += 1
    saver.save(tensors, keep)
    saver.close()
    (first, before), (second, after) = seen
    assert first == second != tensors["file"]["a"].data_ptr()
    assert (before, after) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("end", ["save", "close"])
def test_a_write_error_is_raised_once_in_the_training_loop(tmp_path: Path, end: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder belongs")
    model, optimizer = train_one_step()
    saver = Saver()
    tensors = training_state.tensors_of(model, optimizer)
    write = lambda copies: checkpoints.write(tmp_path, STATE, copies)  # noqa: E731
    saver.save(tensors, write)
    with pytest.raises(OSError, match="checkpoints"):
        saver.save(tensors, write) if end == "save" else saver.close()
    saver.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_cuda_tensors_are_pinned_snapshots(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        plain = torch.arange(1000.0, device="cuda")
        tensors = {"file": {"plain": plain, "sharded": DTensor.from_local(plain.clone(), mesh, [Shard(0)])}}
        saver, seen = Saver(), []

        def record_copies(copies: TensorFiles) -> None:
            for copy in copies["file"].values():
                local = copy.to_local() if isinstance(copy, DTensor) else copy
                seen.append((local.is_pinned(), local.clone()))

        saver.save(tensors, record_copies)
        for tensor in tensors["file"].values():
            tensor.zero_()
        saver.close()
    finally:
        dist.destroy_process_group()
    assert len(seen) == 2
    assert all(pinned and torch.equal(copy, torch.arange(1000.0)) for pinned, copy in seen)
