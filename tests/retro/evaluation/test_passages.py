"""Shown passages are from around quantiles of the gain, and name the documents of the whole datastore that they copy from."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.bits_per_byte import TokenScores
from retro.evaluation.passages import _parts, chosen_chunks, colored, datastore_runs
from retro.evaluation.token_gains import Passage


def copying_passage(datastore: Datastore, chunk: int, length: int) -> Passage:
    """A passage whose first `length` tokens were copied from a stored chunk, and the others from nowhere."""
    stored = datastore.train.tokens.read(chunk, chunk + 1)[0].astype(np.int64)[:length]
    tokens = np.concatenate([stored, np.flip(stored)])
    none = np.full(len(tokens), -1)
    return Passage(
        chunk=1,
        before=np.array([5]),
        tokens=tokens,
        off=np.full(len(tokens), -6.0),
        on=np.full(len(tokens), -1.0),
        copied=np.zeros(len(tokens), dtype=np.float32),
        neighbors=none,
        positions=none,
        from_datastore=(np.arange(len(tokens)) < length).astype(np.float32),
        neighbor_ids=np.array([0]),
        neighbor_tokens=[datastore.train.with_continuation(np.array([0]))[0][0][:8]],
    )


def test_a_run_from_the_whole_datastore_has_a_place_with_its_tokens(voting_datastore: Datastore) -> None:
    split, index = voting_datastore.train, SuffixIndex.open(voting_datastore.folder)
    passage = copying_passage(voting_datastore, 3, 12)
    (run,) = datastore_runs(passage, index)
    assert (run.start, run.stop) == (0, 12)
    chunk, first = run.place.first
    tokens = split.tokens.read(chunk, chunk + 2).reshape(-1)[first : first + 12]
    assert np.array_equal(tokens, passage.tokens[:12])


def test_a_document_of_the_whole_datastore_is_named_and_shown_with_the_copied_words(
    voting_datastore: Datastore,
) -> None:
    tokenizer, index = Tokenizer.open(voting_datastore.folder / "tokenizer"), SuffixIndex.open(voting_datastore.folder)
    passage = copying_passage(voting_datastore, 3, 12)
    view = colored(passage, "T", tokenizer, RetrievalSet.of(voting_datastore), index)
    (source,) = view.used
    assert not source.is_neighbor
    split = voting_datastore.train
    assert any(source.document == row["id"] for row in split.metadata(range(split.num_documents)))
    copied = "".join(text for text, is_copied in source.parts if is_copied)
    assert copied.strip() == tokenizer.decode(passage.tokens[:12]).strip()
    assert [other.is_neighbor for other in view.unused] == [True]
    assert "".join(piece.text for piece in view.pieces) == tokenizer.decode(passage.tokens)


class Bytes:
    """A tokenizer whose tokens are bytes: a Chinese character has three."""

    def decode_batch(self, rows: Sequence[np.ndarray]) -> list[str]:
        return [bytes(row.tolist()).decode(errors="replace") for row in rows]


@pytest.mark.parametrize("cut", range(4))
def test_characters_that_are_cut_at_the_ends_of_a_passage_are_shown_once_or_not_at_all(cut: int) -> None:
    data = np.frombuffer("文字数据库概念".encode(), np.uint8).astype(np.int64)
    tokens, none = data[6 + cut : -1], np.full(21 - 7 - cut, -1)
    losses, empty = np.zeros(len(tokens)), np.zeros(len(tokens), np.float32)
    passage = Passage(1, data[1 : 6 + cut], tokens, losses, losses, empty, none, none, empty, np.array([]), [])
    view = colored(passage, "T", cast(Tokenizer, Bytes()), cast(RetrievalSet, None))
    before = "字" if cut < 3 else "字数"
    assert (view.before, "".join(piece.text for piece in view.pieces)) == (before, "字数据库概"[len(before) :])


@pytest.mark.parametrize("cut", range(3))
def test_characters_that_are_cut_at_the_ends_of_a_source_are_not_shown(cut: int) -> None:
    data = np.frombuffer("文字数据".encode(), np.uint8)[cut : 12 - cut]
    parts = _parts(cast(Tokenizer, Bytes()), data, [(3 - cut, 6 - cut)])
    assert parts == ([("文", False), ("字", True), ("数据", False)] if cut == 0 else [("字", True), ("数", False)])


def test_a_chunk_is_chosen_around_each_quantile_and_the_documents_differ(voting_datastore: Datastore) -> None:
    split = voting_datastore.valid
    lengths = split.lengths.read(0, split.num_chunks)
    ids = np.flatnonzero(lengths == split.chunk_length)
    documents, first, _ = split.documents_of(ids)
    gains = np.random.default_rng(0).normal(size=len(ids))
    nats = np.full((len(ids), split.chunk_length), 10.0)
    off = TokenScores(ids, documents, nats, np.zeros_like(nats))
    on = TokenScores(ids, documents, nats - gains[:, None], off.bytes)
    tokenizer = Tokenizer.open(voting_datastore.folder / "tokenizer")
    shown = chosen_chunks(off, on, voting_datastore, tokenizer, 2)
    reading = gains[ids > first]
    for chunk, quantile in zip(shown, (0.9, 0.5, 0.1), strict=True):
        assert chunk.better == (reading > gains[ids == chunk.chunk]).sum()
        assert chunk.among == len(reading)
        assert abs(1 - chunk.better / (chunk.among - 1) - quantile) < 0.05 + 1 / chunk.among
    assert len({int(split.documents_of(np.array([each.chunk]))[0][0]) for each in shown}) == 3
