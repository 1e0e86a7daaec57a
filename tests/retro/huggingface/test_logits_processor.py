"""Any decoder of transformers copies from a datastore while it generates."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.main import main
from retro.checkpoints.tensor_files import save_tensors
from retro.copying.head import initial_weights, open_networks
from retro.copying.network_file import write_networks
from retro.huggingface import DatastoreLogitsProcessor
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.inference.trust import Trust
from tests.retro.huggingface.any_models import FAMILIES, build_planted, planted_texts, save_model, save_tokenizer

pytest.importorskip("transformers")

NEW = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family."""
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folders["llama"])


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Datastore:
    return build_planted(tmp_path_factory.mktemp("planted"), folders["llama"])


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in folders.items()}


@pytest.fixture(scope="module")
def passage(datastore: Datastore) -> str:
    """The begin of a training document."""
    return planted_texts(datastore.folder.parent)["trained-14"][:300]


def encoded(tokenizer: Any, *texts: str) -> dict[str, Tensor]:
    """Texts as a batch that is padded on the left."""
    return tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")


def generated(model: Any, inputs: dict[str, Tensor], *processors: Any, **options: Any) -> Tensor:
    """Continue a batch with the likeliest tokens: [rows, NEW]."""
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | options
    sequences = model.generate(**inputs, logits_processor=[*processors], **settings)
    return sequences[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_continues_a_passage_of_the_datastore(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, family: str
) -> None:
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models[family])
    inputs = encoded(tokenizer, passage[:200])
    assert tokenizer.decode(generated(models[family], inputs, processor)[0]) == passage[200 : 200 + NEW]
    assert tokenizer.decode(generated(models[family], inputs)[0]) != passage[200 : 200 + NEW]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_strength_of_0_is_generate_without_the_processor(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, family: str
) -> None:
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models[family], copy_strength=0)
    inputs = encoded(tokenizer, passage[:100])
    assert torch.equal(generated(models[family], inputs, processor), generated(models[family], inputs))


