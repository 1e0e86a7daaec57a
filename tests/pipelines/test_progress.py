"""Progress output: lines after ten silent seconds without a terminal, nested bars in a terminal, a view of all stages, a summary."""

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from indexing.progress import STATUS, Aside, FinishedBefore, during
from pipelines.terminal.logger import Handler, setup_logging
from pipelines.terminal.output import echo
from pipelines.terminal.progress import progress, running, views
from pipelines.terminal.silence import live, silence
from pipelines.terminal.stages import StagesView
from pipelines.terminal.units import human_count
from tests.conftest import wait_until
from tests.pipelines.conftest import Terminal


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Replace standard error by a stream that reports itself as a terminal."""
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


def test_work_of_an_earlier_process_moves_the_bar_and_does_not_count_in_the_rate(monkeypatch, caplog) -> None:
    with caplog.at_level(logging.INFO, "retro"), progress("train", total=1000, unit="tokens") as advance:
        advance(FinishedBefore(750))
        advance(250)
    assert "train: 250 tokens in" in caplog.text
    terminal(monkeypatch)
    with progress("train", total=1000, unit="tokens") as advance:
        advance(FinishedBefore(750))
        assert [task.completed for task in live[-1].tasks] == [750]


def test_nothing_is_said_about_work_of_which_nothing_was_left(caplog) -> None:
    with caplog.at_level(logging.INFO, "retro"), progress("train", total=1000, unit="tokens") as advance:
        advance(FinishedBefore(1000))
    assert "train" not in caplog.text


# --- silence -----------------------------------------------------------------------------------------------------------


class Statuses(Handler):
    """Passes statuses on, as the command line does; `caplog` has the other messages."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == STATUS:
            super().emit(record)


@dataclass
class Clock:
    """A clock that the test sets; `lines_at` gives the lines that are logged at a time."""

    caplog: pytest.LogCaptureFixture
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def lines_at(self, now: float) -> list[str]:
        self.now = now
        self.caplog.clear()
        silence.check()
        return [record.getMessage() for record in self.caplog.records]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    clock = Clock(caplog)
    monkeypatch.setattr(silence, "clock", clock)
    monkeypatch.setattr(silence, "last", 0.0)
    caplog.set_level(STATUS, "retro")
    logging.getLogger("retro").addHandler(Statuses())
    return clock


def test_a_line_with_progress_and_time_left_breaks_ten_seconds_of_silence(clock: Clock) -> None:
    with progress("embed", total=100, unit="chunks") as advance:
        assert clock.lines_at(9.9) == []
        assert clock.lines_at(10) == ["embed: 100 chunks, running for 10.0 s"]
        advance(1)
        advance(10)
        assert clock.lines_at(19.9) == []
        assert clock.lines_at(20) == ["embed: 11%, 11 of 100 chunks, 1/s, 1 min 29 s left"]
        echo()
        assert clock.lines_at(29.9) == []
        advance(110)
        assert clock.lines_at(30) == ["embed: 121 chunks so far, 6/s"]  # the total was an estimate


def test_the_time_left_leaves_out_what_comes_before_the_second_unit(clock: Clock) -> None:
    with progress("train", total=1000, unit="tokens") as advance:
        clock.now = 200  # compilation, and the first step
        advance(10)
        assert clock.lines_at(210) == ["train: 1%, 10 of 1,000 tokens, running for 3 min 30 s"]
        advance(90)
        assert clock.lines_at(230) == ["train: 10%, 100 of 1,000 tokens, 3/s, 5 min 00 s left"]


def test_rates_leave_out_the_time_of_evaluations_and_the_time_left_does_not(clock: Clock) -> None:
    with progress("train", total=1000, unit="tokens") as advance:
        clock.now = 30
        advance(Aside(30.0))  # of a resumed run, before its first step
        clock.now = 40
        advance(100)
        clock.now = 60
        advance(200)
        clock.now = 80
        advance(Aside(20.0))
        assert clock.lines_at(80) == ["train: 30%, 300 of 1,000 tokens, 10/s, 2 min 20 s left"]
        advance(200)
        clock.now = 100
        clock.caplog.clear()
    assert clock.caplog.messages == ["train: 500 tokens in 50.0 s (10/s), evaluations in 50.0 s"]


def test_work_that_continues_after_its_last_unit_says_so_instead_of_no_time_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("tokenizer", total=100, unit="chunks") as advance:
        advance(50)
        clock.now = 5
        advance(50)
        with during("training"):
            assert clock.lines_at(20) == ["tokenizer: training; all 100 chunks, running for 20.0 s"]
        assert clock.lines_at(30) == ["tokenizer: all 100 chunks, running for 30.0 s"]
    screen = terminal(monkeypatch)
    with progress("tokenizer", total=100, unit="chunks") as advance:
        advance(100)
        live[-1].refresh()
        assert "100%" in screen.getvalue()
        assert "left" not in screen.getvalue().rpartition("100%")[2]


