"""Batches of prepared examples: labels, neighbors, and independence of examples packed into one row."""

from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from indexing.retrieval.retriever import Retriever
from indexing.retrieval.search import ChunkSearch
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.loader import as_tensors
from retro.data.settings import DataSettings
from retro.device import choose_placement
from retro.evaluation.neighbor_prompts import QuestionFormat, find_neighbor_passages
from retro.evaluation.question_sets import Question
from retro.finetuning import prepare as preparing
from retro.finetuning.example_batches import ExampleData, Rows, arrange, pack
from retro.finetuning.prepare import prepare
from retro.finetuning.prepared_examples import Prepared
from retro.finetuning.settings import FinetuneSettings
from retro.finetuning.trainer import answer_loss
from retro.model.retro import Retro
from tests.conftest import contents
from tests.retro.finetuning.examples import INSTRUCTIONS, write_lines

M, K = 16, 2


@pytest.fixture(scope="module")
def tokenizer(retriever: Retriever) -> Tokenizer:
    return retriever.tokenizer


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> FinetuneSettings:
    return FinetuneSettings((write_lines(tmp_path_factory.mktemp("examples") / "examples.jsonl", INSTRUCTIONS),))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, retriever: Retriever, settings: FinetuneSettings) -> Prepared:
    return Prepared(prepare(tmp_path_factory.mktemp("run"), [retriever.datastore.folder], settings, K))


def rows_of(prepared: Prepared, length: int, *, packed: bool) -> Rows:
    return arrange(prepared, DataSettings(sequence_length=length), 0, held_out=0.0, packed=packed)[0]


def losses_by_label(model: Retro, batch: Inputs) -> dict[tuple[int, int], float]:
    """The loss of every label, by (row, position)."""
    nats = torch.inference_mode()(model.token_losses)(as_tensors(batch))
    scored = batch.labels != IGNORED_LABEL
    return {(row, at): float(nats[row, at]) for row, at in zip(*np.nonzero(scored), strict=True)}


def test_examples_are_restored_with_their_answers_as_labels(prepared: Prepared, tokenizer: Tokenizer) -> None:
    batch = rows_of(prepared, 128, packed=False).batch(range(len(INSTRUCTIONS)), 0)
    for row, example in enumerate(INSTRUCTIONS):
        labels = batch.labels[row]
        answer = labels[labels != IGNORED_LABEL]
        assert tokenizer.decode(answer).strip() == example["output"].strip()
        assert answer[-1] == tokenizer.eos_id
        words = ("User: {}\nAssistant: {}", "用户：{}\n助手：{}")[row == len(INSTRUCTIONS) - 1]
        text = words.format(example["instruction"], example["output"].strip())
        tokens = batch.tokens[row, : prepared.lengths[row]]
        assert tokenizer.decode(tokens) == text
        at = np.flatnonzero(labels != IGNORED_LABEL)
        assert np.array_equal(labels[at[:-1]], batch.tokens[row, at[:-1] + 1])  # labels are the next tokens


