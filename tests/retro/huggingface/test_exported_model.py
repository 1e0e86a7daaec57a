"""An exported folder generates the same in transformers as `retro generate`, ON and OFF."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.tokenization.metadata import MODEL
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.cli.main import main
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.checkpoints.single_file import exported, write_exported
from retro.device import choose_placement
from retro.huggingface.export import export_folder, read_folder
from retro.huggingface.import_folder import tokenizer_size
from retro.huggingface.retrieval import open_retrieval
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro
from retro.model_settings import from_json
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.huggingface.conftest import DIFFICULT, PROMPTS
from tests.retro.server.conftest import listening

pytest.importorskip("transformers")
NEW = 60  # with the prompt more tokens than the context of 64


@pytest.fixture(scope="module")
def generated(checkpoint: Path) -> dict[str, list[list[int]]]:
    """Greedy continuations of each prompt by `LanguageModel`, OFF and ON."""
    language_model, said = LanguageModel.open(checkpoint, device="cpu"), {}
    greedy = GenerationSettings(max_tokens=NEW, temperature=0)
    tokenizer = language_model.tokenizer
    for mode, k in (("off", 0), ("on", 2)):
        rows: list[list[int]] = []
        for prompt in PROMPTS:
            tokens = np.append(tokenizer.bos_id, tokenizer.encode(prompt)).astype(np.int64)
            rows.append([piece.token for step in language_model.generate([tokens], greedy, k) for piece in step])
        said[mode] = rows
    assert said["off"] != said["on"]
    assert len({tuple(row) for rows in said.values() for row in rows}) > 2
    return said


@pytest.fixture(scope="module")
def model(auto: Any, folder: Path) -> Any:
    return auto(folder)


# --- in a process of its own -----------------------------------------------------------------------------------------

_ELSEWHERE = """
import json, sys

sys.modules |= dict.fromkeys(("faiss", "pyarrow", "ray", "pipelines"))  # as if not installed
folder, family, url, new, prompts = json.load(sys.stdin)
from transformers import AutoModelForCausalLM, AutoTokenizer

said = {"refused": []}
for auto, path in ((AutoModelForCausalLM, folder), (AutoTokenizer, folder), (AutoTokenizer, family)):
    try:
        auto.from_pretrained(path)
    except ValueError as error:
        said["refused"].append(str(error))

import retro.huggingface.register

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
said["family"] = AutoTokenizer.from_pretrained(family)(prompts).input_ids
said["ids"] = tokenizer(prompts).input_ids

def generated():
    rows = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return rows[:, inputs["input_ids"].shape[1] :].tolist()

