"""Training steps on one GPU: compiled at two sizes, of retro-pytorch, with ZeRO and offload; and how long a checkpoint stops them."""

import copy
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.gpu_checks.part import Finding, Job, Skipped, require
from pipelines.terminal import human_bytes
from retro.checkpoints import training_state
from retro.checkpoints.background_saver import Saver
from retro.checkpoints.tensor_files import save_tensors
from retro.device import TensorBatch
from retro.estimates.activation_trace import Pass
from retro.estimates.flops import peak_flops, training_flops
from retro.estimates.training_memory import Memory, memory_of
from retro.model.loss import loss
from retro.model.presets import PRESETS
from retro.model.retro import Retro
from retro.model.settings import NO_COPY_HEAD, ModelSettings, updated
from retro.parallel.data_parallel import share_data
from retro.parallel.forward_backward import StepContext, WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE, ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep

K = 2
STEPS = 5
SETTINGS = TrainSettings(lr=1e-4, lr_schedule="constant", warmup_steps=0, monitor_every=0)


def sized(name: str, batch_size: int, job: Job) -> tuple[ModelSettings, int, int]:
    """A preset with a vocabulary of 128,000, and B and T of its batch; a small model for a tiny job."""
    if job.tiny:
        small = {"num_layers": 2, "retrieval.cca_layers": (2,), "vocab_size": 128, "chunk_length": 8}
        return updated(replace(PRESETS["tiny"], copy_head=NO_COPY_HEAD), small), 2, 32
    return replace(PRESETS[name], vocab_size=128_000, chunk_length=64), batch_size, 2048


