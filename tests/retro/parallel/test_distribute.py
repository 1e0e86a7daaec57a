"""Every parallel configuration has the losses of one process, step by step, and resumes with any other configuration.

Four processes execute many runs in turn, because starting PyTorch takes longer than most runs. Then four others go on, because each
run leaves some threads and connections behind.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.traffic import Communication
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.config import Config
from retro.adapters.settings import NO_LORA, LoraSettings, Weights
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.checkpoints.checkpoint import finished
from retro.device import choose_placement
from retro.model.mixture_of_experts import Experts
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.parallel.data_parallel import matrices
from retro.parallel.distribute import distribute
from retro.parallel.forward_backward import DistributedModel, StepContext, WholeModel, all_parameters
from retro.parallel.pipeline_parallel import Pipeline
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep
from retro.training.trainer import train
from tests.conftest import PATIENCE, forkserver, tiny_config
from tests.retro.small_model import M, T, answers_only, batch, build, inputs, split_batch

WORLD = 4

COPYING = {
    "copy_head.context": True,
    "copy_head.neighbors": True,
    "copy_head.datastore": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    # All position schemes, grouped queries, position tables, embeddings on three stages, options of other families.
    "learned": {
        "attention.positions": "learned",
        "attention.max_positions": 64,
        "activation": "swiglu",
        "attention.qk_norm": True,
        "attention.num_kv_heads": 4,
        "norm": "layer",
        "attention.bias": "all",
        "feed_forward_bias": True,
        "parallel_residual": True,
        "scaled_embeddings": False,
        "retrieval.positions": "rope",
    },
    "alibi": {
        "attention.positions": "alibi",
        "attention.smeared_tokens": 2,
        "shared_embeddings": True,
        "parallel_residual": True,
        "attention.sliding_window": 20,
    },
    "experts": {"experts.num_experts": 4, "experts.every": 2},
    "float16": {},
    "copying": COPYING,
    "copying, untied": {**COPYING, "tied_embeddings": False, "attention.positions": "transformer-xl"},
    "copying, experts": {**COPYING, "experts.num_experts": 4, "experts.every": 2},
    "copying from the context": {"copy_head.context": True, "tied_embeddings": False},
    "copying without cross-attention": {**COPYING, "retrieval.cca_layers": ()},
    "reading": {"retrieval.reader": "decoder", "retrieval.cca_layers": ()},
    "retrofit": {},
    "lora": {"shared_embeddings": True},
    "lora alone": {},
    "prefix": {"attention.prefix_tokens": 3},
    "muon": {"attention.positions": "alibi", "copy_head.context": True},
    "muon, experts": {"experts.num_experts": 4, "experts.every": 2},
}
TUNED: dict[str, tuple[Weights, LoraSettings]] = {
    "retrofit": ("retrieval", NO_LORA),
    "lora": ("retrieval", LoraSettings(rank=2)),
    "lora alone": ("none", LoraSettings(rank=2)),
    "prefix": ("none", NO_LORA),
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "float16": ("float16", {"zero": 3}),
    "zero-1": ("plain", {"zero": 1}),
    "zero-2": ("copying", {"zero": 2, "activation_checkpointing": "selective"}),
    "tensor": ("learned", {"tensor": 4}),
    "tensor-zero-3": ("alibi", {"tensor": 2, "zero": 3, "activation_checkpointing": "full"}),
    "pipeline": ("alibi", {"pipeline": 4}),
    "pipeline-zero-3": ("learned", {"pipeline": 2, "zero": 3}),
    "interleaved-zero-1": (
        "experts",
        {"pipeline": 2, "pipeline_schedule": "interleaved", "zero": 1, "activation_checkpointing": "full"},
    ),
    "expert": ("experts", {"expert": 4}),
    "expert-zero-3": ("experts", {"expert": 2, "zero": 3}),
    "retrofit-zero-3": ("retrofit", {"zero": 3}),
    "retrofit-pipeline-tensor": ("retrofit", {"pipeline": 2, "tensor": 2}),
    "lora-pipeline-zero-2": ("lora", {"pipeline": 2, "zero": 2}),
    "lora-zero-3": ("lora alone", {"zero": 3}),
    "prefix-pipeline-tensor": ("prefix", {"pipeline": 2, "tensor": 2}),
    "prefix-zero-3": ("prefix", {"zero": 3, "activation_checkpointing": "full"}),
    "copying": ("copying", {}),
    "copying-zero-3": ("copying", {"zero": 3, "cpu_offload": True}),
    "copying-tensor": ("copying", {"tensor": 4}),
    "copying-interleaved-tensor": (
        "copying, untied",
        {"pipeline": 2, "pipeline_schedule": "interleaved", "tensor": 2},
    ),
    "copying-experts-pipeline": ("copying, experts", {"pipeline": 2}),
    "copying-context-pipeline": ("copying from the context", {"pipeline": 4}),
    "reading-zero-3": ("reading", {"zero": 3, "activation_checkpointing": "selective"}),
    "copying-neighbors-pipeline-tensor": ("copying without cross-attention", {"pipeline": 2, "tensor": 2}),
    "muon-tensor-zero-2": ("muon", {"tensor": 2, "zero": 2}),
    "muon-zero-1-offload": ("muon", {"zero": 1, "cpu_offload": True}),
    "muon-experts-zero-3": ("muon, experts", {"expert": 2, "zero": 3}),
}
"""Name of a run → options of the model and parallel settings of four processes."""
NUM_STEPS = 3
COUNTED: list[tuple[ParallelSettings, int]] = [
    (ParallelSettings(zero=zero), accumulation) for zero in (0, 1, 2, 3) for accumulation in (1, 2)
] + [(ParallelSettings(zero=3, activation_checkpointing="full"), 1), (ParallelSettings(expert=4), 1)]
"""Parallel settings and number of accumulated batches of the steps whose communication is measured."""
COPYING_MODES = {
    "gradients-tensor": ParallelSettings(tensor=2),
    "gradients-pipeline": ParallelSettings(pipeline=4),
    "gradients-both": ParallelSettings(pipeline=2, tensor=2),
}
ACCUMULATED = [ParallelSettings(), ParallelSettings(zero=2), ParallelSettings(pipeline=2), ParallelSettings(expert=2)]
"""Parallel settings of steps with one batch and with two accumulated ones."""
CPU = torch.device("cpu")


def run_of(
    config: Config, folder: Path, options: str, parallel: dict[str, Any], **changes: Any
) -> list[dict[str, float]]:
    """The metrics of a run of a few steps, in one process or in the group."""
    precision: Any = "float16" if options == "float16" else "float32"
    weights, lora = TUNED.get(options, ("all", NO_LORA))
    optimizer: Any = "muon" if options.startswith("muon") else "adamw"
    settings = replace(config.train, precision=precision, weights=weights, optimizer=optimizer, **changes)
    if options in TUNED:
        whole = options in ("lora alone", "prefix")  # always with retrieval
        settings = replace(settings, init_from=str(config.run / ("retro" if whole else "base")))
    config = replace(
        config,
        model=updated(config.model, OPTIONS[options]),
        train=settings,
        parallel=ParallelSettings(**parallel),
        lora=lora,
    )
    outcome = train(folder, config.run_settings)
    timed = ("tokens_per_second", "mfu")
    return [{name: value for name, value in line.items() if name not in timed} for line in outcome.metrics]


def outermost_bytes(model: Retro) -> int:
    """Bytes of parameters that are no matrices of layers and encoder, nor the encoder's table: ZeRO-3 gathers them once."""
    inner = {*matrices(model), "encoder.embedding.weight"}  # without an output layer or a copy head
    return sum(value.nbytes for name, value in model.named_parameters() if name not in inner)