said["off"] = generated()
said["on"] = (model.retrieve_from(url), generated())[1]
said["off again"] = (model.retrieve_from(None), generated())[1]
json.dump(said, sys.stdout)
"""


@pytest.mark.slow
def test_one_import_loads_a_folder_which_transformers_alone_refuses(
    tmp_path: Path, folder: Path, generated: dict[str, list[list[int]]], tiny_datastore: Datastore
) -> None:
    """Not even the tokenizer loads without the import: transformers 5 converts SentencePiece models, with other ids."""
    retriever, family = Retriever.open(tiny_datastore.folder), tmp_path / "family"
    family.mkdir()
    for file in folder.glob("*token*"):
        (family / file.name).write_bytes(file.read_bytes())
    (family / MODEL).write_bytes((folder / MODEL).read_bytes())
    (family / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    environment = os.environ | {"HF_HOME": str(tmp_path), "RETRO_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    with listening(make_app(retriever, None, ServeSettings(max_queries=3), token="secret")) as url:
        arguments = json.dumps([str(folder), str(family), url, NEW, PROMPTS])
        ran = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE], input=arguments, env=environment, text=True, capture_output=True
        )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert len(said["refused"]) == 3
    for mode in ("off", "on"):
        for row, expected in zip(said[mode], generated[mode], strict=True):
            ended = row[: len(expected)], row[len(expected) :]
            assert ended[0] == expected, mode
            assert set(ended[1]) <= {retriever.tokenizer.pad_id}
    assert said["off again"] == said["off"]
    assert said["family"] == said["ids"]


# --- in this process -------------------------------------------------------------------------------------------------


def test_the_tokenizer_gives_the_datastores_ids_also_after_saving(
    auto: Any, folder: Path, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    ours, tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer"), AutoTokenizer.from_pretrained(folder)
    ids = [[ours.bos_id, *each.tolist()] for each in ours.encode_batch(DIFFICULT)]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_size(tmp_path) == ours.vocab_size
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert [each(text).input_ids for text in DIFFICULT] == ids
        assert [each.decode(row, skip_special_tokens=True) for row in ids] == [ours.decode(row[1:]) for row in ids]
        conversation = [{"role": "user", "content": "Hi </s>"}]
        assert each.apply_chat_template(conversation, tokenize=False) == "[user] Hi </s>"
        chat = each.apply_chat_template(conversation, return_dict=True)["input_ids"]
        assert chat[-len(ours.encode("[user] Hi </s>")) :] == ours.encode("[user] Hi </s>").tolist()


def test_a_datastore_path_works_in_every_generation_mode(
    auto: Any, folder: Path, generated: dict[str, list[list[int]]], tiny_datastore: Datastore
) -> None:
    model = auto(folder, datastore=str(tiny_datastore.folder), k=2)
    ours = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    ids = torch.tensor([[ours.bos_id, *ours.encode(PROMPTS[0]).tolist()]])
    size, expected = ids.shape[1], generated["on"][0]
    assert model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, size:].tolist() == expected
    few = 30  # uncached modes reread whole sequences, which must fit the context
    modes: list[dict[str, Any]] = [{"use_cache": False}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}]
    for opened in (model, auto(folder)):  # ON and OFF
        plain, beams, beams_again = (
            opened.generate(ids, max_new_tokens=few, do_sample=False, **mode)[0, size:].tolist() for mode in modes
        )
    assert plain == generated["off"][0][: len(plain)]
    assert beams == beams_again
    # ON, generated tokens count as text without a cache, and earn trust in retrieval, which the first one does not depend on.
    uncached = model.generate(ids, max_new_tokens=1, do_sample=False, use_cache=False)[0, size:].tolist()
    assert uncached == expected[:1]
    torch.manual_seed(0)
    drawn = model.generate(ids.repeat(2, 1), max_new_tokens=few, do_sample=True, temperature=3.0)[:, size:]
    assert drawn[0].tolist() != drawn[1].tolist()
    on = {"do_sample": False, "eos_token_id": []}  # ignore the end of the document
    begun = model.generate(ids, max_new_tokens=20, return_dict_in_generate=True, **on)
    name = "cache" if "cache" in begun else "past_key_values"  # the name from transformers 5.24 on, and before
    ended = model.generate(begun.sequences, **{name: begun[name]}, max_new_tokens=NEW - 20, **on)
    assert torch.equal(ended, model.generate(ids, max_new_tokens=NEW, **on))
    with pytest.raises(ValueError, match="assisted"):
        model.generate(ids, max_new_tokens=few, assistant_model=model)


def test_generation_reads_every_token_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from retro.huggingface.modeling import RetroCache

    read, columns = RetroCache.read, list[int]()
    monkeypatch.setattr(
        RetroCache, "read", lambda self, ids, mask: columns.append(ids.shape[1]) or read(self, ids, mask)
    )
    ids = torch.arange(3, 40)[None]
    for beams in (1, 3):
        columns.clear()
        model.generate(ids, min_new_tokens=5, max_new_tokens=5, num_beams=beams, do_sample=False)
        assert columns == [37, 1, 1, 1, 1]


def test_logits_and_loss_equal_ours_with_given_and_retrieved_neighbors_and_without(
    model: Any, checkpoint: Path, tiny_datastore: Datastore
) -> None:
    ours = load_model(open_checkpoint(checkpoint), torch.device("cpu"))
    for parameter in model.parameters():  # BLAS sums in another order for addresses that are no multiple of 64
        parameter.data = parameter.data.clone()
    retriever = Retriever.open(tiny_datastore.folder)
    tokens = torch.from_numpy(tiny_datastore.valid.tokens.read(0, 4).astype(np.int64)).reshape(1, -1)[:, :50]
    found = [
        torch.from_numpy(each)[None] for each in retriever.neighbors.find(tokens[0, :48].numpy().reshape(3, 16), 2)[:2]
    ]
    for given in ((), tuple(found)):
        neighbors = dict(zip(("neighbors", "neighbor_lengths"), given, strict=False))
        with torch.no_grad():
            expected = ours(Inputs(tokens, None, *given))
            output = model(tokens, labels=tokens, **neighbors)
            losses = ours.token_losses(Inputs(tokens, labels=tokens.roll(-1, 1), **neighbors))[:, :-1]
        assert torch.equal(output.logits, expected)
        assert output.loss.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    model.retrieve_from(str(tiny_datastore.folder), k=2)
    try:
        # Padding on either side does not change a row; chunks start at its first token.
        padded, mask = torch.zeros(2, 57, dtype=torch.int64), torch.zeros(2, 57, dtype=torch.int64)
        padded[0, 7:], padded[1, :50], mask[0, 7:], mask[1, :50] = tokens, tokens, 1, 1
        with torch.no_grad():
            output = model(padded, attention_mask=mask, labels=padded)
            torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, expected[:, -2:])
        torch.testing.assert_close(output.logits[0, 7:], expected[0])
        torch.testing.assert_close(output.logits[1, :50], expected[0])
        assert output.loss.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    finally:
        model.retrieve_from(None)


def test_an_exported_model_trains_and_survives_saving_and_importing(
    auto: Any, folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Unchanged weights return bit for bit with the checkpoint's fingerprint; trained weights get a new one."""
    assert main(["import", str(folder), "--output", str(tmp_path / "back.safetensors")]) == 0
    assert (tmp_path / "back.safetensors").read_bytes() == checkpoint.read_bytes()
    model = auto(folder)
    model.save_pretrained(tmp_path / "saved")
    assert main(["import", str(tmp_path / "saved"), "--output", str(tmp_path / "saved.safetensors")]) == 0
    assert (tmp_path / "saved.safetensors").read_bytes() == checkpoint.read_bytes()
    again = auto(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    ids = torch.arange(40)[None]
    again(ids, labels=ids).loss.backward()
    torch.optim.SGD(again.parameters(), lr=0.1).step()
    again.save_pretrained(tmp_path / "trained")
    assert main(["import", str(tmp_path / "trained"), "--output", str(tmp_path / "trained.safetensors")]) == 0
    before, after = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "trained.safetensors")
    assert after.fingerprint != before.fingerprint
    assert (after.settings, after.datastores, after.started_from) == (
        before.settings,
        before.datastores,
        before.fingerprint,
    )


