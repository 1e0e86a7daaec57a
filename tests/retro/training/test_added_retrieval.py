"""A model with added retrieval equals its base OFF, copies ON, and works wherever a checkpoint does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.votes import as_columns, read_votes
from pipelines.config import Config
from retro.batch.inputs import Inputs
from retro.checkpoints.checkpoint import Checkpoint, load_model, open_checkpoint
from retro.checkpoints.tensor_files import index, read_tensors
from retro.copying.switch import ALL_SOURCES, ENTERS, PRIOR, RETRIEVAL
from retro.data.batches import read_sequences
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse, searching
from retro.device import choose_placement
from retro.evaluation.sets import EvaluationSet
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro
from retro.model_settings import ModelSettings, updated
from retro.training.fitted_copy_head import CopyFit, add_retrieval
from retro.training.run_folder import read_metrics
from retro.training.trainer import train
from tests.conftest import build_local, tiny_config, without_stages

HERE = choose_placement("cpu", "float32")
BASES = {
    "plain": {"retrieval.cca_layers": ()},
    "own context": {"retrieval.cca_layers": (), "copy_head.context": True},
    "cross-attention": {},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    return replace(tiny_config(tmp_path_factory.mktemp("added"), tiny_corpus), datastore=tiny_datastore.folder)


def trained(config: Config, name: str, changes: dict[str, object], **sections: object) -> Checkpoint:
    made = replace(config, run=config.run.with_name(name), model=updated(config.model, changes), **sections)
    return open_checkpoint(train(made.run, made.run_settings).checkpoint)


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest, config: Config) -> Checkpoint:
    return trained(config, request.param, BASES[request.param])


@pytest.fixture(scope="module")
def plain(config: Config) -> Checkpoint:
    return trained(config, "alone", BASES["plain"])


def test_exactly_the_tokens_that_are_asked_for_are_counted(plain: Checkpoint, config: Config, tmp_path: Path) -> None:
    counted = list[int]()
    added(plain, config.datastore, tmp_path / "a.safetensors", num_tokens=300, advance=counted.append)
    assert (sum(counted), len(counted)) == (300, 5)  # sequences of 64 tokens


def added(base: Checkpoint, folder: Path, file: Path, **options: Any) -> tuple[Checkpoint, CopyFit]:
    fit = add_retrieval(base, folder, file, HERE, **{"k": 2, "num_tokens": 1000} | options)
    return open_checkpoint(file), fit


@torch.no_grad()
def logits(checkpoint: Checkpoint, neighbors: Tensor | None = None) -> Tensor:
    """Of 64 tokens that repeat, so that a model with own-context copying copies."""
    return load_model(checkpoint, HERE.device)(Inputs((torch.arange(64) % 20)[None], neighbors=neighbors))


def test_off_equals_the_base_to_the_bit_and_on_copies(
    base: Checkpoint, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    found, fit = added(base, tiny_datastore.folder, tmp_path / "added.safetensors")
    weights, before = read_tensors(index(found.weights)), read_tensors(index(base.weights))
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert {name.rpartition(".")[0] for name in set(weights) - set(before)} == {"copy_head.neighbors"}
    assert torch.equal(logits(found), logits(base))
    neighbors = torch.arange(4 * 2 * 32).view(1, 4, 2, 32) % 40
    assert not torch.equal(logits(found, neighbors), logits(base, neighbors))
    assert fit.after < fit.off

    text = tiny_datastore.train.tokens.gather(np.arange(4)).reshape(-1).astype(np.int64)
    of_base = LanguageModel.open(base.path, tiny_datastore.folder).score([text])[0]
    model = LanguageModel.open(found.path)  # it names the datastore
    assert np.array_equal(model.score([text])[0], of_base)
    assert not np.array_equal(model.score([text], k=2)[0], of_base)


def test_the_decoder_can_read_the_neighbors_too(base: Checkpoint, tiny_datastore: Datastore, tmp_path: Path) -> None:
    file = tmp_path / "reads.safetensors"
    if base.model.retrieval.cca_layers:
        with pytest.raises(InputError, match=r"reader = 'decoder': .* reads neighbors with cross-attention .*\[2, 3\]"):
            added(base, tiny_datastore.folder, file, reader="decoder")
        return
    found, fit = added(base, tiny_datastore.folder, file, reader="decoder")
    assert (found.model.decoder_reads, found.model.copy_head.neighbors) == (True, True)
    assert torch.equal(logits(found), logits(base))
    copies, _ = added(base, tiny_datastore.folder, tmp_path / "copies.safetensors")
    neighbors = torch.arange(4 * 2 * 32).view(1, 4, 2, 32) % 40
    assert not torch.equal(logits(found, neighbors), logits(copies, neighbors))
    assert fit.after < fit.before

    text = tiny_datastore.train.tokens.gather(np.arange(4)).reshape(-1).astype(np.int64)
    model = LanguageModel.open(found.path)
    assert np.array_equal(model.score([text])[0], LanguageModel.open(base.path, tiny_datastore.folder).score([text])[0])
    scores, settings = model.score([text], k=2)[0], GenerationSettings(max_tokens=4, temperature=0, ignore_eos=True)
    assert not np.array_equal(scores, model.score([text])[0])
    (prompt,) = [text[:40]]
    new = [token for step in model.generate([prompt], settings, k=2) for token in step]
    whole = np.append(prompt, [token.token for token in new])
    again = model.score([whole], k=2)[0][-len(new) :]
    np.testing.assert_allclose([token.log_probability for token in new], again, rtol=1e-3, atol=1e-3)


def test_the_file_names_its_base_and_its_datastore(
    plain: Checkpoint, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    base = plain
    found, fit = added(base, tiny_datastore.folder, tmp_path / "added.safetensors")
    assert (found.started_from, found.datastores) == (base.fingerprint, [tiny_datastore.fingerprint])
    assert found.folders == [str(tiny_datastore.folder.resolve())]
    assert (found.step, found.tokens, found.model.copy_head.neighbors) == (base.step, base.tokens, True)
    again, other = added(base, tiny_datastore.folder, tmp_path / "again.safetensors")
    assert (again.fingerprint, other) == (found.fingerprint, fit)
    assert again.path.read_bytes() == found.path.read_bytes()
    with pytest.raises(InputError, match="copies from neighbors already"):
        added(found, tiny_datastore.folder, tmp_path / "twice.safetensors")


def test_a_retrofit_goes_on_from_fitted_networks(
    config: Config, plain: Checkpoint, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    found, _ = added(plain, tiny_datastore.folder, tmp_path / "added.safetensors")
    still = replace(config.train, steps=2, lr=1e-30, warmup_steps=0, init_from=str(found.path), weights="retrieval")
    changes = {"copy_head.neighbors": True, **BASES["plain"]}
    on = trained(config, "on", changes, train=still)
    weights = read_tensors(index(on.weights))
    for name, tensor in read_tensors(index(found.weights)).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-20)  # zeros move by the learning rate


def test_a_base_without_retrieval_takes_the_chunk_length_of_the_datastore(
    tiny_corpus: Path, config: Config, plain: Checkpoint, tmp_path: Path
) -> None:
    base, other = plain, tiny_config(tmp_path, tiny_corpus, chunks=replace(config.chunks, chunk_length=8))
    build_local(other)
    found, _ = added(base, other.datastore, tmp_path / "added.safetensors")
    assert (base.model.chunk_length, found.model.chunk_length) == (16, 8)
    assert torch.equal(logits(found), logits(base))
    retro = trained(config, "long", {})
    with pytest.raises(InputError, match=r"model\.chunk_length = 16, but .* has chunk_length = 8"):
        added(retro, other.datastore, tmp_path / "refused.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda base: {"base": replace(base, num_ids=7)}, "tokenizer has 7 ids, but .* has vocab_size"),
        (lambda base: {"base": replace(base, tokenizer="x")}, "datastore has another tokenizer than the model"),
        (lambda base: {"k": 100}, r"k = 100: .* stores 6 neighbors of each chunk \(neighbors\.stored\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    plain: Checkpoint, tiny_datastore: Datastore, tmp_path: Path, change: Callable, words: str
) -> None:
    options = {"base": plain, **change(plain)}
    with pytest.raises(InputError, match=words):
        added(options.pop("base"), tiny_datastore.folder, tmp_path / "refused.safetensors", **options)
    assert not list(tmp_path.iterdir())


def test_a_datastore_with_votes_adds_both_sources_of_retrieval(
    config: Config, voting_datastore: Datastore, tmp_path: Path
) -> None:
    base = trained(config, "voting", BASES["own context"])
    found, fit = added(base, voting_datastore.folder, tmp_path / "added.safetensors")
    assert (found.model.copy_head.neighbors, found.model.copy_head.datastore) == (True, True)
    assert torch.equal(logits(found), logits(base))
    near, one = added(base, voting_datastore.folder, tmp_path / "near.safetensors", names=["neighbors"])
    assert (near.model.copy_head.neighbors, near.model.copy_head.datastore) == (True, False)
    assert fit.after < one.after
    then, _ = added(near, voting_datastore.folder, tmp_path / "then.safetensors")
    assert then.model.copy_head.datastore
    with pytest.raises(InputError, match="copies from neighbors already"):
        added(near, voting_datastore.folder, tmp_path / "no.safetensors", names=["neighbors"])
    with pytest.raises(InputError, match="copies from neighbors already"):
        added(then, voting_datastore.folder, tmp_path / "no.safetensors")


def test_without_stored_votes_the_networks_are_fitted_to_votes_that_are_searched(
    config: Config, voting_datastore: Datastore, tmp_path: Path
) -> None:
    folder = without_stages(voting_datastore, tmp_path / "datastore", "votes").folder
    base = trained(config, "without votes", BASES["plain"])
    _, stored = added(base, voting_datastore.folder, tmp_path / "stored.safetensors", names=["datastore"])
    found, fit = added(base, folder, tmp_path / "added.safetensors")
    assert (found.model.copy_head.neighbors, found.model.copy_head.datastore) == (True, True)
    _, searched = added(base, folder, tmp_path / "searched.safetensors", names=["datastore"])
    assert abs(searched.num_tokens - stored.num_tokens) < 0.02 * stored.num_tokens
    assert searched.off == pytest.approx(stored.off, rel=0.02)
    assert searched.after == pytest.approx(stored.after, rel=0.02)
    assert fit.after < searched.after < searched.before < searched.off
    text = Datastore.open(folder).train.tokens.gather(np.arange(4)).reshape(-1).astype(np.int64)
    model = LanguageModel.open(found.path)
    assert model.score([text], k=2)[0].sum() > model.score([text])[0].sum()


def test_of_a_datastore_without_embeddings_neighbors_and_votes_are_searched(
    config: Config, plain: Checkpoint, voting_datastore: Datastore, tmp_path: Path
) -> None:
    stages = [stage for stage in voting_datastore.manifest["fingerprints"] if stage not in ("chunk", "suffixes")]
    datastore = without_stages(voting_datastore, tmp_path / "datastore", *stages)
    names = ["context", "neighbors", "datastore"]
    found, fit = added(plain, datastore.folder, tmp_path / "added.safetensors", names=names)
    _, without = added(plain, datastore.folder, tmp_path / "less.safetensors", names=["context", "datastore"])
    assert fit.after < fit.before
    assert fit.after < without.after  # the same tokens
    model = LanguageModel.open(found.path)
    text = datastore.train.tokens.gather(np.arange(4)).reshape(-1).astype(np.int64)
    near, none = model.score([text], k=2)[0].sum(), model.score([text])[0].sum()
    assert near > none
    settings = GenerationSettings(max_tokens=20, temperature=0, ignore_eos=True)
    assert sum(len(step) for step in model.generate([text[:40]], settings, k=2)) == 20
    EvaluationSet("held-out", datastore).check(found.model, 2)
    (use,) = searching(datastore, [NeighborUse(2, votes=True)])
    batch = as_tensors(read_sequences(datastore.valid, RetrievalSet.of(datastore), [(0, 8)], 8, use))
    assert batch.neighbor_lengths.any()
    opened = load_model(found, HERE.device).eval()
    assert opened.token_losses(batch).sum() < opened.token_losses(batch.off()).sum()


def test_an_added_context_must_earn_trust_and_a_trained_one_needs_none(
    config: Config, plain: Checkpoint, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    found, _ = added(plain, tiny_datastore.folder, tmp_path / "added.safetensors", names=["context"])
    head = load_model(found, HERE.device).copy_head
    assert (found.model.copy_head.context_added, head is not None and head.switch) == (True, ALL_SOURCES)
    base = trained(config, "own", BASES["own context"])
    both, _ = added(base, tiny_datastore.folder, tmp_path / "both.safetensors")
    head = load_model(both, HERE.device).copy_head
    assert (both.model.copy_head.context_added, head is not None and head.switch) == (False, RETRIEVAL)
    # Training further from the added context, with the settings of its model, leaves OFF as it is.
    still = replace(config.train, steps=1, lr=1e-30, warmup_steps=0, init_from=str(found.path))
    again = trained(replace(config, model=ModelSettings(preset="base")), "further", {}, train=still)
    assert again.model.copy_head == found.model.copy_head
    torch.testing.assert_close(logits(again), logits(found))


def test_no_text_is_harmed_by_an_added_context_scored_or_generated_off(
    plain: Checkpoint, tiny_datastore: Datastore, tmp_path: Path
) -> None:
    names = ["context", "neighbors"]
    found, _ = added(plain, tiny_datastore.folder, tmp_path / "added.safetensors", names=names)
    opened, alone = (LanguageModel.open(one.path, tiny_datastore.folder, device="cpu") for one in (found, plain))
    assert opened.model.copy_head is not None
    with torch.no_grad():  # as of a network that was fitted to other text
        opened.model.copy_head.context.outer_bias.fill_(1.0)
    drawn = np.random.default_rng(0).integers(3, 6, 60).astype(np.int64)
    repeated = np.tile(np.arange(3, 23, dtype=np.int64), 3)
    changes = [
        float((one - two).sum())
        for one, two in zip(*(m.score([drawn, repeated]) for m in (alone, opened)), strict=True)
    ]
    assert changes[0] < -math.log(1 - PRIOR) - 60 * math.log(1 - ENTERS)
    assert changes[1] < -20
    for off, whole in zip(
        opened.score_off_and_on([drawn, repeated], 2)[0], opened.score([drawn, repeated]), strict=True
    ):
        np.testing.assert_allclose(off, whole, rtol=1e-5, atol=1e-5)
    settings = GenerationSettings(max_tokens=4, temperature=0, ignore_eos=True)
    generated = [token for step in opened.generate([repeated], settings) for token in step]
    assert [token.token for token in generated] == repeated[:4].tolist()
    np.testing.assert_allclose(  # the first token has the trust of the prompt, as in scoring
        generated[0].log_probability, opened.score([np.append(repeated, 3)])[0][-1], rtol=1e-4, atol=1e-4
    )


def test_a_model_that_copies_from_the_datastore_scores_live_what_it_is_evaluated_with(
    plain: Checkpoint, voting_datastore: Datastore, tmp_path: Path
) -> None:
    found, _ = added(plain, voting_datastore.folder, tmp_path / "added.safetensors", names=["datastore"])
    assert not found.model.retrieves
    split = voting_datastore.valid
    real = np.arange(split.chunk_length) < split.lengths.read(*split.chunk_range(0))[:, None]
    text = split.tokens.read(*split.chunk_range(0))[real].astype(np.int64)[:60]
    opened = LanguageModel.open(found.path, device="cpu")
    votes = as_columns(read_votes(split, np.arange(*split.chunk_range(0)))[real][:59])
    inputs = Inputs(torch.from_numpy(text[None, :-1]), votes=torch.from_numpy(votes[None]))
    with torch.no_grad(), opened.placement.autocast():
        expected = opened.model(inputs)[0].log_softmax(-1).gather(1, torch.from_numpy(text[1:, None]))[:, 0]
    # Of frequent matches in several shards, other occurrences may be counted, which changes trust a little.
    assert (np.abs(opened.score([text], k=1)[0] - expected.numpy()) < 1e-3).mean() > 0.9
    assert (np.abs(opened.score([text])[0] - expected.numpy()) < 1e-5).mean() < 0.1
    settings = GenerationSettings(max_tokens=5)
    assert sum(map(len, opened.generate([text[:20]], settings, k=1))) == 5


def test_training_with_the_datastore_as_a_source_learns_its_gate(
    config: Config, voting_datastore: Datastore, tmp_path: Path
) -> None:
    changes = {"copy_head.datastore": True, "copy_head.context": True, **BASES["plain"]}
    run = trained(replace(config, datastore=voting_datastore.folder), "scratch", changes)
    metrics = read_metrics(config.run.with_name("scratch"))
    first, weights = Retro(run.model), read_tensors(index(run.weights))
    assert not torch.equal(
        weights["copy_head.datastore.outer_bias"], first.state_dict()["copy_head.datastore.outer_bias"]
    )
    last = [line for line in metrics if "valid_bits_per_byte_on" in line][-1]
    assert last["valid_bits_per_byte_on"] < last["valid_bits_per_byte_off"]
