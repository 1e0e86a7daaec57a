"""`retro import`: the imported file works as CHECKPOINT and gives the scores of the base model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.tokenization.metadata import read_meta
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main
from retro.checkpoints.checkpoint import open_checkpoint
from retro.inference.chat_template import Message, template_of
from retro.inference.language_model import LanguageModel
from tests.conftest import build_local, tiny_config, write_byte_tokenizer
from tests.retro.huggingface.small_bases import save, transformers_logits

transformers = pytest.importorskip("transformers")
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = transformers.GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=72, bos_token_id=256, eos_token_id=256
    )
    save(transformers.GPT2LMHeadModel(config), folder)
    write_byte_tokenizer(folder, ["<|endoftext|>"])  # only config.json names it, as begin and end
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def datastore(folder: Path, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    tokenizer = TokenizerSettings(kind="huggingface", path=str(folder))
    return build_local(tiny_config(tmp_path_factory.mktemp("datastore"), tiny_corpus, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("imported") / "base.safetensors"
    assert main(["import", str(folder), "--output", str(file), "--chunk-length", "16", "--precision", "float32"]) == 0
    return file


def test_begin_and_end_ids_come_from_the_model_and_padding_is_a_new_id(datastore: Datastore) -> None:
    meta = read_meta(datastore.folder / "tokenizer")
    assert (meta.vocab_size, meta.pad_id, meta.bos_id, meta.eos_id) == (258, 257, 256, 256)
    assert meta.lossless


def test_imported_model_scores_as_transformers_does(imported: Path, folder: Path, datastore: Datastore) -> None:
    opened = open_checkpoint(imported)
    assert (opened.step, opened.datastores, opened.model.vocab_size, opened.num_ids) == (0, [], 258, 258)
    model = LanguageModel.open(imported, datastore.folder)
    assert model.context == 64  # the base has 72 positions; contexts are whole chunks
    tokens = torch.from_numpy(datastore.train.tokens.gather(np.arange(3)).reshape(1, -1).astype("int64")) % 257
    (scores,) = model.score([tokens[0].numpy()])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits = transformers_logits(base, tokens)[0]
    logits = torch.cat((logits, logits.mean(-1, keepdim=True)), dim=-1)  # the row for padding
    expected = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(scores).float(), expected, rtol=1e-5, atol=1e-5)


def test_verbs_accept_the_imported_model(
    imported: Path, datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--datastore", str(datastore.folder), "--device", "cpu"]
    assert main(["eval", "perplexity", str(imported), *store]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["generate", str(imported), *store, "--prompt", "The", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("The")
    assert main(["inspect", str(imported)]) == 0
    assert "\n[imported]\n" in capsys.readouterr().out


def test_an_imported_model_keeps_the_chat_template(
    imported: Path, datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LanguageModel.open(imported, datastore.folder)
    template = template_of(model.tokenizer, model.checkpoint.settings)
    assert model.tokenizer.decode(template.prompt([Message("user", "a")])) == "[user] a\n[assistant]"
    assert main(["generate", str(imported), "--datastore", str(datastore.folder), "--chat", "--max-tokens", "2"]) == 0
    capsys.readouterr()


def test_imported_model_needs_a_datastore_whose_tokenizer_fits(
    imported: Path, tiny_datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "was trained on no datastore: name one" in error_of("eval", "perplexity", str(imported))
    for verb in (["eval", "perplexity"], ["generate"]):
        assert "vocab_size" in error_of(*verb, str(imported), "--datastore", str(tiny_datastore.folder))


def test_invalid_import_options_are_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, words in (
        (["--output", "base.bin"], "must end in .safetensors"),
        (["--output", str(tmp_path / "a.safetensors"), "--context", "128"], "model.attention.max_positions = 72"),
        (["--output", str(tmp_path / "a.safetensors"), "--chunk-length", "80"], "fewer than model.chunk_length = 80"),
    ):
        assert main(["import", str(folder), "--no-verify", *options]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_retrieval_is_added_to_an_imported_model_and_off_scores_as_before(
    imported: Path, datastore: Datastore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "added.safetensors", ["--datastore", str(datastore.folder)]
    assert main(["add-retrieval", str(imported), *store, "--output", str(file), "--k", "2", "--tokens", "2000"]) == 0
    text = datastore.train.tokens.gather(np.arange(4)).reshape(-1).astype(np.int64)
    base, model = LanguageModel.open(imported, datastore.folder), LanguageModel.open(file)
    assert np.array_equal(model.score([text])[0], base.score([text])[0])
    assert model.score([text], k=2)[0].sum() > base.score([text])[0].sum()
    assert main(["export", str(file), "--output", str(tmp_path / "folder")]) == 0
    assert main(["import", str(tmp_path / "folder"), "--output", str(tmp_path / "again.safetensors")]) == 0
    assert open_checkpoint(tmp_path / "again.safetensors").fingerprint == open_checkpoint(file).fingerprint