def measure_communication(parallel: ParallelSettings, accumulation: int) -> dict[str, dict[str, int]]:
    """Bytes of a step by kind of collective: in total and sent by this process."""
    model, placement = (
        build(**{"experts.num_experts": 4 if parallel.expert > 1 else 0}).train(),
        choose_placement("cpu", "float32"),
    )
    processes = Processes(parallel, placement.device)
    tokens, neighbors, _ = batch()
    own = Inputs(tokens, None, neighbors, labels=tokens)
    passes = WholeModel(model, processes, placement)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr_factor": 1.0}])
    settings = TrainSettings(gradient_accumulation_steps=accumulation, monitor_every=0)
    step = OptimizerStep(passes, optimizer, processes, placement, settings)
    step(0, [own] * accumulation)
    with Communication() as communication:
        step(1, [own] * accumulation)
    return {"volume": dict(communication.volume), "sent": dict(communication.sent)}


def distributed(
    parallel: ParallelSettings, accumulation: int, **options: Any
) -> tuple[DistributedModel, Processes, list[Inputs]]:
    """A model, and its own rows of eight rows with labels on answers only, split into `accumulation` batches."""
    placement, processes, size = choose_placement("cpu", "float32"), Processes(parallel, CPU), 8 // accumulation
    shared: Any = (build(**options).train(), processes, placement)
    passes: DistributedModel = Pipeline(*shared, size) if parallel.pipeline > 1 else WholeModel(*shared)
    rows = processes.rows(size)
    own = [part.rows(slice(rows.start, rows.stop)) for part in split_batch(answers_only(8), accumulation)]
    return passes, processes, own


