"""Initialization from trained weights: shared weights are copied bit for bit, others are rejected by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from pipelines.config import Config
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.single_file import export
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.training.initial_weights import load_initial_weights
from retro.training.trainer import train
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    return replace(tiny_config(tmp_path_factory.mktemp("start"), tiny_corpus), datastore=tiny_datastore.folder)


@pytest.fixture(scope="module")
def retro(config: Config) -> Checkpoint:
    return trained(config)


@pytest.fixture(scope="module")
def baseline(config: Config) -> Checkpoint:
    return trained(
        replace(config, run=config.run.with_name("baseline"), model=updated(config.model, {"retrieval.cca_layers": ()}))
    )


def trained(config: Config) -> Checkpoint:
    outcome = train(config.run, config.run_settings)
    return checkpoints.open_checkpoint(outcome.checkpoint)


def weights_before_and_after(
    checkpoint: Checkpoint, settings: ModelSettings
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a model before and after initialization from a checkpoint."""
    torch.manual_seed(1)
    model = Retro(settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_initial_weights(checkpoint, model, checkpoint.datastores)
    return before, model.state_dict()


def saved_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoints.load_model(checkpoint, torch.device("cpu")).state_dict()


def test_weights_are_copied_from_a_run_and_from_an_exported_file(retro: Checkpoint, tmp_path: Path) -> None:
    export(retro, tmp_path / "retro.safetensors")
    for source in (retro, checkpoints.open_checkpoint(tmp_path / "retro.safetensors")):
        _, after = weights_before_and_after(source, retro.model)
        assert all(torch.equal(after[name], tensor) for name, tensor in saved_weights(retro).items())


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True])
def test_new_retrieval_starts_as_off(baseline: Checkpoint, retro: Checkpoint, shared: bool) -> None:
    model = Retro(replace(retro.model, shared_embeddings=shared)).eval()
    load_initial_weights(baseline, model, baseline.datastores)
    tokens, neighbors = torch.arange(32)[None], torch.arange(2 * 2 * 8).view(1, 2, 2, 8)
    assert torch.equal(model(Inputs(tokens, neighbors=neighbors)), model(Inputs(tokens)))


def test_a_retro_starts_from_a_baseline_and_logs_the_random_weights(
    retro: Checkpoint, baseline: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before, after = weights_before_and_after(baseline, retro.model)
    weights = saved_weights(baseline)
    for name, tensor in after.items():
        reads = name.startswith("cross.") and name.endswith(".o_proj.weight")
        expected = torch.zeros_like(tensor) if reads else weights.get(name, before[name])
        assert torch.equal(tensor, expected), name
    drawn = [name for name in after if name not in weights]
    assert drawn
    assert all(name.startswith(("encoder.", "cross.")) for name in drawn)
    assert f"drawn at random: {', '.join(drawn)}" in caplog.text


def test_a_baseline_starts_from_a_retro_without_its_encoder(retro: Checkpoint, baseline: Checkpoint) -> None:
    _, after = weights_before_and_after(retro, baseline.model)
    assert all(torch.equal(tensor, saved_weights(retro)[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"d_ffw": 32},
            [r"feed_forward\.0\.block\.up_proj\.weight", r"\[64, 32\] there and \[32, 32\]", "retro inspect"],
        ),
        ({"vocab_size": 17}, [r"embedding\.weight", r"\[17, 32\] in this model"]),
        ({"num_layers": 2, "retrieval.cca_layers": (2,)}, [r"weights that this model lacks: attention\.2\."]),
        ({"attention.num_heads": 1, "attention.head_dim": 32}, [r"model\.attention\.num_heads = 2, this model 1"]),
        ({"encoder.num_heads": 2, "encoder.head_dim": 8}, [r"model\.encoder\.num_heads = 1, this model 2"]),
        ({"attention.positions": "alibi"}, [r"model\.attention\.positions = 'rope', this model 'alibi'"]),
        ({"rope.theta": 500.0}, [r"model\.rope\.theta = 10000\.0, this model 500\.0"]),
        ({"norm": "layer"}, [r"model\.norm = 'rms', this model 'layer'"]),
    ],
)
def test_incompatible_weights_are_rejected_with_their_name(retro: Checkpoint, change, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        weights_before_and_after(retro, updated(retro.model, change))
    for pattern in words:
        assert caught.match(pattern)


@pytest.mark.parametrize(
    ("theirs", "ours", "line"), [(True, False, r"context = true\."), (False, True, r"context = false\.")]
)
def test_a_copy_head_that_one_model_lacks_is_named_with_the_line_that_switches_it(
    config: Config, tmp_path: Path, theirs: bool, ours: bool, line: str
) -> None:
    base = updated(config.model, {"copy_head.context": theirs})
    source = trained(replace(config, run=tmp_path / "base", model=base, train=replace(config.train, steps=1)))
    model = Retro(updated(source.model, {"copy_head.context": ours}))
    with pytest.raises(InputError, match=rf"copy_head\.context\..* Set model\.copy_head\.{line}"):
        load_initial_weights(source, model, source.datastores, "retrieval")


def test_a_resumed_run_does_not_need_the_initial_weights(config: Config, retro: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "start.safetensors"
    export(retro, file)
    frozen = replace(config.train, init_from=str(file), lr=1e-30, warmup_steps=0, weight_decay=0.0, steps=4)
    begun = replace(config, run=tmp_path / "run", train=frozen)
    found = trained(begun)
    assert found.started_from == retro.fingerprint
    for name, tensor in saved_weights(found).items():
        assert torch.equal(tensor, saved_weights(retro)[name]), name
    other = trained(replace(begun, run=tmp_path / "other", train=replace(frozen, init_from=str(retro.path))))
    assert other.started_from == retro.fingerprint
    file.unlink()
    assert trained(begun) == found


def test_weights_of_another_datastore_are_loaded_with_a_warning(retro: Checkpoint, caplog) -> None:
    load_initial_weights(retro, Retro(retro.model), ["another"])
    assert "check that its tokenizer is the same" in caplog.text


def test_weights_of_another_tokenizer_are_rejected(retro: Checkpoint, tiny_datastore: Datastore, caplog) -> None:
    tokenizer = tokenizer_fingerprint(tiny_datastore.folder)
    assert retro.tokenizer == tokenizer
    load_initial_weights(retro, Retro(retro.model), ["another"], tokenizer=tokenizer)
    assert "check that its tokenizer is the same" not in caplog.text
    with pytest.raises(InputError, match=r"init_from.*tokenizer.*data\.datastores"):
        load_initial_weights(retro, Retro(retro.model), ["another"], tokenizer="x")
