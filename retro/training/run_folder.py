"""The folder of a training run: settings, metrics and checkpoints.

run/  settings.json   metrics.jsonl   checkpoints/00000200/ …
"""

import contextlib
import logging
import math
import shutil
from pathlib import Path
from typing import Any, NotRequired  # pydantic needs these before Python 3.12

import torch
from typing_extensions import TypedDict

from indexing.machine import Precision, onednn_has_bfloat16
from indexing.measured import fastest_products
from indexing.store.artifact import verify
from indexing.store.errors import InputError
from indexing.store.files import parse_json, read_json
from indexing.store.schemas import parsed
from retro.checkpoints import checkpoint as checkpoints
from retro.model_settings import as_json
from retro.training.optimizer import learning_rate
from retro.training.settings import TrainSettings

log = logging.getLogger("retro")

# Settings that may change when a run is resumed, because they change neither weights nor losses. `on_nan` is among them
# so that a run can skip the batch at which it stopped. A datastore may move: its fingerprint is compared.
_FREE = {
    "train": [
        "device",
        "compile",
        "num_workers",
        "eval_every",
        "eval_tokens",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "report_to",
        "monitor_every",
        "on_nan",
    ],
    "data": ["datastores", "reading", "materialized"],
    # Fingerprints cover the contents of these files, and `train.steps` covers the epochs.
    "finetune": ["examples", "template", "epochs"],
}

# Settings of the learning rate. They may change if the finished steps keep theirs: a `constant` run can end as `wsd`.
_SCHEDULE = ("lr_schedule", "steps", "warmup_steps", "lr", "min_lr_ratio", "decay_ratio")


def last_checkpoint(
    run: Path, resolved: dict[str, Any], defaults: dict[str, Any], datastores: list[str]
) -> checkpoints.Checkpoint | None:
    """The newest undamaged checkpoint, to resume from. Damaged ones are renamed, with a warning.

    Args:
        run: folder of the run.
        resolved: its settings by section, as JSON holds them.
        defaults: the same sections with default values, for settings that an older checkpoint lacks.
        datastores: fingerprints of its data.

    Raises:
        InputError: the run was started with other settings or on other data, or all checkpoints are damaged.
    """
    checkpoint, damaged = _newest_whole(run)
    if checkpoint is None:
        return None
    changed = _changes(checkpoint, resolved, defaults)
    if checkpoint.datastores != datastores:
        changed.append("the datastore has changed, or the examples that it is fine-tuned on")
    if changed:
        raise InputError(
            f"{run} holds a run with other settings: {'; '.join(changed)}. Set them back or choose another `run`; "
            "`train.init_from` starts it from the weights of this one."
        )
    for folder, problem in damaged.items():
        aside = folder.with_name(f"damaged-{folder.name}")
        log.warning(
            "%s\nThis checkpoint is renamed to %s; resuming from step %d instead.", problem, aside, checkpoint.step
        )
        shutil.rmtree(aside, ignore_errors=True)  # from an earlier resume
        folder.rename(aside)
    return checkpoint


def precision_of(run: Path, precision: Precision, device: torch.device) -> Precision:
    """The precision of a run's products. `auto` is that of its checkpoints, and in a new run the faster one.

    If the processor cannot multiply bfloat16, a run that began in it continues in float32, with a warning.
    """
    if precision != "auto":
        return precision
    kept = _kept_precision(run)
    if kept == "bfloat16" and device.type == "cpu" and not onednn_has_bfloat16():
        log.warning("%s began in bfloat16. This processor cannot multiply it: the run continues in float32.", run)
        return "float32"
    return kept or fastest_products("training", str(device))


def _kept_precision(run: Path) -> Precision | None:
    """The precision that the newest readable checkpoint names."""
    for folder in reversed(checkpoints.finished(run)):
        with contextlib.suppress(InputError, OSError):  # a damaged one
            return checkpoints.read(folder).precision
    return None


def _newest_whole(run: Path) -> tuple[checkpoints.Checkpoint | None, dict[Path, str]]:
    """The newest undamaged checkpoint, and the newer damaged ones with the first problem of each."""
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints.finished(run)):
        problems = verify(folder)
        if not problems:
            return checkpoints.read(folder), damaged
        damaged[folder] = problems[0]
    if damaged:
        raise InputError(
            f"{run}: all checkpoints are damaged. {'. '.join(damaged.values())}. Restore one from a copy, or remove "
            f"{run / 'checkpoints'} to train from the beginning."
        )
    return None, damaged