def gradients_of_copying(parallel: ParallelSettings) -> dict[str, torch.Tensor]:
    """Whole gradients of the parameters that this process holds, for a model with a copy head."""
    passes, _, (own,) = distributed(parallel, 1, **COPYING)
    num_labels = (answers_only(8).labels != IGNORED_LABEL).sum()
    passes.forward_backward(own, StepContext(num_labels, 8, 1.0, last=True))
    gradients = {name: one.grad for name, one in all_parameters(passes.model_parts) if one.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}


def measure_step(parallel: ParallelSettings, accumulation: int) -> dict[str, float]:
    """Metrics of a step of `accumulation` batches."""
    passes, processes, own = distributed(parallel, accumulation, **{"experts.num_experts": 4})
    placement = choose_placement("cpu", "float32")
    parameters = [parameter for _, parameter in all_parameters(passes.model_parts)]
    optimizer = torch.optim.AdamW([{"params": parameters, "lr_factor": 1.0}])
    settings = TrainSettings(gradient_accumulation_steps=accumulation, monitor_every=0)
    return OptimizerStep(passes, optimizer, processes, placement, settings)(0, own).metrics


def count_graphs() -> dict[str, int]:
    """Number of graphs of a compiled, checkpointed, sharded model after a training step and after an evaluation."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    placement = choose_placement("cpu", "float32")
    processes = Processes(ParallelSettings(zero=2, activation_checkpointing="full"), placement.device)
    small: dict[str, Any] = {"num_layers": 2, "retrieval.cca_layers": (2,)}  # two blocks of a kind share a graph
    passes = WholeModel(build(**small).train(), processes, placement, compiled=True)
    tokens, neighbors, _ = batch()
    counts = {}
    for name, lengths in (("training", [T]), ("evaluation", range(M, T, M))):
        for length in lengths:
            cut = Inputs(tokens[:, :length], None, neighbors[:, : length // M], labels=tokens[:, :length])
            if name == "evaluation":
                passes.token_losses(cut)
            else:
                passes.forward_backward(cut, StepContext(torch.tensor(tokens.numel()), len(tokens), 1.0, last=True))
        counts[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return counts


def join_group(rank: int, folder: Path) -> None:
    """Make this process one of the four of a group."""
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)


def execute_runs(names: Sequence[str], rank: int, folder: Path, config: Config) -> None:
    """Execute some of the runs on one of the four processes; rank 0 writes the metrics and each rank its errors."""
    join_group(rank, folder)
    for name in names:
        options, parallel = RUNS[name]
        problem = ""
        try:
            metrics = run_of(config, folder / name, options, parallel)
            if rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(metrics))
        except BaseException:
            problem = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(problem)
        if problem:
            os._exit(1)  # the others would wait for this process forever


def measure_all(rank: int, folder: Path, config: Config) -> None:
    """Measure everything else on one of the four processes."""
    join_group(rank, folder)
    try:
        run_of(config, folder / "not-finite", "plain", {"pipeline": 2, "zero": 2}, lr=1e30, max_grad_norm=0.0)
    except FloatingPointError as error:
        (folder / f"not-finite.{rank}").write_text(str(error))
    # Two steps of a run in one configuration, the last one in another.
    run_of(config, folder / "changed", "muon", {"zero": 3}, checkpoint_every=2, steps=2)
    metrics = run_of(config, folder / "changed", "muon", {"pipeline": 2, "tensor": 2}, checkpoint_every=2)
    if rank == 0:
        (folder / "changed.json").write_text(json.dumps(metrics))
    counted = [measure_communication(parallel, accumulation) for parallel, accumulation in COUNTED]
    (folder / f"communicated.{rank}.json").write_text(json.dumps(counted))
    steps = [measure_step(parallel, count) for parallel in ACCUMULATED for count in (1, 2)]
    (folder / f"accumulated.{rank}.json").write_text(json.dumps(steps))
    for name, divided in COPYING_MODES.items():
        save_file(gradients_of_copying(divided), folder / f"{name}.{rank}.safetensors")
    (folder / f"graphs.{rank}.json").write_text(json.dumps(count_graphs()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, voting_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path_factory.mktemp("alone"), tiny_corpus), datastore=voting_datastore.folder)
    sizes = {
        "attention.num_heads": 4,
        "attention.head_dim": 8,
        "encoder.num_heads": 4,
        "encoder.head_dim": 4,
        "num_layers": 4,
    }
    train_settings = {
        "steps": NUM_STEPS,
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "precision": "float32",
        "eval_every": NUM_STEPS,
        "eval_tokens": 200,
    }
    train_settings |= {"checkpoint_every": NUM_STEPS, "lr_schedule": "constant", "lr": 3e-3}
    config = replace(
        config,
        model=updated(config.model, {"retrieval.cca_layers": (2, 4), **sizes}),
        data=replace(config.data, retrieval_dropout=0.3),
        train=replace(config.train, **train_settings),
    )
    for name, cca_layers in (("base", ()), ("retro", config.model.retrieval.cca_layers)):
        trained = replace(config, model=updated(config.model, {"retrieval.cca_layers": cca_layers}))
        run_of(trained, config.run / name, "plain", {}, steps=1, warmup_steps=0)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    """The folder with the results of the four processes."""
    folder = tmp_path_factory.mktemp("parallel")
    names, codes = list(RUNS), dict[str, list[int | None]]()
    for some in (names[::2], names[1::2]):
        codes |= dict.fromkeys(some, in_four_processes(partial(execute_runs, some), folder, config))
    in_four_processes(measure_all, folder, config)
    (folder / "exit_codes.json").write_text(json.dumps(codes))
    return folder


def in_four_processes(work: Callable[[int, Path, Config], None], folder: Path, config: Config) -> list[int | None]:
    """Let four processes work together; returns their exit codes."""
    context = forkserver()
    processes = [context.Process(target=work, args=(rank, folder, config)) for rank in range(WORLD)]
    for one in processes:
        one.start()
    end = time.monotonic() + PATIENCE
    for one in processes:
        one.join(max(0.0, end - time.monotonic()))
    for one in processes:
        one.kill()
        one.join()
    (folder / "store").unlink(missing_ok=True)
    return [one.exitcode for one in processes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, config: Config) -> dict[str, list[dict[str, float]]]:
    """The metrics of one process, by name of the model's options."""
    runs = tmp_path_factory.mktemp("one")
    return {name: run_of(config, runs / name, name, {}) for name in OPTIONS}


