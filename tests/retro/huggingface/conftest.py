"""A checkpoint, its exported folder, and a function that loads exported folders."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.cli.main import main
from retro.checkpoints.checkpoint import open_checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.checkpoints.tensor_files import index, read_tensors

PROMPTS = ("the index of a chunk and the neighbor in memory with a vector from the store", "检索模型训练")
DIFFICULT = [
    "", "a", " leading, trailing ", "a  b   c", "x" * 37, "=" * 61, "1234567890 3.14e-10", "\u2581 \u2581", "a\u2581b",
    "def f(x):\n\n    return x\t# tab\r\n", "\n\n\n\n\n", "\t" * 6, " " * 33 + "x", "中文，標點。", "机器学习与检索增强的语言模型",
    "Mixed 中英文 text，with ASCII,和全角！", "Ｆｕｌｌ ﬁ ½ é e\u0301 \u00a0\u3000", "\U0001f642\U0001f469\u200d\U0001f467", "𠮷野家",
    "\x00\x7f\ufffd\ufeff", "<s></s><unk><pad> <0x0A> <|endoftext|>", "</s>", "half \ud800 a pair",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """The checkpoint of `tiny_run` in float32, perturbed until texts differ from each other and ON from OFF."""
    opened, generator = open_checkpoint(tiny_run), torch.Generator().manual_seed(1)
    opened.settings["train"]["precision"] = "float32"
    tensors = read_tensors(index(opened.weights))
    moved = {name: each + 0.5 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    file = tmp_path_factory.mktemp("checkpoint") / "moved.safetensors"
    write_exported(exported(opened)[0], moved, file)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The checkpoint, exported to several files by the command line."""
    to = tmp_path_factory.mktemp("hf") / "tiny-retro"
    assert main(["export", str(checkpoint), "--output", str(to), "--max-shard-size", "60KB"]) == 0
    assert len(list(to.glob("model-*.safetensors"))) > 2
    return to


@pytest.fixture(scope="module")
def auto() -> Any:
    """`auto(folder, …)` loads a model in this process."""
    from transformers import AutoModelForCausalLM

    import retro.huggingface.register  # noqa: F401

    return AutoModelForCausalLM.from_pretrained
