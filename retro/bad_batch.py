"""Which text a batch was made of, when its loss or gradient was not finite.

    RUN/bad_batches/00000137.json   step, loss, gradient norm; of each sequence: sample number, datastore, chunks, documents

The file of a step is the same however often a run comes by, so going on from a checkpoint before it changes nothing.
"""

from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.files import write_json
from retro.batches import TrainingData
from retro.step import StepResult
from retro.train_settings import TrainSettings


def name_batch(run: Path, data: TrainingData, settings: TrainSettings, step: int, result: StepResult) -> Path:
    """Write the file of a step and return its path.

    Args:
        run: folder of the run.
        data: what the batch was made of.
        settings: how many sequences a step has.
        step: counted from 1.
        result: of the step.
    """
    size = settings.batch_size * settings.accumulation
    samples = range((step - 1) * size, step * size)
    path = run / "bad_batches" / f"{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: str(result.metrics[name]) for name in ("loss", "gradient_norm")}  # JSON has no NaN
    write_json(path, {"step": step, **facts, "sequences": [sequence_of(data, sample) for sample in samples]})
    return path


def sequence_of(data: TrainingData, sample: int) -> dict[str, Any]:
    """Where the sequence of a sample number lies: its datastore, chunks [first, stop), and documents in order.

    The ids of documents stand in Parquet files; where pyarrow is missing, as training needs none, they are None.
    """
    chosen, (first, stop) = data.locate(sample)
    datastore = data.datastores[chosen]
    numbers = np.unique(datastore.train.documents_of(np.arange(first, stop))[0]).tolist()
    try:
        ids = [row["id"] for row in datastore.train.metadata(numbers)]
    except ImportError:
        ids = None
    return {
        "sample": sample,
        "datastore": str(datastore.folder),
        "chunks": [first, stop],
        "document_numbers": numbers,
        "document_ids": ids,
    }
