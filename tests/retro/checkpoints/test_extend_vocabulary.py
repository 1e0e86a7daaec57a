"""Extended vocabularies: old rows, hidden states and logits stay bit-equal; new rows are means of their parts' rows."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from indexing.store.errors import InputError
from retro.checkpoints.checkpoint import FORMAT_VERSION, Checkpoint, load_model, open_checkpoint
from retro.checkpoints.extend_vocabulary import check_tables, extend_tables, tables
from retro.checkpoints.single_file import write_exported
from retro.model.retro import Retro
from retro.training.initial_weights import load_initial_weights
from tests.retro.small_model import SCHEMES, V, batch, build, logits

CUTS = [[3], [1, 2, 4], [7, 7], [V - 1, 0]]


def write_checkpoint(model: Retro, folder: Path, num_ids: int = 0, datastores: list[str] | None = None) -> Checkpoint:
    """Write a checkpoint of a model as `retro export` does."""
    sections: dict[str, Any] = {"data": {"datastores": [], "sequence_length": 64}, "train": {"precision": "float32"}}
    state = {
        "step": 5,
        "tokens": 640,
        "settings": {"model": asdict(model.settings), **sections},
        "datastores": datastores or [],
        "fingerprint": "0" * 16,
        "num_ids": num_ids or model.settings.vocab_size,
        "format_version": FORMAT_VERSION,
    }
    write_exported(state, model.state_dict(), folder / "old.safetensors")
    return open_checkpoint(folder / "old.safetensors")


def extend(checkpoint: Checkpoint, first_id: int, folder: Path) -> Checkpoint:
    extend_tables(checkpoint, first_id, CUTS, folder / "new.safetensors")
    return open_checkpoint(folder / "new.safetensors")


OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "shared": {"shared_embeddings": True},
    "plain": {"retrieval.cca_layers": ()},
    "of others": {"scheme": "neox", "tied_embeddings": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_old_ids_keep_their_rows_hidden_states_and_logits(tmp_path, options):
    model = build(**options)
    larger = load_model(extend(write_checkpoint(model, tmp_path), V, tmp_path), torch.device("cpu"))
    assert larger.settings == replace(model.settings, vocab_size=V + len(CUTS))
    old, new = model.state_dict(), larger.state_dict()
    names = tables(model.settings)
    for name in old:
        assert torch.equal(old[name], new[name][:V] if name in names else new[name])
    assert len(names) == 1 + (not model.settings.tied_embeddings) + ("encoder.embedding.weight" in old)
    for name in names:
        assert len(new[name]) == V + len(CUTS)
        for row, cut in zip(new[name][V:], CUTS, strict=True):
            assert torch.allclose(row, old[name][cut].mean(0), atol=1e-6)
    tokens, *neighbors = batch()
    for inputs in ((tokens,), (tokens, None, *neighbors)):
        before, after = logits(model, *inputs), logits(larger, *inputs)
        assert torch.equal(before, after[..., :V])
        # If an output row is a mean, its logit is the mean of the logits.
        assert torch.allclose(after[..., V + 1], before[..., [1, 2, 4]].mean(-1), atol=1e-4)


def test_padding_rows_are_used_first(tmp_path):
    model, ids = build(), V - 6
    checkpoint = write_checkpoint(model, tmp_path, num_ids=ids)
    larger = extend(checkpoint, ids, tmp_path)
    assert (larger.model.vocab_size, larger.num_ids) == (V, ids + len(CUTS))
    old, new = model.embedding.weight, load_model(larger, torch.device("cpu")).embedding.weight
    assert torch.equal(old[:ids], new[:ids])
    assert torch.equal(old[ids + len(CUTS) :], new[ids + len(CUTS) :])
    assert torch.allclose(new[ids + 1], old[[1, 2, 4]].mean(0), atol=1e-6)


def test_an_id_without_a_row_gets_the_mean_of_all_rows(tmp_path):
    """The padding id of an imported model: its tokenizer has the id, its table has no row."""
    model = build("rope", tied_embeddings=False)
    larger = load_model(extend(write_checkpoint(model, tmp_path), V + 1, tmp_path), torch.device("cpu"))
    assert model.head is not None
    assert larger.head is not None
    assert larger.head.weight.shape == (V + 1 + len(CUTS), model.settings.d_model)
    assert torch.allclose(larger.head.weight[V], model.head.weight.mean(0), atol=1e-6)
    assert torch.equal(larger.head.weight[:V], model.head.weight)


def test_the_file_keeps_its_dtype_and_names_no_datastore(tmp_path):
    model = build().to(torch.bfloat16)
    checkpoint = write_checkpoint(model, tmp_path, datastores=["1" * 16])
    larger = extend(checkpoint, V, tmp_path)
    assert load_model(larger, torch.device("cpu")).settings.vocab_size == V + len(CUTS)
    from retro.checkpoints.tensor_files import index

    assert {one.dtype for one in index(larger.weights).values()} == {torch.bfloat16}
    assert (larger.datastores, larger.settings["data"]["datastores"]) == ([], [])
    assert larger.fingerprint != checkpoint.fingerprint
    assert (larger.step, larger.tokens) == (5, 640)
    with pytest.raises(InputError, match="no datastore"):
        larger.folders  # noqa: B018


def test_a_run_can_start_from_the_extended_model(tmp_path):
    larger = extend(write_checkpoint(build(), tmp_path), V, tmp_path)
    torch.manual_seed(1)
    model = Retro(larger.model)
    load_initial_weights(larger, model, [])
    assert torch.equal(model.embedding.weight, load_model(larger, torch.device("cpu")).embedding.weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_are_the_parameters_with_a_row_per_id(scheme):
    settings = replace(build(scheme).settings, tied_embeddings=False)
    assert set(tables(settings)) == {"embedding.weight", "head.weight", "encoder.embedding.weight"}


@pytest.mark.parametrize(
    ("datastores", "num_ids", "num_model_tokens", "fits"),
    [(["1" * 16], V, V, True), (["1" * 16], V - 1, V - 1, False), (["1" * 16], V + 1, V, False),
     ([], V, V, True), ([], V + 1, V, True), ([], V - 9, V - 9, True), ([], V + 2, V + 1, False)],
)  # fmt: skip
def test_a_tokenizer_of_another_size_is_rejected(tmp_path, datastores, num_ids, num_model_tokens, fits):
    checkpoint = write_checkpoint(build(), tmp_path, datastores=datastores)
    if fits:
        check_tables(checkpoint, num_ids, num_model_tokens)
    else:
        with pytest.raises(InputError, match=rf"{V} .* {V} .* {num_ids}"):
            check_tables(checkpoint, num_ids, num_model_tokens)


def test_far_more_rows_than_ids_are_rejected(tmp_path):
    checkpoint = write_checkpoint(build("rope", vocab_size=2000), tmp_path)
    check_tables(checkpoint, 1500, 1500)
    with pytest.raises(InputError, match="Name the tokenizer of this model"):
        check_tables(checkpoint, 900, 900)
