"""The plan of a datastore as text and as JSON."""

from dataclasses import asdict
from typing import Any

from pipelines.planning.bytes import Workload
from pipelines.planning.datastore import Calibration, Plan, machines_within
from pipelines.terminal import human_bytes, human_count, human_seconds


def calibration_rows(calibration: Calibration) -> list[list[str]]:
    """Machine and sample of the calibration."""
    largest = calibration.observations[-1].workload
    return [
        ["calibrated on", f"{calibration.machine}, {human_bytes(calibration.memory_bytes)}"],
        [
            "with",
            f"{human_bytes(largest.text_bytes)} of text, {largest.chunks:,.0f} chunks, in "
            f"{human_seconds(calibration.seconds)}, from {calibration.text}",
        ],
    ]


def plan_tables(
    plan: Plan, calibration: Calibration, machines: int, price: float, days: float
) -> list[list[list[str]]]:
    """Four tables: the datastore, its bytes, its steps, and the machines that it needs."""
    size, total = plan.size, sum(plan.bytes.values())
    what = [
        ["tokens", f"{human_count(round(size.tokens))}, {human_bytes(size.text_bytes)} of text"],
        ["chunks", f"{size.chunks:,.0f}, {size.train_chunks:,.0f} of them in the index; shards: {size.shards:,}"],
        ["index", f"{size.key}, nprobe {size.nprobe:,.0f}, trained on {size.trained_on:,} vectors"],
        ["neighbors", _search(size)],
        *([["needs", ", ".join(f"{key} = {value}" for key, value in plan.settings.items())]] if plan.settings else []),
    ]
    artifacts = [
        ["artifact", "bytes", "per chunk"],
        *([name, human_bytes(value), f"{value / size.chunks:.0f} B"] for name, value in plan.bytes.items()),
        ["all", human_bytes(total), f"{total / size.chunks:.0f} B"],
    ]
    steps = [
        ["step", "machine time", "machines", "time", "memory of a worker", *(["cost"] if price else [])],
    ]
    for step in plan.steps:
        row = [step.name, long_time(step.seconds), f"{step.machines:,}", long_time(step.wall_seconds)]
        steps.append([*row, human_bytes(step.memory_bytes), *([f"{step.cost:,.2f}"] if price else [])])
    work = long_time(sum(step.seconds for step in plan.steps))
    costs = [f"{sum(step.cost for step in plan.steps):,.2f}"] if price else []
    steps.append(["all", work, f"{machines:,}", long_time(plan.wall_seconds), "", *costs])
    return [what, artifacts, steps, _needs(plan, calibration, days)]


def _search(size: Workload) -> str:
    if size.search == "exact":
        return "exact search"
    return f"search: {size.search}" + (f", nprobe {size.list_nprobe:,.0f}" if size.search == "lists" else "")


def _needs(plan: Plan, calibration: Calibration, days: float) -> list[list[str]]:
    """The number of machines for the given time, and their memory."""
    alone = [step for step in plan.steps if not step.shared]
    wanted = machines_within(plan.steps, days * 86_400)
    slowest = max(alone, key=lambda step: step.seconds, default=None)
    if wanted is not None:
        in_time = f"{wanted:,} like this one"
        if wanted > plan.size.shards:
            in_time += f", which need as many shards; there are {plan.size.shards:,}, so lower corpus.shard_bytes"
    else:
        assert slowest is not None
        in_time = f"not possible: {slowest.name} runs on one machine and takes {long_time(slowest.seconds)}"
    largest = max(plan.steps, key=lambda step: step.memory_bytes)
    memory = (
        f"{human_bytes(largest.memory_bytes)} ({largest.name}); this one has {human_bytes(calibration.memory_bytes)}"
    )
    rows = [[f"machines for {days:g} days", in_time], ["memory of the largest worker", memory]]
    if plan.size.search != "exact" and plan.calibrated_nprobe < plan.size.visited:
        rows.append(
            [
                f"neighbors at nprobe {plan.calibrated_nprobe:,.0f}",
                f"{long_time(plan.calibrated_seconds)} of machine time, with the nprobe of the calibration and a lower recall",
            ]
        )
    return rows


def long_time(seconds: float) -> str:
    """`3.2 s`, `2 h 03 min`, `12.5 days`, `340 years`."""
    if seconds < 2 * 86_400:
        return human_seconds(seconds)
    days = seconds / 86_400
    return f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.1f} years"


def as_json(calibration: Calibration, plans: dict[str, Plan]) -> dict[str, Any]:
    """Calibration and plans as plain values, in bytes and seconds."""
    return {"calibration": asdict(calibration), "plans": {name: asdict(plan) for name, plan in plans.items()}}
