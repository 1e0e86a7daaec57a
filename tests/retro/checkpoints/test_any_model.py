"""Any decoder of transformers is accepted where text is scored, and copies from a datastore there."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from pipelines.cli.main import main
from retro.batch.inputs import Inputs
from retro.checkpoints import any_model
from retro.checkpoints.any_model import (
    for_datastore,
    for_tokens_of,
    is_of_transformers,
    load_scorer,
    open_model,
    tokenizer_settings,
)
from retro.copying.head import open_networks
from retro.copying.network_file import write_networks
from retro.copying.switch import ALL_SOURCES, ENTERS, PRIOR
from retro.device import Placement
from retro.inference.language_model import LanguageModel
from tests.retro.huggingface.any_models import FAMILIES, build_planted, planted_texts, save_model, save_tokenizer

pytest.importorskip("transformers")

CPU = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Datastore:
    return build_planted(tmp_path_factory.mktemp("planted"), folders["llama"])


def evaluated(model: Path, output: Path, *options: str) -> dict[str, Any]:
    """The results of `retro eval perplexity`."""
    assert (
        main(["eval", "perplexity", str(model), "--output", str(output), "--evaluation.window", "512", *options]) == 0
    )
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured_off_and_on(
    folders: dict[str, Path], datastore: Datastore, family: str, tmp_path: Path
) -> None:
    """OFF is the loss that transformers computes; copies of training documents are likelier ON."""
    text = [planted_texts(datastore.folder.parent)["planted-0"]]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in text))
    options = ["--datastore", str(datastore.folder), "--k", "2", "--texts", str(tmp_path / "text.jsonl")]
    found = evaluated(folders[family], tmp_path / "found.json", *options)
    by_mode = {(row["k"], row["votes"]): row["bits_per_byte"] for row in found["results"]}
    assert by_mode[2, True] < by_mode[0, True] < by_mode[0, False]
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders[family])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text[0])["input_ids"]]])
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(folders[family])(ids, labels=ids).loss
    (row,) = found["texts"]
    assert row["results"][0]["bits_per_byte"] == pytest.approx(float(loss) / np.log(2), rel=0.01)  # or in bfloat16


def test_documents_of_a_packed_row_are_read_alone(folders: dict[str, Path], datastore: Datastore) -> None:
    model = load_scorer(for_datastore(open_model(folders["gemma"]), datastore.folder), CPU)
    tokens, documents = torch.arange(64)[None], torch.tensor([[0, 0, 1, 1]])
    with torch.no_grad():
        packed, _ = model.hidden(Inputs(tokens, documents))
        alone = [model.hidden(Inputs(part))[0] for part in tokens.split(32, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.fixture(scope="module")
def added(folders: dict[str, Path], datastore: Datastore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `retro add-retrieval` writes for a Mamba."""
    file = tmp_path_factory.mktemp("added") / "added.safetensors"
    options = ["--datastore", str(datastore.folder), "--k", "2", "--tokens", "600", "--output", str(file)]
    assert main(["add-retrieval", str(folders["mamba"]), *options]) == 0
    return file


def test_added_retrieval_is_a_small_file_that_names_the_model(
    folders: dict[str, Path], datastore: Datastore, added: Path, tmp_path: Path
) -> None:
    opened = open_model(added)
    assert added.stat().st_size < 20_000
    assert opened.of_transformers == {"path": str(folders["mamba"].resolve()), "family": "mamba"}
    assert opened.started_from == open_model(folders["mamba"]).fingerprint
    assert [opened.model.copy_head.neighbors, opened.model.copy_head.datastore] == [True, True]
    model = LanguageModel.open(added, device="cpu")
    tokens = model.tokenizer.encode(planted_texts(datastore.folder.parent)["trained-3"][:200]).astype(np.int64)
    off, on = (float(model.score([tokens], k)[0].sum()) for k in (0, 2))
    assert on > off + 100
    with pytest.raises(InputError, match=r"mamba\), so it can only score text here.*any-model\.md"):
        model.batch()
    options = ["--datastore", str(datastore.folder), "--k", "2"]
    assert main(["add-retrieval", str(added), "--output", str(tmp_path / "again.safetensors"), *options]) == 2