def test_what_was_done_before_is_not_shown_with_what_follows(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with running("demo"):
        with during("loading the weights of %s", "model"):
            assert clock.lines_at(10) == ["demo: loading the weights of model; running for 10.0 s"]
        assert clock.lines_at(20) == ["demo: running for 20.0 s"]
        with pytest.raises(ValueError, match="inside"), during("opening"):
            raise ValueError("inside")
        assert clock.lines_at(30) == ["demo: running for 30.0 s"]
        with during("scoring"):
            assert clock.lines_at(40) == ["demo: scoring; running for 10.0 s"]  # not for 40


def test_any_line_of_the_log_starts_the_ten_seconds_again(clock: Clock, capsys) -> None:
    handler = Handler()
    with progress("embed", total=100, unit="chunks"):
        clock.now = 8
        handler.emit(logging.makeLogRecord({"msg": "said", "levelno": logging.INFO}))
        assert clock.lines_at(17.9) == []
        assert len(clock.lines_at(18)) == 1


def test_a_status_is_part_of_the_next_line_and_no_line_itself(clock: Clock, capsys) -> None:
    handler = Handler()
    with running("train"), progress("train", total=1000, unit="tokens") as advance:
        advance(FinishedBefore(500))
        advance(20)
        advance(80)
        handler.emit(logging.makeLogRecord({"msg": "step 6 of 10, loss 5.25", "levelno": STATUS}))
        assert capsys.readouterr() == ("", "")
        assert clock.lines_at(10) == [
            "train: step 6 of 10, loss 5.25; 60%, 600 of 1,000 tokens, 8/s, 50.0 s left",
        ]


def test_a_verb_breaks_its_silence_where_no_bar_runs(clock: Clock) -> None:
    with running("eval"):
        silence.set_note("opening the checkpoint")
        assert clock.lines_at(10) == ["eval: opening the checkpoint; running for 10.0 s"]
        with progress("score", total=None, unit="tokens") as advance:
            advance(10)
            advance(50)
            assert clock.lines_at(20) == ["score: 60 tokens so far, 5/s"]
        assert clock.lines_at(30) == ["eval: running for 30.0 s"]  # the note was about what came before


def test_another_thread_logs_the_lines(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("pipelines.terminal.silence._LONGEST_SILENCE", 0.02)
    with caplog.at_level(logging.INFO, "retro"), running("search"):
        wait_until(lambda: caplog.text.count("search: running for") >= 2)


# --- the view of all stages ------------------------------------------------------------------------------------------


def build_with(view: StagesView, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Build in three stages: one of two steps, one that calls `meanwhile` within its step, and one finished before."""
    with view.shown(["chunk", "embed", "add"]):
        with view.stage("chunk"):
            with progress("scan", total=1000, unit="bytes") as advance:
                advance(1000)
            with progress("chunk", total=2000, unit="bytes") as advance:
                advance(2000)
        with view.stage("embed"), progress("embed", total=4, unit="chunks") as advance:
            advance(1)
            meanwhile()
            advance(3)
        with view.stage("add"):
            pass


def test_without_a_terminal_each_stage_logs_a_line_and_the_build_a_summary(caplog, capsys) -> None:
    with caplog.at_level(logging.INFO, "retro"):
        build_with(StagesView())
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "stage 1 of 3, chunk"
    assert lines[1].startswith("scan: 1.0 kB in")
    assert "stage 3 of 3, add: finished before" in lines
    assert [line.split()[0] for line in lines[-6:]] == ["stage", "chunk", "chunk", "embed", "add", "all"]
    assert lines[-2].split() == ["add", "finished", "before"]
    assert capsys.readouterr() == ("", "")


def test_a_step_that_waits_uses_no_processor() -> None:
    view = StagesView(quiet=True)
    build_with(view, lambda: time.sleep(0.1))
    (embed,) = (step for step in view.steps if step.name == "embed")
    assert 0 < embed.cpu_seconds < embed.seconds


def test_the_work_of_threads_and_children_counts_as_processor_time() -> None:
    def work() -> None:
        deadline = time.thread_time() + 0.05
        while time.thread_time() < deadline:
            pass

    def in_threads_and_a_child() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)

    own, view = time.process_time(), StagesView(quiet=True)
    build_with(view, in_threads_and_a_child)
    (embed,) = (step for step in view.steps if step.name == "embed")
    assert embed.cpu_seconds > 0.1
    assert embed.cpu_seconds > time.process_time() - own  # the child's too


def test_in_a_terminal_every_stage_has_a_row_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    setup_logging()
    view = StagesView()
    with view.shown(["chunk", "embed"]):
        assert live
        live[-1].refresh()
        assert screen.getvalue().endswith("chunk   waiting     \nembed   waiting     ")
        with view.stage("chunk"), progress("chunk", total=2000, unit="bytes") as advance:
            advance(1000)
            live[-1].refresh()
            assert "50%" in screen.getvalue()
        with view.stage("embed"):
            pass
        live[-1].refresh()
        assert "finished before" in screen.getvalue()
    assert live == []
    assert "chunk  chunk  1.0 kB" in screen.getvalue()


def test_error_in_a_stage_propagates_and_closes_the_view(caplog) -> None:
    def fail() -> None:
        with view.shown(["chunk"]), view.stage("chunk"), progress("scan", total=1, unit="bytes"):
            raise RuntimeError("inside")

    view = StagesView()
    with caplog.at_level(logging.INFO, "retro"), pytest.raises(RuntimeError, match="inside"):
        fail()
    assert views == []
    assert view.steps == []
    assert "all" not in caplog.text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1, "shards", "1 shard"),
        (1, "queries", "1 query"),
        (2, "shards", "2 shards"),
        (0, "chunks", "0 chunks"),
        (1, "bytes", "1 B"),
    ],
)
def test_one_unit_is_singular(value: int, unit: str, text: str) -> None:
    assert human_count(value, unit, named=True) == text