def test_complete_chunks_read_their_neighbors_and_the_last_chunk_none(prepared: Prepared, retriever: Retriever) -> None:
    batch = rows_of(prepared, 128, packed=False).batch(range(len(INSTRUCTIONS)), K)
    for row, length in enumerate(prepared.lengths.tolist()):
        complete = -(-length // M) - 1
        tokens, lengths, *_ = retriever.neighbors.find(batch.tokens[row, : complete * M].reshape(-1, M), K)
        assert np.array_equal(batch.neighbor_lengths[row, :complete], lengths)
        assert (batch.neighbor_lengths[row, complete:] == 0).all()
        real = np.arange(2 * M) < lengths[..., None]
        assert np.array_equal(batch.neighbors[row, :complete][real], tokens[real])


def test_packing_does_not_change_the_loss(prepared: Prepared, tiny_model: Retro) -> None:
    nats_of = torch.inference_mode()(tiny_model.eval().token_losses)
    single = rows_of(prepared, 128, packed=False)
    for length in (256, 250):  # 250 is not a multiple of the chunk length
        packed = rows_of(prepared, length, packed=True)
        assert len(packed) < len(single) / 2
        batch = packed.batch(range(len(packed)), K)
        assert batch.tokens.shape[1] == length
        for k in (0, K):
            options = {"placement": choose_placement("cpu", "float32"), "token_losses_of": nats_of}
            given = [answer_loss(each, k, 5, 0, **options) for each in (single, packed)]
            assert given[0] == pytest.approx(given[1], rel=1e-5)


def test_a_packed_example_reads_neither_other_examples_nor_their_neighbors(
    prepared: Prepared, tiny_model: Retro
) -> None:
    rows = rows_of(prepared, 256, packed=True)
    number = max(range(len(rows)), key=lambda number: len(rows.rows[number]))
    batch = rows.batch([number], K)
    before = losses_by_label(tiny_model.eval(), batch)
    first = batch.documents[0] == batch.documents[0, 0]
    changed = batch._replace(tokens=batch.tokens.copy(), neighbors=batch.neighbors.copy())
    changed.neighbors[0, first] = 7
    changed.tokens[0, : first.sum() * M] = 9
    after = losses_by_label(tiny_model, changed)
    own = {key for key in before if key[1] < first.sum() * M}
    assert own
    assert set(before) - own
    assert all(before[key] != after[key] for key in own)
    assert all(before[key] == after[key] for key in set(before) - own)


def test_an_epoch_reads_every_row_once_and_epochs_differ_in_order(
    prepared: Prepared, settings: FinetuneSettings, tiny_datastore: Datastore
) -> None:
    data = ExampleData(
        *(prepared.folder, settings.examples, DataSettings(sequence_length=128), ["f"], 0),
        held_out=0.2,
        packed=True,
        retrieval=True,
    )
    size = len(data.rows)
    epochs = [[data.row_of(epoch * size + place) for place in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    learned, apart = ({example for row in rows.rows for example in row} for rows in (data.rows, data.held_out))
    assert learned | apart == set(range(len(INSTRUCTIONS)))
    assert not learned & apart
    assert data.origin(0)["examples"] == [f"{settings.examples[0]}:{example + 1}" for example in data.rows.rows[data.row_of(0)]]  # fmt: skip
    dropped = data.batch(range(size), retrieval_dropout=1.0)
    assert not dropped.neighbor_lengths.any()


def test_epochs_of_different_seeds_have_different_orders(prepared: Prepared, settings: FinetuneSettings) -> None:
    orders = set()
    for seed in range(3):
        data = ExampleData(
            *(prepared.folder, settings.examples, DataSettings(sequence_length=128, seed=seed), ["f"], 0),
            held_out=0.0,
            packed=False,
            retrieval=True,
        )
        size = len(data.rows)
        orders |= {tuple(data.row_of(epoch * size + place) for place in range(size)) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("length", [128, 250])
def test_a_row_marks_its_padding(prepared: Prepared, length: int) -> None:
    rows = rows_of(prepared, length, packed=True)
    batch = rows.batch(range(len(rows)), 0)
    real = (np.arange(M) < batch.lengths[..., None]).reshape(len(rows), -1)[:, :length]
    for row, examples in enumerate(rows.rows):
        expected = np.concatenate([
            np.arange(-(-prepared.lengths[example] // M) * M) < prepared.lengths[example] for example in examples
        ])[:length]  # fmt: skip
        assert np.array_equal(real[row, : len(expected)], expected)
        assert not real[row, len(expected) :].any()


def test_too_long_examples_are_cut_and_dropped_if_no_answer_is_left(prepared: Prepared) -> None:
    rows = rows_of(prepared, 32, packed=True)
    numbers = sorted(example for row in rows.rows for example in row)
    assert numbers == np.flatnonzero(prepared.first_labels < 32).tolist()
    assert max(prepared.lengths[numbers]) > 32
    batch = rows.batch(range(len(rows)), K)
    assert batch.tokens.shape == (len(rows), 32)
    assert (batch.labels != IGNORED_LABEL).any(axis=1).all()
    with pytest.raises(InputError, match=r" 13 .* 13 .*answer beyond"):
        rows_of(prepared, 2, packed=True)


def test_preparation_resumes_after_a_kill_without_repeating_finished_shards(
    tmp_path: Path,
    retriever: Retriever,
    settings: FinetuneSettings,
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing, "_SHARD_EXAMPLES", 5)
    searches, real = [0], ChunkSearch.nearest

    def nearest(self: ChunkSearch, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        searches[0] += 1
        if searches[0] == 2:
            raise KeyboardInterrupt
        return real(self, vectors, k)

    monkeypatch.setattr(ChunkSearch, "nearest", nearest)
    datastores = [retriever.datastore.folder]
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, datastores, settings, K)
    folder = prepare(tmp_path, datastores, settings, K)
    assert searches[0] == 4  # one before the kill, the killed one, and the two missing shards
    before = contents(folder)
    assert prepare(tmp_path, datastores, settings, K) == folder
    assert searches[0] == 4
    assert contents(folder) == before
    one, several = (rows_of(each, 128, packed=False).batch(range(13), K) for each in (prepared, Prepared(folder)))
    real_tokens = np.arange(2 * M) < one.neighbor_lengths[..., None]  # type: ignore[index]
    for name in ("tokens", "labels", "neighbor_lengths"):
        assert np.array_equal(getattr(one, name), getattr(several, name))
    assert np.array_equal(one.neighbors[real_tokens], several.neighbors[real_tokens])  # type: ignore[index]


def test_chunks_of_a_question_read_its_passages_and_equal_questions_are_held_out_together(
    tmp_path: Path, retriever: Retriever, tokenizer: Tokenizer
) -> None:
    asked = ["which index is the first?", "层的第一个在哪里？"]
    path = write_lines(tmp_path / "q.jsonl", [{"question": asked[n % 2], "answers": [f"number {n}"]} for n in range(6)])
    settings = FinetuneSettings((path,), format="questions")
    prepared = Prepared(prepare(tmp_path, [retriever.datastore.folder], settings, 3))
    rows = rows_of(prepared, 4 * M, packed=False)
    batch = rows.batch([4, 5], 3)
    for row, (question, language) in enumerate(zip(asked, ("en", "zh"), strict=True)):
        form = QuestionFormat(tokenizer, M, language)
        prompt = form.prompt(question)
        assert np.array_equal(batch.tokens[row, : len(prompt)], prompt)
        assert (batch.labels[row, : len(prompt) - 1] == IGNORED_LABEL).all()
        answer = batch.labels[row, len(prompt) - 1 :]
        assert np.array_equal(answer[answer != IGNORED_LABEL], form.answer(f"number {4 + row}"))
        tokens, lengths = form.neighbors(find_neighbor_passages(retriever, [Question("", question, ())], 3)[0], 3)
        for chunk in range(len(prompt) // M):
            assert batch.neighbor_lengths[row, chunk].tolist() == lengths.tolist()
            real = np.arange(2 * M) < lengths[:, None]
            assert np.array_equal(batch.neighbors[row, chunk][real], tokens[real])
    assert len(set(prepared.places[::2].tolist())) == 1
    assert len(set(prepared.places.tolist())) == 2


def test_a_question_without_answers_is_rejected_with_its_line(tmp_path: Path, tiny_datastore: Datastore) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"question": "a", "answers": ["b"]}, {"question": "c", "answers": []}])
    with pytest.raises(InputError, match=r'q\.jsonl:2 has no "answers"'):
        prepare(tmp_path, [tiny_datastore.folder], FinetuneSettings((path,), format="questions"), 0)
    assert not list((tmp_path / "examples").glob("*/*"))


# --- packing ---------------------------------------------------------------------------------------------------------

PACKED_CHUNK = 4


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 30), st.integers(0, 3))
def test_every_example_is_in_one_row_and_fits(lengths: list[int], row_length: int, seed: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), row_length, PACKED_CHUNK, seed)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    for row in rows:
        at = 0
        for example in row:
            end = at + min(lengths[example], row_length)
            assert end <= row_length
            at = -(-end // PACKED_CHUNK) * PACKED_CHUNK


def test_rows_of_short_examples_are_almost_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 16, 500)
    rows = pack(lengths, 32, PACKED_CHUNK, seed=0)
    chunks = (-(-lengths // PACKED_CHUNK)).sum()
    assert len(rows) == pytest.approx(chunks / 8, rel=0.02)
    assert rows != pack(lengths, 32, PACKED_CHUNK, seed=1)