def test_less_is_copied_without_the_model_that_could_judge_the_prompt(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    blind, judged = (DatastoreLogitsProcessor.open(datastore.folder, tokenizer, one) for one in (None, models["phi"]))
    ids, scores = encoded(tokenizer, passage[:100])["input_ids"], torch.zeros(1, 258)
    assert scores.softmax(-1).max() < blind(ids, scores).exp().max() < judged(ids, scores).exp().max()
    assert blind.trust == [Trust(pytest.approx(0.125), 100, "other text")]
    assert (judged.trust[0].share > 0.9, judged.trust[0].low_because) == (True, None)


def test_padding_and_other_rows_change_nothing(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    model, texts = models["llama"], (passage[:150], passage[40:70], "8342 6190")
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=2)
    together = generated(model, encoded(tokenizer, *texts), processor)
    alone = [generated(model, encoded(tokenizer, text), processor)[0] for text in texts]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("k", [0, 2])
def test_the_first_scores_are_those_of_the_whole_text(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, k: int
) -> None:
    model, ids = models["gpt_neox"], encoded(tokenizer, passage[:120])["input_ids"]
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=k)
    with torch.no_grad():
        logits = model(ids).logits
    mixed = processor.mix(ids, logits)
    torch.testing.assert_close(processor(ids, logits[:, -1]), mixed[:, -1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed.exp().sum(-1), torch.ones(1, ids.shape[1]), rtol=1e-4, atol=1e-4)


def test_beams_samples_and_continuations_run_with_one_trust_for_a_prompt(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, calls = models["llama"], encoded(tokenizer, passage[:200], passage[20:90]), list[int]()
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    learn = processor._trust
    monkeypatch.setattr(processor, "_trust", lambda row: calls.append(len(row.tokens)) or learn(row))
    beams = generated(model, inputs, processor, num_beams=3, num_return_sequences=2)
    assert beams.shape == (4, NEW)
    assert tokenizer.decode(beams[0]) == passage[200 : 200 + NEW]
    torch.manual_seed(0)
    assert generated(model, inputs, processor, do_sample=True, num_return_sequences=3).shape == (6, NEW)
    assert sorted(calls) == [70, 70, 200, 200]


def scores_of(model: Any, inputs: dict[str, Tensor], processor: Any, **options: Any) -> Tensor:
    """The scores of a generation: [steps, rows, V]."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_scores": True} | options
    done = model.generate(**inputs, logits_processor=[processor], return_dict_in_generate=True, **settings)
    return torch.stack(done.scores)


@pytest.mark.parametrize("history", ["itself", "its beginning", "its continuation", "a batch", "beams", "no end"])
def test_a_call_of_generate_is_a_prompt_as_a_whole_with_any_history(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, history: str
) -> None:
    model, inputs = models["llama"], encoded(tokenizer, passage[:46])
    used, fresh = (DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=2) for _ in range(2))
    if history == "itself":
        scores_of(model, inputs, used)
    elif history == "its beginning":  # after which exactly these tokens are generated, but the last one
        begin = encoded(tokenizer, passage[:40])
        assert tokenizer.decode(generated(model, begin, used, max_new_tokens=6, min_new_tokens=6)[0]) == passage[40:46]
    elif history == "its continuation":
        scores_of(model, encoded(tokenizer, passage[:60]), used)
        used(encoded(tokenizer, passage[:61])["input_ids"], torch.zeros(1, 258))
    elif history == "a batch":
        scores_of(model, encoded(tokenizer, passage[:45], "8342", passage), used)
    elif history == "beams":
        scores_of(model, encoded(tokenizer, passage[:30]), used, num_beams=3, max_new_tokens=16)
    else:

        def fail_later(ids: Tensor, scores: Tensor) -> Tensor:
            assert ids.shape[1] < 48
            return scores

        with pytest.raises(AssertionError):
            generated(model, inputs, used, fail_later)
        used(inputs["input_ids"][:, :40], torch.zeros(1, 258))
    assert torch.equal(scores_of(model, inputs, used), scores_of(model, inputs, fresh))


def test_a_pad_before_the_text_is_never_part_of_it(
    models: dict[str, Any], datastore: Datastore, folders: dict[str, Path], passage: str
) -> None:
    """The habit for GPT-2: the tokens of padding, end and begin are one."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders["llama"], pad_token="<|endoftext|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.bos_token_id
    model, ids = models["llama"], encoded(tokenizer, passage[:30])["input_ids"]
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    longer = encoded(tokenizer, passage[:30], passage[:90])
    alone, together = (
        scores_of(model, inputs, processor)[:, 0] for inputs in (encoded(tokenizer, passage[:30]), longer)
    )
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    # A step that does not follow from the one before.
    beams = [
        scores_of(model, inputs, processor, num_beams=3)[0, 0] for inputs in (encoded(tokenizer, passage[:30]), longer)
    ]
    torch.testing.assert_close(*beams, rtol=1e-4, atol=1e-4)
    # The same token in the text has the mask 1.
    begun = torch.cat((torch.tensor([[tokenizer.bos_token_id]]), ids), 1)
    scores_of(model, {"input_ids": begun, "attention_mask": torch.ones_like(begun)}, processor)
    assert processor._texts[0].row.tokens[0] == tokenizer.bos_token_id
    # Without a mask, all of them are padding.
    scores = torch.zeros(1, 258)
    assert torch.equal(processor(torch.cat((begun[:, :1], begun), 1), scores), processor(ids, scores))


@pytest.mark.parametrize("history", [False, True])
def test_after_embeddings_copying_begins_with_the_generated_tokens(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, history: bool
) -> None:
    model, inputs = models["llama"], encoded(tokenizer, passage[:60], passage[30:70])
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=2)
    if history:
        scores_of(model, inputs, processor)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])} | {
        "attention_mask": inputs["attention_mask"]
    }
    plain = scores_of(model, embedded, lambda _, scores: scores.log_softmax(-1))
    mixed = scores_of(model, embedded, processor)
    torch.testing.assert_close(mixed[0], plain[0])
    assert all(text.prompt == 0 and len(text.row.tokens) == 5 for text in processor._texts)
    assert processor.sources(model.generate(**embedded, logits_processor=[processor], max_new_tokens=9)) == [[], []]


@pytest.mark.parametrize("drafts", ["assistant", "itself", "prompt lookup"])
def test_drafts_change_no_token_and_the_prompt_alone_earns_trust(
    models: dict[str, Any],
    datastore: Datastore,
    tokenizer: Any,
    passage: str,
    drafts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, learned = models["llama"], encoded(tokenizer, passage[:60]), set[int]()
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=2)
    expected = generated(model, inputs, processor)
    learn = processor._trust
    monkeypatch.setattr(processor, "_trust", lambda row: learned.add(len(row.tokens)) or learn(row))
    options = {"assistant": {"assistant_model": models["phi"]}, "itself": {"assistant_early_exit": 1}}
    found = generated(model, inputs, processor, **options.get(drafts, {"prompt_lookup_num_tokens": 3}))
    assert torch.equal(found, expected)
    assert learned == {60}


