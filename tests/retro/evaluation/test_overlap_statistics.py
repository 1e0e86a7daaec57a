"""Overlap statistics equal direct computations."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from indexing.store.datastore import Datastore
from retro.evaluation import overlap_statistics as module
from retro.evaluation.leakage import leakage_of
from retro.evaluation.overlap_statistics import overlap_statistics
from retro.evaluation.sets import EvaluationSet


@pytest.fixture(scope="module")
def sourced(tiny_datastore: Datastore, tmp_path_factory: pytest.TempPathFactory) -> EvaluationSet:
    """The tiny datastore with source `even` or `odd` for each document, by the number in its id."""
    folder = shutil.copytree(tiny_datastore.folder, tmp_path_factory.mktemp("sourced") / "datastore")
    for path in folder.glob("chunks/*/*/documents.parquet"):
        table = pyarrow.parquet.read_table(path)
        names = [("even", "odd")[int(each.removeprefix("doc-")) % 2] for each in table["id"].to_pylist()]
        place = table.column_names.index("source")
        pyarrow.parquet.write_table(table.set_column(place, "source", pyarrow.array(names)), path)
    return EvaluationSet("valid", Datastore.open(folder))


def test_the_distribution_equals_that_of_the_chunks(sourced: EvaluationSet) -> None:
    ids = np.arange(sourced.split.num_chunks)
    leakage = leakage_of(sourced, ids, 3)
    found = overlap_statistics(sourced, ids, leakage, 3)
    assert (found.chunks, found.neighbors) == (len(ids), 3)
    assert found.mean == pytest.approx(leakage.mean())
    assert found.median == pytest.approx(np.median(leakage))
    assert sum(found.share_of_chunks) == pytest.approx(1)
    low, high = found.edges[4], found.edges[5]
    assert found.share_of_chunks[4] == pytest.approx(((leakage >= low) & (leakage < high)).mean())
    assert found.share_of_chunks[-1] == pytest.approx((leakage >= found.edges[-2]).mean())
    nearest = sourced.split.neighbor_distances.read(0, len(ids))[:, 0]
    assert found.nearest_distance == pytest.approx(nearest.mean(), rel=1e-5)
    assert found.without_neighbors == 0


@pytest.mark.parametrize("block", [13, 65_536])
def test_sources_are_compared_by_document(sourced: EvaluationSet, block: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_CHUNKS", block)
    ids = np.arange(sourced.split.num_chunks)
    found = overlap_statistics(sourced, ids, np.zeros(len(ids)), 3)
    train, valid = sourced.datastore.train, sourced.split
    near = valid.neighbor_ids.read(0, len(ids))[:, :3]

    def parity(split, chunk: int) -> int:
        (row,) = split.metadata([int(split.documents_of(np.array([chunk]))[0][0])])
        return int(row["id"].removeprefix("doc-")) % 2

    same = np.array([[parity(train, each) == parity(valid, number) for each in near[number]] for number in ids])
    assert (found.source_column, found.sources) == ("source", 2)
    assert found.nearest_of_same_source == pytest.approx(same[:, 0].mean())
    assert found.any_of_same_source == pytest.approx(same.any(1).mean())
    assert 0 < found.nearest_of_same_source < found.any_of_same_source


def test_missing_neighbors_are_counted_and_files_replace_missing_sources(
    tiny_datastore: Datastore, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_datastore.folder, tmp_path / "datastore"))
    rows = 0
    for name, nothing in (("ids", -1), ("distances", np.inf)):
        path = folder / "neighbors" / "00000" / "valid" / f"{name}.npy"
        array = np.load(path)
        rows = len(array)
        np.save(path, np.full_like(array, nothing))
    held_out = EvaluationSet("valid", Datastore.open(folder))
    ids = np.arange(held_out.split.num_chunks)
    found = overlap_statistics(held_out, ids, leakage_of(held_out, ids, 3), 3)
    assert found.without_neighbors == pytest.approx(rows / len(ids))
    assert found.source_column == "file"
    assert found.any_of_same_source == pytest.approx(1 - rows / len(ids))
    only = overlap_statistics(held_out, ids[:rows], np.zeros(rows), 3)
    assert only.nearest_distance is None
    assert only.nearest_of_same_source == 0
