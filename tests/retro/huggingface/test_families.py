"""Each family's logits equal those of `transformers`; unsupported configurations are rejected by key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.checkpoints.tensor_files import save_tensors
from retro.device import choose_placement
from retro.huggingface.config_json import Config
from retro.huggingface.families import config_of, settings_of
from retro.huggingface.import_folder import read_base
from retro.huggingface.tensor_names import NAMES
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from tests.retro.huggingface.small_bases import BASES, LONGEST, V, make, save, transformers_logits
from tests.retro.small_model import Together

pytest.importorskip("transformers")

TOKENS = torch.randint(V, (2, 48), generator=torch.Generator().manual_seed(0))  # longer than every window


@pytest.fixture(scope="module", params=BASES)
def saved_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Each base: name, `transformers` model, folder."""
    model = make(request.param)
    return request.param, model, save(model, tmp_path_factory.mktemp(request.param))


def load_decoder(folder: Path) -> Retro:
    base = read_base(folder, chunk_length=8)
    model = Retro(base.settings)
    model.load_state_dict(base.tensors)
    return model.eval()


def test_logits_and_cached_decoding_equal_transformers(saved_base: tuple[str, Any, Path]) -> None:
    _, model, folder = saved_base
    expected, ours = transformers_logits(model, TOKENS), load_decoder(folder)
    largest = float(expected.abs().max())
    with torch.no_grad():
        assert float((ours(Inputs(TOKENS)) - expected).abs().max()) < 1e-5 * largest
    decoder = Together(ours, choose_placement("cpu", "float32"), LONGEST)
    new = [row[:length].numpy() for row, length in zip(TOKENS, (3, 21), strict=True)]
    places = np.array([2, 20])
    for _ in range(20):
        rows = torch.stack([expected[row, at] for row, at in enumerate(places)])
        assert float((decoder.read(new) - rows).abs().max()) < 1e-5 * largest
        places += 1
        new = [TOKENS[row, at : at + 1].numpy() for row, at in enumerate(places)]


def test_weights_and_config_survive_a_round_trip(saved_base: tuple[str, Any, Path], tmp_path: Path) -> None:
    name, model, folder = saved_base
    base = read_base(folder)
    family, config = config_of(base.settings, base.context)
    assert family == BASES[name][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tensors(NAMES[family].theirs(base.tensors, base.settings.attention.num_heads), tmp_path / "model.safetensors")
    written, stored = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)
    again = read_base(tmp_path)
    assert again.settings == base.settings
    from transformers import AutoModelForCausalLM

    assert torch.equal(
        transformers_logits(AutoModelForCausalLM.from_pretrained(tmp_path), TOKENS), transformers_logits(model, TOKENS)
    )


# ------------------------------------------------------------------------------------------------------- configurations

GPT2 = {"model_type": "gpt2", "vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4}
QWEN = {"model_type": "qwen2", "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN |= {"intermediate_size": 48, "max_position_embeddings": 64}
LLAMA = QWEN | {"model_type": "llama"}
MISTRAL = QWEN | {"model_type": "mistral"}
NEOX = QWEN | {"model_type": "gpt_neox"}


def read_settings(config: dict[str, Any]) -> ModelSettings:
    return settings_of(Config("config.json", config), 64)[1]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2 | {"model_type": "opt"}, "model_type is 'opt'; accepted: gpt2, gpt_neox, llama, mistral, qwen2, qwen3"),
        ({"vocab_size": V}, "model_type is missing"),
        (GPT2 | {"n_embd": None}, "n_embd is None; accepted: an integer above 0"),
        (GPT2 | {"n_layer": "12"}, "n_layer is '12'"),
        (GPT2 | {"n_head": 5}, "n_head is 5; accepted: a divisor of n_embd = 32"),
        (GPT2 | {"activation_function": "relu"}, "activation_function is 'relu'; accepted: gelu_new, gelu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; accepted: False"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights is False; accepted: True"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
        (GPT2 | {"quantization_config": {"bits": 4}}, "quantization_config is"),
        (GPT2 | {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0; accepted: a number above 0"),
        (NEOX | {"use_parallel_residual": 1}, "use_parallel_residual is 1; accepted: true or false"),
        (NEOX | {"rotary_pct": 0.4}, "model.rope.partial_rotary_factor = 0.375"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: silu"),
        (LLAMA | {"num_key_value_heads": 3}, "model.attention.num_kv_heads = 3"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type is 'dynamic'"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; accepted: default, linear, llama3"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing; accepted: a number above 0"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (LLAMA | {"rope_scaling": [2.0]}, r"rope_scaling is \[2.0\]; accepted: an object"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "full_attention is {}; accepted: numbers, the same for"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1"),
        (MISTRAL | {"sliding_window": "all"}, "sliding_window is 'all'"),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1; accepted: 0, or num_h"),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \['full_attention', 's"),
    ],
)
def test_unsupported_configurations_are_rejected_with_file_and_key(config: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=rf"^config\.json.*{told}"):
        read_settings(config)


def test_old_and_new_rope_keys_are_equivalent() -> None:
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaled}}
    newer = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaled}}
    assert (
        read_settings(older)
        == read_settings(newer)
        == updated(read_settings(newer), {"rope.theta": 5e5, "rope.scaling": "llama3", "rope.factor": 8.0})
    )
    oldest = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_settings(oldest) == read_settings(LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    pythia = NEOX | {"rotary_emb_base": 500, "rotary_pct": 0.5}
    assert read_settings(pythia) == read_settings(
        NEOX | {"rope_parameters": {"rope_theta": 500, "partial_rotary_factor": 0.5}}
    )


def test_sliding_windows_of_all_layers_or_none_are_read() -> None:
    assert read_settings(MISTRAL).attention.sliding_window == 4096  # the class's default
    assert read_settings(MISTRAL | {"sliding_window": None}).attention.sliding_window == 0
    assert read_settings(QWEN | {"sliding_window": 9}).attention.sliding_window == 0
    windowed = QWEN | {"use_sliding_window": True, "sliding_window": 9}
    assert read_settings(windowed).attention.sliding_window == 0  # the class's first 28 layers have full attention
    assert read_settings(windowed | {"max_window_layers": 0}).attention.sliding_window == 9
    assert read_settings(windowed | {"layer_types": ["sliding_attention"] * 2}).attention.sliding_window == 9
    assert read_settings(windowed | {"layer_types": ["full_attention"] * 2}).attention.sliding_window == 0


def test_our_decoders_are_written_as_their_family_or_rejected_with_the_reason() -> None:
    no_copies = {f"copy_head.{source}": False for source in ("context", "neighbors", "datastore")}
    plain = {"retrieval.cca_layers": (), **no_copies}
    ours = updated(ModelSettings(vocab_size=V, activation="swiglu"), plain)
    family, config = config_of(ours, 512)
    assert family == "llama"
    assert read_settings(config) == replace(
        read_settings(config), d_model=256, tied_embeddings=False, scaled_embeddings=False
    )
    with pytest.raises(InputError, match=r"no family.*llama has no model.attention.smeared_tokens = 3"):
        config_of(updated(ours, {"attention.smeared_tokens": 3}), 512)
    with pytest.raises(InputError, match=r"no family.*llama has no model.attention.prefix_tokens = 3"):
        config_of(updated(ours, {"attention.prefix_tokens": 3}), 512)
    with pytest.raises(InputError, match="no family"):
        config_of(updated(ours, {"attention.positions": "alibi"}), 512)