@pytest.mark.slow  # lm-eval takes seconds to import
@pytest.mark.parametrize("mode", ["off", "on"])
def test_lm_evals_own_class_scores_the_folder_as_the_checkpoint(
    auto: Any, folder: Path, checkpoint: Path, tiny_datastore: Datastore, mode: str
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from retro.evaluation.lm_eval_adapter import RetroLM

    retrieval = {"datastore": str(tiny_datastore.folder), "k": 2} if mode == "on" else {}
    theirs = HFLM(pretrained=str(folder), device="cpu", **retrieval)
    ours = RetroLM(str(checkpoint), retrieval=mode, device="cpu")
    assert theirs.max_length == ours.language_model.context
    requests = [Instance("loglikelihood", {}, (prompt, " and a store"), row) for row, prompt in enumerate(PROMPTS)]
    for (score, greedy), expected in zip(theirs.loglikelihood(requests), ours.loglikelihood(requests), strict=True):
        assert (score, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])


def test_bfloat16_generation_equals_ours(auto: Any, folder: Path, checkpoint: Path) -> None:
    from retro.inference.decoder import Decoder
    from retro.inference.generation import Batch, generate

    placement = choose_placement("cpu", "bfloat16")
    ours = load_model(open_checkpoint(checkpoint), placement.device)
    placement.cast(ours)
    prompt, greedy = np.arange(1, 40), GenerationSettings(max_tokens=20, temperature=0)
    steps = generate(Batch(Decoder(ours, placement, 64), str, -1), [prompt], greedy)
    model = auto(folder, dtype=torch.bfloat16)
    theirs = model.generate(torch.from_numpy(prompt)[None], max_new_tokens=20, do_sample=False, eos_token_id=[])
    assert theirs[0, len(prompt) :].tolist() == [piece.token for step in steps for piece in step]
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16"):
        model.bfloat16().generate(torch.from_numpy(prompt)[None], max_new_tokens=2)


