"""`retro.Dataset` has the bytes of the project's own batches in every loader, and resumes exactly."""

import json
import pickle
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import retro
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError, OutOfRange
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors, load
from retro.data.settings import DataSettings
from retro.device import Placement
from retro.model.retro import Retro

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def dataset(tiny_datastore: Datastore) -> retro.Dataset:
    return retro.Dataset(tiny_datastore.folder, sequence_length=64, num_samples=24, seed=3)


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_batches_are_those_of_the_trainer(voting_datastore: Datastore) -> None:
    folder = voting_datastore.folder
    settings = DataSettings(datastores=(folder,), sequence_length=64, k=3, seed=5, max_overlap=0.5)
    ours = load(
        TrainingData([folder], settings, retrieval=True, votes=True),
        batches=range(6),
        batch_size=4,
        rows=range(4),
        retrieval_dropout=0.0,
        workers=0,
        placement=Placement(torch.device("cpu"), torch.float32),
    )
    dataset = retro.Dataset(folder, sequence_length=64, k=3, seed=5, max_overlap=0.5, votes=True)
    for expected, batch in zip(ours, DataLoader(dataset, batch_size=4), strict=False):
        inputs = Inputs(**batch)
        for name, value in expected._asdict().items():
            if value is not None:
                assert torch.equal(getattr(inputs, name), value), name
                assert getattr(inputs, name).dtype == torch.int64
        if expected.documents is None:
            assert (inputs.documents == inputs.documents[:, :1]).all()


def test_a_sample_depends_only_on_its_number(tiny_datastore: Datastore) -> None:
    """Also with several datastores, without neighbors in a part of the samples, and with other neighbors in each pass."""
    dataset = retro.Dataset(
        [tiny_datastore.folder] * 2,
        sequence_length=64,
        weights=(1, 3),
        retrieval_dropout=0.4,
        neighbor_source="random",
        num_samples=2000,
    )
    numbers = [3, 1999, 0, 512, 3]
    assert_equal(dataset.__getitems__(numbers), [dataset[number] for number in numbers])
    absent = sum(not dataset[number]["neighbor_lengths"].any() for number in range(100))
    assert 20 < absent < 60
    settings = DataSettings((tiny_datastore.folder,) * 2, (1, 3), sequence_length=64, neighbor_source="random")
    data = TrainingData([tiny_datastore.folder] * 2, settings, retrieval=True)
    expected = as_tensors(data.batch(range(8), 0.4))
    for name in ("tokens", "labels", "neighbors", "neighbor_lengths", "lengths"):
        assert torch.equal(torch.stack([dataset[number][name] for number in range(8)]), getattr(expected, name))


def test_the_default_length_is_one_pass_with_every_chunk_at_most_once(tiny_datastore: Datastore) -> None:
    dataset = retro.Dataset(tiny_datastore.folder, sequence_length=64, k=0)
    train = tiny_datastore.train
    assert len(dataset) == train.num_chunks // 4
    assert "neighbors" not in dataset[0]
    chunks = Counter(map(tuple, torch.cat([sample["tokens"] for sample in dataset]).view(-1, 16).tolist()))
    stored = Counter(map(tuple, train.tokens.read(0, train.num_chunks).tolist()))
    assert chunks <= stored
    assert 0 <= (stored - chunks).total() < 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_give_the_batches_of_this_process(start: str, dataset: retro.Dataset) -> None:
    here = list(DataLoader(dataset, batch_size=5))
    there = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=start)
    assert_equal(list(there), here)


def test_labels_of_transformers_are_the_tokens_that_are_predicted(tiny_datastore: Datastore) -> None:
    options: dict[str, Any] = {"sequence_length": 64, "seed": 1}
    for number, theirs in enumerate(retro.Dataset(tiny_datastore.folder, layout="transformers", **options)):
        own = retro.Dataset(tiny_datastore.folder, **options)[number]
        assert torch.equal(theirs["input_ids"], own["tokens"])
        assert torch.equal(theirs["labels"][1:], own["labels"][:-1])
        predicted = theirs["labels"] != IGNORED_LABEL
        assert torch.equal(theirs["labels"][predicted], theirs["input_ids"][predicted])
        assert not predicted[0]
        assert "tokens" not in theirs
        if number == 5:
            break


def test_a_model_of_the_project_takes_a_batch(dataset: retro.Dataset, tiny_model: Retro) -> None:
    inputs = Inputs(**next(iter(DataLoader(dataset, batch_size=3))))
    losses = tiny_model.token_losses(inputs)
    assert losses.shape == inputs.labels.shape
    assert losses[inputs.labels >= 0].min() > 0


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_continues_with_the_next_sample(workers: int, dataset: retro.Dataset) -> None:
    whole = list(DataLoader(dataset, batch_size=4))
    state = json.loads(json.dumps(dataset.state_dict(samples=2 * 4)))
    resumed = pickle.loads(pickle.dumps(dataset))
    resumed.load_state_dict(state)
    assert len(resumed) == len(dataset) - 8
    assert_equal(list(DataLoader(resumed, batch_size=4, num_workers=workers)), whole[2:])
    assert resumed.state_dict() == state
    assert torch.equal(resumed[-1]["tokens"], dataset[-1]["tokens"])


