"""Norms and clipping of plain and of distributed tensors."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from retro.parallel.gradient_norms import clip_, squared_norm, totals
from retro.training.monitor import gradient_figures, update_ratios
from tests.conftest import forkserver


def parameters(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape)) for shape in [(8, 6), (6,), (7, 5), (3, 2, 4), (1,)]]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    made.append(nn.Parameter(torch.ones(4)))  # has no gradient
    return made


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0, math.inf])
def test_clipping_equals_torchs_bit_for_bit(max_norm: float) -> None:
    for seed in range(20):
        ours, theirs = parameters(seed), parameters(seed)
        assert torch.equal(clip_(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm))
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):
            assert torch.equal(a.grad, b.grad)


def test_a_given_norm_replaces_the_computed_one() -> None:
    """When processes hold different parameters, the norm covers all of them."""
    made = parameters()
    before = [parameter.grad.clone() for parameter in made[:-1]]
    assert clip_(made, 1.0, norm=torch.tensor(10.0)) == 10
    for parameter, gradient in zip(made[:-1], before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 10)


def test_totals_are_separate_for_each_group() -> None:
    groups = [[torch.ones(3), torch.ones(2, 2)], [], [torch.zeros(5)]]
    counts = totals(
        groups, lambda parts: torch.tensor([sum(part.numel() for part in parts), sum(part.sum() for part in parts)])
    )
    assert counts.tolist() == [[7, 7], [0, 0], [5, 0]]
    assert squared_norm([]) == 0


def _check_on_rank(rank: int, folder: str) -> None:
    """On one of four ranks, check the norm of sharded, replicated and partial gradients on two meshes."""
    torch.set_num_threads(1)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    whole = parameters()[:-1]
    norm = squared_norm([parameter.grad for parameter in whole]).sqrt()
    gradients = [
        distribute_tensor(whole[0].grad, square, [Shard(0), Shard(1)]),
        distribute_tensor(whole[1].grad, square, [Replicate(), Shard(0)]),
        distribute_tensor(whole[2].grad, line, [Shard(0)]),  # 7 rows: uneven shards
        DTensor.from_local(whole[3].grad / 2, square, [Partial(), Replicate()], run_check=False),
        whole[4].grad,
    ]
    torch.testing.assert_close(squared_norm(gradients).sqrt(), norm)
    parts = []
    for gradient in gradients:
        placements = getattr(gradient, "placements", None)
        weight = whole[len(parts)].detach().clone()
        if placements is not None:
            placements = [Replicate() if each.is_partial() else each for each in placements]
            weight = distribute_tensor(weight, gradient.device_mesh, placements)
        parts.append(nn.Parameter(weight))
        parts[-1].grad = gradient
    _check_monitor(whole, parts)
    torch.testing.assert_close(clip_(parts, 1.0), norm)
    torch.testing.assert_close(squared_norm([part.grad for part in parts]), torch.tensor(1.0))
    torch.distributed.destroy_process_group()
    Path(folder, f"done-{rank}").touch()


def _check_monitor(whole: list[nn.Parameter], parts: list[nn.Parameter]) -> None:
    """Assert that layer group metrics of sharded and whole tensors are equal, also after an update by 0.1."""
    cut = {"first": parts[:2], "second": parts[2:]}
    uncut = {"first": whole[:2], "second": whole[2:]}
    for name, figures in gradient_figures(uncut, tiny=0.1).items():
        assert figures["underflow"] > 0
        assert gradient_figures(cut, tiny=0.1)[name] == pytest.approx(figures)
    found = []
    for groups in (cut, uncut):
        before = {name: [weight.detach().clone() for weight in weights] for name, weights in groups.items()}
        with torch.no_grad():
            for weight in groups["first"]:
                weight += 0.1
        found.append({name: ratio["update_ratio"] for name, ratio in update_ratios(groups, before).items()})
    assert found[1]["first"] > 0 == found[1]["second"]
    assert found[0] == pytest.approx(found[1])


def test_distributed_gradients_have_the_norm_of_the_whole_tensors(tmp_path: Path) -> None:
    context = forkserver()
    processes = [context.Process(target=_check_on_rank, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(4)]
