"""Time for which a checkpoint stops the training loop: written by the loop itself, or copied and written by a thread.

    python -m benchmarks.speed.checkpoints [--rounds 5] [--steps 3] [--layers 12] [--folder .]
    torchrun --nproc-per-node 4 benchmarks/speed/checkpoints.py …     # FSDP: each process writes its part

A round consists of a save by the loop, some steps, a save by the saver, as many steps (while the saver's thread
writes), and a wait for the thread. `stall` is the time that the loop waits in a save; `step` is the median of the
training steps after it.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from benchmarks.common import add_minutes, add_precision, agreed, budget, placement, seconds, write
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints import training_state
from retro.checkpoints.background_saver import Saver
from retro.model.inputs import Inputs
from retro.model.presets import count_parameters
from retro.model.retro import Retro
from retro.model.settings import AttentionSettings, ModelSettings, RetrievalSettings
from retro.parallel.coordination import on_first, open_group, rank_in
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="training steps between two saves")
    parser.add_argument("--layers", type=int, default=12)
    add_precision(parser)
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder for temporary checkpoints")
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-checkpoints.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.manual_seed(0)
    placed = placement(options.precision, join())
    group = open_group()
    sizes = ModelSettings(
        vocab_size=32_768,
        chunk_length=64,
        d_model=512,
        d_ffw=2048,
        attention=AttentionSettings(num_heads=8),
        num_layers=options.layers,
        retrieval=RetrievalSettings(cca_layers=()),
    )
    model = Retro(sizes).to(placed.device)
    parameters = count_parameters(model, embeddings=True)
    if group is not None:
        for layer in (*model.attention.values(), *model.feed_forward.values()):
            fully_shard(layer)
        fully_shard(model)
    optimizer = make_optimizer([model], TrainSettings(lr=1e-4))
    tokens = torch.randint(sizes.vocab_size, (4, 128), device=placed.device)

    def step() -> None:
        with placed.autocast():
            value = F.cross_entropy(model(Inputs(tokens)).flatten(0, 1), tokens.roll(-1, 1).flatten())
        value.backward()
        value.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tensors = partial(training_state.tensors_of, model, optimizer, rank_in(group))
    step()
    unprepared, saver, number = Saver(), Saver(), 0
    first_touch = seconds(lambda: unprepared.save(tensors(), lambda _: None))
    unprepared.close()
    saver.prepare(tensors())
    saver.wait()
    stalls: dict[str, list[float]] = {"loop": [], "saver": []}
    steps: dict[str, list[float]] = {"loop": [], "saver": []}
    thread: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = on_first(group, lambda: stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))

        def publish(copies: checkpoints.TensorFiles) -> None:
            state = {"step": number, "tokens": 0, "settings": {}, "datastores": [], "best": None, "started_from": None}
            thread.append(seconds(lambda: checkpoints.publish(Path(folder), state, copies, keep=2, group=group)))

        saves: dict[str, Callable[[], None]] = {
            "loop": lambda: publish(tensors()),
            "saver": lambda: saver.save(tensors(), publish),
        }
        for round_number in agreed(limit.rounds(options.rounds + 1)):
            for writer, save in saves.items():
                number += 1
                stall = seconds(save)
                took = [seconds(step) for _ in range(options.steps)]
                saver.wait()
                if round_number:  # the first round warms up
                    stalls[writer].append(stall)
                    steps[writer] += took
        saver.close()

    if rank_in(group):
        return
    gigabytes = sum(v.nbytes for values in tensors().values() for v in values.values()) / 1e9
    ratios = [ours / plain for ours, plain in zip(stalls["saver"], stalls["loop"], strict=True)]
    count = dist.get_world_size(group) if group is not None else 1
    print(f"{parameters:,} parameters, {gigabytes:.2f} GB on {placed.device}, {torch.get_num_threads()} threads")
    print(f"processes: {count}; the saver's thread wrote for {statistics.median(thread[1::2]):.3f} s")
    rows = []
    for writer in stalls:
        stall, median = statistics.median(stalls[writer]), statistics.median(steps[writer])
        rows.append({"written_by": writer, "stall_seconds": stall, "stalls": stalls[writer], "step_seconds": median})
        print(f"{writer:5}  stall {stall:7.3f} s  ({gigabytes / stall:.1f} GB/s)  step {median:.3f} s")
    ratio = statistics.median(ratios)
    print(f"first save without prepared buffers: {first_touch:.3f} s")
    print(
        f"stall of the saver relative to the loop: {100 * ratio:.1f}% "
        f"(rounds {', '.join(f'{100 * r:.1f}%' for r in ratios)})"
    )
    results = {
        "device": str(placed.device),
        "precision": str(placed.dtype),
        "parameters": parameters,
        "gigabytes": gigabytes,
        "ratio": ratio,
    }
    results |= {"processes": count, "save_seconds": thread[1::2]}
    write(options.output, {**results, "first_touch_seconds": first_touch, "rows": rows})


def join() -> str:
    """Return the device of this process. Under torchrun, join the other processes."""
    if "LOCAL_RANK" not in os.environ:
        return "auto"
    dist.init_process_group()
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
