"""Progress: quiet where nobody watches, one line at the end, bars that nest."""

import io
import logging

import pytest

from pipelines import progress as module
from pipelines.progress import human_bytes, human_count, human_seconds, progress


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Something that takes standard error's place and says that it is a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_without_a_terminal_one_line_is_logged_and_nothing_is_drawn(caplog, capsys) -> None:
    with caplog.at_level(logging.INFO, "retro"), progress("embed", total=10, unit="chunks") as advance:
        advance(4)
        advance(6)
    assert "embed: 10 chunks in" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_bars_show_and_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("outer", total=2, unit="chunks") as advance:
        advance(1)
        with progress("inner", total=None, unit="bytes") as inner:
            inner(5000)
    assert "outer" in screen.getvalue()
    assert module._live == []


def test_messages_appear_above_a_bar_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    module.setup_logging()
    with progress("embed", total=2, unit="chunks"):
        module.log.warning("%s is [bold] and long%s", "this", "x" * 200)
    module.log.info("plain")
    assert "warning: this is [bold] and long" + "x" * 200 + "\n" in screen.getvalue()
    assert screen.getvalue().endswith("plain\n")


def test_an_error_inside_passes_through_and_closes_the_bar() -> None:
    def fail() -> None:
        with progress("x", total=1, unit="chunks"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert module._live == []


def test_numbers_as_people_read_them() -> None:
    assert human_count(1234567, "chunks", named=True) == "1,234,567 chunks"
    assert human_count(2.34) == "2.3"
    assert [human_bytes(x) for x in (5, 1500, 2.5e9)] == ["5 B", "1.5 kB", "2.5 GB"]
    assert [human_seconds(x) for x in (3.21, 65, 7500)] == ["3.2 s", "1 min 05 s", "2 h 05 min"]
