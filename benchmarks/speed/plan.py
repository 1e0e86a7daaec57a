"""Prediction of `retro plan datastore` against a real build: measure a sample, plan, build, compare.

    python -m benchmarks.speed.plan CONFIG [--sample-bytes 8388608] [--output benchmark-plan.json]

CONFIG has the corpus. The datastore is built in a temporary folder and removed. Sample and build run one after the
other, so the machine should be idle otherwise.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.common import add_minutes, budget, write
from indexing.store.artifact import read_manifest
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.planning.datastore import as_json, plan_for
from pipelines.planning.measure import measure, seconds_by_step
from pipelines.settings.load import load
from pipelines.stages.table import build
from pipelines.terminal.logger import setup_logging
from pipelines.terminal.output import aligned
from pipelines.terminal.stages import StagesView
from pipelines.terminal.units import human_bytes


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--sample-bytes", type=int, default=8 * 2**20)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-plan.json"))
    options = parser.parse_args()
    limit = budget(options)
    setup_logging()
    config = load(Config, options.config, [], verb="index")
    sample = measure(config, sample_bytes=options.sample_bytes)
    plan = plan_for(config, sample)
    if plan.wall_seconds > limit.left:
        predicted = f"the predicted build time is {plan.wall_seconds:,.0f} s, but {limit.left:,.0f} s remain"
        raise SystemExit(f"{predicted}. Use a smaller corpus, or --minutes 0.")
    view = StagesView()
    with tempfile.TemporaryDirectory(prefix="retro-plan-") as folder:
        config = replace(config, datastore=Path(folder) / "datastore")
        datastore = build(config, make_executor(config.executor), view=view)
        search = read_manifest(config.datastore / "neighbors/00000")["counts"]["search"]
        sizes = {
            name: sum(file.stat().st_size for file in (config.datastore / name).rglob("*") if file.is_file())
            for name in plan.bytes
        }
    measured, planned = seconds_by_step(view.steps), {step.name: step.seconds for step in plan.steps}
    rows = [["step", "predicted", "measured", "ratio"]]
    for name in measured:
        rows.append([name, f"{planned[name]:.1f} s", f"{measured[name]:.1f} s", _ratio(planned[name], measured[name])])
    wall = sum(measured.values())
    rows.append(["all", f"{plan.wall_seconds:.1f} s", f"{wall:.1f} s", _ratio(plan.wall_seconds, wall)])
    for name, value in plan.bytes.items():
        rows.append([name, human_bytes(value), human_bytes(sizes[name]), _ratio(value, sizes[name])])
    chunks = plan.size.train_chunks, datastore.train.num_chunks
    rows.append(["chunks", *(f"{count:,.0f}" for count in chunks), _ratio(*chunks)])
    print("\n".join(aligned(rows)))
    print(f"sample: {sample.seconds:.1f} s; index: {plan.size.key}; search: {plan.size.search}, measured {search}")
    found = {"seconds": measured, "bytes": sizes, "search": search}
    write(options.output, {"predicted": as_json(sample, plan), "measured": found})


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / max(measured, 1e-9):.2f}"


if __name__ == "__main__":
    main()
