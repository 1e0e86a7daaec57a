"""Batches are equal with memory mapping, with ranged reads and with materialized neighbors."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.store.retrieval_set import RetrievalSet
from pipelines.config import Config
from retro.batch.inputs import Inputs
from retro.data.batches import TrainingData
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.data.windows import document_windows, window_batches
from tests.conftest import build_local, tiny_config, write_corpus

WAYS = ({"reading": "pread"}, {"materialized": True}, {"reading": "pread", "materialized": True})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Config:
    """The tiny datastore with three of six stored neighbors materialized. Do not modify."""
    config = tiny_config(tmp_path_factory.mktemp("materialized"), tiny_corpus)
    config = replace(config, neighbors=replace(config.neighbors, materialized=3))
    build_local(config)
    return config


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A smaller datastore whose max_overlap leaves many neighbors missing. Do not modify."""
    folder = tmp_path_factory.mktemp("starved")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 40))
    config = replace(config, neighbors=replace(config.neighbors, materialized=3, max_overlap=0.05))
    build_local(config)
    return config


def batches_are_equal(one: Inputs, other: Inputs) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 2},
        {"k": 3},
        {"k": 5},
        {"k": 2, "max_overlap": 0.3},
        {"k": 2, "neighbor_source": "random"},
        {"k": 2, "neighbor_source": "random", "max_overlap": 0.3},
    ],
)
def test_batches_are_equal_for_every_way_of_reading(config: Config, sparse: Config, changes: dict) -> None:
    settings = DataSettings(sequence_length=64, **changes)
    for folders in ([config.datastore] * 2, [sparse.datastore]):
        mapped = TrainingData(folders, settings, retrieval=True)
        for way in WAYS:
            other = TrainingData(folders, replace(settings, **way), retrieval=True)
            for first in range(0, 80, 8):
                samples = range(first, first + 8)
                assert batches_are_equal(
                    mapped.batch(samples, retrieval_dropout=0.2), other.batch(samples, retrieval_dropout=0.2)
                )


def test_held_out_documents_have_materialized_neighbors(config: Config) -> None:
    datastore = Datastore.open(config.datastore)
    wanted, retrieval = list(document_windows(datastore.valid, 4, 2)), RetrievalSet.of(datastore)
    uses = [NeighborUse(4, materialized=materialized) for materialized in (False, True)]
    batches = [list(window_batches(datastore.valid, retrieval, wanted, 3, use)) for use in uses]
    assert all(batches_are_equal(one[1], other[1]) for one, other in zip(*batches, strict=True))


def test_the_first_stored_neighbors_are_materialized(sparse: Config) -> None:
    train = Datastore.open(sparse.datastore).train
    ids = train.neighbor_ids.read(0, train.num_chunks)[:, :3]
    assert 0 < (ids < 0).mean() < 1  # some are missing
    tokens, lengths = train.with_continuation(ids.ravel())
    assert np.array_equal(train.materialized_tokens.read(0, train.num_chunks).reshape(tokens.shape), tokens)
    assert np.array_equal(train.materialized_lengths.read(0, train.num_chunks).ravel(), lengths)
    assert train.materialized_tokens.shard(0).dtype == train.tokens.shard(0).dtype


def test_materialization_avoids_most_random_reads(config: Config, monkeypatch) -> None:
    """Nearly all neighbor text is read from next to the chunk."""
    settings = DataSettings(sequence_length=2048, k=2, materialized=True)
    data, elsewhere = TrainingData([config.datastore], settings, retrieval=True), []
    read = RetrievalSet.with_continuation

    def counting(self: RetrievalSet, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        elsewhere.append(int((ids >= 0).sum()))
        return read(self, ids)

    monkeypatch.setattr(RetrievalSet, "with_continuation", counting)
    lengths = data.batch(range(20)).neighbor_lengths
    assert lengths is not None
    assert 0 < sum(elsewhere) < 0.15 * (lengths > 0).sum()


def test_materialization_changes_no_other_file(config: Config, tiny_datastore: Datastore) -> None:
    datastore = Datastore.open(config.datastore)
    assert datastore.fingerprint == tiny_datastore.fingerprint  # a run may resume with or without it
    stages = {**datastore.manifest["fingerprints"]}
    assert stages.pop("materialize")
    assert stages == tiny_datastore.manifest["fingerprints"]
    for path in tiny_datastore.folder.glob("neighbors/**/*.*"):
        assert path.read_bytes() == (config.datastore / path.relative_to(tiny_datastore.folder)).read_bytes()


def test_changing_the_number_of_materialized_neighbors_is_rejected(config: Config, tiny_corpus) -> None:
    with pytest.raises(InputError, match=r"neighbors\.materialized was 3, now 2(.|\n)*--stage materialize --rebuild"):
        build_local(replace(config, neighbors=replace(config.neighbors, materialized=2)))
    none = replace(config, neighbors=replace(config.neighbors, materialized=0))
    build_local(none)  # keeps the existing ones
    assert Datastore.open(config.datastore).has("materialize")
    with pytest.raises(InputError, match=r"neighbors\.materialized = 0"):
        build_local(none, only="materialize")
    with pytest.raises(InputError, match=r"neighbors\.materialized = 9: .*neighbors\.stored = 6"):
        replace(config.neighbors, materialized=9)


def test_reading_missing_materialized_neighbors_is_rejected(tiny_datastore: Datastore) -> None:
    settings = DataSettings(sequence_length=64, materialized=True)
    with pytest.raises(InputError, match=r"data\.materialized.*neighbors\.materialized.*--stage materialize"):
        TrainingData([tiny_datastore.folder], settings, retrieval=True)
    TrainingData([tiny_datastore.folder], settings, retrieval=False)  # a baseline reads no neighbors


def test_rebuilding_neighbors_removes_materialized_ones(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    config = replace(config, neighbors=replace(config.neighbors, materialized=2))
    build_local(config)
    again = replace(config, neighbors=replace(config.neighbors, stored=4))
    build_local(again, only="neighbors", rebuild=True)
    assert not Datastore.open(config.datastore).has("materialize")
    assert not list((config.datastore / "materialized").iterdir())
    build_local(again)
    assert Datastore.open(config.datastore).has("materialize")
    manifest = read_json(config.datastore / "materialized" / "00000" / "manifest.json")
    assert manifest["counts"]["train"]["chunks"] == Datastore.open(config.datastore).train.chunk_rows[0]


def test_reading_imports_only_torch_and_numpy(config: Config) -> None:
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"faiss", "ray", "pyarrow", "sentencepiece", "fsspec", "s3fs", "zstandard"}}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings
for way in ({{}}, *{WAYS!r}):
    data = TrainingData([{str(config.datastore)!r}], DataSettings(sequence_length=64, **way), retrieval=True)
    print(data.batch(range(4)).neighbors.sum())
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert len(set(process.stdout.split())) == 1
