"""Machines that share nothing but a network: each has its own network, processes, /tmp, home and working folder.

A machine is a set of Linux namespaces on one bridge. Its processes see the program's files, and nothing that another machine
writes. The bridge has a namespace of its own, where no firewall drops packets (Docker's does, on every bridge of its
namespace). Root is needed.

    this process  10.77.0.254 ── bridge ┬── machine 1  10.77.0.1
                                        └── machine 2  10.77.0.2 …
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import wait_until

_SWITCH, _BRIDGE, _LINK = "retro-switch", "retro-br", "retro-here"  # a namespace, the bridge in it, our link to it
NETWORK = "10.77.0"
HERE = f"{NETWORK}.254"
"""Address of the process that makes the machines."""
ROOT = Path(__file__).resolve().parents[1]

_DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"]  # a killed test leaves no machines
# Replaces /tmp by a file system in memory that holds the program and nothing else of the old one.
_ENTER = """
set -e
new=$(mktemp -d)
mount -t tmpfs -o size=4g tmpfs "$new"
for kept in "$@"; do
  [ "$kept" = -- ] && break
  case "$kept" in /tmp/*) mkdir -p "$new/${kept#/tmp/}"; mount --bind "$kept" "$new/${kept#/tmp/}";; esac
done
mount --rbind "$new" /tmp
mount -t tmpfs -o size=1g tmpfs /dev/shm
ip link set lo up
mkdir -p /tmp/home /tmp/work
cd /tmp/work
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def why_not() -> str:
    """Why this computer cannot make such machines; empty if it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "setpriv", "mount") if shutil.which(tool) is None]
    if missing:
        return f"the commands {', '.join(missing)} are missing"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = _ip("link", "add", f"{_BRIDGE}-try", "type", "bridge", check=False)
    if tried.returncode:
        return f"network devices are not allowed: {tried.stderr.strip()}"
    _ip("link", "delete", f"{_BRIDGE}-try")
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "none", "/mnt"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """A machine that runs one command; when that ends or is killed, all its processes and files are gone."""

    def __init__(self, number: int) -> None:
        self.name, self.address = f"retro-{number}", f"{NETWORK}.{number}"
        self.process: subprocess.Popen[bytes] | None = None
        _ip("netns", "add", self.name)
        _ip("-n", _SWITCH, "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("-n", _SWITCH, "link", "set", self.name, "master", _BRIDGE, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def start(self, command: Sequence[str], log: Path) -> None:
        """Start the machine with its command."""
        kept = [str(ROOT), sys.prefix, sys.base_prefix]
        inside = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            _ENTER,
            "enter",
        ]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [*_DIES_WITH_US, "ip", "netns", "exec", self.name, *inside, *kept, "--", *command],
                env=_environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        wait_until(lambda: self._has_entered(log), every=0.1)

    def kill(self) -> None:
        """Kill all processes of the machine, as a power failure does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def _has_entered(self, log: Path) -> bool:
        """True if the machine has its own /tmp."""
        assert self.process is not None
        assert self.process.poll() is None, log.read_text()
        return bool(_children(self.process)) and self.run(["true"]).returncode == 0

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Run another command on the machine, in its working folder."""
        assert self.process is not None
        (first,) = _children(self.process)
        entered = [
            "nsenter",
            "--target",
            first,
            "--mount",
            "--pid",
            "--net",
            "sh",
            "-c",
            'cd /tmp/work && exec "$@"',
            "sh",
        ]
        return subprocess.Popen([*entered, *command], env=_environment(), text=True, **options)

    def run(self, command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on the machine to its end, with `text` as its input."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.popen(command, **pipes) as process:
            out, _ = process.communicate(text)
        return subprocess.CompletedProcess(command, process.returncode, out)

    def write(self, name: str, text: str) -> None:
        """Write a file into the machine's working folder."""
        assert self.run(["tee", name], text).returncode == 0

    def cut(self, other: "Machine") -> None:
        """Drop everything that this machine sends to another one."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{other.address}/32")

    def restore(self, other: "Machine") -> None:
        """End a `cut`."""
        _ip("-n", self.name, "route", "delete", "blackhole", f"{other.address}/32")


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Machines on one network, not started. All is removed at the end."""
    _remove()
    _ip("netns", "add", _SWITCH)
    _ip("-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
    _ip("-n", _SWITCH, "link", "set", _BRIDGE, "up")
    _ip("link", "add", _LINK, "type", "veth", "peer", "name", "here", "netns", _SWITCH)
    _ip("-n", _SWITCH, "link", "set", "here", "master", _BRIDGE, "up")
    _ip("address", "add", f"{HERE}/24", "dev", _LINK)
    _ip("link", "set", _LINK, "up")
    made: list[Machine] = []
    try:
        for number in range(1, count + 1):
            made.append(Machine(number))
        yield made
    finally:
        for machine in made:
            machine.kill()
        _remove()


def terminate(command: subprocess.Popen[str]) -> None:
    """Send SIGTERM to a command of `Machine.popen`. `nsenter`, its parent, would not pass the signal on."""
    for child in _children(command):
        os.kill(int(child), signal.SIGTERM)


def _children(process: subprocess.Popen[Any]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def _environment() -> dict[str, str]:
    return {**os.environ, "HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}


def _remove() -> None:
    """Remove the network, also that of a killed test."""
    _ip("link", "delete", _LINK, check=False)  # at once; the deletion of a namespace takes a while
    for name in re.findall(rf"^(?:retro-\d+|{_SWITCH})", _ip("netns", "list").stdout, re.MULTILINE):
        _ip("netns", "delete", name)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
