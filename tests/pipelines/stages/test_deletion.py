"""Deleted documents are in no result, no batch and no evaluation, and no rebuild brings them back."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from indexing.dedup.near_duplicates import DedupSettings
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import SPLITS, Datastore, delete_documents
from indexing.store.deletions import Deletions, deleted_ranges, read_deletions, write_deletions
from indexing.store.errors import DatastoreChanged, InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main
from pipelines.config import Config
from pipelines.stages import corpus as corpus_stage
from pipelines.stages.table import _remove_from
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import TrainingData, read_sequences
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.data.windows import document_windows
from retro.evaluation.sets import EvaluationSet
from retro.model.retro import Retro
from retro.server.app import make_app
from retro.server.examples import held_out_passages
from retro.server.page_api import column_values
from retro.server.settings import ServeSettings
from retro.training.run_folder import read_metrics
from retro.training.trainer import train
from tests.conftest import build_local, contents, tiny_config, write_corpus


@pytest.fixture
def datastore(tmp_path, tiny_datastore: Datastore) -> Datastore:
    """A copy in which documents can be deleted."""
    return Datastore.open(shutil.copytree(tiny_datastore.folder, tmp_path / "copy"))


def ids_of(datastore: Datastore, name: str = "train") -> list[str]:
    split = datastore.split(name)
    return [row["id"] for row in split.metadata(range(split.num_documents))]


def all_ids(datastore: Datastore) -> set[str]:
    return {document for name in SPLITS for document in ids_of(datastore, name)}


def config_of(folder: Path, num_documents: int = 40, seed: int = 0) -> Config:
    folder.mkdir(exist_ok=True)
    config = tiny_config(folder, write_corpus(folder / "a.jsonl", num_documents, seed))
    return replace(config, corpus=replace(config.corpus, split=(700, 300, 0)))


# --- what reads skip -------------------------------------------------------------------------------------------------


def test_deleted_documents_disappear_from_results_at_once(datastore: Datastore, capsys) -> None:
    retriever = Retriever.open(datastore.folder)
    text = retriever.tokenizer.decode(datastore.train.tokens.gather(np.array([40]))[0])
    hits = retriever.search([text], 5).hits[0]
    victims = sorted({hit.document_id for hit in hits})
    print_before = datastore.fingerprint
    assert main(["delete", str(datastore.folder), "--ids", *victims]) == 0
    assert f"{len(victims)} documents deleted" in capsys.readouterr().out
    after = retriever.search([text], 5).hits[0]  # the retriever opened before the deletion
    assert len(after) == 5
    assert not {hit.document_id for hit in after} & set(victims)
    assert datastore.fingerprint != print_before
    assert datastore.built == print_before

    split = datastore.train
    gone = {chunk for first, stop in split.deleted for chunk in range(first, stop)}
    assert set(split.neighbor_ids.read(0, split.num_chunks).ravel().tolist()) & gone
    batch = read_sequences(split, RetrievalSet.of(datastore), [(0, split.num_chunks)], split.num_chunks, NeighborUse(2))
    texts = {tuple(row) for row in split.with_continuation(np.array(sorted(gone)))[0].tolist()}
    others = np.array([chunk for chunk in range(split.num_chunks) if chunk not in gone])
    texts -= {tuple(row) for row in split.with_continuation(others)[0].tolist()}  # also in other documents
    read = {tuple(row) for row in batch.neighbors.reshape(-1, 2 * split.chunk_length).tolist()}
    assert texts
    assert not texts & read


def test_remaining_document_is_found_after_deleting_all_others(datastore: Datastore) -> None:
    ids = ids_of(datastore)
    delete_documents(datastore.folder, ids[1:])
    hits = Retriever.open(datastore.folder).search(["alpha beta"], 3).hits[0]
    assert {hit.document_id for hit in hits} == {ids[0]}


def test_batches_hold_no_token_of_a_deleted_document(datastore: Datastore) -> None:
    settings = DataSettings(sequence_length=64, k=2)
    samples = range(datastore.train.num_chunks // 4)  # every chunk once, up to the last incomplete sequence
    before = TrainingData([datastore.folder], settings, retrieval=True).batch(samples)
    delete_documents(datastore.folder, ids_of(datastore)[::3])
    data = TrainingData([datastore.folder], settings, retrieval=True)
    after = data.batch(samples)
    ids = np.array([np.arange(*data.locate(sample)[1]) for sample in samples])
    is_kept = datastore.train.without_deleted(ids) >= 0  # [B, U]
    assert 0.1 < is_kept.mean() < 0.9
    m = datastore.chunk_length
    of_token = is_kept.repeat(m, axis=1)
    assert (after.tokens[~of_token] == datastore.train.pad_id).all()
    assert (after.labels[~of_token] == IGNORED_LABEL).all()
    np.testing.assert_array_equal(after.tokens[of_token], before.tokens[of_token])
    np.testing.assert_array_equal(after.labels[of_token], before.labels[of_token])
    assert (after.lengths[~is_kept] == 0).all()
    assert (after.documents[~is_kept] == -1).all()
    assert (after.documents[is_kept] >= 0).all()  # so no token of another document attends to them
    assert (after.neighbor_lengths[~is_kept] == 0).all()


def test_losses_of_kept_tokens_do_not_depend_on_deleted_ones(datastore: Datastore, tiny_model: Retro) -> None:
    def losses() -> tuple[np.ndarray, np.ndarray]:
        data = TrainingData([datastore.folder], DataSettings(sequence_length=256), retrieval=False)
        batch = as_tensors(data.batch(range(12)))
        with torch.no_grad():
            return tiny_model.token_losses(batch).numpy(), batch.labels.numpy() != IGNORED_LABEL

    before, _ = losses()
    delete_documents(datastore.folder, ids_of(datastore)[::2])
    after, is_scored = losses()
    assert 0.2 < is_scored.mean() < 0.8
    np.testing.assert_allclose(after[is_scored], before[is_scored], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("materialized", [False, True])
def test_no_neighbor_is_read_from_a_deleted_document_of_another_datastore(tmp_path, materialized: bool) -> None:
    other = config_of(tmp_path / "other", seed=1)
    build_local(other)
    config = config_of(tmp_path)
    config = replace(
        config,
        tokenizer=TokenizerSettings(kind="sentencepiece", path=str(other.datastore / "tokenizer/sentencepiece.model")),
        embedder=replace(config.embedder, path=str(other.datastore)),
        neighbors=replace(config.neighbors, extra_datastores=(other.datastore,), materialized=2),
    )
    datastore = build_local(config)
    split, use = datastore.train, NeighborUse(2, materialized=materialized)

    def neighbors() -> set[tuple[int, ...]]:
        batch = read_sequences(split, RetrievalSet.of(datastore), [(0, split.num_chunks)], split.num_chunks, use)
        return {tuple(row) for row in batch.neighbors.reshape(-1, 2 * split.chunk_length).tolist()}

    theirs = Datastore.open(other.datastore).train
    texts = {tuple(row) for row in theirs.with_continuation(np.arange(theirs.num_chunks))[0].tolist()}
    texts -= {tuple(row) for row in split.with_continuation(np.arange(split.num_chunks))[0].tolist()}
    assert texts & neighbors()
    delete_documents(other.datastore, ids_of(Datastore.open(other.datastore)))
    assert not texts & neighbors()


def test_training_on_nothing_but_deleted_documents_is_refused(datastore: Datastore) -> None:
    delete_documents(datastore.folder, ids_of(datastore))
    with pytest.raises(InputError, match="no training chunks that are not deleted"):
        TrainingData([datastore.folder], DataSettings(sequence_length=64, k=0), retrieval=False)


def test_deleted_held_out_documents_are_not_scored(datastore: Datastore) -> None:
    held_out = EvaluationSet("valid", datastore)
    tokens, ids = held_out.tokens, ids_of(datastore, "valid")
    delete_documents(datastore.folder, ids[:2])
    windows = list(document_windows(held_out.split, 4, 2))
    assert {window.text for window in windows} == set(range(2, len(ids)))
    scored = np.concatenate([np.arange(window.scored, window.stop) for window in windows])
    assert held_out.tokens == held_out.split.lengths.gather(scored).sum() < tokens
    delete_documents(datastore.folder, ids)
    assert held_out.is_empty


def test_forms_of_the_page_show_nothing_of_deleted_documents(datastore: Datastore) -> None:
    retriever = Retriever.open(datastore.folder)
    titles = column_values(retriever, "title", "", 1000).values
    victims = ids_of(datastore)[::2] + ids_of(datastore, "valid")[1:]
    delete_documents(datastore.folder, victims)
    kept = {row["title"] for row in datastore.train.metadata(range(datastore.train.num_documents))[1::2]}
    assert set(column_values(retriever, "title", "", 1000).values) == kept < set(titles)
    assert {example.document_id for example in held_out_passages(retriever, 4, 2).examples} <= all_ids(datastore) - {
        *victims
    }


def test_deletions_with_equal_modification_times_are_all_read(tmp_path) -> None:
    for number in range(3):
        ranges = np.array([[10 * each, 10 * each + 5] for each in range(number + 1)])
        write_deletions(tmp_path, Deletions({}, {"train": ranges}))
        os.utime(tmp_path / "deleted.json", (1, 1))
        assert len(deleted_ranges(tmp_path)) == number + 1


def test_deletions_of_an_earlier_version_are_not_forgotten_silently(tmp_path) -> None:
    np.save(tmp_path / "deleted.npy", np.array([[3, 5]]))
    with pytest.raises(InputError, match=r"deleted\.npy.*retro delete"):
        read_deletions(tmp_path)


def test_unknown_id_is_refused_and_nothing_is_deleted(datastore: Datastore, capsys, tmp_path) -> None:
    listed = tmp_path / "ids.txt"
    listed.write_text(f"{ids_of(datastore)[0]}\nno-such-id\n")
    assert main(["delete", str(datastore.folder), "--ids-from", str(listed)]) == 2
    assert "no document 'no-such-id'" in capsys.readouterr().err
    assert not (datastore.folder / "deleted.json").exists()


def test_a_run_resumes_after_a_deletion(datastore: Datastore, tmp_path, tiny_corpus: Path, caplog) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=datastore.folder)
    settings = config.run_settings
    first, whole = (
        replace(settings, train=replace(settings.train, steps=steps, lr_schedule="constant")) for steps in (4, 8)
    )
    train(config.run, first)
    delete_documents(datastore.folder, ids_of(datastore)[::2])
    caplog.set_level("INFO", "retro")
    train(config.run, whole)
    assert "resuming from step 4" in caplog.text
    assert re.search(r"\d chunks of deleted documents are padding", caplog.text)
    assert [line["step"] for line in read_metrics(config.run) if "loss" in line][-1] == 8


@pytest.mark.parametrize("experts", [0, 2])
def test_sequences_of_deleted_documents_alone_leave_the_loss_finite(
    datastore: Datastore, tmp_path, tiny_corpus: Path, experts: int
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=datastore.folder)
    settings = replace(config.run_settings, train=replace(config.train, steps=6, eval_every=6, batch_size=4))
    if experts:
        mixture = replace(settings.model.experts, num_experts=experts)
        settings = replace(settings, model=replace(settings.model, experts=mixture))
    delete_documents(datastore.folder, [each for number, each in enumerate(ids_of(datastore)) if number % 10])
    train(config.run, settings)
    losses = [line["loss"] for line in read_metrics(config.run) if "loss" in line]
    assert np.isfinite(losses).all()
    assert max(losses) > 0


# --- rebuilds --------------------------------------------------------------------------------------------------------


def test_rebuild_leaves_deleted_documents_out_as_if_the_files_lacked_them(tmp_path, caplog) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    victims = {*ids_of(datastore)[::3], *ids_of(datastore, "valid")[:2]}
    delete_documents(datastore.folder, victims)
    caplog.set_level("INFO", "retro")
    for _ in range(2):
        build_local(config, rebuild=True)
        assert f"corpus: {len(victims)} deleted documents are left out" in caplog.text
        caplog.clear()
    rebuilt = build_local(config)
    assert not all_ids(rebuilt) & victims
    assert read_deletions(rebuilt.folder).documents.keys() == victims
    assert not len(rebuilt.train.deleted)
    assert main(["verify", str(rebuilt.folder)]) == 0

    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    other = tmp_path / "other"
    other.mkdir()
    kept = [line for line in lines if line.split('"')[3] not in victims]
    (other / "a.jsonl").write_text("".join(kept))
    whole = build_local(
        replace(config, datastore=other / "datastore", corpus=replace(config.corpus, paths=(str(other / "a.jsonl"),)))
    )
    ours, theirs = (contents(each.folder) for each in (rebuilt, whole))
    arrays = [name for name in theirs if name.endswith((".npy", ".faiss", ".model"))]
    assert len(arrays) > 20
    assert {name: ours[name] for name in arrays} == {name: theirs[name] for name in arrays}


def test_rebuild_of_a_later_stage_keeps_deletions(tmp_path) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    delete_documents(datastore.folder, ids_of(datastore)[:3])
    before = contents(datastore.folder)
    build_local(config, only="embed", rebuild=True)
    build_local(config)
    assert contents(datastore.folder) == before
    assert len(datastore.train.deleted) == 3


def test_appended_documents_with_a_deleted_id_are_left_out(tmp_path, caplog) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    victims = ids_of(datastore)[:3]
    delete_documents(datastore.folder, victims)
    more = write_corpus(tmp_path / "b.jsonl", 40, seed=1)  # with the same ids
    caplog.set_level("INFO", "retro")
    grown = build_local(replace(config, corpus=replace(config.corpus, paths=(str(more),))), append=True)
    assert "00001: 3 deleted documents are left out" in caplog.text
    shards = len(datastore.train.chunk_rows)
    first = sum(grown.train.document_rows[:shards])
    assert not {*victims} & {*ids_of(grown)[first:]}
    assert len(grown.train.deleted) == 3
    both = ids_of(grown)[-1]  # an id of both files
    delete_documents(grown.folder, [both])
    assert sum(len(grown.split(name).deleted) for name in SPLITS) == 5
    rebuilt = build_local(
        replace(config, corpus=replace(config.corpus, paths=(*config.corpus.paths, str(more)))), rebuild=True
    )
    assert not {*victims, both} & all_ids(rebuilt)
    assert main(["verify", str(grown.folder)]) == 0


def test_document_deleted_during_an_append_is_masked_in_the_new_shards(tmp_path, monkeypatch) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    victim = ids_of(datastore)[0]
    more = write_corpus(tmp_path / "b.jsonl", 40, seed=1)
    config = replace(config, corpus=replace(config.corpus, paths=(str(more),)))
    append = corpus_stage.append

    def then_deleted(*arguments) -> None:
        append(*arguments)
        delete_documents(datastore.folder, [victim])

    monkeypatch.setattr(corpus_stage, "append", then_deleted)
    grown = build_local(config, append=True)
    assert {number for name in SPLITS for number in grown.split(name).find_documents([victim])}
    for split in map(grown.split, SPLITS):
        assert split.deleted_documents.tolist() == [*split.find_documents([victim])]


def test_near_copies_of_a_deleted_document_are_kept_by_a_rebuild(tmp_path) -> None:
    config = config_of(tmp_path, 20)
    file = tmp_path / "a.jsonl"
    file.write_text(file.read_text() + file.read_text().replace('"doc-', '"copy-'))
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)), dedup=DedupSettings(within=True))
    first = build_local(config)
    assert "doc-3" in all_ids(first)
    assert "copy-3" not in all_ids(first)
    delete_documents(first.folder, ["doc-3"])
    again = build_local(config, rebuild=True)
    assert "copy-3" in all_ids(again)
    assert "doc-3" not in all_ids(again)


def test_wrong_chunks_of_deleted_documents_are_found_again_by_a_build(tmp_path) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    delete_documents(datastore.folder, ids_of(datastore)[3:5])
    before = read_deletions(datastore.folder)
    write_deletions(datastore.folder, replace(before, chunks={"train": np.array([[0, 1]])}))
    build_local(config)
    np.testing.assert_array_equal(datastore.train.deleted, before.chunks["train"])


def test_a_rebuild_is_refused_by_everything_that_has_the_datastore_open_and_an_append_is_not(tmp_path) -> None:
    config = config_of(tmp_path)
    datastore = build_local(config)
    build_local(config, only="suffixes")
    victim = ids_of(datastore)[0]
    retriever, index = Retriever.open(datastore.folder), SuffixIndex.open(datastore.folder)
    text = retriever.tokenizer.decode(datastore.train.tokens.gather(np.array([0]))[0])
    more = write_corpus(tmp_path / "b.jsonl", 10, seed=1)
    build_local(replace(config, corpus=replace(config.corpus, paths=(str(more),))), append=True)
    build_local(config, only="suffixes")
    with TestClient(make_app(retriever, None, ServeSettings(allowed_hosts=("testserver",)))) as client:
        hits = {"json": {"texts": [text], "k": 3}}
        assert victim in [hit["document_id"] for hit in client.post("/search", **hits).json()["results"][0]]
        assert client.post("/trace", json={"text": text}).json()["runs"]
        delete_documents(datastore.folder, [victim])
        assert client.get("/ready").status_code == 200
        assert victim not in [hit["document_id"] for hit in client.post("/search", **hits).json()["results"][0]]
        for manifest in ("being built", "built"):
            if manifest == "built":
                build_local(config, rebuild=True)
            else:
                _remove_from(datastore.folder, "chunk")
            answers = [
                *(
                    client.get(path)
                    for path in ("/ready", "/chunks/0", f"/documents/{victim}", "/datastore", "/examples")
                ),
                client.post("/search", **hits),
                client.post("/search", json=hits["json"] | {"filters": {"title": "Title 1"}}),
                client.post("/neighbors", json={"text": text, "k": 2}),
                client.post("/trace", json={"text": text}),
            ]
            assert {answer.status_code for answer in answers} == {503}
            for search in (
                lambda: index.longest_match([5, 6]),
                lambda: index.votes(np.array([5, 6])),
                lambda: retriever.neighbors.rank(np.full((1, 16), 5), 2),
                lambda: datastore.train.deleted,
            ):
                with pytest.raises(DatastoreChanged, match="/datastore was built again"):
                    search()
    assert Retriever.open(datastore.folder).search([text], 1).hits[0]
