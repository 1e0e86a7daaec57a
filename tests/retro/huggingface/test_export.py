"""An exported folder: its model card and tokenizer, and plain decoders as models of a family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.errors import InputError
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import open_checkpoint
from retro.huggingface.export import as_family, export_folder
from retro.huggingface.model_card import model_card
from retro.model.retro import Retro
from retro.model_settings import updated
from retro.training.run_folder import read_metrics
from tests.retro.huggingface.conftest import DIFFICULT, PROMPTS
from tests.retro.huggingface.small_bases import make, save

transformers = pytest.importorskip("transformers")


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_model_card_has_fingerprints_and_results(tiny_run: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(tiny_run)
    export_folder(opened, tmp_path / "card")
    card = (tmp_path / "card" / "README.md").read_text()
    measured = [line for line in read_metrics(tiny_run) if "valid_bits_per_byte_on" in line][-1]
    assert measured["step"] == opened.step
    assert f"| valid | {measured['valid_bits_per_byte_off']:.4f} | {measured['valid_bits_per_byte_on']:.4f} |" in card
    loading = ("import retro.huggingface.register", "retrieve_from")
    for fact in (opened.fingerprint, *opened.datastores, f"{opened.tokens:,} tokens", *loading):
        assert fact in card
    copying = replace(opened, model=updated(opened.model, {"copy_head.datastore": True}))
    whole = "does not copy from the whole datastore"
    assert [whole in model_card(each, "card", True) for each in (opened, copying)] == [False, True]
    assert {file.suffix for file in (tmp_path / "card").iterdir()} == {".json", ".md", ".model", ".safetensors"}
    again = tmp_path / "again"
    export_folder(opened, again)
    for file in (tmp_path / "card").iterdir():
        assert file.name == "README.md" or (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_failed_export_leaves_nothing_and_overwrites_nothing(tiny_run: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(tiny_run)
    for wrong, said in (
        ({"datastore": str(tmp_path)}, "tokenizer"),
        ({"tokenizer": str(tmp_path)}, "tokenizer.json"),
        ({"max_shard_size": "many"}, "max_shard_size"),
    ):
        with pytest.raises(InputError, match=said):
            export_folder(opened, tmp_path / "out", **wrong)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(InputError, match="not empty"):
        export_folder(opened, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE like GPT-2's in Hugging Face's format, with one special token."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder, fast = tmp_path_factory.mktemp("byte-level"), Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    fast.train_from_iterator([PROMPTS[0]] * 3, trainer)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"})
    )
    return folder


def test_a_datastores_hugging_face_tokenizer_is_exported(byte_level: Path, tmp_path: Path) -> None:
    from retro.huggingface.tokenizer_files import write_tokenizer

    install_tokenizer(TokenizerSettings(kind="huggingface", path=str(byte_level)), tmp_path / "tokenizer")
    (tmp_path / "hf").mkdir()
    write_tokenizer(tmp_path / "tokenizer", tmp_path / "hf")
    ours, theirs = Tokenizer.open(tmp_path / "tokenizer"), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert len(theirs) == ours.vocab_size
    texts = [text for text in DIFFICULT if "<" not in text and "\ud800" not in text]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert theirs(text).input_ids == [ours.bos_id, *ids.tolist()]
        assert theirs.decode(ids, skip_special_tokens=True) == text


def test_a_given_tokenizer_is_copied_unchanged(tiny_run: Path, byte_level: Path, tmp_path: Path) -> None:
    export_folder(open_checkpoint(tiny_run), tmp_path / "hf", tokenizer=str(byte_level))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (byte_level / name).read_bytes()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {config[f"{role}_token_id"] for role in ("bos", "eos")} == {0}


# --- plain decoders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox-serial", "qwen3"])
def test_an_imported_family_is_exported_as_the_same_family(name: str, byte_level: Path, tmp_path: Path) -> None:
    """The family's own class, bit-equal weights and the original tokenizer, which needs no import."""
    base, file, out = (tmp_path / each for each in ("base", "base.safetensors", "out"))
    theirs = make(name, vocab_size=301)  # one row for padding
    save(theirs, base)
    for each in byte_level.iterdir():
        (base / each.name).write_bytes(each.read_bytes())
    assert main(["import", str(base), "--output", str(file), "--chunk-length", "16", "--no-verify"]) == 0
    assert main(["export", str(file), "--output", str(out)]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(back) is type(theirs)
    assert "retro.huggingface" not in (out / "README.md").read_text()
    assert (back.config.bos_token_id, back.config.eos_token_id) == (0, 0)
    for (key, ours), (other, expected) in zip(back.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert (key, torch.equal(ours, expected)) == (other, True)
    assert (out / "tokenizer.json").read_bytes() == (byte_level / "tokenizer.json").read_bytes()


def test_a_decoder_without_retrieval_is_exported_as_a_family_if_possible(checkpoint: Path) -> None:

    retro = open_checkpoint(checkpoint)
    without = {
        "retrieval.cca_layers": (),
        "copy_head.context": False,
        "copy_head.neighbors": False,
    }
    plain = updated(retro.model, {**without, "activation": "swiglu", "attention.num_kv_heads": 1})
    torch.manual_seed(0)
    ours = Retro(plain).eval()
    opened, tensors = replace(retro, model=plain), dict(ours.state_dict())
    written = as_family(opened, tensors)
    assert written is not None
    config, weights = written
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    assert config["model_type"] == "llama"
    theirs.load_state_dict(weights)
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(Inputs(tokens)), rtol=1e-4, atol=1e-4)
    assert as_family(retro, tensors) is None
    assert as_family(replace(retro, model=updated(plain, {"attention.smeared_tokens": 3})), tensors) is None