def random_batch(settings: ModelSettings, batch_size: int, num_tokens: int, job: Job) -> TensorBatch:
    """Random tokens [B, T], labels and full neighbors [B, U, K, 2m], equal in every part."""
    generator, m = torch.Generator().manual_seed(0), settings.chunk_length
    tokens = torch.randint(1, settings.vocab_size, (batch_size, num_tokens + 1), generator=generator)
    shape = (batch_size, num_tokens // m, K, 2 * m)
    neighbors = torch.randint(1, settings.vocab_size, shape, generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "neighbors": neighbors}
    return job.placement.put(batch)


def compiled(job: Job, *, preset: str, batch_size: int) -> list[Finding]:
    """A compiled step of a preset: speed, MFU, graphs, and peak memory against `retro plan train`."""
    settings, batch_size, num_tokens = sized(preset, batch_size, job)
    planned = memory_of(settings, Pass(batch_size, num_tokens, K, documents=False), ALONE, compiled=True)
    _check_fits(planned, job)
    placement, processes = job.placement, Processes(ALONE, job.placement.device)
    torch.manual_seed(0)
    model = Retro(settings).to(placement.device).train()
    passes = WholeModel(model, processes, placement, compiled=True)
    step = OptimizerStep(passes, make_optimizer([model], SETTINGS), processes, placement, SETTINGS)
    batch, losses = random_batch(settings, batch_size, num_tokens, job), []
    torch._dynamo.reset()  # forgets the graphs of other models in this process
    torch._dynamo.utils.counters.clear()
    first = job.seconds(lambda: losses.append(step(0, [batch]).metrics["loss"]))
    took = [job.seconds(lambda: losses.append(step(1, [batch]).metrics["loss"])) for _ in range(STEPS + 1)][1:]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    flops = batch_size * training_flops(settings, num_tokens, K)
    found = [
        *_speed(took, batch_size * num_tokens),
        Finding("model FLOPs utilization", f"{flops / statistics.median(took) / peak_flops(placement):.1%}"),
        Finding("first step, with compilation", f"{first:.1f} s"),
        Finding("graphs, of model and loss", str(graphs), graphs == 2),
        Finding("loss, first and last", f"{losses[0]:.4f}, {losses[-1]:.4f}", 0 < losses[-1] < losses[0]),
    ]
    if placement.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        value = f"{human_bytes(peak)}, planned {human_bytes(planned.device)}"
        found.append(Finding("peak memory", value, peak < 1.1 * planned.device))
    return found


def eager_equals_compiled(job: Job) -> list[Finding]:
    """Loss and gradients of a batch, compiled and eager, in the training precision: relative distance."""
    settings, batch_size, num_tokens = sized("172m", 2, job)
    if not job.tiny:
        settings = updated(settings, {"num_layers": 6, "retrieval.cca_layers": (6,)})  # compiles in half the time
    placement, processes = job.placement, Processes(ALONE, job.placement.device)
    torch.manual_seed(0)
    model = Retro(settings).to(placement.device).train()
    batch = random_batch(settings, batch_size, num_tokens, job)
    context = StepContext(torch.tensor(batch["labels"].numel(), device=placement.device), batch_size, 1.0, last=True)
    losses, norms = [], []
    for is_compiled in (False, True):
        passes = WholeModel(copy.deepcopy(model), processes, placement, compiled=is_compiled)
        losses.append(float(passes.forward_backward(batch, context)[0]))
        norms.append(float(passes.gradient_norm()))
    found = []
    for name, (eager, other) in (("loss", losses), ("norm of the gradient", norms)):
        apart = abs(other / eager - 1)
        found.append(Finding(f"{name}, eager and compiled", f"{eager:.5g}, {other:.5g}", apart < 1e-2))
    return found


def their_model(settings: ModelSettings, num_tokens: int) -> torch.nn.Module:
    """Return retro-pytorch's RETRO with these sizes, for sequences of `num_tokens` tokens."""
    from retro_pytorch import RETRO

    model: torch.nn.Module = RETRO(
        num_tokens=settings.vocab_size,
        max_seq_len=num_tokens,
        enc_dim=settings.encoder.d_model,
        enc_depth=settings.encoder.num_layers,
        enc_cross_attn_layers=settings.encoder.cca_layers,
        dec_dim=settings.d_model,
        dec_depth=settings.num_layers,
        dec_cross_attn_layers=settings.retrieval.cca_layers,
        chunk_size=settings.chunk_length,
    )
    return model


def retro_pytorch(job: Job) -> list[Finding]:
    """An eager step of retro-pytorch with the sizes of 172m, for comparison."""
    require("retro_pytorch", "pip install --no-deps retro-pytorch==0.3.9")
    settings, batch_size, num_tokens = sized("172m", 8, job)
    placement = job.placement
    model = their_model(settings, num_tokens).to(placement.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = random_batch(settings, batch_size, num_tokens, job)
    tokens = torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1)

    def step() -> None:
        with placement.autocast():
            value = model(tokens, batch["neighbors"], return_loss=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value.item()

    took = [job.seconds(step) for _ in range(STEPS + 2)][2:]
    found = _speed(took, batch_size * num_tokens)
    if placement.device.type == "cuda":
        found.append(Finding("peak memory", human_bytes(torch.cuda.max_memory_allocated())))
    return found


def offload(job: Job) -> list[Finding]:
    """ZeRO-3 with parameters and optimizer in the host's memory, by a single process, against the same steps without it."""
    settings, batch_size, num_tokens = sized("172m", 4, job)
    batch = random_batch(settings, batch_size, num_tokens, job)
    parallel = ParallelSettings(zero=3, cpu_offload=True)
    planned = memory_of(settings, Pass(batch_size, num_tokens, K, documents=False), replace(parallel, data=1))
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if job.device != "cpu" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            plain = _losses(settings, ALONE, batch, job)[0]
            if job.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            offloaded, took = _losses(settings, parallel, batch, job)
        finally:
            dist.destroy_process_group()
    apart = max(abs(a / b - 1) for a, b in zip(offloaded, plain, strict=True))
    found = [
        *_speed(took, batch_size * num_tokens),
        Finding("largest difference of the loss from training without it", f"{apart:.1e}", apart < 1e-2),
    ]
    if job.device != "cpu":
        peak = torch.cuda.max_memory_allocated()
        value = f"{human_bytes(peak)}, planned {human_bytes(planned.device)}"
        found.append(Finding("peak memory", value, peak < 1.1 * planned.device))
    return found


def _losses(
    settings: ModelSettings, parallel: ParallelSettings, batch: TensorBatch, job: Job
) -> tuple[list[float], list[float]]:
    """Losses and seconds of eager steps."""
    placement, processes = job.placement, Processes(parallel, job.placement.device)
    torch.manual_seed(0)
    model = Retro(settings).train()
    if parallel.zero:
        share_data(model, model, processes, placement.dtype)
    else:
        model = model.to(placement.device)
    optimizer, losses = make_optimizer([model], SETTINGS), []

    def step() -> None:
        with placement.autocast():
            hidden, _ = model.hidden_and_routing(batch["tokens"], neighbors=batch["neighbors"])
            value = loss(hidden, model.output_weight, batch["labels"])
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(value.detach()))

    took = [job.seconds(step) for _ in range(4)]
    return losses, took[1:]


def checkpoint_stall(job: Job) -> list[Finding]:
    """How long a save stops the loop, and whether the background thread's copy equals the state at the time of the save."""
    settings, _, _ = sized("172m", 1, job)
    torch.manual_seed(0)
    model = Retro(settings).to(job.placement.device)
    optimizer = make_optimizer([model], SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    tensors, saver = partial(training_state.tensors_of, [model], optimizer, 0), Saver()
    saved: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:

        def write(copies: dict[str, dict[str, Tensor]]) -> None:
            for name, values in copies.items():
                save_tensors(values, Path(folder) / Path(name).name)
            saved.append(all(values[k].equal(expected[name][k]) for name, values in copies.items() for k in values))

        saver.prepare(tensors())
        saver.wait()
        expected = {
            name: {key: each.cpu().clone() for key, each in values.items()} for name, values in tensors().items()
        }
        stall = job.seconds(lambda: saver.save(tensors(), write))
        optimizer.step()  # changes the weights while the thread writes
        whole = job.seconds(saver.wait) + stall
        saver.close()
    size = sum(each.nbytes for values in expected.values() for each in values.values())
    return [
        Finding("size", human_bytes(size)),
        Finding("the loop waits", f"{stall:.3f} s of {whole:.3f} s"),
        Finding("the copy equals the state at the time of the save", str(saved), saved == [True]),
    ]


def _speed(took: list[float], num_tokens: int) -> list[Finding]:
    median = statistics.median(took)
    return [
        Finding("step", f"{1000 * median:.1f} ms ({1000 * min(took):.1f} to {1000 * max(took):.1f})"),
        Finding("tokens/s", f"{num_tokens / median:,.0f}"),
    ]


def _check_fits(planned: Memory, job: Job) -> None:
    if job.device == "cpu":
        return
    total = torch.cuda.get_device_properties(job.placement.device).total_memory
    if planned.device > 0.9 * total:
        raise Skipped(f"needs {human_bytes(planned.device)}, the device has {human_bytes(total)}")
