"""`retro import FILE.gguf`: weights, tokenizer and chat template; damaged and unsupported files are refused by name."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.cli.main import main
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from tests.retro.huggingface.small_gguf import WIDTH, write_gguf

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def import_gguf(file: Path, output: Path, *options: str) -> int:
    return main(
        ["import", str(file), "--output", str(output), "--chunk-length", "16", "--precision", "float32", *options]
    )


@pytest.mark.parametrize(
    ("family", "quantization", "stored_as"),
    [("llama", "Q4_1", "4-bit: Q4_1"), ("qwen2", "Q8_0", "8-bit: Q8_0"), ("qwen3", "F32", "32-bit: F32")],
)
def test_an_imported_file_has_the_logits_of_transformers(
    tmp_path: Path, family: str, quantization: str, stored_as: str, capsys
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", family, quantization=quantization)
    assert import_gguf(file, tmp_path / "out/tiny.safetensors") == 0
    assert f"({stored_as})" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tiny", "tiny.safetensors"]
    tokens = torch.arange(1, 100)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        ours = load_model(open_checkpoint(tmp_path / "out/tiny.safetensors"), torch.device("cpu"))(Inputs(tokens))
    torch.testing.assert_close(ours[..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gpt2", {}, "general.architecture is 'gpt2'"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ("llama", {"llama__expert_count": 8}, "llama.expert_count is 8"),
        ("llama", {"rope_freqs__weight": np.ones(16, np.float32)}, "rope_freqs.weight"),
        ("llama", {"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ("llama", {"quantization": "Q8_1"}, "Q8_1"),
        ("llama", {"leave_out": "tokenizer.ggml.tokens"}, "has no tokenizer"),
        ("llama", {"leave_out": "blk.1.ffn_up"}, "has no tensor blk.1.ffn_up.weight"),
        (
            "llama",
            {"tokenizer__ggml__pre": "falcon"},
            "tokenizer.ggml.pre is 'falcon'; accepted: deepseek-coder, gpt-2",
        ),
        ("llama", {"blk.0.attn_norm.weight": np.full(WIDTH, np.nan, np.float32)}, "64 values that are NaN or infinite"),
        ("llama", {"llama__block_count": 10**7}, "blk.2.attn_norm.weight, and its block_count is 10,000,000"),
        ("llama", {"llama__block_count": "many"}, "llama.block_count is 'many'; accepted: an integer above 0"),
        (
            "llama",
            {"llama__attention__head_count": 4},
            "blk.0.attn_q.weight has the shape [64, 64], its keys [128, 64]",
        ),
        ("llama", {"llama__attention__head_count_kv": 0}, "llama.attention.head_count_kv is 0; accepted: an integer"),
        (
            "qwen2",
            {"qwen2__attention__head_count_kv": 2**31},
            "qwen2.attention.head_count_kv is 2147483648; accepted: a divisor",
        ),
        ("llama", {"llama__embedding_length": 65}, "token_embd.weight has the shape [259, 64], its keys [259, 65]"),
        ("qwen3", {"qwen3__feed_forward_length": 2**32 - 1}, "blk.0.ffn_gate.weight has the shape"),
        ("llama", {"llama__vocab_size": 3}, "llama.vocab_size is 3; accepted: at least the number of tokens, 259"),
        ("llama", {"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan; accepted: a number above 0"),
        ("llama", {"tokenizer__ggml__eos_token_id": 2**32 - 1}, "tokenizer.ggml.eos_token_id is 4294967295; accepted"),
        ("llama", {"split__count": 3}, "is one of 3 parts of a model"),
    ],
)
def test_an_unsupported_file_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], key: str, capsys
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", family, **changes)
    assert import_gguf(file, tmp_path / "out.safetensors") == 2
    error = capsys.readouterr().err
    assert key in error
    assert str(file) in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.9999])
def test_a_cut_file_is_refused(tmp_path: Path, kept: float, capsys) -> None:
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(content[: int(kept * len(content))])
    assert import_gguf(file, tmp_path / "out.safetensors") == 2
    assert str(file) in capsys.readouterr().err


def test_a_file_that_does_not_fit_on_the_disk_is_refused_before_it_is_read(tmp_path: Path, capsys) -> None:
    file = write_gguf(tmp_path / "large.gguf", output__weight=np.zeros((2, WIDTH), np.float32))
    rows = shutil.disk_usage(tmp_path).free // (4 * WIDTH)
    shape = (b"output.weight" + struct.pack("<IQQ", 2, WIDTH, number) for number in (2, rows))
    file.write_bytes(file.read_bytes().replace(*shape))
    os.truncate(file, file.stat().st_size + 4 * WIDTH * rows)  # a sparse file
    assert import_gguf(file, tmp_path / "out.safetensors") == 2
    assert "free space" in capsys.readouterr().err


def test_an_earlier_tokenizer_is_replaced_only_on_request(tmp_path: Path, capsys) -> None:
    file, output = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny.safetensors"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/mine.txt").touch()
    assert import_gguf(file, output, "--no-verify") == 2
    assert f"{tmp_path / 'tiny'}, the folder for the tokenizer" in capsys.readouterr().err
    assert import_gguf(file, output, "--no-verify", "--overwrite") == 0
    assert (tmp_path / "tiny/mine.txt").exists()


def test_a_model_with_another_vocabulary_than_the_datastore_is_refused(
    tmp_path: Path, tiny_datastore: Any, capsys
) -> None:
    output, added = tmp_path / "tiny.safetensors", tmp_path / "added.safetensors"
    assert import_gguf(write_gguf(tmp_path / "tiny.gguf"), output, "--no-verify") == 0
    assert main(["add-retrieval", str(output), "--datastore", str(tiny_datastore.folder), "--output", str(added)]) == 2
    error = capsys.readouterr().err
    assert "vocab_size" in error
    assert str(tiny_datastore.folder) in error


def test_an_unreachable_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["import", "nobody/no-model", "--output", str(tmp_path / "out.safetensors")]) == 2
    assert "nobody/no-model is not a local folder or .gguf file" in capsys.readouterr().err
