"""`search_quality`: order of searches, the share of the gain that is kept, and stored measurements."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Budget
from benchmarks.quality import search_quality
from benchmarks.quality.search_quality import RunResults, kept, measure_run, searches, table_of
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from retro.checkpoints.checkpoint import open_checkpoint
from retro.evaluation.bits_per_byte import SetResult
from tests.conftest import build_local, tiny_config


def test_kept_share_is_1_for_exact_neighbors_0_for_off_and_between_by_bits() -> None:
    def result(*nats: float) -> SetResult:
        return SetResult("valid", 2, 10, 0.0, np.array(nats), np.array([5.0, 5.0]))

    off, half, exact = result(10, 20), result(9, 18), result(8, 16)
    assert kept(off, exact, exact) == (1, 1, 1)
    assert kept(off, off, exact) == (0, 0, 0)
    assert kept(off, half, exact) == (0.5, 0.5, 0.5)
    share, low, high = kept(off, result(8, 20), exact)
    assert share == pytest.approx(1 / 3)  # of 6 nats 2 are kept, all of them in the first document
    assert (low, high) == (0, 1)


def test_searches_are_ordered_by_recall_and_measurements_are_stored(
    tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    copying = replace(config.model.copy_head, neighbors=True)
    config = replace(
        config,
        index=replace(config.index, factory="IVF32,Flat"),
        neighbors=replace(config.neighbors, stored=8),
        model=replace(config.model, copy_head=copying),
    )
    build_local(config)
    found = searches(config.datastore, (0.9, 0.1), (1,))
    names = [each.name for each in found]
    assert (names[0], names[-3:]) == ("exact", ["1 list", "1 list, not re-ranked", "random"])
    recalls = [each.recall[0] for each in found]
    assert recalls[0] == 1
    assert recalls[:-2] == sorted(recalls[:-2], reverse=True)
    assert recalls[-2] <= recalls[-3] < 1

    (tmp_path / "run.toml").write_text(to_toml(config))
    assert main(["train", str(tmp_path / "run.toml"), "--train.steps", "2"]) == 0
    checkpoint = open_checkpoint(config.run)
    results = RunResults(tmp_path / "out", checkpoint, 0)
    measure_run(results, found, (2,), Budget(math.inf))
    again = RunResults(tmp_path / "out", checkpoint, 0)
    monkeypatch.setattr(search_quality, "Evaluator", pytest.fail)
    measure_run(again, found, (2,), Budget(math.inf))
    rows = table_of(again, found, (2,)).rows
    assert [row[0] for row in rows] == names
    assert rows[0][-1] == "100.0% (100.0% to 100.0%)"
    random, off = again.get("random", 2), again.get("OFF", 0)
    assert random is not None
    assert off is not None
    assert random.bytes == off.bytes


def test_an_index_without_lists_is_refused(tiny_datastore) -> None:
    with pytest.raises(InputError, match="no inverted lists"):
        searches(tiny_datastore.folder, (0.9,), ())