class StatefulLoader:
    """A loader as torchdata's StatefulDataLoader: it counts batches, skips them again, and keeps the dataset's state.

    torchtitan checkpoints such a loader. The real one calls the dataset in a worker.
    """

    def __init__(self, dataset: retro.Dataset, size: int) -> None:
        self.dataset, self.size, self.yielded, self.skipped = dataset, size, 0, 0

    def __iter__(self):
        self.yielded, self.skipped = self.skipped, 0
        for batch in DataLoader(self.dataset, self.size, sampler=range(self.yielded * self.size, len(self.dataset))):
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["yielded"]
        self.dataset.load_state_dict(state["dataset"])


def stateful_loaders() -> list[Any]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return [StatefulLoader]
    return [StatefulLoader, StatefulDataLoader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("kind", stateful_loaders())
@pytest.mark.parametrize("first", [0, 4])
def test_a_stateful_loader_continues_with_the_next_batch(kind: Any, first: int, tiny_datastore: Datastore) -> None:
    """Also one over a dataset that had been resumed itself: no sample is skipped twice."""

    def loader(start: int) -> Any:
        dataset = retro.Dataset(tiny_datastore.folder, sequence_length=64, num_samples=24)
        dataset.load_state_dict(dataset.state_dict(start))
        return kind(dataset, 4)

    before = loader(first)
    batches = iter(before)
    for _ in range(2):
        next(batches)
    state = json.loads(json.dumps(before.state_dict())) if kind is StatefulLoader else before.state_dict()
    after = loader(0)
    after.load_state_dict(state)
    assert_equal(list(after), list(loader(first))[2:])


def test_a_state_of_other_data_or_settings_is_refused_by_name(
    dataset: retro.Dataset, tiny_datastore: Datastore
) -> None:
    other = retro.Dataset(tiny_datastore.folder, sequence_length=64, seed=4)
    with pytest.raises(InputError, match=r"seed = 4, but the state has 3"):
        other.load_state_dict(dataset.state_dict())
    with pytest.raises(InputError, match="other datastores"):
        dataset.load_state_dict(dataset.state_dict() | {"data": ["other"]})
    with pytest.raises(InputError, match="lacks data, settings"):
        dataset.load_state_dict({"samples": 3})  # type: ignore[typeddict-item]
    with pytest.raises(InputError, match="samples = 25: must be 0 to 24"):
        dataset.state_dict(25)


def test_errors_name_the_argument(dataset: retro.Dataset, tiny_datastore: Datastore) -> None:
    for index in (24, -25):
        with pytest.raises(OutOfRange, match=f"index {index}: the dataset has 24 samples"):
            dataset[index]
    for arguments, message in (
        ({"sequence_length": 63}, "data.sequence_length = 63: must be a multiple of 16"),
        ({"k": 7}, "data.k = 7: .* stores 6 neighbors"),
        ({"k": -1}, "k = -1"),
        ({"layout": "torch"}, "layout = 'torch': accepted are retro, transformers"),
        ({"num_samples": 0}, "num_samples = 0: must be at least 1"),
        ({"votes": True}, "no finished 'votes' stage"),
    ):
        with pytest.raises(InputError, match=message):
            retro.Dataset(tiny_datastore.folder, **{"sequence_length": 64, **arguments})
    with pytest.raises(InputError, match="datastores is empty"):
        retro.Dataset([])


# --- the Trainer of transformers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_trainer_of_transformers_reads_neighbors_in_order_and_resumes(
    tmp_path: Path, tiny_datastore: Datastore, tiny_model: Retro
) -> None:
    transformers = pytest.importorskip("transformers")
    from retro.huggingface.modeling import RetroConfig, RetroForCausalLM

    dataset = retro.Dataset(tiny_datastore.folder, sequence_length=64, layout="transformers", num_samples=8)
    seen: list[Batch] = []

    class Recording(RetroForCausalLM):
        def forward(self, input_ids=None, labels=None, neighbors=None, neighbor_lengths=None, **rest):
            inputs = {"input_ids": input_ids, "labels": labels}
            seen.append({**inputs, "neighbors": neighbors, "neighbor_lengths": neighbor_lengths})
            return super().forward(**seen[-1], **rest)

    def train(resume: str | None) -> float:
        torch.manual_seed(0)
        model = Recording(RetroConfig(asdict(tiny_model.settings)))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=2,
            train_sampling_strategy="sequential",
            save_steps=2,
            num_train_epochs=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
        return float(trainer.train(resume_from_checkpoint=resume).training_loss)

    assert np.isfinite(train(None))
    whole, names = list(seen), ("input_ids", "labels", "neighbors", "neighbor_lengths")
    assert_equal(whole, [{name: batch[name] for name in names} for batch in DataLoader(dataset, batch_size=2)])
    seen.clear()
    train(str(tmp_path / "run" / "checkpoint-2"))
    assert_equal(seen, whole[2:])