def _changes(checkpoint: checkpoints.Checkpoint, resolved: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Describe the settings that differ from those of the checkpoint and would change the run."""
    changed = []
    if ("finetune" in checkpoint.settings) != ("finetune" in resolved):
        return [f"it was one of `retro {'finetune' if 'finetune' in checkpoint.settings else 'train'}`"]
    stored = {**checkpoint.settings, "model": as_json(checkpoint.model)}  # with today's keys
    for section, values in resolved.items():
        before = _flat(defaults[section]) | _flat(stored.get(section, {}))
        for key, value in _flat(values).items():
            if before[key] == value or key in _FREE.get(section, []):
                continue
            if section == "train" and key in _SCHEDULE and _same_learning_rates(before, values, checkpoint.step):
                continue
            words = f"{section}.{key} was {before[key]!r}, now {value!r}"
            if (section, key) == ("train", "steps"):
                words += (
                    f" (under train.lr_schedule = {values['lr_schedule']!r} the {checkpoint.step} steps done would have had other "
                    "learning rates; 'constant' and 'wsd', before it decays, can be made longer)"
                )
            changed.append(words)
    return changed


def _flat(section: dict[str, Any]) -> dict[str, Any]:
    """The values of a section and its subsections by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= (
            {f"{key}.{name}": inner for name, inner in _flat(value).items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return flat


def _same_learning_rates(before: dict[str, Any], now: dict[str, Any], steps_done: int) -> bool:
    """True if the new settings give the finished steps the learning rates that they had."""
    old, new = (TrainSettings(**{name: settings[name] for name in _SCHEDULE}) for settings in (before, now))
    return all(learning_rate(step, old) == learning_rate(step, new) for step in range(steps_done))


# Endings of the metrics of evaluations; the first one that a line has ranks the checkpoint.
_HELD_OUT = tuple(f"_{figure}_{mode}" for figure in ("bits_per_byte", "loss") for mode in ("on", "off"))


def better(best: dict[str, Any] | None, step: int, line: dict[str, float]) -> dict[str, Any] | None:
    """The better of the best evaluation so far and that of a step."""
    score = score_of(line)
    if score is None or (best is not None and not score[1] < best["value"]):
        return best
    return {"step": step, "metric": score[0], "value": score[1]}


def score_of(line: dict[str, float]) -> tuple[str, float] | None:
    """Name and value of the metric that ranks checkpoints (lower is better), or None.

    It is bits per byte of the first evaluation set, with retrieval ON if the model retrieves. For fine-tuning it is the
    loss of the held-out answers.
    """
    names = [name for ending in _HELD_OUT for name in line if name.endswith(ending)]
    name = next(iter(names), None)
    return (name, line[name]) if name and math.isfinite(line[name]) else None


def read_evaluation(run: Path, step: int) -> dict[str, float]:
    """The metrics of the evaluation of a step; empty if it is not in `metrics.jsonl`.

    Raises:
        InputError: a line is not JSON.
    """
    lines = [line for line in read_metrics(run) if line["step"] == step]
    return next((line for line in lines if any(name.endswith(_HELD_OUT) for name in line)), {})


def read_sections(run: Path) -> dict[str, Any]:
    """The settings of a run by section, as its `settings.json` has them.

    Raises:
        InputError: there is no such file, so it is not the folder of a run; or a field is missing or has another type.
    """
    path = run / "settings.json"
    if not path.is_file():
        raise InputError(f"{run} is not the folder of a run ({path} is missing). `retro train CONFIG` makes one.")
    return dict(parsed(checkpoints.RunSections, read_json(path), path))


class _Line(TypedDict):
    """A line of `metrics.jsonl`: numbers by name of the metric."""

    step: int
    tokens: int
    tokens_per_second: NotRequired[float]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a run's `metrics.jsonl`. A last line that is partly written is left out.

    Raises:
        InputError: a line is not JSON, or lacks its step or number of tokens.
    """
    path = run / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    out = []
    for line_number, line in enumerate(whole, start=1):
        try:
            out.append(dict(parsed(_Line, parse_json(line), path)))
        except InputError as error:
            raise InputError(f"{path}:{line_number}: {str(error).removeprefix(f'{path}: ')}") from error
        except ValueError as error:
            raise InputError(f"{path}:{line_number}: not JSON ({error}). Remove the line.") from error
    return out
