"""Which text a batch was made of, when its loss or gradient was not finite.

    RUN/bad_batches/00000137.json   step, loss, gradient norm; of each sequence: sample number, and what it is made of

The file of a step is the same however often a run comes by, so going on from a checkpoint before it changes nothing.
"""

from pathlib import Path

from indexing.store.files import write_json
from retro.data.loader import Source
from retro.training.settings import TrainSettings
from retro.training.step import StepResult


def name_batch(run: Path, data: Source, settings: TrainSettings, step: int, result: StepResult) -> Path:
    """Write the file of a step and return its path.

    Args:
        run: folder of the run.
        data: what the batch was made of.
        settings: how many sequences a step has.
        step: counted from 1.
        result: of the step.
    """
    size = settings.batch_size * settings.gradient_accumulation_steps
    samples = range((step - 1) * size, step * size)
    path = run / "bad_batches" / f"{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: str(result.metrics[name]) for name in ("loss", "gradient_norm")}  # JSON has no NaN
    write_json(path, {"step": step, **facts, "sequences": [data.origin(sample) for sample in samples]})
    return path
