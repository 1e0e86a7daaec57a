"""Import of sharded, half-precision, old and damaged folders, and of tokenizers of another size."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from indexing.store.errors import InputError
from retro.huggingface.compare_logits import verify
from retro.huggingface.import_folder import add_rows, read_base
from retro.huggingface.tensor_names import NAMES
from tests.retro.huggingface.small_bases import V, make, save

pytest.importorskip("transformers")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return make("gpt2")


@pytest.fixture
def folder(gpt2: Any, tmp_path: Path) -> Path:
    return save(gpt2, tmp_path / "gpt2")


def write_tokenizer(folder: Path, num_words: int, **told: Any) -> None:
    """A tokenizer of whole words and its tokenizer_config.json."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<end>": 0} | {f"word{number}": number for number in range(1, num_words)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def test_shards_and_half_precision_equal_a_single_file(gpt2: Any, folder: Path, tmp_path: Path) -> None:
    whole, parts = read_base(folder), read_base(save(gpt2, tmp_path / "parts", max_shard_size="30KB"))
    assert not (parts.folder / WEIGHTS).exists()
    assert all(torch.equal(parts.tensors[name], tensor) for name, tensor in whole.tensors.items())
    rewrite_tensors(folder, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    for name, tensor in read_base(folder).tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, whole.tensors[name].bfloat16().float())


def test_old_tensor_names_and_masks_are_accepted(folder: Path) -> None:
    """The hub's GPT-2 has no prefix and stores each layer's causal mask."""
    whole, masks = read_base(folder), {f"h.{n}.attn.bias": torch.ones(1, 1, 4, 4) for n in range(3)}
    rewrite_tensors(folder, lambda tensors: {n.removeprefix("transformer."): t for n, t in tensors.items()} | masks)
    again = read_base(folder)
    assert again.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())


def drop_tensor(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            drop_tensor("transformer.h.1.ln_2.bias"),
            "transformer.h.1.ln_2.bias",
        ),
        (lambda tensors: tensors | {"score.weight": torch.ones(2)}, "tensor score.weight is unknown"),
        (
            lambda tensors: tensors | {"transformer.wpe.weight": torch.ones(3, 32)},
            "transformer.wpe.weight gives position_embedding.weight the shape [3, 32], its config.json [64, 32]",
        ),
        (
            lambda tensors: tensors | {"transformer.wte.weight": torch.ones(V, 32, dtype=torch.int8)},
            "transformer.wte.weight has the type torch.int8; accepted: float32",
        ),
    ],
)
def test_weights_that_do_not_match_the_config_are_rejected_by_name(folder: Path, change: Any, told: str) -> None:
    rewrite_tensors(folder, change)
    with pytest.raises(InputError, match=re.escape(told)):
        read_base(folder)


def test_incomplete_or_damaged_folders_are_rejected(folder: Path, tmp_path: Path) -> None:
    def expect_error(told: str, path: Path = folder) -> None:
        with pytest.raises(InputError, match=told):
            read_base(path)

    expect_error("config.json is missing: name a local folder", tmp_path)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-5])
    expect_error("is damaged or not a safetensors file")
    (folder / WEIGHTS).unlink()
    expect_error("model.safetensors.*model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"")
    expect_error(r"pytorch_model.bin.*save_pretrained")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "one.safetensors"}}))
    expect_error("one.safetensors is missing")
    for wrong in ({}, {"weight_map": {"transformer.wte.weight": "../one.safetensors"}}):
        index.write_text(json.dumps(wrong))
        expect_error("weight_map")
    for wrong in ('{"weight_map": {"a": {}}}', '{"weight_map": {"a": ".."}}', '{"a":' * 100_000):
        index.write_text(wrong)
        expect_error("index.json")
    (folder / "config.json").write_text("{")
    expect_error("config.json is not JSON")
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    expect_error("config.json is not JSON: it is nested")


@pytest.mark.parametrize(
    "sizes", [{"n_layer": 100_000}, {"n_layer": 10**9}, {"n_embd": 2**40, "n_head": 1}, {"vocab_size": 10**15}]
)
def test_config_of_a_model_larger_than_its_files_is_refused_before_it_is_made(folder: Path, sizes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(InputError, match=r"config\.json: a model of .* but its files hold"):
        read_base(folder)


# ------------------------------------------------------------------------------------------------------------ tokenizers


def test_extra_token_ids_get_new_rows_and_old_rows_are_kept(folder: Path) -> None:
    bare = read_base(folder)
    assert (bare.settings.vocab_size, bare.num_ids, bare.added_rows) == (V, V, 0)
    write_tokenizer(folder, V)  # no row is left for the padding id
    base = read_base(folder)
    assert (base.settings.vocab_size, base.num_ids, base.added_rows) == (V + 1, V + 1, 1)
    assert torch.equal(base.tensors["embedding.weight"][:V], bare.tensors["embedding.weight"])
    write_tokenizer(folder, V - 10)  # the tables are larger than the tokenizer
    base = read_base(folder)
    assert (base.settings.vocab_size, base.num_ids, base.added_rows) == (V, V - 9, 0)
    assert verify(base)[0] < 1e-5


def test_an_added_row_is_never_likelier_than_the_average() -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 8) * 5 - 20
    for stream in torch.randn(100, 8) * 10:
        probabilities = (add_rows(table, 1) @ stream).softmax(0)
        assert probabilities[-1] <= (1 + 1e-5) / 51


def test_logits_that_differ_from_transformers_are_rejected(folder: Path) -> None:
    base = read_base(folder)
    assert verify(base)[0] < 1e-5
    base.tensors["attention.1.block.o_proj.bias"][3] += 0.5
    with pytest.raises(InputError, match="logits differ"):
        verify(base)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_a_stored_output_layer_is_used_if_it_is_not_the_embedding(name: str, tmp_path: Path) -> None:
    folder = save(make(name, tie_word_embeddings=True), tmp_path / name)
    assert read_base(folder).settings.tied_embeddings
    head, embedding = f"{NAMES[name].head}.weight", NAMES[name].of("embedding.weight")[0]
    rewrite_tensors(folder, lambda tensors: tensors | {head: tensors[embedding].clone()})
    assert read_base(folder).settings.tied_embeddings
    rewrite_tensors(folder, lambda tensors: tensors | {head: tensors[embedding].flip(0).clone()})
    base = read_base(folder)
    assert not base.settings.tied_embeddings
    assert verify(base)[0] < 1e-5  # transformers does the same


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(folder: Path, value: float) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["transformer.h.1.ln_1.weight"][3] = value
        return tensors

    rewrite_tensors(folder, change)
    with pytest.raises(
        InputError, match=r"model\.safetensors: transformer\.h\.1\.ln_1\.weight has 1 values that are NaN or infinite"
    ):
        read_base(folder)


@pytest.mark.parametrize("changes", [{"bos_token_id": [0]}, {"eos_token_id": {"a": 1}}, {"pad_token_id": "x"}])
def test_a_config_that_transformers_refuses_is_an_error_of_one_line_and_imports_without_it(
    folder: Path, changes: dict[str, Any]
) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    base = read_base(folder)
    key = next(iter(changes))
    with pytest.raises(InputError, match=rf"transformers cannot load this model.*{key}.*--no-verify") as caught:
        verify(base)
    assert "\n" not in str(caught.value)
