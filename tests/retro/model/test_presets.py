"""Presets: the paper's sizes, sizes for a CPU, and a baseline with as many parameters as the RETRO."""

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from indexing.store.errors import InputError
from retro.model.presets import PRESETS, baseline_of, count_active_parameters, count_parameters, resolve
from retro.model.retro import Retro
from retro.model_settings import (
    NO_COPY_HEAD,
    AttentionSettings,
    CopyHeadSettings,
    EncoderSettings,
    ModelSettings,
    Preset,
    RetrievalSettings,
    updated,
)


@pytest.mark.parametrize(
    ("preset", "retro", "base"),
    [("172m", 172.5, 121.1), ("425m", 425.5, 339.7), ("1.5b", 1451.4, 1208.0), ("7.5b", 7531.5, 6442.5)],
)
def test_the_papers_presets_have_the_papers_parameter_counts(preset, retro, base):
    sized = replace(PRESETS[preset], vocab_size=128, chunk_length=64)
    with torch.device("meta"):
        with_retrieval = Retro(updated(sized, {"attention.positions": "transformer-xl"}))
        without = Retro(updated(sized, {"retrieval.cca_layers": ()}))
    assert count_parameters(with_retrieval) / 1e6 == pytest.approx(retro, rel=1e-3)
    assert count_parameters(without) / 1e6 == pytest.approx(base, rel=1e-3)
    tables = 128 * (sized.d_model + sized.encoder.d_model)
    assert count_parameters(with_retrieval, embeddings=True) == count_parameters(with_retrieval) + tables


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 1), ("small", 5.5), ("base-cpu", 15)])
def test_the_cpu_presets_have_their_documented_parameter_counts(preset, millions):
    with torch.device("meta"):
        model = Retro(replace(PRESETS[preset], vocab_size=128, chunk_length=64))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.03)


