"""Code that PyTorch generates for parts B and C and for 1.5b on an H100, made and checked without a GPU.

    python -m benchmarks.speed.gpu_code [--base CHECKPOINT] [--cases NAME ...] [--compile] [--minutes 10] [--tiny] [--output FOLDER]

    model and batch as fake tensors ─ Dynamo, AOTAutograd ─► graphs ─ device becomes CUDA ─ Inductor ─► Triton kernels ─► checks

A loop of a kernel must not read what an earlier loop wrote: there is no barrier between them, and Triton may distribute
them over threads differently (pytorch/pytorch#190519). This was an error of part B. `--compile` lets Triton translate
every kernel for compute capability 9.0, in its first configuration. OUTPUT is the folder of the code. CHECKPOINT is the
model that part C imports. The benchmark needs a PyTorch that is built for CUDA, with its Triton. It uses names inside
Inductor, those of PyTorch 2.11.
"""

import argparse
import ast
import contextlib
import copy
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from benchmarks import device_guard
from benchmarks.common import add_cases, add_minutes, budget
from benchmarks.deadline import Case, Figures, run_cases, selected
from benchmarks.device_guard import guard_of_meta
from benchmarks.speed.gpu_cross_attention import LAYERS
from benchmarks.speed.gpu_run import config_of, decoder_of
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import open_checkpoint
from retro.copying import matches
from retro.copying.head import initial_weights
from retro.device import Placement
from retro.estimates.trace import fused_attention
from retro.model import kernels
from retro.model.presets import resolve
from retro.model.retro import Retro
from retro.model_settings import NO_COPY_HEAD, ModelSettings, updated
from retro.parallel.forward_backward import StepContext, WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
CHUNK_LENGTH = 32
MINUTES = 10.0
H100 = types.SimpleNamespace(
    type="cuda",
    index=0,
    name="NVIDIA H100",
    cc=90,
    major=9,
    minor=0,
    gcnArchName="",
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
)


# --- the graphs of a step --------------------------------------------------------------------------------------------


def training_step(settings: ModelSettings, rows: int, num_tokens: int) -> list[str]:
    """The code of every compiled graph of a training step with packed documents and two neighbors, in bfloat16."""
    codes: list[str] = []
    backend = _backend(codes)
    m = settings.chunk_length
    initial_weights()  # read while tensors are real
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch, "compile", partial(torch.compile, backend=backend)),
            (F, "scaled_dot_product_attention", fused_attention),
            (kernels, "block_of_queries", lambda _: 0),
            (torch.nn.Module, "to", lambda self, *_: self),  # a fake tensor cannot be swapped
            (matches, "_counted", torch.ops.retro.count_votes),  # as on a GPU
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_as_on_an_h100())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64)

        chunks = num_tokens // m
        inputs = Inputs(
            tokens=zeros(num_tokens),
            documents=zeros(chunks),
            neighbors=zeros(chunks, 2, 2 * m),
            neighbor_lengths=zeros(chunks, 2),
            votes=zeros(num_tokens, 32) if settings.copy_head.datastore else None,
            labels=zeros(num_tokens),
        )
        if not settings.retrieval.cca_layers and not settings.copy_head.neighbors:
            inputs = inputs.off()
        placement = Placement(CPU, torch.bfloat16)
        model = WholeModel(Retro(settings), Processes(ALONE, CPU), placement, compiled=True, by_block=True)
        model.forward_backward(inputs, StepContext(torch.tensor(rows * num_tokens), rows, 1.0, last=True))
    return codes


def _backend(codes: list[str]) -> Any:
    """A backend of torch.compile that appends the code of every graph, and returns results of the right shapes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _move_to_cuda(joint)
        _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any], backward: bool) -> Callable[[list[Any]], list[Any]]:
        results = [node and node.meta["val"] for node in next(n for n in graph.graph.nodes if n.op == "output").args[0]]
        codes.append(_code_of(graph, inputs, backward))

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) if isinstance(one, Tensor) else one
                for one in results
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(
        fw_compiler=partial(compiler, backward=False),
        bw_compiler=partial(compiler, backward=True),
        decompositions=select_decomp_table,
        partition_fn=partition,
    )


def _code_of(graph: fx.GraphModule, inputs: Sequence[Any], backward: bool) -> str:
    """The Python file that Inductor writes for a graph."""
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph, inputs = copy.deepcopy(graph), _on_cuda(list(inputs))
    _move_to_cuda(graph)
    context = TracingContext.get()
    with V.set_fake_mode(context.fake_mode), torch.no_grad():
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=False, is_backward=backward)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def _move_to_cuda(graph: fx.GraphModule) -> None:
    """Change the device of all values and of operations that create tensors."""
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _on_cuda(node.meta["val"])
        if node.kwargs.get("device") == CPU:
            node.kwargs = {**node.kwargs, "device": CUDA}
        node.args = tuple(CUDA if each == CPU else each for each in node.args)
    graph.recompile()


def _on_cuda(values: Any) -> Any:
    """Fake tensors of a CPU as those of the GPU, in any nested values."""

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.device == CUDA:
            return value
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    return tree_map(moved, values)


# --- the device ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_on_an_h100() -> Iterator[None]:
    """Answer what PyTorch's compiler asks a GPU. Rewrites that would compute on it are left out; they change products
    alone."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    cuda, worker = interface.CudaInterface, interface.CudaInterface.Worker
    target = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", H100.cc, H100.warp_size), get_current_device=lambda: 0
    )
    triton.runtime.driver.set_active(target)
    interface.caching_worker_device_properties["cuda"] = [H100]
    answers: list[tuple[Any, str, Any]] = [
        (torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None),
        (cuda, "is_available", lambda: True),
        (cuda, "get_compute_capability", lambda _=None: H100.cc),
        (cuda, "get_device_properties", lambda _=None: H100),
        (cuda, "raise_if_triton_unavailable", lambda _=None: None),
        (cuda, "is_triton_capable", lambda _=None: True),
        (worker, "get_device_properties", lambda _=None: H100),
        (worker, "current_device", lambda: 0),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda _=None: H100),
        (torch.cuda, "get_device_capability", lambda _=None: (H100.major, H100.minor)),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (fuse_attention, "_sfdp_init", lambda *_: None),
        (pad_mm, "_pad_mm_init", lambda *_: None),
        (misc_patterns, "_misc_patterns_init", lambda *_: None),
        (GraphLowering, "constant_name", lambda self, name, device: name),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(inductor.patch(joint_graph_constant_folding=False, compile_threads=1))
        stack.enter_context(guard_of_meta(device_guard.CUDA))
        yield


