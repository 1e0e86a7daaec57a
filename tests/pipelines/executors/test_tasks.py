"""Messages of the local executor."""

import logging

import pytest

from indexing.store.errors import InputError
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import LocalExecutor, Task


def fails(error: Exception, *, advance: object) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("c.jsonl:3: broken\n  JSON"), "scan/c.jsonl failed: c.jsonl:3: broken JSON"),
        (KeyError("train"), "scan/c.jsonl failed: KeyError: 'train'"),
    ],
)
def test_failed_task_logs_its_reason_in_one_line(caplog: pytest.LogCaptureFixture, error: Exception, line: str) -> None:
    tasks = [Task("scan/c.jsonl", (error,), 1)]
    with caplog.at_level(logging.ERROR, "retro"), pytest.raises(type(error)):
        list(LocalExecutor(ExecutorSettings()).map("chunk", fails, tasks, lambda units: None))
    assert [record.message for record in caplog.records] == [line]
