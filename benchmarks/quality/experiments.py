"""Shared code of experiments that train with the command line: config files, corpus samples, number of steps."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Budget, say, seconds
from indexing.corpus.readers import CorpusSettings, Document
from indexing.corpus.scan import list_files, scan_file
from indexing.store.files import write_bytes
from pipelines.config import Config
from pipelines.planning.sample import draw_sample
from pipelines.settings.toml_file import to_toml

SHORT_EVALUATION = 4_000
"""Tokens of an evaluation if the time limit chooses the steps: it takes less time than training."""
_PROBE_STEPS = 12
_PLANNED = 0.8  # share of the time that is planned, so that the last run fits on a machine that slows down


def retro(*arguments: str) -> None:
    """Run a command of the command line; exit if it fails, since it has said why."""
    status = run([sys.executable, "-m", "pipelines.cli", *arguments])
    if status:
        raise SystemExit(status)


def run(command: Sequence[str]) -> int:
    """Run a command and return its exit status. SIGTERM is passed on, so that a run writes its checkpoint and ends."""
    with subprocess.Popen(command) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def written(file: Path, config: Config) -> str:
    """Write a config to a file; return the path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(config))
    return str(file)


def write_part(paths: Sequence[str], megabytes: float, file: Path) -> str:
    """Write documents drawn from a corpus to a JSON Lines file unless it exists; return the path."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        sample = draw_sample(CorpusSettings(paths=tuple(paths)), int(megabytes * 1e6))
        write_bytes(file, "".join(map(_json_line, (*sample.documents, *sample.valid))).encode())
    return str(file)


def write_rest(paths: Sequence[str], part: Path, file: Path) -> str:
    """Write the documents of a corpus that `write_part` did not draw to a JSON Lines file unless it exists; return the path."""
    if not file.exists():
        with part.open(encoding="utf-8") as lines:
            drawn = {json.loads(line)["id"] for line in lines}
        rows: list[str] = []

        def add(document: Document) -> None:
            if document.id not in drawn:
                rows.append(_json_line(document))

        settings = CorpusSettings(paths=tuple(paths))
        for each in list_files(settings):
            scan_file(each, settings, add)
        write_bytes(file, "".join(rows).encode())
    return str(file)


def _json_line(document: Document) -> str:
    return json.dumps({"id": document.id, "text": "".join(document.blocks())}, ensure_ascii=False) + "\n"


def steps_that_fit(
    file: Path, command: str, config_of: Callable[[int], Config], shares: Sequence[float], limit: Budget
) -> int:
    """Choose the number of steps with which several runs end within the remaining time.

    A short run measures the time of a step and the fixed time of a run (start, evaluation, checkpoint). If even short
    runs do not fit, the caller has to stop between two runs (`Budget.each`).

    Args:
        file: stores the number, for runs that are resumed.
        command: `train` or `finetune`.
        config_of: returns the config of the slowest run, given its steps.
        shares: for each run, its steps relative to the returned number.
        limit: time limit of all runs together.
    """
    if file.exists():
        return int(file.read_text())
    say(f"measuring the time of a step in a run of {_PROBE_STEPS} steps", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="retro-steps-") as folder:
        config = config_of(_PROBE_STEPS)
        config = replace(config, run=Path(folder) / "run", train=replace(config.train, log_every=_PROBE_STEPS // 2))
        whole = seconds(lambda: retro(command, written(Path(folder) / "probe.toml", config)))
        lines = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "tokens_per_second" in line][-1]  # the first half compiles and warms up
    step = last["tokens"] / last["step"] / last["tokens_per_second"]
    fixed = max(0.0, whole - _PROBE_STEPS * step)
    steps = max(_PROBE_STEPS, int((_PLANNED * limit.left - len(shares) * fixed) / (sum(shares) * step)))
    say(
        f"{steps} steps per run: a step takes {step:.2f} s, and a run {fixed:.0f} s in addition. "
        f"{len(shares)} runs take about {(len(shares) * fixed + sum(shares) * steps * step) / 60:.1f} minutes. "
        "--steps sets the number of steps."
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(steps))
    return steps