@torch.no_grad()
def test_bfloat16_routing_of_experts_uses_float32(auto: Any, checkpoint: Path, tmp_path: Path) -> None:
    state, _ = exported(open_checkpoint(checkpoint))
    state["settings"]["model"]["experts"] |= {"num_experts": 4, "every": 1}
    tensors = Retro(from_json(state["settings"]["model"])).state_dict()
    write_exported(state, tensors, tmp_path / "experts.safetensors")
    opened, placement = open_checkpoint(tmp_path / "experts.safetensors"), choose_placement("cpu", "bfloat16")
    export_folder(opened, tmp_path / "hf")
    ours, tokens = load_model(opened, placement.device).eval(), torch.arange(48)[None]
    with placement.autocast():
        expected = ours(Inputs(tokens))
    assert torch.equal(auto(tmp_path / "hf", dtype=torch.bfloat16).eval()(tokens).logits, expected)


def test_files_and_folders_of_an_earlier_version_have_networks_that_do_not_read_the_best_candidates(
    auto: Any, folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    state, tensors = exported(open_checkpoint(checkpoint))
    earlier = {name: tensor for name, tensor in tensors.items() if not name.endswith("inner_best")}
    assert len(earlier) < len(tensors)
    write_exported(state, earlier, tmp_path / "earlier.safetensors")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        of_file = load_file(copy / file)
        kept = {name: tensor for name, tensor in of_file.items() if not name.endswith("inner_best")}
        save_file(kept, copy / file, {"format": "pt"})
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.endswith("inner_best")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(open_checkpoint(tmp_path / "earlier.safetensors"), torch.device("cpu"))
    for model in (loaded, auto(copy).model):
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in earlier.items())
        assert not any(found[name].any() for name in tensors.keys() - earlier.keys())


def test_a_folder_of_another_format_version_names_the_command_that_writes_it_again(
    auto: Any, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["checkpoint"]["format_version"] = 2
    (copy / "config.json").write_text(json.dumps(config))
    for opened in (auto, read_folder):
        with pytest.raises(ValueError, match=r"copy has format version 2.*`retro export`"):
            opened(copy)


def test_invalid_inputs_datastores_and_folders_are_rejected(
    auto: Any, model: Any, folder: Path, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    ids, holes = torch.arange(4)[None], torch.tensor([[1, 0, 1, 1]])
    for wrong, said in (
        ({"attention_mask": holes}, "only before or after"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
        ({"output_attentions": True}, "output_attentions"),
        (
            {
                "use_cache": True,
                "logits_to_keep": 1,
                "attention_mask": holes.flip(1)[:, :4] * torch.tensor([1, 1, 0, 0]),
            },
            "left",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            model(ids, **wrong)
    with pytest.raises(ValueError, match="input_ids"):
        model(labels=ids)
    with pytest.raises(ValueError, match="extend-vocabulary"):
        model.resize_token_embeddings(500)
    with pytest.raises(ValueError, match="k = 0"):
        model.retrieve_from(str(tiny_datastore.folder), k=0)
    with pytest.raises(ValueError, match="is not a datastore"):
        model.retrieve_from(str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.chunk_length = 32, but .* has chunk_length = 16"):
        open_retrieval(str(tiny_datastore.folder), 2, replace(model.model.settings, chunk_length=32), 400, "")
    assert model.config.checkpoint["tokenizer"] == tokenizer_fingerprint(tiny_datastore.folder)
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        open_retrieval(str(tiny_datastore.folder), 2, model.model.settings, model.config.num_ids, "x")
    with pytest.raises(ValueError, match="did not answer"):
        model.retrieve_from("http://127.0.0.1:9")
    app = make_app(Retriever.open(tiny_datastore.folder), None, ServeSettings(), token="secret")
    with listening(app) as url, pytest.raises(ValueError, match="RETRO_TOKEN"):
        model.retrieve_from(url)
    weights = sorted(folder.glob("model-*.safetensors"))[0]
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        if file != weights:
            (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(OSError, match=weights.name):
        auto(broken)
    assert main(["import", str(broken), "--output", str(tmp_path / "x.safetensors")]) == 2
    assert main(["import", str(tmp_path), "--output", str(tmp_path / "x.safetensors")]) == 2
    assert not (tmp_path / "x.safetensors").exists()
