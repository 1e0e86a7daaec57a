"""A prefix in peft's files has the same logits in transformers as here, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelines.cli.main import main
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.checkpoints.single_file import write_exported
from retro.checkpoints.tensor_files import index, read_tensors
from retro.huggingface.peft_prefix import CONFIG, WEIGHTS
from tests.retro.huggingface.small_bases import V, make, save, transformers_logits

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(past_key_values|is_gradient_checkpointing).*deprecated:FutureWarning"
)
P = 5
TOKENS = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(0))


def peft_folder(name: str, folder: Path) -> tuple[Path, Tensor]:
    """A folder with a random prefix that peft wrote, for a base next to it; and the logits in transformers."""
    base = save(make(name), folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=P)).eval()
    adapted.save_pretrained(folder / "prefix")
    return folder / "prefix", transformers_logits(adapted, TOKENS)


def import_prefix(prefix: Path, file: Path, *options: str) -> int:
    return main(["import", str(prefix), "--output", str(file), "--chunk-length", "8", "--no-verify", *options])


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen3", "gpt_neox"])
def test_logits_equal_those_of_peft_and_the_written_folder_is_the_same(name: str, tmp_path: Path) -> None:
    prefix, expected = peft_folder(name, tmp_path)
    file = tmp_path / "model.safetensors"
    assert import_prefix(prefix, file) == 0
    with torch.no_grad():
        ours = load_model(open_checkpoint(file), torch.device("cpu"))(Inputs(TOKENS))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert main(["export", str(file), "--output", str(tmp_path / "written"), "--peft"]) == 0
    found, stored = (load_file(folder / WEIGHTS)["prompt_embeddings"] for folder in (tmp_path / "written", prefix))
    torch.testing.assert_close(found, stored)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "written").eval()
    torch.testing.assert_close(transformers_logits(again, TOKENS), expected, rtol=1e-4, atol=1e-4)


def changed_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def test_other_adapters_and_other_bases_are_refused_by_file_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, _ = peft_folder("llama", tmp_path)
    other = save(make("qwen3"), tmp_path / "other")
    window = save(make("mistral"), tmp_path / "window")
    for values, words in [
        ({"base_model_name_or_path": str(other)}, f"prompt_embeddings must have the shape [{P}, "),
        ({"base_model_name_or_path": str(window)}, "sliding_window = 5"),
        ({"num_virtual_tokens": P + 1}, f"prompt_embeddings must have the shape [{P + 1}, "),
        ({"peft_type": "LORA"}, "peft_type is 'LORA'; accepted: 'PREFIX_TUNING'"),
        ({"prefix_projection": True}, "prefix_projection is True; accepted: False"),
    ]:
        kept = (prefix / CONFIG).read_text()
        changed_config(prefix, **values)
        assert import_prefix(prefix, tmp_path / "refused.safetensors") == 2
        assert words in capsys.readouterr().err
        (prefix / CONFIG).write_text(kept)
    assert not (tmp_path / "refused.safetensors").exists()


def test_a_prefix_is_written_only_if_all_other_weights_are_the_bases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, _ = peft_folder("llama", tmp_path)
    assert import_prefix(prefix, tmp_path / "model.safetensors") == 0
    opened = open_checkpoint(tmp_path / "model.safetensors")
    tensors = read_tensors(index(opened.weights))
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    state = {key: getattr(opened, key) for key in ("step", "tokens", "settings", "datastores", "fingerprint")}
    write_exported(state, tensors, tmp_path / "changed.safetensors")
    assert main(["import", str(tmp_path / "base"), "--output", str(tmp_path / "plain.safetensors"), "--no-verify"]) == 0
    capsys.readouterr()
    for file, words in (("changed", "needs train.weights = 'none'"), ("plain", "has no prefix")):
        arguments = ["export", str(tmp_path / f"{file}.safetensors"), "--output", str(tmp_path / "out"), "--peft"]
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
