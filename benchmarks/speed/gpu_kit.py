"""What a GPU machine without a network needs: wheels that it lacks and files, in loads that are small enough to travel.

    python benchmarks/speed/gpu_kit.py make [FILE ...]     # here: .kit/load-0, .kit/load-1 ... and the commands for each
    python benchmarks/speed/gpu_kit.py install             # there, after each load: joins files, installs wheels into .kit/site

The machine has Python 3.12 with PyTorch, NumPy, numba, transformers and pyarrow. `PACKAGES` are those that it lacks;
training, search and decoding need no others. Wheels have at most 28 MiB. A FILE is a corpus, a model, or a wheel (as
that of MiniLM), and is cut into parts where it is larger than a load. Each load is a folder that travels with one
command; earlier ones stay there.

This script needs nothing but Python and pip, since it runs where nothing is installed yet.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = (
    "pydantic>=2.12,<3",
    "annotated-types",
    "typing-inspection",
    "tyro>=1.0,<2",
    "docstring-parser",
    "typeguard",
    "faiss-cpu>=1.12,<2",
    "gguf>=0.17",
    "zstandard>=0.22",
    "retro-pytorch==0.3.9",
)
"""Without their dependencies, which the machine has; `pydantic-core` is added in the version that pydantic names."""
FOR_TESTS = ("tantivy>=0.27,<0.28",)
"""Packages that only `pytest -m gpu` needs, whose datastore has a sparse index: they travel as files."""
PYTHON = "3.12"
GLIBC = (5, 12, 17, 24, 27, 28, 31, 34)
"""Versions 2.x of glibc in the names of wheels that run there."""
LIMIT = 28 << 20
"""Bytes of the wheels, and of a load."""
KIT, SITE, FILES, PARTS = Path(".kit"), "site", "files", "parts.json"


# --- here ------------------------------------------------------------------------------------------------------------


def make(kit: Path, files: Sequence[Path], limit: int = LIMIT) -> list[str]:
    """Fill the folder of the kit; return the names of the loads.

    Raises:
        SystemExit: a file is missing, pip finds no wheel, or the wheels are too large.
    """
    for file in files:
        if not file.is_file():
            sys.exit(f"{file}: no such file.")
    if len({file.name for file in files}) < len(files):
        sys.exit("Two files have the same name; all arrive in one folder.")
    first = kit / "load-0"
    first.mkdir(parents=True, exist_ok=True)
    for old in first.glob("*.whl"):
        old.unlink()
    download(first, PACKAGES)
    core = next(first.glob("pydantic-[0-9]*.whl"), None)
    if core:
        download(first, [requirement_of(core, "pydantic-core")])
    size = check_size(first, limit)
    tests = kit / "tests"
    tests.mkdir(exist_ok=True)
    download(tests, FOR_TESTS)
    return cut(kit, [*sorted(tests.glob("*.whl")), *files], limit, used=size)


def download(folder: Path, packages: Sequence[str]) -> None:
    """Download wheels for the machine."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options = [word for name in platforms for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    target = ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    if subprocess.run([*pip, *target, *options, *packages]).returncode:
        sys.exit(f"pip finds no wheels of {', '.join(packages)} for Python {PYTHON}.")


def requirement_of(wheel: Path, name: str) -> str:
    """The requirement of a wheel that has this name."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        metadata = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith(f"Requires-Dist: {name}")]
    return wanted[0]


def check_size(folder: Path, limit: int) -> int:
    """Return the bytes of all wheels in a folder.

    Raises:
        SystemExit: they are larger than the limit.
    """
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
    total = sum(sizes.values())
    print(*(f"{size / 2**20:8.2f} MiB  {name}" for name, size in sizes.items()), sep="\n")
    print(f"{total / 2**20:8.2f} MiB  of at most {limit / 2**20:.0f}")
    if total > limit:
        sys.exit("The wheels are too large to travel with one command: leave packages out of PACKAGES.")
    return total


def cut(kit: Path, files: Sequence[Path], limit: int, used: int = 0) -> list[str]:
    """Cut files into parts and put them into loads of at most `limit` bytes. The first load already has `used`
    bytes."""
    for old in kit.glob("load-*/*.part-*"):
        old.unlink()
    number, table, loads = 0, dict[str, dict[str, object]](), ["load-0"]
    for file in files:
        data, parts, start = file.read_bytes(), list[str](), 0
        while start < len(data) or not parts:
            if used >= limit:
                number, used = number + 1, 0
            piece = data[start : start + limit - used]
            part = f"load-{number}/{file.name}.part-{len(parts):03}"
            (kit / part).parent.mkdir(exist_ok=True)
            (kit / part).write_bytes(piece)
            parts.append(part)
            start, used = start + len(piece), used + len(piece)
        table[file.name] = {"sha256": hashlib.sha256(data).hexdigest(), "parts": parts}
        loads = [f"load-{each}" for each in range(number + 1)]
    for load in loads:  # each may be the only one that has arrived
        (kit / load / PARTS).write_text(json.dumps(table, indent=1))
    return loads


# --- there -----------------------------------------------------------------------------------------------------------


def install(kit: Path) -> Path:
    """Join the files whose parts are there, and install all wheels; return the folder for PYTHONPATH."""
    for name, missing in join(kit):
        print(f"{name}: " + (f"waits for {', '.join(missing)}" if missing else "complete"), flush=True)
    wheels = sorted({*kit.glob("load-*/*.whl"), *(kit / FILES).glob("*.whl")})
    if not wheels:
        sys.exit(f"{kit}: no load with wheels has arrived. Carry {kit / 'load-0'}, which `make` fills.")
    site = kit / SITE
    arrived = "\n".join(wheel.name for wheel in wheels)
    stamp = kit / "installed.txt"
    if not stamp.exists() or stamp.read_text() != arrived:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
        ]
        subprocess.run([*pip, "--no-cache-dir", "--target", str(site), *map(str, wheels)], check=True)
        stamp.write_text(arrived)
    return site


def join(kit: Path) -> Iterator[tuple[str, list[str]]]:
    """Write the files whose parts have all arrived to `files/`; yield each name with the parts that it lacks.

    Raises:
        SystemExit: a file differs from the one that was cut.
    """
    table: dict[str, dict] = next((json.loads(file.read_text()) for file in kit.glob(f"load-*/{PARTS}")), {})
    for name, one in table.items():
        target = kit / FILES / name
        missing = [part for part in one["parts"] if not (kit / part).exists()]
        if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == one["sha256"]:
            missing = []
        elif not missing:
            data = b"".join((kit / part).read_bytes() for part in one["parts"])
            if hashlib.sha256(data).hexdigest() != one["sha256"]:
                sys.exit(f"{name}: its parts are damaged. Carry their loads again.")
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
        yield name, missing


def main() -> None:
    """Make the kit, or install it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "install"])
    parser.add_argument("files", nargs="*", type=Path, help="of `make`")
    parser.add_argument("--kit", type=Path, default=KIT)
    options = parser.parse_intermixed_args()
    if options.command == "install":
        print(f"export PYTHONPATH={install(options.kit).resolve()}:{Path.cwd()}")
        return
    loads = make(options.kit, options.files)
    script = Path(__file__).relative_to(Path(__file__).parents[2])
    print("\nOn the other machine, in the root of the repository, for each load:")
    for load in loads:
        print(f"  carry {options.kit / load}   then   python3 {script} install --kit {options.kit}")
    print("The last one prints the PYTHONPATH to export before the parts of benchmarks/speed/gpu*.py.")


if __name__ == "__main__":
    main()
