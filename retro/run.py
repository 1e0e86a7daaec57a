"""The folder of a training run: what it was told, how far it came, what it measured.

run/  settings.json   metrics.jsonl   checkpoints/00000200/ …
"""

import json
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from retro import checkpoint as checkpoints

# Settings that change neither weights nor losses: a run may be resumed with other values of these.
# Where a datastore lies is free too: its fingerprint is compared.
_FREE = {
    "train": [
        "device",
        "threads",
        "eval_every",
        "eval_tokens",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "log_to",
    ],
    "data": ["datastores"],
}


def last_checkpoint(run: Path, resolved: dict[str, Any], datastores: list[str]) -> checkpoints.Checkpoint | None:
    """The checkpoint to go on from.

    Raises:
        InputError: the run was started with other settings or on another datastore.
    """
    if checkpoints.latest(run) is None:
        return None
    found = checkpoints.open_checkpoint(run)
    changed = [
        f"{section}.{key} was {found.settings[section].get(key)!r}, now {value!r}"
        for section, values in resolved.items()
        for key, value in values.items()
        if found.settings[section].get(key) != value and key not in _FREE.get(section, [])
    ]
    if found.datastores != datastores:
        changed.append("the datastore has changed")
    if changed:
        raise InputError(
            f"{run} holds a run with other settings: {'; '.join(changed)}. Set them back or choose another `run`."
        )
    return found


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's `metrics.jsonl`: a last one that is being written, or was cut by a kill, is left out.

    Raises:
        InputError: a line is not JSON.
    """
    path = run / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    out = []
    for number, line in enumerate(whole, start=1):
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error}). Remove the line.") from error
    return out
