"""The version of this program, and of the packages that its results depend on most."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1]


def version_line() -> str:
    """`retro 0.1.0 (commit 4a7be5a), Python 3.12.3, torch 2.13.0, faiss-cpu 1.14.1`, without importing anything heavy."""
    commit = commit_of_checkout()
    packages = [_named("torch"), next(filter(None, map(_named, ("faiss-gpu", "faiss-cpu", "faiss"))), "")]
    first = (_named("retro") or "retro") + (f" (commit {commit})" if commit else "")
    return ", ".join(filter(None, [first, f"Python {platform.python_version()}", *packages]))


def commit_of_checkout() -> str:
    """The commit, with `-dirty` if files were changed since; "" for an installed package."""
    if not (_FOLDER / ".git").exists():  # site-packages may be inside the checkout of another project
        return ""
    git = ["git", "-C", str(_FOLDER), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _named(package: str) -> str:
    """A package with its version; "" if it is not installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