def test_its_metadata_say_what_it_was_fitted_to(folders: dict[str, Path], datastore: Datastore, added: Path) -> None:
    about = open_networks(added).about
    assert about["model"]["path"] == str(folders["mamba"].resolve())
    assert about["datastore"]["path"] == str(datastore.folder.resolve())
    assert about["datastore"]["tokenizer"] == tokenizer_fingerprint(datastore.folder)
    assert about["data"]["k"] == 2
    assert about["fit"]["tokens"] > 0
    assert about["fit"]["loss_after"] < about["fit"]["loss_before"] < about["fit"]["loss_off"]


def test_the_networks_that_are_read_are_those_that_were_fitted(
    folders: dict[str, Path], datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, write = dict[str, torch.Tensor](), any_model.write_networks

    def noted(file: Path, about: Any, weights: dict[str, torch.Tensor]) -> None:
        fitted.update({name: tensor.clone() for name, tensor in weights.items()})
        write(file, about, weights)

    monkeypatch.setattr(any_model, "write_networks", noted)
    file = tmp_path / "added.safetensors"
    options = ["--datastore", str(datastore.folder), "--k", "2", "--tokens", "600", "--output", str(file)]
    assert main(["add-retrieval", str(folders["phi"]), *options, "--sources", "datastore"]) == 0
    head = load_scorer(open_model(file), CPU).copy_head
    assert head is not None
    read = head.state_dict()
    names = ("inner", "inner_best", "inner_bias", "outer", "outer_bias")
    assert list(read) == list(fitted) == [f"datastore.{name}" for name in names]
    assert all(torch.equal(read[name], fitted[name]) for name in read)


def test_a_context_that_is_added_to_a_decoder_must_earn_trust(
    folders: dict[str, Path], datastore: Datastore, tmp_path: Path
) -> None:
    file = tmp_path / "added.safetensors"
    options = ["--datastore", str(datastore.folder), "--k", "2", "--tokens", "300", "--output", str(file)]
    assert main(["add-retrieval", str(folders["phi"]), *options, "--sources", "context", "datastore"]) == 0
    head = load_scorer(open_model(file), CPU).copy_head
    assert head is not None
    assert (open_model(file).model.copy_head.names, head.switch) == (("context", "datastore"), ALL_SOURCES)
    alone, model = (LanguageModel.open(one, datastore.folder, device="cpu") for one in (folders["phi"], file))
    drawn = np.random.default_rng(0).integers(20, 24, 300).astype(np.int64)
    harm = float((alone.score([drawn])[0] - model.score([drawn])[0]).sum())
    assert harm < -math.log(1 - PRIOR) - 300 * math.log(1 - ENTERS)


def test_networks_that_are_not_whole_are_refused(added: Path, tmp_path: Path) -> None:
    about, _, weights = open_networks(added)
    file = tmp_path / "less.safetensors"
    for section, key, value, words in (
        ("model", "path", None, "model.path is missing, it must be of the type str"),
        ("datastore", "chunk_length", "16", "datastore.chunk_length is '16', it must be of the type int"),
        ("data", "max_overlap", True, "data.max_overlap is True, it must be of the type float"),
        ("data", "k", -1, "k = -1"),
    ):
        changed = {**about, section: {**about[section], key: value}}
        write_networks(file, changed, weights)
        with pytest.raises(InputError, match=re.escape(words)):
            open_model(file)
    write_networks(file, {name: about[name] for name in ("model", "data")}, weights)
    with pytest.raises(InputError, match=r"less\.safetensors: datastore\.path is missing.*`retro add-retrieval MODEL"):
        open_model(file)


def test_other_verbs_verify_it_or_say_what_it_is(
    added: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(added)]) == 0
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(added.read_bytes().replace(b"mamba", b"bamba"))
    assert main(["verify", str(broken)]) == 1
    assert f"{broken} has changed" in capsys.readouterr().out
    for arguments in (["inspect", str(added)], ["export", str(added), "--output", str(tmp_path / "out.safetensors")]):
        assert main(arguments) == 2
        assert f"{added} names a decoder that transformers computes, so it can only score" in capsys.readouterr().err
    output = ["--datastore", str(tmp_path), "--output", str(tmp_path / "a.json")]
    assert main(["add-retrieval", str(folders["phi"]), *output]) == 2
    assert "must end in .safetensors" in capsys.readouterr().err


