"""One optimizer step: forward and backward passes over its batches, clipping, AdamW."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.device import Placement, Tensors
from retro.experts import ROUTING, routing_loss, routing_metrics
from retro.loss import losses
from retro.model import Retro
from retro.optimizer import learning_rate
from retro.train_settings import Compile, TrainSettings


def make_step(
    model: Retro,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensors],
    placement: Placement,
    settings: TrainSettings,
) -> Callable[[int], tuple[dict[str, float], int]]:
    """A function that does the step of a number, counted from 0, and returns its metrics and its number of tokens.

    Args:
        model: in training mode.
        optimizer: of its parameters.
        batches: `settings.accumulation` of them are taken for each step.
        placement: device and precision.
        settings: schedule, clipping, compilation.
    """
    compiled = wants_compilation(settings.compile, placement)
    # Whole, so that a graph break is an error and not a slow step. Shapes are few: one for each number of neighbors,
    # with and without document borders. Each is compiled once.
    hidden_of: Any = model.hidden_and_routing
    if compiled:
        hidden_of = torch.compile(hidden_of, fullgraph=True, dynamic=False)

    def forward_backward(batch: Tensors) -> Tensor:
        """The batch's part of the step's cross-entropy, z-loss and `ROUTING`, [2 + 4]; zeros where there are no experts."""
        labels = batch.pop("labels")
        with placement.autocast():
            hidden, routing = hidden_of(**batch)
            found = losses(hidden, model.output_weight, labels, z_weight=settings.z_loss, compiled=compiled)
        objective, routed = found.objective, torch.zeros(len(ROUTING), device=placement.device)
        if routing is not None:
            objective, routed = objective + routing_loss(routing, model.settings), routing.detach().mean(0)
        (objective / settings.accumulation).backward()
        return torch.cat((torch.stack((found.cross_entropy, found.z_loss)), routed)) / settings.accumulation

    def step(number: int) -> tuple[dict[str, float], int]:
        lr = learning_rate(
            number,
            schedule=settings.schedule,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps,
            lr=settings.lr,
            min_lr_ratio=settings.min_lr_ratio,
            decay_share=settings.decay_share,
        )
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        total, num_tokens = torch.zeros(2 + len(ROUTING), device=placement.device), 0
        for _ in range(settings.accumulation):
            batch = next(batches)
            num_tokens += batch["tokens"].numel()
            total += forward_backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        cross_entropy, z_loss, *routing = total.tolist()
        metrics = {"loss": cross_entropy, "lr": lr, "gradient_norm": norm.item()}
        metrics |= {"z_loss": z_loss} if settings.z_loss else {}
        return metrics | routing_metrics(routing, model.settings), num_tokens

    return step


def wants_compilation(choice: Compile, placement: Placement) -> bool:
    """Whether to compile: `auto` does so on CUDA, where it always pays; on a CPU it takes a minute first.

    Raises:
        InputError: it is asked for, and there is no C++ compiler for code of a CPU.
    """
    if choice == "yes" and placement.device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise InputError(
                "train.compile = 'yes': no C++ compiler was found; install one (g++), or set 'no'."
            ) from error
    return choice == "yes" or (choice == "auto" and placement.device.type == "cuda")
