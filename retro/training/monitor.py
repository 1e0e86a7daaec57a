"""Monitor gradients and updates of each layer group, and warn before training diverges.

    gradients ── norm, overflow, underflow ┐
    weights before and after ─ update ratio ┴─ every n-th step ───── metrics, warnings
    loss, norm of the whole gradient ───────── every step ────────── warnings

A value is compared with the median of the values before it, and its distance from the median with their median
distance. A few outliers do not move either.
"""

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from retro.parallel.gradient_norms import totals

log = logging.getLogger("retro")

PREFIX = "monitor/"
"""Prefix of the metrics of layer groups, as in `monitor/update_ratio/cross_06`."""

_WINDOW = 50  # values that a new one is compared with, and
_ENOUGH = 10  # how many there must be
_DEVIATIONS = 6.0  # from the median that are far, where a deviation is that of a normal distribution
_LOSS_MARGIN = 0.1  # of the median, by which a loss must be above it too
_NORM_FACTOR = 10.0  # of the median, by which the norm of a gradient must be above it too
_IN_A_ROW = 3  # a single odd batch is not yet a divergence
# Of an update to its weights. Small models that learn best are at 0.02 with ten times train.lr, and soon far below;
# AdamW's first step without a warm-up comes to 0.05.
_LARGEST_RATIO = 0.1
_LARGEST_RATIO_OF_EMBEDDING = 0.3  # its rows begin small
_QUIET_STEPS = 200  # between two warnings of one kind


@dataclass
class Monitor:
    """Monitors the training of a model.

    Attributes:
        groups: parameters by the name of their layer group.
        tiny: smallest normal number of the data type of matrix products.
        every: steps between measurements of the groups. Early steps have more, because a wrong learning rate shows
            there.
    """

    groups: dict[str, list[nn.Parameter]]
    tiny: float
    every: int
    _seen: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_WINDOW)))
    _in_a_row: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _quiet_until: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, every: int) -> "Monitor":
        """Make a monitor of named parameters, for a data type of matrix products."""
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters:
            if parameter.requires_grad:
                groups.setdefault(group_of(name), []).append(parameter)
        return cls(dict(sorted(groups.items())), torch.finfo(dtype).tiny, every)

    def due(self, step: int) -> bool:
        """True if the groups are measured in this step, counted from 1."""
        return step % self.every == 0 or (step < self.every and step.bit_count() == 1)  # 1, 2, 4, 8 …

    def gradients(self, scale: float) -> dict[str, float]:
        """`gradient_figures` of the groups, by name of the metric."""
        return _by_metric(gradient_figures(self.groups, self.tiny, scale))

    def weights(self) -> dict[str, list[Tensor]]:
        """Copies of the weights, for `updates`."""
        return {name: [weight.detach().clone() for weight in weights] for name, weights in self.groups.items()}

    def updates(self, before: dict[str, list[Tensor]]) -> dict[str, float]:
        """Update ratio of each group since the copy was made, by name of the metric. Overwrites the copy."""
        return _by_metric(update_ratios(self.groups, before))

    def watch(self, step: int, loss: float, gradient_norm: float, figures: dict[str, float]) -> None:
        """Record the measurements of a step, counted from 1, and warn of signs of divergence."""
        if self._stays_above("loss", loss, _LOSS_MARGIN):
            usual = statistics.median(self._seen["loss"])
            self._warn(
                step, "loss", f"the loss is {loss:.4g}, it was about {usual:.4g}: lower train.lr if it stays there"
            )
        if self._stays_above("gradient_norm", gradient_norm, _NORM_FACTOR - 1):
            usual = statistics.median(self._seen["gradient_norm"])
            self._warn(
                step,
                "gradient norm",
                f"the norm of the gradient is {gradient_norm:.3g}, it was about {usual:.3g}: lower train.lr or train.max_grad_norm, "
                "or warm up longer",
            )
        for name, value in figures.items():
            _, figure, group = name.split("/")
            if figure == "gradient_norm":
                self._watch_norm(step, name, group, value)
            elif figure == "update_ratio":
                self._watch_ratio(step, group, value)
            elif figure == "overflow":
                self._in_a_row[name] = self._in_a_row[name] + 1 if value > 0 else 0
                if self._in_a_row[name] >= _IN_A_ROW:
                    self._warn(
                        step,
                        "overflow",
                        f"{group}: {value:.2%} of the gradient overflowed, and some of it did the last "
                        f"{self._in_a_row[name]} times: use train.precision = 'bfloat16' or 'float32', or lower train.lr",
                    )

    def _watch_ratio(self, step: int, group: str, value: float) -> None:
        largest = _LARGEST_RATIO_OF_EMBEDDING if group == "embedding" else _LARGEST_RATIO
        if value > largest:
            self._warn(
                step,
                "update ratio",
                f"{group}: a step changes the weights by {value:.2g} of their norm, more than {largest}: lower train.lr, or "
                "warm up longer",
            )

    def _watch_norm(self, step: int, name: str, group: str, value: float) -> None:
        before = list(self._seen[name])
        if _far_above(before, value, _NORM_FACTOR - 1):
            self._warn(
                step,
                "gradient norm of a group",
                f"{group}: the norm of the gradient is {value:.3g}, it was about {statistics.median(before):.3g}: lower "
                "train.lr or train.max_grad_norm, or warm up longer",
            )
        self._take_in(name, value)

    def _stays_above(self, name: str, value: float, margin: float) -> bool:
        """True if this value and the last ones are far above the earlier values."""
        far = _far_above(list(self._seen[name]), value, margin)
        self._in_a_row[name] = self._in_a_row[name] + 1 if far else 0
        self._take_in(name, value)
        return self._in_a_row[name] >= _IN_A_ROW

    def _take_in(self, name: str, value: float) -> None:
        if 0 < value < math.inf:  # 0: a batch without neighbors gives no gradient to what reads them
            self._seen[name].append(value)

    def _warn(self, step: int, kind: str, text: str) -> None:
        if step >= self._quiet_until.get(kind, 0):
            self._quiet_until[kind] = step + _QUIET_STEPS
            log.warning("step %d: %s", step, text)


