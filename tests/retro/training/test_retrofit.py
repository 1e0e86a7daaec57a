"""Runs that train a part of a model: initial weights, frozen weights, checkpoints and resuming."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.config import Config
from retro.adapters.adapters import RETRIEVAL, is_adapter
from retro.adapters.settings import NO_LORA, LoraSettings
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.checkpoints.checkpoint import Checkpoint
from retro.checkpoints.single_file import export
from retro.checkpoints.tensor_files import index, read_tensors
from retro.device import choose_placement
from retro.huggingface.import_folder import import_base, read_base
from retro.model_settings import ModelSettings, updated
from retro.training.trainer import Outcome, train
from tests.conftest import tiny_config
from tests.retro.small_model import Together
from tests.retro.training.runs import interrupt_after

LORA = LoraSettings(rank=2, alpha=8.0, dropout=0.1)
PREFIX = updated(ModelSettings(preset="base", chunk_length=16), {"attention.prefix_tokens": 3})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    """Four steps with one evaluation at the end."""
    config = replace(tiny_config(tmp_path_factory.mktemp("retrofit"), tiny_corpus), datastore=tiny_datastore.folder)
    return replace(config, train=replace(config.train, steps=4, warmup_steps=1, eval_every=4, checkpoint_every=2))


def run(config: Config, folder: Path, start: Path | str = "", lora: LoraSettings = NO_LORA, **options: Any) -> Outcome:
    """Train in `folder`, initialized from a checkpoint; by default a RETROfit."""
    advance: Callable[[int], None] = options.pop("advance", lambda _: None)
    model = options.pop("model", ModelSettings(preset="base", chunk_length=16))
    settings = replace(config.train, **{"init_from": str(start), "weights": "retrieval", "lr": 1e-2, **options})
    config = replace(config, model=model, train=settings, lora=lora)
    return train(folder, config.run_settings, advance=advance)


def test_a_retrofit_without_neighbors_is_refused(config: Config, tmp_path: Path) -> None:
    off = replace(config, data=replace(config.data, k=0))
    with pytest.raises(InputError, match=r"data\.k = 0.*train\.weights = 'retrieval'"):
        run(off, tmp_path / "off", "any")


@pytest.fixture(scope="module")
def base(config: Config) -> Checkpoint:
    """A plain decoder."""
    outcome = run(config, config.run, weights="all", model=updated(config.model, {"retrieval.cca_layers": ()}))
    return checkpoints.open_checkpoint(outcome.checkpoint)


@pytest.fixture(scope="module")
def retro(config: Config, base: Checkpoint) -> Checkpoint:
    """The base with trained encoder and cross-attention."""
    return checkpoints.open_checkpoint(run(config, config.run.with_name("retro"), base.path).checkpoint)


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return read_tensors(index(checkpoint.weights))


@torch.no_grad()
def logits_off(checkpoint: Checkpoint) -> Tensor:
    """Logits without retrieval."""
    return checkpoints.load_model(checkpoint, torch.device("cpu"))(Inputs(torch.arange(64)[None]))


def files(outcome: Outcome) -> list[bytes]:
    return [(outcome.checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def test_retrofitting_changes_no_weight_of_the_base_and_no_logit_off(base: Checkpoint, retro: Checkpoint) -> None:
    before, after = tensors(base), tensors(retro)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name for name in after if name.startswith(RETRIEVAL)} == set(after) - set(before)
    assert torch.equal(logits_off(base), logits_off(retro))
    moments = {name.partition("/")[2] for name in index(retro.training) if "/" in name}
    assert moments == set(after) - set(before)
    assert retro.settings["train"]["weights"] == "retrieval"
    assert retro.started_from == base.fingerprint


def check_added(before: Checkpoint, after: Checkpoint, prefixes: tuple[str, ...]) -> None:
    """The base's weights and its logits OFF are unchanged to the bit; ON differs; only weights with the prefixes are new."""
    old, new = tensors(before), tensors(after)
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())
    assert {name for name in new if name not in old} == {name for name in new if name.startswith(prefixes)}
    assert torch.equal(logits_off(before), logits_off(after))
    model, neighbors = (
        checkpoints.load_model(after, torch.device("cpu")),
        torch.arange(4 * 2 * 32).view(1, 4, 2, 32) % 60,
    )
    with torch.no_grad():
        assert not torch.allclose(
            model(Inputs(torch.arange(64)[None], neighbors=neighbors)), logits_off(before), atol=1e-3
        )


