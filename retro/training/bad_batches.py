"""Name the text of a batch whose loss or gradient is not finite.

    RUN/bad_batches/00000137.json   step, loss, gradient norm; for each sequence: sample number, datastore, chunks, documents

A run that is resumed from an earlier checkpoint writes the same file again.
"""

from pathlib import Path

from indexing.store.files import write_json
from retro.data.loader import BatchSource
from retro.training.run_settings import RunSettings
from retro.training.settings import OnNan
from retro.training.step import StepResult


def name_batch(run: Path, data: BatchSource, settings: RunSettings, step: int, result: StepResult) -> Path:
    """Write the file of a step and return its path.

    Args:
        run: folder of the run.
        data: source of the batch.
        settings: number of sequences of a step.
        step: counted from 1.
        result: result of the step.
    """
    size = settings.samples_per_step
    samples = range((step - 1) * size, step * size)
    path = run / "bad_batches" / f"{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {name: str(result.metrics[name]) for name in ("loss", "gradient_norm")}  # JSON has no NaN
    write_json(path, {"step": step, **figures, "sequences": [data.origin(sample) for sample in samples]})
    return path


def describe_figures(result: StepResult) -> str:
    """Loss and gradient norm of a step, for a message."""
    return f"loss {result.metrics['loss']:.4g}, norm of the gradient {result.metrics['gradient_norm']:.4g}"


def advice(on_nan: OnNan, step: int) -> str:
    """What to do about a run that stopped after `step` steps."""
    saved = f"The update was not applied: the checkpoint of step {step} is the last good state."
    if on_nan == "skip":
        return f"{saved} Too many batches in a row were not finite: train with a lower train.lr in another `run`."
    return (
        f"{saved} To skip this batch, run the same command with --train.on-nan skip. To train with a lower train.lr, "
        "choose another `run`."
    )