def test_a_copy_of_the_model_generates_with_its_own_weights(
    folders: dict[str, Path], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    inputs = encoded(tokenizer, passage[:60])
    plain = generated(model, inputs)
    for _ in range(2):  # opened twice, announced once
        processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    other, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert torch.equal(generated(model, inputs), plain)
    assert torch.equal(generated(stored, inputs), plain)
    assert not torch.equal(generated(other, inputs), plain)
    assert generated(other, inputs, processor).shape == plain.shape
    again = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, stored)
    for part in (inputs, encoded(tokenizer, passage[:84])):
        assert torch.equal(generated(stored, part, again), generated(model, part, processor))


def test_a_rejected_draft_leaves_no_trace(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    """As in assisted generation: tokens are added one by one, then some are taken back."""
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models["llama"], k=2)
    ids, scores = encoded(tokenizer, passage[:120])["input_ids"], torch.randn(1, 258)
    first = processor(ids[:, :80], scores)
    straight = [processor(ids[:, :stop], scores) for stop in range(81, 90)]
    assert torch.equal(processor(ids[:, :80], scores), first)
    wrong = torch.cat((ids[:, :82], torch.zeros(1, 30, dtype=torch.int64)), 1)
    for stop in range(81, 112):
        processor(wrong[:, :stop], scores)
    assert torch.equal(processor(ids[:, :83], scores), straight[2])


def test_another_batch_of_the_next_length_begins_anew(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    model, ids = models["llama"], encoded(tokenizer, passage)["input_ids"]
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    first, other = ids[:, :40].repeat(2, 1), torch.cat((ids[:, :41], ids[:, 30:71]))
    scores = torch.randn(2, model.config.vocab_size)
    processor(first, scores)
    mixed = processor(other, scores)
    fresh = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    # The first text continues one of the step before, the second one is a new prompt.
    assert torch.equal(mixed[1], fresh(other[1:], scores[1:])[0])
    assert processor._texts[0].prompt == 40
    assert processor._texts[1].prompt == 41


def test_a_score_of_minus_infinity_stays(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models["llama"])
    ids, scores = encoded(tokenizer, passage[:200])["input_ids"], torch.zeros(1, 258)
    copied = int(processor(ids, scores).argmax())
    scores[0, copied] = -torch.inf
    assert processor(ids, scores)[0, copied] == -torch.inf


def test_sources_are_the_runs_that_were_copied(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str
) -> None:
    model, inputs = models["mamba"], encoded(tokenizer, passage[:150], "8342")
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model)
    sequences = model.generate(**inputs, logits_processor=[processor], max_new_tokens=NEW, do_sample=False)
    (run, *others), none = processor.sources(sequences)
    assert run.documents == ("trained-14",)
    assert run.text == passage[: 150 + NEW] == tokenizer.decode(sequences[0, run.first : run.first + run.tokens])
    assert not others
    assert not none
    assert processor.sources()[0][0].text == passage[: 150 + NEW - 1]


@pytest.mark.parametrize("k", [0, 2])
def test_copied_tokens_are_what_the_mixture_has_more_than_the_model(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, k: int
) -> None:
    model, inputs = models["llama"], encoded(tokenizer, passage[:150], "8342")
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, model, k=k)
    outputs = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    out = model.generate(**inputs, logits_processor=[processor], max_new_tokens=NEW, do_sample=False, **outputs)
    expected = torch.zeros(2)
    for token, logits, mixed in zip(out.sequences[:, -NEW:].T, out.logits, out.scores, strict=True):
        ratios = mixed - logits.float().log_softmax(-1)  # the smallest is that of tokens without votes
        expected += 1 - (ratios.amin(-1) - ratios.gather(1, token[:, None])[:, 0]).exp()
    assert processor.copied_tokens(out.sequences) == pytest.approx(expected.tolist(), abs=1e-3)
    assert expected.min() > NEW / 2


def test_copied_tokens_need_the_model(models: dict[str, Any], datastore: Datastore, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="needs the model"):
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer).copied_tokens(torch.zeros(1, 3, dtype=torch.int64))


