"""Messages of the local executor."""

import logging

import pytest

from indexing.store.errors import InputError
from pipelines.executors.settings import ExecutorSettings
from pipelines.executors.tasks import LocalExecutor, Task


def fails(error: Exception, *, advance: object) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (InputError("c.jsonl:3: broken JSON"), []),
        (OSError(28, "No space left on device", "c.jsonl"), []),
        (KeyError("train\n  valid"), ["scan/c.jsonl failed: KeyError: 'train\\n valid'"]),
    ],
)
def test_failed_task_is_named_unless_the_command_line_prints_the_error(
    caplog: pytest.LogCaptureFixture, error: Exception, lines: list[str]
) -> None:
    tasks = [Task("scan/c.jsonl", (error,), 1)]
    with caplog.at_level(logging.ERROR, "retro"), pytest.raises(type(error)):
        list(LocalExecutor(ExecutorSettings()).map("chunk", fails, tasks, lambda units: None))
    assert [record.message for record in caplog.records] == lines