@pytest.mark.parametrize(("own_context", "alone"), [(False, True), (True, False)])
def test_a_retrofit_with_a_copy_head_keeps_the_base(
    config: Config, tmp_path: Path, own_context: bool, alone: bool
) -> None:
    plain = updated(config.model, {"retrieval.cca_layers": (), "copy_head.context": own_context})
    base = run(config, tmp_path / "base", weights="all", model=plain)
    without = {"retrieval.cca_layers": ()} if alone else {}
    copying = updated(ModelSettings(preset="base"), {"copy_head.neighbors": True} | without)
    outcome = run(config, tmp_path / "retro", base.checkpoint, model=copying)
    before, after = map(checkpoints.open_checkpoint, (base.checkpoint, outcome.checkpoint))
    check_added(before, after, ("copy_head.neighbors.",) if alone else RETRIEVAL)
    off = [line["valid_bits_per_byte_off"] for each in (base, outcome) for line in each.metrics[-1:]]
    assert off[0] == off[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_retrofit_of_an_imported_model_keeps_the_base(config: Config, tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    from tests.retro.huggingface.small_bases import make, save

    folder, file = save(make(family, vocab_size=400), tmp_path / "folder"), tmp_path / "base.safetensors"
    import_base(read_base(folder), file)
    copying = updated(ModelSettings(preset="base", chunk_length=16), {"copy_head.neighbors": True})
    outcome = run(config, tmp_path / "retro", file, model=copying)
    check_added(*map(checkpoints.open_checkpoint, (file, outcome.checkpoint)), RETRIEVAL)


def test_a_retrofit_without_cross_attention_leaves_out_that_of_the_base(
    config: Config, retro: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    copying = updated(ModelSettings(preset="base"), {"copy_head.neighbors": True, "retrieval.cca_layers": ()})
    outcome = run(config, tmp_path / "run", retro.path, model=copying)
    after = checkpoints.open_checkpoint(outcome.checkpoint)
    assert torch.equal(logits_off(after), logits_off(retro))
    assert not [name for name in tensors(after) if name.startswith(("encoder.", "cross."))]
    assert "left out: " in caplog.text


def test_preset_base_combines_the_bases_decoder_with_default_retrieval(base: Checkpoint, retro: Checkpoint) -> None:
    found = retro.model
    assert replace(found, encoder=base.model.encoder, retrieval=base.model.retrieval) == base.model
    assert (found.retrieval.cca_layers, found.encoder.d_model, found.encoder.num_layers, found.preset) == (
        (2,),
        32,
        2,
        "",
    )


def test_a_frozen_decoder_reads_neighbors_in_every_sequence(config: Config, base: Checkpoint, tmp_path: Path) -> None:
    """Sequences without retrieval would teach nothing, so retrieval_dropout has no effect on the losses."""
    runs = []
    for share in (0.0, 0.9):
        dropped = replace(config, data=replace(config.data, retrieval_dropout=share))
        runs.append(run(dropped, tmp_path / str(share), base.path))
    losses = [[line["loss"] for line in outcome.metrics if "loss" in line] for outcome in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": LORA}, {"model": PREFIX, "weights": "none"}],
    ids=["retrieval", "lora", "prefix"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_without_the_initial_weights(
    config: Config, retro: Checkpoint, tmp_path: Path, options: dict[str, Any]
) -> None:
    start = tmp_path / "start.safetensors"
    export(retro, start)
    straight = run(config, tmp_path / "straight", start, **options)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", start, **options, advance=interrupt_after(3 * 2 * 64))
    start.unlink()
    assert files(run(config, tmp_path / "stopped", start, **options)) == files(straight)


@pytest.fixture(scope="module")
def adapted(config: Config, retro: Checkpoint) -> Checkpoint:
    """The model with a trained adapter."""
    outcome = run(config, config.run.with_name("lora"), retro.path, LORA)
    return checkpoints.open_checkpoint(outcome.checkpoint)


def test_adapter_weights_are_saved_separately_and_loaded_with_the_model(retro: Checkpoint, adapted: Checkpoint) -> None:
    beside = {name for name in tensors(adapted) if is_adapter(name)}
    assert beside
    assert set(tensors(adapted)) - beside == set(tensors(retro))
    assert (adapted.lora, adapted.settings["train"]["weights"]) == (LORA, "retrieval")
    before, after = tensors(retro), tensors(adapted)
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith(RETRIEVAL))
    assert not torch.allclose(logits_off(adapted), logits_off(retro), atol=1e-3)


def test_exporting_merges_lora(config: Config, adapted: Checkpoint, tmp_path: Path) -> None:
    export(adapted, tmp_path / "model.safetensors")
    exported = checkpoints.open_checkpoint(tmp_path / "model.safetensors")
    assert torch.equal(logits_off(exported), logits_off(adapted))
    assert exported.lora == NO_LORA
    assert not any(map(is_adapter, tensors(exported)))
    still = {"weights": "all", "lr": 1e-30, "weight_decay": 0.0}
    outcome = run(config, tmp_path / "run", tmp_path / "model.safetensors", **still)
    assert torch.equal(logits_off(checkpoints.open_checkpoint(outcome.checkpoint)), logits_off(adapted))


def test_another_run_continues_an_adapter_and_rejects_another_rank(
    config: Config, adapted: Checkpoint, tmp_path: Path
) -> None:
    still = {"lr": 1e-30, "weight_decay": 0.0}
    found = checkpoints.open_checkpoint(run(config, tmp_path / "on", adapted.path, adapted.lora, **still).checkpoint)
    assert all(torch.equal(tensors(found)[name], tensor) for name, tensor in tensors(adapted).items())
    with pytest.raises(InputError, match=r"has lora\.rank = 2, this run 0"):
        run(config, tmp_path / "without", adapted.path)
    assert not (tmp_path / "without").exists()


@pytest.fixture(scope="module")
def prefixed(config: Config, retro: Checkpoint) -> Checkpoint:
    """The model with a trained prefix."""
    outcome = run(config, config.run.with_name("prefix"), retro.path, model=PREFIX, weights="none")
    return checkpoints.open_checkpoint(outcome.checkpoint)


def test_only_a_prefix_is_trained_and_it_stays_part_of_the_exported_model(
    retro: Checkpoint, prefixed: Checkpoint, tmp_path: Path
) -> None:
    before, after = tensors(retro), tensors(prefixed)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name for name in after if name not in before} == {name for name in after if is_adapter(name)}
    assert {name.partition("/")[2] for name in index(prefixed.training) if "/" in name} == set(after) - set(before)
    export(prefixed, tmp_path / "model.safetensors")
    exported = checkpoints.open_checkpoint(tmp_path / "model.safetensors")
    assert torch.equal(logits_off(exported), logits_off(prefixed))
    assert not torch.allclose(logits_off(prefixed), logits_off(retro), atol=1e-3)


def test_another_run_continues_a_prefix_and_rejects_another_length(
    config: Config, prefixed: Checkpoint, tmp_path: Path
) -> None:
    still = {"weights": "none", "lr": 1e-30}
    found = run(config, tmp_path / "on", prefixed.path, model=PREFIX, **still)
    assert torch.equal(logits_off(checkpoints.open_checkpoint(found.checkpoint)), logits_off(prefixed))
    with pytest.raises(InputError, match=r"has model\.attention\.prefix_tokens = 3, this model 5: set it to 3"):
        run(config, tmp_path / "longer", prefixed.path, model=updated(PREFIX, {"attention.prefix_tokens": 5}), **still)
    assert not (tmp_path / "longer").exists()


@pytest.mark.parametrize("kind", ["adapted", "prefixed"])
def test_cached_decoding_uses_the_adapter(kind: str, request: pytest.FixtureRequest) -> None:
    model, tokens = checkpoints.load_model(request.getfixturevalue(kind), torch.device("cpu")), torch.arange(40)
    decoder = Together(model, choose_placement("cpu", "float32"), 64)
    found = [decoder.read([part])[0] for part in (tokens[:30].numpy(), *tokens[30:, None].numpy())]
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(found), model(Inputs(tokens[None]))[0, 29:], rtol=1e-4, atol=1e-4)


def test_impossible_retrofits_are_rejected_with_their_keys(config: Config, base: Checkpoint, tmp_path: Path) -> None:
    for words, options in [
        (r"train\.weights = 'retrieval'.*train\.init_from", {}),
        (r"model\.preset = 'base'.*train\.init_from", {"weights": "all"}),
        (r"model\.d_model = 48 and model\.preset = 'base'", {"d_model": 48}),
        (r"model\.retrieval\.cca_layers = \(2, 5\).*model\.num_layers = 3", {"retrieval.cca_layers": (2, 5)}),
        (r"train\.weights = 'retrieval'.*model\.retrieval\.cca_layers", {"retrieval.cca_layers": ()}),
        (
            r"lacks weights.*'none' does not train: cross\.2\.",
            {"weights": "none", "lora": LORA},
        ),
    ]:
        trained = {key: options.pop(key) for key in ("weights", "lora") if key in options}
        model = updated(ModelSettings(preset="base", chunk_length=16), options)  # type: ignore[arg-type]
        start = "" if "init_from" in words else base.path
        with pytest.raises(InputError, match=words):
            run(config, tmp_path / "refused", start, model=model, **trained)
    assert not (tmp_path / "refused").exists()