def test_it_generates_what_our_own_llama_generates(
    models: dict[str, Any], folders: dict[str, Path], datastore: Datastore, tokenizer: Any, passage: str, tmp_path: Path
) -> None:
    base, added = tmp_path / "base.safetensors", tmp_path / "added.safetensors"
    options = ["--chunk-length", "16", "--precision", "float32"]
    assert main(["import", str(folders["llama"]), "--output", str(base), *options]) == 0
    command = [
        "add-retrieval",
        str(base),
        "--datastore",
        str(datastore.folder),
        "--output",
        str(added),
        "--tokens",
        "500",
    ]
    assert main([*command, "--k", "2"]) == 0
    own = LanguageModel.open(added, device="cpu")
    assert own.model.copy_head is not None
    write_networks(tmp_path / "networks.safetensors", {}, own.model.copy_head.state_dict())
    processor = DatastoreLogitsProcessor.open(
        datastore.folder, tokenizer, models["llama"], networks=tmp_path / "networks.safetensors", k=2
    )
    for text in (passage[:150], passage[33:90], "8342 6190"):
        inputs, settings = encoded(tokenizer, text), GenerationSettings(max_tokens=NEW, temperature=0)
        steps = own.generate([inputs["input_ids"][0].numpy()], settings, 2)
        expected = [token.token for step in steps for token in step]
        assert generated(models["llama"], inputs, processor)[0, : len(expected)].tolist() == expected


def test_networks_of_a_file_are_used(
    models: dict[str, Any], folders: dict[str, Path], datastore: Datastore, tokenizer: Any, passage: str, tmp_path: Path
) -> None:
    file = tmp_path / "added.safetensors"
    command = ["add-retrieval", str(folders["phi"]), "--datastore", str(datastore.folder), "--output", str(file)]
    assert main([*command, "--k", "2", "--tokens", "500"]) == 0
    never = {name: torch.full_like(tensor, -9.0) for name, tensor in open_networks(file).weights.items()}
    write_networks(tmp_path / "never.safetensors", {}, never)
    ids, scores = encoded(tokenizer, passage[:100])["input_ids"], torch.randn(1, 258)
    opened_with = [
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models["phi"], networks=networks)(ids, scores)
        for networks in (file, tmp_path / "never.safetensors")
    ]
    assert (opened_with[0] - scores.log_softmax(-1)).abs().max() > 0.1
    torch.testing.assert_close(opened_with[1], scores.log_softmax(-1))


@pytest.mark.parametrize("k", [0, 2])
def test_the_networks_of_the_package_in_a_file_change_no_bit(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, tmp_path: Path, k: int
) -> None:
    write_networks(tmp_path / "same.safetensors", {"fitted_to": "other text"}, initial_weights())
    ids, scores = encoded(tokenizer, passage[:100])["input_ids"], torch.randn(1, 258)
    mixed = [
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models["phi"], networks=networks, k=k)(ids, scores)
        for networks in ("", tmp_path / "same.safetensors")
    ]
    assert torch.equal(*mixed)


def test_networks_that_cannot_be_read_are_refused_by_name(datastore: Datastore, tokenizer: Any, tmp_path: Path) -> None:
    other, less = tmp_path / "other.safetensors", tmp_path / "less.safetensors"
    save_tensors(initial_weights(), other)
    with pytest.raises(InputError, match=r"other\.safetensors does not have the format .*`retro add-retrieval MODEL"):
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer, networks=other)
    write_networks(less, {}, {name: tensor for name, tensor in initial_weights().items() if "datastore" in name})
    with pytest.raises(InputError, match=r"less\.safetensors': it has no neighbors\. .*--output FILE\.safetensors`"):
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer, networks=less, k=2)


def test_what_does_not_fit_is_refused_by_name(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path / "other", "<|first|>"))
    with pytest.raises(
        InputError, match=r"another tokenizer than .*other.*--tokenizer.kind huggingface --tokenizer.path"
    ):
        DatastoreLogitsProcessor.open(datastore.folder, other)
    with pytest.raises(InputError, match=r"copy_strength = 2 .*0 to 1"):
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer, copy_strength=2)
    with pytest.raises(InputError, match=r"the model has 100 ids"):
        DatastoreLogitsProcessor.open(datastore.folder, tokenizer)(
            torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 100)
        )


def test_a_long_prompt_is_judged_by_its_end(
    models: dict[str, Any], datastore: Datastore, tokenizer: Any, passage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retro.huggingface.logits_processor.LONGEST_PROMPT", 48)
    processor = DatastoreLogitsProcessor.open(datastore.folder, tokenizer, models["llama"], k=2)
    scores = torch.randn(1, 258)
    ids = encoded(tokenizer, "8342 6190 " * 20 + passage[:120])["input_ids"]
    trust = [
        processor(part, scores) is not None and processor._texts[0].row.trust for part in (ids, ids[:, 320 - 48 :])
    ]
    np.testing.assert_allclose(trust[0], trust[1], rtol=1e-4)