# --- checks ----------------------------------------------------------------------------------------------------------


def kernels_of(code: str) -> dict[str, str]:
    """The source of every Triton kernel by name."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL))


def reads_of_written(source: str) -> set[str]:
    """Arguments of a kernel that one of its loops, or what follows, reads after an earlier loop wrote them."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    kernel = next(each for each in functions if any("triton.jit" in ast.unparse(one) for one in each.decorator_list))
    written, found = set[str](), set[str]()
    for statement in kernel.body:
        found |= _pointers(statement, "tl.load", "tl.atomic_add") & written
        if isinstance(statement, ast.For):
            written |= _pointers(statement, "tl.store", "tl.atomic_add")
    return found


def _pointers(statement: ast.stmt, *functions: str) -> set[str]:
    """Arguments of a kernel to which calls of these functions point."""
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call) and ast.unparse(node.func) in functions)
    names = (node.id for call in calls for node in ast.walk(call.args[0]) if isinstance(node, ast.Name))
    return {name for name in names if "ptr" in name}


def check(settings: ModelSettings, rows: int, num_tokens: int, folder: Path, compiles: bool) -> Iterator[Figures]:
    """Generate, store and check the code of a training step."""
    began = time.process_time()
    codes = training_step(settings, rows, num_tokens)
    spent = time.process_time() - began
    folder.mkdir(parents=True, exist_ok=True)
    for number, code in enumerate(codes):
        (folder / f"graph_{number}.py").write_text(code)
    sources = {name: source for code in codes for name, source in kernels_of(code).items()}
    yield {"graphs": len(codes), "kernels": len(sources), "CPU seconds": round(spent, 1)}
    unsafe = {name: sorted(found) for name, source in sources.items() if (found := reads_of_written(source))}
    yield {"unsafe reads": unsafe or "none"}
    if compiles:
        for source in sources.values():
            translate(source)
        yield {"kernels translated": len(sources)}
    if unsafe:
        raise AssertionError(f"{len(unsafe)} kernels can read what is not yet written: see {folder}")


def translate(source: str) -> None:
    """Let Triton translate a kernel to machine code, in the first configuration that it would try."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with _as_on_an_h100(), mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        kernel = next(each for each in vars(PyCodeCache.load(source)).values() if isinstance(each, CachingAutotuner))
        kernel._precompile_config(kernel.configs[0])


# --- cases -----------------------------------------------------------------------------------------------------------


def cases_of(base: Path | None, folder: Path, tiny: bool, compiles: bool) -> dict[str, Case]:
    """Models of parts B and C, and the paper's 1.5b, with their batches."""
    config = config_of(Path("unused"), tiny)
    data, sizes = config.data, {"vocab_size": config.tokenizer.vocab_size, "chunk_length": CHUNK_LENGTH}
    models = {
        f"part B, {name}": (updated(resolve(one.model), sizes), config.train.batch_size, data.sequence_length)
        for name, one in (("RETRO", config), ("decoder", decoder_of(config)))
    }
    if not tiny:
        models["1.5b"] = updated(resolve(ModelSettings(preset="1.5b")), sizes | {"vocab_size": 128_000}), 4, 2048
    if base is not None:
        own = {"shared_embeddings": True, "copy_head": NO_COPY_HEAD, "chunk_length": CHUNK_LENGTH}
        for name, layers in (("RETRO", LAYERS), ("decoder", ())):
            model = updated(open_checkpoint(base).model, {**own, "retrieval.cca_layers": layers})
            models[f"part C, {name}"] = model, 2 if tiny else 32, 64 if tiny else 1024
    return {
        name: Case(partial(check, *of, folder / name.replace(", ", "-"), compiles), 400) for name, of in models.items()
    }


def main() -> int:
    """Print what the checks found. Return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the model of part C, as `retro import` writes it")
    parser.add_argument("--compile", action="store_true", help="translate every kernel for compute capability 9.0")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--output", type=Path, default=Path("gpu-code"))
    add_cases(parser)
    add_minutes(parser, MINUTES)
    options = parser.parse_args()
    cases = cases_of(options.base, options.output, options.tiny, options.compile)
    return run_cases(
        selected(cases, options.cases), options.output / "gpu-code.json", budget(options), {"tiny": options.tiny}
    )


if __name__ == "__main__":
    sys.exit(main())
