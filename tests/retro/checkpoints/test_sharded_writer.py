"""Checkpoints of several processes are complete or rejected, equal on all processes, and readable with any sharding.

Four processes start once and execute all cases in turn, because starting PyTorch takes longer than most cases.
"""

import json
import os
import random
import re
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints import sharded_writer as parts
from retro.checkpoints import training_state
from retro.checkpoints.background_saver import Saver
from retro.checkpoints.single_file import export
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.parallel.coordination import on_all, on_first, open_group
from retro.training.initial_weights import load_initial_weights
from retro.training.optimizer import make_optimizer
from retro.training.run_folder import last_checkpoint
from retro.training.settings import TrainSettings
from tests.conftest import PATIENCE, forkserver
from tests.retro.small_model import SETTINGS, batch

WORLD = 4
# With two heads and a vocabulary of 50 some shards are uneven and some are empty.
MODEL = updated(
    SETTINGS,
    {
        "num_layers": 3,
        "retrieval.cca_layers": (2,),
        "encoder.num_layers": 1,
        "attention.positions": "transformer-xl",
        "attention.smeared_tokens": 1,
    },
)
LAYOUT = {"data": WORLD}
STATE: dict[str, Any] = {
    "mesh_dims": LAYOUT,
    "step": 1,
    "tokens": 128,
    "settings": {
        "model": json.loads(json.dumps(asdict(MODEL))),
        "train": {"seed": 3},
        "data": {"sequence_length": 64, "datastores": []},
    },
    "datastores": ["0123"],
    "unlogged": {"loss": 0.0, "steps": 0},
    "best": None,
    "started_from": None,
}


# ------------------------------------------------------------------------------------------------- shared by all cases


@dataclass
class Case:
    """State of one process.

    Attributes:
        rank: its number.
        folder: shared by all processes.
        group: process group for checkpoints.
        mesh: all four processes in one dimension.
        model: trained for a step, sharded over all four processes.
        optimizer: of the model's parameters.
        held: this process's shards of weights and optimizer state.
        whole: whole weights and optimizer state.
    """

    rank: int
    folder: Path
    group: dist.ProcessGroup
    mesh: DeviceMesh
    model: Retro
    optimizer: torch.optim.Optimizer
    held: dict[str, Tensor]
    whole: dict[str, Tensor]

    @property
    def run(self) -> Path:
        return self.folder / "run"


