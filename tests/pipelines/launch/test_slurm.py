"""The Slurm script: the command it starts, the errors it reports, and requeuing. Slurm's commands are fakes."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, wait_until

SCRIPT = Path(__file__).resolve().parents[3] / "configs" / "slurm" / "train.sbatch"
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[3-4]"}

COMMANDS = {
    # One task of the job step, on this machine. Slurm signals this process.
    "srun": 'while [ "$1" != bash ]; do shift; done; echo $$ > task; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node3; echo node4; else echo "$@" >> scontrol; fi',
    "torchrun": 'trap "sleep 0.2; echo saved; exit 1" TERM; echo "$@" > writing; mv writing started; [ -e finishes ] && exit 0; '
    "[ -e fails ] && exit 3; for _ in $(seq 2000); do sleep 0.05; done",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration, and fake Slurm commands in `bin`."""
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/usr/bin/env bash\n{body}\n")
        command.chmod(0o755)
    (tmp_path / "config.toml").write_text("")
    return tmp_path


def environment(folder: Path, **changes: str) -> dict[str, str]:
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**inherited, "PATH": path, **SLURM, **changes}


def run(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env=environment(folder, **changes),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_script_passes_shellcheck() -> None:
    found = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_script_contains_the_required_sbatch_options() -> None:
    options = {line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")}
    assert {"--signal=TERM@120", "--requeue", "--ntasks-per-node=1", "--open-mode=append"} <= options


def test_dry_run_prints_one_torchrun_per_node_and_starts_nothing(folder: Path) -> None:
    done = run(
        folder, "config.toml", "--train.lr", "1e-4", DRY_RUN="1", SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="64"
    )
    assert done.returncode == 0, done.stderr
    assert "2 × 8 processes, 8 GPUs a node, 8 threads each" in done.stdout
    printed = done.stdout.splitlines()[-1]
    assert printed.startswith("srun --kill-on-bad-exit=1 --ntasks=2 --ntasks-per-node=1 bash -c ")
    assert (
        "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=4711-0 --rdzv-backend=c10d --rdzv-endpoint=node3:24711 "
        "-m -- pipelines.train config.toml --train.lr 1e-4" in printed
    )
    assert not (folder / "started").exists()


def test_nodes_without_gpus_run_one_process_or_the_requested_number(folder: Path) -> None:
    assert (
        "2 × 1 processes, 0 GPUs a node, 4 threads each"
        in run(folder, "config.toml", DRY_RUN="1", SLURM_CPUS_PER_TASK="4").stdout
    )
    done = run(folder, "config.toml", DRY_RUN="1", SLURM_CPUS_PER_TASK="4", PROCESSES_PER_NODE="2")
    assert "2 × 2 processes, 0 GPUs a node, 2 threads each" in done.stdout


def test_dry_run_outside_slurm_is_for_this_machine(folder: Path) -> None:
    none = dict.fromkeys(SLURM, "")
    done = run(folder, "config.toml", DRY_RUN="1", **none)
    assert (
        "--nnodes=1 --nproc-per-node=1 --rdzv-id=0-0 --rdzv-backend=c10d --rdzv-endpoint=localhost:20000" in done.stdout
    )
    refused = run(folder, "config.toml", **none)
    assert refused.returncode == 2
    assert "submit it with sbatch, or set DRY_RUN=1" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ([], {}, "the configuration is missing"),
        (["other.toml"], {}, "other.toml: no such file"),
        (["config.toml"], {"VENV": "/nowhere"}, "VENV = /nowhere: the folder has no bin/activate"),
        (["config.toml"], {"SLURM_NTASKS": "16"}, "16 tasks on 2 nodes"),
        (["config.toml"], {"PROCESSES_PER_NODE": "many"}, "PROCESSES_PER_NODE = many: must be an integer"),
        (
            ["config.toml"],
            {"PROCESSES_PER_NODE": "9", "SLURM_GPUS_ON_NODE": "8"},
            "PROCESSES_PER_NODE = 9: the node has 8 GPUs",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_training_starts(
    folder: Path, arguments: list[str], changes: dict[str, str], message: str
) -> None:
    done = run(folder, *arguments, **changes)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (folder / "started").exists()


def test_missing_torchrun_is_reported_with_the_setting_to_change(folder: Path) -> None:
    (folder / "bin" / "torchrun").unlink()
    assert "torchrun is not on PATH: set VENV" in run(folder, "config.toml").stderr


@pytest.mark.parametrize(("marker", "status"), [("finishes", 0), ("fails", 3)])
def test_job_ends_with_the_status_of_the_run(folder: Path, marker: str, status: int) -> None:
    (folder / marker).touch()
    assert run(folder, "config.toml", SLURM_JOB_END_TIME="0").returncode == status
    assert not (folder / "scontrol").exists()


@pytest.mark.parametrize(("seconds_left", "requeued"), [(100, True), (80_000, False)])
def test_job_that_saved_on_sigterm_is_requeued_if_its_time_is_over(
    folder: Path, seconds_left: int, requeued: bool
) -> None:
    ends = {"SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left), "SLURM_RESTART_COUNT": "1"}
    script = subprocess.Popen(
        ["bash", str(SCRIPT), "config.toml"],
        cwd=folder,
        env=environment(folder, **ends),
        stdout=subprocess.PIPE,
        text=True,
    )
    with script:
        wait_until(lambda: (folder / "started").exists() or script.poll() is not None)
        assert "--rdzv-id=4711-1" in (folder / "started").read_text()
        os.kill(int((folder / "task").read_text()), signal.SIGTERM)
        said = script.communicate(timeout=PATIENCE)[0]
    assert script.returncode == 143
    assert "saved\n" in said  # the script waited until torchrun saved
    assert (folder / "scontrol").exists() == requeued
    if requeued:
        assert (folder / "scontrol").read_text() == "requeue 4711\n"
