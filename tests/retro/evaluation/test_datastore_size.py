"""The gain against the size of the datastore: nested parts, windows, scores, and the line through the changes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.corpus.documents import CorpusSettings, Document
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files
from indexing.retrieval.prefix_neighbors import PrefixNeighbors
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer
from retro.batch.inputs import Inputs
from retro.copying.head import CopyHead
from retro.copying.model import mixed
from retro.evaluation.datastore_size import (
    BANDS,
    SizeCurve,
    Window,
    WindowScores,
    by_match,
    copy_head_of,
    likeliest_right,
    middle_window,
    nested_parts,
    open_parts,
    point_of,
    read_windows,
    score_window,
    without_long_matches,
    write_windows,
)
from retro.model.retro import Retro
from tests.indexing.suffixes.whole_search import documents_of, expected
from tests.retro.evaluation.test_bits_per_byte import FLOAT32

FRACTIONS = (0.1, 0.4, 1.0)


@pytest.fixture(scope="module")
def tokenizer(copying_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(copying_datastore.folder / "tokenizer")


@pytest.fixture(scope="module")
def indexes(copying_datastore: Datastore, tmp_path_factory: pytest.TempPathFactory) -> list[SuffixIndex]:
    """The sorted prefixes of three parts."""
    index, parts = SuffixIndex.open(copying_datastore.folder), nested_parts(copying_datastore.train, FRACTIONS)
    return open_parts(index, parts, tmp_path_factory.mktemp("parts"))


def held_out_window(datastore: Datastore, document: int = 0) -> Window:
    """All tokens of a document of the split `valid`."""
    return Window("held-out", tuple(documents_of(datastore.valid)[document]), 100)


def scores_of(off: list[float], on: list[list[float]], matches: list[list[int]] | None = None) -> WindowScores:
    """Scores of one window from losses of its tokens."""
    nats = np.array([off, *on], np.float32)
    lengths = np.array(matches if matches is not None else np.zeros((len(on), len(off))), np.uint8)
    return WindowScores(nats, nats < 1, lengths)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_are_nested_and_chosen_by_the_hash_of_the_id_alone(copying_datastore: Datastore) -> None:
    train = copying_datastore.train
    small, middle, whole = nested_parts(train, FRACTIONS)
    assert (small.chosen <= middle.chosen).all()
    assert whole.chosen.all()
    ids = [row["id"] for row in train.metadata(range(train.num_documents))]
    assert small.chosen.tolist() == [point_of(name, 0) < 0.1 for name in ids]
    sizes = np.array([len(tokens) for tokens in documents_of(train)])
    assert [part.tokens for part in (small, middle, whole)] == [sizes[p.chosen].sum() for p in (small, middle, whole)]


def test_hashes_are_uniform_and_depend_on_the_seed() -> None:
    points = np.array([point_of(f"folder/file-{number}.c", 0) for number in range(2000)])
    assert np.histogram(points, 10, (0, 1))[0] == pytest.approx(200, abs=60)
    assert point_of("a", 0) != point_of("a", 1)


def test_a_fraction_that_adds_no_document_is_refused(copying_datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"fraction 1e-06 of \d+ documents: it has 0 documents\."):
        nested_parts(copying_datastore.train, (1e-6, 1.0))
    with pytest.raises(InputError, match="as a smaller one"):
        nested_parts(copying_datastore.train, (0.999999, 1.0))


def test_a_part_finds_what_a_search_through_its_documents_finds(
    copying_datastore: Datastore, indexes: list[SuffixIndex]
) -> None:
    documents, random = documents_of(copying_datastore.train), np.random.default_rng(0)
    text = list(held_out_window(copying_datastore).tokens)
    for part, index in zip(nested_parts(copying_datastore.train, FRACTIONS), indexes, strict=True):
        chosen = [tokens for tokens, inside in zip(documents, part.chosen, strict=True) if inside]
        votes = index.votes(np.array(text))
        for place in random.integers(0, len(text), 3).tolist():
            length, _, following = expected(chosen, text[max(0, place - 63) : place + 1])
            assert votes[place, 0] == (length if following else 0)


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_begins_after_the_line_in_the_middle(tokenizer: Tokenizer) -> None:
    lines = [f"line {number} of the text\n" for number in range(40)]
    window = middle_window(Document("a.txt", "".join(lines), {}, 0), tokenizer, 30)
    assert window is not None
    assert window.name == "a.txt"
    assert window.tokens[0] == tokenizer.bos_id
    text = tokenizer.decode(window.tokens[1:])
    assert len(window.tokens) == 31
    assert "".join(lines[20:]).startswith(text.lstrip()) or "".join(lines[21:]).startswith(text.lstrip())
    assert window.bytes == pytest.approx(len(text.encode()), abs=1)


def test_a_text_without_enough_tokens_after_its_middle_has_no_window(tokenizer: Tokenizer) -> None:
    text = "one two three\n" * 10
    many = len(tokenizer.encode(text))
    assert middle_window(Document("a", text, {}, 0), tokenizer, many) is None
    assert middle_window(Document("a", text * 3, {}, 0), tokenizer, many) is not None


def test_the_window_of_a_large_file_is_in_its_middle(tmp_path: Path, tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("indexing.corpus.readers._LARGE_BYTES", 10_000)
    monkeypatch.setattr("indexing.corpus.documents.TEXT_BLOCK", 4000)
    (tmp_path / "large.txt").write_text("".join(f"{number} is a number\n" for number in range(2000)))
    (file,) = list_files(CorpusSettings(paths=(str(tmp_path),)))
    (document,) = read_documents(file, CorpusSettings(), on_problem=lambda problem: None)
    assert document.large is not None
    window = middle_window(document, tokenizer, 40)
    assert window is not None
    assert abs(int(tokenizer.decode(window.tokens[1:]).split()[0]) - 1000) < 60


def test_windows_and_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    windows, about = [Window("a/b.c", (1, 5, 7), 9)], {"leaks": {"x": "y"}}
    write_windows(tmp_path / "windows.json", windows, about)
    assert read_windows(tmp_path / "windows.json") == (windows, about)
    scores = scores_of([1.5, 0.5], [[1.0, 0.25]], [[3, 64]])
    scores.write(tmp_path / "0.npz")
    for stored, written in zip(WindowScores.read(tmp_path / "0.npz"), scores, strict=True):
        assert np.array_equal(stored, written)
        assert stored.dtype == written.dtype


# --- scores -----------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_model_alone_and_with_its_copy_head(
    tiny_model: Retro, copying_datastore: Datastore, indexes: list[SuffixIndex]
) -> None:
    window, head = held_out_window(copying_datastore), copy_head_of(tiny_model, FLOAT32)
    scores = score_window(tiny_model.eval(), head, window, indexes, FLOAT32)
    tokens = torch.tensor([window.tokens])
    alone = tiny_model(Inputs(tokens)).log_softmax(-1)[0, :-1]
    assert scores.nats[0] == pytest.approx(-alone.gather(-1, tokens[0, 1:, None])[:, 0].detach().numpy(), abs=1e-4)
    votes = [torch.from_numpy(index.votes(tokens[0].numpy()))[None] for index in indexes]
    try:
        tiny_model.copy_head = head
        for number, found in enumerate(votes):
            inputs = Inputs(tokens, votes=found, labels=Inputs(tokens).following())
            losses = tiny_model.token_losses(inputs)[0, :-1]
            assert scores.nats[number + 1] == pytest.approx(losses.numpy(), abs=1e-3)
    finally:
        tiny_model.copy_head = None
    assert (np.diff(scores.matches.astype(int), axis=0) >= 0).all()  # a larger part has all matches of a smaller one
    assert scores.nats[3].sum() < scores.nats[0].sum()


def test_neighbors_are_those_of_the_part(
    tiny_model: Retro, copying_datastore: Datastore, indexes: list[SuffixIndex]
) -> None:
    window, m = held_out_window(copying_datastore), copying_datastore.chunk_length
    head = CopyHead(("neighbors", "datastore"), m).eval()
    head.initialize()
    scores = score_window(tiny_model.eval(), head, window, indexes, FLOAT32, k=2)
    tokens = np.array(window.tokens)
    chunks = tokens[: len(tokens) // m * m].reshape(-1, m)
    alone = tiny_model(Inputs(torch.from_numpy(tokens)[None])).log_softmax(-1)
    for number, index in enumerate(indexes):
        neighbors, lengths = (torch.from_numpy(one)[None] for one in PrefixNeighbors(index).find(chunks, 2)[:2])
        inputs = Inputs(torch.from_numpy(tokens)[None], None, neighbors, lengths)
        log_p = mixed(head, alone, inputs._replace(votes=torch.from_numpy(index.votes(tokens))[None]))
        wanted = -log_p[0, :-1].gather(-1, inputs.tokens[0, 1:, None])[:, 0]
        assert scores.nats[number + 1] == pytest.approx(wanted.detach().numpy(), abs=1e-4)


def test_a_fitted_copy_head_is_kept_and_others_get_a_new_one(tiny_model: Retro) -> None:
    head = copy_head_of(tiny_model, FLOAT32)
    assert [name for name, _ in head.named_children()] == ["datastore"]
    try:
        tiny_model.copy_head = own = CopyHead(("context", "datastore"), 16)
        assert copy_head_of(tiny_model, FLOAT32) is own
    finally:
        tiny_model.copy_head = None


def test_a_window_that_the_datastore_has_is_a_copy(
    tiny_model: Retro, copying_datastore: Datastore, indexes: list[SuffixIndex]
) -> None:
    head = copy_head_of(tiny_model, FLOAT32)
    longest = max(documents_of(copying_datastore.train), key=len)
    copied = Window("copied", (longest[0], *longest[20:160]), 100)
    assert score_window(tiny_model, head, copied, indexes, FLOAT32).is_copy
    changed = replace(copied, tokens=(*copied.tokens[:100], longest[1], *copied.tokens[101:]))
    assert not score_window(tiny_model, head, changed, indexes, FLOAT32).is_copy
    assert not score_window(tiny_model, head, held_out_window(copying_datastore), indexes, FLOAT32).is_copy


# --- the curve --------------------------------------------------------------------------------------------------------


def straight_curve(windows: int = 20) -> SizeCurve:
    """Changes of -2% at a million tokens and 3 points more for each decade, equal in all windows."""
    tokens, off = np.array([1e6, 1e7, 1e8]), np.linspace(50, 150, windows)
    return SizeCurve(tokens, off, off * (1 + np.array([-2.0, -5.0, -8.0])[:, None] / 100))


def test_a_straight_line_is_found_and_continued() -> None:
    line = straight_curve().line
    assert line is not None
    assert line.per_decade == pytest.approx((-3, -3, -3))
    assert line.distance == pytest.approx(0, abs=1e-9)
    assert line.at(1e10) == pytest.approx((-14, -14, -14))


def test_a_size_off_the_line_is_its_largest_distance() -> None:
    curve = straight_curve()
    bent = replace(curve, on=curve.on * np.array([1.0, 1.03, 1.0])[:, None])
    line = bent.line
    assert line is not None
    middle = bent.changes[1][0]
    assert line.distance == pytest.approx(abs(middle - line.at(1e7)[0]))
    assert line.distance == pytest.approx(2 / 3 * 2.85, abs=0.01)  # of three points, the middle one has two thirds


def test_intervals_are_of_draws_of_windows() -> None:
    random = np.random.default_rng(1)
    curve = straight_curve(40)
    noisy = replace(curve, on=curve.on * (1 + 0.05 * random.standard_normal(curve.on.shape)))
    assert noisy.line is not None
    value, low, high = noisy.line.per_decade
    assert low < value < high
    assert low < -3 < high
    assert noisy.changes == replace(noisy).changes  # the draws depend on the seed alone
    for (change, least, most), row in zip(noisy.changes, noisy.on, strict=True):
        assert change == pytest.approx(100 * (row.sum() / noisy.off.sum() - 1))
        assert least < change < most


def test_one_window_has_no_interval_and_one_size_no_line() -> None:
    change, low, high = straight_curve(1).changes[0]
    assert change == low == high == pytest.approx(-2)
    curve = straight_curve()
    assert SizeCurve(curve.tokens[:1], curve.off, curve.on[:1]).line is None


def test_tokens_are_divided_by_the_longest_match_before_them() -> None:
    scores = [scores_of([2.0, 2.0, 4.0], [[2.0, 1.0, 1.0]], [[0, 5, 33]]), scores_of([2.0], [[3.0]], [[1]])]
    bands = by_match(scores, 0)
    assert [band.first for band in bands] == list(BANDS)
    assert [band.share for band in bands] == [0.5, 0, 0.25, 0, 0, 0.25]
    assert [band.change for band in bands] == [25, None, -50, None, None, -75]
    assert math.isclose(sum(band.share for band in bands), 1)
    assert without_long_matches(scores) == scores[1:]


def test_the_share_of_likeliest_tokens_counts_tokens() -> None:
    scores = [scores_of([0.5, 2.0, 2.0], [[0.5, 0.5, 2.0]]), scores_of([2.0], [[0.5]])]
    assert likeliest_right(scores).tolist() == [0.25, 0.75]