def test_ids_that_only_the_datastore_has_are_padding(datastore: Datastore, tmp_path: Path) -> None:
    """Its tokenizer may have got a token for padding that the model has no row for."""
    opened = open_model(save_model(tmp_path / "phi", "phi"))
    grown = for_datastore(opened, datastore.folder)
    model = load_scorer(grown, CPU)
    model.settings = type(grown.model)(**vars(grown.model) | {"vocab_size": 260})
    with torch.no_grad():
        logits, _ = model.hidden(Inputs(torch.tensor([[5, 6, 259]])))
    assert logits.shape == (1, 3, 260)
    assert (logits[..., 258:] == -torch.inf).all()
    assert torch.isfinite(logits[..., :258]).all()


def test_what_names_a_model_of_transformers(folders: dict[str, Path], tmp_path: Path, tiny_run: Path) -> None:
    (tmp_path / "file.gguf").touch()
    assert all(map(is_of_transformers, (folders["phi"], tmp_path / "file.gguf", Path("owner/name-1.5B"))))
    assert not any(map(is_of_transformers, (tiny_run, tmp_path, tmp_path / "nowhere.gguf", Path("nowhere"))))


def test_a_datastore_gets_the_tokenizer_of_a_model(
    folders: dict[str, Path], datastore: Datastore, tiny_datastore: Datastore, tiny_run: Path, tmp_path: Path
) -> None:
    decoder, trained = open_model(folders["phi"]), open_model(tiny_run)
    found = tokenizer_settings(decoder)
    assert (found.kind, Path(found.path)) == ("huggingface", folders["phi"] / "tokenizer.json")
    found = tokenizer_settings(trained)
    assert (found.kind, Path(found.path).parent) == ("sentencepiece", tiny_datastore.folder / "tokenizer")
    assert for_tokens_of(decoder, datastore).model.vocab_size >= datastore.manifest["vocab_size"]
    assert for_tokens_of(trained, tiny_datastore) is trained
    for model, other in ((decoder, tiny_datastore), (trained, datastore)):
        with pytest.raises(InputError, match="tokenizer"):
            for_tokens_of(model, other)
    gone = shutil.copytree(folders["phi"], tmp_path / "gone")
    without = open_model(gone)
    (gone / "tokenizer.json").unlink()
    with pytest.raises(
        InputError, match=r"its tokenizer \(tokenizer.json or sentencepiece.model\) is in none of: .*gone"
    ):
        tokenizer_settings(without)


def test_what_does_not_fit_is_refused_in_a_line(
    folders: dict[str, Path],
    datastore: Datastore,
    tiny_datastore: Datastore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    phi, empty = str(folders["phi"]), save_tokenizer(tmp_path / "empty")
    (empty / "config.json").write_text('{"model_type": "unknown_family"}')
    cut = shutil.copytree(folders["mamba"], tmp_path / "cut")
    with open(cut / "model.safetensors", "r+b") as weights:
        weights.truncate(5000)
    for arguments, words in (
        (["eval", "perplexity", str(cut), "--datastore", str(datastore.folder)], "cut is no checkpoint"),
        (["eval", "perplexity", phi], "was trained on no datastore: name one"),
        (
            ["eval", "perplexity", phi, "--datastore", str(tiny_datastore.folder)],
            "was made with another tokenizer than",
        ),
        (["eval", "perplexity", str(empty), "--datastore", str(datastore.folder)], "unknown_family"),
        (
            ["eval", "perplexity", "nobody/no-model", "--datastore", str(datastore.folder)],
            "nobody/no-model is no checkpoint",
        ),
        (
            [
                "add-retrieval",
                phi,
                "--datastore",
                str(datastore.folder),
                "--reader",
                "decoder",
                "--output",
                f"{tmp_path}/a.safetensors",
            ],
            "computed by transformers",
        ),
    ):
        assert main(arguments) == 2
        assert words in (printed := capsys.readouterr().err)
        assert "Traceback" not in printed