def new_model(seed: int = 0, **changes: Any) -> Retro:
    torch.manual_seed(seed)
    model = Retro(updated(MODEL, changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer([model], TrainSettings(lr=1e-2))


def shard(model: Retro, mesh: DeviceMesh) -> Retro:
    for block in (*model.feed_forward.values(), model.encoder):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallelize_and_shard(model: Retro, mesh: DeviceMesh) -> Retro:
    """Tensor parallel in the inner dimension, FSDP in the outer one: both divide the rows of some matrices."""
    for block in model.feed_forward.values():
        parallelize_module(
            block, mesh["tensor"], {"block.up_proj": ColwiseParallel(), "block.down_proj": RowwiseParallel()}
        )
    return shard(model, mesh["data"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens, neighbors, lengths = batch()
    model(Inputs(tokens, None, neighbors, lengths)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: checkpoints.Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole weights and optimizer state. Needs many collectives, so prefer `held`."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in named_tensors(model, optimizer)
    }


def held(model: checkpoints.Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This process's shards of weights and optimizer state."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in named_tensors(model, optimizer)
    }


@torch.no_grad()
def named_tensors(model: checkpoints.Model, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    files = training_state.tensors_of(model, optimizer).values()
    return [(name, tensor) for file in files for name, tensor in file.items() if not name.startswith("rng.")]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --------------------------------------------------------------------------------------- cases on four processes


def four_processes_resume(case: Case) -> None:
    """A new model gets the saved weights, moments and random state, and its next step is the same."""
    model = shard(new_model(seed=1), case.mesh)
    optimizer = new_optimizer(model)
    training_state.restore(checkpoints.open_checkpoint(case.run), model, optimizer, case.group, mesh_dims=LAYOUT)
    assert torch.equal(torch.get_rng_state(), random_state(case.rank))
    assert_equal(held(model, optimizer), case.held)
    step(model, optimizer)
    step(case.model, case.optimizer)
    assert_equal(held(model, optimizer), held(case.model, case.optimizer))
    training_state.restore(checkpoints.open_checkpoint(case.run), case.model, case.optimizer, case.group)  # reset
    assert_equal(held(case.model, case.optimizer), case.held)


def random_state(rank: int) -> Tensor:
    return torch.Generator().manual_seed(100 + rank).get_state()


def two_processes_resume(case: Case) -> None:
    mesh, group = DeviceMesh("cpu", [0, 1]), dist.new_group([0, 1], backend="gloo")
    if case.rank < 2:
        model = shard(new_model(seed=1), mesh)
        optimizer = new_optimizer(model)
        training_state.restore(checkpoints.open_checkpoint(case.run), model, optimizer, group)
        assert_equal(whole(model, optimizer), case.whole)


def four_data_parallel_processes_resume(case: Case) -> None:
    """Every process holds all tensors, and each tensor is written once."""
    model = new_model(seed=1)
    optimizer = new_optimizer(model)
    training_state.restore(checkpoints.open_checkpoint(case.run), model, optimizer, case.group)
    assert_equal(whole(model, optimizer), case.whole)
    tensors = training_state.tensors_of(model, optimizer, case.rank)
    written = checkpoints.write(case.folder / "whole", STATE, tensors, case.group)
    names = [name for file in sorted(written.glob("*.safetensors")) for name in load_file(file)]
    assert sorted(name for name in names if not name.startswith("rng.")) == sorted(case.whole)
    assert len(list(written.glob("model-*"))) == WORLD


def tensor_parallel_processes_resume(case: Case) -> None:
    model = parallelize_and_shard(new_model(seed=1), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    optimizer = new_optimizer(model)
    training_state.restore(checkpoints.open_checkpoint(case.run), model, optimizer, case.group)
    assert_equal(whole(model, optimizer), case.whole)
    tensors = training_state.tensors_of(model, optimizer, case.rank)
    checkpoints.write(case.folder / "tensor-parallel", STATE, tensors, case.group)


def four_processes_resume_from_one(case: Case) -> None:
    one = new_model(seed=2)
    its_optimizer = new_optimizer(one)
    step(one, its_optimizer)
    if case.rank == 0:
        checkpoints.write(case.folder / "one", STATE, training_state.tensors_of(one, its_optimizer))
    dist.barrier(case.group)
    model = shard(new_model(seed=1), case.mesh)
    optimizer = new_optimizer(model)
    training_state.restore(checkpoints.open_checkpoint(case.folder / "one"), model, optimizer, case.group)
    assert_equal(whole(model, optimizer), whole(one, its_optimizer))


def pipeline_stages_resume(case: Case) -> None:
    """Processes hold layers; the first and the last share the embeddings, which are saved once."""
    source = new_model(seed=2)
    its_optimizer = new_optimizer(source)
    step(source, its_optimizer)
    expected = whole(source, its_optimizer)
    mine = stage(source, case.rank)
    tensors = training_state.tensors_of(mine, its_optimizer, case.rank)
    training = {
        name: tensor
        for name, tensor in tensors["optimizer.safetensors"].items()
        if name.partition("/")[2] in {"", *tensors["model.safetensors"]}
    }
    run = case.folder / "stages"
    checkpoints.write(run, STATE, {**tensors, "optimizer.safetensors": training}, case.group)
    model = new_model(seed=1)
    optimizer, other = new_optimizer(model), stage(model, WORLD - 1 - case.rank)
    training_state.restore(checkpoints.open_checkpoint(run), other, optimizer, case.group)
    found = whole(other, optimizer)
    assert len(found) < len(expected)
    assert_equal(found, {name: expected[name] for name in found})


def stage(model: Retro, rank: int) -> list[nn.Module]:
    """Modules of one pipeline stage under their names in the model."""
    first = ("embedding", "attention.0", "feed_forward.0")
    second = ("attention.1", "encoder", "cross.2", "feed_forward.1")
    names = [first, second, ("attention.2", "feed_forward.2"), ("norm", "embedding")][rank]
    return [nest(name, model.get_submodule(name)) for name in names]


def nest(name: str, module: nn.Module) -> nn.Module:
    """A module nested under a dotted name."""
    for key in reversed(name.split(".")):
        module = nn.ModuleDict({key: module})
    return module


def sharded_model_starts_from_a_baseline(case: Case) -> None:
    """`train.init_from` with a sharded model and a sharded checkpoint."""
    model = shard(new_model(seed=1), case.mesh)
    drawn = whole(model, new_optimizer(model))
    baseline = new_model(seed=2, **{"retrieval.cca_layers": ()})
    tensors = training_state.tensors_of(baseline, new_optimizer(baseline), case.rank)
    settings = {**STATE["settings"], "model": asdict(baseline.settings)}
    checkpoints.write(case.folder / "baseline", {**STATE, "settings": settings}, tensors, case.group)
    load_initial_weights(checkpoints.open_checkpoint(case.folder / "baseline"), model, ["0123"])
    silent = {
        name: torch.zeros_like(drawn[name])
        for name in drawn
        if re.fullmatch(r"cross\..*\.(o_proj|down_proj)\.weight", name)
    }
    assert silent
    assert_equal(whole(model, new_optimizer(model)), drawn | silent | dict(baseline.state_dict()))


def background_saves_are_snapshots(case: Case) -> None:
    """Training and its collectives continue while two saves in a row are written."""
    saver, goes_on, states = Saver(), threading.Event(), []
    saver.prepare(training_state.tensors_of(case.model, case.optimizer, case.rank))
    run = case.folder / "background"

    def delayed_write(number: int, copies: checkpoints.TensorFiles) -> None:
        assert goes_on.wait(PATIENCE)
        checkpoints.publish(run, {**STATE, "step": number}, copies, keep=2, group=case.group)

    for number in (1, 2):
        states.append(held(case.model, case.optimizer))
        saver.save(training_state.tensors_of(case.model, case.optimizer, case.rank), partial(delayed_write, number))
        step(case.model, case.optimizer)
        assert goes_on.is_set() == (number == 2)
        assert checkpoints.latest(run) is None or number == 2
        goes_on.set()
    saver.close()
    for number, expected in enumerate(states, start=1):
        model = shard(new_model(seed=1), case.mesh)
        optimizer = new_optimizer(model)
        opened = checkpoints.open_checkpoint(checkpoints.step_folder(run, number))
        training_state.restore(opened, model, optimizer, case.group)
        assert_equal(held(model, optimizer), expected)


def evaluation_leaves_the_shards_unchanged(case: Case) -> None:
    """FSDP leaves the outermost parameters gathered after a forward pass without a backward pass."""
    before = held(case.model, case.optimizer)
    tokens, neighbors, lengths = batch()
    with torch.no_grad():
        case.model(Inputs(tokens, None, neighbors, lengths))
    assert not isinstance(case.model.norm.weight, DTensor)
    assert_equal(held(case.model, case.optimizer), before)


def rotation_keeps_the_newest_and_the_best(case: Case) -> None:
    run, best = case.folder / "rotated", {"step": 1, "metric": "bits_per_byte", "value": 2.0}
    tensors = training_state.tensors_of(case.model, case.optimizer, case.rank)
    for number in range(1, 5):
        state = {**STATE, "step": number, "best": best}
        checkpoints.publish(run, state, tensors, keep=2, group=case.group)
        assert checkpoints.open_checkpoint(run).step == number
    assert [folder.name for folder in checkpoints.finished(run)] == ["00000001", "00000003", "00000004"]
    assert checkpoints.open_checkpoint(Path(f"{run}@best")).step == 1
    dist.barrier(case.group)


def damaged_checkpoints_are_moved_aside_on_all_processes(case: Case) -> None:
    run = case.folder / "damaged"
    tensors = training_state.tensors_of(case.model, case.optimizer, case.rank)
    for number in (1, 2):
        checkpoints.publish(run, {**STATE, "step": number}, tensors, keep=2, group=case.group)
    if case.rank == 0:
        flip_a_bit(run / "checkpoints" / "00000002" / "optimizer-00003-of-00004.safetensors")
    defaults: dict[str, Any] = {section: {} for section in STATE["settings"]}
    found = on_first(case.group, lambda: last_checkpoint(run, STATE["settings"], defaults, STATE["datastores"]))
    assert found is not None
    assert found.step == 1
    assert (run / "checkpoints" / "damaged-00000002").exists()
    with pytest.raises(InputError, match=r"other settings: train\.seed was 3, now 4"):
        on_first(
            case.group,
            lambda: last_checkpoint(run, {**STATE["settings"], "train": {"seed": 4}}, defaults, STATE["datastores"]),
        )


def flip_a_bit(file: Path, place: int = -100) -> None:
    changed = bytearray(file.read_bytes())
    changed[place] ^= 1
    file.write_bytes(changed)


def a_failed_write_fails_on_all_processes(case: Case) -> None:
    """A write fails on one process or on rank 0, which makes the folder; nothing remains, and the next write works."""
    run = case.folder / "failed"
    tensors = training_state.tensors_of(case.model, case.optimizer, case.rank)
    saver = Saver()

    def fail_with_full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device", "part")

    write = lambda copies: checkpoints.publish(run, STATE, copies, keep=1, group=case.group)  # noqa: E731
    before = parts.save_tensors
    parts.save_tensors = fail_with_full_disk if case.rank == 2 else before  # type: ignore[assignment]
    saver.save(tensors, write)
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    parts.save_tensors = before
    dist.barrier(case.group)
    assert list((run / "checkpoints").iterdir()) == []
    dist.barrier(case.group)
    saver.save(tensors, write)
    saver.close()
    assert checkpoints.open_checkpoint(run).step == 1
    blocked = case.folder / "blocked"
    if case.rank == 0:
        blocked.write_text("a file where a folder belongs")
    dist.barrier(case.group)
    with pytest.raises(OSError, match="blocked"):
        checkpoints.write(blocked, STATE, tensors, case.group)


def an_error_on_one_process_is_raised_on_all(case: Case) -> None:
    def fails() -> int:
        if case.rank == 3:
            raise InputError("a wrong key")
        return case.rank

    with pytest.raises(InputError, match="^a wrong key" if case.rank == 3 else "^process 3: a wrong key"):
        on_all(case.group, fails)
    assert on_all(case.group, lambda: case.rank) == case.rank
    assert on_first(case.group, lambda: case.rank) == 0
    other = new_model(seed=1, d_ffw=32)
    with pytest.raises(InputError, match=r"feed_forward.*\[64, 32\].*\[32, 32\]"):
        training_state.restore(checkpoints.open_checkpoint(case.run), other, new_optimizer(other), case.group)


def pytorchs_own_reader_reads_the_weights(case: Case) -> None:
    weights = {name: torch.zeros_like(tensor) for name, tensor in case.whole.items() if "/" not in name}
    folder = checkpoints.open_checkpoint(case.run).path
    load(weights, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=case.group)
    assert_equal(weights, {name: case.whole[name] for name in weights})


def rank_0_is_killed_while_writing(case: Case) -> None:
    """Losing rank 0 is the worst case: the other processes detect it and stop."""
    tensors = training_state.tensors_of(case.model, case.optimizer, case.rank)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if case.rank == 0:
        parts.save_tensors = die  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"(?i)connection|reset|closed|peer"):
        checkpoints.publish(case.run, {**STATE, "step": 7}, tensors, keep=1, group=case.group)


CASES: list[Callable[[Case], None]] = [
    four_processes_resume,
    two_processes_resume,
    four_data_parallel_processes_resume,
    tensor_parallel_processes_resume,
    four_processes_resume_from_one,
    pipeline_stages_resume,
    sharded_model_starts_from_a_baseline,
    evaluation_leaves_the_shards_unchanged,
    rotation_keeps_the_newest_and_the_best,
    damaged_checkpoints_are_moved_aside_on_all_processes,
    a_failed_write_fails_on_all_processes,
    an_error_on_one_process_is_raised_on_all,
    pytorchs_own_reader_reads_the_weights,
    background_saves_are_snapshots,
    rank_0_is_killed_while_writing,  # must be last
]


def run_process(rank: int, folder: Path) -> None:
    """Execute every case on one of the four processes and write its error to `CASE.RANK`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    mesh, group = init_device_mesh("cpu", (WORLD,)), open_group()
    assert group is not None
    model = shard(new_model(), mesh)
    optimizer = new_optimizer(model)
    step(model, optimizer)
    torch.manual_seed(100 + rank)
    for run in (folder / "run", folder / "again"):
        checkpoints.write(run, STATE, training_state.tensors_of(model, optimizer, rank), group)
    case = Case(rank, folder, group, mesh, model, optimizer, held(model, optimizer), whole(model, optimizer))
    if rank == 0:
        save_file(case.whole, folder / "whole.safetensors")
    for act in CASES:
        problem = ""
        try:
            act(case)
        except BaseException:
            problem = traceback.format_exc()
        (folder / f"{act.__name__}.{rank}").write_text(problem)
        if problem:
            os._exit(1)  # the others would wait for this process forever


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of the four processes."""
    folder = tmp_path_factory.mktemp("sharded")
    context = forkserver()
    processes = [context.Process(target=run_process, args=(rank, folder)) for rank in range(WORLD)]
    for one in processes:
        one.start()
    end = time.monotonic() + PATIENCE
    for one in processes:
        one.join(max(0.0, end - time.monotonic()))
        one.kill()
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_case_passes_on_all_of_four_processes(folder: Path, case: Callable[[Case], None]) -> None:
    killed = range(1) if case is rank_0_is_killed_while_writing else range(0)
    for rank in set(range(WORLD)) - set(killed):
        file = folder / f"{case.__name__}.{rank}"
        problem = file.read_text() if file.exists() else "it did not come so far"
        assert not problem, f"process {rank}: {problem}"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run of four processes."""
    return Path(shutil.copytree(folder / "run", tmp_path / "run"))


def test_one_process_reads_a_checkpoint_of_four(folder: Path, tmp_path: Path) -> None:
    expected = load_file(folder / "whole.safetensors")
    weights = {name: tensor for name, tensor in expected.items() if "/" not in name}
    for run in ("run", "tensor-parallel"):
        opened = checkpoints.open_checkpoint(folder / run)
        model = new_model(seed=1)
        optimizer = new_optimizer(model)
        training_state.restore(opened, model, optimizer)
        assert_equal(whole(model, optimizer), expected)
        assert_equal(dict(checkpoints.load_model(opened, torch.device("cpu")).state_dict()), weights)
        export(opened, tmp_path / f"{run}.safetensors")
        exported = checkpoints.open_checkpoint(tmp_path / f"{run}.safetensors")
        assert_equal(dict(checkpoints.load_model(exported, torch.device("cpu")).state_dict()), weights)


def test_with_another_mesh_the_random_state_depends_on_seed_step_and_stream(folder: Path) -> None:
    opened = checkpoints.open_checkpoint(folder / "run")
    model, states = new_model(seed=1), []
    for stream, step_number in ((0, 1), (0, 1), (1, 1), (0, 2)):
        training_state.restore(
            replace(opened, step=step_number), model, new_optimizer(model), mesh_dims={"data": 2}, stream=stream
        )
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[3])
    assert not torch.equal(states[0], random_state(0))


def test_equal_tensors_give_equal_files_without_pickles(folder: Path) -> None:
    one, other = (checkpoints.open_checkpoint(folder / run).path for run in ("run", "again"))
    assert files(one) == files(other)
    parts = {f"{stem}-{number:05d}-of-00004.safetensors" for stem in ("model", "optimizer") for number in range(1, 5)}
    assert set(files(one)) == parts | {"state.json", "manifest.json"}
    for stem in ("model", "optimizer"):  # processes write about equal amounts
        sizes = [len(whole) for name, whole in files(one).items() if name.startswith(stem)]
        assert max(sizes) < 1.5 * min(sizes)


def test_flipped_bits_and_missing_parts_are_rejected_by_name(copy: Path) -> None:
    folder, draw = copy / "checkpoints" / "00000001", random.Random(0)
    for file in sorted(folder.glob("*.safetensors")):
        before = file.read_bytes()
        for _ in range(5):
            flip_a_bit(file, draw.randrange(len(before)))
            with pytest.raises(InputError, match=file.name):
                checkpoints.open_checkpoint(copy)
            file.write_bytes(before)
        file.unlink()
        with pytest.raises(InputError, match=f"{file.name} is missing"):
            checkpoints.open_checkpoint(copy)
        file.write_bytes(before)
    assert checkpoints.open_checkpoint(copy).step == 1


def test_leftovers_of_a_kill_are_ignored_and_removed_with_the_next_checkpoint(folder: Path, copy: Path) -> None:
    (left,) = (copy / "checkpoints").glob(".00000007.*.tmp")
    assert not (left / "manifest.json").exists()
    opened = checkpoints.open_checkpoint(copy)
    assert opened.step == 1
    model = new_model(seed=1)
    optimizer = new_optimizer(model)
    training_state.restore(opened, model, optimizer)
    checkpoints.publish(copy, {**STATE, "step": 7}, training_state.tensors_of(model, optimizer), keep=1)
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["00000007"]
    assert_equal(whole(model, optimizer), load_file(folder / "whole.safetensors"))
