"""Render Jinja templates in another process, which ends when a template takes too much time or memory.

    template, variables ─ a line of JSON ─► process ─ a line of JSON ─► text or error

A chat template is a program from a file. Jinja's sandbox keeps it from files and from Python's internals, but not from
endless loops or huge texts, and a thread cannot be stopped. A process can: the kernel ends it at its limit of CPU time.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

SECONDS = 2.0
"""CPU time of one rendering. Templates of published models take less than a millisecond."""

_MEMORY = 2**30  # bytes of address space
_LONGEST = 2**20  # characters of a text
_LONGEST_MESSAGE = 300


class TemplateError(Exception):
    """A template that cannot be rendered.

    Attributes:
        refused: True if the template itself refused the conversation with `raise_exception`.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template.

    Args:
        source: the template.
        variables: what JSON can express.

    Raises:
        TemplateError: any error of the template, in one line; it takes more than `SECONDS`, or writes too much.
    """
    answer = _process_of(os.getpid()).answer({"source": source, "variables": variables})
    if "text" not in answer:
        raise TemplateError(answer["error"], answer["refused"])
    text: str = answer["text"]
    return text


# --- this process


@cache
def _process_of(pid: int) -> "_Process":  # a forked process must not share the pipes of its parent
    return _Process()


class _Process:
    """The process that renders; it starts with the first template, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        atexit.register(self._close)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._running is None or self._running.poll() is not None:
                self._close()
                self._running = _start()
            assert self._running.stdin is not None
            assert self._running.stdout is not None
            try:
                self._running.stdin.write(json.dumps(request) + "\n")
                self._running.stdin.flush()
                line = self._running.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line.endswith("\n"):
                return {"error": _reason(self._running.wait()), "refused": False}
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _close(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(SECONDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _reason(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {SECONDS:g} s of CPU time"
    return f"ended the process that rendered it (status {status})"


# --- the other process


def _main(seconds: float) -> None:
    import resource

    with contextlib.suppress(ValueError, OSError):  # a smaller limit holds already, or the system has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that waits
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _compiled("")  # imports take longer than renderings
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(**json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(source: str, variables: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    try:
        text = _compiled(source).render(**variables)
        if len(text) <= _LONGEST:
            return {"text": text}
        return {"error": f"writes more than {_LONGEST:,} characters", "refused": False}
    except MemoryError:
        return {"error": f"needs more than {_MEMORY >> 20:,} MiB of memory", "refused": False}
    except Exception as error:
        message = " ".join(str(error).split())[:_LONGEST_MESSAGE].rstrip(".")
        if not isinstance(error, jinja2.TemplateError):
            message = f"{type(error).__name__}: {message}"
        return {"error": message, "refused": isinstance(error, _refusal())}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The environment of `transformers`, without `strftime_now`: examples must not depend on the date.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


@cache
def _refusal() -> type[Exception]:
    import jinja2

    return type("Refusal", (jinja2.TemplateError,), {})


def _refuse(message: str) -> None:
    raise _refusal()(message)


def _generation_blocks() -> Any:
    """A Jinja extension that ignores `{% generation %} … {% endgeneration %}`, which some templates put around
    answers."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


if __name__ == "__main__":
    _main(float(sys.argv[1]))
