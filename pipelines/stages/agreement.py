"""Check that a configuration names the settings with which its datastore was built.

A training run reads a finished datastore, so the settings of its sections have no effect. One that says something else
would be ignored in silence.
"""

import contextlib
import json
from dataclasses import asdict, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, shard_name
from indexing.store.errors import InputError
from pipelines.config import Config

_FIRST = shard_name(0)
_ARTIFACTS = (
    "corpus",
    "tokenizer",
    f"chunks/{_FIRST}",
    "embedder",
    "index/trained",
    "index/tuned",
    f"neighbors/{_FIRST}",
)


def check_agreement(config: Config) -> None:
    """Reject settings of a run other than those that its datastore was built with, as `retro index` does.

    Only the keys that a file or the command line set are compared (`config.given`); others have no effect on a finished
    datastore.

    Raises:
        InputError: a setting differs; the message names it and the stage to rebuild.
    """
    if config.datastore not in config.run_settings.data.datastores:
        return
    folder = Datastore.open(config.datastore).folder
    recorded = _recorded(folder)
    if config.dedup.is_on and not any(key.startswith("dedup.") for key in recorded):
        on = [f"dedup.{name}" for name in ("within", "held_out", "paths") if getattr(config.dedup, name)]
        recorded |= dict.fromkeys(on, ("not set", "chunk"))
    lines, stages = [], []
    for key in sorted(recorded.keys() & config.given):
        (before, stage), now = recorded[key], _value(config, key)
        if now not in (before, "auto"):
            lines.append(f"  {key} was {before!r}, now {now!r}\n")
            stages.append(stage)
    if lines:
        raise InputError(
            f"{folder} was built with other settings:\n{''.join(lines)}Restore the settings, name another datastore, or rebuild: "
            f"`retro index CONFIG --stage {stages[0]} --rebuild`."
        )


def _recorded(folder: Path) -> dict[str, tuple[Any, str]]:
    """The settings in the recipes of a datastore: key → value and stage."""
    recorded: dict[str, tuple[Any, str]] = {}
    for name in _ARTIFACTS:
        with contextlib.suppress(InputError):  # not made
            recipe = read_manifest(folder / name)["recipe"]
            recorded |= {key: (value, recipe["stage"]) for key, value in recipe["settings"].items() if "." in key}
    return recorded


def _value(config: Config, key: str) -> Any:
    """The value of `section.key` as in a recipe."""
    value = reduce(getattr, key.split("."), config)
    return json.loads(json.dumps(asdict(value) if is_dataclass(value) else value, default=str))