def group_of(name: str) -> str:
    """The layer group of a parameter: `embedding`, `attention_01`, `cross_06`, `feed_forward_01` …, `encoder`, `head`.

    Decoder layers are counted from 1, as in `model.retrieval.cca_layers`.
    """
    parts = [part for part in name.split(".") if not part.startswith("_")]  # wrappers' names begin so
    if parts[0] in ("attention", "feed_forward"):
        return f"{parts[0]}_{int(parts[1]) + 1:02d}"
    if parts[0] == "cross":
        return f"cross_{int(parts[1]):02d}"
    return "head" if parts[0] in ("norm", "head") else parts[0]


@torch.no_grad()
def gradient_figures(
    groups: dict[str, list[nn.Parameter]], tiny: float, scale: float = 1.0
) -> dict[str, dict[str, float]]:
    """For each group that has a gradient:

        gradient_norm   of the true gradient
        overflow        share of entries that are infinite or not a number
        underflow       share of entries below the smallest normal number, but not 0
        zero            share of entries that are 0: not reached, or lost altogether

    Args:
        groups: parameters by group.
        tiny: smallest normal number of the data type of matrix products.
        scale: the loss scale that the gradients still carry, and with which their entries are judged.
    """

    def measure(parts: list[Tensor]) -> Tensor:
        counts = torch.zeros(5, dtype=torch.float64, device=parts[0].device)
        for part in parts:
            sizes = part.abs()
            zeros = (sizes == 0).sum()
            finite = sizes.isfinite().sum()
            counts += torch.stack([
                torch.linalg.vector_norm(part).double().square(),
                torch.full_like(zeros, part.numel()),
                part.numel() - finite,
                (sizes < tiny).sum() - zeros,
                zeros,
            ])  # fmt: skip
        return counts

    gradients = [[weight.grad for weight in weights if weight.grad is not None] for weights in groups.values()]
    out: dict[str, dict[str, float]] = {}
    if not any(gradients):  # a frozen decoder and a batch without neighbors
        return out
    for name, (squares, size, *counts) in zip(groups, totals(gradients, measure).tolist(), strict=True):
        if size:
            shares = (count / size for count in counts)
            out[name] = dict(zip(("overflow", "underflow", "zero"), shares, strict=True))
            out[name]["gradient_norm"] = math.sqrt(squares) / scale
    return out


@torch.no_grad()
def update_ratios(
    groups: dict[str, list[nn.Parameter]], before: dict[str, list[Tensor]]
) -> dict[str, dict[str, float]]:
    """`update_ratio` of each group: norm of the change of the weights over their norm before. Overwrites `before`."""

    def measure(parts: list[Tensor]) -> Tensor:
        norms = torch.stack(torch._foreach_norm(parts)).double()
        return norms.square().sum()[None]

    norms = totals(list(before.values()), measure)[:, 0]
    for name, weights in groups.items():
        for copy, weight in zip(before[name], weights, strict=True):
            copy.sub_(weight)
    changes = totals(list(before.values()), measure)[:, 0]
    ratios = (changes / norms.clamp(min=torch.finfo(norms.dtype).tiny)).sqrt().tolist()
    return {name: {"update_ratio": ratio} for name, ratio in zip(groups, ratios, strict=True)}


def _by_metric(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{PREFIX}{figure}/{group}": value for group, values in figures.items() for figure, value in values.items()}


def _far_above(before: list[float], value: float, margin: float) -> bool:
    """True if a value is many deviations and more than a fraction `margin` above the median of the values before it."""
    if len(before) < _ENOUGH or not math.isfinite(value):
        return False
    median = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in before)
    return value > median + max(_DEVIATIONS * deviation, margin * median)