def test_a_preset_sets_the_sizes_and_keeps_other_settings() -> None:
    settings = resolve(
        ModelSettings(preset="tiny", attention=AttentionSettings(positions="transformer-xl"), chunk_length=32)
    )
    assert settings == updated(PRESETS["tiny"], {"attention.positions": "transformer-xl", "chunk_length": 32})


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"preset": "huge"}, 'model.preset = "huge"'), ({"preset": "tiny", "d_model": 64}, "model.d_model = 64")],
)
def test_unknown_presets_and_sizes_next_to_a_preset_are_rejected(changes, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        resolve(updated(ModelSettings(), changes))


def test_the_type_of_the_setting_names_every_preset() -> None:
    assert get_args(Preset) == ("", "base", *PRESETS)


def test_options_other_than_sizes_can_be_set_with_a_preset() -> None:
    options = {
        "attention.positions": "learned",
        "attention.max_positions": 512,
        "activation": "swiglu",
        "attention.num_kv_heads": 1,
    }
    options |= {"attention.qk_norm": True, "init": "mup", "mup_base_width": 64}
    assert resolve(updated(ModelSettings(preset="tiny"), options)) == updated(PRESETS["tiny"], options)


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_models_with_cross_attention_copy_by_default_except_the_papers(preset: str) -> None:
    head = resolve(ModelSettings(preset=preset)).copy_head
    assert (head.context, head.neighbors, head.datastore) == (preset in ("", "tiny", "small", "base-cpu"),) * 3


@pytest.mark.parametrize("preset", ["", "small", "172m"])
@pytest.mark.parametrize("neighbors", [False, True])
@pytest.mark.parametrize("source", ["context", "datastore"])
@pytest.mark.parametrize("chosen", [None, False, True])
def test_copy_head_neighbors_decides_about_the_sources_that_are_not_set(
    preset: str, neighbors: bool, source: str, chosen: bool | None
) -> None:
    head = resolve(
        updated(ModelSettings(preset=preset), {"copy_head.neighbors": neighbors, f"copy_head.{source}": chosen})
    )
    expected = dict.fromkeys(("context", "neighbors", "datastore"), neighbors) | (
        {} if chosen is None else {source: chosen}
    )
    assert {name: getattr(head.copy_head, name) for name in expected} == expected


@pytest.mark.parametrize("stored", [CopyHeadSettings(), NO_COPY_HEAD, CopyHeadSettings(context=True, neighbors=False)])
def test_plain_decoders_and_the_preset_base_get_no_copy_head_by_default(stored: CopyHeadSettings) -> None:
    plain = ModelSettings(vocab_size=7, retrieval=RetrievalSettings(cca_layers=()), copy_head=stored)
    for settings in (resolve(plain), resolve(ModelSettings(preset="base"), plain)):
        head = settings.copy_head
        assert (head.neighbors, head.context, head.datastore) == (False, bool(stored.context), False)
    for source in ("neighbors", "datastore"):
        copying = resolve(updated(ModelSettings(preset="base"), {f"copy_head.{source}": True}), plain).copy_head
        assert (copying.neighbors, copying.context) == (source == "neighbors", bool(stored.context))
        assert copying.datastore == (source == "datastore")


def test_preset_base_takes_retrieval_from_the_base_the_defaults_or_the_settings() -> None:
    small = ModelSettings(
        vocab_size=7,
        d_model=32,
        num_layers=5,
        retrieval=RetrievalSettings(cca_layers=()),
        activation="swiglu",
        attention=AttentionSettings(positions="alibi"),
        dropout=0.5,
        copy_head=NO_COPY_HEAD,
    )
    found = resolve(ModelSettings(preset="base", chunk_length=16, shared_embeddings=True), small)
    assert found == updated(
        small,
        {
            "retrieval.cca_layers": (2, 4),
            "encoder.d_model": 32,
            "encoder.d_ffw": 85,
            "encoder.num_heads": 1,
            "encoder.head_dim": 32,
            "chunk_length": 16,
            "shared_embeddings": True,
            "dropout": 0.0,
        },
    )
    large = updated(PRESETS["1.5b"], {"vocab_size": 9, "retrieval.cca_layers": ()})
    usual = updated(
        PRESETS["1.5b"], {"vocab_size": 9, "encoder.num_heads": 14}
    )  # the paper's, except that its encoder has 16 heads of 64
    assert resolve(ModelSettings(preset="base"), large) == usual
    assert resolve(ModelSettings(preset="base", retrieval=RetrievalSettings(cca_layers=())), large) == updated(
        usual, {"retrieval.cca_layers": ()}
    )
    only_one = resolve(ModelSettings(preset="base", encoder=EncoderSettings(num_layers=1)), large)
    assert (only_one.encoder.num_layers, only_one.encoder.d_model) == (1, ModelSettings().encoder.d_model)
    assert only_one.retrieval.cca_layers == PRESETS["1.5b"].retrieval.cca_layers
    retrofitted = resolve(ModelSettings(preset="base", shared_embeddings=True), large)
    assert resolve(ModelSettings(preset="base"), retrofitted) == retrofitted
    with pytest.raises(InputError, match=r"model\.attention\.smeared_tokens = 3 and model\.preset = 'base'"):
        resolve(ModelSettings(preset="base", attention=AttentionSettings(smeared_tokens=3)), large)


def test_position_tables_count_as_embeddings() -> None:
    with torch.device("meta"):
        plain, learned = (
            Retro(ModelSettings(vocab_size=10, chunk_length=64, attention=AttentionSettings(positions=positions)))
            for positions in ("rope", "learned")
        )
    assert count_parameters(learned) == count_parameters(plain)
    tables = (2048 + 64) * 256 + 128 * 128
    assert count_parameters(learned, embeddings=True) == count_parameters(plain, embeddings=True) + tables


def test_active_parameters_include_only_the_experts_of_one_token() -> None:
    sizes = replace(PRESETS["tiny"], vocab_size=10, chunk_length=64)
    chosen = {"experts.num_experts": 8, "experts.per_token": 3, "experts.every": 2}
    assert resolve(updated(ModelSettings(preset="tiny", vocab_size=10, chunk_length=64), chosen)) == updated(
        sizes, chosen
    )
    with torch.device("meta"):
        model, dense = Retro(updated(sizes, chosen)), Retro(sizes)
    block, router = 2 * sizes.d_model * sizes.d_ffw, 8 * sizes.d_model
    assert count_parameters(model) == count_parameters(dense) + 2 * (7 * block + router)
    assert count_active_parameters(model) == count_parameters(dense) + 2 * (2 * block + router)
    assert count_active_parameters(dense) == count_parameters(dense)


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize(
    ("preset", "activation"), [("tiny", "gelu"), ("small", "gelu-tanh"), ("172m", "gelu"), ("small", "swiglu")]
)
def test_the_baseline_has_as_many_parameters_without_retrieval(preset: str, activation: Any, num_experts: int) -> None:
    settings = updated(
        PRESETS[preset],
        {"vocab_size": 10, "chunk_length": 64, "activation": activation, "experts.num_experts": num_experts},
    )
    with torch.device("meta"):
        ours, plain = Retro(settings), Retro(baseline_of(settings))
    assert not any(name.startswith(("encoder", "cross")) for name, _ in plain.named_parameters())
    assert count_parameters(plain) == pytest.approx(count_parameters(ours), rel=0.005)
