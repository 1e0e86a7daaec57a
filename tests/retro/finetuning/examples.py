"""Example files for tests, and settings that read them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.config import Config
from retro.finetuning.trainer import finetune
from retro.training.trainer import Outcome

INSTRUCTIONS = [
    {"instruction": f"name the index number {number}", "output": f"it is the index {'abcdefghijklmnop'[number]} " * (1 + number % 4)}
    for number in range(12)
] + [{"instruction": "说出第二个索引的名字", "output": "这是第二个索引"}]  # fmt: skip


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def run(config: Config, **options: Any) -> Outcome:
    return finetune(config.run, config.run_settings, config.finetune, **options)


def with_finetune(config: Config, **changes: Any) -> Config:
    return replace(config, finetune=replace(config.finetune, **changes))