def without_monitor(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [line for line in metrics if not any(name.startswith("monitor/") for name in line)]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]], rounding: float = 2e-5) -> None:
    """Assert equal losses up to float32 rounding of reordered sums, and derived metrics with larger tolerances."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            looser = 50 if name.startswith(("gradient_norm", "monitor/")) else 1
            # Some of the copy head's gradients are 0 but for rounding errors, and AdamW's first steps follow their signs.
            if name.startswith("monitor/") and name.endswith("/copy_head"):
                continue
            # A few of thousands of sums may be exactly 0 in one order and not in another.
            absolute = 1e-3 if name.startswith("monitor/zero/") else 1e-7
            assert ours[name] == pytest.approx(value, rel=rounding * looser, abs=absolute), (name, ours["step"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_four_processes_have_the_losses_of_one(
    name: str, folder: Path, alone: dict[str, list[dict[str, float]]]
) -> None:
    problems = []
    for rank, code in enumerate(json.loads((folder / "exit_codes.json").read_text())[name]):
        file = folder / f"{name}.{rank}"
        problem = file.read_text() if file.exists() else "it did not come so far"
        if problem:
            problems.append(f"process {rank}, exit code {code}: {problem}")
    assert not problems, "\n".join(problems)
    found, expected, rounding = json.loads((folder / f"{name}.json").read_text()), alone[RUNS[name][0]], 2e-5
    if name == "float16":  # underflow depends on the rounding of sums
        found, expected = without_monitor(found), without_monitor(expected)
        rounding = 1e-3
    assert_same(found, expected, rounding)


@pytest.mark.slow
def test_all_ranks_stop_at_a_non_finite_batch_and_rank_0_names_it(folder: Path) -> None:
    told = {(folder / f"not-finite.{rank}").read_text() for rank in range(WORLD)}
    named = list((folder / "not-finite" / "bad_batches").iterdir())
    assert len(told) == len(named) == 1
    assert str(named[0]) in told.pop()
    step = json.loads(named[0].read_text())["step"]
    assert [path.name for path in finished(folder / "not-finite")] == [f"{step - 1:08d}"]


@pytest.mark.slow
def test_a_run_resumes_in_another_parallel_configuration(
    folder: Path, config: Config, alone: dict[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    found, expected = json.loads((folder / "changed.json").read_text()), alone["muon"]
    assert_same([line for line in found if "loss" in line], [line for line in expected if "loss" in line])
    assert "valid_bits_per_byte_on" in found[-1]  # after the last step, which has used the restored moments
    assert_same(found[-1:], expected[-1:])
    # A single process continues the run of four.
    for line in run_of(config, folder / "changed", "muon", {}, steps=NUM_STEPS + 1)[-1:]:
        assert line["step"] == NUM_STEPS + 1


@pytest.mark.slow
def test_communication_matches_the_formulas(folder: Path) -> None:
    model = build()
    whole, outermost = sum(value.nbytes for value in model.parameters()), outermost_bytes(model)
    for rank in range(WORLD):
        for (parallel, batches), found in zip(
            COUNTED, json.loads((folder / f"communicated.{rank}.json").read_text()), strict=True
        ):
            if parallel.expert > 1:
                continue
            # Whole gradients are summed once per step, sharded gradients after every batch. ZeRO-3 also gathers the
            # parameters, and all but the outermost unit a second time for the backward pass.
            formula = (2, 2, 1 + batches, batches * (3 - outermost / whole))[parallel.zero] * whole
            assert sum(found["volume"].values()) == pytest.approx(formula, rel=0.02), (parallel, batches)
            assert sum(found["sent"].values()) == pytest.approx(formula * (WORLD - 1) / WORLD, rel=0.02)
            assert ("reduce-scatter" in found["volume"]) == (parallel.zero > 0)


@pytest.mark.slow
def test_a_step_averages_over_its_labels_for_any_number_of_batches_and_processes(folder: Path) -> None:
    expected = measure_step(ALONE, 1)
    for rank in range(WORLD):
        for found in json.loads((folder / f"accumulated.{rank}.json").read_text()):
            assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", COPYING_MODES)
def test_every_gradient_of_a_divided_model_that_copies_equals_that_of_one_process(name: str, folder: Path) -> None:
    expected, seen = gradients_of_copying(ALONE), set()
    for rank in range(WORLD):
        for key, gradient in load_file(folder / f"{name}.{rank}.safetensors").items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)
            seen.add(key)
    assert seen == set(expected)


@pytest.mark.slow
def test_experts_exchange_their_queues_twice_per_pass(folder: Path) -> None:
    found = json.loads((folder / "communicated.0.json").read_text())[-1]
    model = build(**{"experts.num_experts": 4}).train()
    layer = model.feed_forward["1"].block
    assert isinstance(layer, Experts)
    tokens = batch()[0]
    num_places = len(tokens) * tokens.shape[1] // layer.chunk_length * math.ceil(layer.slots_per_chunk)
    queues = 4 * num_places * model.settings.d_model * 4  # of 4 experts, in bytes of float32
    assert found["volume"]["all-to-all"] == len(model.settings.expert_layers) * 4 * queues


@pytest.mark.slow
def test_evaluation_compiles_no_graphs_for_new_lengths(folder: Path) -> None:
    counts = json.loads((folder / "graphs.0.json").read_text())
    # One per kind of block (attention, cross-attention, feed-forward of decoder and encoder) and one for the loss.
    assert counts == {"training": 7, "evaluation": 7}


def rejection(settings: ParallelSettings, **model: Any) -> str:
    with pytest.raises(InputError) as refusal:
        distribute(build(**model), Processes(settings, torch.device("cpu")))
    return str(refusal.value)


def test_impossible_parallel_settings_are_rejected() -> None:
    assert "parallel: pipeline 1 × data any × tensor 2 do not make 1 process" in rejection(ParallelSettings(tensor=2))
    for key in ("data", "tensor", "pipeline", "microbatches", "expert"):
        with pytest.raises(InputError, match=f"{key} = -1"):
            ParallelSettings(**{key: -1})
    with pytest.raises(InputError, match=r"parallel\.cpu_offload = true.*parallel\.zero"):
        ParallelSettings(cpu_offload=True)


def test_activation_checkpointing_saves_memory_and_changes_no_gradient() -> None:
    given = inputs()
    kept, operations, gradients = {}, {}, {}
    for how in ("none", "selective", "full"):
        model, sizes = build(), []
        processes = Processes(replace(ALONE, activation_checkpointing=how), torch.device("cpu"))
        passes = WholeModel(model, processes, choose_placement("cpu", "float32"))

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            passes.model.hidden(given)
        kept[how] = sum(sizes)
        with FlopCounterMode(display=False) as counter:
            share = StepContext(torch.tensor(given.tokens.numel()), len(given.tokens), 1.0, last=True)
            passes.forward_backward(given, share)
        operations[how] = counter.get_total_flops()
        gradients[how] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert kept["full"] < kept["none"] / 2
    assert operations["selective"] == operations["none"] < operations["full"]  # matrix products are not recomputed
    for how in ("selective", "full"):
        torch.testing.assert_close(gradients[how], gradients["none"], rtol=1e-5, atol=1e-7)
